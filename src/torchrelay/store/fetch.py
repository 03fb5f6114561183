# SPDX-License-Identifier: Apache-2.0
"""Pull: fetch what is new in bulk, verify each blob in memory, install the very bytes that were checked.

Needs come before needers. What is missing or damaged is tried again from other signers' blobs, then
reported; it never keeps the rest from being installed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from torchrelay.caches.base import Alias, Roots
from torchrelay.caches.index import Index, Installed, Meta
from torchrelay.caches.ledger import Ledger, noted_of
from torchrelay.caches.registry import kind_of
from torchrelay.digest import Digest
from torchrelay.errors import (
    DamagedError,
    InstallError,
    InTheWayError,
    RelayError,
    StorageError,
    TrustError,
)
from torchrelay.limits import MIB
from torchrelay.manifest import Live
from torchrelay.reports import Problem
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Stored
from torchrelay.storage import Get, Got
from torchrelay.store.failures import DAMAGED, failure
from torchrelay.store.plan import NO_PLACE, Triple, lacking_need, with_needs
from torchrelay.store.session import Session
from torchrelay.store.view import PackedAt

FLUSH_BYTES = 8 * MIB
FLUSH_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class _Source:
    """One way to get an entry's bytes: the statement they must fit, and the request."""

    live: Live
    get: Get
    blob: str


@dataclass(slots=True)
class _Want:
    live: Live
    sources: list[_Source]
    problem: Problem | None = None


@dataclass(slots=True)
class Fetched:
    """What a fetch came to.

    Attributes:
        installed: Entries installed, by kind.
        plain_bytes: Their canonical bytes.
        refused: Entries that the verifier refused.
        damaged: Objects that are not what was signed; the entry may be installed from another one.
        missing: Entries that are not there or could not be fetched.
        incompatible: Entries that the sink had no place for.
        available: What lies in the cache directories now.
    """

    available: set[Triple]
    installed: Counter[str] = field(default_factory=Counter)
    plain_bytes: int = 0
    refused: list[Problem] = field(default_factory=list)
    damaged: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    incompatible: Counter[str] = field(default_factory=Counter)


class Sink(Protocol):
    """Where verified entries go."""

    def announce(self, entries: Sequence[VerifiedEntry]) -> None:
        """Entries that :meth:`take` is about to get."""

    def take(self, entry: VerifiedEntry) -> bool:
        """Take one entry; whether there was a place for its kind.

        Raises:
            InTheWayError: A local file is in the way of this entry.
            StorageError: There is no room, or no access.
            DamagedError: The bytes cannot be an entry of their kind.
        """


class CacheDirectories:
    """The sink of a pull: writes ahead in the ledger, installs, and tells the index.

    Args:
        roots: Where to install.
        ledger: Written before the files are.
        index: Told of the files that each entry became, so that no scan reads them again.
        live: The entries that may come, for the names of the facets that they need.
    """

    def __init__(self, roots: Roots, ledger: Ledger, index: Index, live: Iterable[Live]) -> None:
        self._roots = roots
        self._ledger = ledger
        self._index = index
        self._facets = {entry.statement.requires: tuple(sorted(entry.requires)) for entry in live}

    def announce(self, entries: Sequence[VerifiedEntry]) -> None:
        """Note the entries durably: from here on no push signs them."""
        noted = [noted_of(entry.statement) for entry in entries]
        for entry, line in list(zip(entries, noted, strict=True)):
            if (alias := self._alias(entry)) is not None:
                noted.append(replace(line, key=alias.key, canon=alias.canon, digest=alias.digest))
        self._ledger.note(noted)

    def take(self, entry: VerifiedEntry) -> bool:
        """Install the entry."""
        kind = kind_of(entry.statement.kind)
        if kind is None:
            return False
        kind.check(entry.statement)  # the plan did: what is installed rests on no other code being right
        place, names = kind.install(entry, self._roots)
        self._index.learn(Installed(self._roots.root(place), place, names, self._meta(entry)))
        return True

    def _alias(self, entry: VerifiedEntry) -> Alias | None:
        kind = kind_of(entry.statement.kind)
        return None if kind is None else kind.alias(entry, self._roots)

    def _meta(self, entry: VerifiedEntry) -> Meta:
        statement = entry.statement
        return Meta(
            kind=statement.kind,
            key=statement.key,
            variant=statement.variant,
            needs=statement.needs,
            facets=self._facets[statement.requires],
            canon=statement.canon,
            files=statement.files,
            times=entry.record.times,
            masked={},
            digest=statement.digest,
            size=statement.size,
            alias=self._alias(entry),
        )


