# SPDX-License-Identifier: Apache-2.0
"""Triton's own cache: kernels of Inductor and hand-written ones, launcher stubs, autotuning results.

Layout (``triton/runtime/cache.py``): ``<root>/<HASH>/``, where HASH is the upper-case base32 SHA-256 of
all that the compile depends on, the target's architecture included. The root is ``TRITON_CACHE_DIR``
or ``<cache>/triton/<device>``. A folder holds either

- kernels: ``<kernel>.source|ttir|ttgir|llir|ptx|cubin|json`` and, written last, the group file
  ``__grp__<kernel>.json`` with the *absolute* paths of the others. Readers follow these paths
  wherever they lead, so in the canonical form each is its own last name, and on install they are
  paths of this machine. One entry is one group; its key is ``<HASH>/<kernel>``; or
- what is looked for by name: ``cuda_utils.<abi>.so``, launchers, ``<kernel>.autotune.json``. One entry
  is the folder; its key is ``<HASH>``.
"""

from __future__ import annotations

import base64
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torchrelay import canonjson, limits
from torchrelay.caches.base import CacheKind, Entry, Excluded, Found, Reason, Roots, Skipped
from torchrelay.caches.bundle import FILES, join, label, last, read_files, refuse, require_plain, split
from torchrelay.caches.elf import SHARED, elf_problem
from torchrelay.caches.files import Folder, install_files, read_stable, scan_folder
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

GROUP = "triton-group-1"
"""The canonical form of a kernel group: members by name, then the group file with last names only."""

_HASH = re.compile(r"[A-Z2-7]{52}")
_KERNEL = r"[A-Za-z0-9_][A-Za-z0-9_$-]{0,159}"
_KEY = re.compile(rf"([A-Z2-7]{{52}})(?:/({_KERNEL}))?")
_MEMBER = re.compile(rf"({_KERNEL})(?:\.[A-Za-z0-9_]{{1,32}}){{1,2}}")
_PREFIX = "__grp__"
_GROUP_FILE = re.compile(rf"{_PREFIX}({_KERNEL})\.json")
_AUTOTUNE = ".autotune.json"
_STUB = re.compile(rf"{_KERNEL}(?:(?:\.[A-Za-z0-9_-]{{1,64}})?\.so|\.autotune\.json)")
_BINARIES = (".cubin", ".hsaco")
_GROUP_FILE_BYTES = limits.MIB
_MEASURED = ("gpu_name", "gpu_arch")


