# SPDX-License-Identifier: Apache-2.0
"""Names of C++ kernels: what PyTorch would call them, proved or not at all."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.caches.kernelname import (
    MAX_COMMAND_CHARS,
    MAX_PLACED_BYTES,
    Naming,
    Placed,
    Prefixes,
    Source,
    command_of,
    is_command,
)

HERE = Prefixes(python_include=("/usr/include/python3.11",), python_lib="/usr/lib", torch="/venv/torch")
THERE = Prefixes(python_include=("/p/a", "/p/b"), python_lib="/p/lib", torch="/home/b/x/torch")
COMMAND = "g++ i -O3 {python_include} -I{torch}/include -o o.so -L{python_lib} -L{torch}/lib "
TEXT = b"\n  int main;\n"

# As torch 2.13.0+cpu wrote it on one machine: CppBuilder(name="o", sources="i", …).get_command_line().
REAL = (
    "g++ i -D TORCH_INDUCTOR_CPP_WRAPPER -D STANDALONE_TORCH_HEADER -D TORCH_INDUCTOR_PRECOMPILE_HEADERS "
    "-D  C10_USING_CUSTOM_GENERATED_MACROS -D CPU_CAPABILITY_AVX512  -O3 -DNDEBUG -fno-omit-frame-pointer "
    "-g1 -fno-trapping-math -funsafe-math-optimizations -ffinite-math-only -fno-signed-zeros "
    "-fno-finite-math-only -fno-unsafe-math-optimizations -fmath-errno -ffp-contract=off "
    "-fexcess-precision=fast -fno-tree-loop-vectorize -march=native -shared -fPIC -Wall -std=c++20 "
    "-Wno-unused-variable -Wno-unknown-pragmas -pedantic -fopenmp  -I/usr/include/python3.11 "
    "-I/venv/torch/include -I/venv/torch/include/torch/csrc/api/include   -mavx512f -mavx512dq -mavx512vl "
    "-mavx512bw -mfma -mavx512vnni -mavx512vl  -o o.so  -ltorch -ltorch_cpu -ltorch_python -lgomp  "
    "-L/usr/lib -L/venv/torch/lib "
)


def pytorch_name(content: str, extra: str) -> str:
    """``torch._inductor.codecache.get_hash`` of 2.13, as it is written there."""
    hasher = hashlib.sha256()
    hasher.update(content.strip().encode("utf-8"))
    hasher.update(b"||")
    hasher.update(extra.encode("utf-8"))
    return "c" + base64.b32encode(hasher.digest())[:51].decode("utf-8").lower()


@given(st.text(max_size=50), st.text(max_size=50))
def test_the_name_is_pytorchs(content: str, command: str) -> None:
    # A lone surrogate has no bytes, so that no file can hold it.
    content, command = (text.encode(errors="replace").decode() for text in (content, command))
    assert Source(content.encode()).name(command) == pytorch_name(content, f"None {command}")


def test_a_source_that_is_no_text_has_no_name() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        Source(b"\xff")


def test_a_real_command_is_recognised_and_moves() -> None:
    source = Source(TEXT)
    key = source.name(REAL)
    found = Naming((THERE, HERE)).command_of(source, key)
    assert found is not None
    assert is_command(found)
    assert HERE.expand(found) == REAL
    assert "/venv" not in found
    assert "/usr" not in found
    moved = THERE.expand(found)
    assert "-I/p/a -I/p/b -I/home/b/x/torch/include -I" in moved
    assert Naming((THERE,)).command_of(source, source.name(moved)) == found


def test_what_is_not_proved_is_not_recognised() -> None:
    source = Source(TEXT)
    key = source.name(REAL)
    assert Naming((THERE,)).command_of(source, key) is None
    assert Naming((HERE,), compiler="clang++").command_of(source, key) is None
    assert Naming((HERE,), march="x86-64-v3").command_of(source, key) is None
    assert Naming((HERE,)).command_of(Source(TEXT + b"other"), key) is None
    assert Naming((HERE,)).command_of(source, source.name(REAL + "-DMORE ")) is None
    assert Naming().command_of(source, key) is None


def test_compiler_and_cpu_are_those_of_the_directory() -> None:
    source = Source(TEXT)
    for compiler, march, flag in (("/usr/bin/g++-12", "native", "-march=native "), ("g++", "", "")):
        command = REAL.replace("g++ i", f"{compiler} i").replace("-march=native ", flag)
        found = Naming((HERE,), compiler, march).command_of(source, source.name(command))
        assert found is not None
        assert HERE.expand(found) == command


@pytest.mark.parametrize("compiler", ["g++; rm -rf /", "{torch", "$(id)", "g++\n", "ä", ""])
def test_a_strange_compiler_is_no_candidate_or_plain_text(compiler: str) -> None:
    source = Source(TEXT)
    command = REAL.replace("g++ i", f"{compiler} i", 1)
    found = Naming((HERE,), compiler).command_of(source, source.name(command))
    assert found is None or compiler == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g++ i",
        "g++ {torch} {home}",
        "g++ {torch} {",
        "g++ {torch} $(id)",
        "g++ {torch} `id`",
        "g++ {torch} ; id",
        "g++ {torch} 'a b'",
        "g++ {torch}\n",
        "g++ {torch}\0",
        "g++ {torch} ä",
        "{torch}" + " " * MAX_COMMAND_CHARS,
    ],
)
def test_what_is_no_command(text: str) -> None:
    assert not is_command(text)


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "relative"},
        {"torch": ""},
        {"torch": "/a b"},
        {"torch": "/{torch}"},
        {"torch": "/x\n"},
        {"torch": "/" + "x" * 1024},
        {"python_lib": "/it's"},
        {"python_include": ()},
        {"python_include": ("/a", "/b", "/c")},
        {"python_include": ("/a", "b")},
    ],
)
def test_directories_that_pytorch_would_quote_are_refused(change: dict[str, object]) -> None:
    fields = {"python_include": ("/a",), "python_lib": "/l", "torch": "/t"}
    Prefixes(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="directories"):
        Prefixes(**{**fields, **change})  # type: ignore[arg-type]


def test_what_lies_beside_a_kernel_is_believed_only_if_the_name_comes_out() -> None:
    source = Source(TEXT)
    beside = Placed(command=COMMAND, prefixes=THERE).encode()
    key = source.name(THERE.expand(COMMAND))
    assert command_of(beside, source, key) == COMMAND
    assert command_of(beside, source, source.name(COMMAND)) is None
    assert command_of(beside, Source(TEXT + b"x"), key) is None
    other = Placed(command=COMMAND, prefixes=HERE).encode()
    assert command_of(other, source, key) is None
    # A command with the directories spelt out gives the name too, but stands for one prefix only.
    spelt = Placed(command=THERE.expand(COMMAND), prefixes=THERE).encode()
    assert command_of(spelt, source, key) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b" " * (MAX_PLACED_BYTES + 1),
        lambda data: b"\x80\x04K\x01.",
        lambda data: b"[" * 10_000,
        lambda data: data.replace(b'"torch":"/home/b/x/torch"', b'"torch":"x"'),
        lambda data: data.replace(b'"command"', b'"commands"'),
        lambda data: data.replace(b"g++ i", b"\xff++ i"),
    ],
)
def test_a_damaged_file_beside_a_kernel_is_ignored(damage: object) -> None:
    source = Source(TEXT)
    key = source.name(THERE.expand(COMMAND))
    beside = Placed(command=COMMAND, prefixes=THERE).encode()
    assert callable(damage)
    assert command_of(damage(beside), source, key) is None
