# SPDX-License-Identifier: Apache-2.0
"""Entries of several files: one blob, files end to end, names and sizes in the statement."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay import limits
from torchrelay.caches.base import Excluded, FileStat, Found, Reason
from torchrelay.caches.files import read_stable
from torchrelay.canonical.secrets import secret_in_file
from torchrelay.errors import DamagedError, FormatError
from torchrelay.statement import File, Statement

FILES = "files-1"
"""The canonical form of files that are taken as they are, in the kind's order."""


def last(name: str) -> str:
    """The last component of a file's name."""
    return name.rpartition("/")[2]


def read_files(found: Found, files: Sequence[FileStat]) -> list[tuple[str, bytes]]:
    """The last names and contents of ``files``, each the very file that was scanned.

    Raises:
        Excluded: One changed since the scan, all are too many or too large for one entry, or one holds
            a secret.
    """
    size = sum(file.size for file in files)
    if size > limits.MAX_ENTRY_BYTES or len(files) > limits.MAX_FILES:
        raise Excluded(Reason.TOO_LARGE, f"{len(files)} files of {size} bytes")
    contents = [(last(file.name), read_stable(found.root, file) if file.size else b"") for file in files]
    for name, data in contents:
        if (kind := secret_in_file(data)) is not None:
            raise Excluded(Reason.SECRET, f"{kind} in {name}")
    return contents


def join(contents: Sequence[tuple[str, bytes]]) -> tuple[bytes, tuple[File, ...]]:
    """The plain bytes of an entry, and what its statement says of its files.

    Law: ``split(statement with these files, plain) == contents``.
    """
    plain = b"".join(data for _, data in contents)
    return plain, tuple(File(name=name, size=len(data)) for name, data in contents)


def split(statement: Statement, plain: bytes) -> list[tuple[str, bytes]]:
    """The files of an entry, by the names and sizes of its statement.

    Raises:
        DamagedError: The sizes do not add up to the bytes.
    """
    if sum(file.size for file in statement.files) != len(plain):
        raise DamagedError(f"{label(statement)} does not have the size that its files add up to")
    contents = []
    start = 0
    for file in statement.files:
        contents.append((file.name, plain[start : start + file.size]))
        start += file.size
    return contents


def label(statement: Statement) -> str:
    """How errors name an entry."""
    return f"{statement.kind} {statement.key}"


def refuse(statement: Statement, why: str) -> FormatError:
    """The error for a statement that no entry of its kind can have."""
    return FormatError(
        f"{label(statement)[:200]}: {why}",
        subject=label(statement)[:200],
        remedy="Nothing was installed. Ask its signer, or upgrade torchrelay: a newer one may know it.",
    )


def require_plain(statement: Statement, canons: Sequence[str]) -> None:
    """``statement`` has one of the canonical forms of its kind, and neither variant nor needs.

    Raises:
        FormatError: It does not.
    """
    if statement.canon not in canons:
        raise refuse(statement, f"unknown canonical form {statement.canon!r}")
    if statement.variant or statement.needs:
        raise refuse(statement, "entries of this kind have no variant and need no other entry")
    if not statement.files:
        raise refuse(statement, "it names no files")
