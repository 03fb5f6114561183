# SPDX-License-Identifier: Apache-2.0
"""The configuration file: ``torchrelay.toml``, or ``[tool.torchrelay]`` in a ``pyproject.toml``."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import UnsafeDirectoryError, UsageError
from torchrelay.limits import MAX_DOCUMENT_BYTES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "torchrelay.toml"


def find(here: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest file at or above ``here`` that configures torchrelay, and its settings.

    Raises:
        UsageError: It cannot be read, or it is another user's: such a file could say whom to trust,
            and is only used when it is named.
    """
    for folder in (here, *here.parents):
        for name in (FILE_NAME, "pyproject.toml"):
            path = folder / name
            if path.is_file() and (table := _table(path, _read(path))) is not None:
                _check_owner(path)
                return path, table
    return None


def read(path: Path) -> Mapping[str, Any]:
    """The settings in a file that the user named.

    Raises:
        UsageError: It cannot be read, or holds none.
    """
    table = _table(path, _read(path))
    if table is None:
        raise UsageError(f"{path} has no table [tool.torchrelay]", subject=str(path))
    return table


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as exc:
        raise UsageError(
            f"the configuration file {path} cannot be read: {exc.strerror}",
            remedy="Name a file that is there and readable with --config, or correct its permissions.",
            subject=str(path),
        ) from exc
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"the configuration file {path} is larger than 1 MiB", subject=str(path))
    return data


def _table(path: Path, data: bytes) -> Mapping[str, Any] | None:
    """The settings in a file; None for a ``pyproject.toml`` that is not about torchrelay."""
    whole_file = path.name != "pyproject.toml"
    if not whole_file and b"torchrelay" not in data:
        return None  # so that a broken file of another project is not this command's trouble
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise UsageError(
            f"{path} is not valid TOML: {exc}", remedy="Correct the file.", subject=str(path)
        ) from exc
    if whole_file:
        return document
    tool = document.get("tool")
    table = tool.get("torchrelay") if isinstance(tool, Mapping) else None
    if table is not None and not isinstance(table, Mapping):
        raise UsageError(f"tool.torchrelay in {path} is not a table", subject=str(path))
    return table


def _check_owner(path: Path) -> None:
    """A file that was only come across must be this user's: it may say whom to trust."""
    try:
        status = path.stat()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}", subject=str(path)) from exc
    getuid = getattr(os, "getuid", None)
    if getuid is None:
        return
    if status.st_uid not in {0, getuid()} or stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
        raise UnsafeDirectoryError(
            f"the configuration file {path} belongs to another user or is writable by all",
            remedy=f"If you mean it, name it: --config {path}; else move away from it.",
            subject=str(path),
        )
