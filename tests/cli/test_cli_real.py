# SPDX-License-Identifier: Apache-2.0
"""The command line over a real store on local disk, with real keys and kernels; torch plays no part."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from cache_samples import contents, cpp_kernel, triton_group, without_origin
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.environment import FACETS, Environment

WORKLOAD = ("-w", "acme/x")
VALUES = {"equal": "same", "at_least": "2.36", "superset": ("avx", "avx2")}
KERNELS = 2


def environment(**changes) -> Environment:
    facets = {name: VALUES[facet.comparison] for name, facet in FACETS.items()}
    return Environment(1, {**facets, **changes}, {"threads": "4"})


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Push, pull and verify must work where torch is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def here(tmp_path):
    """A machine that has compiled: a stamped cache directory, and its environment in a file."""
    root = tmp_path / "here" / "cache"
    root.mkdir(mode=0o700)
    write_stamp(root, Stamp(environment(), time.time_ns() - 10**9))
    cpp_kernel(root)
    triton_group(root / "triton" / "0")
    Path("env.json").write_bytes(environment().encode())
    return root


def push(run, *more):
    return run("push", "store", *WORKLOAD, "--cache-dir", "cache", *more)


def pull(run, *more, into="fresh", environment="env.json"):
    return run("pull", "store", *WORKLOAD, "--cache-dir", into, "--environment", environment, *more)


def everything(root: Path) -> dict[str, bytes]:
    """Every file of a cache directory, those that torchrelay keeps there too."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def objects() -> dict[str, bytes]:
    return contents(Path("store"))


def test_push_and_pull_carry_every_byte(run, here):
    pushed = push(run, "--json")
    assert pushed.code == 0, pushed.err
    assert pushed.json["pushed"] == KERNELS
    assert pushed.json["segment"]
    pulled = pull(run, "--json")
    assert pulled.code == 0, pulled.err
    assert (pulled.json["installed"], pulled.json["present"]) == (KERNELS, 0)
    kernels = {name: data for name, data in contents(here).items() if name.endswith(".so")}
    assert kernels
    assert without_origin(kernels).items() <= contents(Path("fresh")).items()
    again = pull(run, "--json").json
    assert (again["installed"], again["present"]) == (0, KERNELS)
    idle = push(run, "--json").json
    assert (idle["pushed"], idle["held"], idle["segment"]) == (0, KERNELS, "")


def test_a_dry_run_writes_nothing(run, here):
    untouched = everything(here)
    first = push(run, "--dry-run", "--json")
    assert (first.code, first.json["pushed"], first.json["segment"]) == (0, KERNELS, "")
    assert "no key yet" in first.json["warnings"][0]
    assert everything(here) == untouched
    assert not Path("store").exists()
    assert not (Path.home() / ".config").exists()
    push(run)
    before = objects()
    triton_group(here / "triton" / "0", "other_kernel")
    again = push(run, "--dry-run", "--json").json
    assert (again["pushed"], again["dry_run"]) == (1, True)
    assert objects() == before


@pytest.mark.parametrize(
    "flags",
    [
        ("--key", "missing.pem"),
        ("--key", "env.json"),
        ("--kye", "k.pem"),
        ("--key",),
    ],
)
def test_a_push_without_a_usable_key_fails_before_any_upload(run, here, flags):
    """Field case X06."""
    ran = push(run, *flags)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert not Path("store").exists()


def test_a_push_with_a_public_key_in_place_of_the_private_one_uploads_nothing(run, here):
    public = run("keygen", "--key", "k", "--json").json["public_key"]
    Path("k.pub").write_text(public)
    for mode in (0o600, 0o644):
        Path("k.pub").chmod(mode)
        ran = push(run, "--key", "k.pub")
        assert ran.code == 2
        assert "public key" in ran.err
        assert "chmod" not in ran.err
    assert not Path("store").exists()


def test_the_first_push_tells_of_the_key_that_it_made(run, here):
    first = push(run, "--json")
    key = run("trust", "list", "--json").json["keys"][0]["public_key"]
    assert f"torchrelay trust add {key}" in first.err
    assert push(run).err == ""


def test_what_is_refused_is_named_with_its_signer_and_not_installed(run, here):
    push(run)
    other = run("keygen", "--key", "other.pem", "--json").json
    run("trust", "add", other["public_key"], "--policy", "p.toml")
    ran = pull(run, "--policy", "p.toml", into="strict")
    assert ran.code == 3
    assert "unknown-key" in ran.out
    assert "[signer " in ran.out
    assert "trust add" in ran.out
    assert contents(Path("strict")) == {}
    assert run("verify", "store", *WORKLOAD, "--policy", "p.toml").code == 3


