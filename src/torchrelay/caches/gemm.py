# SPDX-License-Identifier: Apache-2.0
"""Measured choices of max-autotune: ``cache/<hash of the system>``, one JSON file for all.

The file is ``{"system": …, "cache": {operator: {inputs: {precision: {choice: milliseconds}}}}}``
(``codecache.PersistentCache``). PyTorch takes a group (operator, inputs, precision) only if it holds
every choice that it would measure, and else measures all of them again; so one group is one entry,
whole or not at all. What is in the file and is no such group belongs to somebody else and is let be.

Coming in, groups are added to the local file and never replace one: numbers of two machines are not
mixed. The file is rewritten as a whole, under a lock of this user's, and atomically. Neither PyTorch
nor another user of a shared directory takes that lock. So the file is looked at again right before it
is renamed into place, and if it has changed, everything starts over. A write of theirs in the moment
between may lose groups, their own or ours; they are measured or pulled again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchrelay import limits
from torchrelay.caches import files, jsontext
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.jsontext import Json, Number
from torchrelay.caches.pickled import (
    INDUCTOR_PLACE,
    bad_names,
    check_plain,
    check_shape,
    file_found,
    refuse_secrets,
)
from torchrelay.caches.state import directory_lock
from torchrelay.digest import digest_of
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError, InTheWayError, TransientError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

KEY = re.compile(r"(?P<system>[0-9a-f]{64})/[0-9a-f]{64}")
MAX_FILE_BYTES = 64 * limits.MIB
"""The whole file; a group is some 10 KiB."""

_FOLDER = "cache"
_FILE = re.compile(r"[0-9a-f]{64}")
_ATTEMPTS = 8
_MEMBERS = {"system", "operator", "inputs", "precision", "choices"}

Members = dict[str, Json]


@dataclass(frozen=True, slots=True)
class _Group:
    """One complete group: the choices for an operator on inputs at a precision."""

    system: Members
    operator: str
    inputs: str
    precision: str
    choices: Members

    @property
    def key(self) -> str:
        name = jsontext.encode([self.operator, self.inputs, self.precision])
        return f"{self.system.get('hash')}/{digest_of(name)}"

    def encode(self) -> bytes:
        return jsontext.encode({name: getattr(self, name) for name in _MEMBERS})

    def add_to(self, cache: Members) -> bool:
        """Put the group into ``cache`` unless there is one; whether anything changed.

        Raises:
            FormatError: Something that is no object is in the way.
        """
        level = cache
        for name in (self.operator, self.inputs):
            below = level.setdefault(name, {})
            if not isinstance(below, dict):
                raise FormatError(f"{name[:80]!r} in the local file is not an object")
            level = below
        if self.precision in level:
            return False
        level[self.precision] = self.choices
        return True


def _parse_file(data: bytes, name: str) -> tuple[Members, Members]:
    """The system and the cache in a local file.

    Raises:
        FormatError: It is not such a file, or of another system than its name says.
    """
    document = jsontext.parse(data, name=name, limit=MAX_FILE_BYTES)
    system = document.get("system") if isinstance(document, dict) else None
    cache = document.get("cache") if isinstance(document, dict) else None
    if not isinstance(system, dict) or not isinstance(cache, dict):
        raise FormatError(f"{name} is not a file of measured choices", subject=name)
    stated = system.get("hash")
    if isinstance(stated, Number) or stated != name.rpartition("/")[2]:
        raise FormatError(f"{name} is of another system than its name says", subject=name)
    return system, cache


def _groups(system: Members, cache: Members) -> Iterator[_Group]:
    for operator, by_inputs in _objects(cache):
        for inputs, by_precision in _objects(by_inputs):
            for precision, choices in _objects(by_precision):
                if _are_choices(choices):
                    yield _Group(system, operator, inputs, precision, choices)


def _objects(members: Members) -> Iterable[tuple[str, Members]]:
    return ((name, value) for name, value in members.items() if isinstance(value, dict))


def _are_choices(choices: Json) -> bool:
    if not isinstance(choices, dict) or not choices:
        return False
    return all(isinstance(time, Number) for time in choices.values())


def _parse_group(data: bytes, key: str) -> _Group:
    """The group in an entry.

    Raises:
        FormatError: It is not one in canonical form, or not the one that ``key`` names.
    """
    value = jsontext.parse(data, name=key, limit=limits.MAX_DOCUMENT_BYTES)
    if isinstance(value, dict) and value.keys() == _MEMBERS:
        system, choices = value["system"], value["choices"]
        names = [value[name] for name in ("operator", "inputs", "precision")]
        texts = [name for name in names if isinstance(name, str) and not isinstance(name, Number)]
        if (
            isinstance(system, dict)
            and isinstance(choices, dict)
            and _are_choices(choices)
            and len(texts) == 3
        ):
            group = _Group(system, texts[0], texts[1], texts[2], choices)
            whole = not isinstance(system.get("hash"), Number) and group.key == key
            if whole and group.encode() == data:
                return group
    raise FormatError(f"gemm {key} is not the group that its key names", subject=f"gemm {key}")


class GemmKind(CacheKind):
    """Groups of measured choices."""

    name: ClassVar[str] = "gemm"

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """The files in ``cache``, one for each system that PyTorch has measured."""
        listing = files.scan_folder(roots.inductor, _FOLDER)
        yield from (*listing.skipped, *bad_names(listing.folders))
        for file in listing.files:
            key = file.path_parts[-1]
            fine = _FILE.fullmatch(key)
            found = file_found(self.name, key, roots.inductor, file)
            yield found if fine else Skipped(file.name, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """All complete groups in the file; one that holds a secret leaves out the file."""
        file = found.files[0]
        data = files.read_stable(found.root, file, limit=MAX_FILE_BYTES)
        try:
            groups = list(_groups(*_parse_file(data, file.name)))
        except FormatError as exc:
            raise Excluded(Reason.UNPARSEABLE, exc.message) from exc
        yield from [self._entry(group) for group in groups]

    def _entry(self, group: _Group) -> Entry:
        plain = group.encode()
        if len(plain) > limits.MAX_DOCUMENT_BYTES:
            raise Excluded(Reason.TOO_LARGE, f"{group.key}: {len(plain)} bytes")
        refuse_secrets(jsontext.texts(jsontext.parse(plain, name=group.key, limit=len(plain))), group.key)
        facets = REQUIRED_FACETS[self.name]
        return Entry(self.name, group.key, "", (), facets, jsontext.CANON, plain)

    def check(self, statement: Statement) -> None:
        """A key of this kind, and nothing else."""
        check_shape(statement, key=KEY, canons=(jsontext.CANON,), variant=False)
        check_plain(statement)
        if statement.size > limits.MAX_DOCUMENT_BYTES:
            raise FormatError(f"gemm {statement.key} claims {statement.size} bytes", subject=statement.key)

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Merge the group into the local file. No names: the file is not this entry alone."""
        return self.install_many([entry], roots)

    def install_many(self, entries: Sequence[VerifiedEntry], roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Merge groups into their local files, with one rewrite a file.

        Raises:
            DamagedError: One of them is not the group that its key names; nothing was changed.
            StorageError: A file cannot be read or written, or holds something else.
        """
        by_system: dict[str, list[_Group]] = {}
        for entry in entries:
            if entry.record.times:
                raise DamagedError(f"gemm {entry.statement.key} has times to put back, but no place for them")
            group = _parse_group(entry.plain, entry.statement.key)
            by_system.setdefault(entry.statement.key.partition("/")[0], []).append(group)
        for system, groups in by_system.items():
            with directory_lock(roots.inductor, "gemm"):
                _merge(roots.inductor, f"{_FOLDER}/{system}", groups)
        return INDUCTOR_PLACE, ()


class _ChangedError(Exception):
    """The file is not the one that was seen. Never leaves this module."""


def _merge(root: Path, name: str, groups: Sequence[_Group]) -> None:
    for _ in range(_ATTEMPTS):
        seen = files.stat_file(root, name)
        if isinstance(seen, Skipped):
            raise _in_the_way(root, name, f"{seen.reason.value} {seen.detail}".strip())
        try:
            merged = _merged(root, name, seen, groups)
        except _ChangedError:
            continue
        if merged is None:
            return
        if files.stat_file(root, name) == seen:
            files.install_files(root, [(name, merged)])
            return
    raise TransientError(
        f"{root / name} is being rewritten by another process again and again",
        remedy="Pull again when the other process has finished tuning.",
        subject=name,
    )


def _merged(root: Path, name: str, seen: FileStat | None, groups: Sequence[_Group]) -> bytes | None:
    """The file's new contents; None if all groups are there already."""
    if seen is None:
        system: Members = groups[0].system
        cache: Members = {}
    else:
        try:
            system, cache = _parse_file(files.read_stable(root, seen, limit=MAX_FILE_BYTES), name)
        except Excluded as exc:
            if exc.reason is Reason.GROWING:
                raise _ChangedError from exc
            raise _in_the_way(root, name, exc.detail) from exc
        except FormatError as exc:
            raise _in_the_way(root, name, exc.message) from exc
    try:
        changed = [group.add_to(cache) for group in groups]
    except FormatError as exc:
        raise _in_the_way(root, name, exc.message) from exc
    return jsontext.encode({"system": system, "cache": cache}, sort=False) if any(changed) else None


def _in_the_way(root: Path, name: str, what: str) -> InTheWayError:
    return InTheWayError(
        f"{root / name} cannot be merged into: {what}",
        remedy="PyTorch cannot read it either: move the file away, then pull again.",
        subject=name,
    )
