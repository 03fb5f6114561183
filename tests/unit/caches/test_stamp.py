# SPDX-License-Identifier: Apache-2.0
"""Stamps: the first writer wins, another environment is named, damage is told."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from cache_samples import canary, plant, write
from torchrelay.caches.stamp import Stamp, read_stamp, write_stamp
from torchrelay.caches.state import state_path
from torchrelay.environment import Environment
from torchrelay.errors import RelayError, StampError, UnsafeDirectoryError

AVX512 = Environment(1, {"cpu_isa": "avx512", "machine": "x86_64"}, {"threads": "2"})
AVX2 = Environment(1, {"cpu_isa": "avx2", "machine": "x86_64"}, {"threads": "2"})


def test_round_trip(tmp_path: Path) -> None:
    assert read_stamp(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()
    stamp = Stamp(AVX512, 1_800_000_000_123_456_789)
    assert write_stamp(tmp_path / "new", stamp) == stamp
    assert read_stamp(tmp_path / "new") == stamp
    assert stat.S_IMODE(state_path(tmp_path / "new").stat().st_mode) == 0o700


def test_the_first_writer_wins(tmp_path: Path) -> None:
    first = write_stamp(tmp_path, Stamp(AVX512, 5))
    assert write_stamp(tmp_path, Stamp(AVX512, 9)) == first == read_stamp(tmp_path)


def test_other_settings_are_the_same_directory(tmp_path: Path) -> None:
    first = write_stamp(tmp_path, Stamp(AVX512, 5))
    assert write_stamp(tmp_path, Stamp(Environment(1, AVX512.facets, {}), 9)) == first


def test_another_environment_is_named_and_changes_nothing(tmp_path: Path) -> None:
    first = write_stamp(tmp_path, Stamp(AVX512, 5))
    with pytest.raises(StampError, match=r"differs in cpu_isa$") as caught:
        write_stamp(tmp_path, Stamp(AVX2, 9))
    assert caught.value.remedy
    assert read_stamp(tmp_path) == first


def _race(root: str, number: int, barrier: object) -> int:
    barrier.wait()  # type: ignore[attr-defined]
    return write_stamp(Path(root), Stamp(AVX512, number)).since_ns


def test_many_processes_agree_on_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(4) as pool:
        barrier = manager.Barrier(4)
        held = pool.starmap(_race, [(str(tmp_path / "new"), number, barrier) for number in range(4)])
    stamp = read_stamp(tmp_path / "new")
    assert stamp is not None
    assert held == [stamp.since_ns] * 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 200_000,
        b"\xff" * 100,
        b'{"format":1}',
        b'{"environment":{"facets":{},"format":1,"settings":{}},"format":2,"since_ns":1}',
        b'{"environment":{"facets":{"UPPER":"1"},"format":1,"settings":{}},"format":1,"since_ns":1}',
        b'{"environment":{"facets":{},"format":1,"settings":{}},"extra":1,"format":1,"since_ns":1}',
        b" " * (2 * 1024 * 1024),
    ],
)
def test_a_damaged_stamp_is_told_and_left(tmp_path: Path, data: bytes) -> None:
    write_stamp(tmp_path, Stamp(AVX512, 5))
    path = state_path(tmp_path) / "stamp.json"
    path.write_bytes(data)
    with pytest.raises(StampError) as caught:
        read_stamp(tmp_path)
    assert str(path) in caught.value.remedy
    with pytest.raises(StampError):
        write_stamp(tmp_path, Stamp(AVX512, 6))
    assert path.read_bytes() == data


def test_a_canary_is_never_loaded(tmp_path: Path) -> None:
    write_stamp(tmp_path, Stamp(AVX512, 5))
    (state_path(tmp_path) / "stamp.json").write_bytes(canary(tmp_path / "loaded"))
    with pytest.raises(StampError):
        read_stamp(tmp_path)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("planted", ["link", "folder", "fifo"])
def test_what_is_no_file_is_refused(tmp_path: Path, planted: str) -> None:
    write_stamp(tmp_path, Stamp(AVX512, 5))
    path = state_path(tmp_path) / "stamp.json"
    path.unlink()
    plant(path, planted)
    with pytest.raises(StampError):
        read_stamp(tmp_path)


@pytest.mark.parametrize("planted", ["open to the group", "link", "a file", "own folder is a link"])
def test_a_state_folder_that_others_could_write_is_refused(tmp_path: Path, planted: str) -> None:
    write_stamp(tmp_path, Stamp(AVX512, 5))
    path = state_path(tmp_path)
    if planted == "open to the group":
        path.chmod(0o770)
    else:
        moved = path.parent if planted == "own folder is a link" else path
        moved.rename(tmp_path / "moved")
        if planted == "a file":
            write(path, b"")
        else:
            moved.symlink_to(tmp_path / "moved")
    with pytest.raises(UnsafeDirectoryError) as caught:
        read_stamp(tmp_path)
    assert caught.value.remedy


def _as_user(uid: int, root: str) -> str:
    os.setgid(4242)
    os.setuid(uid)
    os.umask(0o002)
    try:
        stamp = write_stamp(Path(root), Stamp(AVX512, uid))
    except RelayError as exc:
        return type(exc).__name__
    return str(stamp.since_ns)


def test_a_directory_shared_by_a_group_works_for_each_user(tmp_path: Path) -> None:
    """D03: 2775, umask 002; each user has a state of their own, and cannot read the other's."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    base = Path("/tmp") / f"torchrelay-test-{os.getpid()}"  # where another user can reach it
    shared = base / "cache"
    shared.mkdir(parents=True)
    try:
        base.chmod(0o755)
        os.chown(shared, 5001, 4242)
        shared.chmod(0o2775)
        context = multiprocessing.get_context("spawn")
        for uid in (5001, 5002, 5001):
            with context.Pool(1) as pool:
                assert pool.apply(_as_user, (uid, str(shared))) == str(uid)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) & 0o777 for p in (shared / ".torchrelay").iterdir()}
        assert modes == {"state-5001": 0o700, "state-5002": 0o700}
    finally:
        shutil.rmtree(base)
