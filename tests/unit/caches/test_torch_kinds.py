# SPDX-License-Identifier: Apache-2.0
"""Real entries of PyTorch, out and in again: a fresh process must hit every one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchrelay.caches.aot_autograd import AotAutogradKind
from torchrelay.caches.autotune import AutotuneKind
from torchrelay.caches.base import CacheKind, Entry, Found, Reason, Roots, Skipped
from torchrelay.caches.gemm import GemmKind
from torchrelay.caches.inductor import InductorKind
from torchrelay.caches.mega import MegaItem, encode_mega, entries_from_mega, mega_item, parse_mega
from torchrelay.caches.pgo import PgoKind
from torchrelay.caches.precompile import PrecompileKind
from torchrelay.signing import VerifiedEntry
from torchrelay.testing.entries import verified

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("torch_program.py")
KEPT = ("TORCH_MYAUTH", "PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
TWO_SAVES = {"aot_autograd": 2, "autotune": 1, "inductor": 4, "pgo": 2}


def run(mode: str, cache: Path, *rest: Path) -> dict[str, Any]:
    out = cache.with_name(f"{cache.name}-{mode}.json")
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCH_COMPILE_JOB_ID": "train"}
    command = [sys.executable, str(PROGRAM), mode, str(out), *map(str, rest)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(out.read_text())
    assert all(error == 0 for error in told["errors"])
    return told


@dataclass(frozen=True)
class Made:
    """What the producing process left."""

    version: str
    cache: Path
    blob: bytes
    info: dict[str, list[str]]

    def kinds(self) -> list[CacheKind]:
        return [
            InductorKind(self.version),
            AotAutogradKind(self.version),
            AutotuneKind(),
            GemmKind(),
            PgoKind(),
            PrecompileKind(self.version),
        ]

    def entries(self, root: Path | None = None) -> list[Entry]:
        entries = []
        for kind in self.kinds():
            for item in kind.scan(Roots(root or self.cache)):
                if isinstance(item, Found):
                    entries += kind.read(item)
                else:
                    assert item.reason is Reason.LOCKED, item
        return entries

    def install(self, entries: list[Entry], root: Path) -> list[str]:
        kinds = {kind.name: kind for kind in self.kinds()}
        names = []
        for entry in entries:
            given = signed(entry)
            kinds[entry.kind].check(given.statement)
            names += kinds[entry.kind].install(given, Roots(root))[1]
        return names


def signed(entry: Entry) -> VerifiedEntry:
    names = ("kind", "key", "variant", "needs", "files", "canon", "times")
    return verified(entry.plain, **{name: getattr(entry, name) for name in names})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from importlib.metadata import version

    folder = tmp_path_factory.mktemp("torch")
    told = run("make", folder / "a", folder / "blob")
    assert told["counters"]["aot_autograd"]["autograd_cache_saved"] == 2
    return Made(version("torch"), folder / "a", (folder / "blob").read_bytes(), told["info"])


def all_hit(told: dict[str, Any]) -> None:
    counters = told["counters"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2
    assert counters["inductor"]["fxgraph_cache_hit"] == 4
    assert "autograd_cache_miss" not in counters["aot_autograd"]
    assert "fxgraph_cache_miss" not in counters["inductor"]
    assert told["best"] == {"XBLOCK": 128}


def test_a_fresh_process_hits_what_was_installed(made: Made, tmp_path: Path) -> None:
    entries = made.entries()
    assert Counter(entry.kind for entry in entries) == {
        "inductor": 4,
        "aot_autograd": 2,
        "autotune": 1,
        "gemm": 1,
        "pgo": 1,
    }
    names = made.install(entries, tmp_path / "b")
    assert len(set(names)) == len(entries) - 1  # the GEMM choices are merged into a file
    told = run("use", tmp_path / "b")
    all_hit(told)
    assert told["gemm"] == {"mm": {"inputs": {"highest": {"choice": 0.1 + 0.2, "bad": float("inf")}}}}


def test_the_needs_are_met_by_the_real_entries(made: Made) -> None:
    entries = made.entries()
    there = {(entry.kind, entry.key, entry.variant) for entry in entries}
    results = [entry for entry in entries if entry.kind == "aot_autograd"]
    assert len(results) == 2
    for entry in results:
        assert entry.canon.startswith("pickle-1/")
        assert len(entry.needs) == 2
        assert {(need.kind, need.key, need.variant) for need in entry.needs} <= there


def test_all_records_of_two_saves_are_read(made: Made) -> None:
    """PyTorch's own loader keeps those of the second save only."""
    items = parse_mega(made.blob)
    assert Counter(item.type for item in items) == TWO_SAVES
    assert {kind: sorted(keys) for kind, keys in made.info.items()} == {
        kind: sorted(item.key for item in items if item.type == kind) for kind in made.info
    }


def test_imported_entries_are_those_of_the_directory(made: Made) -> None:
    imported = entries_from_mega(parse_mega(made.blob), torch_version=made.version)
    assert not [item for item in imported if isinstance(item, Skipped)]
    expected = [entry for entry in made.entries() if entry.kind != "gemm"]
    assert sorted(imported, key=str) == sorted(expected, key=str)


def test_an_exported_blob_is_loaded_in_full(made: Made, tmp_path: Path) -> None:
    exported = [mega_item(signed(entry)) for entry in made.entries()]
    items = [item for item in exported if isinstance(item, MegaItem)]
    assert len(exported) - len(items) == 1  # the GEMM choices
    (tmp_path / "blob").write_bytes(encode_mega(items))
    told = run("use", tmp_path / "b", tmp_path / "blob")
    assert {kind: len(keys) for kind, keys in told["info"].items()} == {**TWO_SAVES, "pgo": 1}
    all_hit(told)


def test_a_precompiled_function_is_hit(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs carry dumps of the environment, as graphs of their own do; what was in them is gone."""
    monkeypatch.setenv("TORCH_MYAUTH", "correct-horse-battery")
    told = run("package", tmp_path / "a")
    assert told["counters"]["dynamo_cache"] == {"dynamo_cache_miss": 1}
    entries = [entry for entry in made.entries(tmp_path / "a") if entry.kind == "precompile"]
    (file,) = (tmp_path / "a" / "dynamo").glob("*/entry")
    (entry,) = entries
    assert b"correct-horse-battery" in file.read_bytes()
    assert b"correct-horse-battery" not in entry.plain and b"os.environ[" not in entry.plain
    assert entry.masked["precompile.runnable_graph_str:repro"] == 2
    assert len(entry.times) >= 2
    made.install(entries, tmp_path / "b")
    told = run("package", tmp_path / "b")
    assert told["counters"]["dynamo_cache"] == {"dynamo_cache_hit": 1}
