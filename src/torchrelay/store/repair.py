# SPDX-License-Identifier: Apache-2.0
"""Which blobs are there at the right size and still not what was signed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrelay.digest import digest_of
from torchrelay.statement import Stored
from torchrelay.storage import Get
from torchrelay.store.selection import Item
from torchrelay.store.session import Session


def unreadable_blobs(session: Session, items: Iterable[Item], sizes: Mapping[str, int]) -> frozenset[str]:
    """Names of the blobs of ``items`` whose bytes do not have the digest that names them."""
    wanted = {stored.name: stored for stored in _stored(items) if sizes.get(stored.name) == stored.size}
    return frozenset(damaged_blobs(session, wanted))


def damaged_blobs(session: Session, wanted: Mapping[str, Stored]) -> Iterable[str]:
    """Read each blob in full; the names of those that cannot be read or are not what was signed."""
    gets = [Get(name, stored.size) for name, stored in wanted.items()]
    for done, got in enumerate(session.backend.get_many(gets), 1):
        session.progress("verify", done, len(wanted))
        if got.data is None or digest_of(got.data) != wanted[got.get.name].digest:
            yield got.get.name


def _stored(items: Iterable[Item]) -> Iterable[Stored]:
    for item in items:
        for live in item.live.candidates if item.live else ():
            for vouched in live.vouched:
                yield vouched.record.stored
