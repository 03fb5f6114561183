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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import torchrelay

pytestmark = pytest.mark.torch

pytest.importorskip("torch")

MODELS = Path(__file__).with_name("models.py")
SOURCES = Path(torchrelay.__file__).parents[1]
PYTHONPATH = os.pathsep.join((str(SOURCES), str(SOURCES.parent / "backends")))
REFUSING = """#!/bin/sh
case "$*" in --version|-v|-dumpversion|"-dumpfullversion -dumpversion") exec {compiler} "$@";; esac
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
        return self.root / "cache"

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


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[Pod, Pod]]:
    yield (
        _pod(tmp_path / "alice", "venv", "pod-a", PYTHONHASHSEED="1", TZ="UTC"),
        _pod(tmp_path / "bob", "opt/a_longer/environment", "pod-b", PYTHONHASHSEED="2", TZ="Asia/Tokyo"),
    )
    shutil.rmtree(tmp_path)  # pytest would keep it


def _refuse_to_compile(pod: Pod) -> dict[str, str]:
    folder = pod.root / "bin"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(REFUSING.format(compiler=shutil.which("g++"), log=pod.log))
    compiler.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _trust(reader: Pod, signer: Pod) -> None:
    key = signer.run("-m", "torchrelay", "keygen", "--json")["public_key"]
    reader.run("-m", "torchrelay", "trust", "add", key, "--json")


def test_kernels_of_another_install_prefix_are_hit_and_nothing_is_compiled(
    pods: tuple[Pod, Pod], tmp_path: Path
) -> None:
    producer, consumer = pods
    store = tmp_path / "store"
    _trust(consumer, producer)
    made = producer.compile()
    assert made["max_error"] < 1e-4
    assert len(producer.kernels()) >= 2
    pushed = producer.relay("push", store, "--assume-environment", "this", "--all")
    assert pushed["pushed"] > len(producer.kernels())
    assert producer.relay("push", store)["pushed"] == 0
    (tmp_path / "alice" / "venv").rename(tmp_path / "gone")

    pulled = consumer.relay("pull", store)
    assert pulled["installed"] == pushed["pushed"]
    assert pulled["incompatible"] == {}
    assert len(consumer.kernels()) == len(producer.kernels())
    assert consumer.kernels().isdisjoint(producer.kernels())
    probes = {path.name for path in producer.cache.glob("*/c*.so")} - producer.kernels()
    assert probes == {path.name for path in consumer.cache.glob("*/c*.so")} - consumer.kernels()
    again = consumer.relay("pull", store)
    assert (again["installed"], again["present"]) == (0, pulled["installed"])
    checked = consumer.run(
        "-m", "torchrelay", "verify", "--local", store.as_uri(), "-w", "acme/mlp", "--json"
    )
    assert (checked["damaged"], checked["unsigned"]) == ([], 0)

    refusing = Pod(
        consumer.root, consumer.python, consumer.variables | _refuse_to_compile(consumer), consumer.host
    )
    warm = refusing.compile("--skip-headers")
    assert not consumer.log.exists(), consumer.log.read_text()
    assert warm["result_sha256"] == made["result_sha256"]
    assert warm["max_error"] < 1e-4
    counters = warm["counters"]
    assert (counters["autograd_cache_hit"], counters["fxgraph_cache_hit"]) == (1, 2)
    assert counters["autograd_cache_miss"] == counters["fxgraph_cache_miss"] == 0

    idle = consumer.relay("push", store)
    assert (idle["pushed"], idle["uploaded_bytes"], idle["segment"]) == (0, 0, "")


def test_two_prefixes_are_one_identity(pods: tuple[Pod, Pod], tmp_path: Path) -> None:
    first, second = pods
    store = tmp_path / "store"
    _trust(first, second)
    _trust(second, first)
    for pod in pods:
        pod.compile()
    assert first.kernels().isdisjoint(second.kernels())
    first.relay("push", store, "--assume-environment", "this", "--all")
    pushed = second.relay("push", store, "--assume-environment", "this", "--all")
    assert pushed["plain_bytes"] >= 0
    assert (pushed["blobs"], pushed["failed"], pushed["divergent"]) == (0, [], [])
    assert pushed["covered"] >= len(second.kernels())
