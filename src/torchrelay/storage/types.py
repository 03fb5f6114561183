# SPDX-License-Identifier: Apache-2.0
"""The values that go into and come out of a backend."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torchrelay.errors import StorageError, UsageError
from torchrelay.limits import MIB


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing or stat shows it.

    Args:
        name: Its full name, without the store's own prefix.
        size: Its size in bytes.
        modified: Time of its last put by the store's own clock, in seconds since 1970, if known.
    """

    name: str
    size: int
    modified: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, and the token of the next; an empty token says that it was the last."""

    objects: tuple[ObjectInfo, ...]
    next_token: str


@dataclass(frozen=True, slots=True)
class Get:
    """A wish for an object's bytes, or a range of them.

    Args:
        name: The object's name.
        limit: The most bytes that may come back; a longer object yields ``TooLargeError``.
        offset: First byte wanted.
        length: Bytes wanted from there, at most ``limit``; None for all that follow.
    """

    name: str
    limit: int
    offset: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        if self.limit < 0 or self.offset < 0:
            raise UsageError(f"limit and offset of a get must not be negative: {self}", subject=self.name)
        if self.length is not None and not 0 <= self.length <= self.limit:
            raise UsageError(f"the length of a get must be within its limit: {self}", subject=self.name)

    @property
    def is_range(self) -> bool:
        """Whether less than the whole object is wanted."""
        return self.offset > 0 or self.length is not None

    @property
    def bound(self) -> int:
        """The most bytes that can come back."""
        return self.limit if self.length is None else self.length


@dataclass(frozen=True, slots=True)
class Got:
    """What became of a get: ``data`` or ``error``, exactly one of them."""

    get: Get
    data: bytes | None = None
    error: StorageError | None = None

    def unwrap(self) -> bytes:
        """The bytes.

        Raises:
            StorageError: The get failed.
        """
        if self.data is None:
            raise self.error or StorageError(f"no result for {self.get.name}", subject=self.get.name)
        return self.data


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend promises beyond the contract's core (``backend-contract.md`` §4).

    Args:
        atomic_put: A put is seen whole or not at all.
        durable: A put that was reported as done survives a crash of the store's machine.
        ranges: A get may ask for a part of an object.
        store_time: ``ObjectInfo.modified`` is given, by the store's own clock.
        writable: Puts may succeed.
        deletes: Deletes may succeed.
        evicts: Objects may vanish by themselves; a vanished one is no alarm.
    """

    atomic_put: bool = True
    durable: bool = True
    ranges: bool = True
    store_time: bool = True
    writable: bool = True
    deletes: bool = True
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a backend may have in flight at once.

    Args:
        requests: Requests side by side.
        bytes: Bytes of results that the caller has not taken yet, by the gets' bounds.
    """

    requests: int = 32
    bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        if self.requests < 1 or self.bytes < 1:
            raise UsageError(f"a budget must be positive: {self}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A count of requests and object bytes. Law: ``(a + b) - b == a``."""

    requests: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests,
            self.uploaded_bytes + other.uploaded_bytes,
            self.downloaded_bytes + other.downloaded_bytes,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests - other.requests,
            self.uploaded_bytes - other.uploaded_bytes,
            self.downloaded_bytes - other.downloaded_bytes,
        )


class Counters:
    """A running :class:`Traffic`, safe to add to from many threads."""

    def __init__(self, start: Traffic | None = None) -> None:
        self._lock = threading.Lock()
        self._total = start or Traffic()

    def add(self, *, requests: int = 0, uploaded_bytes: int = 0, downloaded_bytes: int = 0) -> None:
        """Count what went over the wire."""
        more = Traffic(requests, uploaded_bytes, downloaded_bytes)
        with self._lock:
            self._total = self._total + more

    def total(self) -> Traffic:
        """The count so far. Reading one attribute needs no lock."""
        return self._total
