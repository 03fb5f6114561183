# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Mega-Cache blobs, read and written without PyTorch.

A blob of PyTorch 2.8 or later is ``crc32 · u64 1 · records``, a record ``type · u64 n · n × (key ·
content)``; a text is the length and base64 of its UTF-8, a content its length and bytes; numbers are
big-endian. PyTorch 2.7 had neither checksum nor base64 nor records: ``u64 1 · (u64 type · key ·
content)…``.

Each ``save_cache_artifacts()`` in a process appends one more record a type, and PyTorch makes a dict
of them when it loads: of two saves only the second survives. Here all records are read, and what is
written has one record a type, which PyTorch loads in full. One type that PyTorch does not know makes
it refuse a whole blob, so only types that every version from 2.10 knows are written.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchrelay import limits
from torchrelay.caches.aot_autograd import AotAutogradKind
from torchrelay.caches.autotune import AutotuneKind
from torchrelay.caches.base import Entry, Excluded, Reason, Skipped
from torchrelay.caches.inductor import InductorKind
from torchrelay.caches.pgo import PgoKind, key_of
from torchrelay.caches.pickled import restored
from torchrelay.caches.precompile import PrecompileKind
from torchrelay.canonical import GraphRef
from torchrelay.errors import FormatError
from torchrelay.signing import VerifiedEntry

TYPES = ("inductor", "aot_autograd", "autotune", "pgo", "precompile")
"""The types of items, which are also kinds of entries."""

MAX_BLOB_BYTES = 16 * 1024 * limits.MIB
"""A blob holds everything that one process compiled; a large model's is some 100 MiB."""

_OLD_TYPES = {0: "inductor", 1: "autotune", 2: "aot_autograd", 3: "pgo"}
_VERSION = (1).to_bytes(8, "big")
_MAX_TEXT_BYTES = 16 * limits.KIB
_CHECKSUM = 4
_MUTABLE = frozenset({"autotune", "pgo", "precompile"})


class MegaItem(NamedTuple):
    """One artifact: its type, its key as PyTorch spells it, and its bytes."""

    type: str
    key: str
    content: bytes


