# SPDX-License-Identifier: Apache-2.0
"""The kinds whose entries are pickles: inductor, aot_autograd, pgo, precompile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from pickles import AOT, FX_A, FX_B, TORCH, dump, graph, result

from torchrelay.caches import files
from torchrelay.caches.aot_autograd import AotAutogradKind
from torchrelay.caches.base import CacheKind, Entry, Excluded, Found, Reason, Roots, Skipped
from torchrelay.caches.index import Index, meta_of
from torchrelay.caches.inductor import InductorKind
from torchrelay.caches.local import LocalEntry, scan_local
from torchrelay.caches.pgo import PgoKind, key_of
from torchrelay.caches.pickled import content_name
from torchrelay.caches.precompile import PrecompileKind
from torchrelay.caches.registry import kinds_for
from torchrelay.digest import digest_of
from torchrelay.environment import FACETS, REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError
from torchrelay.manifest import LATEST_KINDS
from torchrelay.statement import File, Need
from torchrelay.testing.entries import make_record, verified

HEX = "d" * 64
CANARY = b"\x80\x04cos\nsystem\n\x8c%c%b\x85R."


def put(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def put_graph(root: Path, data: bytes, key: str = FX_A) -> str:
    name = f"fxgraph/{key[1:3]}/{key}/{content_name(data)}"
    put(root, name, data)
    return name


def put_result(root: Path, data: bytes, key: str = AOT) -> str:
    name = f"aotautograd/{key}/{content_name(data)}"
    put(root, name, data)
    return name


def put_profile(root: Path, data: bytes, key: str = "train_None_") -> str:
    name = f"dynamo/code_state_{key}.pkl"
    put(root, name, data)
    return name


def put_package(root: Path, data: bytes, key: str = HEX) -> str:
    name = f"dynamo/{key}/entry"
    put(root, name, data)
    return name


def scan(kind: CacheKind, root: Path) -> tuple[list[Found], dict[str, Reason]]:
    items = list(kind.scan(Roots(root)))
    skipped = [item for item in items if isinstance(item, Skipped)]
    assert len({item.path for item in skipped}) == len(skipped)
    found = [item for item in items if isinstance(item, Found)]
    return found, {item.path: item.reason for item in skipped}


def entries(kind: CacheKind, root: Path) -> list[Entry]:
    return [entry for found in scan(kind, root)[0] for entry in kind.read(found)]


def only(kind: CacheKind, root: Path) -> Entry:
    (entry,) = entries(kind, root)
    return entry


def unmasked(entry: Entry) -> Entry:
    """``entry`` without the report: of an installed file there are no dumps left to mask."""
    return replace(entry, masked={})


def reason_of(kind: CacheKind, root: Path) -> Reason:
    (found,) = scan(kind, root)[0]
    with pytest.raises(Excluded) as caught:
        list(kind.read(found))
    return caught.value.reason


def record_of(entry: Entry, **changes: Any) -> dict[str, Any]:
    fields = {
        "kind": entry.kind,
        "key": entry.key,
        "variant": entry.variant,
        "needs": entry.needs,
        "files": entry.files,
        "canon": entry.canon,
        "times": entry.times,
    }
    return {**fields, **changes}


Case = tuple[CacheKind, Callable[..., str], bytes]
CASES: dict[str, Case] = {
    "inductor": (InductorKind(TORCH), put_graph, graph()),
    "inductor-raw": (InductorKind(None), put_graph, graph(runnable_graph_str="# none")),
    "aot_autograd": (AotAutogradKind(TORCH), put_result, result()),
    "pgo": (PgoKind(), put_profile, dump({"sizes": [1, 2]})),
    "precompile": (PrecompileKind(), put_package, dump({"dynamo": None})),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def fill(root: Path, case: Case) -> str:
    if not isinstance(case[0], InductorKind):
        put_graph(root, graph())  # what an AOTAutograd entry needs
    return case[1](root, case[2])


# ---------------------------------------------------------------------- out and in again


@cases
def test_what_goes_out_comes_in_again_byte_for_byte(tmp_path: Path, case: Case) -> None:
    """Law: a restored file differs from the one that was pushed in masked texts only; raw, in nothing."""
    kind, _, data = case
    name = fill(tmp_path / "a", case)
    entry = only(kind, tmp_path / "a")
    record, _ = make_record(entry.plain, **record_of(entry))
    kind.check(record.statement)
    place, (installed,) = kind.install(verified(entry.plain, **record_of(entry)), Roots(tmp_path / "b"))
    assert place == "inductor"
    assert entry.kind == kind.name
    written = (tmp_path / "b" / installed).read_bytes()
    if entry.canon == "raw":
        assert (installed, written) == (name, data)
    if not isinstance(kind, InductorKind):
        put_graph(tmp_path / "b", graph())
    assert unmasked(entry) in [unmasked(item) for item in entries(kind, tmp_path / "b")]
    assert list((tmp_path / "b" / files.TEMPORARY_FOLDER).iterdir()) == []


@cases
def test_only_the_one_file_is_in_the_entrys_folder(tmp_path: Path, case: Case) -> None:
    fill(tmp_path / "a", case)
    entry = only(case[0], tmp_path / "a")
    _, (installed,) = case[0].install(verified(entry.plain, **record_of(entry)), Roots(tmp_path / "b"))
    path = tmp_path / "b" / installed
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "data"), [(InductorKind(TORCH), graph(time=7)), (AotAutogradKind(TORCH), result(time=7))]
)
def test_times_are_masked_and_put_back(tmp_path: Path, kind: CacheKind, data: bytes) -> None:
    fill(tmp_path / "a", (kind, put_graph if kind.name == "inductor" else put_result, data))
    made = [entry for entry in entries(kind, tmp_path / "a") if 7 in entry.times]
    assert [entry.times for entry in made] == [(7,) if kind.name == "inductor" else (7, 8)]
    assert any(name.endswith(":time") for name in made[0].masked)
    _, (installed,) = kind.install(verified(made[0].plain, **record_of(made[0])), Roots(tmp_path / "b"))
    assert (7).to_bytes(1, "little") in (tmp_path / "b" / installed).read_bytes()
    put_graph(tmp_path / "b", graph())
    assert unmasked(made[0]) in [unmasked(item) for item in entries(kind, tmp_path / "b")]


def test_the_name_follows_from_the_restored_bytes(tmp_path: Path) -> None:
    put_graph(tmp_path / "a", graph())
    entry = only(InductorKind(TORCH), tmp_path / "a")
    roots = Roots(tmp_path / "b")
    for time in (1, 2):
        given = verified(entry.plain, **record_of(entry, times=(time,)))
        _, (installed,) = InductorKind(TORCH).install(given, roots)
        assert installed.rpartition("/")[2] == content_name((tmp_path / "b" / installed).read_bytes())
    assert len(entries(InductorKind(TORCH), tmp_path / "b")) == 2


def test_the_same_compile_twice_is_one_entry(tmp_path: Path) -> None:
    put_graph(tmp_path / "a", graph(time=1, runnable_graph_str="# one"))
    put_graph(tmp_path / "b", graph(time=2, runnable_graph_str="# two, longer"))
    one, two = (only(InductorKind(TORCH), tmp_path / name) for name in "ab")
    assert one.plain == two.plain
    assert one.variant == two.variant
    assert one.times != two.times


# ---------------------------------------------------------------------- identity


def test_two_guard_sets_under_one_key_lie_side_by_side(tmp_path: Path) -> None:
    put_graph(tmp_path, graph("s0 < 10"))
    put_graph(tmp_path, graph("s0 >= 10"))
    put_graph(tmp_path, graph("s0 >= 10", libs="libdevice-1"))
    made = entries(InductorKind(TORCH), tmp_path)
    assert len({entry.variant for entry in made}) == 3
    assert {entry.key for entry in made} == {FX_A}


def test_needs_name_the_graphs_that_lie_beside(tmp_path: Path) -> None:
    """The variant covers the external libraries, which the result knows nothing of."""
    put_graph(tmp_path, graph("s0 < 10", libs="libdevice-1"))
    put_graph(tmp_path, graph("s0 >= 10", libs="libdevice-1"))
    put_graph(tmp_path, graph("True", libs="libdevice-1"), FX_B)
    put_result(tmp_path, result((FX_A, "s0 >= 10"), (FX_B, "True")))
    graphs = {(entry.key, entry.variant) for entry in entries(InductorKind(TORCH), tmp_path)}
    needs = only(AotAutogradKind(TORCH), tmp_path).needs
    assert [need.kind for need in needs] == ["inductor", "inductor"]
    assert [need.key for need in needs] == [FX_A, FX_B]
    assert {(need.key, need.variant) for need in needs} <= graphs
    put_graph(tmp_path / "other", graph("s0 >= 10", libs="libdevice-1"))
    assert needs[0].variant == only(InductorKind(TORCH), tmp_path / "other").variant


def test_one_graph_for_both_ways_is_one_need(tmp_path: Path) -> None:
    put_graph(tmp_path, graph())
    put_result(tmp_path, result((FX_A, "True"), (FX_A, "True")))
    assert len(only(AotAutogradKind(TORCH), tmp_path).needs) == 1


def test_results_of_two_size_hints_lie_side_by_side(tmp_path: Path) -> None:
    put_graph(tmp_path, graph(), FX_A)
    put_graph(tmp_path, graph(), FX_B)
    put_result(tmp_path, result((FX_A, "True")))
    put_result(tmp_path, result((FX_B, "True")))
    made = entries(AotAutogradKind(TORCH), tmp_path)
    assert len({entry.variant for entry in made}) == 2
    assert {need.key for entry in made for need in entry.needs} == {FX_A, FX_B}


def test_a_need_does_not_depend_on_the_order_of_a_listing(tmp_path: Path) -> None:
    for libs in ("one", "two", "three"):
        put_graph(tmp_path, graph("True", libs=libs))
    put_result(tmp_path, result())
    lowest = min(entry.variant for entry in entries(InductorKind(TORCH), tmp_path))
    assert only(AotAutogradKind(TORCH), tmp_path).needs == (Need(kind="inductor", key=FX_A, variant=lowest),)


@pytest.mark.parametrize("beside", ["nothing", "other-guard", "damaged", "temporary", "other-key"])
def test_a_result_without_its_graphs_is_incomplete(tmp_path: Path, beside: str) -> None:
    folder = f"fxgraph/{FX_A[1:3]}/{FX_A}"
    if beside == "other-guard":
        put_graph(tmp_path, graph("s0 < 3"))
    elif beside == "damaged":
        put(tmp_path, f"{folder}/{content_name(graph())}", graph()[:-9])
    elif beside == "temporary":
        put(tmp_path, f"{folder}/.123.456.tmp", graph())
    elif beside == "other-key":
        put_graph(tmp_path, graph(), FX_B)
    put_result(tmp_path, result())
    assert reason_of(AotAutogradKind(TORCH), tmp_path) is Reason.INCOMPLETE


@pytest.mark.parametrize("key", ["..", "../../../outside", "/etc", ""])
def test_a_reference_cannot_lead_out_of_its_folder(tmp_path: Path, key: str) -> None:
    root = tmp_path / "a" / "root"
    put(tmp_path, f"outside/{content_name(graph())}", graph())
    put(root, content_name(graph()), graph())  # where fxgraph/./.. leads
    put_graph(root, graph(), FX_B)
    put_result(root, result((key, "True")))
    assert reason_of(AotAutogradKind(TORCH), root) is Reason.INCOMPLETE


def test_precompiled_functions_of_two_models_are_one_identity(tmp_path: Path) -> None:
    """There is one place for both; the latest counts."""
    put_package(tmp_path / "a", dump({"model": "a"}))
    put_package(tmp_path / "b", dump({"model": "b"}))
    one, two = (only(PrecompileKind(), tmp_path / name) for name in "ab")
    assert (one.key, one.variant) == (two.key, two.variant) == (HEX, "")
    assert one.kind in LATEST_KINDS
    assert one.plain != two.plain


# ---------------------------------------------------------------------- facets


@pytest.mark.parametrize(
    ("data", "sort"),
    [
        (graph(), "inductor"),
        (graph(devices=()), "inductor"),
        (graph(source="async_compile.cpp_pybinding('…')"), "inductor+cpp"),
        (graph(devices=("cuda",)), "inductor+gpu"),
        (graph(devices=("cpu", "cuda"), source="async_compile.cpp_pybinding('…')"), "inductor+cpp+gpu"),
        (dump({"not": "a graph"}), "inductor+cpp+gpu"),
    ],
)
def test_facets_follow_from_what_the_graph_is_made_of(tmp_path: Path, data: bytes, sort: str) -> None:
    put_graph(tmp_path, data)
    assert only(InductorKind(TORCH), tmp_path).facets == REQUIRED_FACETS[sort]


def test_a_result_that_refers_to_graphs_needs_no_processor(tmp_path: Path) -> None:
    put_graph(tmp_path, graph())
    put_result(tmp_path, result())
    assert only(AotAutogradKind(TORCH), tmp_path).facets == REQUIRED_FACETS["aot_autograd"]


def test_a_result_that_cannot_be_read_needs_everything_and_no_graph(tmp_path: Path) -> None:
    put_result(tmp_path, dump({"x": 1}))
    entry = only(AotAutogradKind(TORCH), tmp_path)
    assert entry.facets == REQUIRED_FACETS["inductor+cpp+gpu"]
    assert (entry.needs, entry.canon) == ((), "raw")


@cases
def test_facets_are_known(tmp_path: Path, case: Case) -> None:
    fill(tmp_path, case)
    assert set(only(case[0], tmp_path).facets) <= set(FACETS)


# ---------------------------------------------------------------------- what is left out


@cases
def test_rubbish_beside_an_entry(tmp_path: Path, case: Case) -> None:
    """R01: another rank's file under way, leftovers, empty files; each is told, none is an entry."""
    kind = case[0]
    name = fill(tmp_path, case)
    folder = name.rpartition("/")[0]
    good = scan(kind, tmp_path)[0]
    put(tmp_path, f"{folder}/.123.456.tmp", case[2][:50])
    put(tmp_path, f"{folder}/tmp.pid_9_x/foo.cubin", b"x")
    put(tmp_path, f"{folder}/{content_name(b'')}", b"")
    put(tmp_path, f"{folder}/x.lock", b"x")
    (tmp_path / folder / "link").symlink_to(tmp_path / name)
    found, skipped = scan(kind, tmp_path)
    assert found == good
    assert skipped == {
        f"{folder}/.123.456.tmp": Reason.TEMPORARY,
        f"{folder}/tmp.pid_9_x": Reason.TEMPORARY,
        f"{folder}/{content_name(b'')}": Reason.EMPTY,
        f"{folder}/x.lock": Reason.LOCKED,
        f"{folder}/link": Reason.NOT_A_FILE,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="another owner can only be set by root")
