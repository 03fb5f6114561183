# SPDX-License-Identifier: Apache-2.0
"""Stamps for pushes, and when a process began."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from torchrelay import directories
from torchrelay.caches.base import Reason, Roots, Skipped
from torchrelay.caches.index import Index
from torchrelay.caches.local import LocalView
from torchrelay.caches.stamp import Stamp, read_stamp, write_stamp
from torchrelay.environment import FACETS, Environment
from torchrelay.errors import DirectoryError, StampError
from torchrelay.options import PushOptions

VALUES = {"equal": "same", "at_least": "2.36", "superset": ("avx",)}
FACET_VALUES = {name: VALUES[facet.comparison] for name, facet in FACETS.items()}
HERE = Environment(1, FACET_VALUES, {})
ELSEWHERE = Environment(1, {**FACET_VALUES, "torch": "other"}, {})


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "this_environment", lambda: HERE)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    return cache


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))


def stamp(root: Path, *, in_process: bool = False, **options: bool) -> Stamp:
    return directories.stamp_for_push(Roots(root, None, {}), PushOptions(**options), in_process=in_process)


def test_the_start_is_that_of_the_process_and_not_of_the_question():
    code = (
        "import time; began = time.time_ns(); from torchrelay.directories import process_start_ns as p\n"
        "time.sleep(0.5); print(began, p(), p())"
    )
    before = time.time_ns()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    began, first, second = map(int, done.stdout.split())
    assert before < first <= began + 20_000_000
    assert abs(first - second) < 5_000_000


@pytest.mark.parametrize("text", ["", "1 (x) S", f"1 (a b) c) S {' 0' * 30}", f"1 (x) S {' x' * 30}"])
def test_a_system_that_does_not_tell_is_refused_and_nothing_is_stamped(root, torch, monkeypatch, text):
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: text)
    with pytest.raises(StampError, match="does not tell when a process began") as caught:
        stamp(root, in_process=True)
    assert "assume_environment" in caught.value.remedy
    assert read_stamp(root) is None


def test_a_missing_proc_is_refused(root, monkeypatch):
    def missing(self, *args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    with pytest.raises(StampError):
        directories.process_start_ns()


def test_a_process_vouches_only_for_what_it_made_since_it_began(root, torch):
    held = stamp(root, in_process=True)
    # Two clocks are read one after the other, and the process may be put aside in between.
    assert abs(held.since_ns - directories.process_start_ns()) < 10**9
    assert read_stamp(root) == held


def test_without_torch_in_the_process_nobody_vouches(root, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(StampError, match="is not stamped"):
        stamp(root, in_process=True)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("in_process", [False, True])
def test_who_vouches_for_all_vouches_for_all(root, torch, in_process):
    assert stamp(root, in_process=in_process, assume_environment=True) == Stamp(HERE, 0)
    assert read_stamp(root) == Stamp(HERE, 0)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_dry_run_writes_no_stamp_and_no_prefixes(root, torch, in_process):
    planned = stamp(root, in_process=in_process, assume_environment=True, dry_run=True)
    assert planned == Stamp(HERE, 0)
    assert list(root.iterdir()) == []
    stamp(root, in_process=True, dry_run=True)
    assert list(root.iterdir()) == []


def test_what_was_stamped_otherwise_is_not_pushed_by_a_process_that_compiled(root, torch):
    write_stamp(root, Stamp(ELSEWHERE, 0))
    with pytest.raises(StampError, match="torch"):
        stamp(root, in_process=True)
    assert stamp(root) == Stamp(ELSEWHERE, 0)


def test_a_local_directory_is_not_the_stores_fault(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(DirectoryError) as caught:
        directories.check_all(Roots(missing, None, {}))
    assert caught.value.subject == str(missing)
    file = tmp_path / "file"
    file.write_text("x")
    for roots in (Roots(file, None, {}), Roots(tmp_path, None, {"vllm": file})):
        with pytest.raises(DirectoryError):
            directories.check_all(roots)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look anywhere")
def test_a_directory_that_may_not_be_read_is_told(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with pytest.raises(DirectoryError):
        directories.check_all(Roots(closed / "x", None, {}))


@pytest.mark.parametrize(("since", "refused"), [(0, True), (10**19, False)])
def test_only_a_kernel_that_would_be_pushed_disproves_the_environment(root, since, refused):
    (root / "k.main.so").write_bytes(b"x")
    view = LocalView({}, Index.none())
    view.skipped = [Skipped("k.main.so", Reason.OTHER_VECTORS, "compiled for avx2")]
    environment = Environment(1, {**FACET_VALUES, "vector_isa": ("avx512",)}, {})
    if not refused:
        directories.require_own_vectors(view, Roots(root, None, {}), environment, since)
        return
    with pytest.raises(StampError, match=r"k\.main\.so was compiled for avx2.*compiles for avx512"):
        directories.require_own_vectors(view, Roots(root, None, {}), environment, since)
