# SPDX-License-Identifier: Apache-2.0
"""The union of a workload's segments: which records live, and which of them wins.

``docs/reference/format.md`` §10. Pure: it is told which batches the reader's policy accepted and
with what authority, and never looks at a clock, a file or a key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.batch import ANY, Batch, BatchHeader, Requires
from torchrelay.digest import Digest, digest_of
from torchrelay.shared import Shared
from torchrelay.statement import Identity, Record, Statement, statement_bytes

LATEST_KINDS = frozenset({"pgo", "precompile"})
"""Kinds whose entries grow or are replaced: the highest `seq` wins. All others: any will do."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch that the reader's policy accepted.

    Attributes:
        batch: As read.
        segment: The name of the segment that it came in.
        key_id: The signer's key.
        maintainer: Whether that key may decide for others in this workload.
    """

    batch: Batch
    segment: Digest
    key_id: Digest
    maintainer: bool


@dataclass(frozen=True, slots=True)
class Vouched:
    """One record and who vouches for it."""

    digest: Digest
    record: Record
    batch: Digest
    key_id: Digest


@dataclass(frozen=True, slots=True)
class Live:
    """An identity's winning statement.

    Attributes:
        statement: The winner.
        requires: The facets that it needs.
        vouched: The records that carry this very statement, best first; their blobs may differ.
        signers: Distinct keys among them.
        others: What would have won without this one, in order: taken if its bytes cannot be had.
    """

    statement: Statement
    requires: Requires
    vouched: tuple[Vouched, ...]
    signers: frozenset[Digest]
    others: tuple[Live, ...] = ()

    @property
    def candidates(self) -> tuple[Live, ...]:
        """This one, then :attr:`others`."""
        return (self, *self.others)

    @property
    def seq(self) -> int:
        """The highest logical counter that a signer gave this statement."""
        return max(vouched.record.seq for vouched in self.vouched)


@dataclass(frozen=True, slots=True)
class Divergence:
    """One identity with different bytes: a hole in PyTorch's keys, or a bad builder."""

    identity: Identity
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """What a workload holds for a reader.

    Attributes:
        live: The winner of each identity.
        outvoted: Identities whose statements all have fewer signers than the policy asks for.
        divergent: Identities with more than one digest among the accepted records.
        highest_seq: The highest `seq` seen; a push continues from it.
    """

    live: Mapping[Identity, Live]
    outvoted: tuple[Identity, ...]
    divergent: tuple[Divergence, ...]
    highest_seq: int


@dataclass(slots=True)
class _Candidates:
    requires: Requires
    by_statement: dict[Digest, list[Vouched]] = field(default_factory=dict)


def union(accepted: Iterable[Accepted], *, threshold: int = 1) -> Union:
    """Fold accepted batches into one view; the order of ``accepted`` does not matter.

    Args:
        accepted: The batches that the reader's policy accepts.
        threshold: How many distinct keys must vouch for the same statement.
    """
    items = list(accepted)
    gone = _withdrawals(items)
    candidates: dict[Identity, _Candidates] = {}
    seen: set[tuple[Digest, Digest, Digest]] = set()
    highest = 0
    for item in items:
        for digest, record in item.batch.records:
            # A header's digest does not say who signed it, and a checkpoint may leave records out:
            # what counts once is a record of one key's batch, wherever it was found.
            name = (item.batch.digest, item.key_id, digest)
            if name in seen:
                continue
            seen.add(name)
            highest = max(highest, record.seq)
            if not gone.covers(record.statement, item.key_id):
                _collect(candidates, item, digest, record)
    return _decide(candidates, threshold, highest)


def _collect(candidates: dict[Identity, _Candidates], item: Accepted, digest: Digest, record: Record) -> None:
    statement = record.statement
    entry = candidates.get(statement.identity)
    if entry is None:
        requires = item.batch.header.requires[statement.requires]
        entry = candidates[statement.identity] = _Candidates(requires)
    vouched = Vouched(digest, record, item.batch.digest, item.key_id)
    entry.by_statement.setdefault(digest_of(statement_bytes(statement)), []).append(vouched)


