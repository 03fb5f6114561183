# SPDX-License-Identifier: Apache-2.0
"""The backend contract: what the store may rely on, and nothing else.

``docs/reference/backend-contract.md`` is the whole promise. In short, of every backend:

- **Atomic put.** A reader sees all bytes of a put or none, also when the writer is killed.
- **Durable**, where declared: a put that was reported as done survives a crash.
- **Read after write.** What was reported as done is seen by every call that starts later, anywhere.
- **Last put wins**, whatever lay under the name; an existing name never makes a put a no-op.
- **Complete listings** with true sizes and, where declared, the store's own times.
- **A result per name** in bulk calls; one failure never hides, delays or poisons the others.
- **Bounded reads.** A get holds at most its limit and one byte.

A backend needs no lock, no compare-and-swap and no rename: objects are named by their own hash.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from torchrelay.errors import DeniedError, NotFoundError, PermanentError, StorageError, TooLargeError
from torchrelay.storage.location import redact_text
from torchrelay.storage.names import is_object_name, is_prefix
from torchrelay.storage.oserrors import classify_oserror
from torchrelay.storage.types import Budget, Capabilities, Counters, Get, Got, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import TypeVar

    from torchrelay.storage.location import Location

    Failures = list[Exception]  # `list` is a method inside the class
    R = TypeVar("R")
    Self = TypeVar("Self", bound="Backend")

_NAME_REMEDY = "Names are components of letters, digits, '.', '_' and '-' that begin with a letter or digit."

_fork_lock = threading.Lock()


def _renew_fork_lock() -> None:
    global _fork_lock  # noqa: PLW0603 - a lock that another thread held at the fork is never released
    _fork_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_fork_lock)


class Backend(ABC):
    """A place for immutable, hash-named objects. See the module's docstring for the promise.

    The public methods check names and results and let only :class:`StorageError` out. Subclasses
    write ``open`` and the methods with an underscore, which get valid names only, may raise what
    they like (it becomes the result of every name that has none yet) and need not be complete.

    Attributes:
        capabilities: What is promised beyond the core.
        budget: What may be in flight at once; may be replaced between calls.
        extra: Name of the extra of torchrelay that brings what the backend imports, if any.
    """

    capabilities: Capabilities
    budget: Budget
    extra: str = ""

    def __init__(self, *, capabilities: Capabilities, budget: Budget | None = None) -> None:
        self.capabilities = capabilities
        self.budget = budget or Budget()
        self._wire = Counters()
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(cls, location: Location, *, options: Mapping[str, str], create: bool) -> Backend:
        """A backend for ``location``; must not need the network to succeed.

        Args:
            location: Where the store is.
            options: Settings by name, from flags, environment or configuration.
            create: Whether a put may make the store if it does not exist.

        Raises:
            UsageError: An unknown option, or a location or value that cannot be meant.
        """
        raise NotImplementedError

    # -- what callers use ------------------------------------------------------------------------

    @property
    def wire(self) -> Counters:
        """What really went over the wire since the backend was made, retries included."""
        return self._wire

    def put_many(self, objects: Mapping[str, bytes]) -> dict[str, StorageError | None]:
        """Store each object atomically under its name.

        Args:
            objects: Bytes by name. Neither changed nor kept after the call.

        Returns:
            For each name None, if the object is stored (and durable, where declared), else the error;
            then the object that was there before, the new one, or none is there, but whole.

        Raises:
            PermanentError: The backend was closed. Nothing else is raised.
        """
        results, wanted = self._begin(objects, writing=True)
        if wanted:
            self._collect(results, wanted, lambda: self._put_many({name: objects[name] for name in wanted}))
        return results

    def get_many(self, gets: Iterable[Get]) -> Iterator[Got]:
        """Fetch objects or ranges of them, in any order, as they arrive.

        Args:
            gets: What is wanted. The same name may occur several times.

        Returns:
            An iterator of exactly one :class:`Got` for each get. It may be dropped half way.
            Errors: ``NotFoundError`` if absent, ``TooLargeError`` if longer than ``limit``.

        Raises:
            PermanentError: The backend was closed. Nothing else is raised.
        """
        self._enter()
        return self._checked_gets(tuple(gets))

    def stat_many(self, names: Iterable[str]) -> dict[str, ObjectInfo | StorageError | None]:
        """Size and time of each object; None for one that is absent.

        Raises:
            PermanentError: The backend was closed. Nothing else is raised.
        """
        results: dict[str, ObjectInfo | StorageError | None] = {}
        errors, wanted = self._begin(names)
        results.update(errors)
        if wanted:
            self._collect(results, wanted, lambda: self._stat_many(wanted))
        return results

    def delete_many(self, names: Iterable[str]) -> dict[str, StorageError | None]:
        """Delete each object. One that is absent counts as deleted.

        Returns:
            For each name None, if the object is gone, else the error.

        Raises:
            PermanentError: The backend was closed. Nothing else is raised.
        """
        results, wanted = self._begin(names, deleting=True)
        if wanted:
            self._collect(results, wanted, lambda: self._delete_many(wanted))
        return results

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below ``prefix``, each once, in any order.

        Args:
            prefix: Empty, or a name with ``/`` at its end.

        Raises:
            NotFoundError: The store does not exist. A prefix with nothing below it is empty, no error.
            StorageError: The listing failed; what was yielded before is not all there is.
        """
        page = self.list_page(prefix)
        return self._all_pages(prefix, page)

    def list_page(self, prefix: str = "", token: str = "") -> Page:
        """One page of :meth:`list`, which can be asked for again with the same token.

        Raises:
            StorageError: As :meth:`list`.
        """
        self._enter()
        if not is_prefix(prefix):
            raise PermanentError(f"{prefix[:80]!r} is not a prefix to list", remedy=_NAME_REMEDY)
        try:
            page = self._list_page(prefix, token)
        except Exception as exc:  # noqa: BLE001 - raised again as an error of ours
            error = self._as_storage_error(exc, "")
            raise error from error.__cause__
        return Page(tuple(o for o in page.objects if _belongs(o.name, prefix)), page.next_token)

    def put(self, name: str, data: bytes) -> None:
        """Store one object.

        Raises:
            StorageError: It is not stored.
        """
        error = self.put_many({name: data})[name]
        if error is not None:
            raise error

    def get(self, name: str, *, limit: int) -> bytes:
        """The bytes of one object of at most ``limit`` bytes.

        Raises:
            NotFoundError: It is absent.
            TooLargeError: It is longer.
            StorageError: It could not be read.
        """
        (got,) = self.get_many([Get(name, limit)])
        return got.unwrap()

    def close(self) -> None:
        """Give up connections, threads and descriptors. May be called again; other calls then raise."""
        if not self._closed:
            self._closed = True
            try:
                self._close()
            except Exception as exc:  # noqa: BLE001 - raised again as an error of ours
                error = self._as_storage_error(exc, "")
                raise error from error.__cause__

    @abstractmethod
    def describe(self) -> str:
        """Where the store is, as the user would write it, without any secret."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    # -- what implementers write -----------------------------------------------------------------

    @abstractmethod
    def _put_many(self, objects: Mapping[str, bytes]) -> Mapping[str, StorageError | None]:
        """Store the objects; the result of each name."""

    @abstractmethod
    def _get_many(self, gets: Sequence[Get]) -> Iterator[Got]:
        """Fetch at most ``limit + 1`` bytes of each; one result for each get."""

    @abstractmethod
    def _stat_many(self, names: Sequence[str]) -> Mapping[str, ObjectInfo | StorageError | None]:
        """Size and time by name."""

    @abstractmethod
    def _delete_many(self, names: Sequence[str]) -> Mapping[str, StorageError | None]:
        """Delete the objects; the result of each name."""

    @abstractmethod
    def _list_page(self, prefix: str, token: str) -> Page:
        """One page of all that lies below ``prefix``; foreign names may be in it."""

    def _close(self) -> None:  # noqa: B027 - a backend without connections has nothing to close
        """Give up what is held."""

    def _after_fork(self) -> None:  # noqa: B027 - likewise
        """Forget, without using or closing, what belongs to the parent process."""

    def _translate(self, exc: Exception, name: str) -> StorageError | None:
        """The error class of a foreign exception, or None to leave it to the base class."""
        return None

    # -- what keeps the promises -----------------------------------------------------------------

    def _enter(self) -> None:
        if self._closed:
            raise PermanentError(f"the store {self.describe()} was closed", remedy="Open it again.")
        if self._pid != os.getpid():
            with _fork_lock:
                if self._pid != os.getpid():
                    self._wire = Counters(self._wire.total())
                    self._after_fork()
                    self._pid = os.getpid()

    def _begin(
        self, names: Iterable[str], *, writing: bool = False, deleting: bool = False
    ) -> tuple[dict[str, StorageError | None], Sequence[str]]:
        """Results for the names that can only fail, and the other names."""
        self._enter()
        results: dict[str, StorageError | None] = {}
        wanted: dict[str, None] = {}
        for name in names:
            error = self._refusal(name, writing=writing, deleting=deleting)
            if error is not None:
                results[name] = error
            else:
                wanted[name] = None
        return results, tuple(wanted)

    def _refusal(self, name: str, *, writing: bool, deleting: bool) -> StorageError | None:
        if not is_object_name(name):
            return bad_name(name)
        if (writing or deleting) and not self.capabilities.writable:
            return DeniedError(
                f"{self.describe()} is read-only, {name} was not changed",
                remedy="Use a store that you may write to.",
                subject=name,
            )
        if deleting and not self.capabilities.deletes:
            return PermanentError(f"{self.describe()} cannot delete objects", subject=name)
        return None

    def _collect(
        self, results: dict[str, R], wanted: Sequence[str], work: Callable[[], Mapping[str, R]]
    ) -> None:
        """Run ``work`` and see to it that each wanted name has a result."""
        answer: Mapping[str, R] = {}
        failure: Exception | None = None
        try:
            answer = work()
        except Exception as exc:  # noqa: BLE001 - it becomes the result of each name
            failure = exc
        for name in wanted:
            if failure is not None:
                results[name] = self._as_storage_error(failure, name)  # type: ignore[assignment]
            elif name not in answer:
                results[name] = self._no_result(name)  # type: ignore[assignment]
            else:
                results[name] = answer[name]

    def _checked_gets(self, gets: Sequence[Get]) -> Iterator[Got]:
        wanted: list[Get] = []
        for get in gets:
            error = self._get_refusal(get)
            if error is not None:
                yield Got(get, error=error)
            else:
                wanted.append(get)
        if wanted:
            yield from self._fetched(tuple(wanted))

    def _get_refusal(self, get: Get) -> StorageError | None:
        if not is_object_name(get.name):
            return bad_name(get.name)
        if get.is_range and not self.capabilities.ranges:
            return PermanentError(f"{self.describe()} cannot read parts of objects", subject=get.name)
        return None

    def _fetched(self, wanted: Sequence[Get]) -> Iterator[Got]:
        left = Counter(wanted)
        failures: Failures = []
        source = self._guarded(wanted, failures)
        try:
            for got in source:
                if left[got.get] > 0:
                    left[got.get] -= 1
                    yield self._checked_got(got)
        finally:
            source.close()
        for get in left.elements():
            error = self._as_storage_error(failures[0], get.name) if failures else self._no_result(get.name)
            yield Got(get, error=error)

    def _guarded(self, wanted: Sequence[Get], failures: Failures) -> Generator[Got, None, None]:
        """What ``_get_many`` yields, up to its end or first exception, which goes into ``failures``.

        What a caller throws into its iterator never comes here, so it is not taken for the store's.
        """
        try:
            yield from self._get_many(wanted)
        except Exception as exc:  # noqa: BLE001 - it becomes the result of each get
            failures.append(exc)

    def _checked_got(self, got: Got) -> Got:
        """No more than was asked for, and bytes where bytes belong."""
        if got.error is not None:
            return Got(got.get, error=got.error)
        if not isinstance(got.data, bytes):
            return Got(got.get, error=self._no_result(got.get.name))
        if len(got.data) > got.get.bound:
            return Got(got.get, error=too_large(got.get))
        return got

    def _all_pages(self, prefix: str, page: Page) -> Iterator[ObjectInfo]:
        while True:
            yield from page.objects
            if not page.next_token:
                return
            page = self.list_page(prefix, page.next_token)

    def _no_result(self, name: str) -> StorageError:
        return PermanentError(f"{self.describe()} gave no result for {name}", subject=name)

    def _as_storage_error(self, exc: Exception, name: str) -> StorageError:
        """``exc`` as an error of ours; its cause is chained unless its text holds a secret."""
        if isinstance(exc, StorageError):
            return exc
        if isinstance(exc, MemoryError):
            error: StorageError = PermanentError(f"out of memory at {name or self.describe()}", subject=name)
        elif (translated := self._translate(exc, name)) is not None:
            return translated
        elif isinstance(exc, OSError) and exc.errno is not None:
            error = classify_oserror(exc, what=name or self.describe(), subject=name)
        else:
            what = redact_text(f"{type(exc).__name__}: {exc}")
            error = PermanentError(f"{name or self.describe()}: {what}", subject=name)
        if redact_text(str(exc)) == str(exc):
            error.__cause__ = exc
        return error


def bad_name(name: str) -> StorageError:
    """The result for a name that cannot name an object."""
    return PermanentError(f"{name[:80]!r} is not an object name", remedy=_NAME_REMEDY, subject=name[:80])


def not_found(name: str) -> StorageError:
    """The result for an object that is absent."""
    return NotFoundError(f"{name} is not in the store", subject=name)


def too_large(get: Get) -> StorageError:
    """The result for an object that is longer than the reader allows."""
    return TooLargeError(f"{get.name} is longer than the {get.bound} bytes allowed", subject=get.name)


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and is_object_name(name)
