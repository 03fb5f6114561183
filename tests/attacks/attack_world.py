# SPDX-License-Identifier: Apache-2.0
"""Machines, users and stores for attacks: everything is real but torch, which nothing here needs.

Entries are synthetic, some of every kind; the environment is a document written by hand.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cache_samples
import canonical_entries
import torchrelay
from cache_samples import write
from torchrelay.caches.pickled import content_name
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.environment import ABSENT, FACETS, FORMAT, Environment
from torchrelay.relay import PullOptions, PushOptions, Relay
from torchrelay.reports import EntryInfo, Problem, PullReport, PushReport, VerifyReport
from torchrelay.signing import keyfiles, trust
from torchrelay.signing.keys import Ed25519Signer

WORKLOAD = "acme/demo"
TORCH = f"{canonical_entries.VERSION} 0123456789abcdef"
SOURCES = os.pathsep.join(str(Path(torchrelay.__file__).parents[1] / name) for name in (".", "../backends"))
TESTS = Path(__file__).parents[1]

_KNOWN: dict[str, Any] = {
    "torch": TORCH,
    "python": "cpython-3.11",
    "machine": os.uname().machine,
    "cpu_isa": "AVX2",
    "vector_isa": "avx2",
    "glibc": "2.36",
    "libstdcxx": "3.4.30",
    "cpu_flags": ("avx", "avx2", "fma"),
    "openmp": "libgomp",
}
ENVIRONMENT = Environment(
    FORMAT,
    {name: _KNOWN.get(name, ABSENT) for name, facet in FACETS.items() if not facet.optional},
    {"threads": "8"},
)
"""The machine that every entry here was made on, and that all pull for."""

TREE = "vllm"
SYSTEM = hashlib.sha256(b"system").hexdigest()


def key(letter: str, number: int) -> str:
    """A key of PyTorch's form, different for each number."""
    digest = hashlib.sha256(f"{letter}{number}".encode()).digest()
    return letter + base64.b32encode(digest).decode().lower()[:51]


def write_graph(cache: Path, name: str, **changes: Any) -> Path:
    """An FX graph where PyTorch would have put it."""
    data = canonical_entries.dumps(canonical_entries.graph(**changes))
    return write(cache / "fxgraph" / name[1:3] / name / content_name(data), data)


def write_result(cache: Path, name: str, forward: str, backward: str) -> Path:
    """An AOTAutograd result that needs two graphs."""
    sides = {
        "compiled_fw": canonical_entries.CompiledForward(
            fx_graph_cache_info=(forward, list(canonical_entries.LINES)), fx_graph_guard_expr="g0"
        ),
        "compiled_bw": canonical_entries.CompiledBackward(
            fx_graph_cache_info=(backward, list(canonical_entries.LINES)),
            fx_graph_guard_expr="g1",
            backward_state_indices=[],
        ),
    }
    data = canonical_entries.dumps(canonical_entries.unbundled(**sides))
    return write(cache / "aotautograd" / name / content_name(data), data)


