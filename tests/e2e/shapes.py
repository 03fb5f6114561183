# SPDX-License-Identifier: Apache-2.0
"""Compiles whose keys do not tell them apart; run as ``shapes.py pool|hints SIZE``.

``pool``: dynamic shapes give one FX and one AOTAutograd key two sets of guards.
``hints``: the partitioner goes by the size hint, so one AOTAutograd key refers to different FX keys.
Prints one JSON object: the counters and the largest error against eager.
"""

from __future__ import annotations

import json
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 16


def pool(x: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(x, [5, 7])


def hints(x: Tensor) -> Tensor:
    hidden = torch.cos(torch.sin(x @ WEIGHT))
    return (hidden * hidden.mean(0)).exp().mean()


def main(name: str, size: int) -> None:
    torch.manual_seed(0)
    if name == "pool":
        x = torch.rand(1, 64, size, size + 1)
        error = (torch.compile(pool, dynamic=True)(x) - pool(x)).abs().max()
    else:
        x = torch.rand(size, 16, requires_grad=True)
        torch.compile(hints, dynamic=True)(x).backward()
        got, x.grad = x.grad, None
        hints(x).backward()
        error = (got - x.grad).abs().max()
    found = {**counters["inductor"], **counters["aot_autograd"]}
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "autograd_cache_hit", "autograd_cache_miss")
    print(json.dumps({"max_error": float(error), "counters": {n: int(found.get(n, 0)) for n in names}}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
