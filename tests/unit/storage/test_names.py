# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.storage import TEMP_PREFIX, is_component, is_object_name, is_prefix
from torchrelay.testing import object_names
from torchrelay.testing._conformance import HOSTILE_NAMES

H = "ab" * 32
GOOD = [
    f"blobs/aa/{H}",
    f"blobs/aa/{H}.1",
    f"environments/{H}",
    f"manifests/acme/llama-8b/prod/{H}/{H}",
    f"manifests/A.b_c-d/{H}/{H}",
    "x",
    "a" * 255,
    "/".join(["a" * 127] * 4),
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name):
    assert is_object_name(name)
    assert is_prefix(name + "/")
    assert not is_prefix(name)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_hostile_names(name):
    assert not is_object_name(name)
    assert not is_prefix(name + "/")


@pytest.mark.parametrize("name", ["a\n", "a/b\n", "\na", "a" * 513, "é", "a/é", "ａ", "٣"])  # noqa: RUF001
def test_more_hostile_names(name):
    assert not is_object_name(name)


def test_prefixes():
    assert is_prefix("")
    assert not is_prefix("/")
    assert not is_prefix("a//")
    assert not is_prefix("a")


def test_temporary_names_can_never_be_objects():
    assert not is_component(TEMP_PREFIX + "1-2")


@given(object_names())
def test_the_strategy_gives_names(name):
    assert is_object_name(name)


@given(st.text())
def test_names_are_safe_components(text):
    if is_object_name(text):
        assert all(is_component(c) and not c.startswith((".", "-")) for c in text.split("/"))
        assert text.isascii()
