# SPDX-License-Identifier: Apache-2.0
"""How PyTorch names a C++ kernel, and the command in that name without the place it was run in.

The name is a hash over the source and the compiler command (``CppCodeCache.load_async``), in which
the directories of Python and torch stand. Here the command has placeholders for them, so that one
text stands for all install prefixes (ADR 0006); with a machine's own directories in it, it gives the
name under which PyTorch looks there.

Nothing is believed: a command is that of a kernel only if the kernel's name comes out. Nothing is
run: a command is only ever hashed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchrelay import canonjson
from torchrelay.errors import FormatError
from torchrelay.statement import Wire

MAX_COMMAND_CHARS = 4096
MAX_PLACED_BYTES = 16384

_INCLUDE, _LIBRARIES, _TORCH = "{python_include}", "{python_lib}", "{torch}"

# What no shell gives a meaning to, so that PyTorch's own quoting never changes it, and the braces of
# the placeholders. A torch that lies elsewhere could not compile there at all.
_PATH = re.compile(r"/[A-Za-z0-9_@%+=:,./-]{0,1023}")
# Those between which a variable chooses on one machine; between NEON and SVE the CPU does.
_VECTORS = re.compile(r"-D CPU_CAPABILITY_(AVX2|AVX512)\b")
_COMMAND = re.compile(r"(?:[A-Za-z0-9_@%+=:,./ -]|\{python_include\}|\{python_lib\}|\{torch\})+")


class Prefixes(Wire, frozen=True):
    """Where Python and torch are installed, as PyTorch writes it into a compiler command.

    Attributes:
        python_include: Directories of ``Python.h``, one or two.
        python_lib: Directory of Python's library.
        torch: Directory of the package.

    Raises:
        ValueError: A path is not absolute, or has characters that PyTorch would have to quote.
    """

    python_include: tuple[str, ...]
    python_lib: str
    torch: str

    def __post_init__(self) -> None:
        paths = (*self.python_include, self.python_lib, self.torch)
        if not 1 <= len(self.python_include) <= 2 or not all(map(_PATH.fullmatch, paths)):
            raise ValueError("not the directories of Python and torch")

    def expand(self, command: str) -> str:
        """``command`` as PyTorch would run it here."""
        includes = " ".join(f"-I{path}" for path in self.python_include)
        placed = command.replace(_INCLUDE, includes).replace(_LIBRARIES, self.python_lib)
        return placed.replace(_TORCH, self.torch)


def is_command(text: str) -> bool:
    """Whether ``text`` can be a command with placeholders: short, plain characters, one of torch's."""
    return len(text) <= MAX_COMMAND_CHARS and _TORCH in text and _COMMAND.fullmatch(text) is not None


class Source:
    """A kernel's source, to be named with one command after another.

    Args:
        data: The bytes of ``<key>.main.cpp``.

    Raises:
        ValueError: Not UTF-8.
    """

    def __init__(self, data: bytes) -> None:
        # load_async hashes the stripped text, `||`, the text of the optimised part (None for a
        # kernel), a space, and the command.
        self._hash = hashlib.sha256(data.decode().strip().encode() + b"||None ")

    def name(self, command: str) -> str:
        """PyTorch's name of the kernel if it is compiled by ``command``."""
        return "c" + base64.b32encode(self.digest(command)).decode()[:51].lower()

    def digest(self, command: str) -> bytes:
        """What :meth:`name` spells: whole: the name leaves out the last bit."""
        found = self._hash.copy()
        found.update(command.encode())
        return found.digest()


class Placed(Wire, frozen=True):
    """What is kept beside an installed kernel: its command, and the directories it was named for.

    So the kernel can be recognised by any process, also where torch is not installed.
    """

    command: str
    prefixes: Prefixes

    def encode(self) -> bytes:
        """The bytes of ``<key>.main.command``."""
        return canonjson.encode(self)


def command_of(data: bytes, source: Source, key: str) -> str | None:
    """The command in a ``.main.command`` file, if it proves to be that of the kernel ``key``."""
    try:
        placed = canonjson.decode(data, Placed, name="command", limit=MAX_PLACED_BYTES)
    except (FormatError, ValueError):
        return None
    fits = is_command(placed.command) and source.name(placed.prefixes.expand(placed.command)) == key
    return placed.command if fits else None


