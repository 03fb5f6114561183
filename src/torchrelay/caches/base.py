# SPDX-License-Identifier: Apache-2.0
"""What every kind of cache has in common: where its entries lie, and how they go out and come in.

A kind is one small module with one subclass of :class:`CacheKind`. Going out, :meth:`CacheKind.scan`
looks at names and ``stat`` only, and :meth:`CacheKind.read` reads what is new and brings it into
canonical form. Coming in, :meth:`CacheKind.check` refuses what cannot be an entry of this kind, and
:meth:`CacheKind.install` turns a verified entry into files. Names are held against the same strict
patterns in both directions: what fails is never pushed and never installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar

import msgspec

from torchrelay.caches.kernelname import Prefixes
from torchrelay.canonical.secrets import ENVIRONMENT_DUMP, holds_dump
from torchrelay.digest import Digest
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import File, Need, Statement


@dataclass(frozen=True, slots=True)
class Roots:
    """The directories that hold a process's caches.

    Attributes:
        inductor: ``TORCHINDUCTOR_CACHE_DIR``.
        triton: ``TRITON_CACHE_DIR``; None: ``<inductor>/triton/<device>``, found by scanning.
        trees: Declared roots of frameworks with caches of their own, by name.
        prefixes: Where Python and torch are installed for the processes that use the caches; None if
            that is not known.
    """

    inductor: Path
    triton: Path | None = None
    trees: Mapping[str, Path] = field(default_factory=dict)
    prefixes: Prefixes | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The names of all directories, as :attr:`Found.place` gives them; the first is Inductor's."""
        own = ("triton",) if self.triton is not None else ()
        return ("inductor", *own, *(f"tree:{name}" for name in sorted(self.trees)))

    def root(self, place: str) -> Path:
        """The directory of a place, as :attr:`Found.place` names it."""
        if place.startswith("tree:"):
            return self.trees[place.removeprefix("tree:")]
        return self.triton if place == "triton" and self.triton is not None else self.inductor


class Reason(str, Enum):
    """Why something in a cache directory is not an entry to push. Counted in every report."""

    TEMPORARY = "temporary"
    LOCKED = "locked"
    EMPTY = "empty"
    GROWING = "growing"
    UNPARSEABLE = "unparseable"
    INCOMPLETE = "incomplete"
    FOREIGN_OWNER = "foreign-owner"
    BAD_NAME = "bad-name"
    NOT_A_FILE = "not-a-file"
    TOO_LARGE = "too-large"
    SECRET = "secret"
    UNSTABLE_KEY = "unstable-key"
    OLDER_THAN_SCOPE = "older-than-scope"
    OVER_BUDGET = "over-budget"
    PULLED = "pulled"
    OTHER_VECTORS = "other-vectors"


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file as ``stat`` saw it; ``name`` is relative to the root, with ``/``."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def path_parts(self) -> tuple[str, ...]:
        """The components of :attr:`name`."""
        return tuple(self.name.split("/"))


@dataclass(frozen=True, slots=True)
class Found:
    """What may be an entry, by name and ``stat`` alone.

    Attributes:
        kind: Which cache it is from.
        key: The entry's key; for a file that holds several entries (GEMM choices) the file's own.
        root: The directory that the names of ``files`` are relative to.
        place: Name of that root: ``inductor``, ``triton`` or ``tree:<name>``.
        files: The files that make it up, in the order in which they are read.
    """

    kind: str
    key: str
    root: Path
    place: str
    files: tuple[FileStat, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """What is left out: where it lies, and why. ``detail`` never holds a secret's value."""

    path: str
    reason: Reason
    detail: str = ""


class Excluded(Exception):  # noqa: N818 - not an error: the entry is left out and counted
    """Raised by :meth:`CacheKind.read`: the entry is left out for this reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


class Alias(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What the same files are as an entry in another form: where one machine's name is part of it."""

    key: str
    canon: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as it goes out: its canonical bytes and what must be claimed of them.

    Attributes:
        facets: Names of the environment's facets that this entry needs.
        plain: The canonical bytes: of several files, end to end in the order of ``files``.
        files: Names and sizes of the files; empty where the name follows from the content.
        times: Masked numbers, put back on install.
        masked: What was masked, by field and kind of secret; counts only.
        alias: The form that the files would have for whoever cannot tell the key.

    Raises:
        Excluded: ``SECRET``: a dump of environment variables stands in its bytes. Each kind looks for
            secrets itself, and can say where they are; that nothing is signed with a dump in it does not
            rest on that.
    """

    kind: str
    key: str
    variant: str
    needs: tuple[Need, ...]
    facets: tuple[str, ...]
    canon: str
    plain: bytes
    files: tuple[File, ...] = ()
    times: tuple[int, ...] = ()
    masked: Mapping[str, int] = field(default_factory=dict)
    alias: Alias | None = None

    def __post_init__(self) -> None:
        if holds_dump(self.plain):
            raise Excluded(Reason.SECRET, f"{ENVIRONMENT_DUMP} in {self.kind} {self.key}")


class CacheKind(ABC):
    """One kind of cache; stateless."""

    name: ClassVar[str]

    @abstractmethod
    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """All that lies in this kind's places, by names and ``stat`` only; nothing is opened.

        A directory that vanishes under the scan is as if it had not been there.
        """

    @abstractmethod
    def read(self, found: Found) -> Iterator[Entry]:
        """The entries in ``found``, in canonical form; usually one.

        Raises:
            Excluded: It is unfinished, damaged, changed since the scan, or holds a secret.
        """

    def read_again(self, found: Found) -> Iterator[Entry]:
        """As :meth:`read`, for a caller that takes only bytes with the digest of what was read before.

        So what :meth:`read` makes sure of once, such as that there is no secret, need not be done again.
        """
        return self.read(found)

    @abstractmethod
    def check(self, statement: Statement) -> None:
        """Hold a statement that comes in against this kind's patterns, before anything is fetched.

        Raises:
            FormatError: Key, variant or file names are not possible for this kind.
        """

    @abstractmethod
    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Turn a verified entry into files, atomically, the one that readers look for last.

        Args:
            entry: Verified bytes; :meth:`check` has passed.
            roots: Where to.

        Returns:
            The place (as :attr:`Found.place`) and the names of the files, relative to its root. No
            names where no file is this entry alone: it was merged into one, or a better one stays.

        Raises:
            InTheWayError: A local file keeps this entry, and no other, from being installed.
            StorageError: The directory cannot be written; whatever was begun is taken back.
            DamagedError: The bytes are verified but cannot be an entry of this kind.
        """

    def alias(self, entry: VerifiedEntry, roots: Roots) -> Alias | None:
        """As :attr:`Entry.alias`, for an entry that is installed; None if it has none."""
        return None
