# SPDX-License-Identifier: Apache-2.0
"""What a client remembers of a store: segments it has read, how far it had come, what is damaged.

Nothing here is trusted. Segments are verified again each time; a lost or damaged memory costs time
and the notice that a store went backwards, never correctness. Where no directory can be written
(a read-only container) there is no memory, and everything works.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from torchrelay import canonjson, limits
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import FormatError

_MARKS = "damaged.json"


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

    def remember(self, workload: str, memory: Memory) -> None:
        """Keep ``memory``, if it can be kept."""
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
        marked = self.marked() | frozenset(names)
        if marked != self.marked():
            self._write(_MARKS, canonjson.encode(_Marks(blobs=tuple(sorted(marked)))))

    def unmark(self, names: Iterable[str]) -> None:
        """Forget marks, after the blobs were sent again."""
        before = self.marked()
        left = before - frozenset(names)
        if left != before:
            self._write(_MARKS, canonjson.encode(_Marks(blobs=tuple(sorted(left)))))

    def _read(self, name: str, type_: type[T]) -> T | None:
        data = self._bytes(name, 16 * limits.MIB)
        if data is None:
            return None
        try:
            found = canonjson.decode(data, type_, name=name, limit=16 * limits.MIB)
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
            fd, temporary = tempfile.mkstemp(dir=self._directory, prefix=".tmp-")
            try:
                with open(fd, "wb") as file:  # noqa: PTH123 - opened above
                    file.write(data)
                Path(temporary).replace(target)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise


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
