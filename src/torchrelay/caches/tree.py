# SPDX-License-Identifier: Apache-2.0
"""Declared roots of frameworks that keep caches of their own: ``--tree NAME=PATH``.

vLLM, SGLang, FlashInfer and DeepGEMM keep the parts of one compiled thing in one folder, so one entry
is what lies directly in one folder, and its key is ``<name>/<folder>``. torchrelay cannot look into
these files: every facet must be equal, paths in them are not touched, and a folder that holds
anything that cannot be taken is left out as a whole, for half of one may be worse than none.

Files are in the order of their names, but JSON after the others and what is called an index, manifest,
metadata or group file last: they are installed in this order, and readers look for those.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from torchrelay import limits
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.bundle import FILES, join, label, last, read_files, refuse, require_plain, split
from torchrelay.caches.elf import SHARED, elf_problem
from torchrelay.caches.files import Folder, install_files, is_temporary, scan_folder
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, NotFoundError, UsageError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,%~-]{0,199}")
_TOP = "."
"""The folder in the key of what lies in the root itself."""

_MAX_DEPTH = 7
"""Folders above a file; `check_file_name` allows eight components."""

_INDEXES = ("index", "manifest", "metadata", "__grp__")
_BYTECODE = "__pycache__"
# A lock or temporary file beside finished ones is no part of them; anything else may be.
_BESIDE = (Reason.TEMPORARY, Reason.LOCKED)


class TreeKind(CacheKind):
    """Folders below declared roots; one entry a folder."""

    name: ClassVar[str] = "tree"

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """Each folder that holds files, below each declared root; other roots in it are left out."""
        check_trees(roots)
        for name, root in sorted(roots.trees.items()):
            check_tree_name(name)
            others = {os.path.realpath(path) for path in _paths(roots)} - {os.path.realpath(root)}
            yield from _scan(name, root, "", others)

    def read(self, found: Found) -> Iterator[Entry]:
        """The files as they are."""
        contents = read_files(found, found.files)
        for name, data in contents:
            if problem := _problem(name, data):
                raise Excluded(Reason.UNPARSEABLE, f"{name}: {problem}")
        plain, files = join(contents)
        yield Entry(self.name, found.key, "", (), REQUIRED_FACETS[self.name], FILES, plain, files)

    def check(self, statement: Statement) -> None:
        """Key and file names are printable, relative, and nothing hidden or temporary."""
        require_plain(statement, (FILES,))
        name, folder = split_key(statement)
        parts = [] if folder == "" else folder.split("/")
        if not _NAME.fullmatch(name) or not all(map(_is_part, parts)) or len(parts) > _MAX_DEPTH:
            raise refuse(statement, "not a possible folder of a tree")
        if not all(_is_file(file.name) for file in statement.files):
            raise refuse(statement, "it names a file that no tree may hold")

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """The files into the same folder of the root declared under the same name.

        Raises:
            NotFoundError: No root of that name is declared here.
        """
        name, folder = split_key(entry.statement)
        if name not in roots.trees:
            raise NotFoundError(
                f"no directory is declared for the tree {name!r}",
                remedy=f"Name one with --tree {name}=PATH, or leave these entries out.",
                subject=name,
            )
        contents = split(entry.statement, entry.plain)
        for file, data in contents:
            if problem := _problem(file, data):
                raise DamagedError(
                    f"{label(entry.statement)}: {file} is {problem}", subject=label(entry.statement)
                )
        below = f"{folder}/" if folder else ""
        files = [(below + file, data) for file, data in contents]
        return f"tree:{name}", install_files(roots.trees[name], files)


def check_tree_name(name: str) -> str:
    """``name``, if a tree can have it.

    Raises:
        UsageError: It cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot name a tree",
            remedy="Use up to 32 letters, digits, '.', '_' and '-': --tree vllm=PATH.",
            subject=name[:80],
        )
    return name