@cases
def test_a_file_of_another_user(tmp_path: Path, case: Case) -> None:
    name = fill(tmp_path, case)
    os.chown(tmp_path / name, 12345, 12345)
    found, skipped = scan(case[0], tmp_path)
    assert found == []
    assert skipped == {name: Reason.FOREIGN_OWNER}


@cases
def test_a_file_that_grew_after_the_scan(tmp_path: Path, case: Case) -> None:
    name = fill(tmp_path, case)
    (found,) = scan(case[0], tmp_path)[0]
    with (tmp_path / name).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(Excluded) as caught:
        list(case[0].read(found))
    assert caught.value.reason is Reason.GROWING


@cases
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_torn_file(tmp_path: Path, case: Case, keep: float) -> None:
    name = fill(tmp_path, case)
    (tmp_path / name).write_bytes(case[2][: max(1, int(len(case[2]) * keep))])
    assert reason_of(case[0], tmp_path) is Reason.UNPARSEABLE


@pytest.mark.parametrize("name", ["inductor", "aot_autograd"])
def test_one_bit_that_the_walk_would_not_notice(tmp_path: Path, name: str) -> None:
    """PyTorch names these files by their content, so damage shows."""
    case = CASES[name]
    path = tmp_path / fill(tmp_path, case)
    damaged = case[2].replace(b"guards_expr", b"guards_exps")
    assert damaged != case[2]
    path.write_bytes(damaged)
    assert reason_of(case[0], tmp_path) is Reason.UNPARSEABLE


