# SPDX-License-Identifier: Apache-2.0
"""Real Triton kernels, compiled for a GPU that is not there: from one cache directory into another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cache_samples import contents, entries_in, opened
from torchrelay.caches.base import Roots
from torchrelay.caches.triton import TritonKind

pytest.importorskip("triton")
pytestmark = pytest.mark.torch
KIND = TritonKind()

PROGRAM = """
import hashlib, json, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
kernel = triton.compile(ASTSource(add_kernel, signature, {"BLOCK": 128}), target=GPUTarget("cuda", 90, 32))
cubin = hashlib.sha256(kernel.asm["cubin"]).hexdigest()
print(json.dumps({"hit": hits, "cubin": cubin}))
"""


def compiled(tmp_path: Path, cache: Path) -> dict[str, object]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    env = {**inherited, "TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("old_place", ["gone", "holds other bytes"])
def test_the_second_process_hits_and_reads_only_the_new_place(tmp_path: Path, old_place: str) -> None:
    a, b = tmp_path / "a" / "u1" / "cache", tmp_path / "b" / "u2-with-a-longer-name" / "cache"
    cold = compiled(tmp_path, a)
    assert cold["hit"] == [False]
    (entry,) = entries_in(KIND, Roots(a, a))
    assert str(a).encode() not in entry.plain
    verified = opened(entry)
    KIND.check(verified.statement)
    KIND.install(verified, Roots(b, b))
    if old_place == "gone":
        shutil.rmtree(tmp_path / "a")
    else:
        for path in a.rglob("add_kernel.*"):
            path.write_bytes(b"poison")
    before = {path: path.stat().st_mtime_ns for path in sorted(b.rglob("*"))}
    warm = compiled(tmp_path, b)
    assert warm == {"hit": [True], "cubin": cold["cubin"]}
    assert {path: path.stat().st_mtime_ns for path in sorted(b.rglob("*"))} == before
    assert entries_in(KIND, Roots(b, b)) == [entry]


def test_equal_kernels_from_two_places_are_equal_entries(tmp_path: Path) -> None:
    entries = []
    for name in ("a", "b-with-a-longer-name"):
        compiled(tmp_path, tmp_path / name)
        entries += entries_in(KIND, Roots(tmp_path / name, tmp_path / name))
    assert entries[0] == entries[1]
    assert contents(tmp_path / "a") != contents(tmp_path / "b-with-a-longer-name")
