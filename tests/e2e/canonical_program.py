# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_canonical_real.py`` in processes of its own: compile two models, or load them again.

``python canonical_program.py ROOT`` compiles a small MLP under dynamic shapes and a transformer
block under static ones, forward and backward, once with AOTAutograd entries that refer to FX
entries and once with bundled ones. Entries found in ``ROOT/unbundled`` and ``ROOT/bundled`` are
put into the cache first; what the cache holds afterwards is left there. It prints one JSON object:
for each of the four runs the cache counters and the largest error against eager results.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

ENTRY_FOLDERS = ("fxgraph", "aotautograd")


class Mlp(nn.Module):
    """A guard beyond the trivial ones comes from the comparison of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.relu(self.first(x)))
        return y * 2 if x.shape[0] > 5 else y


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / self.width**0.5, -1)
        return x + torch.nn.functional.gelu(self.out(weights @ v))


def step(function: nn.Module, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model: nn.Module, x: torch.Tensor, *, dynamic: bool) -> dict[str, object]:
    torch._dynamo.reset()
    counters.clear()
    eager = step(model, model, x)
    compiled = step(torch.compile(model, dynamic=dynamic), model, x)
    error = max(float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True))
    found = {
        f"{group}.{name}": n for group in ("inductor", "aot_autograd") for name, n in counters[group].items()
    }
    return {"error": error, "counters": {k: v for k, v in found.items() if "cache" in k}}


def run() -> dict[str, object]:
    torch.manual_seed(0)
    mlp, block = Mlp(), Block()
    x, tokens = torch.randn(8, 16), torch.randn(2, 8, 32)
    return {"mlp": compare(mlp, x, dynamic=True), "block": compare(block, tokens, dynamic=False)}


def with_entries(root: Path, cache: Path, name: str) -> dict[str, object]:
    """Run with the entries of ``root/name`` in the cache, and move what is there afterwards back."""
    for folder in ENTRY_FOLDERS:
        if (root / name / folder).exists():
            shutil.move(root / name / folder, cache / folder)
    with torch._functorch.config.patch(bundled_autograd_cache=name == "bundled"):
        result = run()
    (root / name).mkdir(parents=True, exist_ok=True)
    for folder in ENTRY_FOLDERS:
        if (cache / folder).exists():
            shutil.move(cache / folder, root / name / folder)
    return result


def main() -> None:
    root, cache = Path(sys.argv[1]), Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    print(json.dumps({name: with_entries(root, cache, name) for name in ("unbundled", "bundled")}))


if __name__ == "__main__":
    main()
