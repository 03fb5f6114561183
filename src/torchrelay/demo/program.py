# SPDX-License-Identifier: Apache-2.0
"""One process of the demonstration: a small transformer, compiled and run once, forward and backward.

Run as ``python -m torchrelay.demo.program``. What is timed is from before the cache is filled to the
first result; importing torch is not, it is the same for all. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from torchrelay.demo import WORKLOAD
from torchrelay.options import PushOptions
from torchrelay.relay import Relay

LAYERS = 2
WIDTH = 256


class Block(nn.Module):
    """A transformer block with plain attention, so that Inductor writes its own kernels."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (batch, length, width), and so is what comes back."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attention = torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


def main() -> int:
    """Fill the cache, compile, run, push, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load-mega", type=Path)
    parser.add_argument("--save-mega", type=Path)
    parser.add_argument("--pull")
    parser.add_argument("--push")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block(WIDTH) for _ in range(LAYERS)]), torch.randn(2, 32, WIDTH)
    report: dict[str, Any] = {}
    start = time.perf_counter()
    if arguments.load_mega:
        torch.compiler.load_cache_artifacts(arguments.load_mega.read_bytes())
    if arguments.pull:
        report["pull"] = msgspec.to_builtins(Relay(arguments.pull, workload=WORKLOAD, strict=True).pull())
    output = torch.compile(model)(x)
    output.square().mean().backward()
    report["seconds"] = time.perf_counter() - start
    report |= {"counters": _counters(), "result": _hash(model, output)}
    if arguments.save_mega:
        saved = torch.compiler.save_cache_artifacts()
        arguments.save_mega.write_bytes(saved[0] if saved else b"")
    if arguments.push:
        relay = Relay(arguments.push, workload=WORKLOAD, strict=True)
        report["push"] = msgspec.to_builtins(relay.push(PushOptions()))
    print(json.dumps(report))
    return 0


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    found = {**counters["inductor"], **counters["aot_autograd"]}
    named = ("fxgraph_cache", "autograd_cache")
    return {
        f"{what}s" if what == "hit" else "misses": sum(int(found.get(f"{name}_{what}", 0)) for name in named)
        for what in ("hit", "miss")
    }


def _hash(model: nn.Module, output: Tensor) -> str:
    tensors = [output, *(p.grad for p in model.parameters() if p.grad is not None)]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
