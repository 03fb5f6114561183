# SPDX-License-Identifier: Apache-2.0
"""A workload as a reader with one policy sees it: one listing, new segments, verify, union.

Nothing in a segment counts before the verifier has accepted the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrelay.batch import Pack
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import DamagedError, NotFoundError, TooLargeError, TrustError
from torchrelay.limits import MAX_SEGMENT_BYTES
from torchrelay.manifest import Accepted, Union, superseded, union
from torchrelay.reports import Problem
from torchrelay.signing import Admission, Refusal
from torchrelay.storage import Get, Got
from torchrelay.store.layout import SegmentName, manifest_prefix, pack_name, parse_segment_name
from torchrelay.store.session import Session
from torchrelay.store.state import Memory


@dataclass(frozen=True, slots=True)
class PackedAt:
    """Where a blob lies in a pack: the pack's object name, byte offset and size."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class View:
    """What the accepted batches of a workload say together.

    Attributes:
        union: What the policy lets a reader have.
        held: The same without its threshold and without leaving out what is divergent: what a push
            need not publish again.
        segments: All segments listed, accepted or not.
        environments: Where the accepted entries were made.
        packed: Blobs that a pack holds too, by stored digest.
        rejected: Segments that hold something which the policy does not accept.
        refused: What the policy does not accept.
        damaged: Segments that are not what they must be.
        warnings: Signs that the store went backwards.
        torn: Those of the damaged segments whose bytes this client has kept, and accepts something in:
            a push puts them back.
    """

    union: Union
    held: Union
    segments: tuple[SegmentName, ...]
    environments: frozenset[Digest]
    packed: Mapping[Digest, PackedAt]
    rejected: frozenset[SegmentName]
    refused: tuple[Problem, ...]
    damaged: tuple[Problem, ...]
    warnings: tuple[str, ...]
    torn: tuple[SegmentName, ...] = ()


@dataclass(slots=True)
class _Gathered:
    by_name: dict[SegmentName, Admission] = field(default_factory=dict)
    damaged: list[Problem] = field(default_factory=list)
    torn: list[SegmentName] = field(default_factory=list)

    @property
    def admissions(self) -> list[Admission]:
        return list(self.by_name.values())

    @property
    def accepted(self) -> list[Accepted]:
        return [item for admission in self.admissions for item in admission.accepted]

    @property
    def refused(self) -> list[Refusal]:
        return [item for admission in self.admissions for item in admission.refused]


def load_view(session: Session, *, thorough: bool = False) -> View:
    """Read the workload's manifests, new segments in one bulk call.

    Args:
        session: The store, workload and policy.
        thorough: Read also the segments that this client has kept, and hold the store's bytes against
            their names.

    Raises:
        StorageError: The listing failed, or a listed segment could not be fetched: a partial view
            could pass for a smaller store.
        TrustError: The store went backwards and the policy refuses that.
    """
    listed = _list(session)
    try:
        gathered = _gather(session, listed, thorough=thorough)
    except NotFoundError:
        # A compaction deleted it between the listing and the reading: what replaced it is listed now.
        listed = _list(session)
        gathered = _gather(session, listed, thorough=thorough)
    segments = tuple(listed)
    checkpoints = [a for a in gathered.admissions if a.checkpoint_accepted and a.segment.checkpoint]
    folded, refused = session.verifier.union(gathered.admissions, workload=session.workload)
    filtered = session.verifier.requires_threshold(session.workload) > 1 or bool(refused)
    warnings = _notice_rollback(session, segments, gathered, checkpoints, folded.highest_seq)
    return View(
        union=folded,
        held=union(gathered.accepted) if filtered else folded,
        segments=segments,
        environments=frozenset(item.batch.header.environment for item in gathered.accepted),
        packed=_packed(checkpoints),
        rejected=frozenset(name for name, admission in gathered.by_name.items() if admission.refused),
        refused=tuple(map(problem_of, (*gathered.refused, *refused))),
        damaged=tuple(gathered.damaged),
        warnings=warnings,
        torn=tuple(gathered.torn),
    )


def problem_of(refusal: Refusal) -> Problem:
    """A refusal as reports show it."""
    return Problem(subject=refusal.subject, reason=refusal.rule, detail=refusal.detail, key_id=refusal.key_id)


def _list(session: Session) -> dict[SegmentName, int]:
    """The workload's segments and their sizes in the store, in the order of their names."""
    prefix = manifest_prefix(session.workload)
    listed = ((parse_segment_name(session.workload, i.name), i.size) for i in session.backend.list(prefix))
    found = {name: size for name, size in listed if name is not None}
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


def _gather(session: Session, segments: Mapping[SegmentName, int], *, thorough: bool) -> _Gathered:
    """Admit each segment: kept ones from the client's memory, new ones from the store."""
    gathered = _Gathered()
    wanted: dict[str, SegmentName] = {}
    known: set[SegmentName] = set()
    marked = session.state.marked()
    for segment, size in segments.items():
        kept = session.state.segment(session.workload, segment.digest)
        admission = _admit(session, segment, kept) if kept is not None else None
        if kept is None or not isinstance(admission, Admission):
            wanted[str(segment)] = segment
            continue
        gathered.by_name[segment] = admission
        known.add(segment)
        if size != len(kept):
            _tear(gathered, segment, f"has {size} bytes in the store where {len(kept)} were published")
        elif thorough or str(segment) in marked:
            wanted[str(segment)] = segment
    for got in session.backend.get_many([Get(name, MAX_SEGMENT_BYTES) for name in wanted]):
        segment = wanted[got.get.name]
        if segment in known:
            _compare(session, segment, got, gathered)
        else:
            _take(session, segment, got, gathered)
    session.state.forget_segments(session.workload, but=frozenset(s.digest for s in segments))
    return gathered