def _bad_tree(name: str) -> list[str]:
    """Files that a scan must call badly named."""
    shard = FX_A[1:3]
    return {
        "inductor": [
            f"fxgraph/{shard}/{FX_A}/not-a-digest",
            f"fxgraph/{shard}/stray",
            "fxgraph/stray",
        ],
        "aot_autograd": [f"aotautograd/{AOT}/not-a-digest", "aotautograd/stray"],
        "pgo": ["dynamo/other", "dynamo/code_state_.pkl", "dynamo/code_state_a b_None_.pkl"],
        "precompile": [f"dynamo/{HEX}/other"],
    }[name]


@pytest.mark.parametrize("name", ["inductor", "aot_autograd", "pgo", "precompile"])
def test_badly_named_files(tmp_path: Path, name: str) -> None:
    for path in _bad_tree(name):
        put(tmp_path, path, CASES[name][2])
    found, skipped = scan(CASES[name][0], tmp_path)
    assert found == []
    assert skipped == dict.fromkeys(_bad_tree(name), Reason.BAD_NAME)


@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        (InductorKind(TORCH), f"fxgraph/zz/{FX_A}"),
        (InductorKind(TORCH), "fxgraph/aa/" + "f" + "a" * 50),
        (InductorKind(TORCH), "fxgraph/aa/" + "f" + "A" * 51),
        (InductorKind(TORCH), "fxgraph/aa/" + "a" * 52),
        (AotAutogradKind(TORCH), "aotautograd/" + FX_A),
        (AotAutogradKind(TORCH), "aotautograd/" + AOT + "a"),
        (PrecompileKind(), "dynamo/" + "D" * 64),
    ],
)
def test_badly_named_folders(tmp_path: Path, kind: CacheKind, folder: str) -> None:
    put(tmp_path, f"{folder}/{content_name(graph())}", graph())
    found, skipped = scan(kind, tmp_path)
    assert found == []
    assert skipped == {folder: Reason.BAD_NAME}


