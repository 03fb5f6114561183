# SPDX-License-Identifier: Apache-2.0
"""What a fetch reports: each entry once, each damaged object once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from push_world import Builder, blobs, builders, empty_store, publish_bogus
from torchrelay.errors import InstallError, PermanentError
from torchrelay.signing import VerifiedEntry
from torchrelay.store import state as state_module
from torchrelay.store.fetch import Fetch, Fetched
from torchrelay.store.state import ClientState
from torchrelay.store.view import load_view
from torchrelay.testing import FaultyBackend


class Basket:
    """A sink that takes everything."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def announce(self, entries: Sequence[VerifiedEntry]) -> None:
        pass

    def take(self, entry: VerifiedEntry) -> bool:
        self.taken.append(entry.plain)
        return True


@pytest.fixture
def store() -> FaultyBackend:
    return empty_store()


def fetch(reader: Builder, *, deadline: float | None = None) -> Fetched:
    session = reader.session()
    view = load_view(session)
    work = Fetch(session, Basket(), packed={}, deadline=deadline)
    return work.run(list(view.union.live.values()), [], ())


def test_a_ledger_that_cannot_be_written_is_the_cache_directorys_fault(store: FaultyBackend) -> None:
    """Nothing is installed that a push might sign, and the store is not blamed."""

    class Full(Basket):
        def announce(self, entries: Sequence[VerifiedEntry]) -> None:
            raise PermanentError("the disk is full", remedy="Free some space.", subject="ledger.jsonl")

    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    me.push()
    session, full = me.session(), Full()
    work = Fetch(session, full, packed={}, deadline=None)
    with pytest.raises(InstallError, match="the disk is full") as caught:
        work.run(list(load_view(session).union.live.values()), [], ())
    assert caught.value.subject == "ledger.jsonl"
    assert full.taken == []


def test_an_entry_that_is_damaged_and_then_late_is_reported_once(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    mallory, me = builders(2, store)
    me.shelf.add(b"plain")
    me.push()
    record = publish_bogus(mallory, b"plain", b"junk", seq=9)
    assert len(blobs(store)) == 2
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store.arm("get", names=record.stored.name, before=lambda _: clock.__setitem__(0, 10.0))
    fetched = fetch(me, deadline=5.0)
    assert fetched.installed.total() == 0
    assert len(fetched.damaged) == 1 and fetched.missing == []
    store.assert_all_faults_hit()


def test_an_entry_that_is_late_and_not_damaged_is_missing(store: FaultyBackend) -> None:
    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    me.push()
    fetched = fetch(me, deadline=time.monotonic() - 1)
    assert [problem.reason for problem in fetched.missing] == ["deadline"]


def test_a_damaged_object_is_reported_though_the_entry_came_from_another(store: FaultyBackend) -> None:
    mallory, me = builders(2, store)
    me.shelf.add(b"plain")
    me.push()
    publish_bogus(mallory, b"plain", b"junk", seq=9)
    fetched = fetch(me)
    assert fetched.installed.total() == 1 and not fetched.missing
    assert len(fetched.damaged) == 1


def test_marks_are_written_once(
    store: FaultyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (me,) = builders(1, store)
    for number in range(20):
        me.shelf.add(b"plain %d" % number, key="f" + "abcdefghijklmnopqrst"[number] * 51)
    me.push()
    names = blobs(store)
    for name in names:
        store.inner.put(name, b"rubbish")
    me.state = ClientState(tmp_path / "state")
    writes: list[str] = []
    write = ClientState._write
    monkeypatch.setattr(
        state_module.ClientState,
        "_write",
        lambda self, name, data: (writes.append(name), write(self, name, data)),
    )
    fetched = fetch(me)
    assert len(fetched.damaged) == 20 and me.state.marked() == names
    assert writes.count("damaged.json") == 1


def test_marks_are_kept_if_the_fetch_ends_in_an_error(
    store: FaultyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    me.push()
    (name,) = blobs(store)
    store.inner.put(name, b"rubbish")
    me.state = ClientState(tmp_path / "state")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchrelay.store.fetch._give_up", stop)
    with pytest.raises(KeyboardInterrupt):
        fetch(me)
    assert me.state.marked() == {name}
