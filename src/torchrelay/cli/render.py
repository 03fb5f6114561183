# SPDX-License-Identifier: Apache-2.0
"""The one renderer: a report in, lines out. Pure; where and how they are shown is :mod:`.output`'s.

Text from outside is put in as it is: :class:`~torchrelay.cli.output.Output` makes every line safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrelay.cli import render_local
from torchrelay.cli.remedies import remedies
from torchrelay.cli.reports import ShowReport
from torchrelay.cli.text import Line, bounded, counts, duration, pairs, plural, shortened, size
from torchrelay.cli.text import table as text_table
from torchrelay.reports import (
    DemoReport,
    DiffReport,
    EntryInfo,
    ExplainReport,
    Explanation,
    FacetResult,
    ListReport,
    Problem,
    PullReport,
    PushReport,
    Report,
    StatusReport,
    VerifyReport,
)

Lines = list[Line]

_EXPLAIN = "Run `torchrelay explain` to see, facet by facet, what does not fit."
_NOTHING = "The store has nothing under this workload; check its name."
_SHORT = 12
"""Digits of a digest in a table; `show` gives it whole."""


def render(report: Report) -> Lines:
    """A report as lines for people."""
    for kind, function in _RENDERERS.items():
        if isinstance(report, kind):
            return function(report)
    return render_local.render(report)


def push(report: PushReport) -> Lines:
    """What a push did."""
    verb = "would push" if report.dry_run else "pushed"
    of = f", of which {plural(len(report.divergent), 'divergent entry')}" if report.divergent else ""
    sent = f"{size(report.uploaded_bytes)} for {size(report.plain_bytes)} plain"
    rows = [
        ("workload", report.workload),
        ("environment", report.environment),
        (verb, _with_kinds(report.pushed, report.by_kind)),
        ("held", str(report.held)),
        *_row("covered", f"{report.covered}{of}" if report.covered else ""),
        *_row("excluded", counts(report.excluded)),
        *_row("masked", _masked(report.masked)),
        ("uploaded", f"{sent}, {plural(report.blobs, 'blob')}, {_cost(report)}"),
        *_row("segment", report.segment),
    ]
    return [
        *pairs(rows),
        *_warnings(report.warnings),
        *_names("divergent", report.divergent, "Same identity, other code: compare with `torchrelay show`."),
        *_problems("excluded", report.excluded_entries, style="warn"),
        *_problems("failed", report.failed),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged),
    ]


def pull(report: PullReport) -> Lines:
    """What a pull did."""
    rows = [
        ("workload", report.workload),
        ("environment", report.environment),
        ("installed", _with_kinds(report.installed, report.by_kind)),
        ("present", str(report.present)),
        *_row("kept", str(report.kept or "")),
        *_row("incompatible", counts(report.incompatible)),
        (
            "received",
            f"{size(report.downloaded_bytes)} for {size(report.plain_bytes)} plain, {_cost(report)}",
        ),
    ]
    return [
        *pairs(rows),
        *([Line(_EXPLAIN, "dim")] if report.incompatible else []),
        *_warnings(report.warnings),
        *([Line(_NOTHING, "warn")] if _found_nothing(report) else []),
        *_names("divergent", report.divergent, "Signers disagree on these: compare with `torchrelay show`."),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged),
        *_problems("missing", report.missing),
    ]


def status(report: StatusReport) -> Lines:
    """What a push and a pull would do."""
    rows = [
        ("store", report.store),
        ("workload", report.workload),
        ("environment", f"{report.environment or 'not known'}{'' if report.stamped else ' (not stamped)'}"),
        ("local", plural(report.local, "entry")),
        ("live", f"{plural(report.live, 'entry')} in {plural(report.segments, 'segment')}"),
        ("to push", str(report.to_push)),
        ("to pull", str(report.to_pull)),
        *_row("incompatible", counts(report.incompatible)),
    ]
    return [
        *pairs(rows),
        *([Line(_EXPLAIN, "dim")] if report.incompatible else []),
        *_warnings(report.warnings),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged),
    ]


def listing(report: ListReport) -> Lines:
    """The entries of a workload: every one, since a list is meant to be piped."""
    heads = ["kind", "key", "size", "stored", "signers", "digest"]
    rows = [
        [
            entry.kind,
            entry.key,
            size(entry.size),
            size(entry.stored_size),
            str(len(entry.signers)),
            entry.digest[:_SHORT],
        ]
        for entry in report.entries
    ]
    if any(entry.fits is not None for entry in report.entries):
        heads.append("fits")
        rows = [[*row, _fits(entry.fits)] for row, entry in zip(rows, report.entries, strict=True)]
    total = sum(entry.stored_size for entry in report.entries)
    summary = f"{plural(len(rows), 'entry')}, {size(total)} stored, {plural(len(report.segments), 'segment')}"
    return [
        *(text_table(heads, rows, right=frozenset({2, 3, 4})) if rows else []),
        Line(summary, "dim"),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged),
    ]


def details(report: ShowReport) -> Lines:
    """Everything about each entry, for `show`."""
    lines = [Line(f"workload {report.workload}", "head")]
    for entry in report.entries:
        lines += [Line(""), *pairs(_entry_rows(entry))]
    if report.segments:
        lines += [Line(""), Line("segments", "head"), *(Line(f"  {name}") for name in report.segments)]
    return [*lines, *_problems("refused", report.refused), *_problems("damaged", report.damaged)]


def diff(report: DiffReport) -> Lines:
    """Two sets of entries compared."""
    rows = [
        ("left", report.left),
        ("right", report.right),
        ("same", str(report.same)),
        ("only left", str(len(report.only_left))),
        ("only right", str(len(report.only_right))),
        ("differing", str(len(report.differing))),
    ]
    sections = (
        ("only left", report.only_left),
        ("only right", report.only_right),
        ("differing", report.differing),
    )
    return [
        *pairs(rows),
        *(line for title, names in sections for line in _names(title, names)),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged),
    ]


def verify(report: VerifyReport) -> Lines:
    """What a verification found."""
    speed = f"{size(report.checked_bytes)} in {duration(report.seconds)}"
    rows = [
        ("checked", f"{report.checked}  ({speed})"),
        ("good", str(report.good)),
        *_row(
            "unsigned",
            f"{report.unsigned}  (compiled here, or signed by nobody trusted)" if report.unsigned else "",
        ),
    ]
    return [
        *pairs(rows),
        *_problems("refused", report.refused),
        *_problems("damaged", report.damaged, advice="found damaged"),
        *_problems("missing", report.missing),
    ]


def explain(report: ExplainReport) -> Lines:
    """Facet by facet."""
    lines = pairs([("workload", report.workload), ("environment", report.environment)])
    for group in report.groups:
        lines += [Line(""), *_group(group)]
    if report.settings:
        lines += [Line(""), Line("settings that PyTorch's keys contain, and that differ", "head")]
        rows = [(name, there or "not stated", here or "not stated") for name, there, here in report.settings]
        lines += text_table(("setting", "producer", "here"), rows)
    if report.hints:
        lines += [Line(""), Line("hints", "head"), *bounded(report.hints)]
    return lines


def demo(report: DemoReport) -> Lines:
    """The table, and what was proved."""
    rows = [
        (
            row.way,
            f"{row.seconds:.2f} s",
            "-" if row.bytes is None else size(row.bytes),
            str(row.hits),
            str(row.misses),
        )
        for row in report.rows
    ]
    heads = ("start", "first result", "bytes", "hits", "misses")
    lines = [Line(report.model, "head"), *text_table(heads, rows, right=frozenset({1, 2, 3, 4})), Line("")]
    for check in report.checks:
        detail = f": {check.detail}" if check.detail else ""
        lines.append(
            Line(f"{'yes' if check.held else 'NO '}  {check.claim}{detail}", "good" if check.held else "bad")
        )
    where = f" in {report.directory}" if report.directory else ""
    return [*lines, Line(f"took {duration(report.seconds)}{where}", "dim")]


# --- parts ------------------------------------------------------------------------------------


def _row(name: str, value: str) -> list[tuple[str, str]]:
    """A row, left out where there is nothing to tell."""
    return [(name, value)] if value else []


def _with_kinds(count: int, by_kind: Mapping[str, int]) -> str:
    return f"{count}  ({counts(by_kind)})" if by_kind else str(count)


def _masked(found: Mapping[str, int]) -> str:
    """How much; the fields are PyTorch's own, and for whoever looks for them."""
    count = sum(found.values())
    return f"{plural(count, 'value')}  (--json names the fields)" if count else ""


