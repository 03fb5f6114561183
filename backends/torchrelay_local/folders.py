# SPDX-License-Identifier: Apache-2.0
"""Folders of a store, opened component by component so that no link below the root is followed.

Whoever may write to one folder of a shared store could otherwise lead a writer with more rights
out of it. Descriptors live as long as one call, never longer: nothing leaks into a forked child and
nothing keeps a removed store alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from torchrelay.errors import NotFoundError, PermanentError, StorageError
from torchrelay.storage import classify_oserror

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPEN_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FOLDER = _OPEN_ROOT | os.O_NOFOLLOW
_NOT_A_FOLDER = {errno.ENOTDIR, errno.ELOOP}  # what opening a file or link as a folder gives


class Folders:
    """The folder tree below a store's root.

    Args:
        root: The store's directory; may be a symbolic link.
        create: Whether the root may be made by :meth:`ensure`.
    """

    def __init__(self, root: Path, *, create: bool) -> None:
        self.root = root
        self.create = create

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """A descriptor of ``folder`` (``""`` is the root) for the time of the block.

        Raises:
            NotFoundError: The root, the folder, or a folder on the way is absent or not a folder.
            StorageError: It cannot be opened.
        """
        fd = self._open_root()
        try:
            for component in _components(folder):
                try:
                    deeper = os.open(component, _OPEN_FOLDER, dir_fd=fd)
                except OSError as exc:
                    if exc.errno in {errno.ENOENT, *_NOT_A_FOLDER}:
                        raise NotFoundError(f"{self.root / folder} is not a folder of the store") from exc
                    raise self.error(exc, folder) from exc
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    def ensure(self, folder: str) -> int:
        """A descriptor of ``folder``, made where it is missing. The caller closes it.

        New folders get ``0777`` less the umask and inherit a setgid bit. Nothing below the root is
        synced here.

        Raises:
            NotFoundError: The root is missing and must not be made.
            PermanentError: Something that is not a folder is in the way.
            StorageError: It cannot be made.
        """
        try:
            fd = self._open_root()
        except NotFoundError:
            if not self.create:
                raise
            self._make_root()
            fd = self._open_root()
        done = ""
        try:
            for component in _components(folder):
                done = f"{done}/{component}" if done else component
                deeper = self._enter_or_make(component, fd, done)
                os.close(fd)
                fd = deeper
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _enter_or_make(self, component: str, above: int, folder: str) -> int:
        try:
            with contextlib.suppress(FileNotFoundError):
                return os.open(component, _OPEN_FOLDER, dir_fd=above)
            with contextlib.suppress(FileExistsError):
                os.mkdir(component, 0o777, dir_fd=above)
            return os.open(component, _OPEN_FOLDER, dir_fd=above)
        except OSError as exc:
            if exc.errno not in _NOT_A_FOLDER:
                raise self.error(exc, folder) from exc
            raise PermanentError(
                f"{self.root / folder} is not a folder, so nothing can be stored below it",
                remedy="Remove it; links are not followed below the root of a store.",
                subject=folder,
            ) from exc

    def _make_root(self) -> None:
        if self.root.is_symlink():  # to nowhere, since it could not be opened
            raise self._not_a_folder()
        missing = [path for path in (self.root, *self.root.parents) if not os.path.lexists(path)]
        try:
            for path in reversed(missing):
                path.mkdir(mode=0o777, exist_ok=True)
                with _opened(path.parent) as fd:
                    sync_folder(fd)
        except (FileExistsError, NotADirectoryError) as exc:
            raise self._not_a_folder() from exc
        except OSError as exc:
            raise self.error(exc, "") from exc

    def _open_root(self) -> int:
        try:
            return os.open(self.root, _OPEN_ROOT)
        except FileNotFoundError as exc:
            raise NotFoundError(
                f"the store {self.root} does not exist",
                remedy="Check the path; the first push of a workload makes the store.",
                subject=str(self.root),
            ) from exc
        except NotADirectoryError as exc:
            raise self._not_a_folder() from exc
        except OSError as exc:
            raise self.error(exc, "") from exc

    def _not_a_folder(self) -> StorageError:
        return PermanentError(
            f"the store {self.root} is not a directory",
            remedy="Name a directory.",
            subject=str(self.root),
        )

    def error(self, exc: OSError, below: str) -> StorageError:
        """``exc``, which happened to the file or folder ``below``, as an error of ours."""
        return classify_oserror(exc, what=str(self.root / below if below else self.root), subject=below)


def folder_of(name: str) -> str:
    """The folder that the object ``name`` lies in; empty for the root."""
    return name.rpartition("/")[0]


def way_to(folder: str) -> list[str]:
    """The folders from the root to ``folder``, both included."""
    parts = _components(folder)
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


def sync_folder(fd: int) -> None:
    """Make what was created or renamed in a folder survive a crash, where the file system can."""
    try:
        os.fsync(fd)
    except OSError as exc:
        # Some network file systems have no fsync of folders, because their servers always sync them.
        if exc.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, _OPEN_ROOT)
    try:
        yield fd
    finally:
        os.close(fd)


def _components(folder: str) -> list[str]:
    return folder.split("/") if folder else []
