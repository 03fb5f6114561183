# SPDX-License-Identifier: Apache-2.0
"""The local view: all kinds in one scan, unchanged files not read again, one bad file harms no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pickles
import pytest

import canonical_entries
from cache_samples import CPP, HASH, KERNEL, canary, cpp_kernel, elf, triton_group, write
from torchrelay.caches import aot_autograd, bundle, files, inductor
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots
from torchrelay.caches.cpp import CppKind
from torchrelay.caches.elf import loaded_part
from torchrelay.caches.index import Index, Installed, meta_of
from torchrelay.caches.inductor import graph_folder
from torchrelay.caches.local import LocalView, scan_local
from torchrelay.caches.pickled import content_name
from torchrelay.caches.registry import KINDS, kind_of, kinds_for
from torchrelay.caches.triton import TritonKind
from torchrelay.canonical import secrets
from torchrelay.digest import digest_of
from torchrelay.errors import FormatError
from torchrelay.testing.entries import verified


def settle() -> None:
    """Until files just written are old enough to be remembered."""
    time.sleep(0.15)


def scan(root: Path, **kwargs: object) -> LocalView:
    view = scan_local(Roots(root, **kwargs), index=Index.load(root))  # type: ignore[arg-type]
    view.index.save()
    return view


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose bytes were read."""
    seen: list[str] = []
    real = files.read_stable

    def counted(root: Path, file: FileStat, **kwargs: int) -> bytes:
        seen.append(file.name)
        return real(root, file, **kwargs)

    monkeypatch.setattr(bundle, "read_stable", counted)
    return seen


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    cpp_kernel(tmp_path)
    settle()
    first = scan(tmp_path)
    assert (first.read, first.remembered, len(reads)) == (1, 0, 2)
    second = scan(tmp_path)
    assert (second.read, second.remembered, len(reads)) == (0, 1, 2)
    assert second.items == first.items


