# SPDX-License-Identifier: Apache-2.0
"""The stamp of a cache directory: the environment that what lies in it was compiled in.

A push takes the environment from here and never guesses it from itself: it may run on a login node
for a directory that GPU nodes filled. The first to stamp a directory wins; whoever comes later with
other facets is told, and installs and pushes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrelay import canonjson
from torchrelay.caches.state import opened_state, read_state, state_lock, state_path, write_state
from torchrelay.environment import Environment
from torchrelay.errors import DamagedError, StampError
from torchrelay.limits import MAX_DOCUMENT_BYTES
from torchrelay.statement import FORMAT, Wire, parse_versioned

_NAME = "stamp.json"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a directory was filled under, and since when that is known.

    Attributes:
        environment: Of the processes that compile into it.
        since_ns: The moment from which the stamp holds, in nanoseconds since 1970; files that are
            older were there before, and nobody says what made them.
    """

    environment: Environment
    since_ns: int


class _StampFile(Wire, frozen=True):
    format: int
    environment: Environment
    since_ns: int


def read_stamp(root: Path) -> Stamp | None:
    """The stamp of ``root``; None if it has none.

    Raises:
        StampError: It is damaged, or of a newer format.
        UnsafeDirectoryError: Somebody else could have written it.
        StorageError: It cannot be read.
    """
    path = state_path(root) / _NAME
    try:
        data = read_state(root, _NAME, limit=MAX_DOCUMENT_BYTES)
        if data is None:
            return None
        stamp: _StampFile = parse_versioned(data, _StampFile, name=str(path), limit=MAX_DOCUMENT_BYTES)
    except DamagedError as exc:
        raise StampError(
            f"the stamp of {root} cannot be used: {exc.message}",
            remedy=f"Move {path} away; then push with --assume-environment this, if this machine filled it.",
            subject=str(path),
        ) from exc
    return Stamp(stamp.environment, stamp.since_ns)


def write_stamp(root: Path, stamp: Stamp) -> Stamp:
    """Stamp ``root``, unless it is stamped already: atomic, and the first of several writers wins.

    Returns:
        The stamp that holds: an older one if its facets are the same.

    Raises:
        StampError: ``root`` is stamped with other facets, or its stamp is damaged.
        UnsafeDirectoryError, StorageError: It cannot be written; nothing has changed.
    """
    with opened_state(root, create=True) as folder:
        assert folder is not None  # noqa: S101 - for the type checker: it was created
        with state_lock(root, folder):
            held = read_stamp(root)
            if held is None:
                body = _StampFile(format=FORMAT, environment=stamp.environment, since_ns=stamp.since_ns)
                write_state(root, _NAME, canonjson.encode(body))
                return stamp
    require_same(root, held, stamp.environment)
    return held


def require_same(root: Path, held: Stamp, environment: Environment) -> None:
    """The facets of ``environment`` are those that ``root`` was filled under.

    Settings may differ: they stand in PyTorch's keys, so they cost a hit but never harm.

    Raises:
        StampError: They are not; the message names those that differ.
    """
    theirs, ours = held.environment.facets, environment.facets
    differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if differing:
        raise StampError(
            f"{root} was filled under another environment; it differs in {', '.join(differing)}",
            remedy="Use a cache directory of its own for each environment (TORCHINDUCTOR_CACHE_DIR), "
            "or run `torchrelay explain` to see the values.",
            subject=str(root),
        )
