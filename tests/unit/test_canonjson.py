# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON, held against an encoder that shares no code with ours."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay import canonjson
from torchrelay.canonjson import MAX_INTEGER, decode, encode
from torchrelay.errors import FormatError

LIMIT = 1 << 20
texts = st.text(st.characters(exclude_categories=["Cs"]))
names = st.text(st.characters(max_codepoint=127), max_size=12)
integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
values = st.recursive(
    st.none() | st.booleans() | integers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=5),
    max_leaves=25,
)


def independent(value: Any) -> bytes:
    """What format.md §2 says, by the standard library."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Members stand in the code in another order than in the bytes."""

    y: int
    name: str
    x: int
    tags: tuple[str, ...] = ()
    table: dict[str, int] = {}
    of: Literal["a", "b"] = "a"


POINT = b'{"name":"p","of":"a","table":{"k":1},"tags":["t"],"x":1,"y":2}'


@given(values)
def test_the_bytes_are_those_of_an_independent_encoder(value: Any) -> None:
    assert encode(value) == independent(value)
    assert decode(encode(value), Any, name="x", limit=LIMIT) == value  # type: ignore[arg-type]


@given(integers, texts, integers, st.lists(texts, max_size=3), st.dictionaries(names, integers, max_size=4))
def test_structs_too(y: int, name: str, x: int, tags: list[str], table: dict[str, int]) -> None:
    point = Point(y=y, name=name, x=x, tags=tuple(tags), table=table)
    data = encode(point)
    assert data == independent(msgspec.to_builtins(point))
    assert decode(data, Point, name="p", limit=LIMIT) == point
    assert decode(memoryview(data), Point, name="p", limit=LIMIT) == point


@pytest.mark.parametrize("code", [*range(0x21), 0x22, 0x2F, 0x5C, 0x7E, 0x7F, 0x80, 0x9F, 0xA0, 0xAD])
def test_control_characters_one_by_one(code: int) -> None:
    text = f"a{chr(code)}b"
    data = encode(text)
    assert data == independent(text)
    assert decode(data, str, name="x", limit=LIMIT) == text
    # Its other spelling is refused.
    other = b'"a\\u%04Xb"' % code if code else b'"a\0b"'
    if data != other:
        with pytest.raises(FormatError):
            decode(other, str, name="x", limit=LIMIT)


@pytest.mark.parametrize(
    "text", ["\x7f", "\u2028\u2029", "\ufeff", "\ufffd", "\uffff", "𝄞", "\U0010ffff", "e\u0301", "é"]
)
def test_everything_else_stands_as_utf8(text: str) -> None:
    assert encode(text) == b'"' + text.encode() + b'"'
    assert decode(encode(text), str, name="x", limit=LIMIT) == text


NOT_WRITTEN: dict[str, Any] = {
    "float": 1.5,
    "whole-float": 1.0,
    "nan": math.nan,
    "infinity": math.inf,
    "bytes": b"x",
    "too-large": MAX_INTEGER + 1,
    "too-small": -MAX_INTEGER - 1,
    "beyond-64-bit": 2**64,
    "huge": 10**400,
    "high-surrogate": "\ud800",
    "low-surrogate": "a\udfffb",
    "surrogate-pair-apart": "\ud834\udd1e",
    "surrogate-name": {"\ud800": 1},
    "name-not-ascii": {"é": 1},
    "name-not-text": {1: 1},
    "set": {1},
    "object": object(),
    "float-inside": {"a": [1, {"b": 0.5}]},
    "number-inside": ((2**53,),),
}


@pytest.mark.parametrize("value", NOT_WRITTEN.values(), ids=NOT_WRITTEN.keys())
def test_what_has_no_canonical_bytes(value: Any) -> None:
    with pytest.raises(FormatError):
        encode(value)


def test_a_surrogate_inside_a_struct_is_refused_as_well() -> None:
    with pytest.raises(FormatError):
        encode(Point(1, "\udc80", 2))


def test_nesting_of_what_is_written_is_bounded() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(FormatError):
        encode(value)


def test_the_order_of_names_is_that_of_their_bytes() -> None:
    table = dict.fromkeys(("b", "B", "a.", "a-", "a", "_", "~", "10", "9", "aa"), 1)
    order = re.findall(rb'"([^"]+)":', encode(table))
    assert order == sorted(order) and order[0] == b"10"