def write_graphs(cache: Path, count: int, *, start: int = 0, body: int = 0) -> None:
    """``count`` FX graphs, each different."""
    for number in range(start, start + count):
        filler = hashlib.shake_256(str(number).encode()).hexdigest(body // 2)
        write_graph(cache, key("f", number), source_code=f"# graph {number} {filler}", guards_expr=None)


def fill(cache: Path, tree: Path) -> None:
    """Some of every kind of cache."""
    forward, backward = key("f", 1), key("f", 2)
    write_graph(cache, forward, guards_expr="g0", source_code="# forward")
    write_graph(cache, backward, guards_expr="g1", source_code="# backward")
    write_graph(cache, key("f", 3), guards_expr="alone", source_code="# alone")
    write_result(cache, key("a", 1), forward, backward)
    cache_samples.cpp_kernel(cache)
    cache_samples.triton_group(cache / "triton" / "0")
    choice = {"configs_hash": "c" * 64, "XBLOCK": 64, "num_warps": 4, "time_taken_ms": 5}
    name = hashlib.sha256(b"kernel").hexdigest()
    write(cache / "xy" / f"{name}.best_config", json.dumps(choice).encode())
    choices = {"mm": {"[8, 8]": {"highest": {"extern_mm": 0.125, "triton_mm_1": 0.5}}}}
    document = {"system": {"device": {"name": "cpu"}, "hash": SYSTEM}, "cache": choices}
    write(cache / "cache" / SYSTEM, json.dumps(document).encode())
    write(cache / "dynamo" / "code_state_training_0_main.pkl", canonical_entries.dumps({"frame": [8, None]}))
    package = canonical_entries.dumps({"package": "whole function"})
    write(cache / "dynamo" / hashlib.sha256(b"f.py:1").hexdigest() / "entry", package)
    write(tree / "rank_0" / "graph.py", b"x = 1\n")
    write(tree / "rank_0" / "index.json", b"{}")


@dataclass(frozen=True)
class Machine:
    """One user on one machine: caches, key, policy and memory of the store."""

    base: Path
    store: str
    key: Path
    policy: Path
    workload: str = WORKLOAD
    trees: tuple[str, ...] = (TREE,)

    @classmethod
    def make(cls, base: Path, store: Path | str, *, trusting: Machine | None = None) -> Machine:
        """A new machine: with a key of its own, or with nothing but another one's public key."""
        base.mkdir(mode=0o700)
        (base / "config").mkdir(mode=0o700)
        own = base / "config" / "key.pem"
        policy = base / "config" / "trust.toml"
        if trusting is None:
            trust.first_use(base / "config")
        else:
            shutil.copyfile(trusting.policy, policy)
        return cls(base, str(store), own, policy)

    @classmethod
    def of(cls, places: list[str]) -> Machine:
        """The machine with this base, store, key and policy; for child processes."""
        base, store, key, policy = places
        return cls(Path(base), store, Path(key), Path(policy))

    @property
    def cache(self) -> Path:
        return self.base / "cache"

    @property
    def tree(self) -> Path:
        return self.base / "tree"

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def root(self) -> Path:
        """The store's directory."""
        return Path(self.store)

    @property
    def signer(self) -> Ed25519Signer:
        return keyfiles.load_private_key(self.key)

    def at(self, store: Path | str) -> Machine:
        """The same machine with another store."""
        return replace(self, store=str(store))

    def fill(self) -> None:
        """A stamped cache directory with some of every kind."""
        fill(self.cache, self.tree)
        self.stamp()

    def stamp(self) -> None:
        for root in (self.cache, self.tree):
            write_stamp(root, Stamp(ENVIRONMENT, 0))

    def relay(self, **changes: Any) -> Relay:
        settings: dict[str, Any] = {
            "workload": self.workload,
            "cache_dir": self.cache,
            "trees": dict.fromkeys(self.trees, self.tree),
            "key": self.key if self.key.exists() else None,
            "policy": self.policy,
            "state_dir": self.state,
            "strict": True,
            "in_process": False,
        }
        settings.update(changes)
        return Relay(settings.pop("url", self.store), **settings)

    def push(self, **options: Any) -> PushReport:
        return self.relay().push(PushOptions(**options))

    def pull(self, **options: Any) -> PullReport:
        return self.relay().pull(PullOptions(environment=ENVIRONMENT, **options))

    def verify(self, *, local: bool = False) -> VerifyReport:
        return self.relay().verify(local=local)

    def installed(self) -> dict[str, bytes]:
        """Every file in the cache directories but torchrelay's own, by name."""
        files = cache_samples.contents(self.cache) if self.cache.exists() else {}
        files |= {f"tree/{n}": d for n, d in cache_samples.contents(self.tree).items()}
        # Only the place of the cache directory differs between two machines.
        return {name: data.replace(str(self.cache).encode(), b"<cache>") for name, data in files.items()}

    def arguments(self, *command: str) -> list[str]:
        """A command line with this machine's directories, for commands that take a store."""
        found = [*command, self.store, "-w", self.workload, "--cache-dir", str(self.cache)]
        for name in self.trees:
            found += ["--tree", f"{name}={self.tree}"]
        found += ["--policy", str(self.policy), "--state-dir", str(self.state)]
        return found + (["--key", str(self.key)] if self.key.exists() else [])

    def environment_file(self) -> Path:
        return write(self.base / "environment.json", ENVIRONMENT.encode())


def environ() -> dict[str, str]:
    """Variables for a child process of Python that finds torchrelay and the tests' helpers."""
    paths = [SOURCES, str(TESTS), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def warm_up() -> None:
    """Import what a push or pull needs: another user may not read this Python's library."""
    from concurrent.futures import ThreadPoolExecutor

    from torchrelay import workplace
    from torchrelay.storage.registry import backend_class

    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend_class, "file").result()
    codecs.lookup("utf-8-sig")
    Ed25519Signer.generate().public_key.verify(b"", b"")
    assert workplace


def fork(work: Callable[[], object]) -> int:
    """Start ``work`` in a copy of this process; its id. It exits with 0, or with 1 if ``work`` raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from 3.12 on
        pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def join(*pids: int) -> list[int]:
    """The exit codes of forked processes; negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def as_user(uid: int, gid: int | None = None, umask: int = 0o022) -> str:
    """Code with which a child process of root goes on as another user, in one group and no others."""
    group = uid if gid is None else gid
    return f"import os; os.umask({umask}); os.setgroups([{group}]); os.setgid({group}); os.setuid({uid})"


def python(*arguments: str) -> list[str]:
    """The command of a child process."""
    return [sys.executable, "-W", "ignore", *arguments]


@dataclass(frozen=True)
class World:
    """A filled store and what a pull from it gives.

    Attributes:
        producer: Who filled it, as one batch of everything but one graph, and a second of that.
        good: What lies in the cache directories after a complete pull.
        entries: The live entries.
    """

    producer: Machine
    good: dict[str, bytes]
    entries: list[EntryInfo] = field(repr=False)

    @classmethod
    def make(cls, base: Path) -> World:
        producer = Machine.make(base / "producer", base / "store")
        producer.fill()
        late = write_graph(producer.cache, key("f", 4), guards_expr="late", source_code="# late")
        data = late.read_bytes()
        late.unlink()
        producer.push()
        write(late, data)
        producer.push()
        consumer = Machine.make(base / "consumer", base / "store", trusting=producer)
        report = consumer.pull()
        assert report.exit_code == 0, report
        return cls(producer, consumer.installed(), consumer.relay().entries().entries)

    def copy(self, base: Path) -> tuple[Machine, Path]:
        """The producer with caches and memory of its own, and a store of its own."""
        base.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(self.producer.root, base / "store")
        shutil.copytree(self.producer.base, base / "producer", symlinks=True)
        moved = replace(
            self.producer,
            base=base / "producer",
            store=str(base / "store"),
            key=base / "producer" / "config" / "key.pem",
            policy=base / "producer" / "config" / "trust.toml",
        )
        # The memory of a store goes by its URL.
        for place in moved.state.iterdir():
            place.rename(moved.state / hashlib.sha256(f"file://{moved.store}".encode()).hexdigest()[:32])
        return moved, base / "store"

    def without(self, gone: set[str]) -> dict[str, bytes]:
        """What a pull gives where the entries of these labels cannot be had."""
        lost = set(gone)
        for entry in self.entries:
            if gone & set(entry.needs):
                lost.add(f"{entry.kind} {entry.key}")
        return {n: d for n, d in self.good.items() if not any(belongs(n, label) for label in lost)}


def belongs(name: str, label: str) -> bool:
    """Whether a file is part of the entry that reports call ``label``."""
    kind, _, name_of = label.partition(" ")
    if kind == "triton":
        return cache_samples.HASH in name
    if kind == "gemm":
        return name == f"cache/{SYSTEM}"
    if kind == "tree":
        return name.startswith("tree/")
    return name_of in name


def names(folder: Path) -> set[str]:
    """Every file below ``folder``, temporary and hidden ones too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def objects(store: Path) -> dict[str, bytes]:
    """Every file of a store, by name."""
    return {name: (store / name).read_bytes() for name in sorted(names(store))}


def names_of(problems: list[Problem]) -> str:
    """All that problems say, to look for a name in."""
    return "\n".join(f"{p.subject}: {p.reason}: {p.detail}" for p in problems)
