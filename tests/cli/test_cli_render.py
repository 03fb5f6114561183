# SPDX-License-Identifier: Apache-2.0
"""Reports as lines: what must be told, and that nothing from outside drives a terminal."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay import reports as r
from torchrelay.caches.base import Reason
from torchrelay.cli import remedies, render, text
from torchrelay.cli import reports as own
from torchrelay.cli.output import Output
from torchrelay.signing.verifier import Rule

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202egnp\u2028x\n\x9b1mfake: done"


def problem(subject="blobs/aa/bb", reason="damaged", **more):
    return r.Problem(subject=subject, reason=reason, **more)


def shown(report) -> str:
    return "\n".join(line.text for line in render.render(report))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


# --- text -------------------------------------------------------------------------------------


@given(st.text())
def test_printable_text_holds_nothing_that_drives_a_terminal_and_is_a_fixed_point(value):
    safe = text.printable(value)
    assert not any(unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp", "Cs", "Cn", "Co"} for c in safe)
    assert text.printable(safe) == safe


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S"])))
def test_ordinary_text_stays_as_it_is(value):
    assert text.printable(value) == value


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048524, "1023.9 KiB"),
        (1048575, "1.0 MiB"),
        (2**31, "2.0 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_sizes(count, expected):
    assert text.size(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0123, "12 ms"), (1, "1.0 s"), (119.9, "119.9 s"), (600, "10.0 min")]
)
def test_durations(seconds, expected):
    assert text.duration(seconds) == expected


def test_plurals():
    assert [text.plural(n, "entry") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert text.plural(2, "segment") == "2 segments"


@given(st.lists(st.lists(st.text(max_size=30), min_size=2, max_size=2), max_size=5))
def test_columns_of_a_table_stand_below_each_other_whatever_is_in_them(rows):
    lines = text.table(("a", "b"), [[f"<{left}", f">{right}"] for left, right in rows])
    width = max(len(text.shortened(text.printable(f"<{left}"), 120)) for left, _ in [*rows, ["", ""]])
    assert all(line.text[width : width + 2] in {"  ", ""} or width < 2 for line in lines[1:])


# --- what must be told ------------------------------------------------------------------------


def test_a_push_tells_where_everything_went():
    report = r.PushReport(
        workload="acme/x",
        pushed=3,
        held=4,
        covered=2,
        divergent=["inductor fabc"],
        excluded={"temporary": 2, "secret": 1},
        excluded_entries=[problem("fxgraph/ab", "secret", detail="source_code: aws-key")],
        masked={"runnable_graph_str:url-password": 1},
        by_kind={"cpp": 2, "inductor": 1},
        uploaded_bytes=2048,
        plain_bytes=20480,
        segment="5" * 64,
        failed=[problem("inductor fdef", "upload", detail="timed out")],
        warnings=["half the settings differ"],
    )
    told = shown(report)
    for part in (
        *("acme/x", "3  (cpp 2, inductor 1)", "2, of which 1 divergent entry", "temporary 2, secret 1"),
        *("1 value  (--json names the fields)", "2.0 KiB for 20.0 KiB plain", "5" * 64),
        *(
            "fxgraph/ab: secret: source_code: aws-key",
            "Keep the secret out",
            "inductor fdef: upload: timed out",
        ),
        *("Run the push again", "warning: half the settings differ", "inductor fabc"),
    ):
        assert part in told


def test_a_dry_run_does_not_claim_to_have_pushed():
    told = shown(r.PushReport(pushed=3, dry_run=True))
    assert "would push" in told
    assert not re.search(r"^pushed", told, re.MULTILINE)


def test_a_pull_tells_what_was_not_installed_and_what_to_do():
    report = r.PullReport(
        installed=1,
        kept=2,
        incompatible={"cpu_isa": 3},
        refused=[
            problem("batch 12", "unknown-key", detail="key 34 is not in the trust policy", key_id="ab" * 32)
        ],
        damaged=[problem("blobs/aa/cc", "damaged", detail="7 bytes where 9 were signed")],
        missing=[problem("aot_autograd a1", "needs", detail="needs inductor f1")],
        divergent=["inductor f9"],
    )
    told = shown(report)
    for part in (
        *("cpu_isa 3", "torchrelay explain", "refused (1)", "damaged (1)", "missing (1)", "inductor f9"),
        *("batch 12: unknown-key: key 34 is not in the trust policy [signer abababababababab]", "trust add"),
        *(
            "blobs/aa/cc: damaged: 7 bytes where 9 were signed",
            "heals it",
            "aot_autograd a1: needs inductor f1",
        ),
    ):
        assert part in told


def test_a_pull_of_a_workload_that_nobody_pushed_says_so():
    assert "nothing under this workload" in shown(r.PullReport(workload="typo"))
    assert "nothing under this workload" not in shown(r.PullReport(present=1))


def test_explain_shows_the_facet_that_does_not_fit_and_of_a_list_only_what_is_missing():
    facets = [
        r.FacetResult(
            facet="cpu_flags", comparison="superset", needed="a b c", here="a", fits=False, remedy="Buy."
        ),
        r.FacetResult(
            facet="glibc", comparison="at_least", needed="2.36", here="2.31", fits=False, remedy="Old."
        ),
        r.FacetResult(facet="torch", comparison="equal", needed="2.13", here="2.13", fits=True),
    ]
    group = r.Explanation(entries=2, kinds={"cpp": 2}, fits=False, facets=facets)
    told = shown(r.ExplainReport(groups=[group], settings=[("threads", "4", "")], hints=["compiler: g++ 12"]))
    assert "2 entries (cpp 2) do not fit" in told
    assert re.search(r"NO +cpu_flags +3 of a list +missing b c", told)
    assert re.search(r"NO +glibc +at least 2.36 +2.31", told)
    assert re.search(r"yes +torch +2.13 +same", told)
    assert "cpu_flags: Buy." in told
    assert re.search(r"threads +4 +not stated", told)


def test_the_demo_shows_its_table_and_each_claim():
    report = r.DemoReport(
        model="tiny",
        rows=[
            r.DemoRow(way="cold", seconds=20, misses=2),
            r.DemoRow(way="pull", seconds=1.234, bytes=2048, hits=2),
        ],
        checks=[
            r.DemoCheck(claim="it was a hit", held=True),
            r.DemoCheck(claim="refused", held=False, detail="blob 3"),
        ],
    )
    told = shown(report)
    assert re.search(r"pull +1.23 s +2.0 KiB +2 +0", told)
    assert "yes  it was a hit" in told
    assert "NO   refused: blob 3" in told
    assert report.exit_code == 1


@pytest.mark.parametrize("section", ["refused", "damaged", "missing"])
def test_long_lists_end_with_the_number_of_those_left_out(section):
    report = r.PullReport(**{section: [problem(f"blob {n}") for n in range(1000)]})
    told = shown(report).splitlines()
    assert len(told) < 40
    assert any(f"{section} (1000)" in line for line in told)
    assert any("… and 980 more" in line for line in told)
    assert sum("blob " in line for line in told) == 20


def test_long_names_are_cut():
    told = shown(r.PullReport(damaged=[problem("x" * 100_000, "damaged", detail="y" * 100_000)]))
    assert len(told) < 2000


def test_every_rule_of_refusal_and_every_reason_worth_a_look_has_a_remedy():
    for rule in Rule.__args__:
        assert rule in remedies._TRUST
    assert set(remedies._EXCLUDED) <= {reason.value for reason in Reason}
    dump = problem(reason="secret", detail="environment-dump in graph")
    assert remedies.remedies("excluded", [dump, dump]) == [remedies._DUMP]
    assert "--cache-dir" in remedies._DUMP
    assert remedies.remedies("refused", [problem(reason="expired"), problem(reason="expired")]) == [
        remedies._TRUST["expired"]
    ]


REPORTS = [
    *(cls for cls in render._RENDERERS if cls is not r.ExplainReport),
    r.ExplainReport,
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda cls: cls.__name__)
def test_an_empty_report_of_every_kind_can_be_shown(report):
    assert shown(report())


# --- hostile values ---------------------------------------------------------------------------

P = [problem(HOSTILE, HOSTILE, detail=HOSTILE, key_id=HOSTILE)]
ENTRY = r.EntryInfo(
    kind=HOSTILE,
    key=HOSTILE,
    variant=HOSTILE,
    requires={HOSTILE: HOSTILE, "list": (HOSTILE, HOSTILE)},
    digest=HOSTILE,
    size=1,
    stored_size=1,
    blob=HOSTILE,
    canon=HOSTILE,
    signers=[HOSTILE],
    seq=1,
    needs=[HOSTILE],
    fits=True,
)
FACET = r.FacetResult(
    facet=HOSTILE, comparison=HOSTILE, needed=HOSTILE, here=HOSTILE, fits=False, remedy=HOSTILE
)
KEY = own.KeyInfo(key_id=HOSTILE, name=HOSTILE, public_key=HOSTILE, roles=(HOSTILE,), workloads=(HOSTILE,))
SETTING = own.SettingInfo(value={HOSTILE: HOSTILE}, origin=HOSTILE, source=HOSTILE)
COUNTS = {HOSTILE: 1}
HOSTILE_REPORTS = [
    r.PushReport(
        HOSTILE,
        HOSTILE,
        1,
        1,
        1,
        [HOSTILE],
        COUNTS,
        P,
        COUNTS,
        COUNTS,
        segment=HOSTILE,
        failed=P,
        refused=P,
        damaged=P,
        warnings=[HOSTILE],
    ),
    r.PullReport(
        HOSTILE,
        HOSTILE,
        incompatible=COUNTS,
        refused=P,
        damaged=P,
        missing=P,
        by_kind=COUNTS,
        divergent=[HOSTILE],
        warnings=[HOSTILE],
    ),
    r.StatusReport(HOSTILE, HOSTILE, HOSTILE, incompatible=COUNTS, refused=P, damaged=P, warnings=[HOSTILE]),
    r.ListReport(workload=HOSTILE, entries=[ENTRY], segments=[HOSTILE], refused=P, damaged=P),
    own.ShowReport(workload=HOSTILE, entries=[ENTRY], segments=[HOSTILE], refused=P, damaged=P),
    r.DiffReport(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [HOSTILE]),
    r.VerifyReport(unsigned=1, damaged=P, missing=P, refused=P),
    r.ExplainReport(
        HOSTILE,
        HOSTILE,
        [r.Explanation(entries=1, kinds=COUNTS, fits=False, facets=[FACET])],
        [(HOSTILE,) * 3],
        [HOSTILE],
    ),
    r.DemoReport(
        HOSTILE,
        HOSTILE,
        [r.DemoRow(way=HOSTILE, seconds=1)],
        [r.DemoCheck(claim=HOSTILE, held=True, detail=HOSTILE)],
    ),
    own.KeygenReport(key_id=HOSTILE, public_key=HOSTILE, file=HOSTILE, trusted=False),
    own.TrustReport(
        action="add",
        policy=HOSTILE,
        key_id=HOSTILE,
        keys=[KEY],
        thresholds=COUNTS,
        accept_unsigned=True,
        warnings=[HOSTILE],
    ),
    own.EnvReport(
        environment=HOSTILE,
        facets={HOSTILE: HOSTILE},
        settings={HOSTILE: HOSTILE},
        exports={HOSTILE: HOSTILE},
        without_torchrelay={HOSTILE: HOSTILE},
        hints={HOSTILE: HOSTILE},
        file=HOSTILE,
    ),
    own.ConfigReport(settings={HOSTILE: SETTING}, file=HOSTILE, warnings=[HOSTILE]),
]


def test_a_hostile_report_of_every_kind_is_tried():
    assert {type(report) for report in HOSTILE_REPORTS} == {
        *render._RENDERERS,
        *render.render_local._RENDERERS,
    }


@pytest.mark.parametrize("report", HOSTILE_REPORTS, ids=lambda report: type(report).__name__)
def test_hostile_values_reach_neither_a_pipe_nor_a_terminal_raw(report):
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        Output(stream, io.StringIO()).report(report, as_json=False)
    plain = pipe.getvalue()
    ours = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    for found in (plain, ours):
        assert "\\x1b" in found, "the value must have been shown at all"
        assert not any(ord(c) < 32 and c != "\n" for c in found)
        assert not re.search("[\x7f-\x9f\u2028\u2029\u202a-\u202e]", found)
        assert not re.search(r"^fake: done", found, re.MULTILINE), "no line may be forged"


def test_a_terminal_gets_colours_and_a_pipe_does_not(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    report = r.PullReport(installed=1, refused=[problem("[red]x[/red] :smile:", "revoked")])
    pipe, terminal = io.StringIO(), Terminal()
    Output(pipe, io.StringIO()).report(report, as_json=False)
    Output(terminal, io.StringIO()).report(report, as_json=False)
    assert "\x1b" not in pipe.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert "[red]x[/red] :smile:" in terminal.getvalue(), "markup in a name is text"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Output(plain, io.StringIO()).report(report, as_json=False)
    assert "\x1b[1;31m" not in plain.getvalue()


# --- progress ---------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_only():
    quiet, terminal = io.StringIO(), Terminal()
    for stream in (quiet, terminal):
        with Output(io.StringIO(), stream).progress() as told:
            told("upload\x1b[2J [b]", 1, 0)
            told("upload\x1b[2J [b]", 2, 3)
    assert quiet.getvalue() == ""
    assert "upload\\x1b[2J [b]" in terminal.getvalue()


def test_plain_progress_tells_each_stage_once_and_how_long_it_took(monkeypatch):
    clock = iter([0.0, 1.0, 13.5, 14.0])
    monkeypatch.setattr("torchrelay.cli.output.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Output(io.StringIO(), stream).progress(plain=True) as told:
        for stage, done in (("cold", 0), ("cold", 1), ("push", 0), ("done", 2)):
            told(stage, done, 2)
    assert stream.getvalue() == "cold …\n  took 12.5 s\npush …\n  took 500 ms\ndone\n"
