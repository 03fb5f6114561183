# SPDX-License-Identifier: Apache-2.0
"""Write protection."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrelay.storage.wrapper import WrapperBackend

if TYPE_CHECKING:
    from torchrelay.storage.backend import Backend


class ReadOnlyBackend(WrapperBackend):
    """Refuses puts and deletes with ``DeniedError`` before anything is sent."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, capabilities=replace(inner.capabilities, writable=False, deletes=False))
