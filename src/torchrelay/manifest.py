# SPDX-License-Identifier: Apache-2.0
"""The union of a workload's segments: which records live, and which of them wins.

``docs/reference/format.md`` §10. Pure: it is told which batches the reader's policy accepted and
with what authority, and never looks at a clock, a file or a key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.batch import ANY, Batch, BatchHeader, Readmission, Requires, Withdrawal
from torchrelay.digest import Digest, digest_of
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
    batches = {item.batch.digest: item for item in accepted}
    gone = _withdrawals(batches.values())
    candidates: dict[Identity, _Candidates] = {}
    highest = 0
    for item in batches.values():
        for digest, record in item.batch.records:
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
    for identity, entry in candidates.items():
        digests = sorted({group[0].record.statement.digest for group in entry.by_statement.values()})
        if len(digests) > 1 and identity.kind not in LATEST_KINDS:
            divergent.append(Divergence(identity, tuple(digests)))
        winner = _winner(identity.kind, entry, threshold)
        if winner is None:
            outvoted.append(identity)
        else:
            live[identity] = winner
    return Union(live, tuple(outvoted), tuple(divergent), highest)


def _winner(kind: str, entry: _Candidates, threshold: int) -> Live | None:
    """Most signers; then the highest `seq` for kinds that grow; then the lowest statement digest."""
    ranked: list[tuple[tuple[int, int, str], Live]] = []
    for digest, group in entry.by_statement.items():
        signers = frozenset(vouched.key_id for vouched in group)
        if len(signers) >= threshold:
            ordered = tuple(sorted(group, key=lambda vouched: (-vouched.record.seq, vouched.digest)))
            live = Live(group[0].record.statement, entry.requires, ordered, signers)
            ranked.append(((-len(signers), -live.seq if kind in LATEST_KINDS else 0, digest), live))
    if not ranked:
        return None
    first, *others = (live for _, live in sorted(ranked, key=lambda item: item[0]))
    return replace(first, others=tuple(others)) if others else first


@dataclass(frozen=True, slots=True)
class _Gone:
    """Withdrawals in force, by identity: the digest and whose records are meant (None: all)."""

    by_identity: Mapping[Identity, list[tuple[str, Digest | None]]]

    def covers(self, statement: Statement, key_id: Digest) -> bool:
        return any(
            digest in (ANY, statement.digest) and author in (None, key_id)
            for digest, author in self.by_identity.get(statement.identity, ())
        )


def _withdrawals(accepted: Iterable[Accepted]) -> _Gone:
    """A maintainer's withdrawal binds all, a writer's only that key's own records."""
    items = list(accepted)
    lifted = [(item, readmit) for item in items for readmit in item.batch.header.readmit]
    gone: dict[Identity, list[tuple[str, Digest | None]]] = defaultdict(list)
    for item in items:
        for withdrawal in item.batch.header.withdrawn:
            if not any(_lifts(by, readmit, item, withdrawal) for by, readmit in lifted):
                author = None if item.maintainer else item.key_id
                gone[withdrawal.identity].append((withdrawal.digest, author))
    return _Gone(gone)


def _lifts(by: Accepted, readmit: Readmission, item: Accepted, withdrawal: Withdrawal) -> bool:
    """Only equal authority lifts: a maintainer, or the writer's own key for its own withdrawal."""
    equal = by.maintainer or (not item.maintainer and by.key_id == item.key_id)
    return (
        equal
        and readmit.lifts == item.batch.digest
        and readmit.identity == withdrawal.identity
        and readmit.digest == withdrawal.digest
    )


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
