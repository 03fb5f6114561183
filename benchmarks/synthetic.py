# SPDX-License-Identifier: Apache-2.0
"""Synthetic cache entries and a machine to have made them, for benchmarks without torch."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import canonical_entries
from cache_samples import elf, write
from torchrelay.caches.pickled import content_name
from torchrelay.environment import ABSENT, FACETS, FORMAT, Environment

_KNOWN: dict[str, str | int | tuple[str, ...]] = {
    "torch": f"{canonical_entries.VERSION} 0123456789abcdef",
    "python": "cpython-3.11",
    "machine": os.uname().machine,
    "cpu_isa": "AVX2",
    "vector_isa": "avx2",
    "glibc": "2.36",
    "libstdcxx": "3.4.30",
    "cpu_flags": ("avx", "avx2", "fma"),
    "openmp": "libgomp",
}
ENVIRONMENT = Environment(
    FORMAT, {name: _KNOWN.get(name, ABSENT) for name, facet in FACETS.items() if not facet.optional}, {}
)
"""The machine that every entry is made on and pulled for; nothing is asked of the real one."""

_LINES = (
    "    buf{a} = empty_strided_cpu(({b}, {c}), ({c}, 1), torch.float32)",
    "    cpp_fused_native_layer_norm_{a}(buf{b}, primals_{a}, primals_{c}, buf{a})",
    "    extern_kernels.addmm(primals_{a}, buf{b}, reinterpret_tensor(primals_{c}, ({b}, {a}), (1, {b})))",
    "    assert_size_stride(primals_{a}, ({b}, {c}), ({c}, 1), 'torch.ops.aten.mm.default')",
    "            auto tmp{a} = at::vec::Vectorized<float>::loadu(in_ptr{b} + static_cast<int64_t>(x{c}));",
    "    del buf{a}, primals_{b}",
    "    return (buf{a}, primals_{b}, reinterpret_tensor(buf{c}, ({a}, {b}), ({b}, 1), 0), )",
)


def key(letter: str, number: int) -> str:
    """A key of PyTorch's form, different for each number."""
    digest = hashlib.sha256(f"{letter}{number}".encode()).digest()
    return letter + base64.b32encode(digest).decode().lower()[:51]


def text(number: int, size: int) -> str:
    """Like generated code: lines of few forms, with names and sizes of their own."""
    choose = random.Random(number)
    parts: list[str] = []
    left = size
    while left > 0:
        names = {"a": choose.randrange(400), "b": choose.randrange(4096), "c": choose.randrange(64)}
        parts.append(choose.choice(_LINES).format(**names))
        left -= len(parts[-1]) + 1
    return "\n".join(parts)[:size]


def binary(number: int, size: int) -> bytes:
    """Like machine code, as far as a compressor can see."""
    choose = random.Random(number)
    words = [choose.randbytes(6) for _ in range(160)]
    return b"".join(choose.choice(words) for _ in range(size // 6 + 1))[:size]


def write_inductor(cache: Path, count: int, size: int) -> None:
    """``count`` FX graphs as PyTorch pickles them, of about ``size`` bytes each."""
    for number in range(count):
        code = text(number, max(64, size - 1500))
        data = canonical_entries.dumps(canonical_entries.graph(source_code=code, guards_expr=None))
        name = key("f", number)
        write(cache / "fxgraph" / name[1:3] / name / content_name(data), data)


def write_cpp(cache: Path, count: int, size: int) -> None:
    """``count`` C++ kernels of ``size`` bytes each: half source, half binary."""
    for number in range(count):
        name = key("c", number)
        folder = cache / name[1:3]
        write(folder / f"{name}.main.cpp", text(number, size // 2).encode())
        write(folder / f"{name}.main.so", elf(binary(number, max(64, size - size // 2 - 312))))


WRITERS: dict[str, Callable[[Path, int, int], None]] = {"inductor": write_inductor, "cpp": write_cpp}
