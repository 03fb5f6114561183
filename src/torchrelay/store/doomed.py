# SPDX-License-Identifier: Apache-2.0
"""Blobs that a gc is about to delete: never refer to one (design §4, Deleting)."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torchrelay.batch import parse_doomed
from torchrelay.digest import Digest, is_digest
from torchrelay.errors import DamagedError, FormatError, NotFoundError, TooLargeError
from torchrelay.limits import MAX_SEGMENT_BYTES
from torchrelay.reports import Problem
from torchrelay.statement import blob_name
from torchrelay.storage import Backend, Get, Got
from torchrelay.store.layout import DOOMED


def read_doomed(backend: Backend) -> frozenset[str]:
    """The names on all doomed lists: one listing, and one bulk call if there are any.

    Raises:
        StorageError: A list could not be read. Nothing may be published then.
        DamagedError: A list is damaged or of a newer format. Likewise.
    """
    try:
        return _read(backend)
    except NotFoundError:
        # A gc that is done deleted its list between the listing and the reading.
        return _read(backend)


def _read(backend: Backend) -> frozenset[str]:
    doomed: set[str] = set()
    for got in _lists(backend):
        doomed |= _parse(got)
    return frozenset(doomed)


def damaged_lists(backend: Backend) -> tuple[int, list[Problem]]:
    """How many doomed lists there are, and those that no push could read.

    Raises:
        StorageError: They could not be listed, or one not be fetched.
    """
    count = 0
    problems: list[Problem] = []
    for got in _lists(backend):
        if isinstance(got.error, NotFoundError):
            continue  # a gc was done with it
        count += 1
        try:
            _parse(got)
        except DamagedError as exc:
            problems.append(Problem(subject=got.get.name, reason="damaged", detail=exc.message))
    return count, problems


def _lists(backend: Backend) -> Iterator[Got]:
    names = [info.name for info in backend.list(DOOMED) if is_digest(info.name.removeprefix(DOOMED))]
    return backend.get_many([Get(name, MAX_SEGMENT_BYTES) for name in names])


def _parse(got: Got) -> frozenset[str]:
    name = got.get.name
    remedy = (
        f"Nothing is published while {name} cannot be read: delete it if no gc is at work, then push again."
    )
    try:
        return parse_doomed(got.unwrap(), name=Digest(name.removeprefix(DOOMED)))
    except FormatError:
        raise
    except (DamagedError, TooLargeError) as exc:
        raise DamagedError(exc.message, remedy=remedy, subject=name) from exc


def free_copy(digest: Digest, doomed: Container[str]) -> int:
    """The lowest copy number under which a blob may be stored."""
    copy = 0
    while blob_name(digest, copy) in doomed:
        copy += 1
    return copy
