# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need no torch, at tiny sizes: they run, say what they measured, and add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FACTS = {"cpu", "cores", "ram_mib", "kernel", "python", "torch", "torchrelay", "load", "date"}


def run(tmp_path: Path, name: str, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| target |" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["benchmark"] == name
    assert found["machine"].keys() == FACTS
    return found


def test_scale(tmp_path: Path) -> None:
    found = run(tmp_path, "scale", "--entries", "12", "--size", "3000", "--kinds", "inductor,cpp")
    for kind in ("inductor", "cpp"):
        measured = found["kinds"][kind]
        phases = measured["results"]
        assert list(phases)[:4] == ["push", "idle push", "pull", "idle pull"]
        assert {"cp -r", "tar and untar", "Python loop", "Python loop, fsync"} < phases.keys()
        assert all(runs[0]["entries"] == 12 and runs[0]["seconds"] > 0 for runs in phases.values())
        assert 0 < measured["stored_bytes"] < measured["plain_bytes"]
        assert all(0 < share < 1 for share in measured["checks"].values())
        assert all(
            phases[name][0]["peak_kib"] > phases[name][0]["above_kib"] > 0 for name in phases if "pu" in name
        )


def test_imports(tmp_path: Path) -> None:
    found = run(tmp_path, "imports", "--rounds", "3")
    wall = found["wall_ms"]
    assert 0 < wall["bare Python"] < wall["import torchrelay"] < wall["import torchrelay.relay"]


SCRIPTS = ["warm_start", "stored_bytes", "scale", "imports", "precompiled_headers"]
OPTIONS = ("--quick", "--out", "--rounds")


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_takes_the_options_that_the_readme_promises(name: str) -> None:
    """Those that need torch compile for minutes; here they only say what they take."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(option in done.stdout for option in OPTIONS)
    assert f"python benchmarks/{name}.py [--quick] [--out FILE]" in done.stdout
    assert "harness.finish(" in (BENCHMARKS / f"{name}.py").read_text(), "targets and the machine's facts"


def test_the_readme_tells_of_each_file() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    assert [p.name for p in BENCHMARKS.glob("*.py") if f"`{p.name}`" not in readme] == []
    described = {line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")}
    assert described == {f"{name}.py" for name in SCRIPTS}
