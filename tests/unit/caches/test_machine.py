# SPDX-License-Identifier: Apache-2.0
"""The environment of this process: complete, quick, and the same on identical machines."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrelay.caches import machine
from torchrelay.environment import FACETS, SETTINGS

SOURCES = str(Path(machine.__file__).parents[2])
PROGRAM = """
import json, sys, time
import torch
before = time.process_time(), set(sys.modules)
from torchrelay.caches import machine
environment = machine.this_environment()
spent = time.process_time() - before[0]
again = []
for _ in range(2):
    machine._fixed_facets.cache_clear(); machine._all_flags.cache_clear()
    start = time.process_time(); machine.this_environment(); again.append(time.process_time() - start)
print(json.dumps({
    "text": environment.encode().decode(), "digest": environment.digest, "seconds": min(spent, *again),
    "cuda": torch.cuda.is_initialized(), "inductor": "torch._inductor.config" in sys.modules,
    "torch": torch.__version__, "file": torch.__file__,
}))
"""


def run(program: str, *, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python process; torch is found wherever this one finds it."""
    path = os.pathsep.join(filter(None, (variables.pop("first", ""), SOURCES, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


def answer(program: str, **options: Any) -> Any:
    done = run(program, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    pytest.importorskip("torch")
    found: dict[str, Any] = answer(PROGRAM)
    return found


def test_every_facet_and_setting_is_stated(here: dict[str, Any]) -> None:
    document = json.loads(here["text"])
    optional = {name for name, facet in FACETS.items() if facet.optional}
    assert set(document["facets"]) | optional == set(FACETS)
    assert set(document["settings"]) == set(SETTINGS)
    assert ("cpu_threads" in document["facets"]) is (machine._release(here["torch"]) < (2, 13))


def test_it_costs_less_than_200_ms_and_loads_nothing_heavy(here: dict[str, Any]) -> None:
    assert here["seconds"] < 0.2
    assert not here["inductor"]
    assert not here["cuda"]


def test_no_path_host_or_user_is_in_it(here: dict[str, Any]) -> None:
    document = json.loads(here["text"])
    texts = json.dumps([document["facets"], document["settings"]])
    assert "/" not in texts
    assert "\\" not in texts
    for private in (platform.node(), str(Path.home()), sys.prefix, platform.release()):
        if len(private) > 3:
            assert private not in texts


def test_identical_machines_have_one_digest(here: dict[str, Any], tmp_path: Path) -> None:
    # A venv elsewhere: the same packages, found under another path.
    packages = Path(here["file"]).parents[1]
    link = tmp_path / "venv-of-another-user"
    link.symlink_to(packages)
    (tmp_path / "home").mkdir()
    other = answer(
        PROGRAM,
        cwd=tmp_path,
        first=str(link),
        HOME=str(tmp_path / "home"),
        USER="somebody",
        LOGNAME="somebody",
        HOSTNAME="pod-7f9c",
        TMPDIR=str(tmp_path),
        TZ="Asia/Kathmandu",
        PYTHONHASHSEED="4242",
        LANG="C",
        LC_ALL="C",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TORCHRELAY_URL="file:///nowhere",
    )
    assert other["file"] != here["file"]
    assert other["digest"] == here["digest"]


def test_key_affecting_settings_change_the_digest(here: dict[str, Any]) -> None:
    other = answer(PROGRAM, TORCH_COMPILE_CACHE_KEY_TAG="v2", OMP_NUM_THREADS="1")
    assert other["digest"] != here["digest"]
    before, after = json.loads(here["text"]), json.loads(other["text"])
    assert after["settings"]["cache_key_tag"] == "v2"
    assert after["settings"]["threads"] == "1"
    before["facets"].pop("cpu_threads", None), after["facets"].pop("cpu_threads", None)
    assert before["facets"] == after["facets"]


def test_the_source_hash_is_pytorchs_own_key(here: dict[str, Any]) -> None:
    key = answer(
        "import json; from torch._inductor.codecache import torch_key; print(json.dumps(torch_key().hex()))"
    )
    assert json.loads(here["text"])["facets"]["torch"] == f"{here['torch']} {key}"


def test_without_torch_the_error_says_what_to_do() -> None:
    done = run(
        "import sys; sys.modules['torch'] = None\n"
        "from torchrelay.caches.machine import this_environment, this_hints\n"
        "from torchrelay.errors import UsageError\n"
        "for call in (this_environment, this_hints):\n"
        "    try: call()\n"
        "    except UsageError as exc: print(exc.diagnostics())\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch is needed to compute this machine's environment") == 2
    assert done.stdout.count("--environment FILE") == 2


def test_hints_are_for_people(here: dict[str, Any]) -> None:
    hints = answer(
        "import json, msgspec; from torchrelay.caches.machine import this_hints\n"
        "print(json.dumps(msgspec.to_builtins(this_hints())))",
        CXX="no-such-compiler",
    )
    assert hints["install_prefix"] == sys.prefix
    assert hints["compiler"] == "no-such-compiler: not found"
    assert hints["torch_directory"] == str(Path(here["file"]).parent)


# --- the hash of torch's sources ----------------------------------------------------------------


def make_torch(root: Path) -> Path:
    (root / "nn" / "deep").mkdir(parents=True)
    (root / "data").mkdir()
    for name in ("__init__.py", "a.py", "nn/__init__.py", "nn/layer.py", "nn/deep/__init__.py", "data/x.py"):
        (root / name).write_text(f"# {name}\n")
    return root


def test_edited_sources_are_another_build(tmp_path: Path) -> None:
    torch = make_torch(tmp_path / "torch")
    first = machine.source_hash(torch, "2.13.0")
    assert machine.source_hash(make_torch(tmp_path / "elsewhere" / "torch"), "2.13.0") == first
    assert machine.source_hash(torch, "2.13.1") != first
    (torch / "__pycache__").mkdir()
    (torch / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (torch / "data" / "x.py").write_text("not part of a package\n")
    (torch / "notes.txt").write_text("x")
    assert machine.source_hash(torch, "2.13.0") == first
    (torch / "nn" / "layer.py").write_text("# edited\n")
    assert machine.source_hash(torch, "2.13.0") != first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '3.9.0'\n", "3.9.0"),
        ('"""Triton"""\n__version__ = "3.9.0+git1a2b"\n', "3.9.0+git1a2b"),
        ("version = 1\n", "unknown"),
    ],
)
def test_triton_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(text + "raise SystemExit('imported')\n")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert machine._triton_version() == expected


def test_no_triton_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert machine._triton_version() == "none"


# --- CPU ----------------------------------------------------------------------------------------

SKYLAKE = frozenset("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512cd".split())  # noqa: SIM905
ICELAKE = SKYLAKE | {"avx512_vnni"}
SAPPHIRE = ICELAKE | {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}
HASWELL = frozenset({"avx2", "fma", "f16c"})


@pytest.mark.parametrize(
    ("flags", "capability", "simdlen", "expected"),
    [
        (SKYLAKE, None, None, ("avx512",)),
        (ICELAKE, None, None, ("avx512", "avx512_vnni")),
        (
            SAPPHIRE,
            None,
            None,
            ("amx_bf16", "amx_int8", "amx_tile", "avx512", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
        ),
        (
            SAPPHIRE,
            "avx512",
            None,
            ("amx_bf16", "amx_int8", "amx_tile", "avx512", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
        ),
        (ICELAKE, "avx2", None, ("avx2",)),
        (ICELAKE, "default", None, ()),
        (ICELAKE, "nonsense", None, ("avx512", "avx512_vnni")),
        (ICELAKE, "default", 512, ("avx512", "avx512_vnni")),
        (ICELAKE, None, 256, ("avx2",)),
        (ICELAKE, None, 1, ()),
        (HASWELL, None, None, ("avx2",)),
        (HASWELL, "avx512", None, ("avx2",)),
        (HASWELL, None, 512, ()),
        (HASWELL | {"avx512f"}, None, None, ("avx2",)),
        (frozenset({"ssse3"}), None, None, ()),
    ],
)
def test_vector_extensions_follow_inductor(
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    capability: str | None,
    simdlen: int | None,
    expected: tuple[str, ...],
) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if capability is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    assert machine._vector_isa("x86_64", flags, simdlen) == expected


def test_other_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert machine._vector_isa("aarch64", frozenset({"asimd", "sve", "bf16"}), None) == ("bf16", "sve")
    # `valid_vec_isa_list`: SVE or SVE2 only with bf16, else NEON. Graviton2, Apple M2, A64FX.
    for flags in ({"asimd"}, {"asimd", "bf16"}, {"asimd", "sve"}):
        assert machine._vector_isa("aarch64", frozenset(flags), None) == ("neon",)
    assert machine._vector_isa("riscv64", frozenset(), None) == ()


# --- libraries ----------------------------------------------------------------------------------


def elf(*needed: str) -> bytes:
    """A 64-bit ELF file that consists of a dynamic section and its strings."""
    strings, offsets = b"\0", []
    for name in needed:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    dynamic = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets) + struct.pack("<QQ", 0, 0)
    at_strings, at_dynamic = 64, 64 + len(strings)
    sections = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at_strings, len(strings), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 6, 0, 0, at_dynamic, len(dynamic), 1, 0, 8, 16)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 40, at_dynamic + len(dynamic))
    struct.pack_into("<HHH", header, 58, 64, 3, 1)
    return bytes(header) + strings + dynamic + sections


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (("libc10.so", "libgomp.so.1"), "libgomp"),
        (("libc10.so", "libgomp-98b21ff3.so.1.0.0", "libc.so.6"), "libgomp"),
        (("libiomp5.so",), "libiomp5"),
        (("libomp.so.5",), "libomp"),
        (("libompi.so", "libc.so.6"), "none"),
        ((), "none"),
    ],
)
def test_the_openmp_runtime_is_the_one_torch_is_linked_to(
    tmp_path: Path, needed: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "libtorch_cpu.so").write_bytes(elf(*needed))
    assert tuple(machine.needed_libraries(tmp_path / "libtorch_cpu.so")) == needed
    assert machine._openmp(tmp_path) == expected


