# SPDX-License-Identifier: Apache-2.0
"""Ten thousand entries of 24 KiB on local disk: push, idle push, pull, idle pull.

    python benchmarks/scale.py [--quick] [--out FILE] [--rounds N] [--entries N] [--size BYTES] [--kinds K,K]

Each phase is a fresh process without torch. Beside it, in the same round, the same files are copied
by ``cp -r`` and by ``tar``, and written by a plain Python loop with and without ``fsync``. Nothing is
evicted from the page cache, for any of them. Two kinds are measured: ``inductor`` (pickles that are
walked and brought into canonical form) and ``cpp`` (source and binary, taken as they are).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness

WORKLOAD = "bench/scale"
PHASES = ("push", "idle push", "pull", "idle pull")


# -- one phase, in a process of its own --------------------------------------------------------------


def phase(name: str, base: Path, machine: str, *, timed: bool) -> dict[str, Any]:
    """Do one phase as the user of ``base/machine``; seconds, memory and what the report says."""
    from synthetic import ENVIRONMENT

    import torchrelay.workplace  # noqa: F401 - all modules are there before memory is looked at
    import torchrelay_local  # noqa: F401
    from torchrelay import Relay
    from torchrelay.options import PullOptions, PushOptions
    from torchrelay.signing import keyfiles

    relay = Relay(
        base / "store",
        workload=WORKLOAD,
        cache_dir=base / machine / "cache",
        key=base / "config" / "key.pem",
        policy=base / "config" / "trust.toml",
        state_dir=base / machine / "state",
        strict=True,
        in_process=False,
    )
    signer = keyfiles.load_private_key(base / "config" / "key.pem", None)
    assert signer.public_key.verify(signer.sign(b""), b"")  # as any push and pull loads, before memory counts
    checks = Timers() if timed else None
    before = harness.memory_kib("VmRSS")
    start, worked = time.perf_counter(), time.process_time()
    if "push" in name:
        report: Any = relay.push(PushOptions(all=True))
        done = report.pushed if name == "push" else report.held
    else:
        report = relay.pull(PullOptions(environment=ENVIRONMENT))
        done = report.installed if name == "pull" else report.present
    seconds, cpu = time.perf_counter() - start, time.process_time() - worked
    peak = harness.memory_kib("VmHWM")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "entries": done,
        "requests": report.requests,
        "peak_kib": peak,
        "above_kib": peak - before,
        "checks": checks.seconds if checks else {},
    }


class Timers:
    """Seconds spent in signature and digest checks, and in inflating; nested calls do not occur."""

    def __init__(self) -> None:
        from torchrelay import digest, frame
        from torchrelay.signing import keys

        self.seconds: dict[str, float] = {"signature": 0.0, "digest": 0.0, "inflate": 0.0}
        digest_of = self._timed("digest", digest.digest_of)
        for module in [m for n, m in sys.modules.items() if n.startswith("torchrelay") and m is not None]:
            if getattr(module, "digest_of", None) is digest.digest_of and module is not digest:
                module.digest_of = digest_of  # type: ignore[attr-defined]
        keys.PublicKey.verify = self._timed("signature", keys.PublicKey.verify)  # type: ignore[method-assign]
        frame._inflate = self._timed("inflate", frame._inflate)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


# -- peers -------------------------------------------------------------------------------------------


def copied(source: Path, target: Path) -> float:
    """``cp -r``."""
    return _run(["cp", "-r", str(source), str(target)])


def tarred(source: Path, target: Path) -> float:
    """A tar file written and unpacked."""
    target.mkdir()
    archive = target / "all.tar"
    start = time.perf_counter()
    _run(["tar", "-cf", str(archive), "-C", str(source), "."])
    _run(["tar", "-xf", str(archive), "-C", str(target)])
    return time.perf_counter() - start


def _run(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def looped(source: Path, target: Path, *, sync: bool) -> float:
    """A plain Python loop that reads each file and writes it, with or without ``fsync``."""
    files = [path for path in source.rglob("*") if path.is_file()]
    start = time.perf_counter()
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as stream:
            stream.write(path.read_bytes())
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
    return time.perf_counter() - start


PEERS: dict[str, Callable[[Path, Path], float]] = {
    "cp -r": copied,
    "tar and untar": tarred,
    "Python loop": lambda a, b: looped(a, b, sync=False),
    "Python loop, fsync": lambda a, b: looped(a, b, sync=True),
}


# -- the whole ---------------------------------------------------------------------------------------


def prepare(base: Path, kind: str, count: int, size: int) -> Path:
    """A producer's stamped cache directory, a key, a policy."""
    from synthetic import ENVIRONMENT, WRITERS

    from torchrelay.caches.stamp import Stamp, write_stamp
    from torchrelay.signing import trust

    made = base / "made"
    made.mkdir(mode=0o700, parents=True)
    WRITERS[kind](made, count, size)
    cache = base / "producer" / "cache"
    cache.parent.mkdir(mode=0o700)
    shutil.copytree(made, cache)
    write_stamp(cache, Stamp(ENVIRONMENT, 0))
    trust.first_use(base / "config")
    return made


