# SPDX-License-Identifier: Apache-2.0
"""Run in fresh processes by test_torch_kinds.py: makes, or uses, real entries of each kind.

    python torch_program.py make OUT.json BLOB      compiles two functions, with a save after each
    python torch_program.py use OUT.json [BLOB]     compiles them again, BLOB loaded first
    python torch_program.py package OUT.json        compiles one with precompile caching

The functions are products of matrices, for which Inductor calls the library: no C++ is compiled.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402


def first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def second(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w @ x @ w


def error_of(function: Any) -> float:
    torch.manual_seed(0)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    y = torch.compile(function)(x, w)
    y.backward(torch.ones_like(y))
    return float((y - function(x, w)).abs().max())


def autotune() -> Any:
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = str(Path(cache_dir()) / "ab" / "cabc.py")
    cache = AutotuneCache.create({"autotune_local_cache": True, "is_fbcode": False}, name, "hash-of-configs")
    assert cache is not None
    return cache


def choices() -> list[Any]:
    import triton

    return [triton.Config({"XBLOCK": n}, num_warps=4, num_stages=1) for n in (64, 128)]


def make(blob: Path) -> dict[str, Any]:
    from torch._inductor.codecache import PersistentCache

    autotune().save(choices()[1], 17_000_000)
    PersistentCache().update_local_cache(
        {"mm": {"inputs": {"highest": {"choice": 0.1 + 0.2, "bad": float("inf")}}}}
    )
    errors = []
    for function in (first, second):
        errors.append(error_of(function))
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        torch._dynamo.reset()
    blob.write_bytes(saved[0])
    return {"errors": errors, "info": saved[1].artifacts}


def use(blob: Path | None) -> dict[str, Any]:
    from torch._inductor.codecache import PersistentCache

    info = torch.compiler.load_cache_artifacts(blob.read_bytes()) if blob else None
    best = autotune().read_best({}, choices())
    errors = [error_of(first), error_of(second)]
    return {
        "errors": errors,
        "info": info.artifacts if info else None,
        "best": best.kwargs if best else None,
        "gemm": PersistentCache().get_local_cache(),
    }


def package() -> dict[str, Any]:
    import torch._dynamo.config

    with torch._dynamo.config.patch(caching_precompile=True):
        errors = [error_of(first)]
        torch.compiler.save_cache_artifacts()
    return {"errors": errors}


def main() -> None:
    mode, out, *rest = sys.argv[1:]
    blob = Path(rest[0]) if rest else None
    if mode == "make":
        assert blob is not None
        told = make(blob)
    else:
        told = use(blob) if mode == "use" else package()
    told["counters"] = {name: dict(values) for name, values in counters.items()}
    Path(out).write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main()
