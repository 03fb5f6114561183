# SPDX-License-Identifier: Apache-2.0
"""The index of a cache directory: what was found in files that have not changed since.

It maps all that ``stat`` says of the files of an entry (names, sizes, times, inodes) to what reading
them gave, so that an idle push or pull reads nothing but listings. ``ctime`` cannot be set back, so a
file that was rewritten and given its old time shows. The index can be rebuilt at any time: one that
is lost, damaged, planted or of another version is empty and costs a scan, never correctness.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchrelay import limits
from torchrelay.caches.base import Alias, Entry, Found, Reason, Skipped
from torchrelay.caches.files import stat_file
from torchrelay.caches.state import read_state, write_state
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import RelayError
from torchrelay.shared import Shared
from torchrelay.statement import File, Need
from torchrelay.version import __version__

_NAME = "index.json"
_FORMAT = 2
_INDEX_BYTES = 256 * limits.MIB
_RACY_NS = 100_000_000
"""A file that changed so shortly before it was read may change again within one tick of the clock
that stamps files, and then look the same."""


class Meta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An entry without its bytes: as :class:`torchrelay.caches.base.Entry`, with digest and size.

    Attributes:
        alias: As :attr:`torchrelay.caches.base.Entry.alias`.
    """

    kind: str
    key: str
    variant: str
    needs: tuple[Need, ...]
    facets: tuple[str, ...]
    canon: str
    files: tuple[File, ...]
    times: tuple[int, ...]
    masked: dict[str, int]
    digest: Digest
    size: int
    alias: Alias | None = None


class Remembered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What reading one :class:`Found` gave: entries, or why it was left out."""

    place: str
    metas: tuple[Meta, ...]
    skipped: tuple[tuple[str, Reason, str], ...] = ()


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Installed:
    """Files that an install has just put in place, and the entry that they are."""

    root: Path
    place: str
    names: tuple[str, ...]
    meta: Meta


_BODY = msgspec.json.Decoder(dict[str, Remembered], strict=True)
_HEADER = msgspec.json.Decoder(_Header, strict=True)
_ENCODER = msgspec.json.Encoder()


def meta_of(entry: Entry, *, digest: Digest | None = None) -> Meta:
    """What remains of ``entry`` without its bytes."""
    return Meta(
        kind=entry.kind,
        key=entry.key,
        variant=entry.variant,
        needs=entry.needs,
        facets=entry.facets,
        canon=entry.canon,
        files=entry.files,
        times=entry.times,
        masked=dict(entry.masked),
        digest=digest or digest_of(entry.plain),
        size=len(entry.plain),
        alias=entry.alias,
    )


def fingerprint(found: Found) -> str:
    """A name for all that is known of ``found`` without reading it; any change gives another."""
    files = sorted((f.name, f.size, f.mtime_ns, f.ctime_ns, f.inode) for f in found.files)
    text = repr((found.kind, found.key, str(found.root), found.place, files))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class Index:
    """What was found in a cache directory before; use :meth:`load`.

    Entries that are neither looked up nor put between :meth:`load` and :meth:`save` are forgotten,
    if their place is one that :meth:`scans` named.
    """

    def __init__(self, root: Path, known: dict[str, Remembered] | None = None, *, reading: str = "") -> None:
        self.root = root
        self._version = f"{__version__} {reading}".rstrip()
        self._known = known or {}
        self._used: dict[str, Remembered] = {}
        self._scanned: set[str] = set()
        self._racy: set[str] = set()
        self._changed = False

    @classmethod
    def load(cls, root: Path, *, reading: str = "") -> Index:
        """The index of ``root``; empty if it cannot be used, whatever the reason.

        Args:
            root: The cache directory.
            reading: How files are read besides by this torchrelay's own version: the PyTorch version
                whose fields are masked. What was read in another way is not what would be read now.
        """
        index = cls(root, reading=reading)
        with contextlib.suppress(RelayError, msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
            data = read_state(root, _NAME, limit=_INDEX_BYTES) or b""
            head, _, body = data.partition(b"\n")
            header = _HEADER.decode(head[: limits.KIB])
            if header == _Header(_FORMAT, index._version, digest_of(body)):
                index._known = _shared(_BODY.decode(body))
        return index

    @classmethod
    def none(cls) -> Index:
        """The index of no directory: it knows nothing and cannot be kept."""
        return cls(Path(os.devnull))

    def scans(self, places: Iterable[str]) -> None:
        """These places are being scanned: what is not looked up in them is no longer there."""
        self._scanned.update(places)

    def get(self, found: Found) -> Remembered | None:
        """What was found in these very files before."""
        name = fingerprint(found)
        known = self._used.get(name) or self._known.get(name)
        if known is not None:
            self._used[name] = known
        return known

    def put(self, found: Found, metas: Sequence[Meta], skipped: Sequence[Skipped] = ()) -> None:
        """Remember what reading ``found`` gave; for good only if it did not change just before."""
        name = fingerprint(found)
        self._used[name] = _remembered(found.place, metas, skipped)
        newest = max((file.ctime_ns for file in found.files), default=0)
        if newest > time.time_ns() - _RACY_NS:
            self._racy.add(name)
        self._changed = True

    def learn(self, installed: Installed) -> None:
        """Remember what an install put in place, so that no scan reads it again.

        If somebody has changed a file since, the next scan sees other times, and reads it.
        """
        seen = [stat_file(installed.root, name) for name in installed.names]
        files = tuple(file for file in seen if file is not None and not isinstance(file, Skipped))
        meta = installed.meta
        if len(files) == len(installed.names):
            key = meta.key if meta.alias is None else meta.alias.key  # as a scan finds it
            found = Found(meta.kind, key, installed.root, installed.place, files)
            self._used[fingerprint(found)] = _remembered(installed.place, (meta,), ())
            self._changed = True

    def save(self) -> bool:
        """Write it, atomically; whether it could be. It is never worth failing for."""
        kept = {name: item for name, item in self._used.items() if name not in self._racy}
        for name, item in self._known.items():
            if item.place not in self._scanned:
                kept.setdefault(name, item)
        if not self._changed and kept.keys() == self._known.keys():
            return True
        body = _ENCODER.encode(kept)
        header = _Header(_FORMAT, self._version, digest_of(body))
        try:
            write_state(self.root, _NAME, _ENCODER.encode(header) + b"\n" + body)
        except RelayError:
            return False
        self._known, self._changed = kept, False
        return True


def _shared(known: dict[str, Remembered]) -> dict[str, Remembered]:
    """``known``, with one object for what most entries have in common."""
    shared = Shared()
    counts: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for item in known.values():
        shared.share(item, "place")
        for meta in item.metas:
            shared.share(meta, "kind", "variant", "needs", "facets", "canon", "files", "times")
            masked = counts.setdefault(tuple(meta.masked.items()), meta.masked)
            msgspec.structs.force_setattr(meta, "masked", masked)
    return known


def _remembered(place: str, metas: Sequence[Meta], skipped: Sequence[Skipped]) -> Remembered:
    return Remembered(place, tuple(metas), tuple((s.path, s.reason, s.detail) for s in skipped))
