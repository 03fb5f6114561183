# SPDX-License-Identifier: Apache-2.0
"""What commands ask of the facade, given what was typed."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.cli import options
from torchrelay.environment import Environment
from torchrelay.relay import PullOptions, PushOptions

STORE = ("/srv/relay", "-w", "acme/x")


def without_progress(value):
    return {name: getattr(value, name) for name in type(value).__slots__ if name != "progress"}


@pytest.mark.parametrize("verb", ["import-mega", "export-mega"])
def test_options_may_stand_between_the_arguments(run, relay, verb):
    Path("env.json").write_bytes(Environment(1, {}, {}).encode())
    assert run(verb, "blob", "--environment", "env.json", "/store", "-w", "w").code == 0
    [(_, (path, asked), _)] = relay.asked
    assert (path, relay.made["url"]) == (Path("blob"), "/store")
    assert asked.environment == Environment(1, {}, {})
    assert run("show", "-w", "w", "f1", "--json", "/store").code == 0
    assert relay.asked[-1][:2] == ("show", ("f1",))


def test_push_passes_every_flag_on(run, relay):
    flags = (
        *("--since", "@12.5", "--own", "--replace", "--repair", "--assume-environment", "this"),
        *("--max-bytes", "2M", "--max-entries", "7", "--dry-run"),
    )
    assert run("push", *STORE, *flags).code == 0
    [(name, (asked,), _)] = relay.asked
    expected = PushOptions(
        since=12.5,
        own=True,
        replace=True,
        repair=True,
        assume_environment=True,
        max_bytes=2 << 20,
        max_entries=7,
        dry_run=True,
    )
    assert name == "push"
    assert without_progress(asked) == without_progress(expected)
    assert asked.progress is not None


def test_push_without_flags_asks_for_nothing_special(run, relay):
    run("push", *STORE)
    assert without_progress(relay.asked[0][1][0]) == without_progress(PushOptions())
    run("push", *STORE, "--all")
    assert relay.asked[1][1][0].all is True


def test_the_facade_is_made_from_the_settings(run, relay, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_WORKLOAD", "acme/y")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/t")
    here = Path.cwd()
    (here / "torchrelay.toml").write_text('url = "store"\npolicy = "p.toml"\n[trees]\nvllm = "v"\n')
    run("pull", "--cache-dir", "c", "--key", "k.pem", "--state-dir", "/s")
    assert relay.made == {
        "url": str(here / "store"),
        "workload": "acme/y",
        "cache_dir": here / "c",
        "triton_cache_dir": Path("/t"),
        "trees": {"vllm": here / "v"},
        "key": here / "k.pem",
        "policy": here / "p.toml",
        "state_dir": Path("/s"),
        "in_process": False,
        "strict": True,
    }


def environment_file(path="env.json"):
    environment = Environment(1, {"torch": "2.13.0", "cpu_flags": ("avx", "avx2")}, {"threads": "4"})
    Path(path).write_bytes(environment.encode())
    return environment


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_pull_for_another_machine_reads_its_environment(run, relay, end):
    environment = environment_file()
    Path("env.json").write_bytes(environment.encode() + end)
    run("pull", *STORE, "--environment", "env.json", "--deadline", "2.5")
    asked = relay.asked[0][1][0]
    assert without_progress(asked) == without_progress(PullOptions(environment=environment, deadline=2.5))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\x80\x04K\x01.",
        b'{"format":2,"facets":{},"settings":{}}',
        b"[" * 100_000,
        b"x" * (1 << 21),
    ],
)
def test_a_file_that_is_no_environment_is_a_usage_error(run, relay, data):
    Path("env.json").write_bytes(data)
    for command in ("pull", "ls", "explain"):
        ran = run(command, *STORE, "--environment", "env.json")
        assert ran.code == 2
        assert "env.json" in ran.err
        assert "torchrelay env --out" in ran.err
    assert relay.asked == []


def test_the_deadline_may_come_from_the_settings(run, relay, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_DEADLINE", "30")
    run("pull", *STORE)
    assert relay.asked[0][1][0].deadline == 30.0


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (("status", *STORE), ("status", (), {})),
        (("ls", *STORE), ("entries", (), {"environment": None})),
        (("show", "abc", *STORE), ("show", ("abc",), {})),
        (("diff", *STORE), ("diff", (None,), {})),
        (("diff", *STORE, "--against", "acme/y"), ("diff", ("acme/y",), {})),
        (("explain", *STORE), ("explain", (None,), {"environment": None})),
        (("explain", *STORE, "--entry", "f1"), ("explain", ("f1",), {"environment": None})),
    ],
)
def test_commands_that_look_ask_for_what_was_typed(run, relay, argv, asked):
    assert run(*argv).code == 0
    assert relay.asked == [asked]


def test_verify_local_and_mega_cache(run, relay):
    run("verify", *STORE, "--local")
    run("import-mega", "blob.bin", *STORE, "--assume-environment", "this")
    run("export-mega", "out.bin", *STORE)
    (verify, _, local), (imported, (path, push), _), (exported, (out, pull), _) = relay.asked
    assert (verify, local["local"]) == ("verify", True)
    assert (imported, path, push.assume_environment) == ("import_mega", Path("blob.bin"), True)
    assert (exported, out, pull.environment) == ("export_mega", Path("out.bin"), None)


@pytest.mark.parametrize(
    ("typed", "seconds"), [("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("1w", 604800)]
)
def test_a_moment_may_be_so_long_ago(typed, seconds):
    assert abs(time.time() - seconds - options.moment(typed)) < 5


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [
        ("@1767225600", 1767225600.0),
        ("2026-01-01T00:00:00Z", 1767225600.0),
        ("2026-01-01T01:00:00+01:00", 1767225600.0),
        ("2026-01-31", datetime(2026, 1, 31).timestamp()),
        ("2026-01-31T12:00", datetime(2026, 1, 31, 12).timestamp()),
    ],
)
def test_a_moment_may_be_a_date_or_a_time(typed, seconds):
    assert options.moment(typed) == seconds


@given(st.text(max_size=30))
def test_a_moment_is_a_finite_number_or_refused(typed):
    with contextlib.suppress(argparse.ArgumentTypeError):
        assert math.isfinite(options.moment(typed))


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ("0", 0),
        ("500", 500),
        ("500B", 500),
        ("64K", 65536),
        ("64KiB", 65536),
        ("10m", 10 << 20),
        ("2GB", 2 << 30),
    ],
)
def test_byte_counts(typed, count):
    assert options.byte_count(typed) == count


@given(st.text(max_size=20))
def test_a_byte_count_is_a_number_or_refused(typed):
    with contextlib.suppress(argparse.ArgumentTypeError):
        assert options.byte_count(typed) >= 0
