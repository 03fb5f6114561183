# SPDX-License-Identifier: Apache-2.0
"""The local backend: folders and files, atomic, durable, torn-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.errors import NotFoundError
from torchrelay.storage import Backend, Capabilities, Get, Got, ObjectInfo, Page
from torchrelay_local import reading
from torchrelay_local.config import read_config
from torchrelay_local.folders import Folders
from torchrelay_local.writing import Writer, delete_many

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torchrelay.errors import StorageError
    from torchrelay.storage import Location


class LocalBackend(Backend):
    """Objects as files below ``root``, under their own names.

    Args:
        root: The store's directory.
        create: Whether a put may make it.
    """

    def __init__(self, root: Path, *, create: bool = False) -> None:
        super().__init__(capabilities=Capabilities())
        self._root = root
        self._folders = Folders(root, create=create)
        self._writer = Writer(self._folders)

    @classmethod
    def open(cls, location: Location, *, options: Mapping[str, str], create: bool) -> LocalBackend:
        """The store in the location's directory. The disk is not touched yet."""
        return cls(read_config(location, options), create=create)

    def describe(self) -> str:
        """The directory's path."""
        return str(self._root)

    def _put_many(self, objects: Mapping[str, bytes]) -> dict[str, StorageError | None]:
        results = self._writer.put_many(objects)
        sent = sum(len(objects[name]) for name, error in results.items() if error is None)
        self._wire.add(requests=len(objects), uploaded_bytes=sent)
        return results

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        self._check_root()
        for got in reading.read_many(self._folders, gets):
            self._wire.add(requests=1, downloaded_bytes=len(got.data or b""))
            yield got

    def _stat_many(self, names: Sequence[str]) -> dict[str, ObjectInfo | StorageError | None]:
        self._check_root()
        self._wire.add(requests=len(names))
        return reading.stat_many(self._folders, names)

    def _delete_many(self, names: Sequence[str]) -> dict[str, StorageError | None]:
        self._wire.add(requests=len(names))
        return delete_many(self._folders, names)

    def _list_page(self, prefix: str, token: str) -> Page:
        self._check_root()
        self._wire.add(requests=1)
        return reading.list_page(self._folders, prefix, token)

    def _check_root(self) -> None:
        """Tell a store that does not exist from an object that does not; one to be made is empty."""
        try:
            with self._folders.opened(""):
                pass
        except NotFoundError:
            if not self._folders.create or self._folders.root.is_symlink():
                raise
