# SPDX-License-Identifier: Apache-2.0
"""What becomes of each local entry in a push. Pure: everything that must be known is passed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torchrelay.batch import Requires
from torchrelay.caches.base import Reason
from torchrelay.caches.local import LocalEntry
from torchrelay.digest import Digest
from torchrelay.manifest import LATEST_KINDS, Live, Union
from torchrelay.statement import Identity, Need, Statement, Stored

CANONICAL_KINDS = frozenset({"inductor", "aot_autograd"})
"""Kinds whose bytes must agree between machines: a difference under one identity is a finding."""


class Fate(Enum):
    """What a push does with a local entry."""

    HELD = "held"
    """This signer's record of these bytes is live and its blob is there."""
    SIGN = "sign"
    """The store holds these bytes: a record is added, no blob."""
    SEND = "send"
    """Blob and record go up."""
    COVERED = "covered"
    """The store holds other bytes for this identity, and any will do."""


@dataclass(frozen=True, slots=True)
class Item:
    """A local entry with the identity and statement that it would be published under.

    Attributes:
        local: The entry as found.
        statement: What will be claimed of it.
        requires: The facets that it needs.
        live: What trusted keys have published for the identity, if anything, whether or not there are
            enough of them for a reader.
        served: What a reader gets for it, if anything.
    """

    local: LocalEntry
    statement: Statement
    requires: Requires
    live: Live | None
    served: Live | None

    @property
    def identity(self) -> Identity:
        """The identity it is published under."""
        return self.statement.identity

    @property
    def label(self) -> str:
        """As reports name it."""
        return f"{self.statement.kind} {self.statement.key}"


@dataclass(frozen=True, slots=True)
class Held:
    """What the store really has.

    Attributes:
        sizes: Stored sizes of the blobs that the live records of interest name.
        doomed: Blobs about to be deleted.
        marked: Blobs known to be damaged.
    """

    sizes: Mapping[str, int]
    doomed: frozenset[str]
    marked: frozenset[str]

    def has(self, stored: Stored) -> bool:
        """Whether the blob is there at its signed size, and will stay."""
        name = stored.name
        return self.sizes.get(name) == stored.size and name not in self.doomed and name not in self.marked

    def has_any(self, live: Live) -> bool:
        """Whether a blob of a live entry is there."""
        return any(self.has(v.record.stored) for one in live.candidates for v in one.vouched)


def in_scope(
    entries: Sequence[LocalEntry],
    since_ns: int,
    stamped_ns: int,
) -> tuple[list[LocalEntry], int]:
    """Entries made since, with what they need; and how many are left out as older.

    What is older than the stamp is left out even if it is needed or was hit: nobody knows where it was
    made, and a hit proves nothing (PyTorch hits entries of another instruction set).

    Args:
        entries: All local entries.
        since_ns: Moment from which on entries are wanted, by the clock of the file system; 0: all.
        stamped_ns: Moment from which on the directory's environment is known; 0: always.
    """
    chosen = [e for e in entries if _is_recent(e, since_ns)]
    needed = {(need.kind, need.key, need.variant) for entry in chosen for need in entry.meta.needs}
    picked = {id(entry) for entry in chosen}
    for entry in entries:
        name = (entry.meta.kind, entry.meta.key, entry.meta.variant)
        if id(entry) not in picked and name in needed and _is_recent(entry, stamped_ns):
            chosen.append(entry)
    return chosen, len(entries) - len(chosen)


def _is_recent(entry: LocalEntry, since_ns: int) -> bool:
    return since_ns == 0 or any(file.mtime_ns >= since_ns for file in entry.found.files)


def blobs_of_interest(items: Iterable[Item]) -> set[str]:
    """The blobs whose presence decides the fate of ``items``."""
    return {name for item in items for live in _lives(item) for name in _names(live)}


def known_bytes(folded: Union) -> frozenset[tuple[str, str, Digest]]:
    """Kind, key and digest of all that the store's records state."""
    statements = (one.statement for live in folded.live.values() for one in live.candidates)
    return frozenset((s.kind, s.key, s.digest) for s in statements)


