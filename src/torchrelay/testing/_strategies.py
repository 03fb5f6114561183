# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for names and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def object_names(prefix: str = "") -> SearchStrategy[str]:
    """Valid object names below ``prefix``, none of which is another's folder, with collisions likely.

    Folders begin with ``d`` and objects with ``o``, so that the two never meet.
    """
    folder = st.sampled_from(["d", "d0", "d0-x", "d.1", "dZ_"])
    leaf = st.one_of(
        st.sampled_from(["o", "o0", "o.1", "o-a", "oA"]),
        st.from_regex(r"\Ao[A-Za-z0-9._-]{0,40}\Z"),
    )
    return st.builds(
        lambda folders, name: prefix + "/".join([*folders, name]), st.lists(folder, max_size=3), leaf
    )


def payloads(max_size: int = 4096) -> SearchStrategy[bytes]:
    """Bytes, with the sizes at which things break well represented."""
    return st.one_of(st.just(b""), st.just(b"\0"), st.binary(max_size=64), st.binary(max_size=max_size))
