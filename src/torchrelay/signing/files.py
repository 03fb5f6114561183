# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of the few files that trust rests on: bounded, whole, and only if private.

Whoever can write such a file decides what this machine runs, so owner and mode are checked on the
open file, as OpenSSH does, and never on a name that could be exchanged in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from torchrelay.errors import KeyFileError, UnsafeDirectoryError, UsageError

if os.name == "posix":
    import fcntl

_OPEN = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM)


def read_file(path: Path, *, what: str, limit: int, secret: bool, remedy: str) -> str:
    """The text of a file that nobody else can have written, or read where it is ``secret``.

    A byte order mark is left out.

    Args:
        path: The file; a symbolic link is followed.
        what: What it is meant to be, for errors.
        limit: Most bytes that are read.
        secret: Others must not be able to read it either.
        remedy: What to do where the file is missing or of the wrong sort.

    Raises:
        KeyFileError: Missing, unreadable, not a file, empty, too large, open to others, not text.
    """
    data = _read(path, what, limit, secret, remedy)
    if not data.strip():
        raise KeyFileError(f"{what} {path} is empty", remedy=remedy, subject=str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise KeyFileError(f"{what} {path} is not text", remedy=remedy, subject=str(path)) from exc


def _read(path: Path, what: str, limit: int, secret: bool, remedy: str) -> bytes:
    try:
        # O_NONBLOCK: a FIFO under the name must not hang the command.
        descriptor = os.open(path, _OPEN)
    except (OSError, ValueError) as exc:
        raise _unopened(exc, path, what, remedy) from exc
    try:
        _check_sort(os.fstat(descriptor), path, what, remedy)
        _check_access(os.fstat(descriptor), path, what, secret=secret)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    except OSError as exc:
        raise KeyFileError(
            f"{what} {path} cannot be read: {exc.strerror}", remedy=remedy, subject=str(path)
        ) from exc
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise KeyFileError(
            f"{what} {path} has more than {limit} bytes, too large for what it is meant to be",
            remedy=remedy,
            subject=str(path),
        )
    return data


def _unopened(exc: OSError | ValueError, path: Path, what: str, remedy: str) -> KeyFileError:
    number = exc.errno if isinstance(exc, OSError) else None
    if number in _MISSING:
        return KeyFileError(f"there is no {what} {path}", remedy=remedy, subject=str(path))
    if number in _DENIED:
        return KeyFileError(
            f"{what} {path} is not readable for this user",
            remedy="Check its owner and mode, and those of the directories above it.",
            subject=str(path),
        )
    return KeyFileError(f"{what} {path} cannot be opened: {exc}", remedy=remedy, subject=str(path))


def _check_sort(status: os.stat_result, path: Path, what: str, remedy: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise KeyFileError(f"{what} {path} is a directory", remedy=remedy, subject=str(path))
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{what} {path} is not a regular file", remedy=remedy, subject=str(path))


def _check_access(status: os.stat_result, path: Path, what: str, *, secret: bool) -> None:
    if os.name != "posix":
        return
    user = os.geteuid()
    if status.st_uid not in (0, user):
        raise KeyFileError(
            f"{what} {path} belongs to user {status.st_uid}, not to user {user} or root",
            remedy=f"Make it your own: sudo chown {user} {path}",
            subject=str(path),
        )
    open_to = status.st_mode & _forbidden(secret=secret, own=status.st_uid == user)
    if open_to:
        mode = "600" if secret else "go-w"
        raise KeyFileError(
            f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}: others can "
            f"{'write' if open_to & 0o022 else 'read'} it",
            remedy=f"Close it: chmod {mode} {path}"
            + (" (and make a new key if others may have read it)." if secret else ""),
            subject=str(path),
        )


def _forbidden(*, secret: bool, own: bool) -> int:
    """Mode bits that must not be set.

    A secret of root's that a group may read is how Kubernetes hands keys to other users (fsGroup).
    """
    if not secret:
        return 0o022
    return 0o077 if own else 0o037


def make_private_directory(path: Path) -> None:
    """Make ``path`` with mode 0700; one that exists must not be writable by others.

    Raises:
        KeyFileError: It cannot be made.
        UnsafeDirectoryError: It exists and others can write it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        check_directory(path)
    except OSError as exc:
        raise KeyFileError(f"cannot make {path}: {exc.strerror}", subject=str(path)) from exc


def check_directory(path: Path) -> None:
    """Refuse a directory in which others can exchange files.

    Allowed: a sticky one such as ``/tmp``, where they cannot, and a read-only mount such as a
    Kubernetes ConfigMap, whose directory has mode 0777.

    Raises:
        UnsafeDirectoryError: Others can write it, or it belongs to another user.
        OSError: It cannot be looked at.
    """
    if os.name != "posix":
        return
    status = path.stat()
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeDirectoryError(
            f"{path} belongs to user {status.st_uid}",
            remedy="Use a directory of your own for keys and trust policy.",
            subject=str(path),
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise UnsafeDirectoryError(
            f"{path} can be written by others, who could exchange the files in it",
            remedy=f"Close it: chmod go-w {path}",
            subject=str(path),
        )


def create_file(path: Path, data: bytes, *, mode: int) -> bool:
    """Make ``path`` with ``data``, whole and durable, unless it exists; whether it was made.

    Of several processes at once exactly one makes it, and none ever sees a part of it: the bytes
    are written beside it and then linked to its name.

    Raises:
        KeyFileError: It cannot be written; nothing is left behind.
    """
    with _beside(path, data, mode) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as exc:
            raise _unwritten(exc, path) from exc
    return True


def replace_file(path: Path, data: bytes, *, mode: int) -> None:
    """Put ``data`` in place of ``path``, whole and durable; a symbolic link stays one.

    Raises:
        KeyFileError: It cannot be written; what was there is unchanged.
    """
    path = path.resolve()
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
    with _beside(path, data, mode) as temporary:
        try:
            temporary.replace(path)
        except OSError as exc:
            raise _unwritten(exc, path) from exc


@contextlib.contextmanager
def _beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A temporary file with ``data``; the directory is made durable when the block ends."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write(temporary, data, mode)
        yield temporary
        _sync_directory(path.parent)
    except OSError as exc:
        raise _unwritten(exc, path) from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, _CREATE, mode)
    with os.fdopen(descriptor, "wb") as file:
        # The umask narrows what open was asked for; the mode is meant as it is.
        if os.name == "posix":
            os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritten(exc: OSError, path: Path) -> KeyFileError:
    return KeyFileError(
        f"{path} cannot be written: {exc.strerror or exc}",
        remedy="Check the directory's owner and mode, and that the disk has room and takes hard links.",
        subject=str(path),
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside ``path`` while it is read, changed and written.

    Raises:
        UsageError: The lock cannot be had.
    """
    lock = path.resolve().with_name(f".{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as exc:
        raise UsageError(f"cannot lock {path}: {exc.strerror}", subject=str(path)) from exc
    try:
        if os.name == "posix":
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
