# SPDX-License-Identifier: Apache-2.0
"""Which blobs the store really has, and how large: never assumed, asked in as few requests as possible."""

from __future__ import annotations

from collections.abc import Collection

from torchrelay.errors import StorageError
from torchrelay.storage import Backend, ObjectInfo
from torchrelay.store.layout import BLOBS

FEW = 2
"""Up to so many names are asked for one by one: an idle push may cost two requests beside listings."""

MANY_SHARDS = 48
"""From so many of the 256 shards on, one listing of everything is cheaper."""


def stored_sizes(backend: Backend, names: Collection[str], *, few: int = FEW) -> dict[str, int]:
    """The sizes in bytes of those of ``names`` that are there.

    Args:
        backend: Where to look.
        names: Blob names.
        few: Up to so many names are asked for one by one; 0 always lists.

    Raises:
        StorageError: The store could not be asked; nothing is assumed then.
    """
    if not names:
        return {}
    if len(names) <= few:
        return _ask(backend, names)
    shards = {name[: len(BLOBS) + 3] for name in names}
    prefixes = sorted(shards) if len(shards) < MANY_SHARDS else [BLOBS]
    wanted = frozenset(names)
    return {
        info.name: info.size for prefix in prefixes for info in backend.list(prefix) if info.name in wanted
    }


def _ask(backend: Backend, names: Collection[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, found in backend.stat_many(names).items():
        if isinstance(found, StorageError):
            raise found
        if isinstance(found, ObjectInfo):
            sizes[name] = found.size
    return sizes