def _cost(report: PushReport | PullReport) -> str:
    return f"{plural(report.requests, 'request')}, {duration(report.seconds)}"


def _found_nothing(report: PullReport) -> bool:
    counted = (report.installed, report.present, report.kept, report.incompatible)
    return not any((*counted, report.refused, report.damaged, report.missing, report.warnings))


def _fits(fits: bool | None) -> str:
    return "" if fits is None else "yes" if fits else "no"


def _warnings(warnings: Sequence[str]) -> Lines:
    return bounded([f"warning: {text}" for text in warnings], 0, "warn")


def _names(title: str, names: Sequence[str], remedy: str = "") -> Lines:
    if not names:
        return []
    return [
        Line(f"{title} ({len(names)})", "warn"),
        *bounded(names),
        *([Line(f"  {remedy}", "dim")] if remedy else []),
    ]


def _problems(section: str, problems: Sequence[Problem], *, style: str = "bad", advice: str = "") -> Lines:
    if not problems:
        return []
    return [
        Line(f"{section} ({len(problems)})", style),
        *bounded([_problem(problem) for problem in problems]),
        *(Line(f"  {remedy}", "dim") for remedy in remedies(advice or section, problems)),
    ]


def _problem(problem: Problem) -> str:
    signer = f" [signer {problem.key_id[:16]}]" if problem.key_id else ""
    # A detail that begins with the reason tells it better.
    begins = problem.detail.split(" ", 1)[0] == problem.reason
    reason = problem.detail if begins else ": ".join(filter(None, (problem.reason, problem.detail)))
    return f"{shortened(problem.subject, 160)}: {reason}{signer}"


