# SPDX-License-Identifier: Apache-2.0
"""Looking at a store without changing anything: list, show, compare, explain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.digest import Digest
from torchrelay.environment import Environment, FacetValue, diff_settings, explain, mismatches
from torchrelay.errors import UsageError
from torchrelay.manifest import Live
from torchrelay.reports import (
    DiffReport,
    EntryInfo,
    ExplainReport,
    Explanation,
    FacetResult,
    ListReport,
    Problem,
)
from torchrelay.signing import named_signers
from torchrelay.statement import Identity, check_workload
from torchrelay.store.documents import read_environments
from torchrelay.store.plan import (
    UNDECLARED_TREE,
    UNKNOWN_KIND,
    UNKNOWN_PREFIX,
    Triple,
    lacking_need,
    no_place,
    triple,
)
from torchrelay.store.session import Session
from torchrelay.store.view import View, load_view


def list_entries(session: Session, environment: Environment | None) -> ListReport:
    """All live entries; with ``environment``, whether they fit it.

    Raises:
        StorageError, TrustError: As :func:`~torchrelay.store.view.load_view`.
    """
    view = load_view(session)
    return _listed(session, view, view.union.live.values(), environment)


def show(session: Session, name: str) -> ListReport:
    """Live entries whose key, digest, blob or segment begins with ``name``.

    Raises:
        UsageError: There is none.
        StorageError, TrustError: As :func:`~torchrelay.store.view.load_view`.
    """
    view = load_view(session)
    segments = {str(s) for s in view.segments if s.digest.startswith(name) or str(s).startswith(name)}
    chosen = [live for live in view.union.live.values() if _is_called(live, name)]
    if not chosen and not segments:
        raise UsageError(
            f"nothing in {session.workload} has a name that begins with {name[:80]!r}",
            remedy="Run `torchrelay ls` for keys and digests.",
            subject=name[:80],
        )
    report = _listed(session, view, chosen, None)
    return ListReport(
        workload=report.workload,
        entries=report.entries,
        segments=sorted(segments),
        refused=report.refused,
        damaged=report.damaged,
    )


def _is_called(live: Live, name: str) -> bool:
    statement = live.statement
    names = [statement.key, statement.digest, statement.variant]
    for vouched in live.vouched:
        stored = vouched.record.stored
        names += [stored.name, stored.digest, vouched.digest]
    return any(candidate.startswith(name) for candidate in names)


def _listed(
    session: Session, view: View, chosen: Iterable[Live], environment: Environment | None
) -> ListReport:
    fitting = None if environment is None else _fitting(view, environment)
    entries = [_info(live, fitting) for live in chosen]
    return ListReport(
        workload=session.workload,
        entries=sorted(entries, key=lambda e: (e.kind, e.key, e.variant, e.digest)),
        segments=[str(segment) for segment in view.segments],
        refused=list(view.refused),
        damaged=list(view.damaged),
    )


def _fitting(view: View, environment: Environment) -> set[Triple]:
    """The entries whose own facets fit; one that needs others must find them here too."""
    return {triple(live) for live in view.union.live.values() if not mismatches(live.requires, environment)}


def _unfit_need(live: Live, fitting: set[Triple]) -> str:
    """The kind of what an entry needs and that does not fit; empty if one of its statements can be met."""
    lacking = [lacking_need(one, fitting) for one in live.candidates]
    return lacking[0].kind if lacking[0] is not None and all(lacking) else ""


def _info(live: Live, fitting: set[Triple] | None) -> EntryInfo:
    statement, stored = live.statement, live.vouched[0].record.stored
    fits = None if fitting is None else triple(live) in fitting and not _unfit_need(live, fitting)
    return EntryInfo(
        kind=statement.kind,
        key=statement.key,
        variant=statement.variant,
        requires=dict(live.requires),
        digest=statement.digest,
        size=statement.size,
        stored_size=stored.size,
        blob=stored.name,
        canon=statement.canon,
        signers=list(named_signers(live)),
        seq=live.seq,
        needs=[f"{need.kind} {need.key}" for need in statement.needs],
        fits=fits,
    )


def diff_workloads(session: Session, other: str) -> DiffReport:
    """The workload beside another one of the same store.

    Raises:
        UsageError: ``other`` cannot be the name of a workload.
        StorageError, TrustError: As :func:`~torchrelay.store.view.load_view`.
    """
    left = load_view(session)
    right = load_view(replace(session, workload=check_workload(other)))
    sides = _Side(session.workload, _digests(left.union.live)), _Side(other, _digests(right.union.live))
    return _diff(*sides, left, right)


def diff_local(session: Session, local: LocalView, requires: Mapping[tuple[str, ...], str]) -> DiffReport:
    """The workload beside the local cache directories.

    Args:
        session: The store and workload.
        local: What lies in the directories.
        requires: The digest of the requirements for each set of facets, in the directory's stamp.

    Raises:
        StorageError, TrustError: As :func:`~torchrelay.store.view.load_view`.
    """
    view = load_view(session)
    there = _digests(view.union.live)
    here: dict[Identity, set[str]] = defaultdict(set)
    for entry in local.items:
        identity, digest = _as_published(entry, requires[entry.meta.facets], there)
        here[identity].add(digest)
    return _diff(_Side("local", here), _Side(session.workload, there), view)


def _as_published(
    entry: LocalEntry, requires: str, there: Mapping[Identity, Collection[str]]
) -> tuple[Identity, str]:
    """Identity and digest in that form of the entry which the store has; in its own if it has none."""
    meta = entry.meta
    forms = [
        (Identity(meta.kind, form.key, meta.variant, requires), str(form.digest)) for form in entry.forms
    ]
    same = (form for form in forms if form[1] in there.get(form[0], ()))
    known = (form for form in forms if form[0] in there)
    return next(same, None) or next(known, forms[0])


def _digests(live: Mapping[Identity, Live]) -> dict[Identity, frozenset[str]]:
    """The digests under each identity: of the winner, and of what it won against."""
    return {
        identity: frozenset(str(one.statement.digest) for one in entry.candidates)
        for identity, entry in live.items()
    }


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    digests: Mapping[Identity, Set[str]]


def _diff(left: _Side, right: _Side, *views: View) -> DiffReport:
    both = left.digests.keys() & right.digests.keys()
    same = {identity for identity in both if left.digests[identity] & right.digests[identity]}
    return DiffReport(
        left=left.name,
        right=right.name,
        only_left=_labels(left.digests.keys() - both),
        only_right=_labels(right.digests.keys() - both),
        differing=_labels(both - same),
        same=len(same),
        refused=[problem for view in views for problem in view.refused],
        damaged=[problem for view in views for problem in view.damaged],
    )


def _labels(identities: Iterable[Identity]) -> list[str]:
    return sorted(
        f"{i.kind} {i.key}" + (f" variant {i.variant[:12]}" if i.variant else "") for i in identities
    )


def explain_entries(
    session: Session,
    name: str | None,
    environment: Environment,
    hints: Iterable[str],
    *,
    trees: Container[str] = (),
    has_prefixes: bool = True,
) -> ExplainReport:
    """Facet by facet, why entries would be installed in ``environment`` or not.

    Args:
        session: The store and workload.
        name: What the names of the entries begin with; None: all.
        environment: The machine that is asked for.
        hints: What else may help to understand a miss.
        trees: As for :func:`torchrelay.store.plan.make_plan`.
        has_prefixes: As there.

    Raises:
        UsageError: ``name`` is given and nothing has such a name.
        StorageError, TrustError: As :func:`~torchrelay.store.view.load_view`.
    """
    view = load_view(session)
    chosen = [live for live in view.union.live.values() if name is None or _is_called(live, name)]
    if name is not None and not chosen:
        raise UsageError(
            f"nothing in {session.workload} has a name that begins with {name[:80]!r}",
            remedy="Run `torchrelay ls` for keys and digests.",
            subject=name[:80],
        )
    fitting = _fitting(view, environment)
    groups: dict[tuple[Digest, str, str], list[Live]] = defaultdict(list)
    for live in chosen:
        reasons = [no_place(one.statement, trees, has_prefixes=has_prefixes) for one in live.candidates]
        place = reasons[0] if all(reasons) else ""
        groups[live.statement.requires, place, _unfit_need(live, fitting)].append(live)
    return ExplainReport(
        workload=session.workload,
        environment=environment.digest,
        groups=[_explanation(group, environment, place, need) for (_, place, need), group in groups.items()],
        settings=_settings(session, view, environment),
        hints=list(hints),
    )


_NO_PLACE = {
    UNKNOWN_KIND: "Upgrade torchrelay: this version does not know this kind.",
    UNDECLARED_TREE: "Say where the framework keeps its cache: --tree NAME=PATH.",
    UNKNOWN_PREFIX: "Pull with the Python that torch is installed for.",
}


def _explanation(group: list[Live], environment: Environment, reason: str, need: str) -> Explanation:
    results = explain(group[0].requires, environment)
    facets = [
        FacetResult(
            facet=result.facet,
            comparison=result.comparison,
            needed=_text(result.needed),
            here=_text(result.here),
            fits=result.ok,
            remedy="" if result.ok else result.remedy,
        )
        for result in results
    ]
    if reason:
        missing = FacetResult(
            facet=reason,
            comparison="place",
            needed="a place",
            here="none",
            fits=False,
            remedy=_NO_PLACE[reason],
        )
        facets.insert(0, missing)
    if need:
        unmet = FacetResult(
            facet="needs",
            comparison="needs",
            needed=f"{need} entries that fit",
            here="none of them",
            fits=False,
            remedy=f"See which facets of the {need} entries differ; without them it is of no use.",
        )
        facets.insert(0, unmet)
    kinds = Counter(live.statement.kind for live in group)
    fits = all(facet.fits for facet in facets)
    return Explanation(entries=len(group), kinds=dict(kinds), fits=fits, facets=facets)


def _text(value: FacetValue | None) -> str:
    if value is None:
        return "nothing"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _settings(session: Session, view: View, environment: Environment) -> list[tuple[str, str, str]]:
    """Settings that make this machine's keys differ from the nearest producer's."""
    producer = nearest_producer(session, view, environment)
    if producer is None:
        return []
    return [(name, there or "", here or "") for name, there, here in diff_settings(producer, environment)]


def nearest_producer(
    session: Session, view: View, environment: Environment, lost: list[Problem] | None = None
) -> Environment | None:
    """The environment that made most of the entries, among those with this machine's facets if any.

    Args:
        session: The store.
        view: What the workload holds.
        environment: This machine's.
        lost: Documents that are not there or damaged are added to it.

    Raises:
        StorageError: The store could not be reached.
    """
    made = Counter(vouched.record.producer for live in view.union.live.values() for vouched in live.vouched)
    documents = read_environments(session, made, lost)
    ranked = sorted(
        documents.items(),
        key=lambda item: (item[1].facets != environment.facets, -made[item[0]], item[0]),
    )
    return ranked[0][1] if ranked else None
