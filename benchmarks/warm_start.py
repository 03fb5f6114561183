# SPDX-License-Identifier: Apache-2.0
"""Time to the first result of a fresh process: cold, warm directory, Mega-Cache, torchrelay.

    python benchmarks/warm_start.py [--quick] [--out FILE] [--rounds N] [--models mlp,tx4]

Forward and backward. Importing torch and the modules of its compiler, which are the same for all, is left
out and shown in a column of its own. One user compiles cold, saves a Mega-Cache blob
and pushes. The warm directory is that user's own, precompiled headers included. Mega-Cache and
torchrelay start each time as another user with an empty home, cache and temporary directory: a fresh
machine. The times of both include loading the blob, and the pull with importing torchrelay.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

PROGRAM = Path(__file__).with_name("first_call.py")
COLD, WARM, MEGA, RELAY = "cold", "warm local directory", "Mega-Cache", "torchrelay"


class Place:
    """Where one model is measured."""

    def __init__(self, root: Path, model: str) -> None:
        from torchrelay.signing import trust

        self.root = root / model
        self.root.mkdir(mode=0o700)
        self.model = model
        self.store, self.config, self.blob = (self.root / n for n in ("store", "config", "mega.bin"))
        trust.first_use(self.config)

    def run(self, name: str, user: str, *options: str | Path) -> dict[str, Any]:
        """One process of ``user``; its counters must say what ``name`` promises."""
        home = self.root / "homes" / user
        cache = home / "cache-of-its-own" / "inductor"
        environment = harness.user_environment(home, user, TORCHINDUCTOR_CACHE_DIR=str(cache))
        fixed = ["--model", self.model, "--store", self.store, "--config", self.config]
        found: dict[str, Any] = harness.fresh([PROGRAM, *fixed, *options], environment)
        counters = found["counters"]
        hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
        if (hits > 0 and misses == 0) != (name != COLD):
            raise SystemExit(f"{name}: expected {'misses' if name == COLD else 'hits'}, got {counters}")
        harness.note(f"{self.model}: {name}: {found['seconds']:.2f} s")
        return found

    def cold(self) -> dict[str, Any]:
        """The compile that the others start from."""
        return self.run(COLD, "producer", "--save-mega", self.blob, "--push")

    def rounds(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """The three ways, in turn."""
        ways = {WARM: [], MEGA: ["--load-mega", self.blob], RELAY: ["--pull"]}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for turn in range(count):
            for number, (name, options) in enumerate(ways.items()):
                user = "producer" if name == WARM else f"user-{turn}-{number}"
                found[name].append(self.run(name, user, *options))
                if name != WARM:
                    shutil.rmtree(self.root / "homes" / user)
        return found


def show(model: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Print the table of one model; its targets."""
    middle = {name: harness.median(r["seconds"] for r in runs) for name, runs in found.items()}
    rows = [
        (
            name,
            middle[name],
            harness.spread([r["seconds"] for r in runs]),
            harness.median(r["fill_seconds"] for r in runs),
            harness.median(r["call_seconds"] for r in runs),
            harness.median(r["import_seconds"] for r in runs),
            middle[name] / middle[WARM],
        )
        for name, runs in found.items()
    ]
    columns = ("way", "median s", "spread", "of it filling", "of it first call", "torch imports", "x warm")
    harness.table(f"{model}: {len(found[RELAY])} rounds", columns, rows)
    targets = [
        harness.target(f"{model}: torchrelay / warm local directory", middle[RELAY] / middle[WARM], 1.5)
    ]
    ratio = middle[MEGA] / middle[RELAY]
    if model == "tx4":
        return [*targets, harness.target(f"{model}: Mega-Cache / torchrelay", ratio, 6.0, at_most=False)]
    print(f"\n{model}: Mega-Cache / torchrelay {ratio:.2f}")
    return targets


def main() -> int:
    """Measure, print, write."""
    asked = harness.arguments(__doc__, rounds=3, models=("mlp,tx4", "which models of tests/e2e/models.py"))
    models = ["mlp"] if asked.quick else asked.models.split(",")
    results: dict[str, Any] = {}
    targets: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as root:
        for model in models:
            place = Place(Path(root), model)
            results[model] = {COLD: [place.cold()]} | place.rounds(asked.rounds)
            targets += show(model, results[model])
    return harness.finish("warm_start", {"models": results}, targets, asked.out)


if __name__ == "__main__":
    sys.exit(main())
