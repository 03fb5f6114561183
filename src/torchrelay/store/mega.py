# SPDX-License-Identifier: Apache-2.0
"""Mega-Cache blobs as the source of a push and as the sink of a pull."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
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
from torchrelay.errors import FormatError, UsageError
from torchrelay.signing import VerifiedEntry

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class MegaSource:
    """The entries of a Mega-Cache blob, of all its records, held in memory.

    Raises:
        UsageError: The file cannot be read.
        FormatError: It is no Mega-Cache blob.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        version = str(environment.facets.get("torch", "")).partition(" ")[0] or None
        found = entries_from_mega(_items_of(path), torch_version=version)
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


class MegaSink:
    """Collects verified entries for one blob."""

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

    def encode(self) -> bytes:
        """All that was taken, as one blob."""
        return encode_mega(self._items)


@contextlib.contextmanager
def mega_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """What writes a blob to ``path``, whole or not at all; made before anything is downloaded for it.

    Raises:
        UsageError: The file cannot be made or written; what was there is unchanged.
    """
    # What is not a file by its name has no name to put a temporary file beside.
    if path.name in ("", "..") or (os.path.lexists(path) and not path.is_file()):
        raise UsageError(f"{path} is not a file", remedy="Name a file to write.", subject=str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # A name that nobody can foresee, and never through a link that somebody put there.
        descriptor = os.open(temporary, _CREATE, 0o666)
    except (OSError, ValueError) as exc:
        raise _unwritten(path, exc) from exc
    with os.fdopen(descriptor, "wb") as file:

        def write(data: bytes) -> None:
            try:
                file.write(data)
                file.flush()
                temporary.replace(path)
            except OSError as exc:
                raise _unwritten(path, exc) from exc

        try:
            yield write
        finally:
            temporary.unlink(missing_ok=True)


def _unwritten(path: Path, exc: OSError | ValueError) -> UsageError:
    reason = getattr(exc, "strerror", None) or str(exc)
    return UsageError(f"{path} cannot be written: {reason}", remedy="Name another file.", subject=str(path))


def _items_of(path: Path) -> list[MegaItem]:
    try:
        return parse_mega(_read(path))
    except FormatError as exc:
        # What reads bytes does not know where they are from.
        raise FormatError(f"{path}: {exc.message}", remedy=exc.remedy, subject=str(path)) from exc


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BLOB_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise UsageError(
            f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}",
            remedy="Name a file that torch.compiler.save_cache_artifacts() filled.",
            subject=str(path),
        ) from exc
