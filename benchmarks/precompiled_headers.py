# SPDX-License-Identifier: Apache-2.0
"""What precompiled headers cost at a cold and at a warm start, and what torchrelay makes of it.

    python benchmarks/precompiled_headers.py --model tx4 --rounds 3

Each line is the time to the first result, forward and backward, in a fresh process. PyTorch keeps
its precompiled headers under the temporary directory, so each case gets one of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent.parent / "tests" / "e2e" / "models.py"
# Inductor is imported first in every case, since skipping imports it.
PLAIN = (
    "import runpy, sys, torch._inductor.codecache; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
LAZY = f"from torchrelay.caches.settings import skip_needless_headers as skip; assert skip(); {PLAIN}"
# name: (headers switched on, header there, kernels there, lazily)
CASES = {
    "cold, on, header absent": (True, False, False, False),
    "cold, on, header present": (True, True, False, False),
    "cold, off": (False, False, False, False),
    "warm, on, header absent (a fresh machine)": (True, False, True, False),
    "warm, on, header present": (True, True, True, False),
    "warm, off": (False, False, True, False),
    "warm, on, header absent, needless headers skipped": (True, False, True, True),
    "warm, on, header present, needless headers skipped": (True, True, True, True),
}


def first_call(model: str, cache: Path, temporary: Path, *, headers: bool, lazy: bool) -> dict[str, Any]:
    """One fresh process."""
    temporary.mkdir(exist_ok=True)
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1" if headers else "0",
    }
    command = [sys.executable, "-c", LAZY if lazy else PLAIN, str(MODELS), "--model", model]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, rounds: int, root: Path) -> dict[str, list[float]]:
    """All cases, in turn, ``rounds`` times."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    made = {headers: root / f"made-{headers}" for headers in (True, False)}
    for headers, cache in made.items():
        first_call(model, cache, root / f"tmp-{headers}", headers=headers, lazy=False)
    for turn in range(rounds):
        for name, (headers, present, warm, lazy) in CASES.items():
            cache, temporary = root / f"use-{turn}", root / f"tmp-{headers}" if present else root / "empty"
            if warm:
                shutil.copytree(made[headers], cache)
            result = first_call(model, cache, temporary, headers=headers, lazy=lazy)
            hits = result["counters"]["fxgraph_cache_hit"]
            if (hits > 0) != warm:
                raise SystemExit(f"{name}: expected {'hits' if warm else 'misses'}, got {result['counters']}")
            seconds[name].append(result["first_seconds"])
            print(f"  {name}: {result['first_seconds']:.2f} s", file=sys.stderr)
            shutil.rmtree(cache)
            shutil.rmtree(root / "empty", ignore_errors=True)
    return seconds


def main() -> int:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tx4")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        seconds = measure(arguments.model, arguments.rounds, Path(root))
    base = statistics.median(seconds["warm, off"])
    print(f"| {arguments.model}: case | median s | spread s | x warm, off |\n|---|---|---|---|")
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} | {min(found):.2f}-{max(found):.2f} | {middle / base:.2f} |")
    print(json.dumps({"model": arguments.model, "cpus": os.cpu_count(), "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
