# SPDX-License-Identifier: Apache-2.0
"""What the opcode walk knows of the objects in a pickle: enough for attribute paths, and no more.

Nothing here is ever turned into the object that the pickle describes.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple


class Atom:
    """A value without parts and without identity: text, bytes, number, ``None``, boolean.

    Args:
        tag: ``s`` text, ``b`` bytes, ``i`` integer, ``n`` None, ``o`` anything else.
        code: What pushes it: for text and bytes the shortest opcode with the length, for anything
            else all of what was found.
        payload: UTF-8 (surrogates passed) of a text, the bytes of a bytes object; else empty.
        number: The integer, for ``i``.
        offset: Where in the walked bytes its opcode stood.
    """

    __slots__ = ("code", "number", "offset", "payload", "tag")

    def __init__(
        self, tag: str, code: bytes, payload: bytes | memoryview = b"", number: int = 0, offset: int = 0
    ) -> None:
        self.tag = tag
        self.code = code
        self.payload = payload
        self.number = number
        self.offset = offset

    @property
    def key(self) -> tuple[bytes, bytes | memoryview]:
        """Equal for two atoms exactly if they are written the same."""
        return self.code, self.payload

    @property
    def shared(self) -> bool:
        """Whether a repetition is written as a reference: so no reference makes a stream longer."""
        return self.tag in {"s", "b"} or len(self.code) > _LONGEST_REPEATED


class Kind(Enum):
    """What a :class:`Value` is."""

    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    SET = "set"
    GLOBAL = "global"
    OBJECT = "object"
    OTHER = "other"


class Span(NamedTuple):
    """A node, and the operations ``[start, end)`` that put it where it is."""

    node: Node
    start: int
    end: int


class Value:
    """A value with identity, which the pickle may refer to again.

    Args:
        kind: What it is.
        name: ``module.QualName`` of a global, or of the class or factory of an object.

    ``items`` are the elements of a tuple, list or set, and for an object the arguments that made
    it. ``pairs`` are the entries of a dict; a repeated key stands there repeatedly. ``states`` are
    the dicts that an object took its attributes from: referred to, since many objects may share one.
    A container whose elements came in one run of operations was made by ``[start, end)``.
    """

    __slots__ = ("_index", "_texts_only", "end", "items", "kind", "name", "pairs", "start", "states")

    def __init__(self, kind: Kind, name: str = "", start: int = 0) -> None:
        self.kind = kind
        self.name = name
        self.items: list[Span] = []
        self.pairs: list[tuple[Node, Span]] = []
        self.states: dict[Value, None] = {}
        self.start = start
        self.end = start
        self._index: dict[bytes | memoryview, list[Span]] | None = None
        self._texts_only: bool | None = None

    def entries(self, name: str) -> list[Span]:
        """All values that a dict was given for a key that is text. To be asked after the walk."""
        if self._index is None:
            self._index = {}
            for key, span in self.pairs:
                if isinstance(key, Atom) and key.tag == "s":
                    self._index.setdefault(key.payload, []).append(span)
        return self._index.get(name.encode(), [])

    def attribute(self, name: str) -> Span | None:
        """The value of an entry or attribute, the last one if it was given twice."""
        for source in reversed(self.states) if self.states else (self,):
            found = source.entries(name)
            if found:
                return found[-1]
        return None

    def texts_only(self) -> bool:
        """Whether all elements are texts. To be asked after the walk."""
        if self._texts_only is None:
            self._texts_only = all(
                isinstance(item.node, Atom) and item.node.tag == "s" for item in self.items
            )
        return self._texts_only


Node = Atom | Value


class Put(NamedTuple):
    """Operation: from here on the value on top of the stack can be referred to."""

    value: Value


class Get(NamedTuple):
    """Operation: push a value that an earlier operation put."""

    value: Value


Operation = bytes | Atom | Put | Get
"""What a stream consists of. Bytes are copied; the others are written as the emitter sees fit."""

_LONGEST_REPEATED = 16

ZERO = b"K\x00"
EMPTY_LIST = b"]"


def _sized(size: int, opcodes: tuple[bytes, bytes, bytes]) -> bytes:
    """The shortest of the three opcodes with lengths of 1, 4 and 8 bytes, and the length."""
    if size < 1 << 8:
        return opcodes[0] + struct.pack("<B", size)
    if size < 1 << 32:
        return opcodes[1] + struct.pack("<I", size)
    return opcodes[2] + struct.pack("<Q", size)


def text_atom(payload: bytes, offset: int = 0) -> Atom:
    """A text whose UTF-8 is ``payload``."""
    return Atom("s", _sized(len(payload), (b"\x8c", b"X", b"\x8d")), payload, offset=offset)


def bytes_atom(payload: bytes | memoryview, offset: int = 0) -> Atom:
    """A bytes object. Large ones are views of the entry, so that they lie in memory once."""
    return Atom("b", _sized(len(payload), (b"C", b"B", b"\x8e")), payload, offset=offset)


def integer_code(number: int) -> bytes:
    """The opcodes for an integer, as CPython's own pickler of protocol 4 chooses them."""
    if 0 <= number < 1 << 8:
        return b"K" + struct.pack("<B", number)
    if 0 <= number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes((number.bit_length() >> 3) + 1, "little", signed=True)
    if len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
        raw = raw[:-1]  # -2**k fits one byte less than the bit length says
    if len(raw) < 1 << 8:
        return b"\x8a" + struct.pack("<B", len(raw)) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw
