# SPDX-License-Identifier: Apache-2.0
"""The demonstration: compile once, pass it on, prove it, and show that damage is refused.

Everything happens below one directory, as two users with homes of their own and an embedded store on
local disk. Each measurement is a fresh process that runs :mod:`torchrelay.demo.program`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError, UsageError
from torchrelay.options import PullOptions
from torchrelay.relay import Relay
from torchrelay.reports import DemoCheck, DemoReport, DemoRow, PullReport

WORKLOAD = "demo/transformer"
MODEL = "transformer with 2 layers, forward and backward, CPU"
_STAGES = (
    "compile as alice, cold, and push",
    "start again with alice's warm local directory",
    "start as bob with PyTorch's Mega-Cache",
    "wipe, pull and start as carol with torchrelay",
    "change one bit of the store and pull as dave",
)
_UP_TO = " (up to a minute)"
_SECONDS = 600.0

Progress = Callable[[str, int, int], None]


class DemoError(RelayError):
    """A step of the demonstration could not run."""

    default_remedy = "A C++ compiler must be on PATH: PyTorch compiles its CPU kernels with it."


def run(directory: Path | None, *, progress: Progress) -> DemoReport:
    """Run the demonstration.

    Args:
        directory: An empty or new directory to work in and keep; None: a temporary one.
        progress: Told of each stage.

    Raises:
        UsageError: torch is not installed, or ``directory`` is not empty.
        DemoError: A step failed.
    """
    if find_spec("torch") is None:
        raise UsageError("the demonstration needs torch", remedy='Run `pip install "torchrelay[demo]"`.')
    if directory is not None:
        _require_empty(directory)
        return _Demo(directory.absolute(), progress).run(keep=True)
    with tempfile.TemporaryDirectory(prefix="torchrelay-demo-") as temporary:
        return _Demo(Path(temporary), progress).run(keep=False)


def _require_empty(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            remedy = "Name a new directory."
            raise UsageError(f"{directory} is not empty", remedy=remedy, subject=str(directory))
    except OSError as exc:
        raise UsageError(f"{directory} cannot be used: {exc.strerror}", subject=str(directory)) from exc


@dataclass(frozen=True, slots=True)
class _User:
    """One user of the demonstration: a home, a cache directory, and what the program printed."""

    name: str
    base: Path

    @property
    def home(self) -> Path:
        return self.base / "homes" / self.name

    @property
    def cache(self) -> Path:
        return self.home / "cache" / "inductor"

    def environment(self) -> dict[str, str]:
        """The environment of a shell that this user just logged in to: nothing of ours leaks in."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "XDG_"))}
        return kept | {
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "TMPDIR": str(self.home / "tmp"),
            "XDG_CONFIG_HOME": str(self.base / "config"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
        }


class _Demo:
    def __init__(self, base: Path, progress: Progress) -> None:
        self._base = base
        self._progress = progress
        self._store = base / "store"
        self._blob = base / "mega-cache.bin"
        self._rows: list[DemoRow] = []
        self._checks: list[DemoCheck] = []

    def run(self, *, keep: bool) -> DemoReport:
        started = time.monotonic()
        steps = (self._cold, self._warm, self._mega, self._relay, self._damage)
        for number, (stage, step) in enumerate(zip(_STAGES, steps, strict=True)):
            told = f"{number + 1}/{len(steps)} {stage}{_UP_TO if step in (self._cold, self._mega) else ''}"
            self._progress(told, number, len(steps))
            step()
        self._progress("done", len(steps), len(steps))
        return DemoReport(
            model=MODEL,
            directory=str(self._base) if keep else "",
            rows=self._rows,
            checks=self._checks,
            seconds=time.monotonic() - started,
        )

    def _cold(self) -> None:
        alice = _User("alice", self._base)
        result = self._program(alice, "--save-mega", str(self._blob), "--push", str(self._store))
        pushed = result["push"]
        self._add("cold", result, None)
        self._claim(
            "every entry was canonicalised, signed and stored on its own",
            pushed["pushed"] > 0 and not pushed["failed"],
            f"{pushed['pushed']} entries, {pushed['uploaded_bytes'] / 1024:.0f} KiB uploaded"
            f" where the Mega-Cache blob has {self._blob.stat().st_size / 1024:.0f} KiB",
        )
        self._expected = result["result"]

    def _warm(self) -> None:
        self._add("warm local directory", self._program(_User("alice", self._base)), None)

    def _mega(self) -> None:
        result = self._program(_User("bob", self._base), "--load-mega", str(self._blob))
        self._add("Mega-Cache, empty directory", result, self._blob.stat().st_size)

    def _relay(self) -> None:
        shutil.rmtree(_User("alice", self._base).cache)
        result = self._program(_User("carol", self._base), "--pull", str(self._store))
        pulled = result["pull"]
        self._add("torchrelay, empty directory", result, pulled["downloaded_bytes"])
        counters = result["counters"]
        self._claim(
            "PyTorch's own counters say that it was a hit",
            counters["misses"] == 0 and counters["hits"] > 0,
            f"{counters['hits']} hits, {counters['misses']} misses, {pulled['installed']} entries installed",
        )
        self._claim("the result is the same to the last bit", result["result"] == self._expected)

    def _damage(self) -> None:
        blob = max((self._store / "blobs").glob("*/*"), key=lambda path: path.stat().st_size)
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.chmod(0o600)
        blob.write_bytes(data)
        name = f"blobs/{blob.parent.name}/{blob.name}"
        report = self._pull_as_dave()
        named = [problem.detail for problem in report.damaged if problem.subject == name]
        self._claim("one changed bit is refused and named", bool(named), named[0] if named else name)
        self._claim(
            "and everything else is installed",
            report.installed > 0 and len(report.damaged) == 1,
            f"{report.installed} entries installed",
        )

    def _pull_as_dave(self) -> PullReport:
        """In this process, to show the Python interface; torch is imported to know this machine."""
        dave = _User("dave", self._base)
        relay = Relay(
            self._store,
            workload=WORKLOAD,
            cache_dir=dave.cache,
            policy=self._base / "config" / "torchrelay" / "trust.toml",
            state_dir=dave.home / "state",
            strict=True,
            in_process=False,
        )
        return relay.pull(PullOptions())

    def _program(self, user: _User, *arguments: str) -> dict[str, Any]:
        (user.home / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "torchrelay.demo.program", *arguments]
        try:
            done = subprocess.run(
                command,
                env=user.environment(),
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise DemoError(f"the step of {user.name} did not finish: {exc}") from exc
        if done.returncode != 0:
            raise DemoError(f"the step of {user.name} failed: {_tail(done.stderr)}", subject=user.name)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def _add(self, way: str, result: dict[str, Any], size: int | None) -> None:
        counters = result["counters"]
        self._rows.append(
            DemoRow(
                way=way,
                seconds=result["seconds"],
                bytes=size,
                hits=counters["hits"],
                misses=counters["misses"],
            )
        )

    def _claim(self, claim: str, held: bool, detail: str = "") -> None:
        self._checks.append(DemoCheck(claim=claim, held=held, detail=detail))


def _tail(text: str) -> str:
    lines = text.strip().splitlines()
    return " | ".join(lines[-3:]) if lines else "no message"
