# SPDX-License-Identifier: Apache-2.0
"""The facade: one store, one workload, one set of cache directories.

Used as a library it never breaks the user's job: trouble is one warning for each cause and a report
that says so; ``strict=True`` raises instead, as the command line does.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace as replace_fields

from torchrelay.errors import RelayError, UsageError
from torchrelay.options import PullOptions, PushOptions
from torchrelay.reports import (
    DiffReport,
    ExplainReport,
    ListReport,
    PullReport,
    PushReport,
    StatusReport,
    VerifyReport,
)
from torchrelay.statement import check_workload

if TYPE_CHECKING:
    from torchrelay.environment import Environment
    from torchrelay.options import Progress
    from torchrelay.workplace import Workplace

__all__ = ["PullOptions", "PushOptions", "Relay", "TorchrelayWarning"]

V = TypeVar("V")
R = TypeVar("R", PullReport, PushReport, StatusReport)

_log = logging.getLogger(__name__)


class TorchrelayWarning(UserWarning):
    """Trouble with the cache that did not stop the job; one for each cause."""


class Relay:
    """Push to and pull from one workload of one store.

    As a context manager it pulls on entry and pushes on exit. A store that does not exist yet holds
    nothing to pull, and the first push makes it; only with ``in_process=False`` it is an error.

    Args:
        url: The store: a path or a URL.
        workload: The name that entries are published under, such as ``acme/llama-8b/prod``.
        cache_dir: Inductor's cache directory; by default where this process' Inductor looks.
        triton_cache_dir: Triton's; by default where this process' Triton looks.
        trees: Roots of frameworks with caches of their own, by name.
        key: Private key file; by default this user's, made on first use.
        policy: Trust policy file; by default this user's, made on first use.
        state_dir: Where to remember what was read; by default below ``XDG_STATE_HOME``.
        options: Options of the backend.
        strict: Raise errors; otherwise they become one warning for each cause.
        in_process: This process is the one that compiles: its settings follow the workload's
            (ADR 0005), and a cache directory that it filled needs no other stamp.

    Raises:
        UsageError: The workload's name cannot be one. Raised whether strict or not: it is a typing
            error that no run can mend. Any other argument that cannot be meant is found when there is
            something to do, and is then trouble like any other.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        workload: str,
        cache_dir: str | Path | None = None,
        triton_cache_dir: str | Path | None = None,
        trees: Mapping[str, str | Path] | None = None,
        key: str | Path | None = None,
        policy: str | Path | None = None,
        state_dir: str | Path | None = None,
        options: Mapping[str, str] | None = None,
        strict: bool = False,
        in_process: bool = True,
    ) -> None:
        self.workload = check_workload(_checked("workload", workload, _TEXT))
        self.strict = strict
        # Looked at only when there is something to do: whatever is wrong with them must not stop the job.
        self._url = url
        self._cache_dir = cache_dir
        self._triton_cache_dir = triton_cache_dir
        self._trees = trees
        self._key = key
        self._policy = policy
        self._state_dir = state_dir
        self._options = options
        self._in_process = in_process
        self._warned: set[tuple[str, str]] = set()

    # -- the two that jobs use -------------------------------------------------------------------

    def pull(self, options: PullOptions | None = None) -> PullReport:
        """Verify and install what fits this machine and is not here yet.

        Raises:
            RelayError: Only with ``strict``: the store cannot be read, the cache directory is not
                private or stamped otherwise, or the store went backwards and the policy refuses that.
        """
        asked = options or PullOptions()
        return self._guarded(lambda: self._workplace(asked.progress).pull(asked), PullReport)

    def push(self, options: PushOptions | None = None) -> PushReport:
        """Publish what was compiled here and the store does not hold.

        Raises:
            RelayError: Only with ``strict``: there is no usable key, the directory is not stamped,
                the store cannot be read or written.
        """
        asked = options or PushOptions()
        return self._guarded(lambda: self._workplace(asked.progress).push(asked), PushReport)

    def status(self) -> StatusReport:
        """What a push and a pull would do.

        Raises:
            RelayError: Only with ``strict``; as :meth:`pull`.
        """
        return self._guarded(lambda: self._workplace().status(), StatusReport)

    def __enter__(self) -> Relay:
        """Stamp the cache directory, follow the workload's settings, and pull."""
        self.pull()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Push, also after an error in the job: what was compiled is good."""
        self.push()

    # -- the ones that people ask; they raise ----------------------------------------------------

    def entries(self, environment: Environment | None = None) -> ListReport:
        """The live entries of the workload, and whether they fit ``environment`` if one is given.

        Raises:
            RelayError: The store cannot be read.
        """
        return self._workplace().entries(environment)

    def show(self, name: str) -> ListReport:
        """Entries whose key, digest, blob or segment begins with ``name``.

        Raises:
            RelayError: The store cannot be read, or there is no such entry.
        """
        return self._workplace().show(name)

    def diff(self, other: str | None = None) -> DiffReport:
        """The workload beside another one, or beside the local cache directory.

        Raises:
            RelayError: The store cannot be read, ``other`` is no name, or nobody knows in which
                environment the directory was filled.
        """
        return self._workplace().diff(other)

    def verify(self, *, local: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read everything in full, in the store or what is installed here, and check it.

        Raises:
            RelayError: The store cannot be read.
        """
        return self._workplace(progress).verify(local=local)

    def explain(self, name: str | None = None, environment: Environment | None = None) -> ExplainReport:
        """Facet by facet, why entries fit this machine (or ``environment``) or not.

        Raises:
            RelayError: The store cannot be read, there is no such entry, or neither torch nor a stamp
                tells what this machine is.
        """
        return self._workplace().explain(name, environment)

    def import_mega(self, path: str | Path, options: PushOptions | None = None) -> PushReport:
        """Publish the entries of a Mega-Cache blob, of all its records.

        What a pull installed in the cache directory and PyTorch saved again is not signed.

        Raises:
            RelayError: The file is not one; the options do not say where it was made, or ask for newer
                entries only; or as :meth:`push`.
        """
        asked = options or PushOptions()
        return self._workplace(asked.progress).import_mega(Path(path), asked)

    def export_mega(self, path: str | Path, options: PullOptions | None = None) -> PullReport:
        """Write what fits this machine as a blob for ``torch.compiler.load_cache_artifacts``.

        Raises:
            RelayError: As :meth:`pull`, or the file cannot be written.
        """
        asked = options or PullOptions()
        return self._workplace(asked.progress).export_mega(Path(path), asked)

    # -- how -------------------------------------------------------------------------------------

    def _workplace(self, progress: Progress | None = None) -> Workplace:
        # Not before it is used: the facade must be cheap to import.
        from torchrelay.workplace import Workplace  # noqa: PLC0415

        _checked("strict", self.strict, _SWITCH)
        return Workplace(
            url=str(_checked("url", self._url, _PLACE)),
            workload=self.workload,
            cache_dir=_path("cache_dir", self._cache_dir),
            triton_cache_dir=_path("triton_cache_dir", self._triton_cache_dir),
            trees={name: _expanded(path) for name, path in _table("trees", self._trees, _PLACE).items()},
            key=_path("key", self._key),
            policy=_path("policy", self._policy),
            state_dir=_path("state_dir", self._state_dir),
            options=_table("options", self._options, _TEXT),
            in_process=_checked("in_process", self._in_process, _SWITCH),
            progress=progress,
        )

    def _guarded(self, work: Callable[[], R], report: type[R]) -> R:
        """Fail open: the job goes on without the cache, told once for each cause."""
        if self.strict:
            return work()
        started = time.monotonic()
        try:
            return work()
        except RelayError as exc:
            self._warn(type(exc).__name__, exc.message, f"{type(exc).__name__}: {exc.diagnostics()}")
            message = exc.message
        except Exception as exc:  # noqa: BLE001 - whatever is wrong with us must not end the user's job
            message = f"unexpected {type(exc).__name__}: {exc}"
            self._warn(type(exc).__name__, message, message)
        failed = report(workload=self.workload, error=message)
        if isinstance(failed, StatusReport):
            return failed
        return replace_fields(failed, seconds=time.monotonic() - started)

    def _warn(self, kind: str, message: str, text: str) -> None:
        if (kind, message) in self._warned:
            return
        self._warned.add((kind, message))
        try:
            warnings.warn(f"torchrelay: {text}", TorchrelayWarning, stacklevel=4)
        except Warning:
            # Under `-W error` a warning ends the job, which is more than a cache is worth.
            _log.warning("%s", text)


