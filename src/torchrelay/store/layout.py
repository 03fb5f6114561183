# SPDX-License-Identifier: Apache-2.0
"""Names of the objects in a store (``docs/reference/format.md`` §1)."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.digest import Digest, is_digest

BLOBS = "blobs/"
DOOMED = "gc/"
ENVIRONMENTS = "environments/"


@dataclass(frozen=True, slots=True)
class SegmentName:
    """Where one segment lies. Law: ``parse_segment_name(w, str(n)) == n`` for ``n.workload == w``."""

    workload: str
    environment: Digest
    digest: Digest

    def __str__(self) -> str:
        return f"{manifest_prefix(self.workload)}{self.environment}/{self.digest}"


def manifest_prefix(workload: str) -> str:
    """The prefix below which a workload's segments lie."""
    return f"manifests/{workload}/"


def environment_name(digest: Digest) -> str:
    """Where an environment document lies."""
    return f"{ENVIRONMENTS}{digest}"


def pack_name(digest: Digest) -> str:
    """Where a pack lies."""
    return f"packs/{digest}"


def parse_segment_name(workload: str, name: str) -> SegmentName | None:
    """The segment called ``name``, or None: another workload's (``a`` is a prefix of ``a/b``), or rubbish."""
    prefix = manifest_prefix(workload)
    rest = name.removeprefix(prefix).split("/")
    if not name.startswith(prefix) or len(rest) != 2 or not all(map(is_digest, rest)):
        return None
    return SegmentName(workload, Digest(rest[0]), Digest(rest[1]))
