# SPDX-License-Identifier: Apache-2.0
"""Profile of dynamic shapes: ``dynamo/code_state_<job>_<rank>_<tag>.pkl``, one a job and rank.

Dynamo keeps it only where the user names a job (``TORCH_COMPILE_JOB_ID``), and finds it by that
name. A job name that is made anew for each run can never be found again, so what looks like one (a
scheduler's number, a UUID, a MAST job) is left out.

It is a pickle that says which sizes of which frame turned out to be dynamic; frames are named by the
absolute path of their source file. So it tells the producer's paths, and helps only where the code
lies at the same place; it is published because the user asked for it by naming the job.

PyTorch joins job, rank and tag with ``:`` and writes ``_`` for what a file name must not hold, ``:``
included. Entries have the name that the file has: PyTorch makes the same path of either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from torchrelay.caches import files
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.pickled import (
    INDUCTOR_PLACE,
    canonical_form,
    check_plain,
    check_shape,
    file_found,
    restored,
)
from torchrelay.canonical.fields import RAW
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import FormatError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

KEY = re.compile(r"(?P<job>[A-Za-z0-9][A-Za-z0-9._+@=-]{0,199})_(None|[0-9]{1,7})_[A-Za-z0-9._+-]{0,40}")
FOLDER = "dynamo"
_PREFIX, _SUFFIX = "code_state_", ".pkl"
_REPLACED = re.compile(r'[<>:"/\\|?*]')
_UNSTABLE = re.compile(
    r"mast_.*|[0-9]+([._-][0-9]+)*|.*[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}.*|[0-9a-f]{32}"
)


def key_of(cache_key: str) -> str:
    """The entry's key for PyTorch's own (``<job>:<rank>:<tag>``): as it stands in the file name."""
    return _REPLACED.sub("_", cache_key)


def key_problem(key: str) -> Reason | None:
    """Why an entry of this key is left out, if it is."""
    match = KEY.fullmatch(key)
    if match is None:
        return Reason.BAD_NAME
    return Reason.UNSTABLE_KEY if _UNSTABLE.fullmatch(match["job"]) else None


class PgoKind(CacheKind):
    """Dynamo's profiles of dynamic shapes."""

    name: ClassVar[str] = "pgo"

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """The files in ``dynamo``; its folders are for the kind ``precompile``."""
        listing = files.scan_folder(roots.inductor, FOLDER)
        yield from listing.skipped
        yield from (self._found(roots.inductor, file) for file in listing.files)

    def _found(self, root: Path, file: FileStat) -> Found | Skipped:
        last = file.path_parts[-1]
        if not (last.startswith(_PREFIX) and last.endswith(_SUFFIX)):
            return Skipped(file.name, Reason.BAD_NAME)
        key = last[len(_PREFIX) : -len(_SUFFIX)]
        problem = key_problem(key)
        return Skipped(file.name, problem) if problem else file_found(self.name, key, root, file)

    def read(self, found: Found) -> Iterator[Entry]:
        """The one profile in the file."""
        yield self.entry_from_bytes(found.key, files.read_stable(found.root, found.files[0]))

    def entry_from_bytes(self, key: str, data: bytes) -> Entry:
        """The entry that PyTorch wrote as ``data`` under ``key`` (as in the file name).

        Raises:
            Excluded: The key is impossible or changes from run to run, or as :func:`canonical_form`.
        """
        problem = key_problem(key)
        if problem is not None:
            raise Excluded(problem, key[:80])
        form = canonical_form(self.name, data, torch_version=None)
        facets = REQUIRED_FACETS[self.name]
        return Entry(self.name, key, "", (), facets, form.canon, form.data, times=form.times)

    def check(self, statement: Statement) -> None:
        """The key of a job that lasts, and nothing else."""
        check_shape(statement, key=KEY, canons=(RAW,), variant=False)
        check_plain(statement)
        if key_problem(statement.key) is not None:
            raise FormatError(f"{statement.key} names a single run", subject=statement.key)

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Write the file; PyTorch reads it at the first frame of a process."""
        name = f"{FOLDER}/{_PREFIX}{entry.statement.key}{_SUFFIX}"
        return INDUCTOR_PLACE, files.install_files(roots.inductor, [(name, restored(entry))])
