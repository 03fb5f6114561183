# SPDX-License-Identifier: Apache-2.0
"""Safe reading from, and atomic installation into, a cache directory that PyTorch works in.

Other processes write into the directory at any moment, so a scan sees half-written files, a file
may change while it is read, and PyTorch unpickles *every* file of an entry's folder that it finds.
Hence three rules. Nothing is taken that looks unfinished, or that is not the same before and after
it was read. Nothing of ours is ever visible in an entry's folder but whole files: temporary files
live in ``<root>/.torchrelay/tmp``. And below the root no symbolic link is followed, ever: every path
is walked component by component from an open root.

Installed files are not synced to the disk one by one: a cache that loses its last seconds in a
power failure is rebuilt or pulled again, and ``verify --local`` finds what was torn.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrelay import limits
from torchrelay.caches.base import Excluded, FileStat, Reason, Skipped
from torchrelay.errors import DeniedError, InTheWayError, PermanentError, StorageError, UnsafeDirectoryError
from torchrelay.statement import check_file_name

OWN_FOLDER = ".torchrelay"
"""What torchrelay keeps in a cache directory; no kind looks into it."""

TEMPORARY_FOLDER = f"{OWN_FOLDER}/tmp"  # noqa: S108 - below the root, not the system's

STALE_SECONDS = 3600.0
"""A temporary file of ours that is older was left by a killed process."""

# write_atomic's `.<pid>.<tid>.tmp`, Triton's `tmp.pid_<pid>_<uuid>`, mkstemp's `tmpabcd1234`, hidden
# files, NFS's `.nfs…`. A base32 name may begin with `tmp` too, but is much longer than mkstemp's.
_TEMPORARY = re.compile(r"\..*|.*\.tmp(\..*)?|.*~|tmp|tmp\.pid_.*|tmp[a-z0-9_]{6,8}(\..*)?", re.DOTALL)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder as a scan saw it; names are relative to the root, sorted."""

    files: tuple[FileStat, ...] = ()
    folders: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this (last) name is one that somebody is still writing."""
    return _TEMPORARY.fullmatch(name) is not None


def scan_folder(root: Path, folder: str = "") -> Folder:
    """What lies in ``root/folder``, by names and ``stat`` only; not recursive, nothing is opened.

    A folder that is not there, or vanishes, is empty. A folder that is a symbolic link, or may not
    be read, is skipped as a whole.
    """
    try:
        with _opened_folder(root, folder) as descriptor, os.scandir(descriptor) as entries:
            return _sorted_folder(folder, entries)
    except OSError as exc:
        return _unreadable(folder, exc)


def _sorted_folder(folder: str, entries: Iterator[os.DirEntry[str]]) -> Folder:
    files: list[FileStat] = []
    folders: list[str] = []
    skipped: list[Skipped] = []
    for entry in sorted(entries, key=lambda item: item.name):
        if entry.name == OWN_FOLDER:
            continue
        seen = _classify(f"{folder}/{entry.name}" if folder else entry.name, entry)
        if isinstance(seen, FileStat):
            files.append(seen)
        elif isinstance(seen, Skipped):
            skipped.append(seen)
        elif seen is not None:
            folders.append(seen)
    return Folder(tuple(files), tuple(folders), tuple(skipped))


def _classify(name: str, entry: os.DirEntry[str]) -> FileStat | Skipped | str | None:
    """A file, a folder's name, something to skip, or None for what has vanished."""
    if is_temporary(entry.name):
        return Skipped(name, Reason.TEMPORARY)
    if not entry.name.isprintable():
        return Skipped(repr(name), Reason.BAD_NAME)
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return Skipped(name, Reason.FOREIGN_OWNER, exc.strerror or "")
    if stat.S_ISDIR(info.st_mode):
        return name
    return classify_file(name, info)


def classify_file(name: str, info: os.stat_result) -> FileStat | Skipped:
    """A file by its name (relative to the root) and its ``lstat``."""
    problem = _name_problem(name.rpartition("/")[2]) or _content_problem(info)
    return Skipped(name, *problem) if problem else _file_stat(name, info)


