# SPDX-License-Identifier: Apache-2.0
"""A client's memory: lost, damaged, planted or forbidden, it costs time and never correctness."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_samples import canary
from torchrelay import canonjson, limits
from torchrelay.digest import digest_of
from torchrelay.store import state as state_module
from torchrelay.store.state import MAX_SEGMENTS, ClientState, Memory

WORKLOAD = "acme/demo"
SLUG = digest_of(WORKLOAD.encode())
D = digest_of(b"segment")
MEMORY = Memory(generation=3, highest_seq=9, segments=(f"manifests/{WORKLOAD}/{D}/{D}",))

root_only = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store"


def fill(folder: Path) -> ClientState:
    state = ClientState(folder)
    state.remember(WORKLOAD, MEMORY)
    state.keep_segment(WORKLOAD, D, b"segment")
    state.keep_document(D, b"document")
    state.mark(["blobs/aa/x"])
    return state


def is_blank(state: ClientState) -> bool:
    return (
        state.memory(WORKLOAD) == Memory()
        and state.segment(WORKLOAD, D) is None
        and state.document(D) is None
        and state.marked() == frozenset()
    )


def test_what_is_kept_is_there_next_time(folder: Path) -> None:
    fill(folder)
    again = ClientState(folder)
    assert again.memory(WORKLOAD) == MEMORY
    assert again.segment(WORKLOAD, D) == b"segment"
    assert again.document(D) == b"document"
    assert again.marked() == {"blobs/aa/x"}
    assert again.memory("acme") == Memory() and again.segment("acme/demo2", D) is None


def test_workloads_and_stores_are_apart(tmp_path: Path) -> None:
    one = ClientState.of_store(tmp_path, "file:///a")
    one.remember(WORKLOAD, MEMORY)
    assert ClientState.of_store(tmp_path, "file:///a").memory(WORKLOAD) == MEMORY
    assert is_blank(ClientState.of_store(tmp_path, "file:///b"))
    assert one.memory("acme/demo/x") == Memory()


def test_no_directory_means_no_memory() -> None:
    for state in (ClientState(None), ClientState.of_store(None, "file:///a")):
        state.remember(WORKLOAD, MEMORY)
        state.keep_segment(WORKLOAD, D, b"x")
        state.mark(["blobs/aa/x"])
        state.unmark(["blobs/aa/x"])
        state.forget_segments(WORKLOAD, but=frozenset())
        assert is_blank(state)


def test_only_the_owner_reads_it(folder: Path) -> None:
    fill(folder)
    for path in [folder, *folder.rglob("*")]:
        assert not path.stat().st_mode & 0o077, path


def test_marks(folder: Path) -> None:
    state = fill(folder)
    state.mark(["b", "a", "b"])
    state.unmark(["blobs/aa/x", "never marked"])
    assert ClientState(folder).marked() == {"a", "b"}
    assert (folder / "damaged.json").read_bytes() == b'{"blobs":["a","b"],"format":1}'
    state.unmark(["a", "b"])
    assert ClientState(folder).marked() == frozenset()


def test_segments_that_are_no_longer_listed_are_dropped(folder: Path) -> None:
    state = fill(folder)
    other = digest_of(b"other")
    state.keep_segment(WORKLOAD, other, b"other")
    state.keep_segment("another", other, b"other")
    state.forget_segments(WORKLOAD, but=frozenset({D}))
    assert state.segment(WORKLOAD, D) == b"segment" and state.segment(WORKLOAD, other) is None
    assert state.segment("another", other) == b"other" and state.memory(WORKLOAD) == MEMORY


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-1],
    "flipped": lambda data: data[:3] + bytes([data[3] ^ 1]) + data[4:],
    "zeros": lambda data: bytes(len(data)),
    "line-feed": lambda data: data + b"\n",
    "another-format": lambda data: data.replace(b'"format":1', b'"format":2'),
    "unknown-member": lambda data: data[:-1] + b',"zz":1}',
    "deep": lambda _: b"[" * 1_000_000,
    "float": lambda data: data.replace(b'"format":1', b'"format":1.0'),
    "not-utf8": lambda _: b"\xff\xfe",
    "too-large": lambda _: b" " * (16 * limits.MIB + 1),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
@pytest.mark.parametrize("name", [f"{SLUG}.json", "damaged.json"])
def test_damaged(folder: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
    fill(folder)
    path = folder / name
    path.write_bytes(spoil(path.read_bytes()))
    state = ClientState(folder)
    if name == "damaged.json":
        assert state.marked() == frozenset()
        state.mark(["a"])
        assert ClientState(folder).marked() == {"a"}
    else:
        assert state.memory(WORKLOAD) == Memory()
        assert state.has_lost(WORKLOAD) and not state.has_lost("another")
        state.remember(WORKLOAD, MEMORY)
        assert ClientState(folder).memory(WORKLOAD) == MEMORY
        assert not ClientState(folder).has_lost(WORKLOAD)


def test_a_memory_that_was_never_there_is_not_lost(folder: Path) -> None:
    assert not ClientState(folder).has_lost(WORKLOAD)
    assert not ClientState(None).has_lost(WORKLOAD)


def test_damage_to_a_memory_of_nothing_is_mended_too(folder: Path) -> None:
    state = fill(folder)
    (folder / f"{SLUG}.json").write_bytes(b"")
    state.remember(WORKLOAD, Memory())
    assert not state.has_lost(WORKLOAD)


def test_segments_beyond_the_bound_are_not_remembered_and_the_rest_is(folder: Path) -> None:
    name = "x" * (limits.MAX_OBJECT_NAME_CHARS - 6)
    names = tuple(f"{name}{number:06}" for number in range(MAX_SEGMENTS + 5))
    state = ClientState(folder)
    state.remember(WORKLOAD, Memory(generation=5, highest_seq=7, segments=names))
    assert not state.has_lost(WORKLOAD)
    found = ClientState(folder).memory(WORKLOAD)
    assert found == Memory(generation=5, highest_seq=7, segments=names[:MAX_SEGMENTS])


def test_what_another_process_learned_meanwhile_is_kept(folder: Path) -> None:
    fill(folder)
    one, two = ClientState(folder), ClientState(folder)
    seen = one.memory(WORKLOAD)
    two.remember(WORKLOAD, Memory(generation=4, highest_seq=20, segments=("b",)), seen=seen)
    one.remember(WORKLOAD, Memory(generation=3, highest_seq=30, segments=("a",)), seen=seen)
    assert one.memory(WORKLOAD) == Memory(generation=4, highest_seq=30, segments=("a", "b"))


def test_two_processes_that_mark_lose_none(folder: Path) -> None:
    state = ClientState(folder)

    def mark(who: int) -> None:
        for number in range(50):
            ClientState(folder).mark([f"{who}-{number}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(mark, range(4)))
    assert state.marked() == {f"{who}-{number}" for who in range(4) for number in range(50)}


def test_a_lock_that_is_never_given_back_is_not_waited_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "_LOCK_SECONDS", 0.05)
    state = fill(folder)
    with (folder / ".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        state.mark(["a"])
    assert "a" in state.marked()


def test_what_killed_processes_left_is_swept(folder: Path) -> None:
    fill(folder)
    old, new = folder / ".tmp-old", folder / ".tmp-new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    again = ClientState(folder)
    assert not old.exists() and new.exists()
    assert again.memory(WORKLOAD) == MEMORY


def test_a_planted_pickle_is_bytes_and_nothing_more(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    marker = tmp_path / "executed"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 5  # and the lock
    for path in files:
        path.write_bytes(canary(marker))
    state = ClientState(folder)
    assert state.memory(WORKLOAD) == Memory() and state.marked() == frozenset()
    assert state.segment(WORKLOAD, D) == state.document(D) == canary(marker)
    assert not marker.exists()


def test_numbers_beyond_all_bounds_are_still_a_memory(folder: Path) -> None:
    """They are only compared; what is published from them is bounded where it is published."""
    fill(folder)
    memory = Memory(generation=2**62, highest_seq=2**53 - 1)
    (folder / f"{SLUG}.json").write_bytes(canonjson.encode(memory))
    assert ClientState(folder).memory(WORKLOAD) == memory


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_what_is_not_a_plain_file_is_not_read_nor_waited_for(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(canonjson.encode(MEMORY))
    for plant in (
        lambda path: path.symlink_to(secret),
        lambda path: path.symlink_to(tmp_path / "nowhere"),
        os.mkfifo,
        lambda path: path.mkdir(),
    ):
        fill(folder)
        before = open_files()
        names = [f"{SLUG}.json", "damaged.json", f"{SLUG}/{D}", f"environments/{D}"]
        for name in names:
            (folder / name).unlink()
            plant(folder / name)
        assert is_blank(ClientState(folder))
        assert open_files() == before
        for name in names:
            path = folder / name
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_link_is_replaced_and_not_written_through(folder: Path, tmp_path: Path) -> None:
    fill(folder)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = folder / f"{SLUG}.json"
    path.unlink()
    path.symlink_to(victim)
    state = ClientState(folder)
    state.remember(WORKLOAD, MEMORY)
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink() and state.memory(WORKLOAD) == MEMORY


def test_a_directory_that_is_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    assert is_blank(fill(folder))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(folder: Path, mode: int) -> None:
    fill(folder)
    folder.chmod(mode)
    state = ClientState(folder)
    assert is_blank(state)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    state.remember(WORKLOAD, Memory(generation=99))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_in_the_place_of_the_directory(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_bytes(b"a file")
    assert is_blank(fill(folder))
    assert folder.read_bytes() == b"a file"


@root_only
def test_a_directory_that_may_only_be_read(folder: Path) -> None:
    fill(folder)
    folder.chmod(0o500)
    try:
        state = ClientState(folder)
        state.remember(WORKLOAD, Memory(generation=99))
        state.mark(["a"])
        assert state.memory(WORKLOAD) == MEMORY and state.marked() == {"blobs/aa/x"}
    finally:
        folder.chmod(0o700)


def test_a_disk_that_takes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system, where even root is refused; no half-written file is left."""
    state = fill(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    state.remember(WORKLOAD, Memory(generation=99))
    state.keep_segment(WORKLOAD, digest_of(b"new"), b"new")
    monkeypatch.setattr(Path, "unlink", refuse)
    state.forget_segments(WORKLOAD, but=frozenset())
    monkeypatch.undo()
    assert state.memory(WORKLOAD) == MEMORY and state.segment(WORKLOAD, D) == b"segment"
    assert not [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


def test_a_segment_that_is_too_long_is_as_good_as_none(folder: Path) -> None:
    state = fill(folder)
    with (folder / SLUG / D).open("wb") as file:
        file.truncate(limits.MAX_SEGMENT_BYTES + 1)
    assert state.segment(WORKLOAD, D) is None
