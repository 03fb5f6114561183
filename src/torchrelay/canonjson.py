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

from torchrelay.errors import FormatError

T = TypeVar("T")

_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """The canonical bytes of ``value`` (structs, dicts, lists, strings, integers, booleans, None)."""
    return _ENCODER.encode(value)


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