def _name_problem(last: str) -> tuple[Reason] | None:
    if is_temporary(last):
        return (Reason.TEMPORARY,)
    return (Reason.LOCKED,) if last.endswith(".lock") else None


def _content_problem(info: os.stat_result) -> tuple[Reason, str] | None:
    if not stat.S_ISREG(info.st_mode):
        return Reason.NOT_A_FILE, ""
    if info.st_uid != os.geteuid():
        return Reason.FOREIGN_OWNER, f"uid {info.st_uid}"
    if info.st_size == 0:
        return Reason.EMPTY, ""
    if info.st_size > limits.MAX_ENTRY_BYTES:
        return Reason.TOO_LARGE, f"{info.st_size} bytes"
    return None


def stat_file(root: Path, name: str) -> FileStat | Skipped | None:
    """One file by name; None if it is not there. No symbolic link below ``root`` is followed."""
    folder, _, last = name.rpartition("/")
    try:
        with _opened_folder(root, folder) as descriptor:
            info = os.stat(last, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return _unreadable(name, exc).skipped[0]
    return classify_file(name, info)


def _file_stat(name: str, info: os.stat_result) -> FileStat:
    return FileStat(name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def _unreadable(name: str, exc: OSError) -> Folder:
    if exc.errno == errno.ENOENT:
        return Folder()
    if exc.errno in _DENIED:
        return Folder(skipped=(Skipped(name or ".", Reason.FOREIGN_OWNER, exc.strerror or ""),))
    return Folder(skipped=(Skipped(name or ".", Reason.NOT_A_FILE, exc.strerror or ""),))


@contextlib.contextmanager
def _opened_folder(root: Path, folder: str) -> Iterator[int]:
    """``root/folder`` as a descriptor. The root may be a link, nothing below it may."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folder.split("/") if folder else ():
            below = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def read_stable(root: Path, file: FileStat, *, limit: int = limits.MAX_ENTRY_BYTES) -> bytes:
    """The bytes of ``file``, which is the very file that was scanned, before and after it was read.

    Raises:
        Excluded: ``GROWING``: it changed, was replaced or is gone since the scan, or changed while it
            was read; ``TOO_LARGE``: more than ``limit`` bytes; ``FOREIGN_OWNER``: may not be read.
    """
    if file.size > limit:
        raise Excluded(Reason.TOO_LARGE, f"{file.size} bytes")
    folder, _, last = file.name.rpartition("/")
    try:
        with _opened_folder(root, folder) as parent:
            descriptor = os.open(last, _READ_FLAGS, dir_fd=parent)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            return _read_unchanged(stream.fileno(), file)
    except OSError as exc:
        reason = Reason.FOREIGN_OWNER if exc.errno in _DENIED else Reason.GROWING
        raise Excluded(reason, f"{file.name}: {exc.strerror}") from exc


def _read_unchanged(descriptor: int, file: FileStat) -> bytes:
    _require_unchanged(descriptor, file)
    chunks: list[bytes] = []
    left = file.size + 1  # one more than there may be: a file that grew shows; all at once: no second copy
    while left and (chunk := os.read(descriptor, left)):
        chunks.append(chunk)
        left -= len(chunk)
    _require_unchanged(descriptor, file)
    if left != 1:  # a network file system may be late with the size
        raise Excluded(Reason.GROWING, file.name)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _require_unchanged(descriptor: int, file: FileStat) -> None:
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or _file_stat(file.name, info) != file:
        raise Excluded(Reason.GROWING, file.name)


def prepare_root(root: Path) -> None:
    """Make ``root`` fit to install into: it exists, is private, and holds no old temporary files.

    Raises:
        UnsafeDirectoryError: As :func:`check_private`.
        StorageError: It cannot be made or read.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise storage_error(exc, root) from exc
    check_private(root)
    sweep_temporaries(root)


def sweep_temporaries(root: Path, *, older_than: float = STALE_SECONDS) -> int:
    """Delete our temporary files that are older than ``older_than`` seconds; how many there were.

    By the file system's own times, against a clock that may be off: the worst that a wrong clock can
    do is that an installation under way fails and is repeated.
    """
    swept = 0
    oldest = time.time() - older_than
    with contextlib.suppress(OSError), _opened_folder(root, TEMPORARY_FOLDER) as folder:
        for name in os.listdir(folder):  # noqa: PTH208 - by descriptor: no link is followed
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=folder)
                    swept += 1
    return swept


def check_private(root: Path) -> None:
    """Nobody but this user, root, and whom a group lets in decides what lies in ``root``.

    What is checked is the real path, after symbolic links. No component is writable by everybody, but
    for sticky directories such as ``/tmp``. There everybody can make a name, so what lies directly in
    one belongs to this user or root. ``root`` itself does so too, or is open for writing to a group
    that this user is in: that is how a team shares a cache (D03).

    Raises:
        UnsafeDirectoryError: It is not so.
        StorageError: ``root`` is not there or cannot be looked at.
    """
    try:
        real = root.resolve(strict=True)
        if not stat.S_ISDIR(real.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _check_owner(real, shared=True)
        _check_mode(real, sticky_passes=False)
        for below, above in itertools.pairwise((real, *real.parents)):
            if _check_mode(above, sticky_passes=True):
                _check_owner(below, shared=False)
    except (OSError, RuntimeError) as exc:
        error = exc if isinstance(exc, OSError) else OSError(errno.ELOOP, str(exc))
        raise storage_error(error, root) from exc


def _check_owner(path: Path, *, shared: bool) -> None:
    """``path`` belongs to this user or root, or, if ``shared``, a group of ours may write to it."""
    info = path.lstat()
    let_in = bool(info.st_mode & stat.S_IWGRP) and info.st_gid in (os.getegid(), *os.getgroups())
    if info.st_uid not in (os.geteuid(), 0) and not (shared and let_in):
        raise _unsafe(path, f"belongs to another user (uid {info.st_uid})", _OWN_REMEDY)


def _check_mode(path: Path, *, sticky_passes: bool) -> bool:
    """Whether everybody may write to ``path``, which only passes if it is sticky."""
    mode = path.lstat().st_mode
    open_to_all = bool(mode & stat.S_IWOTH)
    if open_to_all and not (sticky_passes and mode & stat.S_ISVTX):
        raise _unsafe(path, "is writable by every user", f"Run `chmod o-w {path}`, or {_ELSEWHERE}.")
    return open_to_all


_ELSEWHERE = "set TORCHINDUCTOR_CACHE_DIR to a directory of your own"
_OWN_REMEDY = f"{_ELSEWHERE[0].upper()}{_ELSEWHERE[1:]}."


def _unsafe(path: Path, what: str, remedy: str) -> UnsafeDirectoryError:
    return UnsafeDirectoryError(
        f"{path} {what}, so others could change what PyTorch loads and runs", remedy=remedy, subject=str(path)
    )


def storage_error(exc: OSError, path: Path | str) -> StorageError:
    """``exc`` as an error of ours that says what to do."""
    message = f"{path}: {exc.strerror or exc}"
    if exc.errno in _DENIED:
        remedy = f"Check the owner and the permissions of {path}."
        return DeniedError(message, remedy=remedy, subject=str(path))
    remedy = "Check the cache directory, then run the command again."
    if exc.errno in _FULL:
        remedy = "Free some space or raise the quota, then run the command again."
    return PermanentError(message, remedy=remedy, subject=str(path))


@dataclass(slots=True)
class _Placed:
    """A file that was renamed into place: where, and which inode it is."""

    parent: int
    name: str
    inode: int
    new: bool


def install_files(root: Path, files: Sequence[tuple[str, bytes]]) -> tuple[str, ...]:
    """Put whole files into place, each atomically, in the order given; all or none of the new ones.

    All are written to ``<root>/.torchrelay/tmp`` first, so that a full disk shows before the first
    rename; then each is renamed to its name. Modes follow the umask from birth.

    Args:
        root: The cache directory; made if it is not there.
        files: Names relative to ``root`` and contents; the one that readers look for comes last.

    Returns:
        The names, as given.

    Raises:
        FormatError: A name could lead elsewhere.
        InTheWayError: A folder on the way is a file or a symbolic link, or a file's name is a folder's.
        UnsafeDirectoryError: ``.torchrelay`` or a folder in it is a symbolic link.
        StorageError: It cannot be written. Temporary files, and files of this call that were not
            there before, are gone again.
    """
    for name, _ in files:
        check_file_name(name)
    with contextlib.ExitStack() as stack:
        try:
            _install(stack, root, files)
        except OSError as exc:
            raise storage_error(exc, root) from exc
    return tuple(name for name, _ in files)


def _install(stack: contextlib.ExitStack, root: Path, files: Sequence[tuple[str, bytes]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    temporary_folder = _made_folder(stack, root, TEMPORARY_FOLDER)
    parents = {folder: _made_parent(stack, root, folder) for folder in _folders(files)}
    temporaries: list[str] = []
    placed: list[_Placed] = []
    try:
        for _, data in files:
            _write_temporary(temporary_folder, data, temporaries)
        for (name, _), temporary in zip(files, tuple(temporaries), strict=True):
            folder, _, last = name.rpartition("/")
            placed.append(_place(temporary_folder, temporary, parents[folder], last))
            temporaries.remove(temporary)
    except BaseException:
        for item in reversed(placed):
            _take_back(item)
        raise
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=temporary_folder)


def _folders(files: Sequence[tuple[str, bytes]]) -> list[str]:
    return sorted({name.rpartition("/")[0] for name, _ in files})


def _write_temporary(folder: int, data: bytes, made: list[str]) -> None:
    name = f"{os.getpid()}-{next(_COUNTER)}-{secrets.token_hex(8)}"
    # Born with the mode it shall have: one made 0600 and renamed locks a group out (D03).
    descriptor = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=folder)
    made.append(name)
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]


def _place(temporary_folder: int, temporary: str, parent: int, name: str) -> _Placed:
    inode = os.stat(temporary, dir_fd=temporary_folder, follow_symlinks=False).st_ino
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
        new = False
    except FileNotFoundError:
        new = True
    try:
        os.replace(temporary, name, src_dir_fd=temporary_folder, dst_dir_fd=parent)
    except IsADirectoryError as exc:
        raise InTheWayError(f"{name} is a directory, and a file is to have its name", subject=name) from exc
    return _Placed(parent, name, inode, new)


def _take_back(item: _Placed) -> None:
    """Delete a file that this call made, unless somebody has put another one there since."""
    with contextlib.suppress(OSError):
        inode = os.stat(item.name, dir_fd=item.parent, follow_symlinks=False).st_ino
        if item.new and inode == item.inode:
            os.unlink(item.name, dir_fd=item.parent)


def _made_folder(stack: contextlib.ExitStack, root: Path, folder: str) -> int:
    """``root/folder`` as a descriptor, made where missing; closed with ``stack``."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    above = root
    try:
        for part in folder.split("/") if folder else ():
            below = _made_component(above, descriptor, part)
            os.close(descriptor)
            descriptor = below
            above = above / part
    except BaseException:
        os.close(descriptor)
        raise
    stack.callback(os.close, descriptor)
    return descriptor


def _made_parent(stack: contextlib.ExitStack, root: Path, folder: str) -> int:
    """As :func:`_made_folder`, for a folder that entries lie in: what is in the way there is one entry's."""
    try:
        return _made_folder(stack, root, folder)
    except UnsafeDirectoryError as exc:
        raise InTheWayError(exc.message, remedy=exc.remedy, subject=exc.subject) from exc
    except StorageError as exc:
        if isinstance(exc.__cause__, NotADirectoryError):
            raise InTheWayError(exc.message, subject=exc.subject) from exc
        raise


def _made_component(above: Path, parent: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return _opened_component(above, parent, name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o777, dir_fd=parent)
    return _opened_component(above, parent, name)


def _opened_component(above: Path, parent: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as exc:
        if not stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise storage_error(exc, above / name) from exc
        raise UnsafeDirectoryError(
            f"{name!r} in {above} is a symbolic link; nothing is installed through one",
            remedy="Replace it by a real directory, or point the cache directory itself elsewhere.",
            subject=str(above / name),
        ) from exc
