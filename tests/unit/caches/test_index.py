# SPDX-License-Identifier: Apache-2.0
"""The index: an unchanged file is known, any change shows, and damage costs only time."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrelay
from cache_samples import canary, write
from torchrelay.caches.base import Entry, FileStat, Found, Reason, Skipped
from torchrelay.caches.files import stat_file
from torchrelay.caches.index import Index, Installed, Meta, fingerprint, meta_of
from torchrelay.caches.state import state_path
from torchrelay.digest import digest_of
from torchrelay.statement import File, Need

FILE = FileStat("3w/x.so", 4, 10, 11, 12)
FOUND = Found("cpp", "x", Path("/cache"), "inductor", (FILE,))
ENTRY = Entry(
    "aot_autograd",
    "a1",
    digest_of(b"variant"),
    (Need(kind="inductor", key="f1", variant=""),),
    ("torch", "python"),
    "torch-2.13",
    b"plain",
    (File(name="x", size=5),),
    (1, -2, 2**53 - 1),
    {"url": 2},
)


def path_of(root: Path) -> Path:
    return state_path(root) / "index.json"


def saved(root: Path) -> Index:
    index = Index.load(root)
    index.put(FOUND, [meta_of(ENTRY)])
    assert index.save()
    return Index.load(root)


def test_round_trip(tmp_path: Path) -> None:
    index = Index.load(tmp_path)
    assert index.get(FOUND) is None
    meta = meta_of(ENTRY)
    assert (meta.digest, meta.size) == (digest_of(b"plain"), 5)
    index.put(FOUND, [meta], [Skipped("p", Reason.SECRET, "a token")])
    index.save()
    known = Index.load(tmp_path).get(FOUND)
    assert known is not None
    assert known.metas == (meta,)
    assert known.skipped == (("p", Reason.SECRET, "a token"),)


def test_what_many_entries_have_in_common_is_one_object(tmp_path: Path) -> None:
    """And empty tuples are not taken for the empty tables that they are equal to as keys."""
    index = Index.load(tmp_path)
    places = [replace(FOUND, key=str(number)) for number in range(6)]
    bare = replace(ENTRY, needs=(), files=(), times=(), masked={})
    metas = [meta_of(ENTRY) if number % 2 else meta_of(bare) for number in range(len(places))]
    for found, meta in zip(places, metas, strict=True):
        index.put(found, [meta])
    index.save()
    loaded = Index.load(tmp_path)
    known = [loaded.get(found) for found in places]
    got = [item.metas[0] for item in known if item is not None]
    assert got == metas
    assert [type(meta.masked) for meta in got] == [dict] * len(places)
    assert len({id(meta.facets) for meta in got}) == 1
    assert len({id(meta.masked) for meta in got}) == 2
    loaded.put(places[0], [got[0]])
    assert loaded.save()
    assert Index.load(tmp_path).get(places[0]) == known[0]


def _fields(meta: Meta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in meta.__struct_fields__}


CHANGES = {
    "kind": replace(FOUND, kind="triton"),
    "key": replace(FOUND, key="y"),
    "place": replace(FOUND, place="triton"),
    "root": replace(FOUND, root=Path("/moved")),
    "one file more": replace(FOUND, files=(FILE, replace(FILE, name="3w/y"))),
    "name": replace(FOUND, files=(replace(FILE, name="3w/z"),)),
    "size": replace(FOUND, files=(replace(FILE, size=5),)),
    "mtime": replace(FOUND, files=(replace(FILE, mtime_ns=9),)),
    "ctime": replace(FOUND, files=(replace(FILE, ctime_ns=9),)),
    "inode": replace(FOUND, files=(replace(FILE, inode=9),)),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES.keys())
def test_any_change_is_another_file(tmp_path: Path, changed: Found) -> None:
    index = saved(tmp_path)
    assert fingerprint(changed) != fingerprint(FOUND)
    assert index.get(changed) is None
    assert index.get(FOUND) is not None


def test_a_file_rewritten_with_its_old_time_shows(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"1234")
    before = stat_file(tmp_path, "x")
    assert isinstance(before, FileStat)
    time.sleep(0.02)
    path.write_bytes(b"5678")
    os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
    after = stat_file(tmp_path, "x")
    assert isinstance(after, FileStat)
    assert (after.size, after.mtime_ns, after.inode) == (before.size, before.mtime_ns, before.inode)
    assert fingerprint(replace(FOUND, files=(after,))) != fingerprint(replace(FOUND, files=(before,)))


def test_a_file_that_changed_just_before_is_not_remembered_for_good(tmp_path: Path) -> None:
    fresh = replace(FOUND, files=(replace(FILE, ctime_ns=time.time_ns()),))
    index = Index.load(tmp_path)
    index.put(fresh, [meta_of(ENTRY)])
    assert index.get(fresh) is not None
    index.save()
    assert Index.load(tmp_path).get(fresh) is None


def test_what_was_read_in_another_way_is_read_again(tmp_path: Path) -> None:
    # Without the version of PyTorch the same file is `raw`; once it is known, it is canonical.
    index = Index.load(tmp_path)
    index.put(FOUND, [meta_of(ENTRY)])
    index.save()
    assert Index.load(tmp_path, reading="2.13.0").get(FOUND) is None
    known = Index.load(tmp_path, reading="2.13.0")
    known.put(FOUND, [meta_of(ENTRY)])
    known.save()
    assert Index.load(tmp_path, reading="2.13.0").get(FOUND) is not None
    assert Index.load(tmp_path).get(FOUND) is None


def test_what_is_gone_is_forgotten_but_not_what_was_not_looked_at(tmp_path: Path) -> None:
    other = replace(FOUND, place="tree:vllm")
    gone = replace(FOUND, key="gone")
    index = Index.load(tmp_path)
    for found in (FOUND, other, gone):
        index.put(found, [meta_of(ENTRY)])
    index.save()
    index = Index.load(tmp_path)
    index.scans(["inductor"])
    assert index.get(FOUND) is not None
    index.save()
    index = Index.load(tmp_path)
    assert index.get(gone) is None
    assert index.get(FOUND) is not None
    assert index.get(other) is not None


def test_a_place_whose_last_entry_is_gone_is_forgotten_too(tmp_path: Path) -> None:
    index = saved(tmp_path)
    index.scans(["inductor"])
    index.save()
    assert Index.load(tmp_path).get(FOUND) is None


DAMAGE = {
    "empty": lambda d: b"",
    "truncated": lambda d: d[:-1],
    "no header": lambda d: d.partition(b"\n")[2],
    "a digit": lambda d: d.replace(digest_of(b"plain").encode(), digest_of(b"other").encode()),
    "zeros": lambda d: bytes(len(d)),
    "deep": lambda d: d.partition(b"\n")[0] + b"\n" + b"[" * 200_000,
    "another version": lambda d: d.replace(torchrelay.__version__.encode(), b"0.0.0"),
    "another format": lambda d: d.replace(b'"format":2', b'"format":9'),
    "not text": lambda d: b"\xff\xfe" + d,
    "a list": lambda d: b"[]\n[]",
}


@pytest.mark.parametrize("spoil", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_index_is_empty_and_is_replaced(tmp_path: Path, spoil: Any) -> None:
    saved(tmp_path)
    data = path_of(tmp_path).read_bytes()
    bad = spoil(data)
    assert bad != data
    path_of(tmp_path).write_bytes(bad)
    assert Index.load(tmp_path).get(FOUND) is None
    assert saved(tmp_path).get(FOUND) is not None


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_no_bytes_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.mktemp("index")
    saved(root)
    path_of(root).write_bytes(data)
    assert Index.load(root).get(FOUND) is None


def test_a_canary_is_never_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    path_of(tmp_path).write_bytes(canary(tmp_path / "loaded"))
    assert Index.load(tmp_path).get(FOUND) is None
    assert not (tmp_path / "loaded").exists()


def test_one_that_others_could_have_written_is_not_used(tmp_path: Path) -> None:
    saved(tmp_path)
    state_path(tmp_path).chmod(0o777)
    index = Index.load(tmp_path)
    assert index.get(FOUND) is None
    index.put(FOUND, [meta_of(ENTRY)])
    assert index.save() is False


def test_what_an_install_put_in_place_is_known_to_the_next_scan(tmp_path: Path) -> None:
    write(tmp_path / "3w" / "x.so", b"1234")
    index = Index.load(tmp_path)
    meta = Meta(**{**_fields(meta_of(ENTRY)), "kind": "cpp", "key": "x"})
    index.learn(Installed(tmp_path, "inductor", ("3w/x.so",), meta))
    index.save()
    stat = stat_file(tmp_path, "3w/x.so")
    assert isinstance(stat, FileStat)
    known = Index.load(tmp_path).get(Found("cpp", "x", tmp_path, "inductor", (stat,)))
    assert known is not None
    assert known.metas == (meta,)


def test_ten_thousand_entries_load_fast(tmp_path: Path) -> None:
    index = Index.load(tmp_path)
    for number in range(10_000):
        found = replace(FOUND, key=f"k{number}", files=(FILE, replace(FILE, name=f"3w/{number}")))
        index.put(found, [meta_of(replace(ENTRY, key=f"k{number}"), digest=digest_of(b"%d" % number))])
    index.save()
    best = 9.0
    for _ in range(3):
        started = time.process_time()
        index = Index.load(tmp_path)
        best = min(best, time.process_time() - started)
    assert index.get(replace(FOUND, key="k9999", files=(FILE, replace(FILE, name="3w/9999")))) is not None
    assert best < 0.2
