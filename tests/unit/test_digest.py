# SPDX-License-Identifier: Apache-2.0
"""Digests: what is one, and what only looks like one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.digest import EMPTY_DIGEST, digest_of, is_digest, parse_digest
from torchrelay.errors import FormatError

GOOD = "0123456789abcdef" * 4
BAD = {
    "empty": "",
    "short": GOOD[:-1],
    "long": GOOD + "0",
    "upper-case": GOOD.upper(),
    "one-upper-case": "A" + GOOD[1:],
    "not-hexadecimal": "g" + GOOD[1:],
    "line-feed-after": GOOD + "\n",
    "line-feed-instead": GOOD[:-1] + "\n",
    "space-before": " " + GOOD[1:],
    "prefixed": "0x" + GOOD[2:],
    "labelled": "sha256:" + GOOD,
    "arabic-digits": "٣" * 64,
    "full-width-digits": "\uff10" * 64,
    "nul": GOOD[:-1] + "\0",
    "path": "../" + GOOD[3:],
    "surrogate": "\ud800" + GOOD[1:],
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_what_is_no_digest(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(FormatError) as caught:
        parse_digest(text)
    assert caught.value.subject == text[:80]


def test_an_error_does_not_repeat_a_long_text() -> None:
    with pytest.raises(FormatError) as caught:
        parse_digest("x" * 1_000_000)
    assert len(caught.value.message) < 200


@given(st.binary(max_size=200))
def test_digests_are_sha256(data: bytes) -> None:
    digest = digest_of(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert is_digest(digest) and parse_digest(digest) == digest
    assert digest_of(memoryview(data)) == digest_of(bytearray(data)) == digest


def test_the_digest_of_nothing() -> None:
    assert digest_of(b"") == EMPTY_DIGEST
