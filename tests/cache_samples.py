# SPDX-License-Identifier: Apache-2.0
"""Small, sound contents of cache directories, and a way from an entry to its installation."""

from __future__ import annotations

import base64
import json
import os
import pickle
import platform
import struct
import subprocess
from pathlib import Path
from typing import Any

from torchrelay.caches.base import CacheKind, Entry, Found, Roots, Skipped
from torchrelay.caches.elf import MACHINES, loaded_part
from torchrelay.signing import VerifiedEntry
from torchrelay.testing.entries import verified

HASH_HEX = "aa" * 32
HASH = base64.b32encode(bytes.fromhex(HASH_HEX)).decode().rstrip("=")
KERNEL = "add_kernel"
CPP = "c" + "ab2" * 17
CPP_FOLDER = CPP[1:3]


def elf(body: bytes = b"code", *, machine: int | None = None, type_: int = 3) -> bytes:
    """A whole 64-bit ELF file: one segment, and two sections at its end, as linkers write them."""
    target = MACHINES[platform.machine()] if machine is None else machine
    order = ">" if target == MACHINES["s390x"] else "<"
    program = struct.pack(f"{order}IIQQQQQQ", 1, 5, 120, 0, 0, len(body), len(body), 1)
    null = bytes(64)
    text = struct.pack(f"{order}IIQQQQIIQQ", 0, 1, 0, 0, 120, len(body), 0, 0, 1, 0)
    ident = b"\x7fELF" + bytes((2, 1 if order == "<" else 2, 1)) + bytes(9)
    fields = (type_, target, 1, 0, 64, 120 + len(body), 0, 64, 56, 1, 64, 2, 0)
    return ident + struct.pack(f"{order}HHIQQQIHHHHHH", *fields) + program + body + null + text


def write(path: Path, data: bytes) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def cpp_kernel(root: Path, key: str = CPP, body: bytes = b"code") -> None:
    """A C++ kernel as PyTorch leaves it."""
    write(root / key[1:3] / f"{key}.main.cpp", b"int main;")
    write(root / key[1:3] / f"{key}.main.so", elf(body))


def triton_group(root: Path, kernel: str = KERNEL, *, as_list: bool = False, salt: bytes = b"") -> Path:
    """A kernel group as Triton leaves it in ``root``; its folder."""
    folder = root / HASH
    described = json.dumps({"hash": HASH_HEX, "name": kernel}).encode()
    members = {
        f"{kernel}.source": b"source" + salt,
        f"{kernel}.ttir": b"ttir" + salt,
        f"{kernel}.cubin": elf(b"sass" + salt, machine=190, type_=2),
        f"{kernel}.json": described,
    }
    for name, data in members.items():
        write(folder / name, data)
    children: Any = list(members) if as_list else {name: str(folder / name) for name in members}
    write(folder / f"__grp__{kernel}.json", json.dumps({"child_paths": children}).encode())
    return folder


def found_in(kind: CacheKind, roots: Roots) -> tuple[list[Found], list[Skipped]]:
    """What a scan gives, apart."""
    seen = list(kind.scan(roots))
    return [x for x in seen if isinstance(x, Found)], [x for x in seen if isinstance(x, Skipped)]


def entries_in(kind: CacheKind, roots: Roots) -> list[Entry]:
    """All entries of a kind."""
    return [entry for found in found_in(kind, roots)[0] for entry in kind.read(found)]


def opened(entry: Entry, **changes: Any) -> VerifiedEntry:
    """``entry`` after a push and a fetch."""
    fields: dict[str, Any] = {
        name: getattr(entry, name) for name in ("kind", "key", "variant", "needs", "files", "times", "canon")
    }
    fields.update(changes)
    return verified(fields.pop("plain", entry.plain), **fields)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` that is not torchrelay's own."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    names = ((path.relative_to(root).as_posix(), path) for path in files)
    return {name: path.read_bytes() for name, path in names if ".torchrelay" not in name}


def compile_kernel(source: Path) -> Path:
    """The library of a C++ source, compiled beside it as PyTorch does, with debug information."""
    library = source.with_suffix(".so")
    command = ["g++", "-shared", "-fPIC", "-O1", "-g", "-Wl,--build-id", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def without_origin(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files as another machine gets them: libraries without what says where they were compiled."""
    return {name: loaded_part(data) if name.endswith(".so") else data for name, data in files.items()}


def plant(path: Path, what: str, target: Path = Path("/etc/passwd")) -> None:
    """Something that is no file, under a file's name."""
    if what == "link":
        path.symlink_to(target)
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


class _Canary:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def canary(marker: Path) -> bytes:
    """A pickle that makes the folder ``marker`` when it is loaded."""
    return pickle.dumps(_Canary(marker))
