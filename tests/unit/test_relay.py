# SPDX-License-Identifier: Apache-2.0
"""The facade never breaks the job that uses it, and says what it could not do."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path

import pytest

from torchrelay import Relay, TorchrelayWarning, workplace
from torchrelay.environment import FACETS, Environment
from torchrelay.errors import StorageError, UsageError
from torchrelay.options import PushOptions

VALUES = {"equal": "same", "at_least": "2.36", "superset": ("avx",)}
ENVIRONMENT = Environment(1, {name: VALUES[facet.comparison] for name, facet in FACETS.items()}, {})


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCHRELAY_", "TORCHINDUCTOR_", "TRITON_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def failing(monkeypatch):
    """What the work raises, and how often it was tried."""
    raised: list[BaseException] = []

    def fail(self, *options):
        raise raised[0]

    for name in ("push", "pull", "status"):
        monkeypatch.setattr(workplace.Workplace, name, fail)
    return raised


PLACES = {
    "cache_dir": "~nobody-is-called-so/x",
    "triton_cache_dir": "~nobody-is-called-so/x",
    "key": "~nobody-is-called-so/x",
    "policy": "~nobody-is-called-so/x",
    "state_dir": "~nobody-is-called-so/x",
    "trees": {"vllm": "~nobody-is-called-so/x"},
}


@pytest.mark.parametrize("name", PLACES)
def test_a_home_that_is_not_there_does_not_stop_the_job(home, name):
    relay = Relay(home / "store", workload="a/b", **{name: PLACES[name]})
    with pytest.warns(TorchrelayWarning, match="home directory"):
        report = relay.pull()
    assert "home directory" in report.error
    assert report.exit_code == 1
    with pytest.raises(UsageError, match="home directory"):
        Relay(home / "store", workload="a/b", strict=True, **{name: PLACES[name]}).pull()


@pytest.mark.parametrize("workload", [None, 5, b"a/b", ["a/b"]])
def test_a_workload_that_is_no_text_is_a_usage_error(home, workload):
    with pytest.raises(UsageError, match=f"workload is a text, not {type(workload).__name__}"):
        Relay(home / "store", workload=workload)


WRONG_TYPES = [
    ("url", 5, "url"),
    ("cache_dir", 5, "cache_dir"),
    ("triton_cache_dir", b"/x", "triton_cache_dir"),
    ("key", 5, "key"),
    ("policy", ["/x"], "policy"),
    ("state_dir", 5, "state_dir"),
    ("trees", "vllm", "trees"),
    ("trees", ["vllm"], "trees"),
    ("trees", {"vllm": 5}, "trees['vllm']"),
    ("trees", {5: "/x"}, "a name in trees"),
    ("options", 5, "options"),
    ("options", {"region": 5}, "options['region']"),
    ("options", {5: "x"}, "a name in options"),
    ("in_process", "no", "in_process"),
]


@pytest.mark.parametrize(("argument", "value", "named"), WRONG_TYPES)
def test_an_argument_of_the_wrong_type_is_named_and_does_not_stop_the_job(home, argument, value, named):
    arguments = {"url": home / "store", "workload": "a/b", argument: value}
    with pytest.raises(UsageError) as caught:
        Relay(**arguments, strict=True).pull()
    assert caught.value.message.startswith(f"{named} is ")
    assert caught.value.message.endswith(f", not {type(next(iter(_parts(value, named)))).__name__}")
    with pytest.warns(TorchrelayWarning, match="UsageError"):
        report = Relay(**arguments).push()
    assert report.error == caught.value.message


def _parts(value, named):
    """What of ``value`` is of the wrong type."""
    if named.startswith("a name in"):
        return list(value)
    return list(value.values()) if "[" in named else [value]


def test_strict_is_a_switch(home):
    with pytest.raises(UsageError, match="strict is True or False, not str"):
        Relay(home / "store", workload="a/b", strict="yes").pull()


@pytest.mark.parametrize("url", ["", "\0", None, 5, "file://host/x", "nope://x"])
def test_no_url_stops_the_job(home, monkeypatch, url):
    monkeypatch.chdir(home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        relay = Relay(url, workload="a/b", cache_dir=home / "cache", in_process=False)
        with relay:
            done = True
        assert done
        for report in (relay.pull(), relay.push(), relay.status()):
            assert report.error
            assert report.exit_code == 1
    assert {path.name for path in home.iterdir()} <= {".config"}


def test_warnings_that_are_errors_do_not_stop_the_job(home, failing, caplog):
    failing.append(StorageError("the store is down"))
    relay = Relay(home / "store", workload="a/b")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "torchrelay"):
        warnings.simplefilter("error")
        report = relay.pull()
    assert report.error == "the store is down"
    assert "the store is down" in caplog.text


def test_each_cause_is_told_once_and_different_ones_each(home, failing):
    failing.append(StorageError("the store is down"))
    relay = Relay(home / "store", workload="a/b")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        relay.pull()
        relay.push()
        failing[0] = StorageError("the store is full")
        relay.push()
        failing[0] = ValueError("odd")
        relay.status()
        relay.pull()
    texts = [str(item.message).splitlines()[0] for item in told]
    assert texts == [
        "torchrelay: StorageError: the store is down",
        "torchrelay: StorageError: the store is full",
        "torchrelay: unexpected ValueError: odd",
    ]


@pytest.mark.parametrize("call", ["pull", "push", "status"])
def test_what_could_not_be_done_is_in_the_report(home, failing, call):
    failing.append(UsageError("no way", remedy="Another."))
    relay = Relay(home / "store", workload="a/b")
    with pytest.warns(TorchrelayWarning, match="Another"):
        report = getattr(relay, call)()
    assert (report.workload, report.error, report.exit_code) == ("a/b", "no way", 1)


def test_an_interrupt_is_the_users_and_goes_through(home, failing):
    failing.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Relay(home / "store", workload="a/b").pull()


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(workplace, "this_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(workplace.settings, "skip_needless_headers", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")


def test_the_first_run_of_all_has_nothing_to_pull_and_needs_no_warning(home, here):
    cache = home / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relay = Relay(home / "store", workload="a/b", cache_dir=cache)
        report = relay.pull()
        assert (report.exit_code, report.error, report.installed) == (0, "", 0)
        assert "does not exist" in report.warnings[0]
        assert report.environment == ENVIRONMENT.digest
        assert not (home / "store").exists()
        assert relay.push().error == ""
    assert list(cache.glob(".torchrelay/state-*/stamp.json")), "the directory is stamped before the compile"


SLOW_S = 0.2


@pytest.mark.parametrize("call", ["pull", "push", "export_mega", "import_mega", "verify"])
def test_a_report_counts_all_the_time_that_its_work_took(home, here, monkeypatch, call):
    """Also what comes before the store is opened: the environment, the directories, the key."""
    relay = Relay(home / "store", workload="a/b", cache_dir=home / "cache", strict=True)
    (home / "store").mkdir()
    relay.pull()
    blob = home / "blob"
    relay.export_mega(blob)
    opened = workplace.Workplace._session

    def slowly(self, *policy, **options):
        time.sleep(SLOW_S)
        return opened(self, *policy, **options)

    monkeypatch.setattr(workplace.Workplace, "_session", slowly)
    asked = {"export_mega": (blob,), "import_mega": (blob, PushOptions(assume_environment=True))}
    started = time.monotonic()
    report = getattr(relay, call)(*asked.get(call, ()))
    assert SLOW_S <= report.seconds <= time.monotonic() - started


def test_a_report_of_what_failed_says_how_long_it_tried(home, monkeypatch):
    def fail(self, options):
        time.sleep(SLOW_S)
        raise StorageError("the store is down")

    monkeypatch.setattr(workplace.Workplace, "push", fail)
    with pytest.warns(TorchrelayWarning, match="down"):
        assert Relay(home / "store", workload="a/b").push().seconds >= SLOW_S


def test_without_a_process_that_compiles_a_missing_store_is_an_error(home, here):
    with pytest.raises(StorageError, match="does not exist"):
        Relay(home / "store", workload="a/b", cache_dir=home / "c", in_process=False, strict=True).pull()
    assert not Path(home / "c").exists()