class _Kind(NamedTuple):
    """What an argument may be."""

    types: tuple[type, ...]
    words: str


_TEXT = _Kind((str,), "a text")
_SWITCH = _Kind((bool,), "True or False")
_PLACE = _Kind((str, PurePath), "a text or Path")
_TABLE = _Kind((Mapping,), "a dict")


def _checked(name: str, value: V, kind: _Kind) -> V:
    """``value``, if it is of the kind that the argument ``name`` takes."""
    if isinstance(value, kind.types):
        return value
    raise UsageError(
        f"{name} is {kind.words}, not {type(value).__name__}",
        remedy=f"Give {kind.words}.",
        subject=name,
    )


def _table(name: str, table: Mapping[str, V] | None, kind: _Kind) -> dict[str, V]:
    """A copy of ``table``, if it has what the argument ``name`` takes."""
    if table is None:
        return {}
    found = _checked(name, table, _TABLE)
    return {
        _checked(f"a name in {name}", key, _TEXT): _checked(f"{name}[{key!r}]", value, kind)
        for key, value in found.items()
    }


def _path(name: str, path: str | Path | None) -> Path | None:
    return None if path is None else _expanded(_checked(name, path, _PLACE))


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise UsageError(
            f"{path} begins with the home directory of a user who has none",
            remedy="Write the path in full.",
            subject=str(path),
        ) from exc
