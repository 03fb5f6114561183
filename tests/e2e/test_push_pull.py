# SPDX-License-Identifier: Apache-2.0
"""The main job on real compiles: every machine is a user, home and cache path of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from machines import Machine

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

WORKLOAD = "acme/mlp"
ASSUME = ("--assume-environment", "this")


class Published:
    """A store that one builder filled with the caches of the MLP."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = base / "store"
        self.builder = Machine(base / "builder", variables={"ATEN_CPU_CAPABILITY": "avx512"})
        self.result = self.builder.model("--model", "mlp")
        self.report = self.push(self.builder, *ASSUME)

    def push(self, machine: Machine, *arguments: str, code: int = 0) -> dict[str, Any]:
        return machine.relay("push", str(self.store), "-w", WORKLOAD, *arguments, code=code)

    def pull(self, machine: Machine, *arguments: str, code: int = 0) -> dict[str, Any]:
        return machine.relay("pull", str(self.store), "-w", WORKLOAD, *arguments, code=code)

    def machine(self, name: str, user: str = "torchrelay-tests", capability: str = "avx512") -> Machine:
        machine = Machine(self.base / name, user, {"ATEN_CPU_CAPABILITY": capability})
        machine.trusts(self.builder)
        return machine


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    published = Published(tmp_path_factory.mktemp("published"))
    assert published.result["max_error"] < 1e-4
    assert published.report["by_kind"]["inductor"] == 2
    assert published.report["by_kind"]["aot_autograd"] == 1
    assert published.report["by_kind"]["cpp"] >= 3
    return published


def hits(result: dict[str, Any]) -> tuple[int, int]:
    counters = result["counters"]
    return (
        counters["fxgraph_cache_hit"] + counters["autograd_cache_hit"],
        counters["fxgraph_cache_miss"] + counters["autograd_cache_miss"],
    )


def test_a_fresh_machine_hits_everything_with_the_same_result(published: Published) -> None:
    fresh = published.machine("fresh", user="somebody-else")
    report = published.pull(fresh)
    assert report["installed"] == published.report["pushed"]
    assert not (report["refused"] or report["damaged"] or report["missing"] or report["incompatible"])
    before = set(fresh.cache.rglob("*.so"))
    result = fresh.model("--model", "mlp", "--skip-headers")
    assert hits(result) == (3, 0)
    assert result["result_sha256"] == published.result["result_sha256"]
    assert set(fresh.cache.rglob("*.so")) == before, "a kernel was compiled"


def test_idle_push_and_pull_change_nothing(published: Published) -> None:
    again = published.push(published.builder)
    assert (again["pushed"], again["uploaded_bytes"], again["segment"]) == (0, 0, "")
    assert again["held"] == published.report["pushed"]
    idle = published.machine("idle")
    published.pull(idle)
    report = published.pull(idle)
    assert (report["installed"], report["downloaded_bytes"]) == (0, 0)
    assert report["present"] == published.report["pushed"]


def test_what_a_pull_installed_is_never_signed(published: Published) -> None:
    other = published.machine("never-signs")
    published.pull(other)
    report = published.push(other, "--all")
    assert (report["pushed"], report["segment"]) == (0, "")
    assert report["held"] == published.report["pushed"]