def test_one_changed_bit_is_found_named_and_not_installed(run, here):
    push(run)
    blob = max(Path("store/blobs").rglob("*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    pulled = pull(run)
    assert pulled.code == 1
    assert blob.name in pulled.out
    verified = run("verify", "store", *WORKLOAD, "--json")
    assert verified.code == 1
    assert [blob.name in problem["subject"] for problem in verified.json["damaged"]] == [True]
    healed = push(run, "--repair")
    assert healed.code == 0, healed.out + healed.err
    assert pull(run).code == 0


def test_what_does_not_fit_is_counted_by_facet_and_explained(run, here):
    push(run)
    Path("other.json").write_bytes(environment(cpu_flags=("avx",)).encode())
    pulled = pull(run, into="other", environment="other.json")
    assert pulled.code == 0
    assert "cpu_flags 1" in pulled.out
    assert "torchrelay explain" in pulled.out
    explained = run("explain", "store", *WORKLOAD, "--environment", "other.json")
    assert explained.code == 0
    assert "missing avx2" in explained.out
    listed = run("ls", "store", *WORKLOAD, "--environment", "other.json", "--json").json["entries"]
    assert sorted((entry["kind"], entry["fits"]) for entry in listed) == [("cpp", False), ("triton", True)]


def test_show_ls_diff_and_status_agree(run, here):
    push(run)
    entries = run("ls", "store", *WORKLOAD, "--json").json["entries"]
    assert len(entries) == KERNELS
    for entry in entries:
        for name in (entry["key"], entry["digest"][:12], entry["blob"][:12]):
            [found] = run("show", name, "store", *WORKLOAD, "--json").json["entries"]
            assert found["digest"] == entry["digest"]
    diff = run("diff", "store", *WORKLOAD, "--cache-dir", "cache", "--json").json
    assert (diff["same"], diff["only_left"], diff["only_right"]) == (KERNELS, [], [])
    status = run("status", "store", *WORKLOAD, "--cache-dir", "cache", "--json").json
    assert (status["local"], status["live"], status["to_push"], status["to_pull"]) == (KERNELS, KERNELS, 0, 0)


def test_verify_local_names_a_file_that_is_no_longer_what_was_signed(run, here):
    push(run)
    pull(run)
    argv = ("verify", "store", *WORKLOAD, "--cache-dir", "fresh", "--local", "--json")
    good = run(*argv)
    assert (good.code, good.json["good"]) == (0, KERNELS)
    [kernel] = Path("fresh").rglob("*.main.so")
    data = bytearray(kernel.read_bytes())
    data[-1] ^= 1
    kernel.chmod(0o600)
    kernel.write_bytes(data)
    changed = run(*argv)
    assert changed.code == 1
    assert (changed.json["good"], changed.json["unsigned"]) == (KERNELS - 1, 0)
    assert len(changed.json["damaged"]) == 1
    assert "delete the file and pull again" in run(*argv[:-1]).out
    kernel.write_bytes(data[: len(data) // 2])
    cut = run(*argv)
    assert cut.code == 1
    assert cut.json["good"] == KERNELS - 1
    assert cut.json["damaged"]


@pytest.mark.parametrize("command", ["pull", "status", "ls", "verify", "explain"])
def test_a_store_that_does_not_exist_is_told_and_not_made(run, here, command):
    more = ("--environment", "env.json") if command == "pull" else ()
    ran = run(command, "nowhere", *WORKLOAD, "--cache-dir", "cache", *more)
    assert ran.code == 4
    assert "nowhere" in ran.err
    assert not Path("nowhere").exists()


def test_a_store_that_is_a_file_is_told(run, here):
    Path("store").write_text("not a store")
    assert push(run).code == 4
    assert Path("store").read_text() == "not a store"


@pytest.mark.parametrize("name", ["../x", "/abs", "a//b", "", "a\0b", "x" * 300, "a/../b"])
def test_a_workload_that_is_no_name_is_refused_before_anything_is_done(run, here, name):
    ran = run("push", "store", "-w", name, "--cache-dir", "cache")
    assert ran.code == 2
    assert not Path("store").exists()


@pytest.mark.parametrize("url", ["s3s://bucket/x", "file:///store?sign=no", "file://host/x", "memory:"])
def test_a_misspelt_url_uploads_nothing(run, here, url):
    ran = run("push", url, *WORKLOAD, "--cache-dir", "cache")
    assert ran.code == 2
    assert not Path("store").exists()


def test_import_of_what_is_no_mega_cache_is_told(run, here):
    Path("blob").write_bytes(b"not one")
    ran = run(
        "import-mega", "blob", "store", *WORKLOAD, "--assume-environment", "this", "--cache-dir", "cache"
    )
    assert ran.code in {1, 2}
    assert ran.err.startswith("error: ")
    assert not Path("store").exists()
    assert "internal error" not in ran.err