def _decide(candidates: dict[Identity, _Candidates], threshold: int, highest: int) -> Union:
    live: dict[Identity, Live] = {}
    outvoted: list[Identity] = []
    divergent: list[Divergence] = []
    shared = Shared()
    for identity, entry in sorted(candidates.items(), key=lambda item: item[0]):
        digests = sorted({group[0].record.statement.digest for group in entry.by_statement.values()})
        if len(digests) > 1 and identity.kind not in LATEST_KINDS:
            divergent.append(Divergence(identity, tuple(digests)))
        winner = _winner(identity.kind, entry, threshold, shared)
        if winner is None:
            outvoted.append(identity)
        else:
            live[identity] = winner
    return Union(live, tuple(outvoted), tuple(divergent), highest)


def _winner(kind: str, entry: _Candidates, threshold: int, shared: Shared) -> Live | None:
    """Most signers; then the highest `seq` for kinds that grow; then the lowest statement digest."""
    ranked: list[tuple[tuple[int, int, str], Live]] = []
    for digest, group in entry.by_statement.items():
        signers: frozenset[Digest] = shared.one(frozenset(vouched.key_id for vouched in group))
        if len(signers) >= threshold:
            ordered = tuple(sorted(group, key=_rank))
            live = Live(group[0].record.statement, entry.requires, ordered, signers)
            ranked.append(((-len(signers), -live.seq if kind in LATEST_KINDS else 0, digest), live))
    if not ranked:
        return None
    first, *others = (live for _, live in sorted(ranked, key=lambda item: item[0]))
    return replace(first, others=tuple(others)) if others else first


def _rank(vouched: Vouched) -> tuple[int, Digest, Digest, Digest]:
    return -vouched.record.seq, vouched.digest, vouched.key_id, vouched.batch


@dataclass(frozen=True, slots=True)
class _Gone:
    """Withdrawals in force, by identity: the digest and whose records are meant (None: all)."""

    by_identity: Mapping[Identity, set[tuple[str, Digest | None]]]

    def covers(self, statement: Statement, key_id: Digest) -> bool:
        found = self.by_identity.get(statement.identity)
        return found is not None and not found.isdisjoint(
            (digest, author) for digest in (ANY, statement.digest) for author in (None, key_id)
        )


_Lift = tuple[Digest, Identity, str]
"""What a readmission names: the batch, the identity and the digest withdrawn."""


def _withdrawals(items: Iterable[Accepted]) -> _Gone:
    """A maintainer's withdrawal binds all, a writer's only that key's own records."""
    items = list(items)
    lifters: dict[_Lift, set[Digest | None]] = defaultdict(set)
    for item in items:
        for readmit in item.batch.header.readmit:
            lift = (readmit.lifts, readmit.identity, readmit.digest)
            lifters[lift].add(None if item.maintainer else item.key_id)
    gone: dict[Identity, set[tuple[str, Digest | None]]] = defaultdict(set)
    for item in items:
        author = None if item.maintainer else item.key_id
        for withdrawal in item.batch.header.withdrawn:
            lift = (item.batch.digest, withdrawal.identity, withdrawal.digest)
            # Only equal authority lifts: a maintainer, or the writer's own key for its own.
            if lifters.get(lift, frozenset()).isdisjoint((None, author)):
                gone[withdrawal.identity].add((withdrawal.digest, author))
    return _Gone(gone)


def superseded(accepted: Iterable[Accepted], owners: Mapping[Digest, frozenset[Digest]]) -> frozenset[Digest]:
    """Segments that need not be read because accepted batches say that they carry them on.

    Args:
        accepted: The batches that the reader's policy accepts.
        owners: The signers' key ids of each segment that was seen; unknown ones are not judged.
    """
    gone: set[Digest] = set()
    for item in accepted:
        header: BatchHeader = item.batch.header
        for name in header.supersedes:
            if item.maintainer or owners.get(name) == frozenset({item.key_id}):
                gone.add(name)
    return frozenset(gone)