def test_the_same_compile_of_a_second_machine_uploads_no_blob(published: Published, tmp_path: Path) -> None:
    store = shutil.copytree(published.store, tmp_path / "store")
    second = Machine(
        tmp_path / "second-with-a-longer-path",
        variables={"ATEN_CPU_CAPABILITY": "avx512", "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
    )
    second.trusts(published.builder)
    second.model("--model", "mlp")
    report = second.relay("push", str(store), "-w", WORKLOAD, *ASSUME)
    assert report["blobs"] == 0
    assert report["divergent"] == []
    assert report["by_kind"] == published.report["by_kind"], "its own signature on the same statements"
    assert report["covered"] == 0
    origin = str(published.builder.cache).encode()
    carried = [path for path in published.builder.cache.rglob("*.so") if origin in path.read_bytes()]
    assert carried, "as PyTorch leaves them, kernels say where they were compiled"
    third = Machine(tmp_path / "third", variables={"ATEN_CPU_CAPABILITY": "avx512"})
    third.trusts(second)
    pulled = third.relay("pull", str(store), "-w", WORKLOAD, code=3)
    assert {p["reason"] for p in pulled["refused"]} == {"unknown-key"}, "the builder is not trusted here"
    assert pulled["by_kind"] == report["by_kind"]
    assert not [path for path in third.cache.rglob("*.so") if str(second.cache).encode() in path.read_bytes()]


def test_a_vanished_graph_is_pushed_again(published: Published, tmp_path: Path) -> None:
    store = shutil.copytree(published.store, tmp_path / "store")
    place = (str(store), "-w", WORKLOAD)
    entries = published.builder.relay("ls", *place)["entries"]
    graph = next(e for e in entries if e["kind"] == "inductor")
    (store / graph["blob"]).unlink()
    reader = published.machine("vanished")
    partial = reader.relay("pull", *place, code=1)
    assert {p["subject"] for p in partial["missing"]} >= {graph["blob"]}
    assert partial["by_kind"].get("aot_autograd", 0) == 0, "it needs the graph that is gone"
    assert not (reader.cache / "aotautograd").exists()
    healed = published.builder.relay("push", *place)
    assert (healed["pushed"], healed["blobs"]) == (1, 1)
    complete = reader.relay("pull", *place)
    assert complete["installed"] == 2
    assert hits(reader.model("--model", "mlp", "--skip-headers")) == (3, 0)


def test_an_entry_with_other_code_under_one_identity_is_divergent(
    published: Published, tmp_path: Path
) -> None:
    from torchrelay.caches.pickled import content_name

    liar = Machine(tmp_path / "liar", variables={"ATEN_CPU_CAPABILITY": "avx512"})
    liar.trusts(published.builder)
    shutil.copytree(published.builder.cache, liar.cache, ignore=shutil.ignore_patterns(".torchrelay"))
    graph = next(path for path in (liar.cache / "fxgraph").rglob("*") if path.is_file())
    data = graph.read_bytes()
    assert b"from ctypes import c_void_p" in data
    changed = data.replace(b"from ctypes import c_void_p", b"from ctypes import c_char_p", 1)
    graph.unlink()
    graph.with_name(content_name(changed)).write_bytes(changed)
    store = shutil.copytree(published.store, tmp_path / "store")
    report = liar.relay("push", str(store), "-w", WORKLOAD, *ASSUME)
    assert report["divergent"] == [f"inductor {graph.parent.name}"]
    assert report["covered"] >= 1
    assert report["blobs"] == 0


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_each_instruction_set_gets_its_own(published: Published, tmp_path: Path, capability: str) -> None:
    """PyTorch alone hits the other set's entries: wrong numbers, or a corrupted heap."""
    store = shutil.copytree(published.store, tmp_path / "store")
    place = (str(store), "-w", WORKLOAD)
    other = Machine(tmp_path / "other", variables={"ATEN_CPU_CAPABILITY": capability})
    other.trusts(published.builder)
    report = other.relay("pull", *place)
    assert set(report["by_kind"]) <= {"aot_autograd"}, "nothing that holds native code"
    assert report["incompatible"]["cpu_isa"] >= 3
    compiled = other.model("--model", "mlp")
    assert compiled["max_error"] < 1e-4
    assert hits(compiled)[0] == 0
    pushed = other.relay("push", *place)
    assert pushed["by_kind"]["inductor"] == 2

    twin = Machine(tmp_path / "twin", variables={"ATEN_CPU_CAPABILITY": capability})
    first = Machine(tmp_path / "first", variables={"ATEN_CPU_CAPABILITY": "avx512"})
    for machine, expected in ((twin, compiled), (first, published.result)):
        machine.trusts(published.builder)
        machine.trusts(other)
        pulled = machine.relay("pull", *place)
        assert pulled["incompatible"]["cpu_isa"] >= 3
        result = machine.model("--model", "mlp", "--skip-headers")
        assert hits(result) == (3, 0)
        assert result["max_error"] < 1e-4
        assert result["result_sha256"] == expected["result_sha256"]


@pytest.mark.parametrize(("name", "sizes"), [("pool", (8, 9)), ("hints", (4, 100_000))])
def test_entries_that_share_a_key_live_side_by_side(
    tmp_path: Path, name: str, sizes: tuple[int, int]
) -> None:
    """Two sets of guards under one key; and one AOTAutograd key with different FX keys."""
    builder = Machine(tmp_path / "builder")
    store = str(tmp_path / "store")
    for size in sizes:
        made = builder.shapes(name, size)
        assert made["counters"]["autograd_cache_miss"] == 1
    report = builder.relay("push", store, "-w", name, *ASSUME)
    assert report["by_kind"]["aot_autograd"] == 2
    entries = [e for e in builder.relay("ls", store, "-w", name)["entries"] if e["kind"] == "aot_autograd"]
    assert len({e["key"] for e in entries}) == 1
    assert len({e["variant"] for e in entries}) == 2
    graphs = {need for e in entries for need in e["needs"]}
    assert len(graphs) == {"pool": 1, "hints": 4}[name]
    reader = Machine(tmp_path / "reader", "somebody-else")
    reader.trusts(builder)
    assert reader.relay("pull", store, "-w", name)["installed"] == report["pushed"]
    for size in sizes:
        found = reader.shapes(name, size)
        assert found["counters"]["autograd_cache_hit"] == 1
        assert found["counters"]["autograd_cache_miss"] == 0
        assert found["max_error"] < 1e-4


def test_in_process_the_job_pulls_and_pushes_by_itself(published: Published, tmp_path: Path) -> None:
    store = shutil.copytree(published.store, tmp_path / "store")
    program = (
        "import sys, json, torch, msgspec, torchrelay\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import models\n"
        f"relay = torchrelay.Relay({str(store)!r}, workload={WORKLOAD!r}, strict=True)\n"
        "pulled = relay.pull()\n"
        "model, x = models.build('mlp')\n"
        "models.results(torch.compile(model), x, backward=True)\n"
        "pushed = relay.push()\n"
        "print(json.dumps({'pulled': msgspec.to_builtins(pulled), 'pushed': msgspec.to_builtins(pushed),"
        " 'counters': models.counters()}))\n"
    )
    job = Machine(tmp_path / "job", "somebody-else", {"ATEN_CPU_CAPABILITY": "avx512"})
    job.trusts(published.builder)
    result = job.python("-c", program)
    assert result["pulled"]["installed"] == published.report["pushed"]
    assert hits(result) == (3, 0)
    assert result["pushed"]["pushed"] == 0
    headers = list(Path(job.base).rglob("*.gch"))
    assert not headers, "a precompiled header was made although every kernel is there"
