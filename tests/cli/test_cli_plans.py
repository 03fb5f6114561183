# SPDX-License-Identifier: Apache-2.0
"""What only looks changes nothing, and what cannot be done is told before anything is done."""

from __future__ import annotations

import sys
import time
from datetime import date, timedelta
from pathlib import Path

import pytest

from cache_samples import cpp_kernel
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.environment import FACETS, SETTINGS, Environment

WORKLOAD = ("-w", "acme/x")
VALUES = {"equal": "same", "at_least": "2.36", "superset": ("avx", "avx2")}
OTHER = "c" + "cd3" * 17
SETTING = {name: setting.default or "4" for name, setting in SETTINGS.items()}


def environment(**settings: str) -> Environment:
    facets = {name: VALUES[facet.comparison] for name, facet in FACETS.items()}
    return Environment(1, facets, {**SETTING, **settings})


def everything(*roots: Path) -> dict[str, bytes]:
    found = (path for root in roots for path in root.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in found if path.name != "index.json"}


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    Path("env.json").write_bytes(environment().encode())


@pytest.fixture
def unstamped(tmp_path):
    root = tmp_path / "here" / "cache"
    root.mkdir(mode=0o700)
    cpp_kernel(root)
    return root


@pytest.fixture
def here(unstamped):
    write_stamp(unstamped, Stamp(environment(), time.time_ns() - 10**9))
    return unstamped


def call(run, verb, *more, root="cache"):
    return run(verb, "store", *WORKLOAD, "--cache-dir", str(root), *more)


def test_status_of_a_replica_makes_no_key_and_trusts_nobody_new(run, home, here):
    call(run, "push", "--key", made(run, "ci"), "--policy", trusting(run, "ci"))
    run("trust", "add", "ci.pub")
    assert call(run, "pull", "--environment", "env.json", root="replica").code == 0
    replica, config = Path("replica"), home / ".config"
    before = everything(config, replica)
    status = call(run, "status", "--json", root=replica)
    assert (status.code, status.json["to_push"], status.json["warnings"]) == (0, 0, [])
    assert everything(config, replica) == before
    cpp_kernel(replica, OTHER)
    before = everything(config, replica)
    status = call(run, "status", "--json", root=replica)
    assert status.json["to_push"] == 1
    assert "no key yet" in status.json["warnings"][0]
    assert everything(config, replica) == before
    assert not (config / "torchrelay" / "key.pem").exists()


def made(run, name: str) -> str:
    assert run("keygen", "--key", name).code == 0
    return name


def trusting(run, name: str, *more: str) -> str:
    assert run("trust", "add", f"{name}.pub", "--policy", "p.toml", *more).code == 0
    return "p.toml"


