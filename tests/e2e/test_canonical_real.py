# SPDX-License-Identifier: Apache-2.0
"""The canonical form of entries that PyTorch itself wrote, in processes that share nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickletools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchrelay.canonical import Canonical, canonicalise, restore, variant
from torchrelay.digest import digest_of
from torchrelay.errors import FormatError, SecretError

pytestmark = pytest.mark.torch

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
VERSION = version("torch")  # asked of its metadata: importing it takes seconds
PROGRAM = Path(__file__).with_name("canonical_program.py")
PASSWORD = "hunter2-of-" + "the-redis"


class Process(NamedTuple):
    """What one process was and left behind."""

    root: Path
    cache: Path
    report: dict[str, Any]


class Entry(NamedTuple):
    """One entry file: how it was made, its kind, key, bytes."""

    run: str
    kind: str
    key: str
    data: bytes


def run(home: Path, cache: Path, *, user: str, seed: str, variable: str) -> Process:
    """Compile in a fresh process that differs from others in all that must not matter."""
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "USER": user,
        "PYTHONHASHSEED": seed,
        "TZ": {"1": "UTC", "2": "Asia/Tokyo"}.get(seed, "America/Lima"),
        "OMP_NUM_THREADS": "1",
        "TORCH_TRACE": str(home / "trace"),  # from 2.14 on repro dumps are only made for a trace
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        variable: f"redis://:{PASSWORD}@cache.example:6379/0",
    }
    command = [sys.executable, str(PROGRAM), str(home / "entries")]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return Process(home / "entries", cache, json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    root = tmp_path_factory.mktemp("canonical")
    yield [
        run(root / "a", root / "c", user="alice", seed="1", variable="TORCHINDUCTOR_REDIS_URL"),
        run(
            root / "b" / "a_longer_home",
            root / "another_cache_directory",
            user="bob",
            seed="2",
            variable="TRITON_X",
        ),
    ]
    shutil.rmtree(root)


def entries_of(process: Process) -> list[Entry]:
    found = []
    for path in sorted(process.root.rglob("*")):
        if path.is_file():
            name, folder = path.relative_to(process.root).parts[:2]
            kind = {"fxgraph": "inductor", "aotautograd": "aot_autograd"}[folder]
            found.append(Entry(name, kind, path.parent.name, path.read_bytes()))
    return found


def forms_of(process: Process) -> dict[tuple[str, str, str], Canonical]:
    return {
        (entry.run, entry.kind, entry.key): canonicalise(entry.kind, entry.data, torch_version=VERSION)
        for entry in entries_of(process)
    }


def test_every_run_was_a_compile_with_right_results(processes: list[Process]) -> None:
    for process in processes:
        for models in process.report.values():
            for result in models.values():
                assert result["error"] < 1e-4
                assert result["counters"]["aot_autograd.autograd_cache_miss"] == 1
        kinds = sorted((entry.run, entry.kind) for entry in entries_of(process))
        expected = [("bundled", "aot_autograd")] * 2 + [("unbundled", "aot_autograd")] * 2
        assert kinds == expected + [("unbundled", "inductor")] * 4


def test_same_compile_has_the_same_bytes(processes: list[Process]) -> None:
    first, second = (forms_of(process) for process in processes)
    assert first.keys() == second.keys()
    raw = [{(e.run, e.kind, e.key): e.data for e in entries_of(process)} for process in processes]
    for name, form in first.items():
        assert raw[0][name] != raw[1][name], "as PyTorch wrote them they differ"
        assert form.data == second[name].data, name
        assert form.canon == "pickle-1/torch-" + ".".join(VERSION.split(".")[:2])
        assert form.facts == second[name].facts
        assert len(form.times) == len(second[name].times) > 0


def test_nothing_of_the_machine_is_left(processes: list[Process]) -> None:
    for process in processes:
        for name, form in forms_of(process).items():
            for leak in (PASSWORD, str(process.cache), str(process.root.parent), "os.environ[", " at 0x7"):
                assert leak.encode() not in form.data, (name, leak)
        dumps = [form.masked for name, form in forms_of(process).items() if name[1] == "inductor"]
        assert all(masked["inductor.runnable_graph_str:url-password"] == 1 for masked in dumps)
        assert all(masked["inductor.runnable_graph_str:environment"] >= 3 for masked in dumps)


def test_laws_hold_for_real_entries(processes: list[Process]) -> None:
    for entry in entries_of(processes[0]):
        form = canonicalise(entry.kind, entry.data, torch_version=VERSION)
        assert canonicalise(entry.kind, form.data, torch_version=VERSION).data == form.data
        restored = restore(form.data, canon=form.canon, times=form.times)
        again = canonicalise(entry.kind, restored, torch_version=VERSION)
        assert (again.data, again.times) == (form.data, form.times)


def test_outermost_guard_all_dumps_and_both_times_of_a_bundled_entry_are_found(
    processes: list[Process],
) -> None:
    bundled = [entry for entry in entries_of(processes[0]) if entry.run == "bundled"]
    forms = [canonicalise(entry.kind, entry.data, torch_version=VERSION) for entry in bundled]
    assert any(form.facts.guards_expr for form in forms), "dynamic shapes give a guard"
    for entry, form in zip(bundled, forms, strict=True):
        names = [arg for code, arg, _ in pickletools.genops(entry.data) if code.name == "SHORT_BINUNICODE"]
        assert names.count("runnable_graph_str") == 1, "the second graph's names are references"
        assert form.masked["aot_autograd.runnable_graph_str:repro"] == 2
        assert len(form.times) == 2
        assert form.times[0] > 0, "the forward time is that of the whole entry"
        assert [graph.guard for graph in form.facts.bundled] == [None, None], "nested graphs have none"
        assert form.facts.device_types == ("cpu",)
        assert form.facts.has_cpp


def test_needs_of_an_unbundled_entry_are_its_fx_entries(processes: list[Process]) -> None:
    entries = entries_of(processes[0])
    graphs = {entry.key: entry for entry in entries if entry.kind == "inductor"}
    needed = set()
    for entry in entries:
        if (entry.run, entry.kind) == ("unbundled", "aot_autograd"):
            facts = canonicalise(entry.kind, entry.data, torch_version=VERSION).facts
            assert facts.forward is not None
            assert facts.backward is not None
            for ref in (facts.forward, facts.backward):
                graph = graphs[ref.key]
                found = canonicalise(graph.kind, graph.data, torch_version=VERSION).facts
                assert found.guards_expr == ref.guard
                needed.add(ref.key)
            assert variant(entry.kind, facts, digest_of(entry.data)) != digest_of(entry.data)
    assert needed == set(graphs)


def test_unknown_version_is_raw_and_its_secret_is_named(processes: list[Process]) -> None:
    entry = next(entry for entry in entries_of(processes[0]) if entry.kind == "inductor")
    with pytest.raises(SecretError) as caught:
        canonicalise(entry.kind, entry.data, torch_version="9.9")
    assert (caught.value.field, caught.value.secret_kind) == (
        "CompiledFxGraph.runnable_graph_str",
        "url-password",
    )
    # Nor do other values leave in a field that is not known to hold them.
    plain = entry.data.replace(f":{PASSWORD}@".encode(), b"x" * (len(PASSWORD) + 2))
    with pytest.raises(SecretError) as caught:
        canonicalise(entry.kind, plain, torch_version="9.9")
    assert caught.value.secret_kind == "environment-dump"
    clean = plain.replace(b"os.environ[", b"os_environ[")
    assert canonicalise(entry.kind, clean, torch_version="9.9").data == clean


def test_broken_real_entries_are_refused_or_taken(processes: list[Process]) -> None:
    for entry in entries_of(processes[0])[::3]:
        step = max(1, len(entry.data) // 40)
        for place in range(0, len(entry.data), step):
            with pytest.raises(FormatError):
                canonicalise(entry.kind, entry.data[:place], torch_version=VERSION)
            broken = bytearray(entry.data)
            broken[place] ^= 0x55
            try:
                form = canonicalise(entry.kind, bytes(broken), torch_version=VERSION)
            except (FormatError, SecretError):
                continue
            restore(form.data, canon=form.canon, times=form.times)


def test_restored_entries_hit_in_a_third_process_with_right_results(
    processes: list[Process], tmp_path: Path
) -> None:
    """The kernels of one process, the entries of the other: canonical, restored, under names of their own."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    shutil.copytree(processes[0].cache, cache)
    for path in processes[1].root.rglob("*"):
        if path.is_file():
            kind = "inductor" if "fxgraph" in path.parts else "aot_autograd"
            form = canonicalise(kind, path.read_bytes(), torch_version=VERSION)
            data = restore(form.data, canon=form.canon, times=form.times)
            target = home / "entries" / path.relative_to(processes[1].root).with_name(content_name(data))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    report = run(home, cache, user="carol", seed="3", variable="TORCH_FOO").report
    for name, models in report.items():
        for result in models.values():
            counters = result["counters"]
            assert result["error"] < 1e-4
            assert counters["aot_autograd.autograd_cache_hit"] == 1, (name, counters)
            assert not any("miss" in counter for counter in counters), (name, counters)
            if name == "unbundled":
                assert counters["inductor.fxgraph_cache_hit"] == 2


def content_name(data: bytes) -> str:
    """The file name that PyTorch gives to these bytes."""
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()