def blobs_of_needs(items: Iterable[Item], folded: Union) -> set[str]:
    """The blobs of live entries that ``items`` need."""
    needed = {(n.kind, n.key, n.variant) for item in items for n in item.statement.needs}
    lives = (live for identity, live in folded.live.items() if _triple(identity) in needed)
    return {name for live in lives for one in live.candidates for name in _names(one)}


def _names(live: Live) -> Iterable[str]:
    return (vouched.record.stored.name for vouched in live.vouched)


def _lives(item: Item) -> tuple[Live, ...]:
    return item.live.candidates if item.live else ()


def present_copy(item: Item, held: Held) -> Stored | None:
    """A blob in the store that somebody says holds exactly the entry's bytes."""
    return next(present_copies(item, held), None)


def present_copies(item: Item, held: Held) -> Iterator[Stored]:
    """All such blobs; one name may come more than once."""
    for live in _lives(item):
        if live.statement.digest == item.statement.digest:
            for vouched in live.vouched:
                if held.has(vouched.record.stored):
                    yield vouched.record.stored


def fate(item: Item, held: Held, me: Digest, *, own: bool, replace: bool) -> Fate:
    """What to do with ``item`` (design §5, *Held*)."""
    if present_copy(item, held) is not None:
        # With other bytes there, a replacement has still to withdraw them.
        done = _is_mine(item, held, me) and not (replace and other_bytes(item))
        return Fate.HELD if done else Fate.SIGN
    if own or replace or item.statement.kind in LATEST_KINDS:
        return Fate.SEND
    # Only what readers get covers anything: one builder's bytes must not keep others from a quorum.
    served = item.served.candidates if item.served else ()
    others = (v.record for live in served for v in live.vouched)
    if any(r.statement.digest != item.statement.digest and held.has(r.stored) for r in others):
        return Fate.COVERED
    return Fate.SEND


def _is_mine(item: Item, held: Held, me: Digest) -> bool:
    """Whether this signer's own record names a blob that is there; what others name proves nothing."""
    return any(
        vouched.key_id == me and held.has(vouched.record.stored)
        for live in _lives(item)
        if live.statement == item.statement
        for vouched in live.vouched
    )


def other_bytes(item: Item) -> list[Statement]:
    """What the store has for the identity with other bytes."""
    return [live.statement for live in _lives(item) if live.statement.digest != item.statement.digest]


def is_divergent(item: Item) -> bool:
    """Whether the store holds other bytes where there is no room for a difference."""
    return item.statement.kind in CANONICAL_KINDS and bool(other_bytes(item))


def without_needs(
    items: Iterable[Item], folded: Union, available: Callable[[Live], bool]
) -> list[tuple[Item, Need]]:
    """Those of ``items`` that need something which neither the store nor ``items`` has.

    Args:
        items: What would be recorded.
        folded: What the store holds.
        available: Whether a live entry's blob is really there.
    """
    items = list(items)
    there = {_triple(identity) for identity, live in folded.live.items() if available(live)}
    lacking: list[tuple[Item, Need]] = []
    while True:
        own = {_triple(item.identity) for item in items}
        bad = [(item, need) for item in items if (need := _lacking(item, there | own))]
        if not bad:
            return lacking
        lacking += bad
        gone = {id(item) for item, _ in bad}
        items = [item for item in items if id(item) not in gone]


def _triple(identity: Identity) -> tuple[str, str, str]:
    return identity.kind, identity.key, identity.variant


def _lacking(item: Item, available: Collection[tuple[str, str, str]]) -> Need | None:
    return next((n for n in item.statement.needs if (n.kind, n.key, n.variant) not in available), None)


def reason_counts(reasons: Iterable[Reason]) -> dict[str, int]:
    """How often each reason occurs, by name."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason.value] = counts.get(reason.value, 0) + 1
    return dict(sorted(counts.items()))
