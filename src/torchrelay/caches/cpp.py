# SPDX-License-Identifier: Apache-2.0
"""Compiled C++ kernels and instruction-set probes of ``torch._inductor.codecache.CppCodeCache``.

They lie in ``<cache>/<2 letters>/`` and are what is expensive on a CPU: Mega-Cache leaves them out.
A name is the hash of the source and the whole compiler command, in which ``-march=native`` is
literal, so the facets must say which CPU it was. PyTorch maps whatever lies under the name.

One entry is all that was compiled under one name:

- ``<key>.main.cpp``, ``<key>.main.so``: a kernel, or a C++ wrapper;
- ``<key>.main.command``: the command that gave a kernel its name. Not PyTorch's: a pull puts it there;
- ``<key>.cpp``, ``<key>.so``, ``<key>.so.load_ok``: a probe, or a CUDA kernel of CUTLASS;
- ``<key>.main.o``, and the ``<other key>.optimized.o`` it was linked with: PyTorch compiles them
  again if they are not there, although only the ``.so`` is loaded. The second lies in the folder of
  the first, not in its own; its entry's key is ``<folder>/<key>``.

In that command the directories of Python and torch stand. Where it can be shown what it was, the entry
has it with placeholders for them, and is named as if they were the directories; on install the kernel
gets the name that it has here (ADR 0006). All else is taken under its own name.

Of a library that was compiled from C++ only what is loaded is taken: the rest says where it was compiled
(ADR 0010).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torchrelay.caches.base import Alias, CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.bundle import FILES, join, label, last, read_files, refuse, require_plain, split
from torchrelay.caches.elf import RELOCATABLE, SHARED, elf_problem, loaded_part
from torchrelay.caches.files import install_files, scan_folder
from torchrelay.caches.kernelname import Naming, Placed, Prefixes, Source, command_of, is_command
from torchrelay.digest import digest_of
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, UsageError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

COMMAND = "kernel-command-1"
"""The canonical form of a kernel that any install prefix can have: command, source, library."""

_FOLDER = re.compile(r"[a-z2-7]{2}")
_KEY = re.compile(r"(?:([a-z2-7]{2})/)?(c[a-z2-7]{51})")
_FILE = re.compile(r"(c[a-z2-7]{51})(\.[a-z_.]+)")

# In the order of installation: sources, objects, what is loaded, the mark that it loads.
_COMMAND, _SOURCE, _LIBRARY = ".main.command", ".main.cpp", ".main.so"
_SUFFIXES = (
    _COMMAND,
    ".cpp",
    ".main.cpp",
    ".optimized.cpp",
    ".main.o",
    ".optimized.o",
    ".so",
    ".main.so",
    ".so.load_ok",
    ".main.so.load_ok",
)
_TYPES = {".main.o": RELOCATABLE, ".optimized.o": RELOCATABLE, ".so": SHARED, ".main.so": SHARED}
_MAY_BE_EMPTY = ".load_ok"
_KERNEL = (_SOURCE, _LIBRARY)


class CppKind(CacheKind):
    """C++ kernels and probes; one entry a name.

    Args:
        naming: How kernels in the directory may have been named; None: only those that a pull
            installed are recognised.
    """

    name: ClassVar[str] = "cpp"

    def __init__(self, naming: Naming | None = None) -> None:
        self._naming = naming or Naming()

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """The kernels in the two-letter folders."""
        for folder in scan_folder(roots.inductor).folders:
            if _FOLDER.fullmatch(folder):
                yield from _scan(roots.inductor, folder)

    def read(self, found: Found) -> Iterator[Entry]:
        """The kernel with its source; its binaries are whole and of this machine."""
        _require_unlocked(found)
        contents = read_files(found, found.files)
        for name, data in contents:
            if problem := _problem(name, data):
                raise Excluded(Reason.UNPARSEABLE, f"{name}: {problem}")
        contents = _without_origin(contents)
        command = self._command(found.key, dict(contents))
        if command is not None and (other := self._naming.contradiction(command)):
            raise Excluded(Reason.OTHER_VECTORS, f"compiled for {other}")
        contents = [(name, data) for name, data in contents if not name.endswith(_COMMAND)]
        plain, files = join(contents)
        own = Entry(self.name, found.key, "", (), REQUIRED_FACETS[self.name], FILES, plain, files)
        yield own if command is None else _for_any_prefix(own, command, contents)

    def _command(self, key: str, contents: Mapping[str, bytes]) -> str | None:
        """The command of a kernel that is nothing but source and library, if it can be shown."""
        if {name.removeprefix(key) for name in contents} - {_COMMAND} != set(_KERNEL):
            return None
        try:
            source = Source(contents[key + _SOURCE])
        except ValueError:
            return None
        beside = contents.get(key + _COMMAND)
        known = None if beside is None else command_of(beside, source, key)
        return known or self._naming.command_of(source, key)

    def check(self, statement: Statement) -> None:
        """Key and file names are those that PyTorch gives; a binary is among the files."""
        require_plain(statement, (FILES, COMMAND))
        key = _KEY.fullmatch(statement.key)
        if not key or key[1] == key[2][1:3]:
            raise refuse(statement, "not the name of a C++ kernel")
        suffixes = [file.name.removeprefix(key[2]) for file in statement.files]
        if suffixes != sorted(set(suffixes) & set(_SUFFIXES), key=_SUFFIXES.index):
            raise refuse(statement, "its files are not those of a C++ kernel")
        if statement.canon == COMMAND and (key[1] or suffixes != [_COMMAND, *_KERNEL]):
            raise refuse(statement, "its files are not command, source and library of a kernel")
        if statement.canon == FILES and _COMMAND in suffixes:
            raise refuse(statement, "it holds a command without being named by it")
        if not any(suffix in _TYPES for suffix in suffixes):
            raise refuse(statement, "it holds no binary")

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """The source first, then what is loaded."""
        contents = split(entry.statement, entry.plain)
        for name, data in contents:
            if problem := _problem(name, data):
                raise DamagedError(
                    f"{label(entry.statement)}: {name} is {problem}", subject=label(entry.statement)
                )
        folder, _, key = entry.statement.key.rpartition("/")
        if entry.statement.canon == COMMAND:
            key, contents = _placed(entry.statement, contents, roots.prefixes)
        folder = folder or key[1:3]
        files = [(f"{folder}/{name}", data) for name, data in contents]
        return "inductor", install_files(roots.inductor, files)

    def alias(self, entry: VerifiedEntry, roots: Roots) -> Alias | None:
        """The kernel under the name that it gets here."""
        if entry.statement.canon != COMMAND or roots.prefixes is None:
            return None
        try:
            contents = split(entry.statement, entry.plain)
            key, (_, *kernel) = _placed(entry.statement, contents, roots.prefixes)
        except DamagedError:
            return None  # installing it says so
        return _alias(key, kernel)


def _without_origin(contents: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The files, of each library that a C++ source lies beside only what is loaded."""
    names = {name for name, _ in contents}
    return [
        (name, loaded_part(data) if f"{name.removesuffix('.so')}.cpp" in names else data)
        for name, data in contents
    ]


