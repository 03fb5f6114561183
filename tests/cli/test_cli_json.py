# SPDX-License-Identifier: Apache-2.0
"""The JSON of every command against the tables of docs/reference/json.md."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from torchrelay import config
from torchrelay import reports as r
from torchrelay.cli import reports as own
from torchrelay.cli.commands import COMMANDS

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PROBLEM = r.Problem(subject="s", reason="damaged", detail="d", key_id="k")
ENTRY = r.EntryInfo(
    kind="inductor",
    key="f" * 52,
    variant="",
    requires={"cpu_flags": ("avx", "avx2"), "torch": "2.13.0", "cpu_threads": 4},
    digest="0" * 64,
    size=3,
    stored_size=2,
    blob="1" * 64,
    canon="raw",
    signers=["k"],
    seq=1,
    needs=[],
    fits=None,
)
FACET = r.FacetResult(facet="torch", comparison="equal", needed="a", here="b", fits=False)
GROUP = r.Explanation(entries=1, kinds={"cpp": 1}, fits=False, facets=[FACET])
SECTIONS = {
    "push": r.PushReport,
    "pull": r.PullReport,
    "status": r.StatusReport,
    "ls": r.ListReport,
    "show": own.ShowReport,
    "An entry": r.EntryInfo,
    "diff": r.DiffReport,
    "verify": r.VerifyReport,
    "explain": r.ExplainReport,
    "A group": r.Explanation,
    "A facet": r.FacetResult,
    "env": own.EnvReport,
    "config": own.ConfigReport,
    "keygen": own.KeygenReport,
    "trust": own.TrustReport,
    "A key": own.KeyInfo,
    "demo": r.DemoReport,
    "A row": r.DemoRow,
    "A check": r.DemoCheck,
    "import-mega": r.PushReport,
    "export-mega": r.PullReport,
}


def tables() -> dict[str, dict[str, str]]:
    """Field names and types, by section; a heading may name several commands."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in (DOCS / "json.md").read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r"##+ (.*)", line)
        row = re.match(r"\| `(\w+)` \| ([^|]+) \|", line)
        if heading:
            names = re.findall(r"`([^`]+)`", heading[1]) or [heading[1]]
        elif row:
            for name in names:
                found.setdefault(name, {})[row[1]] = row[2].strip()
    return found


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documented_fields_are_exactly_those_of_the_report_in_their_order(name):
    assert list(tables()[name]) == list(SECTIONS[name].__struct_fields__)


def test_every_command_and_every_table_is_documented_and_checked():
    assert set(tables()) == set(SECTIONS)
    assert set(COMMANDS) <= set(tables())


TYPES = {
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "counts": dict,
    "object": dict,
    "boolean or null": (bool, type(None)),
    "number or null": (int, float, type(None)),
}


def fits(value, type_):
    if type_.startswith("list of "):
        return isinstance(value, list)
    return isinstance(value, TYPES[type_]) and (
        type_ == "boolean" or not isinstance(value, bool) or "null" in type_
    )


FULL = {
    "push": r.PushReport(
        workload="w", excluded={"empty": 1}, failed=[PROBLEM], warnings=["w"], divergent=["d"]
    ),
    "pull": r.PullReport(incompatible={"torch": 2}, refused=[PROBLEM], seconds=1.5),
    "status": r.StatusReport(stamped=True, refused=[PROBLEM]),
    "ls": r.ListReport(entries=[ENTRY], segments=["s"]),
    "show": r.ListReport(entries=[ENTRY], segments=["s"]),
    "diff": r.DiffReport(left="a", right="b", only_left=["x"], same=2),
    "verify": r.VerifyReport(checked=2, good=1, damaged=[PROBLEM]),
    "explain": r.ExplainReport(groups=[GROUP], settings=[("threads", "4", "8")], hints=["h"]),
    "import-mega": r.PushReport(pushed=1),
    "export-mega": r.PullReport(installed=1),
}


@pytest.mark.parametrize("command", FULL)
def test_the_object_of_a_command_has_the_documented_fields_and_types(run, relay, command):
    relay.answer = FULL[command]
    needed = {"show": ("f",), "import-mega": ("m",), "export-mega": ("m",)}.get(command, ())
    found = run(command, *needed, "/srv/relay", "-w", "acme/x", "--json").json
    documented = tables()[command]
    assert list(found) == list(documented)
    assert all(fits(found[name], type_) for name, type_ in documented.items())
    assert found == msgspec.json.decode(msgspec.json.encode(FULL[command]))


def test_problems_entries_groups_and_facets_have_the_documented_fields(run, relay):
    relay.answer = FULL["pull"]
    assert list(run("pull", "/s", "-w", "w", "--json").json["refused"][0]) == list(
        r.Problem.__struct_fields__
    )
    relay.answer = FULL["ls"]
    entry = run("ls", "/s", "-w", "w", "--json").json["entries"][0]
    assert list(entry) == list(tables()["An entry"])
    assert entry["requires"] == {"cpu_flags": ["avx", "avx2"], "torch": "2.13.0", "cpu_threads": 4}
    relay.answer = FULL["explain"]
    group = run("explain", "/s", "-w", "w", "--json").json["groups"][0]
    assert list(group) == list(tables()["A group"])
    assert list(group["facets"][0]) == list(tables()["A facet"])


def test_the_fields_of_the_contract_are_there():
    """Design: names that other programs already rely on."""
    contract = {
        "keygen": "key_id public_key",
        "env": "environment facets exports",
        "push": "pushed held covered excluded masked uploaded_bytes plain_bytes requests segment failed",
        "pull": "installed present kept incompatible refused damaged missing downloaded_bytes plain_bytes "
        "requests seconds",
    }
    for command, names in contract.items():
        assert set(names.split()) <= set(tables()[command])


def test_config_shows_every_setting(run):
    found = run("config", "--json").json
    assert list(found) == list(tables()["config"])
    assert list(found["settings"]) == [setting.name for setting in config.SETTINGS]
    assert all(list(item) == ["value", "origin", "source"] for item in found["settings"].values())


def test_hostile_names_are_escaped_in_json(run, relay):
    hostile = "\x1b[31m\x9b\u202e\x7f\udcff\u2028"
    relay.answer = r.PullReport(damaged=[r.Problem(subject=hostile, reason="damaged")])
    ran = run("pull", "/s", "-w", "w", "--json")
    assert ran.json["damaged"][0]["subject"] == hostile
    assert ran.out.isascii()
    assert ran.out.rstrip("\n").isprintable()


def rows(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_every_setting_is_documented_with_its_option_and_variable():
    documented = [row[:4] for row in rows("configuration.md") if len(row) == 5]
    assert documented == [[f"`{s.name}`", f"`{s.flag}`", f"`{s.variable}`", s.title] for s in config.SETTINGS]
    others = [row[0].strip("`") for row in rows("configuration.md") if len(row) == 2]
    assert others == list(config.OTHER_VARIABLES)


def test_every_command_and_option_is_documented():
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS.values():
        assert f"`{command.name} " in text or f"`{command.name}`" in text
        for option in command.parser()._options():
            assert re.search(rf"`[^`]*{re.escape(option)}\b", text), f"{option} of {command.name}"
