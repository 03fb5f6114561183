# SPDX-License-Identifier: Apache-2.0
"""The state of a walk over a pickle: stack, marks and memo are tracked, nothing is ever built.

It knows what each operation makes and where in the stream it is made. A pickle is a stack program,
so the operations that make one value are one run of operations; that is what allows the emitter to
replace a value by replacing a run. No function here calls itself, and no opcode makes the walk
import, call or allocate more than the bytes it is given.
"""

from __future__ import annotations

import struct

from torchrelay.canonical.nodes import (
    Atom,
    Get,
    Kind,
    Node,
    Operation,
    Put,
    Span,
    Value,
)
from torchrelay.errors import FormatError
from torchrelay.limits import MAX_NAME_CHARS

# What is stated decides how names are looked up: below 3 those of Python 2 are translated, from 4 on
# dotted ones are followed. Opcodes of later protocols are understood whatever is stated.
LOWEST_PROTOCOL = 2
_RECONSTRUCTORS = frozenset(
    {"copyreg._reconstructor", "copy_reg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"}
)


def malformed(what: str) -> FormatError:
    """The error for bytes that are no pickle that can be walked."""
    return FormatError(
        f"the entry is not a well-formed pickle: {what}",
        remedy="The entry is left out; PyTorch makes it again when it is next compiled.",
    )


class Walk:
    """One pass over a pickle.

    After :func:`torchrelay.canonical.opcodes.walk_pickle`, ``operations`` is the stream without
    frames, ``root`` what it leaves on the stack, ``objects`` every object that was given attributes,
    ``sets`` every set, ``buffers`` the contents of bytearrays, and ``protocol`` the one that the
    canonical form states.

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
        self.protocol = LOWEST_PROTOCOL
        self.root: Node | None = None
        self._stack: list[tuple[Node, int]] = []
        self._marks: list[tuple[list[tuple[Node, int]], int]] = []
        self._memo: dict[int, Node] = {}
        self._names: dict[tuple[bytes, bytes], str] = {}

    # ------------------------------------------------------------------ reading

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self.offset + size
        if end > len(self.data):
            raise malformed("it ends early")
        chunk = self.data[self.offset : end]
        self.offset = end
        return chunk

    def view(self, size: int) -> memoryview:
        """The same, as a view of the entry."""
        end = self.offset + size
        if end > len(self.data):
            raise malformed("it ends early")
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
            raise malformed("it ends early")
        chunk = self.data[self.offset : end]
        self.offset = end + 1
        return chunk

    def text(self, raw: bytes) -> str:
        """``raw`` as text, as the unpickler would decode it."""
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise malformed("a text is not UTF-8") from None

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
            raise malformed("it takes more from its stack than there is")
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
            raise malformed("it refers to something it did not make")
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
            raise malformed("it appends to something that is not a list")
        target.items.extend(elements)
        self.operations.append(opcode)
        target.end = len(self.operations)

    def add(self, elements: list[Span], opcode: bytes) -> None:
        """Give the set on top of the stack more elements."""
        target = self.top()
        if not isinstance(target, Value) or target.kind not in {Kind.SET, Kind.OBJECT, Kind.OTHER}:
            raise malformed("it adds to something that is not a set")
        target.items.extend(elements)
        self.operations.append(opcode)
        target.end = len(self.operations)

    def fill(self, target: Node, elements: list[Span], opcode: bytes) -> None:
        """Give a mapping more entries: keys and values in turn."""
        if not isinstance(target, Value) or target.kind not in {Kind.DICT, Kind.OBJECT, Kind.OTHER}:
            raise malformed("it sets items of something that is not a mapping")
        if len(elements) % 2:
            raise malformed("a key has no value")
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
            raise malformed("it gives attributes to something that has none")
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
                raise malformed("the name of a class is too long")
            self._names[names] = f"{self.text(module)}.{self.text(qualname)}"
        return Value(Kind.GLOBAL, self._names[names], len(self.operations))


# ---------------------------------------------------------------------- opcodes
