# SPDX-License-Identifier: Apache-2.0
"""Push: subtract what is held, upload blobs, check them, publish one segment, check for a gc.

The order is the promise (design §5): a record is never visible before its blob, and a gc either
sees the segment or the push sees the gc's list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchrelay import frame
from torchrelay.batch import (
    BatchHeader,
    FacetValue,
    Requires,
    Withdrawal,
    encode_record,
    encode_requires,
    encode_segment,
)
from torchrelay.caches.base import Entry, Excluded, Reason, Skipped
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalEntry
from torchrelay.digest import Digest, digest_of
from torchrelay.environment import Environment, requires_of
from torchrelay.errors import StorageError, TransientError
from torchrelay.limits import MAX_RECORD_BYTES, MAX_SEGMENT_BYTES
from torchrelay.reports import Problem, PushReport
from torchrelay.signing import Signer, sign_batch
from torchrelay.signing.policy import MAINTAINER
from torchrelay.statement import FORMAT, MAX_INTEGER, Record, Statement, Stored, statement_bytes
from torchrelay.storage import Get
from torchrelay.store.confirm import confirm
from torchrelay.store.doomed import read_doomed
from torchrelay.store.layout import ENVIRONMENTS, SegmentName, environment_name
from torchrelay.store.plan import may_sign
from torchrelay.store.presence import stored_sizes
from torchrelay.store.repair import unreadable_blobs
from torchrelay.store.selection import (
    Fate,
    Held,
    Item,
    blobs_of_interest,
    blobs_of_needs,
    fate,
    in_scope,
    is_divergent,
    known_bytes,
    other_bytes,
    present_copy,
    reason_counts,
    without_needs,
)
from torchrelay.store.session import Session
from torchrelay.store.upload import Sent, upload
from torchrelay.store.view import View, load_view

GC_ROUNDS = 5
"""A gc that dooms what was just pushed, so many times in a row, is not one that we can outrun."""

SEGMENT_RECORDS = 20_000
"""Records that a push puts into one segment. With a withdrawal for each, the header has some 10 MiB."""

SEGMENT_BYTES = MAX_SEGMENT_BYTES // 2
"""Bytes of records in one segment; the rest is for the header."""

MAX_STATEMENT_BYTES = MAX_RECORD_BYTES // 2
"""Bytes of a statement; the rest of its record is for masked numbers and provenance."""

SHOWN = frozenset({Reason.SECRET, Reason.UNPARSEABLE, Reason.FOREIGN_OWNER, Reason.BAD_NAME})
"""Reasons that are worth a look, so the files are named and not only counted."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which local entries a push considers, and what it may do.

    Attributes:
        since_ns: Moment from which on entries are in scope; 0 for all.
        stamped_ns: Moment from which on the directory's environment is known; 0 for always.
        own: Push one's own bytes beside what the store holds for an identity.
        replace: As `own`, and withdraw what the store holds.
        repair: Read the held blobs and send damaged ones again.
        max_bytes: Upload at most so many bytes of blobs.
        max_entries: Record at most so many entries.
        dry_run: Write nothing.
    """

    since_ns: int = 0
    stamped_ns: int = 0
    own: bool = False
    replace: bool = False
    repair: bool = False
    max_bytes: int | None = None
    max_entries: int | None = None
    dry_run: bool = False


@dataclass(slots=True)
class _Tally:
    """What a push has come to so far."""

    held: int = 0
    covered: int = 0
    divergent: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    shown: list[Problem] = field(default_factory=list)
    failed: list[Problem] = field(default_factory=list)
    send: list[Item] = field(default_factory=list)
    sign: list[tuple[Item, Stored]] = field(default_factory=list)
    stored: list[tuple[Item, Stored]] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    blobs: int = 0
    spent: int = 0
    segments: list[str] = field(default_factory=list)

    def leave_out(self, subject: str, reason: Reason, detail: str = "") -> None:
        self.reasons.append(reason)
        if reason in SHOWN:
            self.shown.append(Problem(subject=subject, reason=reason.value, detail=detail))


class Source(Protocol):
    """Where the entries of a push come from."""

    @property
    def items(self) -> Sequence[LocalEntry]:
        """The entries."""

    @property
    def skipped(self) -> Sequence[Skipped]:
        """What is left out of them."""

    def load(self, item: LocalEntry) -> Entry:
        """Read an entry's bytes.

        Raises:
            Excluded: It changed since it was found.
        """


class Push:
    """One push; made for one call of :meth:`run`.

    Args:
        session: The store, workload and policy.
        local: What may be pushed: usually what lies in the cache directories.
        environment: Where the entries were made, from the directory's stamp.
        signer: Signs the batch, once.
        ledger: What a pull installed; never signed.
        scope: What to consider.
        provenance: Claims of the signer's own about where this comes from.
    """

    def __init__(
        self,
        session: Session,
        local: Source,
        *,
        environment: Environment,
        signer: Signer,
        ledger: Ledger,
        scope: Scope,
        provenance: Mapping[str, str],
    ) -> None:
        self._session = session
        self._local = local
        self._environment = environment
        self._signer = signer
        self._ledger = ledger
        self._scope = scope
        self._provenance = dict(provenance)
        self._me = signer.public_key.key_id
        self._tally = _Tally()
        self._requires: dict[tuple[str, ...], tuple[Digest, Requires]] = {}
        self._held = Held({}, frozenset(), frozenset())

    def run(self, view: View | None = None) -> PushReport:
        """Do it.

        Args:
            view: What the workload holds, if that is known already.

        Raises:
            StorageError: The store could not be read, or nothing could be written to it.
            DamagedError: A doomed list cannot be read, so nothing may be published.
            TrustError: The store went backwards and the policy refuses that.
        """
        view = view or load_view(self._session, thorough=self._scope.repair)
        doomed = read_doomed(self._session.backend)
        self._sort(view, doomed)
        if not self._scope.dry_run:
            self._put_back(view)
            self._send(view, doomed)
        return self._report(view)

    # -- what becomes of each local entry --------------------------------------------------------

    def _sort(self, view: View, doomed: frozenset[str]) -> None:
        for skipped in self._local.skipped:
            self._tally.leave_out(skipped.path, skipped.reason, skipped.detail)
        chosen, older = in_scope(self._local.items, self._scope.since_ns, self._scope.stamped_ns)
        self._tally.reasons += [Reason.OLDER_THAN_SCOPE] * older
        pulled = [entry for entry in chosen if not may_sign(self._ledger, entry)]
        self._leave_to_others(pulled, view)
        gone = {id(entry) for entry in pulled}
        items = [self._item(entry, view) for entry in chosen if id(entry) not in gone]
        self._held = self._look(items, view, doomed)
        for item in items:
            self._place(item)
        self._keep_budget()
        self._require_needs(view)

    def _leave_to_others(self, pulled: Sequence[LocalEntry], view: View) -> None:
        """What a pull installed is never signed, whether or not *this* store has it."""
        known = known_bytes(view.held) if pulled else frozenset()
        for entry in pulled:
            if any((entry.meta.kind, form.key, form.digest) in known for form in entry.forms):
                self._tally.held += 1
            else:
                self._tally.leave_out(f"{entry.meta.kind} {entry.meta.key}", Reason.PULLED)

    def _item(self, entry: LocalEntry, view: View) -> Item:
        meta = entry.meta
        digest, requires = self._requires_of(meta.facets)
        statement = Statement(
            format=FORMAT,
            canon=meta.canon,
            workload=self._session.workload,
            kind=meta.kind,
            key=meta.key,
            variant=meta.variant,
            requires=digest,
            needs=meta.needs,
            digest=meta.digest,
            size=meta.size,
            files=meta.files,
        )
        identity = statement.identity
        live, served = view.held.live.get(identity), view.union.live.get(identity)
        return Item(entry, statement, requires, live, served)

    def _requires_of(self, facets: tuple[str, ...]) -> tuple[Digest, Requires]:
        known = self._requires.get(facets)
        if known is None:
            requires = requires_of(self._environment, facets)
            known = self._requires[facets] = (encode_requires(requires)[0], requires)
        return known

    def _look(self, items: Collection[Item], view: View, doomed: frozenset[str]) -> Held:
        asked = blobs_of_interest(items) | blobs_of_needs(items, view.held)
        sizes = stored_sizes(self._session.backend, asked)
        marked = self._session.state.marked()
        if self._scope.repair:
            marked |= unreadable_blobs(self._session, items, sizes)
        return Held(sizes, doomed, marked)

    def _place(self, item: Item) -> None:
        tally, held, scope = self._tally, self._held, self._scope
        if len(statement_bytes(item.statement)) > MAX_STATEMENT_BYTES:
            tally.leave_out(item.label, Reason.TOO_LARGE, f"{len(item.statement.files)} files")
            return
        decided = fate(item, held, self._me, own=scope.own, replace=scope.replace)
        beside = (scope.own or scope.replace) and decided is not Fate.HELD
        if (decided is Fate.COVERED or beside) and is_divergent(item):
            tally.divergent.append(item.label)
        if decided is Fate.HELD:
            tally.held += 1
        elif decided is Fate.COVERED:
            tally.covered += 1
        elif decided is Fate.SIGN and (stored := present_copy(item, held)):
            tally.sign.append((item, stored))
        else:
            tally.send.append(item)

    def _keep_budget(self) -> None:
        """Drop what is over `--max-entries`; `--max-bytes` is kept while uploading."""
        most = self._scope.max_entries
        if most is None:
            return
        tally = self._tally
        room = max(0, most - len(tally.sign))
        dropped = len(tally.sign[most:]) + len(tally.send[room:])
        tally.sign, tally.send = tally.sign[:most], tally.send[:room]
        tally.reasons += [Reason.OVER_BUDGET] * dropped

    def _require_needs(self, view: View) -> None:
        """An entry whose needs are nowhere would never be a hit: it is left out."""
        tally = self._tally
        going = [*tally.send, *(item for item, _ in tally.sign)]

        lacking = without_needs(going, view.held, self._held.has_any)
        gone = {id(item) for item, _ in lacking}
        for item, need in lacking:
            tally.leave_out(item.label, Reason.INCOMPLETE, f"needs {need.kind} {need.key}")
        tally.send = [item for item in tally.send if id(item) not in gone]
        tally.sign = [(item, stored) for item, stored in tally.sign if id(item) not in gone]

    # -- what is not as it was published ---------------------------------------------------------

    def _put_back(self, view: View) -> None:
        """Segments that this client has kept, and the environment: the same bytes under the same names."""
        state = self._session.state
        objects = {str(s): state.segment(self._session.workload, s.digest) for s in view.torn}
        known = self._environment.digest in view.environments
        name, document = environment_name(self._environment.digest), self._environment.encode()
        if known and not self._is_intact(name, document):
            objects[name] = document
        good = {name: data for name, data in objects.items() if data is not None}
        for name, error in (self._session.backend.put_many(good) if good else {}).items():
            _raise(error)
            self._tally.put_back.append(name)
        state.unmark(good)

    def _is_intact(self, name: str, document: bytes) -> bool:
        backend = self._session.backend
        if name in self._session.state.marked():
            return False
        if self._scope.repair:
            (got,) = backend.get_many([Get(name, len(document))])
            return got.data == document
        return any(i.name == name and i.size == len(document) for i in backend.list(ENVIRONMENTS))

    # -- upload, publish, check ------------------------------------------------------------------

    def _send(self, view: View, doomed: frozenset[str]) -> None:
        seq = self._next_seq(view)
        self._confirm()
        sent = self._upload(self._tally.send, doomed)
        recorded = self._without_needers([*sent.stored, *self._tally.sign], view)
        if not recorded:
            _raise(sent.error)
            return
        for _ in range(GC_ROUNDS):
            self._publish(recorded, seq)
            self._tally.stored += recorded
            doomed = read_doomed(self._session.backend)
            overtaken = [item for item, stored in recorded if stored.name in doomed]
            if not overtaken:
                return
            recorded = self._again(overtaken, view, doomed)
            if not recorded:
                return
        raise TransientError(
            "a gc keeps deleting what this push publishes",
            remedy="Wait until the gc is done, then push again.",
            subject=self._session.workload,
        )

    def _next_seq(self, view: View) -> int:
        """One more than was seen; a signer that jumps to the last number must not stop all others."""
        remembered = self._session.state.memory(self._session.workload).highest_seq
        return min(max(view.union.highest_seq, remembered) + 1, MAX_INTEGER)

    def _again(
        self, overtaken: Sequence[Item], view: View, doomed: frozenset[str]
    ) -> list[tuple[Item, Stored]]:
        """Upload once more what a gc is about to delete; what cannot be is no longer counted as pushed."""
        tally = self._tally
        gone = {id(item) for item in overtaken}
        self._held = replace(self._held, doomed=doomed)
        again = self._upload(overtaken, doomed).stored
        left = [(item, stored) for item, stored in tally.stored if id(item) not in gone]
        kept = {id(item) for item, _ in self._without_needers([*left, *again], view)}
        tally.stored = [(item, stored) for item, stored in left if id(item) in kept]
        return [(item, stored) for item, stored in again if id(item) in kept]

    def _confirm(self) -> None:
        """Add this signer's word only to blobs that do hold the entry's bytes."""
        tally = self._tally
        found = confirm(self._session, tally.sign, self._held, self._load)
        self._leave_out_changed(found.changed)
        tally.sign = found.good
        tally.send += found.send

    def _leave_out_changed(self, changed: Iterable[tuple[Item, Excluded]]) -> None:
        for item, excluded in changed:
            self._tally.leave_out(item.label, excluded.reason, excluded.detail)

    def _upload(self, items: Sequence[Item], doomed: frozenset[str]) -> Sent:
        budget = self._scope.max_bytes
        left = None if budget is None else budget - self._tally.spent
        sent = upload(self._session, items, self._load, doomed, max_bytes=left)
        self._tally.spent += sent.spent
        for item, reason in sent.failed:
            self._tally.failed.append(Problem(subject=item.label, reason="upload", detail=reason))
        self._leave_out_changed(sent.changed)
        for item in sent.over:
            self._tally.leave_out(item.label, Reason.OVER_BUDGET)
        self._session.state.unmark(stored.name for _, stored in sent.stored)
        self._tally.blobs += len({stored.name for _, stored in sent.stored})
        return sent

    def _load(self, item: Item) -> Entry:
        return self._local.load(item.local)

    def _without_needers(
        self, recorded: Sequence[tuple[Item, Stored]], view: View
    ) -> list[tuple[Item, Stored]]:
        """``recorded`` without what needs an entry whose upload failed, which is left out."""
        lacking = without_needs((item for item, _ in recorded), view.held, self._held.has_any)
        for item, need in lacking:
            self._tally.leave_out(item.label, Reason.INCOMPLETE, f"needs {need.kind} {need.key}")
        gone = {id(item) for item, _ in lacking}
        return [(item, stored) for item, stored in recorded if id(item) not in gone]

    def _publish(self, recorded: Sequence[tuple[Item, Stored]], seq: int) -> None:
        """One segment, or several if one would be more than readers take."""
        lines = [encode_record(self._record(item, stored, seq)) for item, stored in recorded]
        name = environment_name(self._environment.digest)
        _raise(self._session.backend.put_many({name: self._environment.encode()})[name])
        for start, end in parts([len(line) for line in lines]):
            self._publish_segment(recorded[start:end], lines[start:end])

    def _publish_segment(self, recorded: Sequence[tuple[Item, Stored]], lines: Sequence[bytes]) -> None:
        environment = self._environment
        header, signature = sign_batch(self._signer, self._header(recorded, lines))
        segment = frame.compress(encode_segment(header, signature, lines))
        name = SegmentName(self._session.workload, environment.digest, digest_of(segment))
        _raise(self._session.backend.put_many({str(name): segment})[str(name)])
        self._session.state.keep_segment(self._session.workload, name.digest, segment)
        self._tally.segments.append(name.digest)

    def _record(self, item: Item, stored: Stored, seq: int) -> Record:
        return Record(
            format=FORMAT,
            statement=item.statement,
            stored=stored,
            times=item.local.meta.times,
            seq=seq,
            producer=self._environment.digest,
            provenance=self._provenance,
        )

    def _header(self, recorded: Sequence[tuple[Item, Stored]], lines: Sequence[bytes]) -> BatchHeader:
        requires: dict[str, dict[str, FacetValue]] = {
            item.statement.requires: dict(item.requires) for item, _ in recorded
        }
        return BatchHeader(
            format=FORMAT,
            type="batch",
            workload=self._session.workload,
            environment=self._environment.digest,
            records=tuple(map(digest_of, lines)),
            requires=requires,
            withdrawn=self._withdrawn(recorded) if self._scope.replace else (),
            readmit=(),
            supersedes=(),
        )

    def _withdrawn(self, recorded: Sequence[tuple[Item, Stored]]) -> tuple[Withdrawal, ...]:
        return tuple(
            Withdrawal(
                kind=other.kind,
                key=other.key,
                variant=other.variant,
                requires=other.requires,
                digest=other.digest,
            )
            for item, _ in recorded
            for other in other_bytes(item)
        )

    def _advice(self) -> Iterator[str]:
        key = self._session.policy.key(self._me)
        if self._scope.replace and key is not None and MAINTAINER not in key.roles:
            yield f"key {self._me[:16]} is no maintainer, so --replace withdraws nothing of other signers"

    def _report(self, view: View) -> PushReport:
        tally, counters = self._tally, self._session.backend.counters
        planned = [*tally.send, *(item for item, _ in tally.sign)]
        items = planned if self._scope.dry_run else [item for item, _ in tally.stored]
        return PushReport(
            workload=self._session.workload,
            environment=self._environment.digest,
            pushed=len(items),
            held=tally.held,
            covered=tally.covered,
            divergent=sorted(tally.divergent),
            excluded=reason_counts(tally.reasons),
            excluded_entries=tally.shown,
            masked=_sum(item.local.meta.masked for item in items),
            by_kind=_sum({item.statement.kind: 1} for item in items),
            blobs=tally.blobs,
            uploaded_bytes=counters.uploaded_bytes,
            plain_bytes=sum(item.statement.size for item in items),
            requests=counters.requests,
            segment=tally.segments[-1] if tally.segments else "",
            segments=tally.segments,
            failed=tally.failed,
            refused=list(view.refused),
            damaged=list(view.damaged),
            warnings=[
                *view.warnings,
                *self._advice(),
                *(f"{name} was damaged or gone, and was put back" for name in tally.put_back),
            ],
            dry_run=self._scope.dry_run,
        )


def parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of records that readers take in one segment.

    Args:
        sizes: Bytes of each record.
    """
    start, total = 0, 0
    for at, size in enumerate(sizes):
        if at > start and (at - start == SEGMENT_RECORDS or total + size > SEGMENT_BYTES):
            yield start, at
            start, total = at, 0
        total += size
    if sizes:
        yield start, len(sizes)


def _raise(error: StorageError | None) -> None:
    if error is not None:
        raise error


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))