def _for_any_prefix(own: Entry, command: str, contents: Sequence[tuple[str, bytes]]) -> Entry:
    """``own``, named as if the placeholders in ``command`` were directories."""
    by_suffix = {name.removeprefix(own.key): data for name, data in contents}
    key = Source(by_suffix[_SOURCE]).name(command)
    files = [(key + _COMMAND, command.encode()), *((key + suffix, by_suffix[suffix]) for suffix in _KERNEL)]
    plain, names = join(files)
    alias = _alias(own.key, contents)
    return Entry(own.kind, key, "", (), own.facets, COMMAND, plain, names, alias=alias)


def _alias(key: str, kernel: Sequence[tuple[str, bytes]]) -> Alias:
    return Alias(key, FILES, digest_of(join(kernel)[0]))


def _placed(
    statement: Statement, contents: Sequence[tuple[str, bytes]], prefixes: Prefixes | None
) -> tuple[str, list[tuple[str, bytes]]]:
    """Key and files of a kernel as they are named where Python and torch lie in ``prefixes``.

    Raises:
        DamagedError: The entry's command is none, or does not give the entry's name.
        UsageError: Nobody knows where they lie.
    """
    if prefixes is None:
        raise UsageError(
            "it is not known where torch is installed, so a kernel has no name here",
            remedy="Run this with the Python that torch is installed for.",
            subject=label(statement),
        )
    if len(contents) != 3:
        raise DamagedError(
            f"{label(statement)}: it is not command, source and library", subject=label(statement)
        )
    (_, command), (_, text), (_, library) = contents
    try:
        source, written = Source(text), command.decode("ascii")
    except ValueError as exc:
        raise DamagedError(f"{label(statement)}: source or command is no text") from exc
    if not is_command(written) or source.name(written) != statement.key:
        raise DamagedError(f"{label(statement)}: its command does not give its name")
    key = source.name(prefixes.expand(written))
    beside = Placed(command=written, prefixes=prefixes).encode()
    return key, [(key + _COMMAND, beside), (key + _SOURCE, text), (key + _LIBRARY, library)]


def _scan(root: Path, folder: str) -> Iterator[Found | Skipped]:
    groups: dict[str, list[FileStat]] = {}
    seen = scan_folder(root, folder)
    marks = [_empty_mark(root, item) for item in seen.skipped if item.path.endswith(_MAY_BE_EMPTY)]
    yield from (item for item in seen.skipped if not item.path.endswith(_MAY_BE_EMPTY))
    for file in (*seen.files, *filter(None, marks)):
        match = _FILE.fullmatch(last(file.name))
        if match and match[2] in _SUFFIXES:
            groups.setdefault(match[1], []).append(file)
        elif file.name.endswith((".so", ".o")):
            yield Skipped(file.name, Reason.BAD_NAME)
    for key, files in groups.items():
        yield from _group(root, folder, key, files)


def _group(root: Path, folder: str, key: str, files: list[FileStat]) -> Iterator[Found | Skipped]:
    suffixes = {last(file.name).removeprefix(key) for file in files}
    if suffixes & _TYPES.keys():
        ordered = sorted(files, key=lambda file: _SUFFIXES.index(last(file.name).removeprefix(key)))
        yield Found("cpp", key if key[1:3] == folder else f"{folder}/{key}", root, "inductor", tuple(ordered))
    elif suffixes != {".optimized.cpp"}:  # whose object lies in the folder it was made for
        yield Skipped(f"{folder}/{key}", Reason.INCOMPLETE, "a source without its binary")


def _empty_mark(root: Path, item: Skipped) -> FileStat | None:
    """A ``.load_ok`` says all that it says by being there."""
    with contextlib.suppress(OSError):
        info = (root / item.path).lstat()
        if item.reason is Reason.EMPTY and stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
            return FileStat(item.path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    return None


def _require_unlocked(found: Found) -> None:
    """PyTorch holds ``locks/<key>.lock`` while it compiles, and the linker writes in place."""
    path = found.root / "locks" / f"{last(found.key)}.lock"
    with contextlib.suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise Excluded(Reason.LOCKED, path.name) from exc
        finally:
            os.close(descriptor)


def _problem(name: str, data: bytes) -> str:
    match = _FILE.fullmatch(name)
    if match and match[2] in _TYPES:
        return elf_problem(data, machine=platform.machine(), type_=_TYPES[match[2]])
    return ""