@dataclass(frozen=True, slots=True)
class Naming:
    """How the kernels of one directory may have been named.

    Args:
        prefixes: Places of Python and torch.
        compiler: ``CXX`` of the processes that compiled.
        march: The CPU that they compiled for.
        vectors: The facet ``vector_isa`` of the machine that they ran on; None if nobody says.
    """

    prefixes: tuple[Prefixes, ...] = ()
    compiler: str = "g++"
    march: str = "native"
    vectors: tuple[str, ...] | None = None

    def contradiction(self, command: str) -> str:
        """The vector extension that a kernel was compiled for and that those processes did not use.

        Empty if there is none: a kernel without vectors is everybody's.
        """
        found = _VECTORS.search(command)
        if self.vectors is None or found is None:
            return ""
        family = found[1].lower()
        return "" if any(name.startswith(family) for name in self.vectors) else family

    def command_of(self, source: Source, key: str) -> str | None:
        """The command by which the kernel got its name; None if it is none that torchrelay knows."""
        wanted = _begin_of(key)
        for text, placed in _candidates(self):
            # One comparison of bytes for each of some fifty commands; the name itself only where it may fit.
            if source.digest(placed).startswith(wanted) and source.name(placed) == key:
                return text
        return None


def _begin_of(key: str) -> bytes:
    """The first bytes of the digest in a kernel's name; a name that holds none begins nothing."""
    try:
        return base64.b32decode(key[1:49].upper())
    except ValueError:
        return b"\0" * 33


@functools.lru_cache(maxsize=8)
def _candidates(naming: Naming) -> tuple[tuple[str, str], ...]:
    texts = [text for text in _commands(naming.compiler, naming.march) if is_command(text)]
    return tuple((text, prefixes.expand(text)) for prefixes in naming.prefixes for text in texts)


@dataclass(frozen=True, slots=True)
class _Isa:
    """Macros and flags of one of the instruction sets in ``torch/_inductor/cpu_vec_isa.py``."""

    macros: tuple[str, ...] = ()
    flags: str = ""
    march: str = ""


_AVX512 = "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma"
_VNNI = f"{_AVX512} -mavx512vnni -mavx512vl"
_AMX = f"{_VNNI} -mamx-tile -mamx-bf16 -mamx-int8"
_BF16, _FP16 = " -mavx512bf16", " -mamx-fp16"
_NEON = ("CPU_CAPABILITY_NEON", "AT_BUILD_ARM_VEC256_WITH_SLEEF")
_SVE8 = "-march=armv8-a+sve+bf16"
_SVE9 = "-march=armv9-a+sve2+fp16fml+sha3+bf16+i8mm"


def _isas() -> Iterator[_Isa]:
    yield _Isa()
    yield _Isa(("CPU_CAPABILITY_AVX2",), "-mavx2 -mfma -mf16c")
    wide = (_AVX512, _AVX512 + _BF16, _VNNI, _AMX, _AMX + _BF16, _AMX + _FP16, _AMX + _BF16 + _FP16)
    yield from (_Isa(("CPU_CAPABILITY_AVX512",), flags) for flags in wide)
    # GCC before 13 does not know `native` on all ARM CPUs.
    for march in ("", "armv8.6-a+sve+sve2+bf16", "armv8.6-a+sve+bf16"):
        yield _Isa(_NEON, "", march)
        for bits, flags in itertools.product((128, 256), (_SVE8, _SVE9)):
            macros = ("CPU_CAPABILITY_SVE", f"CPU_CAPABILITY_SVE{bits}", _NEON[1], "__ARM_FEATURE_BF16")
            yield _Isa(macros, f"{flags} -msve-vector-bits={bits}", march)


_FLAGS = """
-O3 -DNDEBUG -fno-omit-frame-pointer -g1 -fno-trapping-math -funsafe-math-optimizations -ffinite-math-only
-fno-signed-zeros -fno-finite-math-only -fno-unsafe-math-optimizations -fmath-errno -ffp-contract=off
-fexcess-precision=fast -fno-tree-loop-vectorize MARCH -shared -fPIC -Wall -std=c++20 -Wno-unused-variable
-Wno-unknown-pragmas -pedantic -fopenmp
"""


def _commands(compiler: str, march: str) -> Iterator[str]:
    """What ``CppBuilder.get_command_line`` gives for kernels, in torch 2.13 and 2.14, with GCC."""
    for isa, headers in itertools.product(_isas(), (True, False)):
        arch = isa.march or march
        flags = _FLAGS.replace("MARCH", f"-march={arch}" if arch else "").split()
        defined = ["TORCH_INDUCTOR_CPP_WRAPPER", "STANDALONE_TORCH_HEADER"]
        defined += ["TORCH_INDUCTOR_PRECOMPILE_HEADERS"] * headers
        defined += [" C10_USING_CUSTOM_GENERATED_MACROS", *isa.macros]
        include = [_INCLUDE, f"-I{_TORCH}/include", f"-I{_TORCH}/include/torch/csrc/api/include"]
        extra = ["", isa.flags] if isa.flags else [""]
        parts = (compiler, "i", _each(f"-D {name}" for name in defined), _each(flags), _each(include))
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lgomp"]
        linked = (_each(extra), "-o o.so", "", _each(libraries), f"-L{_LIBRARIES} -L{_TORCH}/lib ")
        yield " ".join((*parts, *linked))


def _each(items: Iterator[str] | list[str]) -> str:
    return "".join(f"{item} " for item in items)
