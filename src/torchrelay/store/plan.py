# SPDX-License-Identifier: Apache-2.0
"""What a pull does with each live entry. Pure: everything that must be known is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torchrelay.caches.autotune import SEARCHED, AutotuneKind
from torchrelay.caches.cpp import COMMAND, CppKind
from torchrelay.caches.gemm import GemmKind
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.caches.registry import kind_of
from torchrelay.caches.tree import TreeKind, split_key
from torchrelay.caches.triton import GROUP, TritonKind
from torchrelay.digest import Digest
from torchrelay.environment import Environment, mismatches, unstated_facets
from torchrelay.errors import FormatError
from torchrelay.manifest import LATEST_KINDS, Live
from torchrelay.reports import Problem
from torchrelay.signing import named_signers
from torchrelay.statement import Need, Statement

UNKNOWN_KIND = "unknown-kind"
NO_PLACE = "no-place"
UNDECLARED_TREE = "undeclared-tree"
UNKNOWN_PREFIX = "install-prefix"

_OF_PARTS = frozenset({CppKind.name, TritonKind.name, GemmKind.name, TreeKind.name})

Triple = tuple[str, str, str]


@dataclass(slots=True)
class Plan:
    """What a pull is to do.

    Attributes:
        install: Entries to fetch that need no other; one for each kind, key and variant.
        needers: Entries to fetch after those, each only with all that it needs.
        present: Here already, with the same bytes; or something better is, or is about to be.
        kept: Here with bytes of one's own.
        incompatible: Entries that do not fit, by the first facet that differs.
        refused: Statements that break a rule of their kind.
        missing: Entries whose needs are not to be had.
        unfit: The facet for which each incompatible entry does not fit.
    """

    install: list[Live] = field(default_factory=list)
    needers: list[Live] = field(default_factory=list)
    present: int = 0
    kept: int = 0
    incompatible: Counter[str] = field(default_factory=Counter)
    refused: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    unfit: dict[Triple, str] = field(default_factory=dict)


def make_plan(
    live: Iterable[Live],
    local: LocalView,
    environment: Environment,
    ledger: Ledger,
    trees: Container[str] = (),
    *,
    has_prefixes: bool = True,
) -> Plan:
    """Sort live entries into what to fetch and what not.

    Args:
        live: The winners of the union.
        local: What lies in the cache directories.
        environment: The machine that is pulled for.
        ledger: What pulls installed, so that it may be replaced.
        trees: Names of the declared roots of frameworks; entries of other trees have no place here.
        has_prefixes: Whether it is known where that machine has Python and torch. If not, kernels have
            no name there.
    """
    plan = Plan()
    fits: dict[Digest, str | None] = {}
    available = local_names(local)
    usable: list[Live] = []
    for entry in live:
        sound = _sound(entry, plan)
        placed = None if sound is None else _placed(sound, trees, plan, has_prefixes=has_prefixes)
        if placed is not None and _fits(placed, environment, fits, plan):
            usable.append(placed)
    for entry, count in _one_a_name(usable):
        if _is_wanted(entry, count, local, ledger, plan):
            (plan.needers if _may_need(entry) else plan.install).append(entry)
    available.update(triple(entry) for entry in plan.install)
    _drop_outranked(plan, available)
    _require_needs(plan, available)
    return plan


def keep_kinds(plan: Plan, kinds: Container[str]) -> None:
    """Count what is of another kind as incompatible: there is no place for it where this plan leads."""
    for entries in (plan.install, plan.needers):
        kept = [entry for entry in entries if entry.statement.kind in kinds]
        if len(kept) < len(entries):
            plan.incompatible[NO_PLACE] += len(entries) - len(kept)
        entries[:] = kept


def local_names(local: LocalView) -> set[Triple]:
    """Kind, key and variant of every entry in the cache directories."""
    return {(entry.meta.kind, entry.meta.key, entry.meta.variant) for entry in local.items}


def is_pulled(ledger: Ledger, entry: LocalEntry) -> bool:
    """Whether a pull installed ``entry``: then a push never signs it, and a pull may replace it.

    What a push may sign is less than what this leaves: :func:`may_sign`.

    Compiled kernels are never rewritten under their names by whoever made them. So one that is not
    what a pull installed there has been damaged or changed since, and is nobody's own.
    """
    meta = entry.meta
    if (meta.kind == CppKind.name or meta.canon == GROUP) and any(
        ledger.knows(meta.kind, form.key) for form in entry.forms
    ):
        return True
    return ledger.pulled(kind=meta.kind, key=meta.key, canon=meta.canon, digest=meta.digest)


def may_sign(ledger: Ledger, entry: LocalEntry) -> bool:
    """Whether a push may vouch for ``entry``: nothing in it can have come from a store.

    An entry of several files, or one that is merged into a file of others, has another digest as soon
    as one file is added to it, or a number is written differently; the rest of it is still what the
    pull installed. So of these kinds nothing is signed under a key that a pull installed anything under.
    """
    meta = entry.meta
    if meta.kind in _OF_PARTS and any(ledger.knows(meta.kind, form.key) for form in entry.forms):
        return False
    return not is_pulled(ledger, entry)


def no_place(statement: Statement, trees: Container[str], *, has_prefixes: bool) -> str:
    """Why nothing on this machine could take such an entry, whatever it needs; empty if something can.

    Args:
        statement: What the entry is.
        trees: As for :func:`make_plan`.
        has_prefixes: As for :func:`make_plan`.
    """
    if kind_of(statement.kind) is None:
        return UNKNOWN_KIND
    if statement.kind == TreeKind.name and split_key(statement)[0] not in trees:
        return UNDECLARED_TREE
    if not has_prefixes and (statement.kind, statement.canon) == (CppKind.name, COMMAND):
        return UNKNOWN_PREFIX
    return ""


def _sound(entry: Live, plan: Plan) -> Live | None:
    """``entry`` without the statements that break a rule of its kind; each of them is refused.

    One that breaks a rule must not hide one that does not, whichever of them won; nor may it be
    installed because the bytes of the winner cannot be had.
    """
    kind = kind_of(entry.statement.kind)
    if kind is None:
        return entry
    if unstated := unstated_facets(kind.name, entry.requires):
        plan.refused.append(_problem(entry, "requires", f"does not state its {', '.join(unstated)}"))
        return None
    good: list[Live] = []
    for candidate in entry.candidates:
        try:
            kind.check(candidate.statement)
        except FormatError as exc:
            plan.refused.append(_problem(candidate, "name", exc.message))
        else:
            good.append(candidate)
    return _ranked(good)


def _placed(entry: Live, trees: Container[str], plan: Plan, *, has_prefixes: bool) -> Live | None:
    """``entry`` without the statements that have no place here; None, counted, if none has one."""
    candidates = entry.candidates
    reasons = [no_place(item.statement, trees, has_prefixes=has_prefixes) for item in candidates]
    if all(reasons):
        plan.incompatible[reasons[0]] += 1
    return _ranked([item for item, reason in zip(candidates, reasons, strict=True) if not reason])


def _ranked(candidates: Sequence[Live]) -> Live | None:
    """The first of ``candidates``, with the others to fall back on; None if there are none."""
    if not candidates:
        return None
    first, *others = candidates
    return replace(first, others=tuple(replace(other, others=()) for other in others))


def _fits(entry: Live, environment: Environment, fits: dict[Digest, str | None], plan: Plan) -> bool:
    statement = entry.statement
    if statement.requires not in fits:
        differing = mismatches(entry.requires, environment)
        fits[statement.requires] = differing[0].facet if differing else None
    facet = fits[statement.requires]
    if facet is not None:
        plan.incompatible[facet] += 1
        plan.unfit[triple(entry)] = facet
    return facet is None


def _one_a_name(entries: Iterable[Live]) -> Iterator[tuple[Live, int]]:
    """One entry for each kind, key and variant, and how many there were.

    Those that differ only in what they require are the same files. If two of them fit (made under
    different versions of a library, say), one is enough, and a pull that took both would replace each
    by the other for ever: the one with most signers, then as for a single identity. The others stand
    behind it, for where its bytes cannot be had.
    """
    groups: dict[Triple, list[Live]] = {}
    for entry in entries:
        groups.setdefault(triple(entry), []).append(entry)
    for group in groups.values():
        first, *rest = sorted(group, key=_rank)
        behind = [candidate for entry in rest for candidate in entry.candidates]
        found = _ranked([*first.candidates, *behind]) if rest else first
        if found is not None:
            yield found, len(group)


def _rank(entry: Live) -> tuple[int, int, Digest, Digest]:
    statement = entry.statement
    seq = entry.seq if statement.kind in LATEST_KINDS else 0
    return -len(entry.signers), -seq, statement.digest, statement.requires


def _is_wanted(entry: Live, count: int, local: LocalView, ledger: Ledger, plan: Plan) -> bool:
    """Whether to fetch ``entry``, which stands for ``count`` live ones."""
    statement = entry.statement
    here = local.find(statement.kind, statement.key, statement.variant)
    digests = {digest for found in here for digest in found.digests_of(statement.key)}
    if any(candidate.statement.digest in digests for candidate in entry.candidates):
        plan.present += count
        return False
    if any(not is_pulled(ledger, found) for found in here):
        plan.kept += count
        return False
    plan.present += count - 1
    return True


def _may_need(entry: Live) -> bool:
    return any(candidate.statement.needs for candidate in entry.candidates)


def _drop_outranked(plan: Plan, available: set[Triple]) -> None:
    """A tuning result that was searched for stands in place of one chosen from a list."""
    better = {key for kind, key, variant in available if (kind, variant) == (AutotuneKind.name, SEARCHED)}
    outranked = [
        entry
        for entry in plan.install
        if (entry.statement.kind, entry.statement.variant) == (AutotuneKind.name, "")
        and entry.statement.key in better
    ]
    plan.present += len(outranked)
    if outranked:
        gone = {id(entry) for entry in outranked}
        plan.install = [entry for entry in plan.install if id(entry) not in gone]


def _require_needs(plan: Plan, available: set[Triple]) -> None:
    """Leave out entries whose needs are not to be had: they would never be a hit.

    If what one needs is in the store but does not fit this machine, neither does the entry.
    """
    good: list[Live] = []
    for entry in plan.needers:
        complete = with_needs(entry, available)
        lacking = lacking_need(entry, available)
        if complete is not None:
            good.append(complete)
        elif lacking and (facet := plan.unfit.get((lacking.kind, lacking.key, lacking.variant))):
            plan.incompatible[facet] += 1
        elif lacking:
            plan.missing.append(_problem(entry, "needs", f"needs {lacking.kind} {lacking.key}"))
    plan.needers = good


def lacking_need(entry: Live, available: set[Triple]) -> Need | None:
    """The first entry that ``entry`` needs and that is not available."""
    return next((n for n in entry.statement.needs if (n.kind, n.key, n.variant) not in available), None)


def with_needs(entry: Live, available: set[Triple]) -> Live | None:
    """``entry`` without the statements that need what is not available; None if all do."""
    candidates = entry.candidates
    return _ranked([item for item in candidates if lacking_need(item, available) is None])


def triple(entry: Live) -> Triple:
    """Kind, key and variant of an entry."""
    statement = entry.statement
    return statement.kind, statement.key, statement.variant


def _problem(entry: Live, reason: str, detail: str) -> Problem:
    signers = named_signers(entry)
    return Problem(
        subject=f"{entry.statement.kind} {entry.statement.key}",
        reason=reason,
        detail=detail,
        key_id=signers[0] if signers else "",
    )
