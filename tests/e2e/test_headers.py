# SPDX-License-Identifier: Apache-2.0
"""Precompiled headers at a warm start on a fresh machine (ADR 0005), with real compiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machines import Machine

from torchrelay.caches import settings

MODELS = Path(__file__).with_name("models.py")
SOURCES = str(Path(settings.__file__).parents[2])

pytestmark = pytest.mark.torch


def first_call(cache: Path, temporary: Path, *flags: str) -> dict[str, Any]:
    temporary.mkdir(exist_ok=True)
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TMPDIR": str(temporary),
        "PYTHONPATH": SOURCES,
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1",
    }
    command = [sys.executable, str(MODELS), "--model", "mlp", "--forward-only", *flags]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def headers(temporary: Path) -> list[Path]:
    return list(temporary.glob("torchinductor_*/precompiled_headers/*.gch"))


def test_a_warm_start_makes_no_header_and_a_missing_kernel_does(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = first_call(tmp_path / "made", tmp_path / "tmp-made")
    assert made["counters"]["fxgraph_cache_miss"] == 1
    assert headers(tmp_path / "tmp-made")  # else this test shows nothing

    shutil.copytree(tmp_path / "made", tmp_path / "plain")
    plain = first_call(tmp_path / "plain", tmp_path / "tmp-plain")
    assert plain["counters"]["fxgraph_cache_hit"] == 1
    assert headers(tmp_path / "tmp-plain")  # what PyTorch does by itself

    shutil.copytree(tmp_path / "made", tmp_path / "skipped")
    skipped = first_call(tmp_path / "skipped", tmp_path / "tmp-skipped", "--skip-headers")
    assert skipped["counters"]["fxgraph_cache_hit"] == 1  # under the same key
    assert headers(tmp_path / "tmp-skipped") == []
    assert skipped["result_sha256"] == made["result_sha256"]

    kernels = list((tmp_path / "skipped").glob("*/*.main.so"))
    kernels[0].unlink()
    healed = first_call(tmp_path / "skipped", tmp_path / "tmp-skipped", "--skip-headers")
    assert headers(tmp_path / "tmp-skipped")
    assert sorted((tmp_path / "skipped").glob("*/*.main.so")) == sorted(kernels)  # under the same name
    assert healed["result_sha256"] == made["result_sha256"]


def test_the_variable_on_both_sides_spares_plain_python_the_header_and_on_one_side_it_is_told(
    tmp_path: Path,
) -> None:
    """The way of `docs/how-to/start-fast.md` for a pull whose consumer knows nothing of torchrelay."""
    pytest.importorskip("torch")
    off = settings.recommended_exports()
    store = (str(tmp_path / "store"), "-w", "acme/mlp")
    builder = Machine(tmp_path / "builder", variables=off)
    builder.model("--model", "mlp", "--forward-only")
    pushed = builder.relay("push", *store, "--assume-environment", "this")
    assert pushed["warnings"] == []

    (tmp_path / "tmp").mkdir()
    without = Machine(tmp_path / "without", user="a", variables={"TMPDIR": str(tmp_path / "tmp")})
    without.trusts(builder)
    [told] = without.relay("pull", *store)["warnings"]
    [(name, value)] = off.items()
    assert f"export {name}={value}" in told

    fast = Machine(tmp_path / "fast", user="b", variables={"TMPDIR": str(tmp_path / "tmp"), **off})
    fast.trusts(builder)
    pulled = fast.relay("pull", *store)
    assert (pulled["warnings"], pulled["installed"]) == ([], pushed["pushed"])
    counters = fast.model("--model", "mlp", "--forward-only")["counters"]
    assert (counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]) == (1, 0)
    assert headers(tmp_path / "tmp") == []
