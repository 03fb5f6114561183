# SPDX-License-Identifier: Apache-2.0
"""Whole ELF files, and what is none."""

from __future__ import annotations

import importlib.machinery
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_samples import elf
from torchrelay.caches.elf import MACHINES, RELOCATABLE, SHARED, elf_problem

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
