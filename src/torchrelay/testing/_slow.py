# SPDX-License-Identifier: Apache-2.0
"""Latency, so that round trips can be seen without a network."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from torchrelay.storage import Get, Got, ObjectInfo, Page, WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrelay.errors import StorageError
    from torchrelay.storage import Backend


class SlowBackend(WrapperBackend):
    """Waits before each round trip; ``budget.requests`` operations of a bulk call share one.

    Args:
        inner: The backend.
        delay_s: Seconds for each round trip.
        sleep: What waits; give a fake to only count.
    """

    def __init__(
        self, inner: Backend, delay_s: float, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.round_trips = 0
        self._sleep = sleep

    def _wait(self, operations: int) -> None:
        trips = math.ceil(operations / self.budget.requests)
        self.round_trips += trips
        self._sleep(trips * self.delay_s)

    def _put_many(self, objects: Mapping[str, bytes]) -> Mapping[str, StorageError | None]:
        self._wait(len(objects))
        return self.inner.put_many(objects)

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        for start in range(0, len(gets), self.budget.requests):
            batch = gets[start : start + self.budget.requests]
            self._wait(len(batch))
            yield from self.inner.get_many(batch)

    def _stat_many(self, names: Sequence[str]) -> Mapping[str, ObjectInfo | StorageError | None]:
        self._wait(len(names))
        return self.inner.stat_many(names)

    def _delete_many(self, names: Sequence[str]) -> Mapping[str, StorageError | None]:
        self._wait(len(names))
        return self.inner.delete_many(names)

    def _list_page(self, prefix: str, token: str) -> Page:
        self._wait(1)
        return self.inner.list_page(prefix, token)
