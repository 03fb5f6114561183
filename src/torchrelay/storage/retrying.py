# SPDX-License-Identifier: Apache-2.0
"""Trying again what may succeed later, by error class, and only that."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay.errors import StorageError, TransientError, UsageError
from torchrelay.storage.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from torchrelay.storage.backend import Backend
    from torchrelay.storage.types import Get, Got, ObjectInfo, Page

    R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to try.

    The pause before try ``n + 1`` is random between half and all of ``first_s * 2**(n-1)``, at most
    ``longest_s``, so that a thousand readers do not come back in step. No pause begins that would
    end after ``total_s``.

    Args:
        tries: Requests in all, the first included.
        first_s: Seconds of the first pause.
        longest_s: Seconds of the longest pause.
        total_s: Seconds that one call may spend before its last try begins.
    """

    tries: int = 5
    first_s: float = 0.1
    longest_s: float = 5.0
    total_s: float = 60.0

    def __post_init__(self) -> None:
        if self.tries < 1 or min(self.first_s, self.longest_s, self.total_s) < 0:
            raise UsageError(f"a retry policy must have a try and no negative times: {self}")

    def pause(self, attempt: int, random_01: float) -> float:
        """Seconds to wait after try number ``attempt`` (from 1) has failed."""
        # The exponent is bounded since 2.0 ** 1100 would overflow.
        full = min(self.longest_s, self.first_s * 2.0 ** min(attempt - 1, 64))
        return full * (0.5 + 0.5 * random_01)


class RetryingBackend(WrapperBackend):
    """Asks again for the names, and only those, whose result is a ``TransientError``.

    A page of a listing is asked for again by itself. What succeeded in a ``get_many`` is handed on
    at once, whatever happens to the rest.
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        self._sleep, self._clock, self._rng = sleep, clock, rng

    def _put_many(self, objects: Mapping[str, bytes]) -> Mapping[str, StorageError | None]:
        return self._bulk(objects, lambda left: self.inner.put_many({name: objects[name] for name in left}))

    def _stat_many(self, names: Sequence[str]) -> Mapping[str, ObjectInfo | StorageError | None]:
        return self._bulk(names, self.inner.stat_many)

    def _delete_many(self, names: Sequence[str]) -> Mapping[str, StorageError | None]:
        return self._bulk(names, self.inner.delete_many)

    def _bulk(self, names: Iterable[str], call: Callable[[Sequence[str]], Mapping[str, R]]) -> dict[str, R]:
        results: dict[str, R] = {}
        left = list(names)
        for _ in self._attempts():
            results.update(call(left))
            left = [name for name in left if isinstance(results.get(name), TransientError)]
            if not left:
                break
        return results

    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        left = list(gets)
        failed: list[Got] = []
        for _ in self._attempts():
            failed = []
            for got in self.inner.get_many(left):
                if isinstance(got.error, TransientError):
                    failed.append(got)
                else:
                    yield got
            left = [got.get for got in failed]
            if not left:
                break
        yield from failed

    def _list_page(self, prefix: str, token: str) -> Page:
        last: TransientError | None = None
        for _ in self._attempts():
            try:
                return self.inner.list_page(prefix, token)
            except TransientError as exc:
                last = exc
        raise last or StorageError(f"{self.describe()} was not asked")

    def _attempts(self) -> Iterator[int]:
        """Numbers of the tries, from 1, with the pauses between them."""
        deadline = self._clock() + self.policy.total_s
        for attempt in range(1, self.policy.tries + 1):
            yield attempt
            pause = self.policy.pause(attempt, self._rng())
            if attempt == self.policy.tries or self._clock() + pause > deadline:
                return
            self._sleep(pause)