@pytest.mark.parametrize(
    ("cache_key", "reason"),
    [
        ("train:None:", None),
        ("train-7b:0:v2", None),
        ("team/llama:12:", None),
        ("mast:job:3:None:", Reason.UNSTABLE_KEY),
        ("1234567:None:", Reason.UNSTABLE_KEY),
        ("1234567_4:0:", Reason.UNSTABLE_KEY),
        ("9f1c2d3e-1111-2222-3333-444455556666:None:", Reason.UNSTABLE_KEY),
        ("run-9f1c2d3e-1111-2222-3333-444455556666:None:", Reason.UNSTABLE_KEY),
        ("0123456789abcdef0123456789abcdef:None:", Reason.UNSTABLE_KEY),
        ("../../x:None:", Reason.BAD_NAME),
        ("job with spaces:None:", Reason.BAD_NAME),
        ("job:rank:", Reason.BAD_NAME),
        ("", Reason.BAD_NAME),
    ],
)
def test_profiles_only_of_jobs_that_last(tmp_path: Path, cache_key: str, reason: Reason | None) -> None:
    name = put_profile(tmp_path, dump({}), key_of(cache_key))
    found, skipped = scan(PgoKind(), tmp_path)
    assert skipped == ({name: reason} if reason else {})
    assert [item.key for item in found] == ([] if reason else [key_of(cache_key)])