class _Reader:
    """A cursor over a blob that never reads past its end."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def number(self) -> int:
        return int.from_bytes(self._take(8), "big")

    def content(self, limit: int) -> bytes:
        size = self.number()
        if size > limit:
            raise _broken(f"an item of {size} bytes")
        return self._take(size)

    def text(self, *, encoded: bool) -> str:
        data = self.content(_MAX_TEXT_BYTES)
        try:
            return (base64.b64decode(data, validate=True) if encoded else data).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError) as exc:
            raise _broken("a name that is no text") from exc

    def _take(self, size: int) -> bytes:
        if size > self.left:
            raise _broken("an item that goes beyond the end")
        start = self._position
        self._position += size
        return self._data[start : self._position]


def parse_mega(data: bytes) -> list[MegaItem]:
    """All items of all records, in the order in which they stand.

    Law: ``parse_mega(encode_mega(items))`` holds the same items, those of one type in the same order.

    Raises:
        FormatError: Neither of the two formats, damaged, or beyond the bounds.
    """
    if len(data) > MAX_BLOB_BYTES:
        raise _broken(f"{len(data)} bytes, more than the {MAX_BLOB_BYTES} allowed")
    if data[:8] == _VERSION:
        return _bounded(_old_items(_Reader(data, 8)))
    if data[_CHECKSUM : _CHECKSUM + 8] != _VERSION:
        raise _broken("a format that is not known")
    if zlib.crc32(memoryview(data)[_CHECKSUM:]) != int.from_bytes(data[:_CHECKSUM], "big"):
        raise _broken("bytes that do not fit its checksum")
    return _bounded(_items(_Reader(data, _CHECKSUM + 8)))


def _items(reader: _Reader) -> Iterator[MegaItem]:
    while reader.left:
        type_ = reader.text(encoded=True)
        for _ in range(reader.number()):  # more than there are ends at the end of the blob
            key = reader.text(encoded=True)
            yield MegaItem(type_, key, reader.content(limits.MAX_ENTRY_BYTES))


def _old_items(reader: _Reader) -> Iterator[MegaItem]:
    while reader.left:
        number = reader.number()
        type_ = _OLD_TYPES.get(number)
        if type_ is None:
            raise _broken(f"an item of the unknown type {number}")
        key = reader.text(encoded=False)
        yield MegaItem(type_, key, reader.content(limits.MAX_ENTRY_BYTES))


def _bounded(items: Iterator[MegaItem]) -> list[MegaItem]:
    found: list[MegaItem] = []
    for item in items:
        if len(found) == limits.MAX_RECORDS:
            raise _broken(f"more than {limits.MAX_RECORDS} items")
        found.append(item)
    return found


def _broken(what: str) -> FormatError:
    return FormatError(
        f"the Mega-Cache blob has {what}",
        remedy="Save it again with torch.compiler.save_cache_artifacts().",
    )


def encode_mega(items: Iterable[MegaItem]) -> bytes:
    """A blob of PyTorch 2.8 or later with one record a type, which PyTorch loads in full.

    Raises:
        FormatError: An item's type is not one that PyTorch knows.
    """
    by_type: dict[str, list[MegaItem]] = {}
    for item in items:
        if item.type not in TYPES:
            raise _broken(f"no room for items of type {item.type[:40]!r}")
        by_type.setdefault(item.type, []).append(item)
    pieces = [_VERSION]
    for type_, members in by_type.items():
        pieces += [_text(type_), len(members).to_bytes(8, "big")]
        for item in members:
            pieces += [_text(item.key), len(item.content).to_bytes(8, "big"), item.content]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([checksum.to_bytes(_CHECKSUM, "big"), *pieces])


def _text(text: str) -> bytes:
    encoded = base64.b64encode(text.encode("utf-8"))
    return len(encoded).to_bytes(8, "big") + encoded


def mega_item(entry: VerifiedEntry) -> MegaItem | None:
    """A verified entry as an item; None if Mega-Cache has none of its kind.

    Raises:
        DamagedError: The bytes are verified but cannot be an entry of this kind.
    """
    kind = entry.statement.kind
    if kind not in TYPES:
        return None
    content = AutotuneKind().contents(entry) if kind == AutotuneKind.name else restored(entry)
    return MegaItem(kind, entry.statement.key, content)


def entries_from_mega(items: Sequence[MegaItem], *, torch_version: str | None) -> list[Entry | Skipped]:
    """What the items of a blob are as entries, and what is left out.

    Of several items of one identity the first counts where any will do (a graph that was compiled
    twice), and the last where later ones are better: PyTorch writes them in this order, too.

    Args:
        items: As :func:`parse_mega` gave them.
        torch_version: The PyTorch that made the blob; None if that is not known: then pickled entries
            stay as they are, ``raw``. A blob does not say it.
    """
    importer = _Importer(items, torch_version)
    entries: dict[tuple[str, str, str], Entry] = {}
    skipped: list[Skipped] = []
    for item in items:
        try:
            entry = importer.entry(item)
        except Excluded as exc:
            skipped.append(Skipped(f"{item.type}:{item.key}"[:200], exc.reason, exc.detail))
            continue
        identity = (entry.kind, entry.key, entry.variant)
        if entry.kind in _MUTABLE or identity not in entries:
            entries[identity] = entry
    return [*entries.values(), *skipped]


class _Importer:
    """Turns items into entries; knows the FX graphs of the blob, which others need."""

    def __init__(self, items: Sequence[MegaItem], torch_version: str | None) -> None:
        self._inductor = InductorKind(torch_version)
        self._aot_autograd = AotAutogradKind(torch_version)
        self._precompile = PrecompileKind(torch_version)
        self._old_names = (torch_version or "").startswith("2.7.")
        self._graphs: dict[GraphRef, str] = {}
        self._entries: dict[MegaItem, Entry | Excluded] = {}
        for item in items:
            if item.type == InductorKind.name:
                self._add_graph(item)

    def _add_graph(self, item: MegaItem) -> None:
        try:
            entry, facts = self._inductor.entry_and_facts(item.key, item.content)
        except Excluded as exc:
            self._entries[item] = exc
            return
        self._entries[item] = entry
        if facts.readable:
            reference = GraphRef(item.key, facts.guards_expr)
            known = self._graphs.get(reference)
            self._graphs[reference] = entry.variant if known is None else min(known, entry.variant)

    def entry(self, item: MegaItem) -> Entry:
        """The entry that ``item`` is.

        Raises:
            Excluded: It is none.
        """
        if item.type == InductorKind.name:
            found = self._entries[item]
            if isinstance(found, Excluded):
                raise found
            return found
        if item.type == AotAutogradKind.name:
            return self._aot_autograd.entry_from_bytes(
                item.key, item.content, variant_of=self._graphs.get, old_name=self._old_names
            )
        if item.type == AutotuneKind.name:
            return AutotuneKind().entry_from_bytes(item.key, item.content)
        if item.type == PgoKind.name:
            return PgoKind().entry_from_bytes(key_of(item.key), item.content)
        if item.type == PrecompileKind.name:
            return self._precompile.entry_from_bytes(item.key, item.content)
        raise Excluded(Reason.BAD_NAME, f"unknown type {item.type[:40]!r}")
