# SPDX-License-Identifier: Apache-2.0
"""The memory backend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchrelay.storage import Backend, Capabilities, Get, Got, ObjectInfo, Page, not_found, too_large
from torchrelay_memory.config import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrelay.errors import StorageError
    from torchrelay.storage import Location

_PAGE = 1000

# Bytes and time by object name, by store name. Each step below is one operation on a dict, which
# Python makes atomic, so that no lock is needed that a fork could leave held.
_stores: dict[str, dict[str, tuple[bytes, float]]] = {}


def forget(name: str) -> None:
    """Drop the store ``memory://name``, if there is one."""
    _stores.pop(name, None)


class MemoryBackend(Backend):
    """Objects in a dict that all backends of one name in this process share.

    A forked child has a copy of its own. Nothing survives the process.
    """

    def __init__(self, name: str) -> None:
        super().__init__(capabilities=Capabilities(durable=False))
        self._name = name
        self._objects = _stores.setdefault(name, {})

    @classmethod
    def open(cls, location: Location, *, options: Mapping[str, str], create: bool) -> MemoryBackend:
        """The store of that name; it always exists, so ``create`` makes no difference."""
        return cls(read_config(location, options))

    def describe(self) -> str:
        """``memory://name``."""
        return f"memory://{self._name}"

    def _put_many(self, objects: Mapping[str, bytes]) -> dict[str, StorageError | None]:
        for name, data in objects.items():
            # A copy where it is not `bytes` itself, so that nothing of the caller's is kept.
            self._objects[name] = (bytes(data), time.time())
            self._wire.add(requests=1, uploaded_bytes=len(data))
        return dict.fromkeys(objects)

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        for get in gets:
            self._wire.add(requests=1)
            found = self._objects.get(get.name)
            if found is None:
                yield Got(get, error=not_found(get.name))
                continue
            end = None if get.length is None else get.offset + get.length
            data = found[0][get.offset : end]
            if len(data) > get.bound:
                yield Got(get, error=too_large(get))
                continue
            self._wire.add(downloaded_bytes=len(data))
            yield Got(get, data)

    def _stat_many(self, names: Sequence[str]) -> dict[str, ObjectInfo | StorageError | None]:
        self._wire.add(requests=len(names))
        return {name: self._info(name) for name in names}

    def _info(self, name: str) -> ObjectInfo | None:
        found = self._objects.get(name)
        return None if found is None else ObjectInfo(name, len(found[0]), found[1])

    def _delete_many(self, names: Sequence[str]) -> dict[str, StorageError | None]:
        self._wire.add(requests=len(names))
        for name in names:
            self._objects.pop(name, None)
        return dict.fromkeys(names)

    def _list_page(self, prefix: str, token: str) -> Page:
        self._wire.add(requests=1)
        names = sorted(name for name in list(self._objects) if name.startswith(prefix) and name > token)
        infos = (self._info(name) for name in names[:_PAGE])
        return Page(tuple(i for i in infos if i is not None), names[_PAGE - 1] if len(names) > _PAGE else "")