def test_the_kinds_share_a_folder_and_report_each_thing_once(tmp_path: Path) -> None:
    put_profile(tmp_path, dump({}))
    put_package(tmp_path, dump({}))
    put(tmp_path, "dynamo/code_state_train_None_.pkl.lock", b"x")
    put(tmp_path, "dynamo/stray", b"x")
    put(tmp_path, "dynamo/folder/x", b"x")
    pgo, precompile = scan(PgoKind(), tmp_path), scan(PrecompileKind(), tmp_path)
    assert [found.key for found in (*pgo[0], *precompile[0])] == ["train_None_", HEX]
    assert not pgo[1].keys() & precompile[1].keys()
    assert sorted({**pgo[1], **precompile[1]}) == [
        "dynamo/code_state_train_None_.pkl.lock",
        "dynamo/folder",
        "dynamo/stray",
    ]


@cases
def test_a_secret_leaves_the_entry_out(tmp_path: Path, case: Case) -> None:
    kind, place, _ = case
    secret = "redis://user:hunter2hunter2@host:6379/0"
    data = {"inductor": graph(source=secret), "aot_autograd": result(guards=secret)}.get(
        kind.name, dump([secret])
    )
    put_graph(tmp_path, graph()) if kind.name == "aot_autograd" else None
    place(tmp_path, data)
    (found,) = scan(kind, tmp_path)[0]
    with pytest.raises(Excluded) as caught:
        list(kind.read(found))
    assert caught.value.reason is Reason.SECRET
    assert "hunter2" not in caught.value.detail