def one_round(base: Path, made: Path, count: int, turn: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """All phases and peers once; each starts on a quiet disk."""
    yield from phases(base, count, f"consumer-{turn}")
    for name, peer in PEERS.items():
        os.sync()
        yield name, {"seconds": peer(made, base / "peer"), "entries": count}
        shutil.rmtree(base / "peer")


def phases(base: Path, count: int, consumer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All phases once, with a new store and a new consumer."""
    from torchrelay.caches.state import state_path

    shutil.rmtree(base / "store", ignore_errors=True)
    shutil.rmtree(base / "producer" / "state", ignore_errors=True)
    (state_path(base / "producer" / "cache") / "index.json").unlink(missing_ok=True)
    (base / consumer / "cache").mkdir(mode=0o700, parents=True)
    for name in PHASES:
        os.sync()
        found = run_phase(name, base, "producer" if "push" in name else consumer)
        if found["entries"] != count:
            raise SystemExit(f"{name}: {found['entries']} entries where {count} were expected")
        yield name, found
    shutil.rmtree(base / consumer)


def run_phase(name: str, base: Path, machine: str, *, timed: bool = False) -> dict[str, Any]:
    """One phase in a fresh process."""
    arguments = ["--phase", name, str(base), machine, *(["timed"] if timed else [])]
    found: dict[str, Any] = harness.fresh([__file__, *arguments], harness.clean_environment())
    return found


def checks_share(base: Path) -> dict[str, float]:
    """The share of a pull that goes into checks, measured in a pull of its own."""
    (base / "checked" / "cache").mkdir(mode=0o700, parents=True)
    os.sync()
    found = run_phase("pull", base, "checked", timed=True)
    shutil.rmtree(base / "checked")
    return {name: seconds / found["seconds"] for name, seconds in found["checks"].items()}


def measure(kind: str, count: int, size: int, rounds: int, base: Path) -> dict[str, Any]:
    """All rounds of one kind."""
    made = prepare(base, kind, count, size)
    results: dict[str, list[dict[str, Any]]] = {}
    for turn in range(rounds):
        for name, found in one_round(base, made, count, turn):
            harness.note(f"{kind}: {name}: {found['seconds']:.2f} s")
            results.setdefault(name, []).append(found)
    stored = [path.stat().st_size for path in (base / "store" / "blobs").rglob("*") if path.is_file()]
    plain = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    return {
        "entries": count,
        "plain_bytes": plain,
        "stored_bytes": sum(stored),
        "results": results,
        "checks": checks_share(base),
    }


def show(kind: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Print the table of one kind; its targets."""
    results, count = found["results"], found["entries"]
    base = harness.median(r["seconds"] for r in results["cp -r"])
    rows = []
    for name, runs in results.items():
        seconds = harness.median(r["seconds"] for r in runs)
        above = max(r.get("above_kib", 0) for r in runs) / 1024
        peak = max(r.get("peak_kib", 0) for r in runs) / 1024
        rows.append(
            (name, seconds, round(count / seconds), seconds / base, *((above, peak) if peak else ("", "")))
        )
    ratio = found["plain_bytes"] / found["stored_bytes"]
    size = found["plain_bytes"] // count
    title = f"{kind}: {count:,} entries of {size:,} bytes, stored {ratio:.1f} x smaller"
    columns = ("phase", "median s", "entries/s", "x cp -r", "peak MiB above imports", "peak MiB")
    harness.table(title, columns, rows)
    shares = [(name, f"{share:.1%}") for name, share in found["checks"].items()]
    harness.table(f"{kind}: share of a pull", ("what", "share"), shares)
    checks = found["checks"]["signature"] + found["checks"]["digest"]
    above = max(r["above_kib"] for name in PHASES for r in results[name]) / 1024
    return [
        harness.target(f"{kind}: signature and digest checks, share of a pull", checks, 0.10),
        harness.target(f"{kind}: peak memory above imports, MiB", above, 64.0),
    ]


def slope(kind: str, few: int, many: int, size: int, base: Path) -> dict[str, Any]:
    """Bytes of peak memory for each further record, by phase."""
    peaks: dict[int, dict[str, int]] = {}
    for count in (few, many):
        place = base / str(count)
        prepare(place, kind, count, size)
        found = dict(phases(place, count, "consumer"))
        peaks[count] = {name: found[name]["peak_kib"] for name in PHASES}
        shutil.rmtree(place)
    per_record = {
        name: (peaks[many][name] - peaks[few][name]) * harness.KIB / (many - few) for name in PHASES
    }
    return {"few": few, "many": many, "peak_kib": peaks, "bytes_per_record": per_record}


def main() -> int:
    """Measure, print, write."""
    if len(sys.argv) > 1 and sys.argv[1] == "--phase":
        name, base, machine = sys.argv[2:5]
        print(json.dumps(phase(name, Path(base), machine, timed="timed" in sys.argv[5:])))
        return 0
    asked = harness.arguments(
        __doc__,
        rounds=3,
        entries=(10_000, "entries of each kind"),
        size=(24 * harness.KIB, "bytes of each"),
        kinds=("inductor,cpp", "which kinds"),
        many=(0, "also find the memory for each record, from --entries to so many; 40000 takes minutes"),
    )
    count = min(asked.entries, 200) if asked.quick else asked.entries
    results: dict[str, Any] = {}
    targets: list[dict[str, Any]] = []
    for kind in asked.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as root:
            results[kind] = measure(kind, count, asked.size, asked.rounds, Path(root))
        targets += show(kind, results[kind])
    if asked.many:
        with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as root:
            found = slope("cpp", count, asked.many, 2 * harness.KIB, Path(root))
        results["slope"] = found
        rows = found["bytes_per_record"].items()
        harness.table(f"Memory from {count:,} to {asked.many:,} records", ("phase", "bytes a record"), rows)
        targets += [harness.target(f"{n}: bytes a record beyond {count:,}", v, 300.0) for n, v in rows]
    return harness.finish("scale", {"kinds": results}, targets, asked.out)


if __name__ == "__main__":
    sys.exit(main())
