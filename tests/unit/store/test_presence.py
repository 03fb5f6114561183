# SPDX-License-Identifier: Apache-2.0
"""What the store really has: asked for in few requests, and never assumed."""

from __future__ import annotations

from typing import Literal

import pytest

from torchrelay.digest import digest_of
from torchrelay.errors import StorageError, TransientError
from torchrelay.statement import blob_name
from torchrelay.store.presence import FEW, MANY_SHARDS, stored_sizes
from torchrelay.testing import FaultyBackend
from torchrelay_memory import MemoryBackend
from torchrelay_memory.backend import forget


@pytest.fixture
def backend() -> FaultyBackend:
    """Counts calls; any may be made to fail."""
    forget("presence")
    return FaultyBackend(MemoryBackend("presence"))


def in_shard(shard: int, number: int = 0) -> str:
    return blob_name(digest_of(b"").__class__(f"{shard:02x}{number:062x}"))


def fill(backend: FaultyBackend, names: list[str]) -> None:
    for size, name in enumerate(names, 1):
        backend.inner.put(name, b"x" * size)


def operations(backend: FaultyBackend) -> dict[str, int]:
    counts: dict[str, int] = {}
    for operation, _ in backend.calls:
        counts[operation] = counts.get(operation, 0) + 1
    return counts


def test_nothing_asked_costs_nothing(backend: FaultyBackend) -> None:
    assert stored_sizes(backend, []) == {}
    assert backend.calls == []


@pytest.mark.parametrize("count", [1, FEW])
def test_a_few_are_asked_for_by_name(backend: FaultyBackend, count: int) -> None:
    names = [in_shard(n) for n in range(count)]
    fill(backend, names)
    assert stored_sizes(backend, names) == {name: size for size, name in enumerate(names, 1)}
    assert operations(backend) == {"stat": count}


@pytest.mark.parametrize(
    ("shards", "each", "listings"),
    [(1, FEW + 1, 1), (3, 2, 3), (MANY_SHARDS - 1, 1, MANY_SHARDS - 1), (MANY_SHARDS, 1, 1), (256, 2, 1)],
)
def test_many_are_listed_by_shard_or_all_at_once(
    backend: FaultyBackend, shards: int, each: int, listings: int
) -> None:
    names = [in_shard(shard, number) for shard in range(shards) for number in range(each)]
    fill(backend, names)
    assert stored_sizes(backend, names) == {name: size for size, name in enumerate(names, 1)}
    assert operations(backend) == {"list": listings}
    asked = {prefix for _, prefix in backend.calls}
    assert asked == ({"blobs/"} if shards >= MANY_SHARDS else {f"blobs/{s:02x}/" for s in range(shards)})


def test_a_listing_can_be_asked_for(backend: FaultyBackend) -> None:
    fill(backend, [in_shard(1)])
    assert stored_sizes(backend, [in_shard(1)], few=0) == {in_shard(1): 1}
    assert operations(backend) == {"list": 1}


@pytest.mark.parametrize("others", [0, 5])
def test_what_is_not_there_is_not_in_the_answer(backend: FaultyBackend, others: int) -> None:
    names = [in_shard(0, n) for n in range(1 + others)]
    fill(backend, names[1:])
    fill(backend, [in_shard(0, 99), in_shard(9)])
    found = stored_sizes(backend, names)
    assert set(found) == set(names[1:])


def test_a_later_copy_is_another_object(backend: FaultyBackend) -> None:
    name = in_shard(7)
    fill(backend, [f"{name}.1"])
    assert stored_sizes(backend, [name]) == {}
    names = [name, f"{name}.1", f"{name}.2", f"{name}.10"]
    assert stored_sizes(backend, names) == {f"{name}.1": 1}


@pytest.mark.parametrize(("operation", "count"), [("stat", 2), ("list", 3), ("list", 200)])
def test_what_cannot_be_asked_is_not_taken_as_absent(
    backend: FaultyBackend, operation: Literal["stat", "list"], count: int
) -> None:
    names = [in_shard(n) for n in range(count)]
    fill(backend, names)
    with backend:
        last = 2 if operation == "stat" else 1
        backend.arm(operation, nth=last, error=TransientError("no answer"))
        with pytest.raises(StorageError, match="no answer"):
            stored_sizes(backend, names)
