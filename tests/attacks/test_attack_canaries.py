# SPDX-License-Identifier: Apache-2.0
"""A pickle that leaves a trace when it is loaded, planted in every place that any command reads.

No command loads it, ever; and each says what is wrong, or goes on without it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from attack_world import SYSTEM, Machine, key, names

from cache_samples import CPP, HASH, canary, write
from torchrelay import cli
from torchrelay.caches.pickled import content_name
from torchrelay.caches.state import state_path
from torchrelay.digest import digest_of


@dataclass(frozen=True)
class Scene:
    """A producer with a store, a consumer that has pulled, and where the canary's trace would be."""

    producer: Machine
    consumer: Machine
    store: Path
    home: Path
    marker: Path

    @property
    def canary(self) -> bytes:
        return canary(self.marker)


@pytest.fixture
def scene(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    consumer.pull()
    return Scene(producer, consumer, store, Path.cwd(), tmp_path / "marker")


@pytest.fixture
def run(capsys):
    """Run a command in this process: exit code and everything that it said."""

    def ran(*argv: str) -> tuple[int, str]:
        code = cli.main(argv)
        out, err = capsys.readouterr()
        return code, out + err

    return ran


def commands(machine: Machine, other: Path) -> dict[str, list[str]]:
    """Every command, as one that changes nothing it was not asked to."""
    environment = ["--environment", str(machine.environment_file())]
    arguments = machine.arguments
    return {
        "push": arguments("push", "--all"),
        "push --repair": [*arguments("push"), "--repair"],
        "pull": arguments("pull", *environment),
        "status": arguments("status"),
        "ls": arguments("ls"),
        "show": arguments("show", "c"),
        "diff": arguments("diff"),
        "verify": arguments("verify"),
        "verify --local": arguments("verify", "--local"),
        "explain": arguments("explain"),
        "import-mega": arguments("import-mega", str(other / "mega.bin"), *environment),
        "export-mega": arguments("export-mega", str(other / "out.bin"), *environment),
        "config": ["config", machine.store],
        "trust list": ["trust", "list", "--policy", str(machine.policy)],
        "trust add": ["trust", "add", str(other / "public.key"), "--policy", str(machine.policy)],
    }


def state_files(machine: Machine) -> list[Path]:
    (found,) = machine.state.iterdir()
    return [path for path in found.rglob("*") if path.is_file()]


def cache_file(name: str) -> Callable[[Scene], list[Path]]:
    return lambda scene: [machine.cache / name for machine in (scene.producer, scene.consumer)]


def graph_file(scene: Scene) -> list[Path]:
    """Under the name that PyTorch would give it, so that it counts as whole."""
    folder = f"fxgraph/{key('f', 9)[1:3]}/{key('f', 9)}"
    return [m.cache / folder / content_name(scene.canary) for m in (scene.producer, scene.consumer)]


def result_file(scene: Scene) -> list[Path]:
    folder = f"aotautograd/{key('a', 9)}"
    return [m.cache / folder / content_name(scene.canary) for m in (scene.producer, scene.consumer)]


def in_state(name: str) -> Callable[[Scene], list[Path]]:
    return lambda scene: [state_path(m.cache) / name for m in (scene.producer, scene.consumer)]


def in_store(prefix: str) -> Callable[[Scene], list[Path]]:
    return lambda scene: [scene.store / name for name in names(scene.store) if name.startswith(prefix)]


def doomed(scene: Scene) -> list[Path]:
    return [scene.store / "gc" / digest_of(scene.canary)]


PLACES: dict[str, tuple[Callable[[Scene], list[Path]], dict[str, int]]] = {
    "inductor-entry": (graph_file, {"push": 0, "pull": 0}),
    "aot-entry": (result_file, {"push": 0, "pull": 0}),
    "autotune-entry": (cache_file(f"ab/{'e' * 64}.best_config"), {"push": 0, "pull": 0}),
    "gemm-entry": (cache_file(f"cache/{SYSTEM}"), {"push": 0}),
    "pgo-entry": (cache_file("dynamo/code_state_training_0_main.pkl"), {"push": 0, "verify --local": 0}),
    "precompile-entry": (cache_file(f"dynamo/{'d' * 64}/entry"), {"push": 0, "pull": 0}),
    "cpp-entry": (cache_file(f"{CPP[1:3]}/{CPP}.main.so"), {"pull": 0, "verify --local": 0}),
    "triton-entry": (cache_file(f"triton/0/{HASH}/__grp__add_kernel.json"), {"pull": 0, "verify --local": 0}),
    "index": (in_state("index.json"), dict.fromkeys(("push", "pull", "status", "verify --local"), 0)),
    "stamp": (in_state("stamp.json"), {"push": 2, "pull": 2, "status": 2}),
    "ledger": (in_state("ledger.jsonl"), {"push": 1, "pull": 1}),
    "blobs": (in_store("blobs/"), {"verify": 1, "push": 0}),
    "segments": (in_store("manifests/"), {"verify": 1, "push": 0}),
    "environment": (in_store("environments/"), {"verify": 1, "push": 0}),
    "doomed-list": (doomed, {"verify": 1, "push": 1, "pull": 0}),
    "client-state": (lambda s: [*state_files(s.producer), *state_files(s.consumer)], {"push": 0, "pull": 0}),
    "configuration": (lambda s: [s.home / "torchrelay.toml"], {"push": 2, "pull": 2, "config": 2}),
    "policy": (lambda s: [s.producer.policy, s.consumer.policy], {"push": 2, "pull": 2, "trust list": 2}),
    "key": (lambda s: [s.producer.key], {"push": 2}),
    "mega-blob": (lambda s: [s.home / "mega.bin"], {"import-mega": 1}),
    "public-key": (lambda s: [s.home / "public.key"], {"trust add": 2}),
}


def test_the_canary_fires_when_it_is_loaded(tmp_path):
    pickle.loads(canary(tmp_path / "marker"))
    assert (tmp_path / "marker").is_dir()


def test_the_places_exist(scene):
    """The files of state are called as this module believes."""
    for place in (
        "index",
        "stamp",
        "ledger",
        "blobs",
        "segments",
        "environment",
        "client-state",
        "pgo-entry",
    ):
        paths = PLACES[place][0](scene)
        assert paths and any(path.is_file() for path in paths), place


@pytest.mark.parametrize("place", PLACES)
def test_a_canary_is_never_loaded_by_any_command(scene, run, place):
    where, codes = PLACES[place]
    for path in where(scene):
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write(path, scene.canary).chmod(mode)
    said: dict[tuple[str, str], tuple[int, str]] = {}
    for machine in (scene.consumer, scene.producer):
        for name, argv in commands(machine, scene.home).items():
            said[machine.base.name, name] = code, text = run(*argv)
            assert not scene.marker.exists(), f"{name} loaded the {place}"
            assert code in (0, 1, 2, 3, 4), f"{name}: {code}"
            assert "internal error" not in text and "Traceback" not in text, f"{name}: {text}"
            assert code == 0 or text.strip(), f"{name} failed without a word"
    for name, code in codes.items():
        who = "producer" if name in ("push", "import-mega") else "consumer"
        assert said[who, name][0] == code, f"{name}: {said[who, name]}"


def test_a_canary_as_environment_or_configuration_that_was_named(scene, run):
    planted = write(scene.home / "planted", scene.canary)
    asked = {
        "pull": scene.consumer.arguments("pull", "--environment", str(planted)),
        "ls": scene.consumer.arguments("ls", "--environment", str(planted)),
        "config": ["config", "--config", str(planted)],
        "env": ["env", "--config", str(planted)],
        "push": scene.producer.arguments("push", "--config", str(planted)),
        "verify": [*scene.consumer.arguments("verify"), "--policy", str(planted)],
        "push with a key": [*scene.producer.arguments("push"), "--key", str(planted)],
    }
    for name, argv in asked.items():
        code, text = run(*argv)
        assert (code, scene.marker.exists()) == (2, False), f"{name}: {text}"
        assert str(planted) in text.replace("\n", "")


def test_a_canary_among_entries_is_pulled_as_bytes_and_nothing_else(scene, run):
    """A pickle that PyTorch would load is an entry like any other; trust decides, not its content."""
    (path,) = graph_file(scene)[:1]
    write(path, scene.canary)
    assert scene.producer.push().pushed == 1
    assert scene.consumer.pull().installed == 1
    assert not scene.marker.exists()
    assert scene.canary in scene.consumer.installed().values()
    assert scene.consumer.verify(local=True).exit_code == 0
    assert not scene.marker.exists()