@cases
def test_reading_again_gives_the_same_bytes(tmp_path: Path, case: Case) -> None:
    kind, place, data = case
    put_graph(tmp_path, graph()) if kind.name == "aot_autograd" else None
    place(tmp_path, data)
    places = scan(kind, tmp_path)[0]
    assert places
    for found in places:
        first, again = list(kind.read(found)), list(kind.read_again(found))
        assert first
        assert [replace(entry, masked={}) for entry in first] == [replace(e, masked={}) for e in again]


def test_a_secret_is_looked_for_once(tmp_path: Path) -> None:
    """Whoever reads again takes only bytes with the digest of what passed the search."""
    put_graph(tmp_path, graph(source="redis://user:hunter2hunter2@host:6379/0"))
    view = scan_local(Roots(tmp_path), index=Index(tmp_path), kinds=kinds_for(TORCH))
    assert not view.items
    assert [skipped.reason for skipped in view.skipped] == [Reason.SECRET]
    (found,) = scan(InductorKind(TORCH), tmp_path)[0]
    (entry,) = InductorKind(TORCH).read_again(found)
    item = LocalEntry(found, replace_struct(meta_of(entry), digest=digest_of(b"what was searched before")))
    with pytest.raises(Excluded) as caught:
        view.load(item)
    assert caught.value.reason is Reason.GROWING


@cases
def test_nothing_is_ever_unpickled(tmp_path: Path, case: Case) -> None:
    """A canary in place of an entry: read or left out, but never run."""
    kind, place, _ = case
    mark = tmp_path / "ran"
    command = f"touch {mark}".encode()
    place(tmp_path / "a", CANARY % (len(command), command))
    (entry,) = entries(kind, tmp_path / "a")
    kind.install(verified(entry.plain, **record_of(entry)), Roots(tmp_path / "b"))
    assert entry.canon == "raw"
    assert not mark.exists()


@cases
def test_nothing_there(tmp_path: Path, case: Case) -> None:
    assert scan(case[0], tmp_path / "none") == ([], {})


# ---------------------------------------------------------------------- what comes in

DIGEST = "e" * 64
NEED = Need(kind="inductor", key=FX_A, variant=DIGEST)
BAD_STATEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"inductor-key-{index}": ("inductor", {"key": key})
        for index, key in enumerate(
            ["../../x", "/abs", "f" + "a" * 50, "f" + "1" * 51, AOT, FX_A + "/x", FX_A.upper()]
        )
    },
    "inductor-no-variant": ("inductor", {"variant": ""}),
    "inductor-needs": ("inductor", {"needs": (NEED,)}),
    "inductor-files": ("inductor", {"files": (File(name="x", size=1),)}),
    "inductor-canon": ("inductor", {"canon": "pickle-9/torch-2.13"}),
    "inductor-json": ("inductor", {"canon": "json-1"}),
    "inductor-empty": ("inductor", {"plain": b""}),
    "aot-key": ("aot_autograd", {"key": FX_A}),
    "aot-path": ("aot_autograd", {"key": "../" + AOT}),
    "aot-no-variant": ("aot_autograd", {"variant": ""}),
    "aot-need-kind": ("aot_autograd", {"needs": (Need(kind="cpp", key=FX_A, variant=DIGEST),)}),
    "aot-need-key": ("aot_autograd", {"needs": (Need(kind="inductor", key="../x", variant=DIGEST),)}),
    "aot-need-variant": ("aot_autograd", {"needs": (Need(kind="inductor", key=FX_A, variant=""),)}),
    "aot-many-needs": (
        "aot_autograd",
        {"needs": tuple(Need(kind="inductor", key=FX_A, variant=c * 64) for c in "abc")},
    ),
    "aot-files": ("aot_autograd", {"files": (File(name="other", size=1),)}),
    "pgo-path": ("pgo", {"key": "../x_None_"}),
    "pgo-slash": ("pgo", {"key": "a/b_None_"}),
    "pgo-run": ("pgo", {"key": "12345_None_"}),
    "pgo-variant": ("pgo", {"variant": DIGEST}),
    "pgo-needs": ("pgo", {"needs": (NEED,)}),
    "precompile-path": ("precompile", {"key": "/etc/passwd"}),
    "precompile-dots": ("precompile", {"key": "../" + HEX}),
    "precompile-upper": ("precompile", {"key": HEX.upper()}),
    "precompile-variant": ("precompile", {"variant": DIGEST}),
    "precompile-needs": ("precompile", {"needs": (NEED,)}),
}
GOOD: dict[str, dict[str, Any]] = {
    "inductor": {"key": FX_A, "variant": DIGEST},
    "aot_autograd": {"key": AOT, "variant": DIGEST, "needs": (NEED,)},
    "pgo": {"key": "train_None_"},
    "precompile": {"key": HEX},
}