def test_a_damaged_library_is_no_error(tmp_path: Path) -> None:
    whole = elf("libc10.so", "libgomp.so.1")
    assert machine._openmp(tmp_path) == "none"
    for length in range(len(whole)):
        (tmp_path / "libtorch_cpu.so").write_bytes(whole[:length])
        assert machine._openmp(tmp_path) in ("none", "libgomp")
    for at in range(len(whole)):
        (tmp_path / "libtorch_cpu.so").write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        assert machine._openmp(tmp_path) in ("none", "libgomp")


# --- GPU ----------------------------------------------------------------------------------------


class Nvml:
    """The management library's interface; ``broken`` makes one call fail."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "nvmlDeviceGetHandleByIndex_v2":
                self.asked.append(arguments[0].value)
            elif name == "nvmlDeviceGetName":
                arguments[1].value = b"NVIDIA H200"
            elif name == "nvmlDeviceGetCudaComputeCapability":
                arguments[1]._obj.value, arguments[2]._obj.value = 9, 0
            return 999 if name == self.broken else 0

        return call


def fake_torch(
    *, cuda: str | None = "13.0", hip: str | None = None, count: int = 1, ready: bool = False
) -> Any:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-")
    gpu = SimpleNamespace(
        device_count=lambda: count,
        is_initialized=lambda: ready,
        current_device=lambda: 0,
        get_device_properties=lambda _: properties,
        _get_nvml_device_index=lambda _: 3,
    )
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda, hip=hip), cuda=gpu)


def test_a_gpu_is_read_without_initialising_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, torch = Nvml(), fake_torch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
    torch.cuda.get_device_properties = None  # calling it would be an error
    assert machine._gpu(torch) == ("NVIDIA H200", "sm_90")
    assert nvml.asked == [3]


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetName", "nvmlDeviceGetCudaComputeCapability"])
def test_if_the_driver_library_fails_torch_is_asked(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Nvml(broken))
    torch = fake_torch()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="slice", major=8, minor=9)
    assert machine._gpu(torch) == ("slice", "sm_89")


def test_a_slice_of_a_gpu_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Nvml())
    torch = fake_torch()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="H200 MIG 1g", major=9, minor=0)
    assert machine._gpu(torch) == ("H200 MIG 1g", "sm_90")


def test_rocm_and_no_gpu() -> None:
    assert machine._gpu(fake_torch(cuda=None, hip="6.4")) == ("NVIDIA H200", "gfx942:sramecc+:xnack-")
    assert machine._gpu(fake_torch(cuda=None)) == ("none", "none")
    assert machine._gpu(fake_torch(count=0)) == ("none", "none")
    broken = fake_torch(ready=True)
    broken.cuda.current_device = lambda: (_ for _ in ()).throw(RuntimeError("no driver"))
    assert machine._gpu(broken) == ("none", "none")
