# SPDX-License-Identifier: Apache-2.0
"""The ledger: durable before the install, torn tails healed, damage told, nothing pulled is signed."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_samples import canary, plant
from torchrelay.caches import ledger as ledger_module
from torchrelay.caches.base import Roots
from torchrelay.caches.ledger import Ledger, Noted, noted_of
from torchrelay.caches.state import state_path
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError, PermanentError, StorageError, UnsafeDirectoryError
from torchrelay.testing.entries import make_record


def line(number: int = 0, **changes: Any) -> Noted:
    fields: dict[str, Any] = {
        "kind": "inductor",
        "key": f"f{number}",
        "variant": "",
        "requires": digest_of(b"requires"),
        "canon": "torch-2.13",
        "digest": digest_of(b"%d" % number),
    }
    return Noted(**{**fields, **changes})


def asked(noted: Noted, **changes: Any) -> dict[str, Any]:
    fields = {name: getattr(noted, name) for name in ("kind", "key", "canon", "digest")}
    return {**fields, **changes}


def path_of(root: Path) -> Path:
    return state_path(root) / "ledger.jsonl"


def test_a_directory_without_one_has_an_empty_one_and_stays_so(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "absent")
    assert (len(ledger), ledger.pulled(**asked(line()))) == (0, False)
    assert ledger.note([]) == 0
    assert not (tmp_path / "absent").exists()


def test_what_was_noted_is_known_here_and_to_others(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    assert ledger.note([line(0), line(1), line(0)]) == 2
    assert ledger.note([line(1), line(2)]) == 1
    for reader in (ledger, Ledger.open(tmp_path)):
        assert len(reader) == 3
        assert all(reader.pulled(**asked(line(number))) for number in range(3))
        assert not reader.pulled(**asked(line(3)))


def test_the_line_of_a_statement(tmp_path: Path) -> None:
    record, _ = make_record(b"plain", canon="raw")
    ledger = Ledger.open(tmp_path)
    ledger.note([noted_of(record.statement)])
    statement = record.statement
    assert ledger.pulled(kind=statement.kind, key=statement.key, canon="raw", digest=statement.digest)


CASES = {
    "the same": ({}, True),
    "another kind": ({"kind": "cpp"}, False),
    "another key": ({"key": "f1"}, False),
    "other bytes: compiled here since": ({"digest": digest_of(b"new")}, False),
    "another form of it: digests say nothing": ({"canon": "torch-2.14", "digest": digest_of(b"new")}, True),
}


@pytest.mark.parametrize(("change", "expected"), CASES.values(), ids=CASES.keys())
def test_what_counts_as_pulled(tmp_path: Path, change: dict[str, Any], expected: bool) -> None:
    Ledger.open(tmp_path).note([line()])
    assert Ledger.open(tmp_path).pulled(**asked(line(), **change)) is expected


def test_the_variant_that_a_signer_stated_does_not_count(tmp_path: Path) -> None:
    """The bytes are the same, whatever they were published as."""
    ledger = Ledger.open(tmp_path)
    assert ledger.note([line(variant=digest_of(b"wrong"))]) == 1
    assert ledger.note([line()]) == 0 and ledger.pulled(**asked(line()))


def test_what_lies_in_a_directory_of_its_own_is_noted_there_too(tmp_path: Path) -> None:
    """So a second Inductor directory that is used with it knows."""
    outer = {"triton": tmp_path / "triton", "trees": {"vllm": tmp_path / "tree", "other": tmp_path / "other"}}
    lines = [line(1), line(2, kind="triton"), line(3, kind="tree", key="vllm/x")]
    ledger = Ledger.of(Roots(tmp_path / "a", **outer))  # type: ignore[arg-type]
    assert ledger.note(lines) == 3 and not path_of(tmp_path / "other").exists()
    second = Ledger.of(Roots(tmp_path / "b", **outer))  # type: ignore[arg-type]
    assert [second.pulled(**asked(one)) for one in lines] == [False, True, True]
    assert [second.knows(one.kind, one.key) for one in lines] == [False, True, True]
    assert second.pulled(**asked(lines[1], canon="another", digest=digest_of(b"another")))
    # And a directory that is used alone.
    assert [len(Ledger.open(tmp_path / name)) for name in ("a", "triton", "tree")] == [3, 1, 1]


def test_pulled_in_two_forms_the_digest_decides(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note([line(), line(canon="raw", digest=digest_of(b"raw"))])
    ledger = Ledger.open(tmp_path)
    assert ledger.pulled(**asked(line()))
    assert ledger.pulled(**asked(line(), canon="raw", digest=digest_of(b"raw")))
    assert not ledger.pulled(**asked(line(), digest=digest_of(b"new")))


@given(cut=st.integers(0, 10_000), garbage=st.binary(max_size=40).filter(lambda b: b"\n" not in b))
@settings(max_examples=60, deadline=None)
def test_a_torn_tail_costs_only_itself_and_is_healed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    root = tmp_path_factory.mktemp("torn")
    Ledger.open(root).note(line(number) for number in range(5))
    path = path_of(root)
    whole = path.read_bytes()
    cut = cut % (len(whole) + 1)
    path.write_bytes(whole[:cut] + garbage)
    lines = whole[:cut].count(b"\n")
    if not lines:  # what does not begin as a ledger is none
        path.write_bytes(whole[:cut] + bytes(len(garbage)))
    torn = Ledger.open(root)
    assert len(torn) == max(0, lines - 1)
    torn.note([line(7)])
    healed = Ledger.open(root)
    assert len(healed) == max(0, lines - 1) + 1
    assert healed.pulled(**asked(line(7)))


def test_zeros_of_a_power_failure_are_a_torn_tail(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note([line()])
    with path_of(tmp_path).open("ab") as stream:
        stream.write(bytes(300_000))
    ledger = Ledger.open(tmp_path)
    ledger.note([line(1)])
    assert len(Ledger.open(tmp_path)) == 2
    assert path_of(tmp_path).stat().st_size < 2000


def _changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


DAMAGE = {
    "another file without a line feed": lambda d: b"\x80\x04N.",
    "a digit of a digest": lambda d: _changed(d, line().digest.encode(), digest_of(b"x").encode()),
    "a key": lambda d: _changed(d, b'"f0"', b'"g0"'),
    "a line in the middle cut": lambda d: _changed(d, b'"variant":""}]\n[', b'"var\n['),
    "a line in the middle emptied": lambda d: _changed(d, b"}]\n[", b"}]\n\n["),
    "not JSON": lambda d: d + b"garbage\n",
    "nested": lambda d: d + b"[" * 3000 + b"\n",
    "an endless line": lambda d: d + b"x" * 10_000 + b"\n",
    "not text": lambda d: d + b"\xff\xfe\n",
    "a newer format": lambda d: _changed(d, b'"format":1', b'"format":2'),
    "no header": lambda d: d.partition(b"\n")[2],
    "zeros": lambda d: bytes(len(d)) + b"\n",
    "an endless header": lambda d: b"x" * 10_000,
}


@pytest.mark.parametrize("spoil", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_told_and_left_as_it_is(tmp_path: Path, spoil: Any) -> None:
    Ledger.open(tmp_path).note([line(0), line(1)])
    path = path_of(tmp_path)
    bad = spoil(path.read_bytes())
    path.write_bytes(bad)
    with pytest.raises(DamagedError) as caught:
        Ledger.open(tmp_path)
    assert str(tmp_path) in caught.value.remedy
    assert path.read_bytes() == bad


def test_a_canary_is_never_loaded(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note([line()])
    path_of(tmp_path).write_bytes(canary(tmp_path / "loaded") + b"\n" * 5)
    with pytest.raises(DamagedError):
        Ledger.open(tmp_path)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("planted", ["link", "folder", "fifo"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, planted: str) -> None:
    Ledger.open(tmp_path).note([line()])
    path, target = path_of(tmp_path), tmp_path / "target"
    path.unlink()
    target.write_bytes(b"mine")
    plant(path, planted, target)
    with pytest.raises((DamagedError, StorageError)):
        Ledger.open(tmp_path)
    with pytest.raises((DamagedError, StorageError)):
        Ledger(tmp_path).note([line(1)])
    assert target.read_bytes() == b"mine"


def test_a_state_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note([line()])
    state_path(tmp_path).chmod(0o777)
    with pytest.raises(UnsafeDirectoryError):
        Ledger.open(tmp_path)
    with pytest.raises(UnsafeDirectoryError):
        Ledger(tmp_path).note([line(1)])


def test_a_write_that_fails_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(tmp_path)
    ledger.note([line(0)])
    before = path_of(tmp_path).read_bytes()

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_module, "_write", full)
    with pytest.raises(PermanentError, match="No space left"):
        ledger.note([line(1)])
    assert path_of(tmp_path).read_bytes() == before
    assert not ledger.pulled(**asked(line(1)))


def test_it_is_on_disk_before_note_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Ledger.open(tmp_path).note([line()])
    assert path_of(tmp_path).stat().st_size in synced
    assert len(synced) == 2  # the file, and the folder that names it


def _append(root: str, worker: int) -> None:
    ledger = Ledger.open(Path(root))
    for number in range(25):
        ledger.note([line(worker * 100 + number), line(worker * 100 + number + 50)])


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(str(tmp_path), worker)) for worker in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0] * 4
    assert len(Ledger.open(tmp_path)) == 4 * 50


def test_lines_are_json_for_others_to_read(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note([line()])
    header, entry = path_of(tmp_path).read_text().splitlines()
    assert json.loads(header) == {"format": 1, "type": "ledger"}
    assert json.loads(entry)[1]["key"] == "f0"


def test_ten_thousand_entries(tmp_path: Path) -> None:
    Ledger.open(tmp_path).note(line(number) for number in range(10_000))
    started = time.process_time()
    Ledger.open(tmp_path)
    assert time.process_time() - started < 1
    tracemalloc.start()
    ledger = Ledger.open(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ledger) == 10_000
    assert held < 300 * 10_000
