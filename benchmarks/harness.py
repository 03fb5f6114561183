# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine's facts, fresh processes, medians, tables and JSON.

Every benchmark measures torchrelay beside its peer in the same run, in turn, so that what else the
machine does hits both alike; what counts is the ratio of medians, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
MODELS = TESTS / "e2e" / "models.py"
SOURCES = (ROOT / "src", ROOT / "backends", TESTS)
for _source in SOURCES:
    if str(_source) not in sys.path:
        sys.path.append(str(_source))
WORKLOAD = "bench/model"
"""What the models are published under."""

KIB = 1024
MIB = 1024 * KIB


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torchrelay": _version("torchrelay"),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def arguments(doc: str | None, *, rounds: int, **options: tuple[Any, str]) -> argparse.Namespace:
    """The options that every benchmark has, and its own: default and help by name."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs")
    parser.add_argument("--out", type=Path, help="write the JSON object here")
    parser.add_argument("--rounds", type=int, default=0, help=f"repetitions (default {rounds})")
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parsed = parser.parse_args()
    parsed.rounds = parsed.rounds or (1 if parsed.quick else rounds)
    return parsed


def clean_environment(**changes: str) -> dict[str, str]:
    """This process' environment without what could lead a child to caches or keys of this user."""
    prefixes = ("TORCH", "TRITON", "XDG_", "PYTHONHASHSEED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    kept["PYTHONPATH"] = os.pathsep.join(map(str, SOURCES))
    return kept | changes


def user_environment(home: Path, name: str, **changes: str) -> dict[str, str]:
    """The environment of a user of a fresh machine: a home and a temporary directory of their own."""
    temporary = home / "tmp"
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {"HOME": str(home), "USER": name, "LOGNAME": name, "TMPDIR": str(temporary)}
    return clean_environment(**own, **changes)


def fresh(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Any:
    """Run a new interpreter; the JSON object on its last line.

    Raises:
        SystemExit: It failed; its last words are shown.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=dict(environment) if environment is not None else clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_kib(field: str) -> int:
    """A field of this process' memory: ``VmHWM`` is the peak, ``VmRSS`` what it has now."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The smallest and the largest value."""
    return f"{min(values):.2f}-{max(values):.2f}"


def note(text: str) -> None:
    """Progress, for people."""
    print(f"  {text}", file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n")
    print(f"| {' | '.join(columns)} |")
    print(f"|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(_cell(value) for value in row)} |")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def target(name: str, value: float, limit: float, *, at_most: bool = True) -> dict[str, Any]:
    """One target, and whether it is reached."""
    reached = value <= limit if at_most else value >= limit
    return {"target": name, "value": round(value, 4), "limit": limit, "reached": reached}


def finish(
    benchmark: str, results: Mapping[str, Any], targets: Sequence[Mapping[str, Any]], out: Path | None
) -> int:
    """Print targets and facts, write the JSON object; always 0: numbers are judged by people."""
    rows = [(t["target"], t["value"], t["limit"], "yes" if t["reached"] else "NO") for t in targets]
    if rows:
        table("Targets", ("target", "value", "limit", "reached"), rows)
    facts = machine()
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if out is not None:
        document = {"benchmark": benchmark, "machine": facts, "targets": list(targets), **results}
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0
