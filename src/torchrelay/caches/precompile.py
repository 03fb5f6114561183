# SPDX-License-Identifier: Apache-2.0
"""Precompiled functions: ``dynamo/<sha256 of qualified name and first line>/entry``.

One file holds Dynamo's guards and bytecode for a function, and the compiled graphs of its backends,
so it needs no other entry. What these graphs hold of the environment is masked as in entries of their
own.

PyTorch's key knows neither the function's source nor its module: two models with a ``forward`` on the
same line have the same one, and share one place in the directory. So there is no variant either,
which would promise that they can lie side by side: the latest counts,
a package of this machine's own is never replaced, and different bytes are not called divergent (each
process names its backends anew). PyTorch compares the sources when it loads one, so a package of
another model is a miss; but it imports their modules for that, so models that cannot import each
other's modules belong in workloads of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from torchrelay.caches import files
from torchrelay.caches.base import CacheKind, Entry, Excluded, Found, Reason, Roots, Skipped
from torchrelay.caches.pgo import FOLDER
from torchrelay.caches.pickled import (
    INDUCTOR_PLACE,
    bad_names,
    canonical_form,
    check_plain,
    check_shape,
    file_found,
    restored,
)
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

KEY = re.compile(r"[0-9a-f]{64}")
_NAME = "entry"


class PrecompileKind(CacheKind):
    """Dynamo's packages of whole functions (``TORCH_CACHING_PRECOMPILE=1``).

    Args:
        torch_version: As for :class:`torchrelay.caches.inductor.InductorKind`.
    """

    name: ClassVar[str] = "precompile"

    def __init__(self, torch_version: str | None = None) -> None:
        self._torch_version = torch_version

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """The folders in ``dynamo``; its files are for the kind ``pgo``."""
        for folder in files.scan_folder(roots.inductor, FOLDER).folders:
            key = folder.rpartition("/")[2]
            if KEY.fullmatch(key):
                yield from self._scan_key(roots.inductor, key, folder)
            else:
                yield from bad_names([folder])

    def _scan_key(self, root: Path, key: str, folder: str) -> Iterator[Found | Skipped]:
        listing = files.scan_folder(root, folder)
        yield from (*listing.skipped, *bad_names(listing.folders))
        for file in listing.files:
            fine = file.path_parts[-1] == _NAME
            yield file_found(self.name, key, root, file) if fine else Skipped(file.name, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """The one package in the folder."""
        yield self.entry_from_bytes(found.key, files.read_stable(found.root, found.files[0]))

    def read_again(self, found: Found) -> Iterator[Entry]:
        """The same, without looking for secrets."""
        data = files.read_stable(found.root, found.files[0])
        yield self.entry_from_bytes(found.key, data, search=False)

    def entry_from_bytes(self, key: str, data: bytes, *, search: bool = True) -> Entry:
        """The entry that PyTorch wrote as ``data`` under ``key``.

        Raises:
            Excluded: The key is impossible, or as :func:`canonical_form`.
        """
        if not KEY.fullmatch(key):
            raise Excluded(Reason.BAD_NAME, key[:80])
        form = canonical_form(self.name, data, torch_version=self._torch_version, search=search)
        return Entry(
            kind=self.name,
            key=key,
            variant="",
            needs=(),
            facets=REQUIRED_FACETS[self.name],
            canon=form.canon,
            plain=form.data,
            times=form.times,
            masked=form.masked,
        )

    def check(self, statement: Statement) -> None:
        """A key of this kind, and nothing else."""
        check_shape(statement, key=KEY, canons=None, variant=False)
        check_plain(statement)

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Write the file in place of whatever package lies under this key."""
        name = f"{FOLDER}/{entry.statement.key}/{_NAME}"
        return INDUCTOR_PLACE, files.install_files(roots.inductor, [(name, restored(entry))])
