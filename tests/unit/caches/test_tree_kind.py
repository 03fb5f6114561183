# SPDX-License-Identifier: Apache-2.0
"""Declared roots of frameworks: one entry a folder, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cache_samples import canary, contents, elf, entries_in, found_in, opened, write
from torchrelay import limits
from torchrelay.caches.base import Excluded, Reason, Roots
from torchrelay.caches.tree import TreeKind, check_trees
from torchrelay.environment import FACETS
from torchrelay.errors import DamagedError, FormatError, InTheWayError, NotFoundError, UsageError
from torchrelay.statement import File
from torchrelay.testing.entries import make_record

KIND = TreeKind()


def at(path: Path, name: str = "vllm") -> Roots:
    return Roots(path.parent / "inductor", None, {name: path})


def sample(root: Path) -> None:
    write(root / "version.txt", b"1")
    write(root / "cache" / "ab12" / "rank_0_0" / "graph.py", b"graph")
    write(root / "cache" / "ab12" / "rank_0_0" / "ops.so", elf())
    write(root / "kernel.gemm.77" / "kernel.cubin", b"cubin")


def test_each_folder_goes_round(tmp_path: Path) -> None:
    sample(tmp_path / "a")
    entries = entries_in(KIND, at(tmp_path / "a"))
    assert [entry.key for entry in entries] == ["vllm/.", "vllm/cache/ab12/rank_0_0", "vllm/kernel.gemm.77"]
    assert all(set(entry.facets) == FACETS.keys() for entry in entries)
    for entry in entries:
        verified = opened(entry)
        KIND.check(verified.statement)
        place, _ = KIND.install(verified, at(tmp_path / "b"))
        assert place == "tree:vllm"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert entries_in(KIND, at(tmp_path / "b")) == entries


def test_the_order_is_by_name_whatever_was_written_when(tmp_path: Path) -> None:
    """So that equal folders are equal bytes; what describes the others is installed after them."""
    names = ["a.cubin", "z.ptx", "b.json", "my_index.bin"]
    plain = set()
    for turn in (names, names[::-1]):
        for time, name in enumerate(turn):
            os.utime(write(tmp_path / "x" / name, name.encode()), ns=(time, time))
        (entry,) = entries_in(KIND, at(tmp_path))
        assert [file.name for file in entry.files] == names
        plain.add(entry.plain)
    assert len(plain) == 1


def test_a_folder_with_something_that_cannot_be_taken_is_left_out_whole(tmp_path: Path) -> None:
    for folder in ("empty", "link", "name"):
        write(tmp_path / folder / "fine.txt", b"1")
    write(tmp_path / "empty" / "gone.txt", b"")
    write(tmp_path / "name" / "a b.txt", b"1")
    (tmp_path / "link" / "to.txt").symlink_to("/etc/passwd")
    found, skipped = found_in(KIND, at(tmp_path))
    assert found == []
    assert {i.path for i in skipped if i.reason is Reason.INCOMPLETE} == {"empty", "link", "name"}
    assert {i.reason for i in skipped} == {Reason.INCOMPLETE, Reason.EMPTY, Reason.NOT_A_FILE}


def test_locks_temporaries_and_bytecode_beside_files_are_no_part_of_them(tmp_path: Path) -> None:
    sample(tmp_path / "a")
    before = entries_in(KIND, at(tmp_path / "a"))
    write(tmp_path / "a" / "op.lock", b"1")
    write(tmp_path / "a" / ".123.456.tmp", b"1")
    write(tmp_path / "a" / "__pycache__" / "x.pyc", b"1")
    assert entries_in(KIND, at(tmp_path / "a")) == before
    reasons = {item.path: item.reason for item in found_in(KIND, at(tmp_path / "a"))[1]}
    assert reasons == {"op.lock": Reason.LOCKED, ".123.456.tmp": Reason.TEMPORARY}


def test_caches_of_their_own_below_a_root_are_left_to_their_kinds(tmp_path: Path) -> None:
    sample(tmp_path)
    below = tmp_path / "ab12"
    write(below / "inductor" / "fxgraph" / "x", b"1")
    write(below / "triton" / "x", b"1")
    write(tmp_path / ".torchrelay" / "state-0" / "ledger.jsonl", b"1")
    roots = Roots(below / "inductor", below / "triton", {"vllm": tmp_path})
    assert len(entries_in(KIND, roots)) == 3


@pytest.mark.parametrize(
    "where", ["base/inductor", "base", "base/inductor/fxgraph", "base/triton", "base/triton/x", "link"]
)
def test_a_tree_is_no_cache_of_another_kind(tmp_path: Path, where: str) -> None:
    """Else the same files would be entries of two kinds, and what a pull installed would be signed."""
    (tmp_path / "base" / "inductor" / "fxgraph").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    base = tmp_path / "base"
    roots = Roots(base / "inductor", base / "triton", {"all": tmp_path / where})
    with pytest.raises(UsageError, match="all"):
        list(KIND.scan(roots))


@pytest.mark.parametrize("where", ["home", "home/config", "home/config/below", "."])
def test_a_tree_holds_nothing_that_must_not_leave(tmp_path: Path, where: str) -> None:
    roots = at(tmp_path / where)
    private = [tmp_path / "home" / "config"]
    with pytest.raises(UsageError, match="config"):
        check_trees(roots, private)
    check_trees(at(tmp_path / "home" / "cache"), private)


SECRETS = {
    "json": b'{"env": {"HF_TOKEN": "hf_' + b"A1b2" * 9 + b'"}}',
    "source": b"x = 1\npassword = 'hunter2hunter2'\n",
    "binary": elf(b"\0\1\2redis://user:hunter2pw@host:6379/0\0\1"),
}


@pytest.mark.parametrize("what", SECRETS)
def test_a_secret_keeps_the_folder_here(tmp_path: Path, what: str) -> None:
    write(tmp_path / "t" / "x" / "fine.txt", b"1")
    write(tmp_path / "t" / "x" / f"file.{'so' if what == 'binary' else 'txt'}", SECRETS[what])
    (found,) = found_in(KIND, at(tmp_path / "t"))[0]
    with pytest.raises(Excluded) as caught:
        list(KIND.read(found))
    assert caught.value.reason is Reason.SECRET
    assert "file." in caught.value.detail and "unter2" not in caught.value.detail


def test_what_stands_apart_in_a_binary_is_no_secret(tmp_path: Path) -> None:
    """A URL, a colon somewhere behind it, and the version of a symbol."""
    body = b"https://example.org/x\0\1\2a:b\0\3memcpy@GLIBC_2.14\0"
    write(tmp_path / "t" / "x" / "file.so", elf(body))
    assert len(entries_in(KIND, at(tmp_path / "t"))) == 1


def test_too_deep_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "1/2/3/4/5/6/7/fine", b"1")
    write(tmp_path / "1/2/3/4/5/6/7/8/deep", b"1")
    (entry,) = entries_in(KIND, at(tmp_path))
    KIND.check(opened(entry).statement)
    assert [item.reason for item in found_in(KIND, at(tmp_path))[1]] == [Reason.BAD_NAME]


def test_more_than_one_entry_may_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENTRY_BYTES", 100)
    for name in ("a", "b"):
        write(tmp_path / "x" / name, b"1" * 60)
    with pytest.raises(Excluded) as caught:
        entries_in(KIND, at(tmp_path))
    assert caught.value.reason is Reason.TOO_LARGE


def test_a_truncated_shared_object_is_refused_both_ways(tmp_path: Path) -> None:
    sample(tmp_path / "a")
    write(tmp_path / "c" / "x" / "ops.so", elf()[:-1])
    with pytest.raises(Excluded):
        entries_in(KIND, at(tmp_path / "c"))
    entry = entries_in(KIND, at(tmp_path / "a"))[0]
    bad = opened(entry, plain=b"1", files=(File(name="ops.so", size=1),))
    with pytest.raises(DamagedError):
        KIND.install(bad, at(tmp_path / "b"))
    assert contents(tmp_path / "b") == {}


def test_an_undeclared_tree_is_not_installed(tmp_path: Path) -> None:
    sample(tmp_path / "a")
    verified = opened(entries_in(KIND, at(tmp_path / "a"))[0])
    with pytest.raises(NotFoundError, match="vllm"):
        KIND.install(verified, at(tmp_path / "b", "sglang"))
    assert contents(tmp_path) == {f"a/{name}": data for name, data in contents(tmp_path / "a").items()}


def test_a_link_below_the_root_is_not_installed_through(tmp_path: Path) -> None:
    sample(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "b" / "cache").symlink_to(tmp_path / "outside")
    verified = opened(entries_in(KIND, at(tmp_path / "a"))[1])
    with pytest.raises(InTheWayError, match="symbolic link"):
        KIND.install(verified, at(tmp_path / "b"))
    assert contents(tmp_path / "outside") == {}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-x", "x" * 33, "é", "a\n"])
def test_bad_names_of_trees(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        list(KIND.scan(at(tmp_path, name)))


def test_a_canary_is_carried_but_never_loaded(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.pkl", canary(tmp_path / "loaded"))
    (entry,) = entries_in(KIND, at(tmp_path / "a"))
    KIND.install(opened(entry), at(tmp_path / "b"))
    assert not (tmp_path / "loaded").exists()


BAD: dict[str, dict[str, Any]] = {
    "climbing": {"key": "vllm/../x"},
    "climbing from the top": {"key": "vllm/.."},
    "absolute": {"key": "vllm//etc"},
    "no folder": {"key": "vllm"},
    "an empty folder": {"key": "vllm/"},
    "hidden": {"key": "vllm/.torchrelay"},
    "no tree": {"key": "/x"},
    "too deep": {"key": "vllm/1/2/3/4/5/6/7/8"},
    "a temporary folder": {"key": "vllm/tmp.pid_1_x"},
    "hidden file": {"files": (File(name=".bashrc", size=1),)},
    "file in a folder": {"files": (File(name="x/y", size=1),)},
    "climbing file": {"files": (File(name="..", size=1),)},
    "lock": {"files": (File(name="x.lock", size=1),)},
    "no files": {"files": ()},
    "a variant": {"variant": "0" * 64},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_statements_that_cannot_be(change: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"key": "vllm/x", "files": (File(name="y", size=1),), "canon": "files-1"}
    KIND.check(make_record(b"1", kind="tree", **sound)[0].statement)
    with pytest.raises(FormatError):
        KIND.check(make_record(b"1", kind="tree", **{**sound, **change})[0].statement)
