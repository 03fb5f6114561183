# SPDX-License-Identifier: Apache-2.0
"""What a machine is, what an entry needs of one, and whether the two fit. Pure data in, data out.

``docs/reference/environment.md`` says why each facet is there and which entry needs it. Nothing
here looks at the machine: :mod:`torchrelay.caches.machine` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from torchrelay import canonjson
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import FormatError, UsageError
from torchrelay.limits import MAX_DOCUMENT_BYTES

FORMAT = 1
ABSENT = "none"
"""The value of a facet whose subject is not there: no GPU, no Triton, no glibc."""

FacetValue = str | int | tuple[str, ...]
Comparison = Literal["equal", "at_least", "superset", "unknown"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,7}")
_MAX_TEXT = 512
_MAX_ITEMS = 256
_MAX_MEMBERS = 64


@dataclass(frozen=True, slots=True)
class Facet:
    """One property of a machine that entries may need.

    Args:
        comparison: ``equal``; ``at_least`` (dotted numbers, this machine's not lower than the
            entry's); ``superset`` (this machine has everything that the entry lists).
        title: What it is, for people.
        remedy: What to do where it does not fit.
        optional: Whether an environment may leave it out; an entry made there does not need it.
    """

    comparison: Literal["equal", "at_least", "superset"]
    title: str
    remedy: str
    optional: bool = False


_OWN = "Compile once on this machine and push; both machines' entries live in one workload."

FACETS: dict[str, Facet] = {
    "torch": Facet(
        "equal",
        "PyTorch build: version, local tag, hash of its Python sources",
        "Install the very same torch build, from the same index, and do not edit its files.",
    ),
    "triton": Facet("equal", "Triton version", "Install the same triton version."),
    "python": Facet("equal", "Python implementation, minor version and ABI", "Use the same minor version."),
    "machine": Facet("equal", "CPU architecture", _OWN),
    "cuda": Facet(
        "equal", "CUDA toolkit of the torch build", "Install the torch build for that CUDA version."
    ),
    "hip": Facet(
        "equal", "ROCm version of the torch build", "Install the torch build for that ROCm version."
    ),
    "gpu_name": Facet("equal", "GPU model", _OWN),
    "gpu_arch": Facet("equal", "GPU architecture", _OWN),
    "cpu_isa": Facet(
        "equal",
        "instruction set that ATen dispatches to",
        "Set ATEN_CPU_CAPABILITY alike on both sides, if both CPUs allow it; else compile here and push.",
    ),
    "vector_isa": Facet(
        "equal",
        "vector extensions that Inductor generates C++ for",
        "Set ATEN_CPU_CAPABILITY alike on both sides, if both CPUs allow it; else compile here and push.",
    ),
    "openmp": Facet("equal", "OpenMP runtime that torch is linked to", "Install the same torch build."),
    "cpu_threads": Facet(
        "equal",
        "CPU threads, which generated code is fixed to (below torch 2.13)",
        "Set OMP_NUM_THREADS alike on both sides.",
        optional=True,
    ),
    "glibc": Facet(
        "at_least", "GNU C library", "Push from the machine with the oldest system; that runs on all."
    ),
    "libstdcxx": Facet(
        "at_least",
        "GNU C++ library (highest GLIBCXX version)",
        "Push from the machine with the oldest system; that runs on all.",
    ),
    "cpu_flags": Facet(
        "superset",
        "CPU instructions that a kernel compiled for the native CPU may use",
        "Push from the oldest CPU of the fleet, or compile once on each model of CPU and push.",
    ),
}
"""Every facet there is. An entry that needs any other is never guessed to fit."""

# What generated code depends on, by what it is made of.
_PICKLE = ("torch", "python")
_CPP_SOURCE = ("machine", "cpu_isa", "vector_isa", "cpu_threads")
_GPU = ("triton", "cuda", "hip", "gpu_name", "gpu_arch")
_BINARY = ("machine", "glibc", "libstdcxx")

REQUIRED_FACETS: dict[str, tuple[str, ...]] = {
    # A pickle of torch's own classes with Python source in it; without generated kernels it calls
    # only operators that every machine of this torch has.
    "inductor": (*_PICKLE, "machine"),
    # The vector width stands in the C++ text, the key does not know it: wrong numbers on a hit.
    "inductor+cpp": (*_PICKLE, *_CPP_SOURCE),
    # cubins, and launch settings tuned for one GPU. The key knows the name, not the architecture.
    "inductor+gpu": (*_PICKLE, "machine", *_GPU),
    "inductor+cpp+gpu": (*_PICKLE, *_CPP_SOURCE, *_GPU),
    # Names the FX entries that it needs; without them it is a miss, whatever the machine.
    "aot_autograd": _PICKLE,
    # The key of a group holds Triton's sources, the target, ptxas and the options.
    "triton": ("triton",),
    # A launcher or driver stub, compiled by the host's C compiler against Python's ABI.
    "triton+host": ("triton", "python", *_BINARY),
    # -march=native, linked against torch and OpenMP, loaded without another look.
    "cpp": (*_PICKLE, *_BINARY, "cpu_isa", "vector_isa", "cpu_flags", "openmp"),
    # Shapes seen, by code location.
    "pgo": _PICKLE,
    # Bundles compiled graphs of every sort under a key that knows only a name and a line.
    "precompile": (*_PICKLE, *_CPP_SOURCE, *_GPU),
    # Launch settings, measured. The key holds torch's sources; on another GPU they may not launch.
    "autotune": ("torch", *_GPU),
    # Choices among templates, measured; without a GPU among C++ ones.
    "gemm": ("torch", *_CPP_SOURCE, *_GPU),
    # Files of a framework that torchrelay cannot look into.
    "tree": tuple(FACETS),
}
"""The facets that an entry needs, by kind and content."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that PyTorch's keys contain: where it differs there is no hit, and no harm.

    Args:
        variable: The environment variable that sets it, or ``""`` if none does.
        default: What PyTorch takes without it; ``None`` if that depends on the machine.
        title: What it is, for people.
    """

    variable: str
    default: str | None
    title: str


SETTINGS: dict[str, Setting] = {
    "precompile_headers": Setting(
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1", "precompiled headers for C++ kernels"
    ),
    "cache_key_tag": Setting("TORCH_COMPILE_CACHE_KEY_TAG", "", "tag that PyTorch mixes into every key"),
    "threads": Setting("OMP_NUM_THREADS", None, "CPU threads"),
    "cpp_compiler": Setting("CXX", "g++", "C++ compiler, part of each kernel's name"),
    "cpp_march": Setting("TORCHINDUCTOR_CPP_MARCH", "native", "CPU that kernels are compiled for"),
    "cpp_wrapper": Setting("TORCHINDUCTOR_CPP_WRAPPER", "0", "C++ wrapper code"),
    "freezing": Setting("TORCHINDUCTOR_FREEZING", "0", "weights folded into the graph"),
    "max_autotune": Setting("TORCHINDUCTOR_MAX_AUTOTUNE", "0", "kernels chosen by measuring"),
    "keep_static_cubin": Setting("TORCHINDUCTOR_KEEP_STATIC_CUBIN_RAW", "0", "cubins kept in entries"),
    "bundled_autograd": Setting("", "0", "AOTAutograd entries that hold their FX graphs"),
    "caching_precompile": Setting("TORCH_CACHING_PRECOMPILE", "0", "precompile caching"),
}
"""Key-affecting settings that users trip over; recorded with the producer, compared on a miss."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine's facets, and the key-affecting settings of a process on it.

    Laws: ``parse_environment(e.encode()) == e``; equal facets and settings have equal digests.

    Raises:
        FormatError: An unknown format, a bad name or value, or a list that is not sorted.
    """

    format: int
    facets: dict[str, FacetValue]
    settings: dict[str, str]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise FormatError(f"the environment is of format {self.format}; this version reads {FORMAT}")
        if len(self.facets) > _MAX_MEMBERS or len(self.settings) > _MAX_MEMBERS:
            raise FormatError(f"an environment with more than {_MAX_MEMBERS} facets or settings")
        for name, value in (*self.facets.items(), *self.settings.items()):
            check_facet(name, value)

    def encode(self) -> bytes:
        """The canonical bytes, as stored at ``environments/<digest>``."""
        return canonjson.encode(self)

    @property
    def digest(self) -> Digest:
        """The digest of :meth:`encode`, under which the environment is stored and named."""
        return digest_of(self.encode())


def parse_environment(data: bytes | memoryview, *, name: str = "environment") -> Environment:
    """The environment in a stored document or in a file given with ``--environment``.

    Raises:
        FormatError: Not the canonical bytes of an environment of this format.
    """
    try:
        return canonjson.decode(data, Environment, name=name, limit=MAX_DOCUMENT_BYTES)
    except FormatError as exc:
        if exc.subject == name:
            raise
        raise FormatError(f"{name}: {exc.message}", subject=name) from exc


def check_facet(name: str, value: FacetValue) -> None:
    """Whether ``name`` and ``value`` may stand in an environment or a table of requirements.

    Raises:
        FormatError: A bad name, a text that is too long, or a list that is not sorted and unique.
    """
    if _NAME.fullmatch(name) is None:
        raise FormatError(f"{name[:80]!r} is not the name of a facet or setting", subject=name[:80])
    if isinstance(value, int) and abs(value) > canonjson.MAX_INTEGER:
        raise FormatError(f"the value of {name} is out of bounds", subject=name)
    texts = value if isinstance(value, tuple) else (str(value),)
    if len(texts) > _MAX_ITEMS or any(len(text) > _MAX_TEXT for text in texts):
        raise FormatError(f"the value of {name} is too long", subject=name)
    if isinstance(value, tuple) and any(a >= b for a, b in itertools.pairwise(value)):
        raise FormatError(f"the list of {name} is not sorted, or names something twice", subject=name)


def requires_of(environment: Environment, names: Iterable[str]) -> dict[str, FacetValue]:
    """The facet values that an entry made in ``environment`` needs.

    Args:
        environment: Where the entry was made.
        names: What such entries need, from :data:`REQUIRED_FACETS`.

    Raises:
        UsageError: The environment does not state a facet that the entry needs.
    """
    needed = {}
    for name in sorted(set(names)):
        if name in environment.facets:
            needed[name] = environment.facets[name]
        elif name not in FACETS or not FACETS[name].optional:
            raise UsageError(
                f"the environment does not state the facet {name!r}, which entries of this kind need",
                remedy="Write the environment again with `torchrelay env --out FILE` on that machine.",
                subject=name,
            )
    return needed


def unstated_facets(kind: str, requires: Collection[str]) -> list[str]:
    """Facets that every entry of ``kind`` needs and that ``requires`` leaves out.

    An entry that does not say for which torch, Python or machine it was made would fit all of them.
    """
    least = REQUIRED_FACETS.get(kind, ())
    return [name for name in least if name not in requires and not FACETS[name].optional]


@dataclass(frozen=True, slots=True)
class FacetResult:
    """How one needed facet compares with this machine's; ``here`` is ``None`` if it has none."""

    facet: str
    comparison: Comparison
    needed: FacetValue
    here: FacetValue | None
    ok: bool
    remedy: str

    @property
    def detail(self) -> str:
        """One line for people: what is needed and what is here, only the part that differs."""
        if self.comparison == "superset" and isinstance(self.needed, tuple):
            missing = sorted(set(self.needed) - set(self.here if isinstance(self.here, tuple) else ()))
            return "has all that is needed" if self.ok else f"missing here: {' '.join(missing)}"
        relation = "at least " if self.comparison == "at_least" else ""
        return f"needs {relation}{_text(self.needed)}, here {_text(self.here)}"


Mismatch = FacetResult
"""A :class:`FacetResult` that is not ``ok``."""


def explain(requires: Mapping[str, FacetValue], environment: Environment) -> list[FacetResult]:
    """Each needed facet beside this machine's, in the order of names."""
    return [_compare(name, needed, environment.facets.get(name)) for name, needed in sorted(requires.items())]


def mismatches(requires: Mapping[str, FacetValue], environment: Environment) -> list[Mismatch]:
    """What keeps an entry from fitting; empty exactly if it fits.

    Law: an entry fits the environment that it was made in.
    """
    return [result for result in explain(requires, environment) if not result.ok]


def diff_settings(a: Environment, b: Environment) -> list[tuple[str, str | None, str | None]]:
    """The key-affecting settings in which two environments differ: name, value in a, value in b."""
    names = sorted(a.settings.keys() | b.settings.keys())
    pairs = ((name, a.settings.get(name), b.settings.get(name)) for name in names)
    return [(name, left, right) for name, left, right in pairs if left != right]


def exports(environment: Environment) -> dict[str, str]:
    """Variables that give another process on an equal machine the same keys, in order of names.

    Defaults are left out, so that what is shown is what matters; the thread count always stands
    there, since it follows the number of CPUs that a container may use.
    """
    found = {}
    for name, value in environment.settings.items():
        setting = SETTINGS.get(name)
        if setting is not None and setting.variable and value != setting.default:
            found[setting.variable] = value
    return dict(sorted(found.items()))


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What helps to explain a miss but binds nothing, and never leaves this machine.

    Install prefix and compiler are part of each C++ kernel's file name already: where they differ
    the kernel is compiled again, and nothing wrong can be loaded.
    """

    install_prefix: str
    torch_directory: str
    cache_directory: str
    triton_directory: str
    compiler: str
    cpu_model: str
    python: str
    system: str
    host: str


def _compare(name: str, needed: FacetValue, here: FacetValue | None) -> FacetResult:
    facet = FACETS.get(name)
    if facet is None:
        remedy = "Upgrade torchrelay: the entry needs something that this version does not know."
        return FacetResult(name, "unknown", needed, here, False, remedy)
    ok = here is not None and _FITS[facet.comparison](needed, here)
    return FacetResult(name, facet.comparison, needed, here, ok, "" if ok else facet.remedy)


def _equal(needed: FacetValue, here: FacetValue) -> bool:
    return type(needed) is type(here) and needed == here


def _at_least(needed: FacetValue, here: FacetValue) -> bool:
    wanted, found = _numbers(needed), _numbers(here)
    # What is not a dotted number (no glibc at all, another C library) can only be the same.
    return _equal(needed, here) if wanted is None or found is None else found >= wanted


def _superset(needed: FacetValue, here: FacetValue) -> bool:
    return isinstance(needed, tuple) and isinstance(here, tuple) and set(here) >= set(needed)


_FITS = {"equal": _equal, "at_least": _at_least, "superset": _superset}


def _numbers(value: FacetValue) -> tuple[int, ...] | None:
    if not isinstance(value, str) or _VERSION.fullmatch(value) is None:
        return None
    numbers = [int(part) for part in value.split(".")]
    return tuple(numbers + [0] * (8 - len(numbers)))  # so that 2.36 and 2.36.0 are one version


def _text(value: FacetValue | None) -> str:
    if value is None:
        return "not stated"
    return " ".join(value) or ABSENT if isinstance(value, tuple) else str(value)
