# SPDX-License-Identifier: Apache-2.0
"""A backend around a backend: the base of every policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.storage.backend import Backend
from torchrelay.storage.types import Budget, Capabilities, Counters, Get, Got, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrelay.errors import StorageError


class WrapperBackend(Backend):
    """Hands everything on to ``inner``; subclasses change what they mean to change.

    Closing it closes ``inner``. Counters and budget are those of ``inner``.
    """

    def __init__(self, inner: Backend, *, capabilities: Capabilities | None = None) -> None:
        self.inner = inner
        super().__init__(capabilities=capabilities or inner.capabilities, budget=inner.budget)

    @property
    def wire(self) -> Counters:
        """The counters of the innermost backend."""
        return self.inner.wire

    @property
    def budget(self) -> Budget:
        """The budget of the innermost backend."""
        return self.inner.budget

    @budget.setter
    def budget(self, value: Budget) -> None:
        self.inner.budget = value

    def describe(self) -> str:
        """As the inner backend."""
        return self.inner.describe()

    def _put_many(self, objects: Mapping[str, bytes]) -> Mapping[str, StorageError | None]:
        return self.inner.put_many(objects)

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        return self.inner.get_many(gets)

    def _stat_many(self, names: Sequence[str]) -> Mapping[str, ObjectInfo | StorageError | None]:
        return self.inner.stat_many(names)

    def _delete_many(self, names: Sequence[str]) -> Mapping[str, StorageError | None]:
        return self.inner.delete_many(names)

    def _list_page(self, prefix: str, token: str) -> Page:
        return self.inner.list_page(prefix, token)

    def _close(self) -> None:
        self.inner.close()