NOT_CANONICAL = {
    "space-after-colon": POINT.replace(b'"x":1', b'"x": 1'),
    "space-before": b" " + POINT,
    "space-after": POINT + b" ",
    "line-feed-after": POINT + b"\n",
    "carriage-return-after": POINT + b"\r",
    "nul-after": POINT + b"\0",
    "two-values": POINT * 2,
    "byte-order-mark": b"\xef\xbb\xbf" + POINT,
    "utf-16": POINT.decode().encode("utf-16"),
    "other-order": b'{"of":"a","name":"p","table":{"k":1},"tags":["t"],"x":1,"y":2}',
    "duplicate-first-wins": POINT.replace(b'"x":1', b'"x":1,"x":2'),
    "duplicate-equal": POINT.replace(b'"x":1', b'"x":1,"x":1'),
    "duplicate-in-table": POINT.replace(b'"k":1', b'"k":1,"k":1'),
    "table-order": POINT.replace(b'"k":1', b'"k":1,"a":1'),
    "escaped-letter": POINT.replace(b'"p"', b'"\\u0070"'),
    "escaped-slash": POINT.replace(b'"p"', b'"\\/"'),
    "upper-case-escape": POINT.replace(b'"p"', b'"\\u001F"'),
    "long-escape-of-line-feed": POINT.replace(b'"p"', b'"\\u000a"'),
    "escaped-delete": POINT.replace(b'"p"', b'"\\u007f"'),
    "escaped-pair": POINT.replace(b'"p"', b'"\\ud834\\udd1e"'),
    "raw-control-character": POINT.replace(b'"p"', b'"\x01"'),
    "escaped-name": POINT.replace(b'"x"', b'"\\u0078"'),
    "leading-zero": POINT.replace(b'"x":1', b'"x":01'),
    "minus-zero": POINT.replace(b'"x":1', b'"x":-0'),
    "plus": POINT.replace(b'"x":1', b'"x":+1'),
    "fraction": POINT.replace(b'"x":1', b'"x":1.0'),
    "exponent": POINT.replace(b'"x":1', b'"x":1e0'),
    "nan": POINT.replace(b'"x":1', b'"x":NaN'),
    "comment": POINT.replace(b'"x":1', b'"x":1/**/'),
    "trailing-comma": POINT.replace(b'["t"]', b'["t",]'),
    "missing-default": POINT.replace(b'"of":"a",', b""),
}
NOT_OF_THE_TYPE = {
    "empty": b"",
    "null": b"null",
    "array": b"[]",
    "missing": POINT.replace(b'"x":1,', b""),
    "unknown": POINT.replace(b'"x":1', b'"x":1,"z":1'),
    "number-as-text": POINT.replace(b'"x":1', b'"x":"1"'),
    "text-as-number": POINT.replace(b'"p"', b"1"),
    "true-as-number": POINT.replace(b'"x":1', b'"x":true'),
    "null-member": POINT.replace(b'"p"', b"null"),
    "other-literal": POINT.replace(b'"of":"a"', b'"of":"c"'),
    "lone-surrogate": POINT.replace(b'"p"', b'"\\ud800"'),
    "surrogate-in-utf8": POINT.replace(b'"p"', b'"\xed\xa0\x80"'),
    "bad-utf8": POINT.replace(b'"p"', b'"\xff"'),
    "overlong-utf8": POINT.replace(b'"p"', b'"\xc0\xaf"'),
    "cut": POINT[:-1],
    "single-quotes": POINT.replace(b'"', b"'"),
}
REFUSED = NOT_CANONICAL | NOT_OF_THE_TYPE


def test_the_good_one() -> None:
    assert decode(POINT, Point, name="p", limit=LIMIT) == Point(2, "p", 1, ("t",), {"k": 1})


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_names_its_object(data: bytes) -> None:
    with pytest.raises(FormatError, match="the object") as caught:
        decode(data, Point, name="the object", limit=LIMIT)
    assert caught.value.subject == "the object" and caught.value.remedy


@pytest.mark.parametrize("cut", range(len(POINT)))
def test_cut_anywhere(cut: int) -> None:
    with pytest.raises(FormatError):
        decode(POINT[:cut], Point, name="p", limit=LIMIT)


def test_the_bound_comes_before_the_parser() -> None:
    assert decode(POINT, Point, name="p", limit=len(POINT))
    with pytest.raises(FormatError, match=f"{len(POINT)} bytes"):
        decode(POINT, Point, name="p", limit=len(POINT) - 1)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("type_", [Any, Point, list[Any]])
def test_a_million_levels(opening: bytes, type_: Any) -> None:
    with pytest.raises(FormatError):
        decode(opening * 1_000_000, type_, name="deep", limit=1 << 30)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for type_ in (Point, Any):
        try:
            value = decode(data, type_, name="x", limit=LIMIT)
        except FormatError:
            continue
        assert canonjson._ENCODER.encode(value) == data
