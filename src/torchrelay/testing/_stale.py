# SPDX-License-Identifier: Apache-2.0
"""Listings from the past, as a caching front end or an eventually consistent service gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.storage import ObjectInfo, Page, WrapperBackend

if TYPE_CHECKING:
    from torchrelay.storage import Backend


class StaleListBackend(WrapperBackend):
    """Between :meth:`freeze` and :meth:`settle`, listings show the moment of the freeze.

    Gets, stats, puts and deletes are up to date. Breaks the contract on purpose.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._frozen: tuple[ObjectInfo, ...] | None = None
        self.stale_listings = 0

    def freeze(self) -> None:
        """From now on, list what is there now."""
        self._frozen = tuple(self.inner.list())

    def settle(self) -> None:
        """List the truth again."""
        self._frozen = None

    def _list_page(self, prefix: str, token: str) -> Page:
        if self._frozen is None:
            return self.inner.list_page(prefix, token)
        self.stale_listings += 1
        return Page(tuple(info for info in self._frozen if info.name.startswith(prefix)), "")
