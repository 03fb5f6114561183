# SPDX-License-Identifier: Apache-2.0
"""What one push or pull is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.environment import Environment

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much is done and how much there is."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What a push considers and may do; see the flags of ``torchrelay push``.

    Attributes:
        all: Consider every entry, also those older than the directory's stamp: you vouch for them.
        since: Consider entries made since this moment, in seconds since 1970.
        own: Push one's own bytes beside what the store holds for an identity.
        replace: As `own`, and withdraw what the store holds.
        repair: Read held blobs and send damaged ones again.
        assume_environment: An unstamped directory was filled on this machine, all of it; stamp it so.
        environment: Where the entries of a Mega-Cache blob were made; for a blob either this or
            `assume_environment` must be given.
        max_bytes: Upload at most so many bytes of blobs.
        max_entries: Record at most so many entries.
        dry_run: Write nothing to the store, the cache directory, keys or policy.
        provenance: Claims of one's own about where the entries come from; short texts.
        progress: Told how far it is.
    """

    all: bool = False
    since: float | None = None
    own: bool = False
    replace: bool = False
    repair: bool = False
    assume_environment: bool = False
    environment: Environment | None = None
    max_bytes: int | None = None
    max_entries: int | None = None
    dry_run: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict)
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What a pull is for.

    Attributes:
        environment: Pull for this machine, not for the one that runs the pull.
        deadline: Stop fetching after so many seconds; what was installed stays.
        progress: Told how far it is.
    """

    environment: Environment | None = None
    deadline: float | None = None
    progress: Progress | None = None