class TritonKind(CacheKind):
    """Kernel groups, and folders of files that are looked for by name."""

    name: ClassVar[str] = "triton"

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """The groups and folders below ``TRITON_CACHE_DIR``, or below each device's folder."""
        if roots.triton is not None:
            yield from _scan(roots.triton, "triton", "")
            return
        level = scan_folder(roots.inductor, "triton")
        yield from level.skipped
        yield from (Skipped(file.name, Reason.BAD_NAME) for file in level.files)
        for folder in level.folders:
            if _is_device(last(folder)):
                yield from _scan(roots.inductor, "inductor", folder)
            else:
                yield Skipped(folder, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """The members that the group file names, or the files of the folder."""
        if _GROUP_FILE.fullmatch(last(found.files[-1].name)):
            yield _read_group(found)
            return
        contents = read_files(found, found.files)
        _require_sound(found.key, contents)
        plain, files = join(contents)
        facets = _facets(name for name, _ in contents)
        yield Entry(self.name, found.key, "", (), facets, FILES, plain, files)

    def check(self, statement: Statement) -> None:
        """Key and file names are those that Triton gives; a group names its own kernel's files."""
        require_plain(statement, (FILES, GROUP))
        key = _KEY.fullmatch(statement.key)
        if not key or (key[2] is not None) != (statement.canon == GROUP):
            raise refuse(statement, "not the name of a Triton kernel or folder")
        names = [file.name for file in statement.files]
        if statement.canon == GROUP:
            fine = names[-1] == f"{_PREFIX}{key[2]}.json" and _are_members(key[2], names[:-1])
        else:
            fine = all(map(_STUB.fullmatch, names)) and not any(map(_GROUP_FILE.fullmatch, names))
            fine = fine and names == sorted(set(names))
        if not fine:
            raise refuse(statement, "its files are not those of a Triton kernel or folder")

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """The members, then the group file with their paths here.

        Without ``TRITON_CACHE_DIR`` they go into the folder of each device that has one, or else of
        device 0: which device a kernel was made on is no part of it.
        """
        contents = split(entry.statement, entry.plain)
        try:
            _require_sound(entry.statement.key, contents)
        except Excluded as exc:
            raise _damaged(entry.statement, exc.detail) from exc
        if entry.statement.canon == GROUP and contents[-1][1] != _group_bytes(contents[:-1]):
            raise _damaged(entry.statement, "the group file does not name the group's files")
        if roots.triton is not None:
            return "triton", install_files(roots.triton, _placed(entry.statement, contents, roots.triton, ""))
        folders = [f"triton/{device}/" for device in _devices(roots.inductor) or ["0"]]
        files = [file for f in folders for file in _placed(entry.statement, contents, roots.inductor, f)]
        return "inductor", install_files(roots.inductor, files)


def _devices(inductor: Path) -> list[str]:
    return [name for name in map(last, scan_folder(inductor, "triton").folders) if _is_device(name)]


def _is_device(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= 4


def _scan(root: Path, place: str, above: str) -> Iterator[Found | Skipped]:
    level = scan_folder(root, above)
    yield from level.skipped
    yield from (Skipped(file.name, Reason.BAD_NAME) for file in level.files)
    for folder in level.folders:
        if _HASH.fullmatch(last(folder)):
            seen = scan_folder(root, folder)
            yield from seen.skipped
            yield from _entries(root, place, folder, seen)
        else:
            yield Skipped(folder, Reason.BAD_NAME)


def _entries(root: Path, place: str, folder: str, seen: Folder) -> Iterator[Found | Skipped]:
    """The groups; without one, the folder, if it holds only what is looked for by name."""
    left = {file.name: file for file in seen.files}
    groups = [match[1] for name in left if (match := _GROUP_FILE.fullmatch(last(name)))]
    for kernel in groups:
        group_file = left.pop(f"{folder}/{_PREFIX}{kernel}.json")
        members = [file for name, file in left.items() if _kernel_of(last(name)) == kernel]
        for file in members:
            del left[file.name]
        yield Found("triton", f"{last(folder)}/{kernel}", root, place, (*members, group_file))
    if left and not groups and all(_STUB.fullmatch(last(name)) for name in left):
        yield Found("triton", last(folder), root, place, tuple(left.values()))
        return
    for name in left:
        member = _MEMBER.fullmatch(last(name)) or _STUB.fullmatch(last(name))
        yield Skipped(name, Reason.INCOMPLETE if member else Reason.BAD_NAME, "in no group file")


def _kernel_of(name: str) -> str:
    match = _MEMBER.fullmatch(name)
    return match[1] if match and not name.startswith(_PREFIX) else ""


def _read_group(found: Found) -> Entry:
    hash_, _, kernel = found.key.partition("/")
    group_file = found.files[-1]
    here = {last(file.name): file for file in found.files[:-1]}
    names = _children(read_stable(found.root, group_file, limit=_GROUP_FILE_BYTES))
    if not _are_members(kernel, names):
        raise Excluded(Reason.UNPARSEABLE, f"{group_file.name}: not the members of {kernel}")
    if missing := [name for name in names if name not in here]:
        raise Excluded(Reason.INCOMPLETE, f"{found.key}: {missing[0]} is not there")
    contents = read_files(found, [here[name] for name in names])
    _require_sound(f"{hash_}/{kernel}", contents)
    contents.append((last(group_file.name), _group_bytes(contents)))
    plain, files = join(contents)
    return Entry("triton", found.key, "", (), REQUIRED_FACETS["triton"], GROUP, plain, files)


def _children(data: bytes) -> list[str]:
    """The members' names, sorted. Triton writes a table of paths, its remote manager a list of names.

    Only the last names count: the file may have come from elsewhere with its folder, and what it led
    to there is not what lies here.
    """
    document = _parsed(data)
    children = document.get("child_paths") if isinstance(document, dict) else None
    if isinstance(children, dict):
        if not all(isinstance(path, str) and last(path) == name for name, path in children.items()):
            raise Excluded(Reason.UNPARSEABLE, "a group file whose names and paths disagree")
        return sorted(children)
    if isinstance(children, list) and all(isinstance(name, str) for name in children):
        return sorted(children)
    raise Excluded(Reason.UNPARSEABLE, "not a group file")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise Excluded(Reason.UNPARSEABLE, f"not JSON: {type(exc).__name__}") from exc


def _are_members(kernel: str, names: list[str]) -> bool:
    """Sorted, distinct, of this kernel, its description among them."""
    if names != sorted(set(names)) or f"{kernel}.json" not in names:
        return False
    return all(_kernel_of(name) == kernel for name in names)


def _group_bytes(members: Iterable[tuple[str, bytes]]) -> bytes:
    return canonjson.encode({"child_paths": {name: name for name, _ in members}})


def _require_sound(key: str, contents: list[tuple[str, bytes]]) -> None:
    """Descriptions parse and are of this folder; binaries are whole.

    Raises:
        Excluded: ``UNPARSEABLE``, or ``EMPTY`` for a file without content.
    """
    for name, data in contents:
        if not data:
            raise Excluded(Reason.EMPTY, name)
        if name.endswith(".json"):
            _require_own(key, name, _parsed(data))
        problem = ""
        if name.endswith(".so"):
            problem = elf_problem(data, machine=platform.machine(), type_=SHARED)
        elif name.endswith(_BINARIES):
            problem = elf_problem(data)
        if problem:
            raise Excluded(Reason.UNPARSEABLE, f"{name} is {problem}")


def _require_own(key: str, name: str, document: Any) -> None:
    """A kernel's description states the hash that its folder is named by."""
    if not isinstance(document, Mapping):
        raise Excluded(Reason.UNPARSEABLE, f"{name} is no description of a kernel")
    stated = document.get("hash", "")
    if name.endswith(_AUTOTUNE) or name.startswith(_PREFIX) or not stated:
        return
    try:
        folder = base64.b32encode(bytes.fromhex(stated)).decode().rstrip("=")
    except (TypeError, ValueError):
        folder = ""
    if folder != key.partition("/")[0]:
        raise Excluded(Reason.UNPARSEABLE, f"{name} describes another kernel")


def _facets(names: Iterable[str]) -> tuple[str, ...]:
    """What a folder without a group needs: a host for stubs, the same GPU for what was measured."""
    facets = list(REQUIRED_FACETS["triton"])
    for name in names:
        facets += REQUIRED_FACETS["triton+host"] if name.endswith(".so") else _MEASURED
    return tuple(dict.fromkeys(facets))


def _placed(
    statement: Statement, contents: list[tuple[str, bytes]], root: Path, above: str
) -> list[tuple[str, bytes]]:
    """The files by their names below ``root``; a group file with their paths there."""
    folder = f"{above}{statement.key.partition('/')[0]}/"
    files = [(folder + name, data) for name, data in contents]
    if statement.canon == GROUP:
        # As Triton itself would name them: links in the path to the root stay as they are.
        paths = {name: f"{root.absolute()}/{folder}{name}" for name, _ in contents[:-1]}
        files[-1] = (files[-1][0], json.dumps({"child_paths": paths}).encode())
    return files


def _damaged(statement: Statement, why: str) -> DamagedError:
    return DamagedError(f"{label(statement)}: {why}", subject=label(statement))
