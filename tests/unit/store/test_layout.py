# SPDX-License-Identifier: Apache-2.0
"""Names of objects: format.md §1."""

from __future__ import annotations

import pytest

from torchrelay.digest import digest_of
from torchrelay.storage.names import is_object_name
from torchrelay.store.layout import (
    SegmentName,
    environment_name,
    manifest_prefix,
    pack_name,
    parse_segment_name,
)

E, D = digest_of(b"environment"), digest_of(b"segment")


def test_names() -> None:
    name = SegmentName("acme/demo", E, D)
    assert str(name) == f"manifests/acme/demo/{E}/{D}"
    assert str(name).startswith(manifest_prefix("acme/demo"))
    assert environment_name(D) == f"environments/{D}"
    assert pack_name(D) == f"packs/{D}"
    longest = "/".join(["w" * 99, "x" * 100])
    for text in (str(SegmentName(longest, E, D)), environment_name(D), pack_name(D)):
        assert is_object_name(text)


def test_a_segment_is_found_again() -> None:
    assert parse_segment_name("acme/demo", f"manifests/acme/demo/{E}/{D}") == SegmentName("acme/demo", E, D)


@pytest.mark.parametrize(
    "name",
    [
        "",
        f"manifests/a/b/{E}/{D}",  # of the workload a/b
        f"manifests/ab/{E}/{D}",
        f"manifests/A/{E}/{D}",
        f"manifests/{E}/{D}",
        f"{E}/{D}",
        f"x/manifests/a/{E}/{D}",
        f"manifests/a/{E}",
        f"manifests/a/{D}/",
        f"manifests/a//{E}/{D}",
        f"manifests/a/{E}/{D}/x",
        f"manifests/a/{E}/{D}.tmp",
        f"manifests/a/{E}/.tmp-{D}",
        f"manifests/a/{E}/{D.upper()}",
        f"manifests/a/{E}/{D[:-1]}",
        f"manifests/a/{E}/{D}\n",
        f"manifests/a/../{D}",
        "manifests/a/README",
    ],
)
def test_what_is_no_segment_of_a_workload_is_left_alone(name: str) -> None:
    assert parse_segment_name("a", name) is None
