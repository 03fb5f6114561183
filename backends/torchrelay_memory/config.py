# SPDX-License-Identifier: Apache-2.0
"""What a ``memory://`` URL and its options mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrelay.storage import Location


def read_config(location: Location, options: Mapping[str, str]) -> str:
    """The store's name: everything after ``memory://``, and at least one character.

    Raises:
        UsageError: There is no name, or there are options.
    """
    if options:
        raise UsageError(f"memory:// takes no options, but was given {', '.join(sorted(options))}")
    name = location.normalised.removeprefix("memory://")
    if not name:
        raise UsageError("a memory:// URL needs a name", remedy="Write, for example, memory://scratch.")
    return name
