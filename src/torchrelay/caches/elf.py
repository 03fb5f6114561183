# SPDX-License-Identifier: Apache-2.0
"""Whether bytes are a whole ELF file of a given machine, and what of it is loaded; nothing is run.

A truncated shared object is mapped without complaint and kills the process with SIGBUS when it is
used; one of another machine makes the load fail where a compile would have helped. Both show in the
headers: all that they speak of must lie inside the file.

Beyond what is loaded, a shared object holds what debuggers and linkers want to know, with the paths of
the directories that it was compiled in, and so differs between two machines that compiled the same.
Paths in the texts of its messages are loaded, and stay.
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

_LOAD, _NOTE = 1, 4
_BUILD_ID = 3
_HEADER = 64
_PROGRAM = 56
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
    for at, size, count, least in ((program_at, program_size, programs, _PROGRAM),
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


def loaded_part(library: bytes) -> bytes:
    """The bytes of a shared object that a loader can come to see.

    Sections for debuggers and linkers lie behind the last segment and are cut off, with the table of
    sections, as ``strip --strip-section-headers`` does. The build id, a hash of what is cut off too,
    becomes zero. Cutting twice changes nothing. A file of another layout is given back as it is.

    Args:
        library: A whole ELF file, of which :func:`elf_problem` says nothing.
    """
    order = "<" if library[5] == 1 else ">"
    (kind,) = struct.unpack_from(f"{order}H", library, 16)
    (program_at,) = struct.unpack_from(f"{order}Q", library, 32)
    program_size, programs = struct.unpack_from(f"{order}HH", library, 54)
    segments = [
        struct.unpack_from(f"{order}I4xQ16xQ8xQ", library, program_at + index * program_size)
        for index in range(programs)
    ]
    end = max((offset + size for type_, offset, size, _ in segments if type_ == _LOAD), default=0)
    needed = [program_at + programs * program_size, *(offset + size for _, offset, size, _ in segments)]
    if kind != SHARED or programs == _EXTENDED or end < max(needed):
        return library
    part = bytearray(library[:end])
    struct.pack_into(f"{order}Q", part, 40, 0)  # e_shoff
    struct.pack_into(f"{order}HH", part, 60, 0, 0)  # e_shnum, e_shstrndx
    for type_, offset, size, align in segments:
        if type_ == _NOTE:
            _forget_build_id(part, order, offset, offset + size, 8 if align == 8 else 4)
    return bytes(part)


def _forget_build_id(part: bytearray, order: str, at: int, end: int, align: int) -> None:
    """Zero the build id among the notes from ``at`` to ``end`` (gABI "Note Section")."""
    while at + 12 <= end:
        name_size, size, type_ = struct.unpack_from(f"{order}III", part, at)
        start = at + 12 + _aligned(name_size, align)
        if start + size > end:
            return
        if type_ == _BUILD_ID and part[at + 12 : at + 12 + name_size] == b"GNU\0":
            part[start : start + size] = bytes(size)
        at = start + _aligned(size, align)


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align
