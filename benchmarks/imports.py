# SPDX-License-Identifier: Apache-2.0
"""What `import torchrelay` and `torchrelay --help` take beyond bare Python.

    python benchmarks/imports.py [--quick] [--out FILE] [--rounds N]

Fresh processes in turn, medians of wall-clock and of CPU time. For comparison: `import json, http.client`,
which many programs import anyway.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import harness

BARE, IMPORT, HELP = "bare Python", "import torchrelay", "torchrelay --help"
COMMANDS = {
    BARE: ["-c", "pass"],
    IMPORT: ["-c", "import torchrelay"],
    "import torchrelay.relay": ["-c", "import torchrelay.relay"],
    HELP: ["-m", "torchrelay", "--help"],
    "import json, http.client": ["-c", "import json, http.client"],
}


def once(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure, print, write."""
    asked = harness.arguments(__doc__, rounds=20)
    environment = harness.clean_environment()
    for command in COMMANDS.values():
        once(command, environment)  # compiles to bytecode
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(max(asked.rounds, 3)):
        for name, command in COMMANDS.items():
            found[name].append(once(command, environment))
    wall = {name: harness.median(w for w, _ in runs) * 1000 for name, runs in found.items()}
    cpu = {name: harness.median(c for _, c in runs) * 1000 for name, runs in found.items()}
    rows = [(n, wall[n], wall[n] - wall[BARE], cpu[n] - cpu[BARE]) for n in COMMANDS]
    columns = ("what", "median ms", "beyond bare Python, ms", "CPU ms beyond")
    harness.table(f"{len(found[BARE])} runs of each", columns, rows)
    targets = [
        harness.target("import torchrelay, ms beyond bare Python", wall[IMPORT] - wall[BARE], 50),
        harness.target("torchrelay --help, ms beyond bare Python", wall[HELP] - wall[BARE], 200),
    ]
    return harness.finish("imports", {"wall_ms": wall, "cpu_ms": cpu}, targets, asked.out)


if __name__ == "__main__":
    sys.exit(main())
