# SPDX-License-Identifier: Apache-2.0
"""Blobs that are about to go: all lists are read, or nothing may be published."""

from __future__ import annotations

import pytest

from torchrelay import frame
from torchrelay.batch import encode_doomed
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import DamagedError, DeniedError, FormatError, NotFoundError, StorageError
from torchrelay.statement import blob_name
from torchrelay.store.doomed import damaged_lists, free_copy, read_doomed
from torchrelay.store.layout import DOOMED
from torchrelay.testing import FaultyBackend
from torchrelay_memory import MemoryBackend
from torchrelay_memory.backend import forget

ONE, TWO, THREE = (blob_name(digest_of(b"%d" % n)) for n in range(3))


@pytest.fixture
def backend() -> FaultyBackend:
    forget("doomed")
    return FaultyBackend(MemoryBackend("doomed"))


def doom(backend: FaultyBackend, *names: str) -> str:
    stored = encode_doomed(names)
    name = f"{DOOMED}{digest_of(stored)}"
    backend.inner.put(name, stored)
    return name


def test_no_list_costs_one_listing(backend: FaultyBackend) -> None:
    assert read_doomed(backend) == frozenset()
    assert backend.calls == [("list", "gc/")]


def test_all_lists_together(backend: FaultyBackend) -> None:
    doom(backend, ONE, TWO)
    doom(backend, TWO, THREE)
    doom(backend)
    assert read_doomed(backend) == {ONE, TWO, THREE}
    assert [operation for operation, _ in backend.calls] == ["list", "get", "get", "get"]


@pytest.mark.parametrize("name", ["README", f"{digest_of(b'x')}.tmp", f"sub/{digest_of(b'x')}"])
def test_what_has_no_lists_name_is_left_alone(backend: FaultyBackend, name: str) -> None:
    backend.inner.put(f"gc/{name}", b"rubbish")
    assert read_doomed(backend) == frozenset()


@pytest.mark.parametrize("keep", [0, 1, 10])
def test_a_torn_list_stops(backend: FaultyBackend, keep: int) -> None:
    doom(backend, TWO)
    name = doom(backend, ONE)
    with backend:
        backend.arm("get", names=name, keep=keep)
        with pytest.raises(DamagedError, match=name.removeprefix("gc/")):
            read_doomed(backend)


def test_a_newer_list_stops(backend: FaultyBackend) -> None:
    stored = frame.compress(b'{"format":2,"names":[],"type":"doomed"}')
    backend.inner.put(f"{DOOMED}{digest_of(stored)}", stored)
    with pytest.raises(FormatError, match="format 2"):
        read_doomed(backend)


@pytest.mark.parametrize(("error", "times"), [(DeniedError("no"), 1), (NotFoundError("gone"), 2)])
def test_a_list_that_cannot_be_had_stops(backend: FaultyBackend, error: StorageError, times: int) -> None:
    name = doom(backend, ONE)
    with backend:
        backend.arm("get", names=name, error=error, times=times)
        with pytest.raises(type(error)):
            read_doomed(backend)


def test_a_list_that_a_gc_deletes_after_the_listing_stops_nothing(backend: FaultyBackend) -> None:
    doom(backend, ONE)
    name = doom(backend, TWO)
    with backend:
        backend.arm("get", names=name, before=lambda _: backend.inner.delete_many([name]))
        assert read_doomed(backend) == {ONE}


def test_a_verification_does_not_count_a_list_that_is_gone(backend: FaultyBackend) -> None:
    doom(backend, ONE)
    name = doom(backend, TWO)
    with backend:
        backend.arm("get", names=name, before=lambda _: backend.inner.delete_many([name]))
        assert damaged_lists(backend) == (1, [])


def test_a_listing_that_fails_stops(backend: FaultyBackend) -> None:
    doom(backend, ONE)
    with backend:
        backend.arm("list", error=DeniedError("no"))
        with pytest.raises(DeniedError):
            read_doomed(backend)


D = Digest("ab" * 32)


@pytest.mark.parametrize(
    ("taken", "copy"), [((), 0), ((0,), 1), ((1,), 0), ((0, 1), 2), ((0, 2), 1), (tuple(range(1000)), 1000)]
)
def test_the_lowest_free_copy(taken: tuple[int, ...], copy: int) -> None:
    doomed = frozenset(blob_name(D, n) for n in taken) | {ONE}
    assert free_copy(D, doomed) == copy
    assert blob_name(D, copy) not in doomed
