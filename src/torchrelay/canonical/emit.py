# SPDX-License-Identifier: Apache-2.0
"""Writing the stream again: no frames, and a memo that depends on what is said, not on how.

Equal texts, and equal bytes, that appear again become references to the first: which of them were
one object in the producer depends on what its interpreter happened to intern. Other values are put
into the memo only if something refers to them. Numbers are given in order, so ``MEMOIZE`` does.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torchrelay.canonical.nodes import Atom, Get, Operation, Put, Value
from torchrelay.canonical.walk import Walk

_STOP = b"."
_MEMOIZE = b"\x94"


class Mask(NamedTuple):
    """A run of operations that is replaced by one.

    Args:
        start: The first operation.
        end: The one after the last.
        item: What stands there instead.
        attribute: The listed attribute, for the report.
        hidden: The value that is made there and nowhere else, if it is one with identity.
        time: The integer that was found, for a time.
    """

    start: int
    end: int
    item: Operation
    attribute: str
    hidden: Value | None = None
    time: Atom | None = None


def masked_stream(walk: Walk, masks: list[Mask]) -> list[Operation]:
    """The operations with every mask applied.

    Args:
        walk: The walk that the masks refer to.
        masks: Disjoint, in ascending order.
    """
    stream: list[Operation] = []
    position = 0
    for mask in masks:
        stream.extend(walk.operations[position : mask.start])
        stream.append(mask.item)
        position = mask.end
    stream.extend(walk.operations[position:])
    hidden = {mask.hidden: mask for mask in masks if mask.hidden is not None}
    return _materialised(walk, stream, hidden) if hidden else stream


def _materialised(walk: Walk, stream: list[Operation], hidden: dict[Value, Mask]) -> list[Operation]:
    """Make what a mask took away where it is first referred to from outside the mask."""
    whole: list[Operation] = []
    for item in stream:
        mask = hidden.pop(item.value, None) if isinstance(item, Get) else None
        if mask is None:
            whole.append(item)
        else:
            whole.extend(walk.operations[mask.start : mask.end])
    return whole


def sort_sets(walk: Walk) -> None:
    """Put the elements of each set into order, where all of them are atoms.

    Hash seeds decide the order in which a set is written. Sets with other elements are left as they
    are, since moving those would move what they put into the memo.
    """
    for value in walk.sets:
        places = _plain_elements(walk.operations, value)
        ordered = sorted((walk.operations[place] for place in places), key=_written)
        for place, item in zip(places, ordered, strict=True):
            walk.operations[place] = item


def _plain_elements(operations: list[Operation], value: Value) -> list[int]:
    """Where the elements stand; empty unless the set was made of nothing but itself and atoms.

    The scan ends at the first operation of another sort, so that sets within sets take linear time.
    """
    growing = operations[value.start] == b"\x8f"
    places: list[int] = []
    for place in range(value.start + 1, value.end if growing else value.end - 1):
        item = operations[place]
        if isinstance(item, Atom):
            places.append(place)
        elif not (growing and _grows(item, value)):
            return []
    return places if len(places) == len(value.items) else []


def _grows(item: Operation, value: Value) -> bool:
    return item in (b"(", b"\x90") or (isinstance(item, Put) and item.value is value)


def _written(item: Operation) -> bytes:
    return item.code + bytes(item.payload) if isinstance(item, Atom) else b""


_Key = tuple[bytes, "bytes | memoryview"]


def _references(stream: Iterable[Operation]) -> tuple[Counter[_Key], Counter[Value]]:
    texts: Counter[_Key] = Counter(item.key for item in stream if isinstance(item, Atom) and item.shared)
    values: Counter[Value] = Counter(item.value for item in stream if isinstance(item, Get))
    return texts, values


def _recall(index: int) -> bytes:
    return b"h" + struct.pack("<B", index) if index < 1 << 8 else b"j" + struct.pack("<I", index)


def emit(stream: list[Operation], protocol: int) -> bytes:
    """The bytes of a stream.

    Law: a walk over the result has the same operations, and emits the same bytes.
    """
    texts, values = _references(stream)
    memo: dict[_Key | Value, int] = {}
    parts: list[bytes | memoryview] = [b"\x80" + struct.pack("<B", protocol)]
    for item in stream:
        if isinstance(item, bytes):
            parts.append(item)
        elif isinstance(item, Get):
            parts.append(_recall(memo[item.value]))
        elif isinstance(item, Put):
            if item.value in values and item.value not in memo:
                memo[item.value] = len(memo)
                parts.append(_MEMOIZE)
        elif item.key in memo:
            parts.append(_recall(memo[item.key]))
        else:
            parts.extend(item.key)
            if texts[item.key] > 1:
                memo[item.key] = len(memo)
                parts.append(_MEMOIZE)
    parts.append(_STOP)
    return b"".join(parts)
