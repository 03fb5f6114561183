# SPDX-License-Identifier: Apache-2.0
"""Counting what one piece of work cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.storage.wrapper import WrapperBackend

if TYPE_CHECKING:
    from torchrelay.storage.backend import Backend
    from torchrelay.storage.types import Traffic


class ObservedBackend(WrapperBackend):
    """Shows what went over the wire since it was made: the backend counts, this subtracts."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._start = inner.wire.total()

    @property
    def counters(self) -> Traffic:
        """Requests and object bytes since this observer was made."""
        return self.inner.wire.total() - self._start