def check_trees(roots: Roots, private: Iterable[Path] = ()) -> None:
    """No declared tree takes in what is not a framework's own.

    A tree's files are pushed as they are. So its root is neither one of the other cache directories
    nor in one, whose entries have kinds of their own; it is not the folder that one lies in; and it
    holds nothing of ``private``.

    Args:
        roots: The cache directories.
        private: Directories whose contents must never leave this machine: keys, and what is
            remembered of stores.

    Raises:
        UsageError: A tree does.
    """
    caches = [Path(os.path.realpath(path)) for path in (roots.inductor, roots.triton) if path is not None]
    secret = [Path(os.path.realpath(path)) for path in private]
    for name, root in roots.trees.items():
        check_tree_name(name)
        real = Path(os.path.realpath(root))
        for path in (*caches, *secret):
            above = real in path.parents if path in secret else real == path.parent
            if above or real == path or path in real.parents:
                raise UsageError(
                    f"the tree {name} at {root} and {path} must not lie in one another",
                    remedy="Name the directory that the framework itself keeps its cache in: "
                    "--tree vllm=PATH.",
                    subject=name,
                )


def split_key(statement: Statement) -> tuple[str, str]:
    """The tree's name and the folder in it; empty for its root."""
    name, _, folder = statement.key.partition("/")
    return name, "" if folder == _TOP else folder or "/"


def _paths(roots: Roots) -> Iterator[Path]:
    yield roots.inductor
    yield from roots.trees.values()
    if roots.triton is not None:
        yield roots.triton


def _scan(name: str, root: Path, folder: str, others: set[str]) -> Iterator[Found | Skipped]:
    seen = scan_folder(root, folder)
    yield from seen.skipped
    if seen.files:
        yield _group(name, root, folder, seen)
    for below in seen.folders:
        if last(below) == _BYTECODE or os.path.realpath(root / below) in others:
            continue
        if not _is_part(last(below)) or below.count("/") >= _MAX_DEPTH:
            yield Skipped(below, Reason.BAD_NAME, f"at most {_MAX_DEPTH} folders deep; declare a root below")
        else:
            yield from _scan(name, root, below, others)


def _group(name: str, root: Path, folder: str, seen: Folder) -> Found | Skipped:
    key = f"{name}/{folder or _TOP}"
    bad = next((file.name for file in seen.files if not _is_file(last(file.name))), "")
    bad = bad or next((item.path for item in seen.skipped if item.reason not in _BESIDE), "")
    if bad:
        return Skipped(folder or _TOP, Reason.INCOMPLETE, f"{bad} cannot be taken")
    if len(key) > limits.MAX_KEY_CHARS:
        return Skipped(folder, Reason.BAD_NAME, "its name is too long")
    # Each name stands in the signed record, which has a bound of its own.
    if sum(len(last(file.name)) + 40 for file in seen.files) > limits.MAX_RECORD_BYTES // 2:
        return Skipped(folder or _TOP, Reason.TOO_LARGE, f"{len(seen.files)} files")
    return Found("tree", key, root, f"tree:{name}", _ordered(seen.files))


def _ordered(files: tuple[FileStat, ...]) -> tuple[FileStat, ...]:
    """By name, so that the same files are the same bytes everywhere; what readers look for last."""
    return tuple(sorted(files, key=lambda file: (_rank(last(file.name)), file.name)))


def _rank(name: str) -> int:
    """Later for what describes the others: JSON, and last an index of them by name."""
    stem, _, suffix = name.lower().rpartition(".")
    if any(word in (stem or suffix) for word in _INDEXES):
        return 2
    return int(suffix == "json")


def _is_part(part: str) -> bool:
    return _PART.fullmatch(part) is not None and not is_temporary(part)


def _is_file(name: str) -> bool:
    return _is_part(name) and not name.endswith(".lock")


def _problem(name: str, data: bytes) -> str:
    return elf_problem(data, machine=platform.machine(), type_=SHARED) if name.endswith(".so") else ""
