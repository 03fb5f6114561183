# SPDX-License-Identifier: Apache-2.0
"""Compress and upload blobs in bulk, a bounded number of bytes at a time, then check that they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchrelay import frame
from torchrelay.caches.base import Entry, Excluded
from torchrelay.digest import digest_of
from torchrelay.errors import StorageError, TooLargeError
from torchrelay.limits import MIB
from torchrelay.statement import CODEC, Stored
from torchrelay.store.doomed import free_copy
from torchrelay.store.presence import stored_sizes
from torchrelay.store.selection import Item
from torchrelay.store.session import Session

CHUNK_BYTES = 16 * MIB
CHUNK_ENTRIES = 1024

HOPELESS_CHUNKS = 2
"""After so many in a row of which not one blob went up, the store is down or full: no more are tried."""

Load = Callable[[Item], Entry]


@dataclass(slots=True)
class Sent:
    """What an upload came to.

    Attributes:
        stored: Where each item's blob lies now.
        failed: Items whose blob is not there, and why.
        changed: Items that changed on disk since they were looked at.
        over: Items for which there was no room in the budget.
        spent: Stored bytes that count against the budget.
        error: Why nothing at all could be stored, if that is the store's fault and not of the blobs.
    """

    stored: list[tuple[Item, Stored]] = field(default_factory=list)
    failed: list[tuple[Item, str]] = field(default_factory=list)
    changed: list[tuple[Item, Excluded]] = field(default_factory=list)
    over: list[Item] = field(default_factory=list)
    spent: int = 0
    error: StorageError | None = None


@dataclass(slots=True)
class _Chunk:
    blobs: dict[str, bytes] = field(default_factory=dict)
    items: list[tuple[Item, Stored]] = field(default_factory=list)
    size: int = 0

    @property
    def is_full(self) -> bool:
        return self.size >= CHUNK_BYTES or len(self.items) >= CHUNK_ENTRIES


def upload(
    session: Session,
    items: Sequence[Item],
    load: Load,
    doomed: frozenset[str],
    *,
    max_bytes: int | None,
) -> Sent:
    """Upload the blob of each item; a failure concerns the items of that blob alone.

    Args:
        session: Where to.
        items: What to upload, in order.
        load: Reads an item's canonical bytes again.
        doomed: Blob names that must not be used.
        max_bytes: Budget of stored bytes; what no longer fits is left out.

    Raises:
        StorageError: What was uploaded could not be checked.
    """
    sent = Sent()
    hopeless = 0
    for chunk in _chunks(items, load, doomed, sent, max_bytes):
        if hopeless == HOPELESS_CHUNKS:
            sent.failed += [(item, "not tried: the store takes nothing more") for item, _ in chunk.items]
            continue
        results = session.backend.put_many(chunk.blobs)
        for item, stored in chunk.items:
            error = results[stored.name]
            if error is None:
                sent.stored.append((item, stored))
            else:
                sent.failed.append((item, error.message))
        session.progress("upload", len(sent.stored) + len(sent.failed), len(items))
        errors = [error for error in results.values() if _is_the_stores(error)]
        hopeless = hopeless + 1 if len(errors) == len(results) else 0
        sent.error = sent.error or next(iter(errors), None)
    if sent.stored:
        sent.error = None
    _check(session, sent)
    return sent


def _is_the_stores(error: StorageError | None) -> bool:
    """Whether another blob would fare no better."""
    return error is not None and not isinstance(error, TooLargeError)


def _chunks(
    items: Iterable[Item], load: Load, doomed: frozenset[str], sent: Sent, max_bytes: int | None
) -> Iterator[_Chunk]:
    chunk = _Chunk()
    for item in items:
        try:
            blob = frame.compress(load(item).plain)
        except Excluded as exc:
            sent.changed.append((item, exc))
            continue
        if max_bytes is not None and sent.spent + len(blob) > max_bytes:
            sent.over.append(item)
            continue
        sent.spent += len(blob)
        digest = digest_of(blob)
        stored = Stored(digest=digest, size=len(blob), codec=CODEC, copy=free_copy(digest, doomed))
        chunk.blobs[stored.name] = blob
        chunk.items.append((item, stored))
        chunk.size += len(blob)
        if chunk.is_full:
            yield chunk
            chunk = _Chunk()
    if chunk.items:
        yield chunk


def _check(session: Session, sent: Sent) -> None:
    """Hold what the store now lists against what was sent; presence is never assumed."""
    sizes = stored_sizes(session.backend, {stored.name for _, stored in sent.stored})
    good = [(item, stored) for item, stored in sent.stored if sizes.get(stored.name) == stored.size]
    there = {id(item) for item, _ in good}
    sent.failed += [
        (item, f"{stored.name} is not in the store after its upload")
        for item, stored in sent.stored
        if id(item) not in there
    ]
    sent.stored = good