def test_a_changed_file_is(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    settle()
    (before,) = scan(tmp_path).items
    cpp_kernel(tmp_path, body=b"CODE")
    (after,) = scan(tmp_path).items
    assert (after.size, before.size) == (before.size, after.size)
    assert after.digest != before.digest


def test_without_an_index_the_same_is_found(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    settle()
    first = scan(tmp_path)
    for path in (tmp_path / ".torchrelay").rglob("index.json"):
        path.write_bytes(canary(tmp_path / "loaded"))
    again = scan(tmp_path)
    assert (again.items, again.read) == (first.items, 1)
    assert not (tmp_path / "loaded").exists()


def test_bytes_are_read_again_when_they_are_needed(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    view = scan(tmp_path)
    (item,) = view
    entry = view.load(item)
    assert (digest_of(entry.plain), len(entry.plain)) == (item.digest, item.size)
    assert meta_of(entry) == item.meta


@pytest.mark.parametrize("change", ["rewritten", "gone", "lock"])
def test_what_changed_since_the_scan_is_not_loaded(tmp_path: Path, change: str) -> None:
    cpp_kernel(tmp_path)
    view = scan(tmp_path)
    (item,) = view
    path = tmp_path / item.found.files[-1].name
    if change == "gone":
        path.unlink()
    elif change == "rewritten":
        path.write_bytes(elf(b"CODE"))
    else:
        path.unlink()
        path.symlink_to("/etc/passwd")
    with pytest.raises(Excluded):
        view.load(item)


def test_find_is_by_identity_without_requirements(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    triton_group(tmp_path / "triton" / "0")
    view = scan(tmp_path)
    assert [item.meta.key for item in view] == [CPP, f"{HASH}/{KERNEL}"]
    assert view.find("cpp", CPP, "") == (view.items[0],)
    assert view.find("triton", f"{HASH}/{KERNEL}", "") == (view.items[1],)
    assert view.find("cpp", CPP, digest_of(b"v")) == view.find("triton", CPP, "") == ()


def test_equal_kernels_of_two_devices_are_one_entry_and_others_are_not(tmp_path: Path) -> None:
    triton_group(tmp_path / "triton" / "0")
    triton_group(tmp_path / "triton" / "1")
    triton_group(tmp_path / "triton" / "2", salt=b"divergent")
    view = scan(tmp_path)
    assert (len(view), view.duplicates) == (2, 1)
    assert len(view.find("triton", f"{HASH}/{KERNEL}", "")) == 2


def test_one_bad_file_harms_no_other_and_is_counted_once_and_remembered(tmp_path: Path) -> None:
    """R01, with what is refused only after it was read."""
    cpp_kernel(tmp_path)
    bad = "c" + "zz7" * 17
    write(tmp_path / bad[1:3] / f"{bad}.so", elf()[:-1])
    write(tmp_path / CPP[1:3] / ".123.456.tmp", elf())
    write(tmp_path / CPP[1:3] / "nothing.so", b"")
    settle()
    first, second = scan(tmp_path), scan(tmp_path)
    for view in (first, second):
        assert [item.meta.key for item in view] == [CPP]
        assert view.excluded() == {"empty": 1, "temporary": 1, "unparseable": 1}
    assert (first.read, second.read) == (2, 0)


def test_a_growing_file_is_pushed_only_in_its_final_form(tmp_path: Path) -> None:
    """R01: what is loaded has the digest of the file after growth ended."""
    cpp_kernel(tmp_path, body=b"x" * 5000)
    path = tmp_path / CPP[1:3] / f"{CPP}.main.so"
    final = path.read_bytes()
    for end in (0, 10, 64, 2000, len(final) - 1):
        path.write_bytes(final[:end])
        assert scan(tmp_path).items == []
    path.write_bytes(final)
    view = scan(tmp_path)
    assert view.load(view.items[0]).plain.endswith(loaded_part(final))


class _Failing(CacheKind):
    name = "failing"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def scan(self, roots: Roots) -> Iterator[Found]:
        yield Found("failing", "x", roots.inductor, "inductor", ())

    def read(self, found: Found) -> Iterator[Entry]:
        raise self.error
        yield

    def check(self, statement: object) -> None:
        raise NotImplementedError

    def install(self, entry: object, roots: Roots) -> tuple[str, tuple[str, ...]]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("error", "reason", "remembered"),
    [
        (Excluded(Reason.SECRET, "a field"), "secret", True),
        (Excluded(Reason.LOCKED), "locked", False),
        (Excluded(Reason.GROWING), "growing", False),
        (FormatError("bad"), "unparseable", True),
        (OSError(5, "I/O error"), "growing", False),
    ],
)
def test_reasons_that_may_pass_are_looked_at_again(
    tmp_path: Path, error: Exception, reason: str, remembered: bool
) -> None:
    kinds = {"failing": _Failing(error), "cpp": CppKind()}
    cpp_kernel(tmp_path)
    index = Index.load(tmp_path)
    assert len(scan_local(Roots(tmp_path), index=index, kinds=kinds)) == 1
    again = scan_local(Roots(tmp_path), index=index, kinds=kinds)
    assert again.excluded() == {reason: 1}
    assert again.read == (0 if remembered else 1)


def test_what_was_installed_is_not_read_by_the_next_scan(tmp_path: Path, reads: list[str]) -> None:
    cpp_kernel(tmp_path / "a")
    triton_group(tmp_path / "a" / "triton" / "0")
    source = scan(tmp_path / "a")
    target = Index.load(tmp_path / "b")
    for item in source:
        entry = source.load(item)
        got = verified(entry.plain, kind=entry.kind, key=entry.key, files=entry.files, canon=entry.canon)
        place, names = KINDS[entry.kind].install(got, Roots(tmp_path / "b"))
        target.learn(Installed(tmp_path / "b", place, names, item.meta))
    target.save()
    reads.clear()
    view = scan(tmp_path / "b")
    assert (view.read, view.remembered, reads) == (0, 2, [])
    assert {item.digest for item in view} == {item.digest for item in source}


def test_a_directory_that_is_not_there_is_empty_and_not_made(tmp_path: Path) -> None:
    view = scan_local(
        Roots(tmp_path / "x", tmp_path / "y", {"z": tmp_path / "z"}), index=Index.load(tmp_path / "x")
    )
    assert (len(view), view.skipped) == (0, [])
    assert list(tmp_path.iterdir()) == []


def test_kinds_are_in_the_order_of_installation() -> None:
    names = list(KINDS)
    assert all(KINDS[name].name == name for name in names)
    assert names.index("inductor") < names.index("aot_autograd") < names.index("precompile")
    assert names.index("cpp") < names.index("inductor") > names.index("triton")
    assert isinstance(kind_of("triton"), TritonKind)
    assert kind_of("cudnn") is None
    with pytest.raises(TypeError):
        KINDS["mine"] = CppKind()  # type: ignore[index]


AOT = "a" + "c" * 51
GRAPH = "f" + "b" * 51


def graph_file(root: Path) -> Path:
    """The graph that :func:`result_file` needs, to be written."""
    data = canonical_entries.dumps(canonical_entries.graph(guards_expr="g0"))
    return root / graph_folder(GRAPH) / content_name(data)


def result_file(root: Path) -> None:
    """An AOTAutograd result that needs one graph."""
    forward = canonical_entries.CompiledForward(
        fx_graph_cache_info=(GRAPH, list(canonical_entries.LINES)), fx_graph_guard_expr="g0"
    )
    data = canonical_entries.dumps(canonical_entries.unbundled(compiled_fw=forward, compiled_bw=None))
    write(root / "aotautograd" / AOT / content_name(data), data)


def scan_as_torch(root: Path) -> LocalView:
    kinds = kinds_for(canonical_entries.VERSION)
    view = scan_local(Roots(root), index=Index.load(root), kinds=kinds)
    view.index.save()
    return view


def kinds_found(view: LocalView) -> list[str]:
    return sorted(item.meta.kind for item in view)


def test_a_result_is_complete_as_soon_as_its_graph_is_there(tmp_path: Path) -> None:
    """A scan may see it before its graph; nothing of the result's own file changes when that comes."""
    result_file(tmp_path)
    data = canonical_entries.dumps(canonical_entries.graph(guards_expr="g0"))
    graph = write(graph_file(tmp_path), data[:-7])  # half written, under its final name
    settle()
    view = scan_as_torch(tmp_path)
    assert kinds_found(view) == [] and view.excluded() == {"incomplete": 1, "unparseable": 1}
    before = graph.stat()
    graph.write_bytes(data)
    settle()
    assert graph.stat().st_size != before.st_size
    assert kinds_found(scan_as_torch(tmp_path)) == ["aot_autograd", "inductor"]
    again = scan_as_torch(tmp_path)
    assert kinds_found(again) == ["aot_autograd", "inductor"] and again.read == 0
    graph.unlink()
    gone = scan_as_torch(tmp_path)
    assert kinds_found(gone) == [] and gone.excluded() == {"incomplete": 1}


def test_a_graph_that_could_not_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process that lives on: the same file, by its stat, that was busy at first."""
    result_file(tmp_path)
    write(graph_file(tmp_path), canonical_entries.dumps(canonical_entries.graph(guards_expr="g0")))
    settle()

    def busy(root: Path, file: FileStat) -> bytes:
        raise Excluded(Reason.GROWING, file.name)

    with monkeypatch.context() as patched:
        patched.setattr(aot_autograd, "read_named", busy)
        patched.setattr(inductor, "read_named", busy)
        assert kinds_found(scan_as_torch(tmp_path)) == []
    assert kinds_found(scan_as_torch(tmp_path)) == ["aot_autograd", "inductor"]


# ---------------------------------------------------------------------- dumps of the environment

DUMP = "import os\nos.environ['TORCH_MYAUTH'] = 'correct-horse-battery'\n"
HEX = "d" * 64


def _in_a_graph(root: Path) -> None:
    data = pickles.graph(source=DUMP)
    write(root / graph_folder(pickles.FX_A) / content_name(data), data)


def _in_a_result(root: Path) -> None:
    graph = pickles.graph()
    write(root / graph_folder(pickles.FX_A) / content_name(graph), graph)
    data = pickles.result(guards=DUMP)
    write(root / "aotautograd" / pickles.AOT / content_name(data), data)


def _in_a_file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda root: void(write(root / name, data))


def void(_: object) -> None:
    """So that a test's table holds functions of one type."""


def _in_a_kernel(root: Path) -> None:
    cpp_kernel(root)
    write(root / CPP[1:3] / f"{CPP}.main.cpp", f"/* {DUMP} */ int main;".encode())


GEMM = {"system": {"hash": HEX}, "cache": {"mm": {"inputs": {"highest": {DUMP: 1.5}}}}}
DUMPS: dict[str, Callable[[Path], None]] = {
    "inductor": _in_a_graph,
    "aot_autograd": _in_a_result,
    "precompile": _in_a_file(f"dynamo/{HEX}/entry", pickles.dump({"b": [DUMP]})),
    "pgo": _in_a_file("dynamo/code_state_train_None_.pkl", pickles.dump([DUMP])),
    "autotune": _in_a_file(f"ab/{HEX}.best_config", json.dumps({"configs_hash": "c", "x": DUMP}).encode()),
    "gemm": _in_a_file(f"cache/{HEX}", json.dumps(GEMM).encode()),
    "triton": lambda root: void(triton_group(root / "triton" / "0", salt=DUMP.encode())),
    "cpp": _in_a_kernel,
    "tree": _in_a_file("tree/vllm/fxgraph/x", b"\x80\x04\x95" + bytes(8) + DUMP.encode() + b"\0."),
}


@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_lets_a_dump_of_the_environment_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, searched: bool
) -> None:
    """Whatever its values look like, and also if a kind forgot to look: there can be no such entry."""
    root = tmp_path / "root"
    DUMPS[kind](root)
    if not searched:
        patterns = [p for p in secrets.PATTERNS if p.name != secrets.ENVIRONMENT_DUMP]
        monkeypatch.setattr(secrets, "PATTERNS", patterns)
    trees = {"vllm": root / "tree"} if kind == "tree" else {}
    roots = Roots(root / "none" if trees else root, trees=trees)
    view = scan_local(roots, index=Index.none(), kinds=kinds_for(pickles.TORCH))
    assert not [item for item in view.items if item.meta.kind == kind]
    (left_out,) = [item for item in view.skipped if item.reason is Reason.SECRET]
    assert left_out.detail.startswith("environment-dump in ")
    assert "correct" not in str(view.skipped)
