# SPDX-License-Identifier: Apache-2.0
"""Which blobs the store really has, and how large: never assumed, asked in as few requests as possible."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from torchrelay.errors import NotFoundError, StorageError
from torchrelay.statement import Stored
from torchrelay.storage import Backend, ObjectInfo
from torchrelay.store.layout import BLOBS

FEW = 2
"""Up to so many names are asked for one by one: an idle push may cost two requests beside listings."""

MANY_SHARDS = 48
"""From so many of the 256 shards on, one listing of everything is cheaper."""

LISTED_EACH = 50
"""Names that are listed to save one upload: a page has a thousand, so 20 uploads are worth one."""

LEAST_LISTED = 5_000
"""Names that are listed for however few uploads."""

MOST_LISTED = 50_000
"""Names that are listed for however many: they are held in memory, some 12 MiB."""


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


class Present:
    """Whether a blob is there already, whoever put it there: another workload, or a push that broke off.

    No record that this push has read names these blobs, so their names are known only once their bytes
    are. One listing answers for all of them, of no more pages than such a push is worth: what is
    not known counts as absent and goes up again.

    Args:
        backend: Where to look.
        count: How many will be asked for.
    """

    def __init__(self, backend: Backend, count: int) -> None:
        self._backend = backend
        self._sizes: dict[str, int] = {}
        self._by_name = count <= FEW
        if not self._by_name:
            self._list(min(MOST_LISTED, max(LEAST_LISTED, count * LISTED_EACH)))

    def has(self, stored: Stored) -> bool:
        """Whether the blob is known to be there at its size.

        Raises:
            StorageError: The store could not be asked.
        """
        sizes = _ask(self._backend, [stored.name]) if self._by_name else self._sizes
        return sizes.get(stored.name) == stored.size

    def _list(self, most: int) -> None:
        try:
            listed = islice(self._backend.list(BLOBS), most)
            self._sizes = {info.name: info.size for info in listed}
        except NotFoundError:  # the first push makes the store
            self._sizes = {}


def _ask(backend: Backend, names: Collection[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, found in backend.stat_many(names).items():
        if isinstance(found, StorageError):
            raise found
        if isinstance(found, ObjectInfo):
            sizes[name] = found.size
    return sizes
