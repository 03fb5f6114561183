# SPDX-License-Identifier: Apache-2.0
"""JSON of other programs, with every number kept as the text that it was.

PyTorch keeps measurements as JSON floats, infinite ones included. Going through binary floats, or
through a JSON writer that spells them otherwise, would change what PyTorch reads back or what the
signature covers. So a number is a :class:`Number`, its own token, from reading to writing.

The canonical form ``json-1``: ASCII, members sorted by code points, no white space, numbers as they
stood.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import NoReturn, Union

from torchrelay import limits
from torchrelay.errors import FormatError

CANON = "json-1"
"""The name of the canonical form."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,4000})(\.[0-9]{1,4000})?([eE][-+]?[0-9]{1,20})?|-?Infinity|NaN")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,15})")


class Number(str):
    """A number's token, such as ``1``, ``0.25`` or ``Infinity``."""

    __slots__ = ()

    def integer(self) -> int | None:
        """Its value, if it is an integer of at most 16 digits; else None."""
        return int(self) if _INTEGER.fullmatch(self) else None


Json = Union[None, bool, Number, str, "list[Json]", "dict[str, Json]"]


def parse(data: bytes, *, name: str, limit: int) -> Json:
    """Parse one JSON document as Python's own ``json`` writes it.

    Laws: ``encode(parse(encode(v))) == encode(v)``; numbers come back character for character.

    Raises:
        FormatError: Too large, not UTF-8, not JSON, nested too deeply, or a member given twice.
    """
    if len(data) > limit:
        raise FormatError(f"{name} is {len(data)} bytes, more than the {limit} allowed", subject=name)
    try:
        value: Json = json.loads(
            data.decode("utf-8"),
            parse_float=_number,
            parse_int=_number,
            parse_constant=_number,
            object_pairs_hook=_distinct,
        )
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{name} is not valid JSON: {str(exc)[:200]}", subject=name) from exc
    if not _no_deeper(value, limits.MAX_JSON_DEPTH):
        raise FormatError(f"{name} is nested too deeply", subject=name)
    return value


def encode(value: Json, *, sort: bool = True) -> bytes:
    """``value`` as ASCII without white space; in the canonical form unless ``sort`` is false."""
    return "".join(_pieces(value, sort)).encode("ascii")


def texts(value: Json) -> Iterator[str]:
    """Every text in ``value``, names of members included."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str) and not isinstance(value, Number):
        yield value


def _number(token: str) -> Number:
    return Number(token) if _NUMBER.fullmatch(token) else _refuse(f"the number {token[:40]!r}")


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _refuse("a member that is given twice")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"it holds {what}")


def _no_deeper(value: Json, left: int) -> bool:
    if isinstance(value, dict):
        return left > 0 and all(_no_deeper(item, left - 1) for item in value.values())
    if isinstance(value, list):
        return left > 0 and all(_no_deeper(item, left - 1) for item in value)
    return True


def _pieces(value: Json, sort: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for index, name in enumerate(sorted(value) if sort else value):
            yield f"{',' if index else '{'}{encode_basestring_ascii(name)}:"
            yield from _pieces(value[name], sort)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from _pieces(item, sort)
        yield "]" if value else "[]"
    else:
        yield _scalar(value)


def _scalar(value: bool | str | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, Number) else encode_basestring_ascii(value)
