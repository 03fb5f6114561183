# SPDX-License-Identifier: Apache-2.0
"""Faults on demand, around any backend."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from torchrelay.errors import StorageError, TransientError, UsageError
from torchrelay.storage import Get, Got, ObjectInfo, Page, WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrelay.storage import Backend

Operation = Literal["put", "get", "stat", "delete", "list"]
_OPERATIONS = ("put", "get", "stat", "delete", "list")


@dataclass(slots=True)
class Fault:
    """One armed fault; made by :meth:`FaultyBackend.arm`, which explains the fields."""

    operation: Operation
    names: str
    nth: int
    times: int
    error: StorageError | None
    keep: int | None
    flip: int | None
    replace: bytes | None
    before: Callable[[str], None] | None
    seen: int = 0
    hits: int = 0
    hit_names: list[str] = field(default_factory=list)

    def matches(self, operation: str, name: str) -> bool:
        """Count an operation; whether it is one that is to fail."""
        if operation != self.operation or not fnmatchcase(name, self.names):
            return False
        self.seen += 1
        if not self.nth <= self.seen < self.nth + self.times:
            return False
        self.hits += 1
        self.hit_names.append(name)
        return True

    def spoil(self, data: bytes) -> bytes:
        """``data``, damaged as armed."""
        if self.replace is not None:
            return self.replace
        if self.keep is not None:
            data = data[: self.keep]
        if self.flip is not None and data:
            at = self.flip // 8 % len(data)
            data = data[:at] + bytes([data[at] ^ (1 << self.flip % 8)]) + data[at + 1 :]
        return data


class FaultyBackend(WrapperBackend):
    """Fails or spoils chosen operations; an operation is one object of a bulk call, or one page.

    Everything else reaches the inner backend. A test ends with :meth:`assert_all_faults_hit`, or uses
    the backend as a context manager, which asserts it on the way out: a fault that was armed and
    never hit proves nothing.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def arm(
        self,
        operation: Operation,
        *,
        names: str = "*",
        nth: int = 1,
        times: int = 1,
        error: StorageError | None = None,
        keep: int | None = None,
        flip: int | None = None,
        replace: bytes | None = None,
        before: Callable[[str], None] | None = None,
    ) -> Fault:
        """Arm a fault.

        With none of ``keep``, ``flip``, ``replace`` and ``before`` the operation fails with ``error``,
        or with a ``TransientError`` if none is given, and does not reach the inner backend.

        Args:
            operation: Which one; for ``list`` the name is the prefix.
            names: Pattern of the object names that count.
            nth: The first of these that fails, from 1.
            times: How many in a row fail.
            error: The result. With ``keep``, ``flip`` or ``replace`` of a put, the spoilt bytes lie in
                the store as well; without ``error`` the put claims to have succeeded.
            keep: Tear: only the first so many bytes are put, or come back.
            flip: Number of the bit that is flipped.
            replace: Bytes that are put, or come back, instead.
            before: Called with the name before the operation, which then runs (unless spoilt or failed):
                the place to let another actor do something.

        Raises:
            UsageError: There is no such operation, or it has no bytes to spoil.
        """
        spoils = keep is not None or flip is not None or replace is not None
        if operation not in _OPERATIONS or (spoils and operation not in {"put", "get"}):
            raise UsageError(f"no such fault: {operation}")
        if error is None and not spoils and before is None:
            error = TransientError("a fault was injected")
        fault = Fault(operation, names, nth, times, error, keep, flip, replace, before)
        self.faults.append(fault)
        return fault

    def disarm(self) -> None:
        """Forget all faults, hit or not."""
        self.faults.clear()

    def assert_all_faults_hit(self) -> None:
        """Fail if a fault was not hit as often as it was armed to be."""
        missed = [f"{f.operation} {f.names}: {f.hits} of {f.times}" for f in self.faults if f.hits < f.times]
        assert not missed, f"armed faults were not hit: {'; '.join(missed)}"

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if kind is None:
            self.assert_all_faults_hit()

    def _hit(self, operation: str, name: str) -> Fault | None:
        with self._lock:
            self.calls.append((operation, name))
            hit = [fault for fault in self.faults if fault.matches(operation, name)]
        for fault in hit:
            if fault.before is not None:
                fault.before(name)
        return next(
            (f for f in hit if f.error or f.keep is not None or f.flip is not None or f.replace is not None),
            None,
        )

    def _put_many(self, objects: Mapping[str, bytes]) -> dict[str, StorageError | None]:
        hit = {name: fault for name in objects if (fault := self._hit("put", name))}
        sent = {
            n: hit[n].spoil(d) if n in hit else d
            for n, d in objects.items()
            if n not in hit or _spoils(hit[n])
        }
        results = dict(self.inner.put_many(sent))
        results.update({name: fault.error for name, fault in hit.items() if fault.error})
        return results

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        # By position of the get, since one name may be asked for several times.
        spoilt: dict[Get, list[Fault]] = {}
        wanted: list[Get] = []
        for get in gets:
            fault = self._hit("get", get.name)
            if fault is not None and not _spoils(fault):
                yield Got(get, error=fault.error)
                continue
            if fault is not None:
                spoilt.setdefault(get, []).append(fault)
            wanted.append(get)
        for got in self.inner.get_many(wanted):
            faults = spoilt.get(got.get)
            if faults and got.data is not None:
                yield Got(got.get, faults.pop().spoil(got.data))
            else:
                yield got

    def _stat_many(self, names: Sequence[str]) -> dict[str, ObjectInfo | StorageError | None]:
        hit = {name: fault.error for name in names if (fault := self._hit("stat", name))}
        return {**self.inner.stat_many([n for n in names if n not in hit]), **hit}

    def _delete_many(self, names: Sequence[str]) -> dict[str, StorageError | None]:
        hit = {name: fault.error for name in names if (fault := self._hit("delete", name))}
        return {**self.inner.delete_many([n for n in names if n not in hit]), **hit}

    def _list_page(self, prefix: str, token: str) -> Page:
        fault = self._hit("list", prefix)
        if fault is not None and fault.error is not None:
            raise fault.error
        return self.inner.list_page(prefix, token)


def _spoils(fault: Fault) -> bool:
    return fault.keep is not None or fault.flip is not None or fault.replace is not None
