# SPDX-License-Identifier: Apache-2.0
"""Pods that differ in all that must not matter hit 100 %: C++ kernels too, under another venv path.

Two virtual environments hold the same files by hard links. One compiles and pushes, and is moved out
of the way; the other pulls, with another host name, home, user, hash seed and time zone, and a
compiler that refuses to compile.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import torchrelay

pytestmark = pytest.mark.torch

pytest.importorskip("torch")

MODELS = Path(__file__).with_name("models.py")
SOURCES = Path(torchrelay.__file__).parents[1]
PYTHONPATH = os.pathsep.join((str(SOURCES), str(SOURCES.parent / "backends")))
# By its plain name, since that stands in what `-v` prints, and that is part of the probes' names.
REFUSING = """#!/bin/sh
case "$*" in --version|-v) PATH="{path}"; exec g++ "$@";; esac
echo "$*" >> "{log}"
exit 1
"""


@dataclass(frozen=True)
class Pod:
    """One machine, as far as the test can make one."""

    root: Path
    python: Path
    variables: dict[str, str]
    host: str

    @property
    def cache(self) -> Path:
        return Path(self.variables.get("TORCHINDUCTOR_CACHE_DIR", self.root / "cache"))

    @property
    def log(self) -> Path:
        """What the refusing compiler was asked for."""
        return self.root / "compiled.log"

    def run(self, *arguments: str) -> Any:
        """Run its Python; the JSON object that it prints."""
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "PYTHONPATH": PYTHONPATH,
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.root / "tmp"),
            "OMP_NUM_THREADS": "1",
        } | self.variables
        command = [*_renamed(self.host), str(self.python), "-W", "ignore", *arguments]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout.splitlines()[-1])

    def relay(self, verb: str, store: Path, *arguments: str) -> Any:
        return self.run("-m", "torchrelay", verb, store.as_uri(), "-w", "acme/mlp", "--json", *arguments)

    def compile(self, *flags: str) -> Any:
        return self.run(str(MODELS), "--model", "mlp", *flags)

    def kernels(self) -> set[str]:
        return {path.name for path in self.cache.glob("*/*.main.so")}

    def probes(self) -> set[str]:
        return {path.name for path in self.cache.glob("*/c*.so")} - self.kernels()


def _renamed(host: str) -> list[str]:
    """The command that gives what follows another host name, where that is allowed."""
    probe = ["unshare", "--uts", "hostname", "x"]
    allowed = (
        shutil.which("unshare") and subprocess.run(probe, check=False, capture_output=True).returncode == 0
    )
    return ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"] if allowed else []


def _environment(root: Path) -> Path:
    """A virtual environment with this one's packages, by hard links; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    source = sysconfig.get_path("purelib")
    (target,) = root.glob("lib/python*/site-packages")
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True, symlinks=True)
    return root / "bin" / "python"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _pod(root: Path, venv: str, host: str, **variables: str) -> Pod:
    (root / "tmp").mkdir(parents=True)
    return Pod(root, _environment(root / venv), {"USER": root.name, **variables}, host)


@dataclass(frozen=True)
class Pods:
    """A pod that has compiled, what it measured, and one that has not; each trusts both keys."""

    producer: Pod
    consumer: Pod
    made: Any


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    root = tmp_path_factory.mktemp("pods")
    producer = _pod(root / "alice", "venv", "pod-a", PYTHONHASHSEED="1", TZ="UTC")
    consumer = _pod(root / "bob", "opt/a_longer/environment", "pod-b", PYTHONHASHSEED="2", TZ="Asia/Tokyo")
    keys = [pod.run("-m", "torchrelay", "keygen", "--json")["public_key"] for pod in (producer, consumer)]
    for pod, key in zip((consumer, producer), keys, strict=True):
        pod.run("-m", "torchrelay", "trust", "add", key, "--json")
    made = producer.compile()
    assert made["max_error"] < 1e-4
    assert len(producer.kernels()) >= 2
    yield Pods(producer, consumer, made)
    shutil.rmtree(root)  # pytest would keep it, and it is large


@contextmanager
def _out_of_the_way(path: Path) -> Iterator[None]:
    away = path.rename(path.with_name("away"))
    try:
        yield
    finally:
        away.rename(path)


def _refuse_to_compile(pod: Pod) -> dict[str, str]:
    folder = pod.root / "bin"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(REFUSING.format(path=os.environ["PATH"], log=pod.log))
    compiler.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_kernels_of_another_install_prefix_are_hit_and_nothing_is_compiled(
    pods: Pods, tmp_path: Path
) -> None:
    producer, consumer, store = pods.producer, pods.consumer, tmp_path / "store"
    pushed = producer.relay("push", store, "--assume-environment", "this", "--all")
    assert pushed["pushed"] > len(producer.kernels())
    assert producer.relay("push", store, "--all")["pushed"] == 0
    with _out_of_the_way(producer.root / "venv"):
        pulled = consumer.relay("pull", store)
        assert pulled["installed"] == pushed["pushed"]
        assert pulled["incompatible"] == {}
        assert len(consumer.kernels()) == len(producer.kernels())
        assert consumer.kernels().isdisjoint(producer.kernels())
        assert consumer.probes() == producer.probes() != set()
        _check_warm(consumer, pods.made)
    _check_idle(consumer, store, pulled["installed"])


def _check_warm(consumer: Pod, made: Any) -> None:
    """All hits, no compiler, the same result."""
    refusing = replace(consumer, variables=consumer.variables | _refuse_to_compile(consumer))
    warm = refusing.compile("--skip-headers")
    assert not consumer.log.exists(), consumer.log.read_text()
    assert warm["result_sha256"] == made["result_sha256"]
    assert warm["max_error"] < 1e-4
    counters = warm["counters"]
    assert (counters["autograd_cache_hit"], counters["fxgraph_cache_hit"]) == (1, 2)
    assert counters["autograd_cache_miss"] == counters["fxgraph_cache_miss"] == 0


def _check_idle(consumer: Pod, store: Path, entries: int) -> None:
    """What was renamed is still what was signed, and nobody's own."""
    again = consumer.relay("pull", store)
    assert (again["installed"], again["present"], again["kept"]) == (0, entries, 0)
    checked = consumer.relay("verify", store, "--local")
    assert (checked["damaged"], checked["unsigned"]) == ([], 0)
    idle = consumer.relay("push", store, "--all")
    assert (idle["pushed"], idle["held"], idle["uploaded_bytes"]) == (0, entries, 0)


def test_two_prefixes_are_one_identity(pods: Pods, tmp_path: Path) -> None:
    store, first = tmp_path / "store", pods.producer
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "own")}
    second = replace(pods.consumer, variables=pods.consumer.variables | own)
    second.compile()
    assert first.kernels().isdisjoint(second.kernels())
    first.relay("push", store, "--assume-environment", "this", "--all")
    pushed = second.relay("push", store, "--assume-environment", "this", "--all")
    assert (pushed["blobs"], pushed["failed"], pushed["divergent"]) == (0, [], [])
    assert pushed["covered"] >= len(second.kernels())
