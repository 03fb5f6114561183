# SPDX-License-Identifier: Apache-2.0
"""Launch settings chosen by measuring: ``<xy>/<sha256>.best_config``, one JSON object each.

PyTorch's own key holds the kernel's source and PyTorch itself, so one file holds the choice for one
kernel. What was measured differs from run to run, but only the time taken says so and is masked:
two machines that choose alike have the same bytes.

A result of coordinate descent tuning has been searched for longer than one that was picked from a
list, so it replaces one, and is never replaced by one. Which it is must be known before anything is
fetched; so a searched result has the variant :data:`SEARCHED`, a listed one has none. Where a reader
accepts both for one key it needs only the searched one (:func:`outranks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchrelay import limits
from torchrelay.caches import files, jsontext
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.pickled import INDUCTOR_PLACE, check_plain, check_shape, file_found, refuse_secrets
from torchrelay.digest import digest_of
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import MAX_INTEGER, Statement

KEY = re.compile(r"[a-z2-7]{2}/[0-9a-f]{64}\.best_config")
SEARCHED = digest_of(b"found_by_coordesc")
"""The variant of a result of coordinate descent tuning."""

_SUFFIX = ".best_config"
_TIME = "time_taken_ms"
_SHARD = re.compile(r"[a-z2-7]{2}")


@dataclass(frozen=True, slots=True)
class _Choice:
    """One ``.best_config``, parsed."""

    members: dict[str, jsontext.Json]

    @property
    def searched(self) -> bool:
        return self.members.get("found_by_coordesc") is True

    @property
    def time(self) -> int | None:
        """The time taken, if it is an integer that a record can hold."""
        value = self.members.get(_TIME)
        number = value.integer() if isinstance(value, jsontext.Number) else None
        return number if number is not None and abs(number) <= MAX_INTEGER else None

    def with_time(self, time: int) -> bytes:
        return jsontext.encode({**self.members, _TIME: jsontext.Number(time)})


def outranks(variant: str, other: str) -> bool:
    """Whether a result of one variant makes another one for the same key superfluous."""
    return variant == SEARCHED and other != SEARCHED


def _parse(data: bytes, name: str) -> _Choice:
    """Parse one file.

    Raises:
        FormatError: It is not an object that names the list of settings that it was chosen from.
    """
    value = jsontext.parse(data, name=name, limit=limits.MAX_DOCUMENT_BYTES)
    if not isinstance(value, dict):
        raise FormatError(f"{name} is not a JSON object", subject=name)
    configs = value.get("configs_hash")
    if not isinstance(configs, str) or isinstance(configs, jsontext.Number):
        raise FormatError(f"{name} does not say what it was chosen from", subject=name)
    return _Choice(value)


class AutotuneKind(CacheKind):
    """Choices of launch settings for one Triton kernel each."""

    name: ClassVar[str] = "autotune"

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """``.best_config`` files in the two-letter folders, which also hold kernels.

        What lies there and is no entry of any kind is for the kind ``cpp`` to report, once.
        """
        for folder in files.scan_folder(roots.inductor).folders:
            if _SHARD.fullmatch(folder):
                listing = files.scan_folder(roots.inductor, folder)
                choices = (file for file in listing.files if file.name.endswith(_SUFFIX))
                yield from (self._found(roots.inductor, file) for file in choices)

    def _found(self, root: Path, file: FileStat) -> Found | Skipped:
        fine = KEY.fullmatch(file.name)
        return file_found(self.name, file.name, root, file) if fine else Skipped(file.name, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """The one choice in the file."""
        data = files.read_stable(found.root, found.files[0], limit=limits.MAX_DOCUMENT_BYTES)
        yield self.entry_from_bytes(found.key, data)

    def entry_from_bytes(self, key: str, data: bytes) -> Entry:
        """The entry that PyTorch wrote as ``data`` under ``key``.

        Raises:
            Excluded: The key is impossible, the bytes are no choice, or it holds a secret.
        """
        if not KEY.fullmatch(key):
            raise Excluded(Reason.BAD_NAME, key[:80])
        try:
            choice = _parse(data, key)
        except FormatError as exc:
            raise Excluded(Reason.UNPARSEABLE, exc.message) from exc
        refuse_secrets(jsontext.texts(choice.members), key)
        time = choice.time
        return Entry(
            kind=self.name,
            key=key,
            variant=SEARCHED if choice.searched else "",
            needs=(),
            facets=REQUIRED_FACETS[self.name],
            canon=jsontext.CANON,
            plain=jsontext.encode(choice.members) if time is None else choice.with_time(0),
            times=() if time is None else (time,),
            masked={} if not time else {f"{self.name}.{_TIME}:time": 1},
        )

    def check(self, statement: Statement) -> None:
        """A key of this kind, and the variant of a searched result or none."""
        searched = statement.variant == SEARCHED
        check_shape(statement, key=KEY, canons=(jsontext.CANON,), variant=searched)
        check_plain(statement)
        if statement.size > limits.MAX_DOCUMENT_BYTES:
            raise FormatError(f"{statement.key} claims {statement.size} bytes", subject=statement.key)

    def contents(self, entry: VerifiedEntry) -> bytes:
        """The file's contents, with the time put back.

        Raises:
            DamagedError: The bytes are not what the statement says they are.
        """
        key, times = entry.statement.key, entry.record.times
        choice = _parse(entry.plain, key)
        canonical = jsontext.encode(choice.members) == entry.plain
        masked = choice.time == 0 if times else choice.time is None
        searched = entry.statement.variant == SEARCHED
        if not canonical or not masked or len(times) > 1 or choice.searched is not searched:
            raise DamagedError(f"{key} is not a choice in canonical form", subject=key)
        return choice.with_time(times[0]) if times else entry.plain

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Write the file, unless a searched result lies there and this is a listed one."""
        key = entry.statement.key
        data = self.contents(entry)
        if entry.statement.variant != SEARCHED and self._is_searched(roots.inductor, key):
            return INDUCTOR_PLACE, ()
        return INDUCTOR_PLACE, files.install_files(roots.inductor, [(key, data)])

    def _is_searched(self, root: Path, key: str) -> bool:
        file = files.stat_file(root, key)
        if not isinstance(file, FileStat):
            return False
        try:
            return _parse(files.read_stable(root, file, limit=limits.MAX_DOCUMENT_BYTES), key).searched
        except (Excluded, FormatError):
            return False
