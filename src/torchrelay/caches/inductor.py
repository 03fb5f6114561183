# SPDX-License-Identifier: Apache-2.0
"""FX graphs compiled by Inductor: ``fxgraph/<key[1:3]>/<key>/<digest of the content>``.

Several files may lie under one key, one for each set of guards; PyTorch unpickles all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from torchrelay.caches import files
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.pickled import (
    CONTENT_NAME,
    INDUCTOR_PLACE,
    bad_names,
    canonical_form,
    check_plain,
    check_shape,
    content_name,
    file_found,
    graph_facets,
    restored,
)
from torchrelay.canonical import Facts, variant
from torchrelay.digest import digest_of
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

KEY = re.compile(r"f[a-z2-7]{51}")
_FOLDER = "fxgraph"


def graph_folder(key: str) -> str:
    """The folder of an FX key, relative to the Inductor root."""
    return f"{_FOLDER}/{key[1:3]}/{key}"


def graph_files(root: Path, key: str) -> tuple[FileStat, ...]:
    """The complete files that lie under one FX key."""
    found = files.scan_folder(root, graph_folder(key)).files
    return tuple(file for file in found if CONTENT_NAME.fullmatch(file.path_parts[-1]))


def read_named(root: Path, file: FileStat) -> bytes:
    """A file whose name is the digest of its content, if it still is.

    PyTorch made the name from the content, so a torn or damaged file shows.

    Raises:
        Excluded: As :func:`torchrelay.caches.files.read_stable`, or ``UNPARSEABLE``.
    """
    data = files.read_stable(root, file)
    if content_name(data) != file.path_parts[-1]:
        raise Excluded(Reason.UNPARSEABLE, "the content does not have the digest in the file's name")
    return data


class InductorKind(CacheKind):
    """Compiled FX graphs.

    Args:
        torch_version: The PyTorch that filled the directory, as it calls itself; None if that is not
            known: then entries stay as they are, ``raw``.
    """

    name: ClassVar[str] = "inductor"

    def __init__(self, torch_version: str | None = None) -> None:
        self._torch_version = torch_version

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """All files two folders below ``fxgraph``."""
        root = roots.inductor
        top = files.scan_folder(root, _FOLDER)
        yield from (*top.skipped, *bad_names(file.name for file in top.files))
        for shard in top.folders:
            listing = files.scan_folder(root, shard)
            yield from (*listing.skipped, *bad_names(file.name for file in listing.files))
            for folder in listing.folders:
                yield from self._scan_key(root, folder)

    def _scan_key(self, root: Path, folder: str) -> Iterator[Found | Skipped]:
        key = folder.rpartition("/")[2]
        if not KEY.fullmatch(key) or folder != graph_folder(key):
            yield from bad_names([folder])
            return
        listing = files.scan_folder(root, folder)
        yield from (*listing.skipped, *bad_names(listing.folders))
        for file in listing.files:
            fine = CONTENT_NAME.fullmatch(file.path_parts[-1])
            yield file_found(self.name, key, root, file) if fine else Skipped(file.name, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """The one graph in the file."""
        yield self.entry_from_bytes(found.key, read_named(found.root, found.files[0]))

    def read_again(self, found: Found) -> Iterator[Entry]:
        """The same, without looking for secrets."""
        data = read_named(found.root, found.files[0])
        yield self.entry_and_facts(found.key, data, search=False)[0]

    def entry_from_bytes(self, key: str, data: bytes) -> Entry:
        """The entry that PyTorch wrote as ``data`` under ``key``.

        Raises:
            Excluded: The key is impossible, or as :func:`canonical_form`.
        """
        return self.entry_and_facts(key, data)[0]

    def entry_and_facts(self, key: str, data: bytes, *, search: bool = True) -> tuple[Entry, Facts]:
        """As :meth:`entry_from_bytes`, with what the graph says of itself."""
        if not KEY.fullmatch(key):
            raise Excluded(Reason.BAD_NAME, key[:80])
        form = canonical_form(self.name, data, torch_version=self._torch_version, search=search)
        entry = Entry(
            kind=self.name,
            key=key,
            variant=variant(self.name, form.facts, digest_of(form.data)),
            needs=(),
            facets=graph_facets(form.facts),
            canon=form.canon,
            plain=form.data,
            times=form.times,
            masked=form.masked,
        )
        return entry, form.facts

    def check(self, statement: Statement) -> None:
        """An FX key, a variant, and nothing else."""
        check_shape(statement, key=KEY, canons=None, variant=True)
        check_plain(statement)

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Write the file under the name that PyTorch would have given it."""
        data = restored(entry)
        name = f"{graph_folder(entry.statement.key)}/{content_name(data)}"
        return INDUCTOR_PLACE, files.install_files(roots.inductor, [(name, data)])
