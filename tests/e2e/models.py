# SPDX-License-Identifier: Apache-2.0
"""Small deterministic models for the end-to-end tests; one process compiles one model once.

Run as a script. It prints one JSON object: PyTorch's own cache counters, the seconds to the first
result, the largest error against eager, and a hash of the result. The tests start it in fresh
processes with other directories, homes and instruction sets.

    python models.py --model tx4 --out result.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

MODELS = ("mlp", "tx1", "tx2", "tx4", "tx5")


class Block(nn.Module):
    """A transformer block with plain attention, so that the CPU backend writes its own kernels."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attention = torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The model and its input, the same in every process."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(8, 64)
    layers = int(name.removeprefix("tx"))
    return nn.Sequential(*[Block(256) for _ in range(layers)]), torch.randn(2, 32, 256)


def results(model: Any, x: Tensor, *, backward: bool) -> list[Tensor]:
    """The output and, with ``backward``, every gradient, copied out of the model."""
    for parameter in model.parameters():
        parameter.grad = None
    if not backward:
        with torch.no_grad():
            return [model(x).detach().clone()]
    output = model(x)
    output.square().mean().backward()
    return [output.detach().clone(), *(p.grad.detach().clone() for p in model.parameters())]


def largest_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest absolute difference; infinite if any value is not a number."""
    errors = torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)])
    return float(errors.nan_to_num(nan=float("inf")).max())


def counters() -> dict[str, int]:
    """PyTorch's own cache counters of this process."""
    from torch._dynamo.utils import counters as dynamo

    inductor, aot = dynamo["inductor"], dynamo["aot_autograd"]
    named = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    found = {name: int(inductor[name]) for name in named}
    named = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass", "autograd_cache_saved")
    return found | {name: int(aot[name]) for name in named}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile and run once; compare with eager."""
    model, x = build(arguments.model)
    expected = results(model, x, backward=not arguments.forward_only)
    loaded = 0.0
    if arguments.load_mega is not None:
        start = time.perf_counter()
        torch.compiler.load_cache_artifacts(arguments.load_mega.read_bytes())
        loaded = time.perf_counter() - start
    if arguments.skip_headers:
        from torchrelay.caches.settings import skip_needless_headers

        if not skip_needless_headers():
            raise SystemExit("this torch loads kernels in a way that torchrelay does not know")
    compiled = torch.compile(model, dynamic=arguments.dynamic)
    start = time.perf_counter()
    got = results(compiled, x, backward=not arguments.forward_only)
    first = time.perf_counter() - start
    if arguments.save_mega is not None:
        saved = torch.compiler.save_cache_artifacts()
        arguments.save_mega.write_bytes(b"" if saved is None else saved[0])
    return {
        "model": arguments.model,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_seconds": round(loaded, 4),
        "first_seconds": round(first, 4),
        "max_error": largest_error(got, expected),
        "result_sha256": hashlib.sha256(b"".join(t.numpy().tobytes() for t in got)).hexdigest(),
        "counters": counters(),
    }


def main() -> int:
    """Parse, run, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--forward-only", action="store_true", help="no backward pass")
    parser.add_argument("--dynamic", action="store_true", default=None, help="compile with dynamic shapes")
    parser.add_argument("--skip-headers", action="store_true", help="precompile no header without need")
    parser.add_argument("--out", type=Path, help="write the JSON object here too")
    parser.add_argument("--save-mega", type=Path, help="save a Mega-Cache blob here at the end")
    parser.add_argument("--load-mega", type=Path, help="load this Mega-Cache blob before compiling")
    arguments = parser.parse_args()
    text = json.dumps(run(arguments))
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
