# SPDX-License-Identifier: Apache-2.0
"""What precompiled headers cost at a cold and at a warm start, and what torchrelay makes of it.

    python benchmarks/precompiled_headers.py [--quick] [--out FILE] [--rounds N] [--model NAME]

Each line is the time to the first result, forward and backward, in a fresh process. PyTorch keeps
its precompiled headers under the temporary directory, so each case gets one of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

# Inductor is imported first in every case, since skipping imports it.
PLAIN = (
    "import runpy, sys, torch._inductor.codecache; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
LAZY = f"from torchrelay.caches.settings import skip_needless_headers as skip; assert skip(); {PLAIN}"
OFF = "warm, off"
FRESH = "warm, on, header absent (a fresh machine)"
FRESH_SKIPPED = "warm, on, header absent, needless headers skipped"
# name: (headers switched on, header there, kernels there, lazily)
CASES = {
    "cold, on, header absent": (True, False, False, False),
    "cold, on, header present": (True, True, False, False),
    "cold, off": (False, False, False, False),
    FRESH: (True, False, True, False),
    "warm, on, header present": (True, True, True, False),
    OFF: (False, False, True, False),
    FRESH_SKIPPED: (True, False, True, True),
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
    command = ["-c", LAZY if lazy else PLAIN, harness.MODELS, "--model", model]
    found: dict[str, Any] = harness.fresh(command, harness.clean_environment(**variables))
    return found


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
            harness.note(f"{name}: {result['first_seconds']:.2f} s")
            shutil.rmtree(cache)
            shutil.rmtree(root / "empty", ignore_errors=True)
    return seconds


def main() -> int:
    """Measure, print, write."""
    asked = harness.arguments(
        __doc__, rounds=3, model=("", "of tests/e2e/models.py (default tx4; mlp if quick)")
    )
    model = asked.model or ("mlp" if asked.quick else "tx4")
    with tempfile.TemporaryDirectory() as root:
        seconds = measure(model, asked.rounds, Path(root))
    middle = {name: harness.median(found) for name, found in seconds.items()}
    rows = [(n, middle[n], harness.spread(seconds[n]), middle[n] / middle[OFF]) for n in CASES]
    harness.table(model, ("case", "median s", "spread s", "x warm, off"), rows)
    targets = [
        harness.target("fresh machine, headers skipped ÷ off", middle[FRESH_SKIPPED] / middle[OFF], 1.25),
        harness.target(
            "fresh machine, made ÷ skipped", middle[FRESH] / middle[FRESH_SKIPPED], 2, at_most=False
        ),
    ]
    results = {"model": model, "seconds": seconds}
    return harness.finish("precompiled_headers", results, targets, asked.out)


if __name__ == "__main__":
    sys.exit(main())