def _entry_rows(entry: EntryInfo) -> list[tuple[str, str]]:
    requires = [f"{name}={_value(value)}" for name, value in sorted(entry.requires.items())]
    return [
        ("kind", entry.kind),
        ("key", entry.key),
        *_row("variant", entry.variant),
        ("digest", entry.digest),
        ("size", f"{size(entry.size)} ({entry.size} bytes)"),
        ("blob", f"{entry.blob} ({entry.stored_size} bytes)"),
        ("canon", entry.canon),
        ("seq", str(entry.seq)),
        ("signers", " ".join(entry.signers)),
        *_row("needs", " ".join(entry.needs)),
        ("requires", ", ".join(requires) or "nothing"),
        *_row("fits here", _fits(entry.fits)),
    ]


def _value(value: str | int | Sequence[str]) -> str:
    return str(value) if isinstance(value, (str, int)) else " ".join(value)


def _group(group: Explanation) -> Lines:
    # The machine is this one, or that of `--environment`.
    one = group.entries == 1
    yes, no = ("fits", "does not fit") if one else ("fit", "do not fit")
    verdict = yes if group.fits else no
    head = f"{plural(group.entries, 'entry')} ({counts(group.kinds)}) {verdict}"
    rows = [("yes" if facet.fits else "NO", facet.facet, *_compared(facet)) for facet in group.facets]
    remedies = dict.fromkeys(f"{f.facet}: {f.remedy}" for f in group.facets if f.remedy and not f.fits)
    return [
        Line(head, "good" if group.fits else "bad"),
        *text_table(("fits", "facet", "needed", "found"), rows, widest=72),
        *(Line(f"  {text}") for text in remedies),
    ]


def _compared(facet: FacetResult) -> tuple[str, str]:
    """What is needed and what is here: of a long list only what is missing."""
    needed = f"at least {facet.needed}" if facet.comparison == "at_least" else facet.needed
    if facet.comparison == "superset":
        wanted, found = facet.needed.split(), facet.here.split()
        missing = [item for item in wanted if item not in found]
        return f"{len(wanted)} of a list", f"missing {' '.join(missing)}" if missing else "all of them"
    return needed, "same" if facet.here == facet.needed else facet.here


# The first that fits, so a subclass stands before its base.
_RENDERERS: dict[type[Report], Callable[[Any], Lines]] = {
    PushReport: push,
    PullReport: pull,
    StatusReport: status,
    ShowReport: details,
    ListReport: listing,
    DiffReport: diff,
    VerifyReport: verify,
    ExplainReport: explain,
    DemoReport: demo,
}
