# SPDX-License-Identifier: Apache-2.0
"""The walk over a pickle's opcodes: stack, marks and memo are tracked, nothing is ever built.

It knows what each operation makes and where in the stream it is made. A pickle is a stack program,
so the operations that make one value are one run of operations; that is what allows the emitter to
replace a value by replacing a run. No function here calls itself, and no opcode makes the walk
import, call or allocate more than the bytes it is given.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from torchrelay.canonical.nodes import (
    Atom,
    Get,
    Kind,
    Node,
    Operation,
    Put,
    Span,
    Value,
    bytes_atom,
    text_atom,
)
from torchrelay.errors import FormatError
from torchrelay.limits import MAX_NAME_CHARS, MAX_PICKLE_OPERATIONS

# What is stated decides how names are looked up: below 3 those of Python 2 are translated, from 4 on
# dotted ones are followed. Opcodes of later protocols are understood whatever is stated.
_LOWEST_PROTOCOL = 2
_USUAL_PROTOCOL = 4
_HIGHEST_PROTOCOL = 5
_LARGE = 1 << 16
_DECIMAL = re.compile(rb"-?[0-9]{1,4000}")  # int() itself refuses more than 4,300 digits
_RECONSTRUCTORS = frozenset(
    {"copyreg._reconstructor", "copy_reg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"}
)


def _malformed(what: str) -> FormatError:
    return FormatError(
        f"the entry is not a well-formed pickle: {what}",
        remedy="The entry is left out; PyTorch makes it again when it is next compiled.",
    )


class Walk:
    """One pass over a pickle.

    After :meth:`run`, ``operations`` is the stream without frames, ``root`` what it leaves on the
    stack, ``objects`` every object that was given attributes, ``sets`` every set, ``buffers`` the
    contents of bytearrays, and ``protocol`` the one that the canonical form states.

    Args:
        data: The pickle.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.operations: list[Operation] = []
        self.objects: list[Value] = []
        self.sets: list[Value] = []
        self.buffers: list[bytes] = []
        self.protocol = _LOWEST_PROTOCOL
        self.root: Node | None = None
        self._stack: list[tuple[Node, int]] = []
        self._marks: list[tuple[list[tuple[Node, int]], int]] = []
        self._memo: dict[int, Node] = {}
        self._names: dict[tuple[bytes, bytes], str] = {}

    def run(self) -> Walk:
        """Walk to the end.

        Raises:
            FormatError: The bytes are not one whole pickle, need objects from outside the pickle,
                or have more operations than are looked at.
        """
        data, handlers, operations = self.data, _HANDLERS, self.operations
        try:
            while self.root is None:
                opcode = data[self.offset]
                self.offset += 1
                handlers[opcode](self)
                if len(operations) > MAX_PICKLE_OPERATIONS:
                    raise _malformed(f"it has more than {MAX_PICKLE_OPERATIONS} operations")
        except IndexError:  # of the data, of the stack, of the marks
            raise _malformed("it ends early or takes more from its stack than there is") from None
        if self.offset != len(data):
            raise _malformed("bytes follow its end")
        return self

    # ------------------------------------------------------------------ reading

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self.offset + size
        if end > len(self.data):
            raise _malformed("it ends early")
        chunk = self.data[self.offset : end]
        self.offset = end
        return chunk

    def view(self, size: int) -> memoryview:
        """The same, as a view of the entry."""
        end = self.offset + size
        if end > len(self.data):
            raise _malformed("it ends early")
        chunk = memoryview(self.data)[self.offset : end]
        self.offset = end
        return chunk

    def number(self, layout: str) -> int:
        """The next number, in a layout of :mod:`struct`."""
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def line(self) -> bytes:
        """The bytes up to the next line feed, which is consumed."""
        end = self.data.find(b"\n", self.offset)
        if end < 0:
            raise _malformed("it ends early")
        chunk = self.data[self.offset : end]
        self.offset = end + 1
        return chunk

    def text(self, raw: bytes) -> str:
        """``raw`` as text, as the unpickler would decode it."""
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _malformed("a text is not UTF-8") from None

    # ------------------------------------------------------------------ the stack

    def push(self, node: Node, operation: Operation) -> None:
        """Push ``node``, which ``operation`` alone makes."""
        self._stack.append((node, len(self.operations)))
        self.operations.append(operation)

    def replace(self, node: Node, start: int, operation: bytes) -> None:
        """Push ``node``, which everything from ``start`` on makes, ``operation`` last."""
        self.operations.append(operation)
        self._stack.append((node, start))

    def pop(self) -> tuple[Node, int]:
        """Take the top of the stack."""
        return self._stack.pop()

    def top(self) -> Node:
        """The top of the stack."""
        return self._stack[-1][0]

    def mark(self) -> None:
        """Open a new run of elements."""
        self._marks.append((self._stack, len(self.operations)))
        self._stack = []
        self.operations.append(b"(")

    def close(self) -> tuple[list[Span], int]:
        """The elements since the last mark, and where the mark stood."""
        elements = self._stack
        self._stack, start = self._marks.pop()
        return self._spans(elements), start

    def last(self, count: int) -> list[Span]:
        """Take ``count`` elements, all above the last mark."""
        if count > len(self._stack):
            raise _malformed("it takes more from its stack than there is")
        elements = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return self._spans(elements)

    def _spans(self, elements: list[tuple[Node, int]]) -> list[Span]:
        if not elements:
            return []
        ends = [start for _, start in elements[1:]]
        ends.append(len(self.operations))
        return [Span(node, start, end) for (node, start), end in zip(elements, ends, strict=True)]

    def discard(self) -> None:
        """``POP``: take a value, or the mark if there is none above it."""
        if self._stack:
            self._stack.pop()
        else:
            self._stack, _ = self._marks.pop()
        self.operations.append(b"0")

    def duplicate(self) -> None:
        """``DUP``, told as a reference, so that a value that gets replaced is not one of two."""
        node = self.top()
        if isinstance(node, Atom):
            self.push(node, node)
        else:
            self.operations.append(Put(node))
            self.push(node, Get(node))

    def remember(self, index: int) -> None:
        """Give the top of the stack a number in the memo."""
        node = self.top()
        self._memo[index] = node
        if isinstance(node, Value):
            self.operations.append(Put(node))

    def remember_next(self) -> None:
        """``MEMOIZE``: the next free number."""
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        """Push what has this number in the memo."""
        node = self._memo.get(index)
        if node is None:
            raise _malformed("it refers to something it did not make")
        self.push(node, node if isinstance(node, Atom) else Get(node))

    # ------------------------------------------------------------------ making and filling

    def make(self, kind: Kind, opcode: bytes, elements: list[Span], start: int) -> Value:
        """Push a container made of the elements taken."""
        value = Value(kind, start=start)
        value.items = elements
        self.replace(value, start, opcode)
        value.end = len(self.operations)
        return value

    def empty(self, kind: Kind, opcode: bytes) -> Value:
        """Push an empty container."""
        value = Value(kind, start=len(self.operations))
        self.push(value, opcode)
        value.end = len(self.operations)
        return value

    def construct(self, opcode: bytes, parts: list[Span], start: int) -> None:
        """Push the result of a call: ``parts`` are what is called, and its arguments."""
        name = parts[0].node.name if isinstance(parts[0].node, Value) else ""
        if name in _RECONSTRUCTORS and len(parts) > 1:
            arguments = parts[1].node
            first = arguments.items[0].node if isinstance(arguments, Value) and arguments.items else None
            name = first.name if isinstance(first, Value) else name
        value = Value(Kind.OBJECT, name, start)
        value.items = parts[1:]
        self.replace(value, start, opcode)

    def extend(self, elements: list[Span], opcode: bytes) -> None:
        """Give the container on top of the stack more elements."""
        target = self.top()
        if not isinstance(target, Value) or target.kind in {Kind.TUPLE, Kind.DICT, Kind.SET, Kind.GLOBAL}:
            raise _malformed("it appends to something that is not a list")
        target.items.extend(elements)
        self.operations.append(opcode)
        target.end = len(self.operations)

    def add(self, elements: list[Span], opcode: bytes) -> None:
        """Give the set on top of the stack more elements."""
        target = self.top()
        if not isinstance(target, Value) or target.kind not in {Kind.SET, Kind.OBJECT, Kind.OTHER}:
            raise _malformed("it adds to something that is not a set")
        target.items.extend(elements)
        self.operations.append(opcode)
        target.end = len(self.operations)

    def fill(self, target: Node, elements: list[Span], opcode: bytes) -> None:
        """Give a mapping more entries: keys and values in turn."""
        if not isinstance(target, Value) or target.kind not in {Kind.DICT, Kind.OBJECT, Kind.OTHER}:
            raise _malformed("it sets items of something that is not a mapping")
        if len(elements) % 2:
            raise _malformed("a key has no value")
        # Items of an object are not its attributes: they are kept with what made it.
        if target.kind is Kind.DICT:
            target.pairs.extend((elements[i].node, elements[i + 1]) for i in range(0, len(elements), 2))
        else:
            target.items.extend(elements)
        self.operations.append(opcode)
        target.end = len(self.operations)

    def build(self) -> None:
        """``BUILD``: the state on top becomes attributes of the object below it."""
        state = self.last(1)[0]
        target = self.top()
        if not isinstance(target, Value):
            raise _malformed("it gives attributes to something that has none")
        parts = [state.node]
        if isinstance(state.node, Value) and state.node.kind is Kind.TUPLE:
            parts = [item.node for item in state.node.items[:2]]  # (__dict__, slots)
        for part in parts:
            if isinstance(part, Value) and part.kind is Kind.DICT:
                target.states[part] = None
        target.items.append(state)
        self.operations.append(b"b")
        self.objects.append(target)

    def name(self, module: bytes, qualname: bytes) -> Value:
        """A global."""
        names = (module, qualname)
        if names not in self._names:
            if max(len(module), len(qualname)) > MAX_NAME_CHARS:
                raise _malformed("the name of a class is too long")
            self._names[names] = f"{self.text(module)}.{self.text(qualname)}"
        return Value(Kind.GLOBAL, self._names[names], len(self.operations))


# ---------------------------------------------------------------------- opcodes

_Handler = Callable[[Walk], None]


def _refuse(what: str) -> _Handler:
    def handler(walk: Walk) -> None:
        raise _malformed(what)

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
            raise _malformed("a length is negative")
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
            raise _malformed("a number is not one")
        _push_atom(walk, Atom("i", code, number=int(digits), offset=start))

    return handler


def _float_line(walk: Walk) -> None:
    start = walk.offset - 1
    try:
        float(walk.line())
    except ValueError:
        raise _malformed("a number is not one") from None
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
        raise _malformed("a text is not one") from None
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
        raise _malformed("its protocol is not known or not stated first")
    walk.protocol = max(_LOWEST_PROTOCOL, min(protocol, _USUAL_PROTOCOL))


def _frame(walk: Walk) -> None:
    if walk.number("<Q") > len(walk.data) - walk.offset:
        raise _malformed("it ends early")


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
        raise _malformed("the name of a class is not text")
    if module.node.tag != "s" or name.node.tag != "s":
        raise _malformed("the name of a class is not text")
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
        raise _malformed("an object has no class")
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
        raise _malformed("a memo number is not one")
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
