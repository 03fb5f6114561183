# SPDX-License-Identifier: Apache-2.0
"""Whether bytes are a whole ELF file of a given machine; nothing is loaded or run.

A truncated shared object is mapped without complaint and kills the process with SIGBUS when it is
used; one of another machine makes the load fail where a compile would have helped. Both show in the
headers: all that they speak of must lie inside the file.
"""

from __future__ import annotations

import struct

SHARED = 3
"""``ET_DYN``: a shared object."""

RELOCATABLE = 1
"""``ET_REL``: an object file."""

MACHINES: dict[str, int] = {
    "x86_64": 62,
    "AMD64": 62,
    "aarch64": 183,
    "arm64": 183,
    "ppc64le": 21,
    "s390x": 22,
    "riscv64": 243,
    "loongarch64": 258,
}
"""``e_machine`` by the name that ``platform.machine()`` gives."""

_HEADER = 64
_NOBITS = 8
_EXTENDED = 0xFFFF


def elf_problem(data: bytes, *, machine: str = "", type_: int | None = None) -> str:
    """What keeps ``data`` from being a whole 64-bit ELF file; empty if nothing does.

    Args:
        data: The whole file.
        machine: As ``platform.machine()``; a name that is not in :data:`MACHINES` is not compared.
        type_: The ``e_type`` that it must have.
    """
    if len(data) < _HEADER or data[:4] != b"\x7fELF":
        return "not an ELF file"
    if data[4] != 2 or data[5] not in (1, 2):
        return "not a 64-bit ELF file"
    order = "<" if data[5] == 1 else ">"
    kind, target = struct.unpack_from(f"{order}HH", data, 16)
    if machine in MACHINES and target != MACHINES[machine]:
        return f"made for another machine (ELF {target}), not {machine}"
    if type_ is not None and kind != type_:
        return f"an ELF file of type {kind}, not {type_}"
    try:
        return _layout_problem(data, order)
    except struct.error:
        return "truncated: its headers lie outside the file"


def _layout_problem(data: bytes, order: str) -> str:
    program_at, section_at = struct.unpack_from(f"{order}QQ", data, 32)
    program_size, programs, section_size, sections = struct.unpack_from(f"{order}HHHH", data, 54)
    if section_at and sections == 0:  # more sections than fit: the first one holds their number
        (sections,) = struct.unpack_from(f"{order}Q", data, section_at + 32)
    if programs == _EXTENDED and section_at:
        (programs,) = struct.unpack_from(f"{order}I", data, section_at + 44)
    if not programs and not sections:
        return "an ELF file without content"
    for at, size, count, least in ((program_at, program_size, programs, 56),
                                   (section_at, section_size, sections, 64)):  # fmt: skip
        if count and (size < least or at < _HEADER or at + size * count > len(data)):
            return "truncated: its headers lie outside the file"
    for index in range(programs):
        offset, size = struct.unpack_from(f"{order}Q16xQ", data, program_at + index * program_size + 8)
        if offset + size > len(data):
            return "truncated: a segment lies outside the file"
    for index in range(sections):
        at = section_at + index * section_size
        type_, offset, size = struct.unpack_from(f"{order}4xI16xQQ", data, at)
        if type_ not in (0, _NOBITS) and offset + size > len(data):
            return "truncated: a section lies outside the file"
    return ""
