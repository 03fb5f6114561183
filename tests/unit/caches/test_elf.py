# SPDX-License-Identifier: Apache-2.0
"""Whole ELF files, and what is none."""

from __future__ import annotations

import importlib.machinery
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_samples import compile_kernel, elf, write
from torchrelay.caches.elf import MACHINES, RELOCATABLE, SHARED, elf_problem, loaded_part

SOUND = elf(b"some code" * 20)


def _real() -> Path:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    folders = [Path(p) for p in sys.path if p.endswith("lib-dynload")]
    return next(file for folder in folders for file in sorted(folder.glob(f"*{suffix}")))


def test_a_real_shared_object_is_whole() -> None:
    assert elf_problem(_real().read_bytes(), machine=platform.machine(), type_=SHARED) == ""


def test_a_real_shared_object_cut_anywhere_is_not() -> None:
    data = _real().read_bytes()
    # The section headers end the file, so that one missing byte shows.
    for end in (0, 3, 63, 64, 200, 4096, len(data) // 2, len(data) - 1):
        assert elf_problem(data[:end]) != "", end


@given(st.integers(0, len(SOUND) - 1))
def test_every_prefix_is_seen(end: int) -> None:
    assert elf_problem(SOUND[:end]) != ""


@given(st.binary(max_size=400) | st.binary(max_size=400).map(lambda tail: SOUND[:64] + tail))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(elf_problem(data, machine="x86_64", type_=SHARED), str)


@given(st.integers(16, 119), st.integers(0, 255))
def test_no_changed_header_raises(at: int, value: int) -> None:
    changed = bytearray(SOUND)
    changed[at] = value
    assert isinstance(elf_problem(bytes(changed), machine=platform.machine(), type_=SHARED), str)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not an ELF"),
        (b"MZ" + SOUND[2:], "not an ELF"),
        (b"\0" * len(SOUND), "not an ELF"),
        (SOUND[:4] + b"\x01" + SOUND[5:], "not a 64-bit"),
        (elf(machine=4711), "another machine"),
        (elf(type_=RELOCATABLE), "of type 1"),
    ],
)
def test_what_is_no_shared_object_of_this_machine(data: bytes, problem: str) -> None:
    assert problem in elf_problem(data, machine=platform.machine(), type_=SHARED)


def test_an_unknown_machine_is_not_compared() -> None:
    assert "vax" not in MACHINES
    assert elf_problem(elf(machine=75), machine="vax") == ""


def _compiled(folder: Path) -> bytes:
    return compile_kernel(write(folder / "k.cpp", b'extern "C" int answer() { return 42; }')).read_bytes()


def test_what_is_loaded_of_a_library_does_not_say_where_it_was_compiled(tmp_path: Path) -> None:
    here, there = _compiled(tmp_path / "a"), _compiled(tmp_path / "another_and_longer")
    assert str(tmp_path).encode() in here
    assert len(here) != len(there)
    assert loaded_part(here) == loaded_part(there)
    assert str(tmp_path).encode() not in loaded_part(here)
    assert elf_problem(loaded_part(here), machine=platform.machine(), type_=SHARED) == ""


def test_it_is_loaded_and_called(tmp_path: Path) -> None:
    library = write(tmp_path / "k.so", loaded_part(_compiled(tmp_path / "a")))
    program = f"import ctypes; raise SystemExit(ctypes.CDLL({str(library)!r}).answer())"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 42


def test_an_exception_is_caught_across_it(tmp_path: Path) -> None:
    """Unwinding needs tables that are loaded, not the sections that are cut off."""
    text = b"""#include <stdexcept>
    __attribute__((noinline)) void fails(int x) { if (x) throw std::runtime_error("no"); }
    extern "C" int answer() { try { fails(1); } catch (const std::exception&) { return 42; } return 0; }"""
    library = compile_kernel(write(tmp_path / "k.cpp", text))
    library.write_bytes(loaded_part(library.read_bytes()))
    program = f"import ctypes; raise SystemExit(ctypes.CDLL({str(library)!r}).answer())"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 42


def test_what_is_loaded_cut_anywhere_is_not_whole(tmp_path: Path) -> None:
    data = loaded_part(_compiled(tmp_path))
    for end in (0, 64, 200, 4096, len(data) // 2, len(data) - 1):
        assert elf_problem(data[:end]) != "", end


@pytest.mark.parametrize("data", [elf(type_=RELOCATABLE), elf(b"")], ids=["object", "empty segment"])
def test_what_has_nothing_to_cut_is_given_back(data: bytes) -> None:
    assert loaded_part(data) in (data, loaded_part(loaded_part(data)))


@given(st.integers(16, 119), st.integers(0, 255))
def test_a_library_of_any_layout_is_cut_once_or_given_back(at: int, value: int) -> None:
    changed = bytearray(SOUND)
    changed[at] = value
    if elf_problem(bytes(changed)) == "":
        part = loaded_part(bytes(changed))
        assert loaded_part(part) == part
        assert elf_problem(part) == ""
