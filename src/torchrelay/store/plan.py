# SPDX-License-Identifier: Apache-2.0
"""What a pull does with each live entry. Pure: everything that must be known is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from torchrelay.caches.autotune import SEARCHED, AutotuneKind
from torchrelay.caches.cpp import COMMAND, CppKind
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.caches.registry import kind_of
from torchrelay.caches.tree import TreeKind, split_key
from torchrelay.caches.triton import GROUP
from torchrelay.digest import Digest
from torchrelay.environment import Environment, mismatches
from torchrelay.errors import FormatError
from torchrelay.manifest import Live
from torchrelay.reports import Problem
from torchrelay.statement import Need

UNKNOWN_KIND = "unknown-kind"
UNDECLARED_TREE = "undeclared-tree"
UNKNOWN_PREFIX = "install-prefix"

Triple = tuple[str, str, str]


@dataclass(slots=True)
class Plan:
    """What a pull is to do.

    Attributes:
        install: Entries to fetch that need no other.
        needers: Entries to fetch after those, each only with all that it needs.
        present: Here already, with the same bytes; or something better is, or is about to be.
        kept: Here with bytes of one's own.
        incompatible: Entries that do not fit, by the first facet that differs.
        refused: Entries that break a rule of their kind.
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
    for entry in live:
        if not has_prefixes and (entry.statement.kind, entry.statement.canon) == (CppKind.name, COMMAND):
            plan.incompatible[UNKNOWN_PREFIX] += 1
        elif _is_usable(entry, environment, trees, fits, plan) and _is_wanted(entry, local, ledger, plan):
            (plan.needers if entry.statement.needs else plan.install).append(entry)
    available.update(_triple(entry) for entry in plan.install)
    _drop_outranked(plan, available)
    _require_needs(plan, available)
    return plan


def local_names(local: LocalView) -> set[Triple]:
    """Kind, key and variant of every entry in the cache directories."""
    return {(entry.meta.kind, entry.meta.key, entry.meta.variant) for entry in local.items}


def is_pulled(ledger: Ledger, entry: LocalEntry) -> bool:
    """Whether a pull installed ``entry``: then a push never signs it, and a pull may replace it.

    Compiled kernels are never rewritten under their names by whoever made them. So one that is not
    what a pull installed there has been damaged or changed since, and is nobody's own.
    """
    meta = entry.meta
    if (meta.kind == CppKind.name or meta.canon == GROUP) and any(
        ledger.knows(meta.kind, form.key) for form in entry.forms
    ):
        return True
    return ledger.pulled(
        kind=meta.kind, key=meta.key, variant=meta.variant, canon=meta.canon, digest=meta.digest
    )


def _is_usable(
    entry: Live, environment: Environment, trees: Container[str], fits: dict[Digest, str | None], plan: Plan
) -> bool:
    statement = entry.statement
    kind = kind_of(statement.kind)
    if kind is None:
        plan.incompatible[UNKNOWN_KIND] += 1
        return False
    try:
        kind.check(statement)
    except FormatError as exc:
        plan.refused.append(_problem(entry, "name", exc.message))
        return False
    if statement.kind == TreeKind.name and split_key(statement)[0] not in trees:
        plan.incompatible[UNDECLARED_TREE] += 1
        return False
    if statement.requires not in fits:
        differing = mismatches(entry.requires, environment)
        fits[statement.requires] = differing[0].facet if differing else None
    facet = fits[statement.requires]
    if facet is not None:
        plan.incompatible[facet] += 1
        plan.unfit[_triple(entry)] = facet
    return facet is None


def _is_wanted(entry: Live, local: LocalView, ledger: Ledger, plan: Plan) -> bool:
    statement = entry.statement
    here = local.find(statement.kind, statement.key, statement.variant)
    digests = {digest for found in here for digest in found.digests_of(statement.key)}
    if statement.digest in digests or any(o.statement.digest in digests for o in entry.others):
        plan.present += 1
        return False
    if any(not is_pulled(ledger, found) for found in here):
        plan.kept += 1
        return False
    return True


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
        lacking = lacking_need(entry, available)
        if lacking is None:
            good.append(entry)
        elif facet := plan.unfit.get((lacking.kind, lacking.key, lacking.variant)):
            plan.incompatible[facet] += 1
        else:
            plan.missing.append(_problem(entry, "needs", f"needs {lacking.kind} {lacking.key}"))
    plan.needers = good


def lacking_need(entry: Live, available: set[Triple]) -> Need | None:
    """The first entry that ``entry`` needs and that is not available."""
    return next((n for n in entry.statement.needs if (n.kind, n.key, n.variant) not in available), None)


def _triple(entry: Live) -> Triple:
    statement = entry.statement
    return statement.kind, statement.key, statement.variant


def _problem(entry: Live, reason: str, detail: str) -> Problem:
    signers: Sequence[str] = sorted(entry.signers)
    return Problem(
        subject=f"{entry.statement.kind} {entry.statement.key}",
        reason=reason,
        detail=detail,
        key_id=signers[0] if signers else "",
    )
