# SPDX-License-Identifier: Apache-2.0
"""The ledger of a cache directory: what pulls installed there, so that no push ever signs it.

A push vouches for what this machine compiled. Bytes that came from the store are somebody else's,
however they lie here now; signing them would turn one trusted writer's entry into that of every
machine that pulled it. The ledger is written and synced *before* the files are installed: a crash in
between leaves lines for entries that are not there, which costs nothing.

One JSON value a line, the format first; each entry with the CRC-32 of its bytes, so that a changed
digit shows::

    {"format":1,"type":"ledger"}
    ["1c291ca3",{"canon":"…","digest":"…","key":"…","kind":"…","requires":"…","variant":"…"}]

A last line without its line feed is what a crash tore: it is ignored, and cut off by the next write.
Any other damage makes the ledger unusable, since nobody can say what stood there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from torchrelay import canonjson, limits
from torchrelay.caches.base import Roots
from torchrelay.caches.files import storage_error
from torchrelay.caches.state import open_plain, opened_state, state_lock, state_path
from torchrelay.digest import Digest
from torchrelay.errors import DamagedError
from torchrelay.statement import FORMAT, Statement, Wire

_NAME = "ledger.jsonl"
_HEADER = canonjson.encode({"format": FORMAT, "type": "ledger"}) + b"\n"
_LINE_BYTES = 4096
_LEDGER_BYTES = 512 * limits.MIB
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_TAIL = 64 * limits.KIB


class Noted(Wire, frozen=True):
    """One entry that a pull installs; equal for equal bytes under one name."""

    kind: str
    key: str
    variant: str
    requires: str
    canon: str
    digest: Digest


_LINE = msgspec.json.Decoder(tuple[str, msgspec.Raw], strict=True)
_DECODER = msgspec.json.Decoder(Noted, strict=True)


def noted_of(statement: Statement) -> Noted:
    """The line for an entry that is about to be installed."""
    return Noted(
        kind=statement.kind,
        key=statement.key,
        variant=statement.variant,
        requires=statement.requires,
        canon=statement.canon,
        digest=statement.digest,
    )


class Ledger:
    """What pulls installed into one cache directory, by this user.

    Args:
        root: The cache directory. Use :meth:`open`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: set[bytes] = set()
        self._canons: dict[bytes, str | None] = {}
        self._others: dict[str, Ledger] = {}

    @classmethod
    def open(cls, root: Path) -> Ledger:
        """Read the ledger of ``root``; one that is not there is empty.

        Raises:
            DamagedError: It cannot be said what it held. A push must refuse.
            UnsafeDirectoryError, StorageError: It cannot be read safely, or at all.
        """
        ledger = cls(root)
        with opened_state(root, create=False) as folder:
            descriptor = None if folder is None else open_plain(folder, root, _NAME)
            if descriptor is not None:
                try:
                    with os.fdopen(descriptor, "rb") as stream:
                        ledger._read(stream)
                except OSError as exc:
                    raise storage_error(exc, ledger.path) from exc
        return ledger

    @classmethod
    def of(cls, roots: Roots) -> Ledger:
        """The ledger of Inductor's directory, and with it those of the others.

        A Triton directory or a framework's tree may be used with several of Inductor's. So what is
        installed in one is noted there, too, and what any of these ledgers knows was pulled.

        Raises:
            DamagedError, UnsafeDirectoryError, StorageError: As :meth:`open`.
        """
        ledger = cls.open(roots.inductor)
        for place in roots.places[1:]:
            ledger._others[place] = cls.open(roots.root(place))
        return ledger

    @classmethod
    def none(cls) -> Ledger:
        """The ledger of no directory: nothing was pulled there, and nothing can be noted."""
        return cls(Path(os.devnull))

    @property
    def path(self) -> Path:
        """The file."""
        return state_path(self.root) / _NAME

    def __len__(self) -> int:
        """How many different entries are noted."""
        return len(self._entries)

    def pulled(self, *, kind: str, key: str, canon: str, digest: str) -> bool:
        """Whether a pull installed this entry, so that a push must not sign it.

        Also if an entry of this key was pulled in *another canonical form* only: then the digests
        cannot be compared (a newer torchrelay reads the same file differently), and it is not signed.
        The variant is not asked for: a signer may have stated a wrong one, and the bytes are the same.
        """
        if self.noted(kind=kind, key=key, digest=digest):
            return True
        return any(ledger._in_another_form(kind, key, canon) for ledger in self._all)

    def noted(self, *, kind: str, key: str, digest: str) -> bool:
        """Whether a pull installed these very bytes."""
        mark = _mark(kind, key, digest)
        return any(mark in ledger._entries for ledger in self._all)

    def knows(self, kind: str, key: str) -> bool:
        """Whether a pull installed anything under this key."""
        mark = _mark(kind, key)
        return any(mark in ledger._canons for ledger in self._all)

    @property
    def _all(self) -> tuple[Ledger, ...]:
        return (self, *self._others.values())

    def _in_another_form(self, kind: str, key: str, canon: str) -> bool:
        known = self._canons.get(_mark(kind, key), canon)
        return known is not None and known != canon

    def note(self, entries: Iterable[Noted]) -> int:
        """Note entries, durably, before any of their files is installed; how many were new.

        Those that lie in a directory of their own are noted there first.

        Raises:
            UnsafeDirectoryError, StorageError: They are not noted; nothing may be installed.
            DamagedError: The ledger is no file of this user.
        """
        lines = list(entries)
        for place, ledger in self._others.items():
            ledger.note(line for line in lines if _place(line) == place)
        new = {line: None for line in lines if _entry_mark(line) not in self._entries}
        if new:
            data = b"".join(map(_line, new))
            with opened_state(self.root, create=True) as folder:
                assert folder is not None  # noqa: S101 - for the type checker: it was created
                with state_lock(self.root, folder):
                    self._append(folder, data)
        for line in new:
            self._add(line)
        return len(new)

    def _append(self, folder: int, data: bytes) -> None:
        descriptor = open_plain(folder, self.root, _NAME, _APPEND)
        assert descriptor is not None  # noqa: S101 - for the type checker: it was created
        try:
            end = _whole_lines(descriptor)
            os.ftruncate(descriptor, end)
            try:
                _write(descriptor, data if end else _HEADER + data)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
            os.fsync(folder)
        except OSError as exc:
            raise storage_error(exc, self.path) from exc
        finally:
            os.close(descriptor)

    def _read(self, stream: BinaryIO) -> None:
        if os.fstat(stream.fileno()).st_size > _LEDGER_BYTES:
            raise self._damaged("is too large")
        header = stream.readline(_LINE_BYTES)
        if _HEADER.startswith(header.rstrip(b"\0")) and header != _HEADER:
            return  # torn when it was made: nothing was installed
        if header != _HEADER:
            raise self._damaged("is no ledger that this torchrelay can read")
        number = 1
        while line := stream.readline(_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n"):
                self._check_torn(line, stream, number)
                return
            self._add(self._parsed(line, number))

    def _check_torn(self, line: bytes, stream: BinaryIO, number: int) -> None:
        """An unfinished last line is what a crash leaves; a power failure may leave zeros behind it."""
        while line:
            if b"\n" in line:
                raise self._damaged(f"has a line {number} that is no entry")
            line = stream.read(_TAIL)

    def _parsed(self, line: bytes, number: int) -> Noted:
        try:
            check, body = _LINE.decode(line)
            noted = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as exc:
            raise self._damaged(f"has a line {number} that is no entry") from exc
        if check != _check(body):
            raise self._damaged(f"has a line {number} that was changed")
        return noted

    def _add(self, line: Noted) -> None:
        self._entries.add(_entry_mark(line))
        name = _mark(line.kind, line.key)
        canon = sys.intern(line.canon)
        # None: pulled in several forms, so only the digest decides.
        self._canons[name] = canon if self._canons.get(name, canon) == canon else None

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(
            f"the ledger {self.path} {what}, so nobody can say what pulls installed here",
            remedy=f"Move {self.root} away and let a pull or a compile fill a new one. With only the ledger "
            "gone, a push would sign what earlier pulls installed.",
            subject=str(self.path),
        )


def _line(noted: Noted) -> bytes:
    body = canonjson.encode(noted)
    return b'["%b",%b]\n' % (_check(body).encode(), body)


def _check(body: bytes | msgspec.Raw) -> str:
    return f"{zlib.crc32(memoryview(body)):08x}"


def _mark(*texts: str) -> bytes:
    """Sixteen bytes for a name: a set of them takes a third of what the texts would."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest()


def _entry_mark(line: Noted) -> bytes:
    return _mark(line.kind, line.key, line.digest)


def _place(line: Noted) -> str:
    """Where an entry lies that does not lie in Inductor's directory, if such a place is declared."""
    return f"tree:{line.key.partition('/')[0]}" if line.kind == "tree" else line.kind


def _whole_lines(descriptor: int) -> int:
    """Where the last line feed ends; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _TAIL)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
