# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON: one byte string per value (``docs/reference/format.md`` §2).

A subset of RFC 8785: UTF-8, members sorted by name, no white space, integers only, and every
object read with a declared type that refuses unknown members. What is read must be canonical
already: that refuses duplicate members, white space and alternative spellings in one comparison,
and means that the bytes that were signed are the bytes that were parsed.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from torchrelay import limits
from torchrelay.errors import FormatError

T = TypeVar("T")

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader holds exactly (RFC 7493)."""

_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """The canonical bytes of ``value`` (structs, dicts, lists, strings, integers, booleans, None).

    Raises:
        FormatError: It has none: a lone surrogate, and outside of structs, whose fields have declared
            types, also a float, an integer beyond 2^53 - 1, or a member whose name is not ASCII.
    """
    try:
        if not isinstance(value, msgspec.Struct):
            _check_plain(value, limits.MAX_JSON_DEPTH)
        return _ENCODER.encode(value)
    except (TypeError, UnicodeError, RecursionError, OverflowError, msgspec.MsgspecError) as exc:
        raise FormatError(f"a value that canonical JSON does not have: {exc}") from exc


def _check_plain(value: Any, depth: int) -> None:
    """The encoder writes floats, bytes and any integer, which other readers would not read alike."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) and name.isascii() for name in value):
            raise TypeError("the name of a member is not ASCII")
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        in_range = isinstance(value, int) and -MAX_INTEGER <= value <= MAX_INTEGER
        if not (in_range or value is None or isinstance(value, str | msgspec.Struct)):
            raise TypeError(f"{type(value).__name__} {value!r:.40}")
        return
    if not depth:
        raise TypeError(f"nested beyond {limits.MAX_JSON_DEPTH} levels")
    for part in parts:
        _check_plain(part, depth - 1)


def decode(data: bytes | memoryview, type_: type[T], *, name: str, limit: int) -> T:
    """Parse canonical bytes.

    Law: ``decode(encode(v), type(v), ...) == v`` and ``encode(decode(b, ...)) == b``.

    Args:
        data: The bytes as stored.
        type_: The declared type; strict, unknown members are refused.
        name: What is being read, for the error.
        limit: Largest size in bytes that is looked at.

    Raises:
        FormatError: Too large, not JSON, not of the declared type, or not canonical.
    """
    if len(data) > limit:
        raise FormatError(f"{name} is {len(data)} bytes, more than the {limit} allowed", subject=name)
    decoder = _DECODERS.get(type_)
    if decoder is None:
        decoder = _DECODERS[type_] = msgspec.json.Decoder(type_, strict=True)
    try:
        value = decoder.decode(data)
        canonical = _ENCODER.encode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as exc:
        raise FormatError(f"{name} is not valid: {exc}", subject=name) from exc
    if canonical != data:
        raise FormatError(f"{name} is not canonical JSON", subject=name)
    return value  # type: ignore[no-any-return]
