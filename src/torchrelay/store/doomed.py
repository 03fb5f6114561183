# SPDX-License-Identifier: Apache-2.0
"""Blobs that a gc is about to delete: never refer to one (design §4, Deleting)."""

from __future__ import annotations

from collections.abc import Container

from torchrelay.batch import parse_doomed
from torchrelay.digest import Digest, is_digest
from torchrelay.limits import MAX_SEGMENT_BYTES
from torchrelay.statement import blob_name
from torchrelay.storage import Backend, Get
from torchrelay.store.layout import DOOMED


def read_doomed(backend: Backend) -> frozenset[str]:
    """The names on all doomed lists: one listing, and one bulk call if there are any.

    Raises:
        StorageError: A list could not be read. Nothing may be published then.
        DamagedError: A list is damaged or of a newer format. Likewise.
    """
    names = [info.name for info in backend.list(DOOMED) if is_digest(info.name.removeprefix(DOOMED))]
    doomed: set[str] = set()
    for got in backend.get_many([Get(name, MAX_SEGMENT_BYTES) for name in names]):
        doomed |= parse_doomed(got.unwrap(), name=Digest(got.get.name.removeprefix(DOOMED)))
    return frozenset(doomed)


def free_copy(digest: Digest, doomed: Container[str]) -> int:
    """The lowest copy number under which a blob may be stored."""
    copy = 0
    while blob_name(digest, copy) in doomed:
        copy += 1
    return copy
