# SPDX-License-Identifier: Apache-2.0
"""JSON with numbers kept as they stood."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.caches import jsontext
from torchrelay.errors import FormatError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=12,
)


def parse(data: bytes) -> jsontext.Json:
    return jsontext.parse(data, name="x", limit=1 << 20)


@given(VALUES, st.sampled_from([None, 4]))
def test_python_reads_back_the_same_value(value: Any, indent: int | None) -> None:
    data = json.dumps(value, indent=indent).encode()
    canonical = jsontext.encode(parse(data))
    assert json.loads(canonical) == value
    assert jsontext.encode(parse(canonical)) == canonical
    assert json.loads(jsontext.encode(parse(data), sort=False)) == value


@given(VALUES)
def test_the_order_and_spacing_of_the_source_do_not_matter(value: Any) -> None:
    one = json.dumps(value, indent=2).encode()
    two = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert jsontext.encode(parse(one)) == jsontext.encode(parse(two))


@given(st.floats())
def test_every_float_survives_exactly(number: float) -> None:
    back = json.loads(jsontext.encode(parse(json.dumps([number]).encode())))[0]
    assert back == number or (math.isnan(back) and math.isnan(number))
    assert math.copysign(1, back) == math.copysign(1, number) or math.isnan(number)


def test_tokens_are_kept() -> None:
    data = b'{"a":1.50,"b":-0.0,"c":1E5,"d":Infinity,"e":123456789012345678901234567890}'
    assert jsontext.encode(parse(data)) == data


def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    assert jsontext.encode(parse(b'{"1":"1","x":1}')) == b'{"1":"1","x":1}'
    assert list(jsontext.texts(parse(b'{"a":["b",1,{"c":null}]}'))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a":1}x',
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b"[" * 65 + b"]" * 65,
        b"[" * 1_000_000,
        b'\xff"',
        b"\xef\xbb\xbf{}",
        '"x"'.encode("utf-16"),
        b"[1" + b"0" * 5000 + b"]",
        b"[01]",
        "[\u0661]".encode(),
        b"nan",
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        jsontext.parse(data, name="the file", limit=1 << 21)
    assert "the file" in caught.value.message


def test_the_bound_comes_first() -> None:
    with pytest.raises(FormatError, match="more than the 3 allowed"):
        jsontext.parse(b"[1, 2]", name="x", limit=3)


@pytest.mark.parametrize(
    ("token", "value"), [("0", 0), ("-17", -17), ("1.0", None), ("1e3", None), ("9" * 17, None)]
)
def test_integers(token: str, value: int | None) -> None:
    assert jsontext.Number(token).integer() == value
