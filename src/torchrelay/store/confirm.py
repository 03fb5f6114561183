# SPDX-License-Identifier: Apache-2.0
"""Whether blobs that others published hold the bytes that a push is about to sign.

A record says where a blob lies, and its signer may have said anything. Who adds a record over a blob
that holds something else hides the entry from everybody. So it is one's own blob, byte for byte, or it
is read in full and opened once, in bulk; if it is neither, one's own goes up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchrelay import frame
from torchrelay.caches.base import Entry, Excluded
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError
from torchrelay.limits import KIB
from torchrelay.statement import CODEC, Statement, Stored
from torchrelay.storage import Get
from torchrelay.store.selection import Held, Item, present_copies
from torchrelay.store.session import Session

_SLACK = 64 * KIB
"""A blob that is longer than its plain bytes and so much is not worth reading to the end."""


@dataclass(slots=True)
class Confirmed:
    """What was found.

    Attributes:
        good: Items, and a blob in the store that holds their bytes.
        send: Items whose own blob must go up.
        changed: Items that changed on disk since they were looked at.
    """

    good: list[tuple[Item, Stored]] = field(default_factory=list)
    send: list[Item] = field(default_factory=list)
    changed: list[tuple[Item, Excluded]] = field(default_factory=list)


def confirm(
    session: Session, chosen: Iterable[tuple[Item, Stored]], held: Held, load: Callable[[Item], Entry]
) -> Confirmed:
    """Sort items that the store is said to hold.

    Args:
        session: The store.
        chosen: Items, and one blob of each that is there.
        held: What the store really has.
        load: Reads an item's canonical bytes again.
    """
    found = Confirmed()
    doubtful: dict[Get, list[tuple[Item, Stored]]] = {}
    for item, stored in chosen:
        try:
            blob = frame.compress(load(item).plain)
        except Excluded as exc:
            found.changed.append((item, exc))
            continue
        digest = digest_of(blob)
        same = (one for one in present_copies(item, held) if one.digest == digest and one.size == len(blob))
        if (own := next(same, None)) is not None:
            found.good.append((item, own))
        elif stored.codec == CODEC and stored.size <= item.statement.size + _SLACK:
            doubtful.setdefault(Get(stored.name, stored.size), []).append((item, stored))
        else:
            found.send.append(item)
    _read(session, doubtful, found)
    return found


def _read(session: Session, doubtful: dict[Get, list[tuple[Item, Stored]]], found: Confirmed) -> None:
    for got in session.backend.get_many(list(doubtful)) if doubtful else ():
        for item, stored in doubtful[got.get]:
            if got.data is not None and _holds(got.data, stored, item.statement):
                found.good.append((item, stored))
            else:
                found.send.append(item)


def _holds(blob: bytes, stored: Stored, statement: Statement) -> bool:
    if len(blob) != stored.size or digest_of(blob) != stored.digest:
        return False
    try:
        plain = frame.decompress(blob, size=statement.size, name=f"blob {stored.name}")
    except DamagedError:
        return False
    return digest_of(plain) == statement.digest
