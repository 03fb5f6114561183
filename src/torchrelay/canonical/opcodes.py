# SPDX-License-Identifier: Apache-2.0
"""What each opcode of a pickle does to a walk, and the walk itself.

No opcode makes the walk import, call or allocate more than the bytes it is given.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from torchrelay.canonical.nodes import (
    Atom,
    Kind,
    Span,
    Value,
    bytes_atom,
    text_atom,
)
from torchrelay.canonical.walk import LOWEST_PROTOCOL, Walk, malformed
from torchrelay.limits import MAX_PICKLE_OPERATIONS

_USUAL_PROTOCOL = 4
_HIGHEST_PROTOCOL = 5
_LARGE = 1 << 16
_DECIMAL = re.compile(rb"-?[0-9]{1,4000}")  # int() itself refuses more than 4,300 digits

_Handler = Callable[[Walk], None]


def _refuse(what: str) -> _Handler:
    def handler(walk: Walk) -> None:
        raise malformed(what)

    return handler


def _constant(opcode: bytes, tag: str) -> _Handler:
    return lambda walk: _push_atom(walk, Atom(tag, opcode))


def _push_atom(walk: Walk, atom: Atom) -> None:
    walk.push(atom, atom)


def _integer(layout: str) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        number = walk.number(layout)
        _push_atom(walk, Atom("i", walk.data[start : walk.offset], number=number, offset=start))

    return handler


def _long(layout: str) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        size = walk.number(layout)
        if size < 0:
            raise malformed("a length is negative")
        number = int.from_bytes(walk.take(size), "little", signed=True)
        _push_atom(walk, Atom("i", walk.data[start : walk.offset], number=number, offset=start))

    return handler


def _decimal(suffix: bytes) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        line = walk.line()
        code = walk.data[start : walk.offset]
        if not suffix and line in {b"00", b"01"}:
            _push_atom(walk, Atom("o", code))
            return
        digits = line.removesuffix(suffix)
        if _DECIMAL.fullmatch(digits) is None:
            raise malformed("a number is not one")
        _push_atom(walk, Atom("i", code, number=int(digits), offset=start))

    return handler


def _float_line(walk: Walk) -> None:
    start = walk.offset - 1
    try:
        float(walk.line())
    except ValueError:
        raise malformed("a number is not one") from None
    _push_atom(walk, Atom("o", walk.data[start : walk.offset]))


def _float(walk: Walk) -> None:
    _push_atom(walk, Atom("o", b"G" + walk.take(8)))


def _text(layout: str) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        payload = walk.take(walk.number(layout))
        walk.text(payload)
        _push_atom(walk, text_atom(payload, start))

    return handler


def _text_line(walk: Walk) -> None:
    try:
        payload = walk.line().decode("raw-unicode-escape").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise malformed("a text is not one") from None
    _push_atom(walk, text_atom(payload))


def _bytes(layout: str) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        size = walk.number(layout)
        _push_atom(walk, bytes_atom(walk.take(size) if size < _LARGE else walk.view(size), start))

    return handler


def _bytearray(walk: Walk) -> None:
    payload = walk.take(walk.number("<Q"))
    walk.protocol = _HIGHEST_PROTOCOL
    walk.buffers.append(payload)
    walk.push(Value(Kind.OTHER, "builtins.bytearray"), b"\x96" + struct.pack("<Q", len(payload)) + payload)


def _protocol(walk: Walk) -> None:
    protocol = walk.number("<B")
    if protocol > _HIGHEST_PROTOCOL or walk.offset != 2:
        raise malformed("its protocol is not known or not stated first")
    walk.protocol = max(LOWEST_PROTOCOL, min(protocol, _USUAL_PROTOCOL))


def _frame(walk: Walk) -> None:
    if walk.number("<Q") > len(walk.data) - walk.offset:
        raise malformed("it ends early")


def _stop(walk: Walk) -> None:
    walk.root = walk.pop()[0]


def _tuple_of(count: int, opcode: bytes) -> _Handler:
    def handler(walk: Walk) -> None:
        elements = walk.last(count)
        walk.make(Kind.TUPLE, opcode, elements, elements[0].start)

    return handler


def _closing(kind: Kind, opcode: bytes) -> _Handler:
    def handler(walk: Walk) -> None:
        elements, start = walk.close()
        value = walk.make(kind, opcode, elements, start)
        if kind is Kind.SET:
            walk.sets.append(value)

    return handler


def _dict(walk: Walk) -> None:
    elements, start = walk.close()
    value = Value(Kind.DICT, start=start)
    walk.fill(value, elements, b"d")
    walk.operations.pop()
    walk.replace(value, start, b"d")


def _empty(kind: Kind, opcode: bytes) -> _Handler:
    def handler(walk: Walk) -> None:
        walk.empty(kind, opcode)

    return handler


def _empty_set(walk: Walk) -> None:
    walk.sets.append(walk.empty(Kind.SET, b"\x8f"))


def _append(walk: Walk) -> None:
    walk.extend(walk.last(1), b"a")


def _appends(walk: Walk) -> None:
    walk.extend(walk.close()[0], b"e")


def _add_items(walk: Walk) -> None:
    walk.add(walk.close()[0], b"\x90")


def _set_item(walk: Walk) -> None:
    elements = walk.last(2)
    walk.fill(walk.top(), elements, b"s")


def _set_items(walk: Walk) -> None:
    elements, _ = walk.close()
    walk.fill(walk.top(), elements, b"u")


def _pop_mark(walk: Walk) -> None:
    walk.close()
    walk.operations.append(b"1")


def _global(walk: Walk) -> None:
    start = walk.offset - 1
    value = walk.name(walk.line(), walk.line())
    walk.push(value, walk.data[start : walk.offset])


def _stack_global(walk: Walk) -> None:
    module, name = walk.last(2)
    if not (isinstance(module.node, Atom) and isinstance(name.node, Atom)):
        raise malformed("the name of a class is not text")
    if module.node.tag != "s" or name.node.tag != "s":
        raise malformed("the name of a class is not text")
    names = bytes(module.node.payload), bytes(name.node.payload)
    walk.replace(walk.name(*names), module.start, b"\x93")


def _extension(size: int) -> _Handler:
    def handler(walk: Walk) -> None:
        start = walk.offset - 1
        walk.take(size)
        walk.push(Value(Kind.OTHER), walk.data[start : walk.offset])

    return handler


def _call(count: int, opcode: bytes) -> _Handler:
    def handler(walk: Walk) -> None:
        parts = walk.last(count)
        walk.construct(opcode, parts, parts[0].start)

    return handler


def _obj(walk: Walk) -> None:
    parts, start = walk.close()
    if not parts:
        raise malformed("an object has no class")
    walk.construct(b"o", parts, start)


def _inst(walk: Walk) -> None:
    begin = walk.offset - 1
    class_ = walk.name(walk.line(), walk.line())
    parts, start = walk.close()
    walk.construct(walk.data[begin : walk.offset], [Span(class_, start, start), *parts], start)


def _recall(layout: str) -> _Handler:
    return lambda walk: walk.recall(walk.number(layout))


def _remember(layout: str) -> _Handler:
    return lambda walk: walk.remember(walk.number(layout))


def _memo_line(walk: Walk) -> int:
    line = walk.line()
    if not line.isdigit() or len(line) > 18:
        raise malformed("a memo number is not one")
    return int(line)


_OUTSIDE = "it refers to objects outside itself"
_OLD_TEXT = "it holds a byte string of Python 2"

_TABLE: dict[bytes, _Handler] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b".": _stop,
    b"(": Walk.mark,
    b"0": Walk.discard,
    b"1": _pop_mark,
    b"2": Walk.duplicate,
    b"N": _constant(b"N", "n"),
    b"\x88": _constant(b"\x88", "o"),
    b"\x89": _constant(b"\x89", "o"),
    b"I": _decimal(b""),
    b"L": _decimal(b"L"),
    b"K": _integer("<B"),
    b"M": _integer("<H"),
    b"J": _integer("<i"),
    b"\x8a": _long("<B"),
    b"\x8b": _long("<i"),
    b"F": _float_line,
    b"G": _float,
    b"V": _text_line,
    b"\x8c": _text("<B"),
    b"X": _text("<I"),
    b"\x8d": _text("<Q"),
    b"C": _bytes("<B"),
    b"B": _bytes("<I"),
    b"\x8e": _bytes("<Q"),
    b"\x96": _bytearray,
    b")": _empty(Kind.TUPLE, b")"),
    b"t": _closing(Kind.TUPLE, b"t"),
    b"\x85": _tuple_of(1, b"\x85"),
    b"\x86": _tuple_of(2, b"\x86"),
    b"\x87": _tuple_of(3, b"\x87"),
    b"]": _empty(Kind.LIST, b"]"),
    b"l": _closing(Kind.LIST, b"l"),
    b"a": _append,
    b"e": _appends,
    b"}": _empty(Kind.DICT, b"}"),
    b"d": _dict,
    b"s": _set_item,
    b"u": _set_items,
    b"\x8f": _empty_set,
    b"\x91": _closing(Kind.SET, b"\x91"),
    b"\x90": _add_items,
    b"c": _global,
    b"\x93": _stack_global,
    b"\x82": _extension(1),
    b"\x83": _extension(2),
    b"\x84": _extension(4),
    b"R": _call(2, b"R"),
    b"\x81": _call(2, b"\x81"),
    b"\x92": _call(3, b"\x92"),
    b"o": _obj,
    b"i": _inst,
    b"b": Walk.build,
    b"\x94": Walk.remember_next,
    b"q": _remember("<B"),
    b"r": _remember("<I"),
    b"p": lambda walk: walk.remember(_memo_line(walk)),
    b"h": _recall("<B"),
    b"j": _recall("<I"),
    b"g": lambda walk: walk.recall(_memo_line(walk)),
    b"P": _refuse(_OUTSIDE),
    b"Q": _refuse(_OUTSIDE),
    b"\x97": _refuse(_OUTSIDE),
    b"\x98": _refuse(_OUTSIDE),
    b"S": _refuse(_OLD_TEXT),
    b"T": _refuse(_OLD_TEXT),
    b"U": _refuse(_OLD_TEXT),
}
_HANDLERS: list[_Handler] = [
    _TABLE.get(bytes([code]), _refuse("an opcode is not known")) for code in range(256)
]


def walk_pickle(data: bytes) -> Walk:
    """Walk over ``data`` to its end.

    Raises:
        FormatError: The bytes are not one whole pickle, need objects from outside the pickle,
            or have more operations than are looked at.
    """
    walk = Walk(data)
    try:
        while walk.root is None:
            opcode = data[walk.offset]
            walk.offset += 1
            _HANDLERS[opcode](walk)
            if len(walk.operations) > MAX_PICKLE_OPERATIONS:
                raise malformed(f"it has more than {MAX_PICKLE_OPERATIONS} operations")
    except IndexError:  # of the data, of the stack, of the marks
        raise malformed("it ends early or takes more from its stack than there is") from None
    if walk.offset != len(data):
        raise malformed("bytes follow its end")
    return walk
