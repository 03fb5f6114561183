# SPDX-License-Identifier: Apache-2.0
"""What a ``file://`` URL and its options mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrelay.storage import Location


def read_config(location: Location, options: Mapping[str, str]) -> Path:
    """The store's directory, absolute.

    Raises:
        UsageError: It is the root of the file system, or there are options.
    """
    if options:
        raise UsageError(f"file:// takes no options, but was given {', '.join(sorted(options))}")
    path = Path(location.path)
    if path == Path(path.anchor):
        raise UsageError("the root of the file system cannot be a store", remedy="Name a directory.")
    return path