class Fetch:
    """Fetches and installs for one pull.

    Args:
        session: The store, workload and policy.
        sink: Where verified entries go.
        packed: Blobs that a pack holds too.
        deadline: Moment by :func:`time.monotonic` after which nothing more is fetched.
    """

    def __init__(
        self, session: Session, sink: Sink, *, packed: Mapping[Digest, PackedAt], deadline: float | None
    ) -> None:
        self._session = session
        self._sink = sink
        self._packed = packed
        self._deadline = deadline
        self._total = 0
        self._marks: set[str] = set()

    def run(self, install: Sequence[Live], needers: Sequence[Live], available: Iterable[Triple]) -> Fetched:
        """Fetch and install ``install``, then ``needers``.

        Raises:
            InstallError: The cache directory cannot be written.
            StorageError: The store failed as a whole.
        """
        fetched = Fetched(available=set(available))
        self._total = len(install) + len(needers)
        try:
            self._run(install, needers, fetched)
        finally:
            self._session.state.mark(self._marks)
        return fetched

    def _run(self, install: Sequence[Live], needers: Sequence[Live], fetched: Fetched) -> None:
        self._get_all(install, fetched)
        ready: list[Live] = []
        for live in needers:
            complete = with_needs(live, fetched.available)
            if complete is not None:
                ready.append(complete)
            elif lacking := lacking_need(live, fetched.available):
                detail = f"needs {lacking.kind} {lacking.key}"
                fetched.missing.append(Problem(subject=_label(live), reason="needs", detail=detail))
        self._get_all(ready, fetched)

    def _get_all(self, entries: Sequence[Live], fetched: Fetched) -> None:
        wants = [_Want(live, list(self._sources(live))) for live in entries]
        while wants:
            wants = self._round(wants, fetched)

    def _sources(self, live: Live) -> Iterator[_Source]:
        """The winner's blobs, then its packs, then those of the statements that it won against."""
        for candidate in live.candidates:
            seen: set[str] = set()
            for vouched in candidate.vouched:
                stored = vouched.record.stored
                if stored.name not in seen:
                    seen.add(stored.name)
                    yield _Source(candidate, Get(stored.name, stored.size), stored.name)
                    yield from self._from_pack(candidate, stored)

    def _from_pack(self, live: Live, stored: Stored) -> Iterator[_Source]:
        packed = self._packed.get(stored.digest)
        if packed is not None and packed.size == stored.size:
            yield _Source(live, Get(packed.name, packed.size, packed.offset, packed.size), stored.name)

    def _round(self, wants: list[_Want], fetched: Fetched) -> list[_Want]:
        """Try the next source of each; those that must try another one come back."""
        again: list[_Want] = []
        pending: dict[Get, list[_Want]] = {}
        for want in wants:
            if want.sources:
                pending.setdefault(want.sources[0].get, []).append(want)
            else:
                _give_up(want, fetched)
        verified: list[tuple[_Want, VerifiedEntry]] = []
        size = 0
        for got in self._until_deadline(list(pending)):
            for want in pending.pop(got.get):
                entry = self._verify(want, got, fetched)
                if entry is None:
                    again.append(want)
                else:
                    verified.append((want, entry))
                    size += entry.statement.size
            if len(verified) >= FLUSH_ENTRIES or size >= FLUSH_BYTES:
                again += self._install(verified, fetched)
                size = 0
        again += self._install(verified, fetched)
        for late in (want for group in pending.values() for want in group):
            if not _is_told(late.problem):
                fetched.missing.append(Problem(subject=_label(late.live), reason="deadline"))
        return again

    def _until_deadline(self, gets: Sequence[Get]) -> Iterator[Got]:
        if self._deadline is not None and time.monotonic() > self._deadline:
            return
        for got in self._session.backend.get_many(gets):
            yield got
            if self._deadline is not None and time.monotonic() > self._deadline:
                return

    def _verify(self, want: _Want, got: Got, fetched: Fetched) -> VerifiedEntry | None:
        source = want.sources.pop(0)
        if got.data is None:
            self._note_failure(want, source, got, fetched)
            return None
        try:
            return self._session.verifier.open(source.live, got.data)
        except DamagedError as exc:
            self._note_damage(want, source, exc.message, fetched)
        except TrustError as exc:
            want.sources.clear()
            want.problem = Problem(subject=_label(want.live), reason="refused", detail=exc.message)
            fetched.refused.append(want.problem)
        return None

    def _note_failure(self, want: _Want, source: _Source, got: Got, fetched: Fetched) -> None:
        problem = failure(got, source.blob)
        if problem.reason == DAMAGED:
            self._note_damage(want, source, problem.detail, fetched)
        else:
            want.problem = want.problem or problem

    def _note_damage(self, want: _Want, source: _Source, detail: str, fetched: Fetched) -> None:
        want.problem = Problem(subject=source.blob, reason="damaged", detail=f"{_label(want.live)}: {detail}")
        fetched.damaged.append(want.problem)
        self._marks.add(source.blob)

    def _install(self, verified: list[tuple[_Want, VerifiedEntry]], fetched: Fetched) -> list[_Want]:
        """Announce, then install; those that must try another source. ``verified`` is empty afterwards."""
        if not verified:
            return []
        try:
            self._sink.announce([entry for _, entry in verified])
        except StorageError as exc:
            raise InstallError(exc.message, remedy=exc.remedy, subject=exc.subject) from exc
        again = [want for want, entry in verified if not self._install_one(want, entry, fetched)]
        verified.clear()
        self._session.progress("install", sum(fetched.installed.values()), self._total)
        return again

    def _install_one(self, want: _Want, entry: VerifiedEntry, fetched: Fetched) -> bool:
        """Whether ``entry`` is done with; false: its bytes are no such entry, but others may be."""
        statement = entry.statement
        label = f"{statement.kind} {statement.key}"
        try:
            taken = self._sink.take(entry)
        except DamagedError as exc:
            return _note_unusable(want, entry, exc.message, fetched)
        except InTheWayError as exc:
            detail = f"{exc.message}; {exc.remedy}"
            fetched.missing.append(Problem(subject=label, reason="in-the-way", detail=detail))
            return True
        except StorageError as exc:
            raise InstallError(exc.message, remedy=exc.remedy, subject=label) from exc
        except RelayError:
            raise
        except Exception as exc:  # noqa: BLE001 - one signer's entry must not keep the others' out
            return _note_unusable(want, entry, f"unexpected {type(exc).__name__}: {exc}", fetched)
        if taken:
            fetched.installed[statement.kind] += 1
            fetched.plain_bytes += statement.size
            fetched.available.add((statement.kind, statement.key, statement.variant))
        else:
            fetched.incompatible[NO_PLACE] += 1
        return True


def _note_unusable(want: _Want, entry: VerifiedEntry, detail: str, fetched: Fetched) -> bool:
    """Report bytes that are what was signed and yet no entry of their kind; try other statements'."""
    want.problem = Problem(subject=_label(want.live), reason="damaged", detail=detail)
    fetched.damaged.append(want.problem)
    want.sources = [source for source in want.sources if source.live.statement != entry.statement]
    return not want.sources


def _give_up(want: _Want, fetched: Fetched) -> None:
    """Nothing is left to try: say what is missing, unless it was reported as damaged or refused."""
    problem = want.problem or Problem(subject=_label(want.live), reason="absent")
    if not _is_told(problem):
        detail = f"{_label(want.live)}: {problem.detail or problem.subject}"
        fetched.missing.append(Problem(subject=problem.subject, reason=problem.reason, detail=detail))


def _is_told(problem: Problem | None) -> bool:
    """Whether the report has it among what is damaged or refused."""
    return problem is not None and problem.reason in {DAMAGED, "refused"}


def _label(live: Live) -> str:
    return f"{live.statement.kind} {live.statement.key}"
