# SPDX-License-Identifier: Apache-2.0
"""The environment of this process: read, never measured by compiling or running anything.

``docs/reference/environment.md``. Two machines that would compile the same must get the same
digest, so nothing here depends on a path, a name of host or user, a process, or the time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrelay.caches import settings
from torchrelay.environment import ABSENT, FORMAT, Environment, FacetValue, Hints
from torchrelay.errors import UsageError

_X86_FLAGS = """
abm adx aes amx_bf16 amx_complex amx_fp16 amx_int8 amx_tile apx_f avx avx10_1 avx10_2 avx2 avx512_4fmaps
avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect
avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512pf avx512vbmi avx512vl
avx_ifma avx_ne_convert avx_vnni avx_vnni_int16 avx_vnni_int8 bmi1 bmi2 cx16 f16c fma fma4 gfni lahf_lm
movbe pclmulqdq pni popcnt 3dnowprefetch sha512 sha_ni sm3 sm4 sse4_1 sse4_2 sse4a ssse3 tbm vaes
vpclmulqdq xop
"""
_ARM_FLAGS = """
aes asimd asimddp asimdfhm asimdhp asimdrdm atomics bf16 crc32 dotprod fcma flagm flagm2 fp fphp frint i8mm
jscvt lrcpc pmull sha1 sha2 sha3 sha512 sm3 sm4 sme sme2 sve sve2 sve2p1 svebf16 svef32mm svef64mm svei8mm
uscat
"""
_OTHER_FLAGS = "altivec vsx vx vxd vxe vxe2 vxp zfh zba zbb zbs"
NATIVE_FLAGS = frozenset((_X86_FLAGS + _ARM_FLAGS + _OTHER_FLAGS).split())
"""What a compiler may use under ``-march=native`` for plain or vector code, as Linux names it. A
fixed list, because raw cpuinfo also changes with the kernel, the hypervisor and its mitigations."""

_TORCH_NEEDED = "torch is needed to compute this machine's environment"


def this_environment() -> Environment:
    """The environment of this process, which is computed anew: settings may change in between.

    It must be called where the compiles happen, or in a process started like it: ATen reads
    ``ATEN_CPU_CAPABILITY`` once, here if nothing did before.

    Raises:
        UsageError: torch cannot be imported.
    """
    torch = _import_torch()
    facets = dict(_fixed_facets())
    facets["cpu_isa"] = str(torch.backends.cpu.get_cpu_capability()).lower()
    facets["vector_isa"] = _vector_isa(platform.machine(), _all_flags(), settings.simdlen())
    if _release(torch.__version__) < (2, 13):
        facets["cpu_threads"] = settings.threads(torch)
    return Environment(FORMAT, facets, settings.this_settings())


def this_hints() -> Hints:
    """What explains a miss on this machine beyond its environment; for display only.

    Raises:
        UsageError: torch cannot be imported.
    """
    torch = _import_torch()
    return Hints(
        install_prefix=sys.prefix,
        torch_directory=str(Path(torch.__file__).parent),
        cache_directory=os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""),
        triton_directory=os.environ.get("TRITON_CACHE_DIR", ""),
        compiler=_compiler_version(os.environ.get("CXX", "g++")),
        cpu_model=_cpuinfo_field(("model name", "Model", "cpu", "Processor")),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        host=platform.node(),
    )


def _import_torch() -> Any:
    try:
        import torch
    except (ImportError, OSError) as exc:
        raise UsageError(
            f"{_TORCH_NEEDED}: {exc}",
            remedy="Run this where torch is installed, or give another machine's with --environment FILE.",
            subject="torch",
        ) from exc
    return torch


@functools.cache
def _fixed_facets() -> tuple[tuple[str, FacetValue], ...]:
    """The facets that cannot change while this process runs."""
    torch = _import_torch()
    directory = Path(torch.__file__).parent
    gpu_name, gpu_arch = _gpu(torch)
    facets: dict[str, FacetValue] = {
        "torch": f"{torch.__version__} {source_hash(directory, torch.__version__)}",
        "triton": _triton_version(),
        "python": f"{sys.implementation.name}-{sys.version_info[0]}.{sys.version_info[1]}{_abi()}",
        "machine": platform.machine().lower(),
        "cuda": str(torch.version.cuda or ABSENT),
        "hip": str(getattr(torch.version, "hip", None) or ABSENT),
        "gpu_name": gpu_name,
        "gpu_arch": gpu_arch,
        "openmp": _openmp(directory / "lib"),
        "glibc": _glibc(),
        "libstdcxx": _libstdcxx(),
        "cpu_flags": tuple(sorted(_all_flags() & NATIVE_FLAGS)),
    }
    return tuple(facets.items())


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.match(r"\d*", minor).group() or 0)  # type: ignore[union-attr]


def _abi() -> str:
    return getattr(sys, "abiflags", "")


# --- torch and triton -------------------------------------------------------------------------


def source_hash(directory: Path, version: str) -> str:
    """``torch._inductor.codecache.torch_key()`` in hex, without importing Inductor, which takes a second.

    A hash of every Python source of torch, so that an edited or nightly build of one version is
    another build. Where a future torch hashes otherwise, this is still one value per build.
    """
    hasher = hashlib.sha256(version.encode())
    _hash_modules(str(directory), "", hasher)
    for extra in ("_inductor/codegen/aoti_runtime/interface.cpp", "_inductor/script.ld"):
        path = directory / extra
        if path.exists():
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _hash_modules(directory: str, prefix: str, hasher: Any) -> None:
    for name, (path, package) in sorted(_modules(directory).items()):
        hasher.update(f"{prefix}{name}".encode())
        with open(path, "rb") as file:  # noqa: PTH123 - 2,000 files: Path costs a third more
            hasher.update(file.read())
        if package:
            _hash_modules(f"{directory}/{name}", f"{prefix}{name}.", hasher)


def _modules(directory: str) -> dict[str, tuple[str, bool]]:
    """What the import system finds in a directory: packages before modules, binaries before sources."""
    found: dict[str, tuple[int, str, bool]] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            name, rank = _module_name(entry)
            if name is None or "." in name or name == "__init__":
                continue
            package = rank < 0
            path = f"{entry.path}/__init__.py" if package else entry.path
            if name not in found or rank < found[name][0]:
                found[name] = (rank, path, package)
    return {name: (path, package) for name, (_, path, package) in found.items()}


_SUFFIXES = (*importlib.machinery.EXTENSION_SUFFIXES, *importlib.machinery.SOURCE_SUFFIXES)


def _module_name(entry: os.DirEntry[str]) -> tuple[str | None, int]:
    if "." not in entry.name:
        is_package = entry.is_dir() and os.path.isfile(f"{entry.path}/__init__.py")  # noqa: PTH113
        return (entry.name, -1) if is_package else (None, 0)
    name = inspect.getmodulename(entry.name)
    rank = next((i for i, suffix in enumerate(_SUFFIXES) if entry.name.endswith(suffix)), None)
    return (None, 0) if name is None or rank is None else (name, rank)


def _triton_version() -> str:
    """From the source, since importing Triton takes long and may load a driver."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return ABSENT
    if spec is None or spec.origin is None:
        return ABSENT
    try:
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ABSENT
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]{1,100})['\"]", text, re.MULTILINE)
    return match.group(1) if match else "unknown"


# --- GPU --------------------------------------------------------------------------------------


def _gpu(torch: Any) -> tuple[str, str]:
    """Model and architecture of the current GPU; ``none`` twice where PyTorch's keys have no GPU either."""
    if not (torch.version.cuda or getattr(torch.version, "hip", None)) or torch.cuda.device_count() == 0:
        return ABSENT, ABSENT
    if torch.version.cuda and not torch.cuda.is_initialized():
        # Initialising CUDA here would cost a context and break children that are forked later.
        found = _gpu_by_nvml(torch)
        if found is not None:
            return found
    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    except (RuntimeError, AssertionError):
        return ABSENT, ABSENT
    if torch.version.cuda:
        return str(properties.name), f"sm_{properties.major}{properties.minor}"
    return str(properties.name), str(properties.gcnArchName)


def _gpu_by_nvml(torch: Any, library: str = "libnvidia-ml.so.1") -> tuple[str, str] | None:
    """The same two values from the driver's management library, or ``None`` if it cannot tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "MIG" in visible:  # NVML names the whole GPU, CUDA the slice
        return None
    try:
        nvml = ctypes.CDLL(library)
        index = int(torch.cuda._get_nvml_device_index(0))
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        steps = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
            nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)),
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
        )
        nvml.nvmlShutdown()
    except (OSError, AttributeError, RuntimeError, ValueError):
        return None
    if any(steps):
        return None
    return name.value.decode("utf-8", "replace"), f"sm_{major.value}{minor.value}"


# --- CPU --------------------------------------------------------------------------------------


@functools.cache
def _all_flags() -> frozenset[str]:
    """All flags of this CPU, as Linux names them; elsewhere what torch itself detects."""
    text = _cpuinfo_field(("flags", "Features", "features", "isa"))
    if text:
        return frozenset(re.split(r"[\s_]+" if text.startswith("rv") else r"\s+", text))
    read = getattr(_import_torch().cpu, "get_capabilities", None)
    capabilities: dict[str, object] = {} if read is None else dict(read())
    names = (name for name, present in capabilities.items() if present is True)
    return frozenset(_LINUX_NAMES.get(name, name) for name in names)


_LINUX_NAMES = {
    **{f"avx512_{x}": f"avx512{x}" for x in ("f", "bw", "cd", "dq", "vl", "vbmi", "ifma")},
    "fma3": "fma",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "sse3": "pni",
    "sha": "sha_ni",
}


def _cpuinfo_field(names: tuple[str, ...]) -> str:
    """The first value of one of these fields of ``/proc/cpuinfo``, of the first processor only."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                field, _, value = line.partition(":")
                if field.strip() in names:
                    return value.strip()
    except OSError:
        return ""
    return ""


def _vector_isa(machine: str, flags: frozenset[str], simdlen: int | None) -> tuple[str, ...]:
    """The vector extensions that Inductor would pick, and those that change what it generates.

    Follows ``torch._inductor.cpu_vec_isa.pick_vec_isa``, which compiles and loads probes to find
    out whether the compiler works; here it is taken to work.
    """
    if machine in ("x86_64", "AMD64"):
        return _x86_vectors(flags, simdlen)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default" and simdlen is None:
        return ()
    if machine == "aarch64":
        # Their length, 128 or 256 bits, shows in `cpu_isa`.
        vectors = flags & {"sve", "sve2", "bf16"}
        return tuple(sorted(vectors)) if "bf16" in vectors and len(vectors) > 1 else ("neon",)
    return {"arm64": ("neon",), "ppc64le": ("vsx",), "s390x": ("zvector",)}.get(machine, ())


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


def _x86_vectors(flags: frozenset[str], simdlen: int | None) -> tuple[str, ...]:
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    widths = [bits for bits, needed in ((512, _AVX512), (256, {"avx2"})) if flags >= needed]
    if simdlen is not None:
        width = simdlen if simdlen in widths else 0
    elif capability in ("avx2", "default"):
        width = 256 if capability == "avx2" and widths else 0
    else:
        width = max(widths, default=0)
    if width == 512:
        # AMX and VNNI have kernels of their own; bf16 and fp16 change which fusions are taken.
        extras = {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"}
        return tuple(sorted({"avx512"} | (flags & extras)))
    return ("avx2",) if width == 256 else ()


# --- libraries --------------------------------------------------------------------------------


def _glibc() -> str:
    try:
        found = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ABSENT
    name, _, version = found.partition(" ")
    return version if name == "glibc" and version else ABSENT


def _libstdcxx() -> str:
    """The highest ``GLIBCXX`` version of the library that this process has loaded with torch."""
    path = _loaded("libstdc++.so")
    if path is None:
        return ABSENT
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = {tuple(map(int, m.split(b"."))) for m in re.findall(rb"GLIBCXX_(3\.4(?:\.\d+)?)\0", data)}
    except (OSError, ValueError):
        return ABSENT
    return ".".join(map(str, max(found))) if found else ABSENT


def _loaded(name: str) -> Path | None:
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                path = line.rstrip("\n").partition("/")[2]
                if path.rpartition("/")[2].startswith(name):
                    return Path("/" + path)
    except OSError:
        return None
    return None


def _openmp(directory: Path) -> str:
    """The OpenMP runtime that ``libtorch_cpu`` asks the loader for; two in one process do not mix."""
    try:
        needed = list(needed_libraries(directory / "libtorch_cpu.so"))
    except (OSError, ValueError, IndexError, OverflowError, struct.error):
        needed = [path.name for path in directory.glob("lib*omp*.dylib")]
    for soname in needed:
        # auditwheel adds a hash of the file: libgomp-98b21ff3.so.1
        match = re.match(r"(libgomp|libiomp5|libomp)\b", soname)
        if match:
            return match.group(1)
    return ABSENT


def needed_libraries(path: Path) -> Iterator[str]:
    """The ``DT_NEEDED`` names of a 64-bit little-endian ELF file.

    Raises:
        ValueError: Not such a file.
        struct.error, IndexError, OverflowError: A damaged one.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path.name} is not a 64-bit little-endian ELF file")
        offset, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * i) for i in range(count)]
        for section in sections:
            if section[1] != 6:  # SHT_DYNAMIC
                continue
            strings = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == 1:  # DT_NEEDED
                    start = strings + value
                    yield data[start : data.find(b"\0", start)].decode("ascii", "replace")


def _compiler_version(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        return f"{command}: not found"
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return f"{command}: cannot be run"
    return answer.stdout.decode("utf-8", "replace").partition("\n")[0][:200]