def _take(session: Session, segment: SegmentName, got: Got, gathered: _Gathered) -> None:
    if isinstance(got.error, TooLargeError):
        gathered.damaged.append(Problem(subject=str(segment), reason="damaged", detail=got.error.message))
        return
    stored = got.unwrap()
    admission = _admit(session, segment, stored)
    if isinstance(admission, Problem):
        gathered.damaged.append(admission)
        return
    gathered.by_name[segment] = admission
    session.state.keep_segment(session.workload, segment.digest, stored)


def _compare(session: Session, segment: SegmentName, got: Got, gathered: _Gathered) -> None:
    """Hold a segment that counts already against what the store has under its name."""
    if not isinstance(got.error, TooLargeError) and digest_of(got.unwrap()) == segment.digest:
        session.state.unmark([str(segment)])
        return
    session.state.mark([str(segment)])
    _tear(gathered, segment, "does not have the digest that names it in the store")


def _tear(gathered: _Gathered, segment: SegmentName, how: str) -> None:
    """Note damage to a segment whose good bytes were admitted last."""
    detail = f"segment {segment.digest} {how}; this machine has kept it, and its next push puts it back"
    gathered.damaged.append(Problem(subject=str(segment), reason="damaged", detail=detail))
    if gathered.by_name[segment].accepted:
        gathered.torn.append(segment)


def _admit(session: Session, segment: SegmentName, stored: bytes) -> Admission | Problem:
    try:
        return session.verifier.admit(
            stored, name=segment.digest, workload=segment.workload, environment=segment.environment
        )
    except DamagedError as exc:
        return Problem(subject=str(segment), reason="damaged", detail=exc.message)


def _packed(checkpoints: list[Admission]) -> dict[Digest, PackedAt]:
    packs: list[Pack] = [
        pack
        for admission in checkpoints
        if admission.segment.checkpoint
        for pack in admission.segment.checkpoint.packs
    ]
    return {
        blob.digest: PackedAt(pack_name(pack.digest), blob.offset, blob.size)
        for pack in packs
        for blob in pack.blobs
    }


def _notice_rollback(
    session: Session,
    segments: tuple[SegmentName, ...],
    gathered: _Gathered,
    checkpoints: list[Admission],
    highest_seq: int,
) -> tuple[str, ...]:
    """Compare with what this client saw before (design §4, Rollback)."""
    memory = session.state.memory(session.workload)
    listed = {str(segment) for segment in segments}
    explained = _explained(gathered, checkpoints)
    gone = {
        name for name in memory.segments if name not in listed and name.rpartition("/")[2] not in explained
    }
    # Only what a trusted key has signed: anybody who can write could add other names, and take them away.
    counted = {str(segment) for segment, admission in gathered.by_name.items() if _counts(admission)}
    torn = {problem.subject for problem in gathered.damaged}.intersection(memory.segments)
    headers = [admission.segment.checkpoint for admission in checkpoints]
    generation = max((header.generation for header in headers if header), default=0)
    warnings = _signs(session, memory, gone, generation)
    if session.state.has_lost(session.workload):
        warnings.append(
            "what this client remembers of the store cannot be read, so it may have gone backwards"
        )
    if warnings and session.policy.rollback == "refuse":
        raise TrustError(
            f"{session.backend.describe()} went backwards: {warnings[0]}",
            remedy="Find out who deleted or restored it; after an honest restore, clear this client's state.",
            subject=session.workload,
        )
    session.state.remember(
        session.workload,
        Memory(
            generation=max(generation, memory.generation),
            highest_seq=max(highest_seq, memory.highest_seq),
            segments=tuple(sorted(counted | torn | gone)),
        ),
        seen=memory,
    )
    return tuple(warnings)


def _counts(admission: Admission) -> bool:
    return bool(admission.accepted) or admission.checkpoint_accepted


def _explained(gathered: _Gathered, checkpoints: list[Admission]) -> frozenset[str]:
    """Segments that something visible and authorised says were folded into it."""
    owners = {
        admission.segment.name: frozenset(item.key_id for item in admission.accepted)
        for admission in gathered.admissions
    }
    names = set(superseded(gathered.accepted, owners))
    for admission in checkpoints:
        if admission.segment.checkpoint:
            names.update(admission.segment.checkpoint.supersedes)
    return frozenset(names)


def _signs(session: Session, memory: Memory, gone: set[str], generation: int) -> list[str]:
    warnings: list[str] = []
    if session.backend.capabilities.evicts:
        return warnings
    if gone:
        warnings.append(f"{len(gone)} segments seen before are gone, none carried on, such as {min(gone)}")
    newest = f"the newest checkpoint is of generation {generation}"
    if generation < memory.generation:
        warnings.append(f"{newest}, {memory.generation} was seen before")
    least = session.policy.generation(session.workload)
    if generation < least:
        warnings.append(f"{newest}, the policy asks for {least}")
    return warnings