@pytest.mark.parametrize("name", GOOD)
def test_statements_that_pass(name: str) -> None:
    record, _ = make_record(b"x", kind=name, **GOOD[name])
    CASES[name][0].check(record.statement)


@pytest.mark.parametrize(("name", "change"), BAD_STATEMENTS.values(), ids=BAD_STATEMENTS)
def test_statements_that_are_refused(name: str, change: dict[str, Any]) -> None:
    fields = {**GOOD[name], **change}
    record, _ = make_record(fields.pop("plain", b"x"), kind=name, **fields)
    with pytest.raises(FormatError) as caught:
        CASES[name][0].check(record.statement)
    assert caught.value.subject


@pytest.mark.parametrize("change", [{"times": ()}, {"times": (1, 2)}, {"canon": "raw"}])
def test_signed_bytes_that_are_not_in_the_form_they_claim(tmp_path: Path, change: dict[str, Any]) -> None:
    put_graph(tmp_path / "a", graph())
    entry = only(InductorKind(TORCH), tmp_path / "a")
    with pytest.raises(DamagedError):
        InductorKind(TORCH).install(
            verified(entry.plain, **record_of(entry, **change)), Roots(tmp_path / "b")
        )
    assert not (tmp_path / "b").exists()


def test_the_old_place_of_pytorch_2_7(tmp_path: Path) -> None:
    kind = AotAutogradKind("2.7.1")
    put_graph(tmp_path / "a", graph(runnable_graph_str="# none"))
    put(tmp_path / "a", f"aotautograd/{AOT}/entry", result())
    entry = only(kind, tmp_path / "a")
    assert [file.name for file in entry.files] == ["entry"]
    assert len(entry.needs) == 1
    given = verified(entry.plain, **record_of(entry))
    kind.check(given.statement)
    assert kind.install(given, Roots(tmp_path / "b"))[1] == (f"aotautograd/{AOT}/entry",)
    assert (tmp_path / "b" / "aotautograd" / AOT / "entry").read_bytes() == result()


@pytest.mark.parametrize("version", [None, "2.7.1", "2.99.0"])
def test_a_dump_of_the_environment_that_cannot_be_masked_keeps_an_entry_here(
    tmp_path: Path, version: str | None
) -> None:
    """Also where no value looks like a secret: only the one who set it knows that."""
    dump_ = "import os\nos.environ['TORCHINDUCTOR_X'] = 'opensesame'\n"
    put_graph(tmp_path, graph(runnable_graph_str=dump_))
    assert reason_of(InductorKind(version), tmp_path) is Reason.SECRET
    assert only(InductorKind("2.13.0"), tmp_path).canon == "pickle-1/torch-2.13"
    put_result(tmp_path, dump({"text": dump_}))
    assert reason_of(AotAutogradKind(version), tmp_path) is Reason.SECRET


@pytest.mark.parametrize("name", ["inductor", "inductor-raw", "aot_autograd"])
def test_another_variant_than_the_contents_own_is_not_installed(tmp_path: Path, name: str) -> None:
    """It would never be found under that name, and so be fetched again by every pull."""
    kind, _, _ = case = CASES[name]
    fill(tmp_path / "a", case)
    entry = only(kind, tmp_path / "a")
    with pytest.raises(DamagedError, match="variant"):
        kind.install(verified(entry.plain, **record_of(entry, variant=DIGEST)), Roots(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_keys_given_by_hand_are_held_to_the_same_patterns() -> None:
    for call in (
        lambda: InductorKind().entry_from_bytes("../x", graph()),
        lambda: AotAutogradKind().entry_from_bytes("../x", result(), variant_of=lambda _: DIGEST),
        lambda: PgoKind().entry_from_bytes("../x", dump({})),
        lambda: PrecompileKind().entry_from_bytes("../x", dump({})),
    ):
        with pytest.raises(Excluded) as caught:
            call()
        assert caught.value.reason is Reason.BAD_NAME
