# SPDX-License-Identifier: Apache-2.0
"""What a client remembers of a store: segments it has read, how far it had come, what is damaged.

Nothing here is trusted. Segments are verified again each time; a lost or damaged memory costs time
and the notice that a store went backwards, never correctness. Where no directory can be written
(a read-only container) there is no memory, and everything works.

Several processes of one user may share it. What is changed is read again under a lock; where the lock
is not to be had for a while (a stopped process), it is changed without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from torchrelay import canonjson, limits
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import FormatError

_MARKS = "damaged.json"
_LOCK = ".lock"
_TEMPORARY = ".tmp-"

MAX_MEMORY_BYTES = 16 * limits.MIB
"""A memory that is longer is as good as damaged; what is written stays below it."""

MAX_SEGMENTS = MAX_MEMORY_BYTES // (limits.MAX_OBJECT_NAME_CHARS + 8)
"""So many segments are remembered at most, some 32,000; generation and `seq` always are."""

_LOCK_SECONDS = 2.0
_STALE_SECONDS = 3600.0


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a client had come with a workload, to notice a store that goes backwards."""

    format: int = 1
    generation: int = 0
    highest_seq: int = 0
    segments: tuple[str, ...] = ()


class _Marks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int = 1
    blobs: tuple[str, ...] = ()


T = TypeVar("T", Memory, _Marks)


class ClientState:
    """The memory of one store, in one private directory; ``directory=None`` remembers nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory if directory is not None and _make_private(directory) else None
        self._sweep()

    @classmethod
    def of_store(cls, root: Path | None, store: str) -> ClientState:
        """The memory of ``store`` (its normalised URL) below ``root``."""
        if root is None:
            return cls(None)
        return cls(root / digest_of(store.encode())[:32])

    def memory(self, workload: str) -> Memory:
        """What is remembered of ``workload``; empty if nothing is or it cannot be read."""
        found = self._read(f"{_slug(workload)}.json", Memory)
        return found if found is not None else Memory()

    def has_lost(self, workload: str) -> bool:
        """Whether something lies in the place of the memory of ``workload`` and cannot be read.

        Whoever could damage it could hide that the store went backwards; so it is worth an alarm.
        """
        if self._directory is None:
            return False
        name = f"{_slug(workload)}.json"
        return os.path.lexists(self._directory / name) and self._read(name, Memory) is None

    def remember(self, workload: str, memory: Memory, *, seen: Memory | None = None) -> None:
        """Keep ``memory``, if it can be kept; of its segments the first :data:`MAX_SEGMENTS`.

        Args:
            workload: What it is of.
            memory: How far this client has come.
            seen: What it had read before. What another process has added to that since is kept too.
        """
        with self._locked():
            now = self.memory(workload)
            if seen is not None and now != seen:
                memory = _merged(memory, now, seen)
            if memory != now or self.has_lost(workload):
                memory = msgspec.structs.replace(memory, segments=memory.segments[:MAX_SEGMENTS])
                self._write(f"{_slug(workload)}.json", canonjson.encode(memory))

    def segment(self, workload: str, name: Digest) -> bytes | None:
        """The stored bytes of a segment read before; the caller verifies them."""
        return self._bytes(f"{_slug(workload)}/{name}", limits.MAX_SEGMENT_BYTES)

    def keep_segment(self, workload: str, name: Digest, stored: bytes) -> None:
        """Keep the stored bytes of a segment."""
        self._write(f"{_slug(workload)}/{name}", stored)

    def forget_segments(self, workload: str, *, but: frozenset[Digest]) -> None:
        """Drop kept segments that the store no longer lists."""
        if self._directory is None:
            return
        folder = self._directory / _slug(workload)
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if path.name not in but:
                    path.unlink()

    def document(self, name: Digest) -> bytes | None:
        """An environment document read before; the caller holds it against its digest."""
        return self._bytes(f"environments/{name}", limits.MAX_DOCUMENT_BYTES)

    def keep_document(self, name: Digest, data: bytes) -> None:
        """Keep an environment document."""
        self._write(f"environments/{name}", data)

    def marked(self) -> frozenset[str]:
        """Blobs that a verification or a pull found damaged; the next push sends them again."""
        found = self._read(_MARKS, _Marks)
        return frozenset(found.blobs if found is not None else ())

    def mark(self, names: Iterable[str]) -> None:
        """Remember that these blobs are damaged."""
        self._change_marks(add=frozenset(names))

    def unmark(self, names: Iterable[str]) -> None:
        """Forget marks, after the blobs were sent again."""
        self._change_marks(drop=frozenset(names))

    def _change_marks(self, *, add: frozenset[str] = frozenset(), drop: frozenset[str] = frozenset()) -> None:
        if not add and not drop & self.marked():
            return
        with self._locked():
            before = self.marked()
            after = (before | add) - drop
            if after != before:
                self._write(_MARKS, canonjson.encode(_Marks(blobs=tuple(sorted(after)))))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = None
        if self._directory is not None:
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(self._directory / _LOCK, flags, 0o600)
        try:
            if descriptor is not None:
                _wait_for(descriptor)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{_TEMPORARY}*"):
                if path.lstat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()

    def _read(self, name: str, type_: type[T]) -> T | None:
        data = self._bytes(name, MAX_MEMORY_BYTES)
        if data is None:
            return None
        try:
            found = canonjson.decode(data, type_, name=name, limit=MAX_MEMORY_BYTES)
        except FormatError:
            return None
        return found if found.format == 1 else None

    def _bytes(self, name: str, limit: int) -> bytes | None:
        if self._directory is None:
            return None
        try:
            # Neither a link nor a pipe: the one leads elsewhere, the other never answers.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._directory / name, flags)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            with open(fd, "rb", closefd=False) as file:
                data = file.read(limit + 1)
        except OSError:
            return None
        finally:
            os.close(fd)
        return data if len(data) <= limit else None

    def _write(self, name: str, data: bytes) -> None:
        if self._directory is None:
            return
        target = self._directory / name
        with contextlib.suppress(OSError):
            target.parent.mkdir(mode=0o700, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=self._directory, prefix=_TEMPORARY)
            try:
                with open(fd, "wb") as file:  # noqa: PTH123 - opened above
                    file.write(data)
                Path(temporary).replace(target)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise


def _merged(memory: Memory, now: Memory, seen: Memory) -> Memory:
    added = frozenset(now.segments) - frozenset(seen.segments)
    return Memory(
        generation=max(memory.generation, now.generation),
        highest_seq=max(memory.highest_seq, now.highest_seq),
        segments=tuple(sorted(added.union(memory.segments))),
    )


def _wait_for(descriptor: int) -> None:
    """Take the lock; after a while go on without it."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        else:
            return


def _slug(workload: str) -> Digest:
    return digest_of(workload.encode())


def _make_private(directory: Path) -> bool:
    """Whether ``directory`` exists now, is no link, and is this user's own."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
