# SPDX-License-Identifier: Apache-2.0
"""Verification: every live blob read in full, or what is installed held against the signed records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.caches.base import Alias, Excluded, Reason
from torchrelay.caches.index import Meta, meta_of
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.caches.wrappers import exchanged_sources, named_sources
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError, TrustError
from torchrelay.limits import MAX_DOCUMENT_BYTES
from torchrelay.manifest import Live
from torchrelay.reports import Problem, VerifyReport
from torchrelay.storage import Get, Got
from torchrelay.store.doomed import damaged_lists
from torchrelay.store.failures import DAMAGED, failure
from torchrelay.store.layout import environment_name
from torchrelay.store.plan import is_pulled
from torchrelay.store.selection import CANONICAL_KINDS
from torchrelay.store.session import Session
from torchrelay.store.view import View, load_view

DAMAGE = frozenset({Reason.UNPARSEABLE, Reason.EMPTY, Reason.INCOMPLETE, Reason.FOREIGN_OWNER})
"""What an installed entry must not be."""


@dataclass(slots=True)
class _Findings:
    good: int = 0
    unsigned: int = 0
    checked_bytes: int = 0
    damaged: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)

    def report(self) -> VerifyReport:
        problems = len(self.damaged) + len(self.missing) + len(self.refused)
        return VerifyReport(
            checked=self.good + self.unsigned + problems,
            good=self.good,
            unsigned=self.unsigned,
            damaged=self.damaged,
            missing=self.missing,
            refused=self.refused,
            checked_bytes=self.checked_bytes,
        )


def verify_store(session: Session) -> VerifyReport:
    """Read every object that the workload's live entries rest on, and check it as a pull would.

    Damaged blobs are marked, so that the next push from here sends them again.

    Raises:
        StorageError: The store could not be read.
    """
    view = load_view(session, thorough=True)
    findings = _Findings(damaged=list(view.damaged), refused=list(view.refused))
    bad = {problem.subject for problem in view.damaged}.union(map(str, view.rejected))
    findings.good = sum(str(segment) not in bad for segment in view.segments)
    try:
        _check_doomed(session, findings)
        _check_environments(session, view, findings)
        _check_blobs(session, view, findings)
    finally:
        session.state.mark(findings.marks)
    return findings.report()


def _check_doomed(session: Session, findings: _Findings) -> None:
    """A list that cannot be read stops every push, so it is found here first."""
    count, damaged = damaged_lists(session.backend)
    findings.good += count - len(damaged)
    findings.damaged += damaged


def _check_environments(session: Session, view: View, findings: _Findings) -> None:
    names = {environment_name(digest): digest for digest in view.environments}
    for got in session.backend.get_many([Get(name, MAX_DOCUMENT_BYTES) for name in names]):
        if got.data is None:
            _note_failure(got, got.get.name, findings)
        elif digest_of(got.data) != names[got.get.name]:
            detail = "does not have the digest that names it"
            findings.marks.add(got.get.name)
            findings.damaged.append(Problem(subject=got.get.name, reason="damaged", detail=detail))
        else:
            findings.good += 1


def _check_blobs(session: Session, view: View, findings: _Findings) -> None:
    wanted: dict[Get, list[Live]] = {}
    for live in _all_live(view):
        for vouched in live.vouched:
            stored = vouched.record.stored
            holders = wanted.setdefault(Get(stored.name, stored.size), [])
            if not any(holder.statement == live.statement for holder in holders):
                holders.append(live)
    for done, got in enumerate(session.backend.get_many(list(wanted)), 1):
        _check_blob(session, got, wanted[got.get], findings)
        session.progress("verify", done, len(wanted))


def _check_blob(session: Session, got: Got, holders: list[Live], findings: _Findings) -> None:
    if got.data is None:
        _note_failure(got, f"{got.get.name} ({_label(holders[0])})", findings)
        return
    findings.checked_bytes += len(got.data)
    try:
        for live in holders:
            session.verifier.open(live, got.data)
    except DamagedError as exc:
        findings.marks.add(got.get.name)
        findings.damaged.append(
            Problem(subject=got.get.name, reason="damaged", detail=f"{_label(holders[0])}: {exc.message}")
        )
    except TrustError as exc:
        findings.refused.append(Problem(subject=_label(holders[0]), reason="refused", detail=exc.message))
    else:
        findings.good += 1


def _note_failure(got: Got, subject: str, findings: _Findings) -> None:
    problem = failure(got, subject)
    if problem.reason == DAMAGED:
        findings.marks.add(got.get.name)
        findings.damaged.append(problem)
    else:
        findings.missing.append(problem)


def _all_live(view: View) -> Iterable[Live]:
    for live in view.union.live.values():
        yield from live.candidates


def verify_local(session: Session, local: LocalView, ledger: Ledger, root: Path) -> VerifyReport:
    """Hold what lies in the cache directories against the signed records.

    Every local entry is read again, whatever the index says, and brought into canonical form; so
    what was installed must have a digest that an accepted record states for its key. Sources that
    PyTorch wrote beside them in ``root`` and would run must be those that the entries name.

    Raises:
        StorageError: The store could not be read.
    """
    view = load_view(session)
    signed: dict[tuple[str, str], set[str]] = {}
    for live in _all_live(view):
        signed.setdefault((live.statement.kind, live.statement.key), set()).add(live.statement.digest)
    findings = _Findings(refused=list(view.refused))
    sources: frozenset[str] = frozenset()
    for done, entry in enumerate(local.items, 1):
        sources |= _check_local(entry, local, ledger, signed, findings)
        session.progress("verify", done, len(local.items))
    _check_sources(root, sources, findings)
    for skipped in local.skipped:
        if skipped.reason in DAMAGE:
            findings.damaged.append(
                Problem(subject=skipped.path, reason=skipped.reason.value, detail=skipped.detail)
            )
    return findings.report()


def _check_local(
    entry: LocalEntry,
    local: LocalView,
    ledger: Ledger,
    signed: Mapping[tuple[str, str], set[str]],
    findings: _Findings,
) -> frozenset[str]:
    """Hold one entry against the records; the source files that it names."""
    label = f"{entry.meta.kind} {entry.meta.key}"
    try:
        loaded = local.load(entry)
    except Excluded as exc:
        findings.damaged.append(Problem(subject=label, reason=exc.reason.value, detail=exc.detail))
        return frozenset()
    forms = LocalEntry(entry.found, meta_of(loaded)).forms
    findings.checked_bytes += entry.size
    if any(form.digest in signed.get((entry.meta.kind, form.key), ()) for form in forms):
        findings.good += 1
    elif is_pulled(ledger, entry) and not _is_untouched(entry.meta, forms, ledger):
        detail = "was installed by a pull and is no longer what was signed"
        findings.damaged.append(Problem(subject=label, reason="damaged", detail=detail))
    else:
        findings.unsigned += 1
    return named_sources(loaded.plain) if entry.meta.kind in CANONICAL_KINDS else frozenset()


def _is_untouched(meta: Meta, forms: Iterable[Alias], ledger: Ledger) -> bool:
    """Whether the bytes are those that a pull installed, whatever has become of who signed them."""
    return any(ledger.noted(kind=meta.kind, key=form.key, digest=form.digest) for form in forms)


def _check_sources(root: Path, names: frozenset[str], findings: _Findings) -> None:
    """PyTorch runs a wrapper that lies there in place of the one in the entry."""
    for path in exchanged_sources(root, names):
        detail = "is not the source that an entry names; PyTorch would run it"
        findings.damaged.append(Problem(subject=path, reason="damaged", detail=detail))


def _label(live: Live) -> str:
    return f"{live.statement.kind} {live.statement.key}"