@pytest.mark.parametrize(
    ("more", "told", "remedy"),
    [
        (("--role", "maintainer"), "is no writer", "--role writer"),
        (("--not-after", str(date.today() - timedelta(days=2))), "was valid up to", "--not-after"),
        (("--for", "other/**"), "may not sign", "--for"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_push_that_nobody_accepts_is_an_error_before_any_upload(run, here, more, told, remedy, dry):
    ran = call(run, "push", "--key", made(run, "ci"), "--policy", trusting(run, "ci", *more), *dry)
    assert ran.code == 3
    assert told in ran.err
    assert remedy in ran.err
    assert not Path("store").exists()


def test_a_revoked_key_is_not_told_to_be_trusted_again(run, here):
    key, policy = made(run, "ci"), trusting(run, "ci")
    key_id = run("trust", "list", "--policy", policy, "--json").json["keys"][0]["key_id"]
    run("trust", "revoke", key_id, "--policy", policy)
    ran = call(run, "push", "--key", key, "--policy", policy)
    assert ran.code == 3
    assert "revoked" in ran.err
    assert "trust add" not in ran.err
    assert "keygen --key" in ran.err
    assert not Path("store").exists()


def test_a_key_that_the_policy_does_not_know_is_told(run, here):
    made(run, "other")
    ran = call(run, "push", "--key", made(run, "ci"), "--policy", trusting(run, "other"))
    assert ran.code == 3
    assert "trust add" in ran.err


def test_status_and_diff_of_an_unstamped_directory_need_no_torch(run, home, unstamped, here_pushed):
    status = call(run, "status", root=unstamped)
    assert status.code == 0, status.err
    report = call(run, "status", "--json", root=unstamped).json
    assert (report["environment"], report["stamped"], report["to_pull"], report["to_push"]) == (
        "",
        False,
        0,
        0,
    )
    assert any("no stamp" in text for text in report["warnings"])
    assert any("nothing can be pushed" in text for text in report["warnings"])
    Path("empty").mkdir(mode=0o700)
    diff = call(run, "diff", "--json", root="empty")
    assert (diff.code, len(diff.json["only_right"])) == (0, 1)


@pytest.fixture
def here_pushed(run, tmp_path):
    root = tmp_path / "filled"
    root.mkdir(mode=0o700)
    write_stamp(root, Stamp(environment(), time.time_ns() - 10**9))
    cpp_kernel(root)
    assert call(run, "push", root=root).code == 0
    return root


def test_status_goes_on_where_only_a_push_could_not(run, here):
    call(run, "push")
    cpp_kernel(here, OTHER)
    [state] = here.glob(".torchrelay/state-*")
    (state / "ledger.jsonl").write_bytes(b"nonsense\n")
    status = call(run, "status", "--json")
    assert status.code == 0, status.err
    assert (status.json["to_push"], status.json["local"]) == (0, 2)
    assert any("nothing can be pushed from here: the ledger" in text for text in status.json["warnings"])
    (state / "ledger.jsonl").unlink()
    here.chmod(0o777)
    status = call(run, "status", "--json")
    assert status.code == 0, status.err
    assert any("writable by every user" in text for text in status.json["warnings"])


@pytest.mark.parametrize("more", [("--cache-dir", "missing"), ("--cache-dir", "env.json")])
@pytest.mark.parametrize("verb", ["push", "verify"])
def test_a_local_directory_that_cannot_be_used_is_a_matter_of_usage(run, here, verb, more):
    call(run, "push")
    local = ("--local",) if verb == "verify" else ()
    ran = run(verb, "store", *WORKLOAD, *more, *local, "--json")
    assert ran.code == 2, ran.err
    assert ran.json["error"]["subject"].endswith(more[1])


def test_settings_that_differ_are_told_by_push_and_pull_and_status(run, here, tmp_path):
    call(run, "push")
    other = environment(precompile_headers="0")
    Path("other.json").write_bytes(other.encode())
    pulled = run("pull", "store", *WORKLOAD, "--cache-dir", "b", "--environment", "other.json", "--json")
    assert pulled.code == 0
    [told] = pulled.json["warnings"]
    assert "export TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=1" in told
    assert call(run, "status", "--json", root="b").json["warnings"] == [told]
    cpp_kernel(Path("b"), OTHER)
    [pushed] = run("push", "store", *WORKLOAD, "--cache-dir", "b", "--json").json["warnings"]
    assert "precompile_headers" in pushed
    same = run("pull", "store", *WORKLOAD, "--cache-dir", "c", "--environment", "env.json", "--json").json
    assert same["warnings"] == []
    # From here on there is a producer with the other settings too, so both kinds of machine hit.
    assert call(run, "status", "--json", root="b").json["warnings"] == []


@pytest.mark.parametrize("target", [".", "/", "", "..", "here", "missing/x", "null"])
def test_export_to_what_is_no_file_is_told_before_anything_is_fetched(run, here, target):
    call(run, "push")
    Path("here").mkdir()
    Path("null").symlink_to("/dev/null")
    Path("store").rename("moved")  # what is fetched would fail
    ran = run("export-mega", target, "store", *WORKLOAD, "--environment", "env.json")
    assert ran.code == 2, ran.err
    assert "internal error" not in ran.err
    assert Path("null").is_symlink()


def test_export_does_not_follow_a_link_that_lies_in_wait(run, here):
    call(run, "push")
    victim = Path("victim")
    victim.write_bytes(b"precious")
    Path(".out.bin.tmp").symlink_to(victim)
    assert run("export-mega", "out.bin", "store", *WORKLOAD, "--environment", "env.json").code == 0
    assert victim.read_bytes() == b"precious"
    assert not Path("out.bin").is_symlink()
    assert sorted(path.name for path in Path().glob("*out.bin*")) == [".out.bin.tmp", "out.bin"]


def test_import_never_takes_the_environment_of_an_unrelated_directory(run, here):
    call(run, "push")
    assert run("export-mega", "blob", "store", *WORKLOAD, "--environment", "env.json").code == 0
    ran = run("import-mega", "blob", "other", *WORKLOAD, "--cache-dir", "cache")
    assert ran.code == 2
    assert "does not say where it was made" in ran.err
    assert not Path("other").exists()
    named = run("import-mega", "blob", "other", *WORKLOAD, "--environment", "env.json", "--json")
    assert named.code == 0, named.err
    assert named.json["environment"] == environment().digest


def test_show_without_a_name_is_told(run, here):
    call(run, "push")
    for url in ("store", str(Path("store").absolute()), "file:///store"):
        ran = run("show", url, *WORKLOAD)
        assert ran.code == 2
        assert "NAME" in ran.err, ran.err
