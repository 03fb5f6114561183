# SPDX-License-Identifier: Apache-2.0
"""Kernels under another install prefix through the command line, where torch is not installed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from cache_samples import contents, elf, write
from torchrelay.caches import kernelname
from torchrelay.caches.kernelname import Naming, Prefixes, Source
from torchrelay.caches.prefixes import note_prefixes
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.environment import FACETS, Environment

HERE = Prefixes(python_include=("/a/include",), python_lib="/a/lib", torch="/a/torch")
THERE = Prefixes(python_include=("/b/x/include",), python_lib="/b/x/lib", torch="/b/x/torch")
SOURCE = b"int main;\n"
VALUES = {"equal": "same", "at_least": "2.36", "superset": ("avx", "avx2")}


def environment() -> Environment:
    facets = {name: VALUES[facet.comparison] for name, facet in FACETS.items()}
    return Environment(1, facets, {"cpp_compiler": "g++-12"})


def command() -> str:
    return next(text for text, _ in kernelname._candidates(Naming((HERE,), "g++-12")))


def name_in(prefixes: Prefixes) -> str:
    return Source(SOURCE).name(prefixes.expand(command()))


def compiled(root: Path, prefixes: Prefixes, body: bytes = b"code") -> None:
    """A stamped directory with one kernel, compiled where Python and torch lie in ``prefixes``."""
    root.mkdir(mode=0o700)
    write_stamp(root, Stamp(environment(), time.time_ns() - 10**9))
    key = name_in(prefixes)
    write(root / key[1:3] / f"{key}.main.cpp", SOURCE)
    write(root / key[1:3] / f"{key}.main.so", elf(body))


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    Path("env.json").write_bytes(environment().encode())


@pytest.fixture
def roots(run, tmp_path):
    """Directory of a producer whose prefix is noted, and of a consumer with another."""
    producer, consumer = tmp_path / "producer", tmp_path / "consumer"
    compiled(producer, HERE)
    note_prefixes(producer, HERE)
    consumer.mkdir(mode=0o700)
    return producer, consumer


def relay(run, verb, root, *more):
    ran = run(verb, "store", "-w", "acme/x", "--cache-dir", str(root), *more, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def pull(run, root):
    return relay(run, "pull", root, "--environment", "env.json")


def kernels(root: Path) -> set[str]:
    return {name[3:] for name in contents(root) if name.endswith(".so")}


def test_a_kernel_is_installed_under_the_name_that_it_has_there(run, roots):
    producer, consumer = roots
    note_prefixes(consumer, THERE)
    assert relay(run, "push", producer)["pushed"] == 1
    assert pull(run, consumer)["installed"] == 1
    assert kernels(consumer) == {f"{name_in(THERE)}.main.so"}
    assert kernels(consumer).isdisjoint(kernels(producer))


def test_what_was_renamed_is_known_again(run, roots):
    producer, consumer = roots
    note_prefixes(consumer, THERE)
    relay(run, "push", producer)
    pull(run, consumer)
    for _ in range(2):
        again = pull(run, consumer)
        assert (again["installed"], again["present"], again["kept"]) == (0, 1, 0)
        (index,) = consumer.glob(".torchrelay/state-*/index*")
        index.unlink()
    pushed = relay(run, "push", consumer, "--all")
    assert (pushed["pushed"], pushed["held"]) == (0, 1)
    checked = relay(run, "verify", consumer, "--local")
    assert (checked["damaged"], checked["unsigned"], checked["good"]) == ([], 0, 1)


def test_what_was_renamed_is_never_signed_even_without_its_command(run, roots):
    producer, consumer = roots
    note_prefixes(consumer, THERE)
    relay(run, "push", producer)
    pull(run, consumer)
    for path in (*consumer.glob("*/*.main.command"), *consumer.glob(".torchrelay/state-*/prefixes.json")):
        path.unlink()
    pushed = relay(run, "push", consumer, "--all")
    assert (pushed["pushed"], pushed["excluded"]["pulled"]) == (0, 1)
    assert pull(run, consumer)["incompatible"] == {"install-prefix": 1}
    note_prefixes(consumer, THERE)
    assert pull(run, consumer)["present"] == 1


def test_a_changed_source_is_damage_and_heals(run, roots):
    producer, consumer = roots
    note_prefixes(consumer, THERE)
    relay(run, "push", producer)
    pull(run, consumer)
    before = contents(consumer)
    (source,) = consumer.glob("*/*.main.cpp")
    source.write_bytes(b"int other;")
    ran = run("verify", "store", "-w", "acme/x", "--cache-dir", str(consumer), "--local", "--json")
    assert (ran.code, len(ran.json["damaged"])) == (1, 1)
    assert relay(run, "push", consumer, "--all")["pushed"] == 0
    assert pull(run, consumer)["installed"] == 1
    assert contents(consumer) == before


def test_without_a_known_place_it_is_counted_and_not_installed(run, roots):
    producer, consumer = roots
    relay(run, "push", producer)
    report = pull(run, consumer)
    assert (report["installed"], report["incompatible"]) == (0, {"install-prefix": 1})
    assert contents(consumer) == {}


def test_a_second_prefix_is_covered_by_the_first(run, roots, tmp_path):
    producer, _ = roots
    relay(run, "push", producer)
    other = tmp_path / "other"
    compiled(other, THERE, body=b"with other paths in its debug information")
    note_prefixes(other, THERE)
    pushed = relay(run, "push", other)
    assert (pushed["pushed"], pushed["covered"], pushed["uploaded_bytes"], pushed["divergent"]) == (
        0,
        1,
        0,
        [],
    )
    kept = pull(run, other)
    assert (kept["installed"], kept["kept"]) == (0, 1)


def test_a_kernel_that_was_pushed_as_it_is_stays_known_when_its_command_is_shown(run, tmp_path):
    """The producer could not show the command, the consumer at the same prefix can."""
    producer, consumer = tmp_path / "producer", tmp_path / "consumer"
    compiled(producer, HERE)
    consumer.mkdir(mode=0o700)
    assert relay(run, "push", producer)["pushed"] == 1
    assert pull(run, consumer)["installed"] == 1
    note_prefixes(consumer, HERE)
    again = pull(run, consumer)
    assert (again["installed"], again["present"], again["kept"]) == (0, 1, 0)
    pushed = relay(run, "push", consumer, "--all")
    assert (pushed["pushed"], pushed["held"]) == (0, 1)
    checked = relay(run, "verify", consumer, "--local")
    assert (checked["damaged"], checked["good"]) == ([], 1)
