# SPDX-License-Identifier: Apache-2.0
"""Mega-Cache blobs as the source of a push and as the sink of a pull."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.caches.base import Entry, Found, Skipped
from torchrelay.caches.index import meta_of
from torchrelay.caches.local import LocalEntry
from torchrelay.caches.mega import (
    MAX_BLOB_BYTES,
    MegaItem,
    encode_mega,
    entries_from_mega,
    mega_item,
    parse_mega,
)
from torchrelay.environment import Environment
from torchrelay.errors import UsageError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Stored


class MegaSource:
    """The entries of a Mega-Cache blob, of all its records, held in memory.

    Raises:
        UsageError: The file cannot be read.
        FormatError: It is no Mega-Cache blob.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        version = str(environment.facets.get("torch", "")).partition(" ")[0] or None
        found = entries_from_mega(parse_mega(_read(path)), torch_version=version)
        self.skipped: list[Skipped] = []
        self.items: list[LocalEntry] = []
        self._by_id: dict[int, Entry] = {}
        for entry in found:
            if isinstance(entry, Skipped):
                self.skipped.append(entry)
            else:
                item = LocalEntry(Found(entry.kind, entry.key, path.parent, "mega", ()), meta_of(entry))
                self.items.append(item)
                self._by_id[id(item)] = entry

    def load(self, item: LocalEntry) -> Entry:
        """The entry itself."""
        return self._by_id[id(item)]

    def learn_stored(self, item: LocalEntry, stored: Stored) -> None:
        """Nothing is remembered: the blob is read in full each time."""


class MegaSink:
    """Collects verified entries and writes them as one blob."""

    def __init__(self) -> None:
        self._items: list[MegaItem] = []

    def announce(self, entries: Sequence[VerifiedEntry]) -> None:
        """Nothing is installed, so nothing is announced."""

    def take(self, entry: VerifiedEntry) -> bool:
        """Keep the entry, if Mega-Cache has a place for its kind."""
        item = mega_item(entry)
        if item is not None:
            self._items.append(item)
        return item is not None

    def write(self, path: Path) -> None:
        """Write the blob, whole or not at all.

        Raises:
            UsageError: The file cannot be written.
        """
        data = encode_mega(self._items)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as exc:
            temporary.unlink(missing_ok=True)
            raise UsageError(
                f"{path} cannot be written: {exc.strerror}", remedy="Name another file.", subject=str(path)
            ) from exc


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BLOB_BYTES + 1)
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be read: {exc.strerror}",
            remedy="Name a file that torch.compiler.save_cache_artifacts() filled.",
            subject=str(path),
        ) from exc
