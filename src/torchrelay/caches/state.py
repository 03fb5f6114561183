# SPDX-License-Identifier: Apache-2.0
"""The folder in which torchrelay keeps what it knows of a cache directory: stamp, ledger, index.

``<cache>/.torchrelay/state-<uid>/``, 0700. One for each user, so that a directory shared by a group
(D03) works for all of them: files of another uid are never pushed, so each needs only its own.
Nothing in it is trusted further than that: every file is bounded, JSON, and read without following
links; a folder that somebody else could have written is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchrelay.caches.files import OWN_FOLDER, STALE_SECONDS, storage_error
from torchrelay.errors import DamagedError, InTheWayError, UnsafeDirectoryError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_TEMPORARY = ".tmp"


def state_path(root: Path) -> Path:
    """Where this user's state of the cache directory ``root`` lies."""
    return root / OWN_FOLDER / f"state-{os.geteuid()}"


@contextlib.contextmanager
def opened_state(root: Path, *, create: bool) -> Iterator[int | None]:
    """The folder as a descriptor; None if it is not there and ``create`` is false.

    Raises:
        UnsafeDirectoryError: It is a link, belongs to another user, or is open to others.
        StorageError: It cannot be made or opened.
    """
    path = state_path(root)
    try:
        if create:
            root.mkdir(parents=True, exist_ok=True)
            _make(path)
        descriptor = _open(path)
    except FileNotFoundError as exc:
        if create:
            raise storage_error(exc, path) from exc
        descriptor = None
    except OSError as exc:
        raise (
            _unsafe(path) if exc.errno in (errno.ELOOP, errno.ENOTDIR) else storage_error(exc, path)
        ) from exc
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read_state(root: Path, name: str, *, limit: int) -> bytes | None:
    """The bytes of one state file; None if it is not there.

    Raises:
        DamagedError: No plain file of this user, or more than ``limit`` bytes.
        UnsafeDirectoryError, StorageError: As :func:`opened_state`.
    """
    with opened_state(root, create=False) as folder:
        if folder is None:
            return None
        descriptor = open_plain(folder, root, name)
        if descriptor is None:
            return None
        try:
            with os.fdopen(descriptor, "rb") as stream:
                data = stream.read(limit + 1)
        except OSError as exc:
            raise storage_error(exc, state_path(root) / name) from exc
    if len(data) > limit:
        path = state_path(root) / name
        raise DamagedError(f"{path} is larger than {limit} bytes", subject=str(path))
    return data


def write_state(root: Path, name: str, data: bytes) -> None:
    """Replace one state file: durable and atomic; readers see the old bytes or the new.

    Raises:
        UnsafeDirectoryError, StorageError: As :func:`opened_state`; nothing has changed.
    """
    with opened_state(root, create=True) as folder:
        assert folder is not None  # noqa: S101 - for the type checker: it was created
        try:
            _sweep(folder)
            temporary = _written(folder, name, data)
            try:
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)
        except OSError as exc:
            raise storage_error(exc, state_path(root) / name) from exc


@contextlib.contextmanager
def state_lock(root: Path, folder: int) -> Iterator[None]:
    """Hold the state against this user's other processes and threads; freed by the kernel on death.

    Raises:
        StorageError: The lock file cannot be made, or the file system has no locks.
    """
    path = state_path(root) / "lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open("lock", flags, 0o600, dir_fd=folder)
    except OSError as exc:
        raise storage_error(exc, path) from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as exc:
            raise storage_error(exc, path) from exc
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def directory_lock(root: Path, name: str, *, patience: float = 2.0) -> Iterator[None]:
    """Hold the lock ``name`` of this cache directory against this user's other processes and threads.

    For a read-modify-write of one local file. It is advisory and only ours: PyTorch does not take it.
    Nobody else can open the file, so nobody else can keep it; and a process of this user that stands
    still holds nobody up for longer than ``patience`` seconds.

    Raises:
        InTheWayError: Another process holds it all that time.
        UnsafeDirectoryError, StorageError: As :func:`opened_state`, or the file system has no locks.
    """
    path = state_path(root) / f"{name}.lock"
    with opened_state(root, create=True) as folder, contextlib.ExitStack() as stack:
        assert folder is not None  # noqa: S101 - for the type checker: it was created
        descriptor = open_plain(folder, root, path.name, _LOCK)
        assert descriptor is not None  # noqa: S101 - for the type checker: it was created
        stack.callback(os.close, descriptor)
        until = time.monotonic() + patience
        while not _is_locked(descriptor, path):
            if time.monotonic() > until:
                raise InTheWayError(
                    f"another process has held {path} for {patience:g} seconds",
                    remedy="Look which of your processes stands still (`fuser`), then pull again.",
                    subject=str(path),
                )
            time.sleep(0.01)
        yield


def _is_locked(descriptor: int, path: Path) -> bool:
    """Take the lock if nobody has it; whether it was taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise storage_error(exc, path) from exc
    return True


def open_plain(folder: int, root: Path, name: str, flags: int = _READ) -> int | None:
    """A file of this folder as a descriptor; None if it is not there.

    Raises:
        DamagedError: It is no plain file of this user.
        StorageError: It cannot be opened.
    """
    path = state_path(root) / name
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _foreign(path) from exc
        raise storage_error(exc, path) from exc
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(descriptor)
        raise _foreign(path)
    return descriptor


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir()
    parent = os.open(path.parent, _FOLDER)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent)
    finally:
        os.close(parent)


def _open(path: Path) -> int:
    # In two steps, so that neither component is followed if it is a link.
    parent = os.open(path.parent, _FOLDER)
    try:
        descriptor = os.open(path.name, _FOLDER, dir_fd=parent)
    finally:
        os.close(parent)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        os.close(descriptor)
        raise _unsafe(path)
    return descriptor


def _written(folder: int, name: str, data: bytes) -> str:
    temporary = f"{name}.{os.getpid()}-{secrets.token_hex(8)}{_TEMPORARY}"
    descriptor = os.open(temporary, _CREATE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise
    return temporary


def _sweep(folder: int) -> None:
    """Delete what killed processes left; a clock that is off costs at most a repeated write."""
    oldest = time.time() - STALE_SECONDS
    for name in os.listdir(folder):  # by descriptor: no link is followed
        if name.endswith(_TEMPORARY):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=folder)


def _unsafe(path: Path) -> UnsafeDirectoryError:
    return UnsafeDirectoryError(
        f"{path} is not a private directory of this user, so others could change what torchrelay knows",
        remedy=f"Look who made it; move {path.parent} away if it is not yours, then run the command again.",
        subject=str(path),
    )


def _foreign(path: Path) -> DamagedError:
    return DamagedError(
        f"{path} is not a plain file of this user",
        remedy=f"Look who made it, and move {path} away.",
        subject=str(path),
    )
