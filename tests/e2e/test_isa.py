# SPDX-License-Identifier: Apache-2.0
"""Instruction sets: PyTorch's keys do not know them, so torchrelay's facets must.

A cache made under AVX-512 is *hit* under ``ATEN_CPU_CAPABILITY=avx2`` and returns wrong numbers;
the other way round the heap is corrupted (``docs/reference/environment.md``).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrelay.caches import machine
from torchrelay.environment import REQUIRED_FACETS, Environment, mismatches, parse_environment, requires_of

MODELS = Path(__file__).with_name("models.py")
SOURCES = str(Path(machine.__file__).parents[2])
CAPABILITIES = ("avx512", "avx2", "default")
PAIRS = list(itertools.permutations(CAPABILITIES, 2))

pytestmark = pytest.mark.torch


def python(*arguments: str, capability: str, cache: Path | None = None) -> str:
    variables = {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": SOURCES}
    if cache is not None:
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def environments() -> dict[str, Environment]:
    pytest.importorskip("torch")
    if "avx512f" not in machine._all_flags():
        pytest.skip("needs a CPU with AVX-512")
    program = "from torchrelay.caches.machine import this_environment as e; print(e().encode().decode())"
    return {
        capability: parse_environment(python("-c", program, capability=capability).encode())
        for capability in CAPABILITIES
    }


@pytest.mark.parametrize(("made", "used"), PAIRS)
@pytest.mark.parametrize("what", ["inductor+cpp", "inductor+cpp+gpu", "cpp", "precompile", "tree"])
def test_what_holds_native_code_never_fits_another_instruction_set(
    environments: dict[str, Environment], made: str, used: str, what: str
) -> None:
    found = mismatches(requires_of(environments[made], REQUIRED_FACETS[what]), environments[used])
    assert {m.facet for m in found} == {"cpu_isa", "vector_isa"}
    assert all("ATEN_CPU_CAPABILITY" in m.remedy for m in found)


@pytest.mark.parametrize(("made", "used"), PAIRS)
@pytest.mark.parametrize("what", ["inductor", "aot_autograd", "triton", "triton+host", "pgo", "autotune"])
def test_what_holds_none_fits(environments: dict[str, Environment], made: str, used: str, what: str) -> None:
    assert not mismatches(requires_of(environments[made], REQUIRED_FACETS[what]), environments[used])


def keys(cache: Path) -> set[str]:
    return {
        path.parent.name
        for kind in ("fxgraph", "aotautograd")
        for path in (cache / kind).rglob("*")
        if path.is_file()
    }


def kernels(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/*.main.so")}


def test_pytorch_gives_both_instruction_sets_one_key_and_different_kernels(
    environments: dict[str, Environment], tmp_path: Path
) -> None:
    """The reason for the facets. If PyTorch closes the hole, this fails and the docs must say so."""
    results: dict[str, dict[str, Any]] = {}
    for capability in ("avx512", "avx2"):
        text = python(
            str(MODELS),
            "--model",
            "mlp",
            "--forward-only",
            capability=capability,
            cache=tmp_path / capability,
        )
        results[capability] = json.loads(text)
        assert results[capability]["max_error"] < 1e-4
    assert keys(tmp_path / "avx512") == keys(tmp_path / "avx2")
    assert kernels(tmp_path / "avx512").isdisjoint(kernels(tmp_path / "avx2"))
    kernels_disprove_a_false_environment(tmp_path / "avx2", tmp_path)


def kernels_disprove_a_false_environment(cache: Path, base: Path) -> None:
    """Compiled with AVX2, pushed by a shell that has lost the variable."""
    cache.chmod(0o700)
    store = base / "store"
    push = [
        "push",
        str(store),
        "-w",
        "a/b",
        "--cache-dir",
        str(cache),
        "--assume-environment",
        "this",
        "--json",
    ]
    before = {path for path in base.rglob("*") if path.is_file() and path.name != "index.json"}
    failed = relay(*push, home=base / "home", code=2)
    assert "was compiled for avx2" in failed["error"]["message"]
    assert "ATEN_CPU_CAPABILITY" in failed["error"]["remedy"]
    assert not any(store.rglob("*")), "nothing is stored"
    after = {p for p in cache.rglob("*") if p.is_file() and p.name != "index.json"}
    assert after <= before, "and no stamp says so"
    pushed = relay(*push, home=base / "home", code=0, ATEN_CPU_CAPABILITY="avx2")
    assert pushed["by_kind"]["cpp"] >= 3
    # Stamped as it is now, the directory says so by itself.
    assert relay(*push, home=base / "home", code=0)["held"] == pushed["pushed"]


def relay(*arguments: str, home: Path, code: int, **variables: str) -> dict[str, Any]:
    """What the command line prints as JSON."""
    kept = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    environment = kept | {"HOME": str(home), "XDG_CONFIG_HOME": "", "XDG_STATE_HOME": ""} | variables
    command = [sys.executable, "-W", "ignore", "-m", "torchrelay", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_vector_facet_is_what_inductor_picks(
    environments: dict[str, Environment], tmp_path_factory: pytest.TempPathFactory, capability: str
) -> None:
    cache = tmp_path_factory.getbasetemp() / "probes"  # compiled once for all three
    program = "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(pick_vec_isa())"
    picked = python("-c", program, capability=capability, cache=cache)
    facet = environments[capability].facets["vector_isa"]
    assert isinstance(facet, tuple)
    assert set(() if picked == "INVALID_VEC_ISA" else picked.split()) <= set(facet)
    assert bool(facet) is (picked != "INVALID_VEC_ISA")
