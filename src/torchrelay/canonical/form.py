# SPDX-License-Identifier: Apache-2.0
"""The canonical form of an entry, and back (``docs/reference/canonical-form.md``).

Laws, for all bytes ``d`` that :func:`canonicalise` accepts, with ``c = canonicalise(k, d, ...)``:

* ``canonicalise(k, c.data, ...).data == c.data``
* with ``r = restore(c.data, canon=c.canon, times=c.times)``: canonicalising ``r`` gives ``c.data``
  and ``c.times`` again
* ``r`` unpickles to what ``d`` unpickles to, but for the listed fields that are no times
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrelay.canonical.emit import Mask, emit, masked_stream, sort_sets
from torchrelay.canonical.facts import Facts, read_facts
from torchrelay.canonical.fields import RAW, Child, Field, Layout, Rule, canon_of, layout_of, parse_canon
from torchrelay.canonical.nodes import (
    EMPTY_LIST,
    ZERO,
    Atom,
    Get,
    Kind,
    Node,
    Operation,
    Put,
    Span,
    Value,
    integer_code,
    text_atom,
)
from torchrelay.canonical.opcodes import walk_pickle
from torchrelay.canonical.secrets import ENVIRONMENT_DUMP, first_secret, kinds_in
from torchrelay.canonical.walk import Walk
from torchrelay.errors import FormatError, SecretError
from torchrelay.limits import MAX_ENTRY_BYTES, MAX_TIMES

_ENVIRONMENT_LINE = re.compile(rb"(?m)^os\.environ\['")
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LIST_OPCODES = frozenset({EMPTY_LIST, b"(", b"a", b"e", b"l"})
_MAX_PATH_PARTS = 16


@dataclass(frozen=True, slots=True)
class Canonical:
    """An entry in canonical form.

    Args:
        data: Its bytes.
        canon: The name of the form: ``pickle-1/torch-<version>``, or ``raw`` for bytes as found.
        times: The integers that were masked, in the order in which their fields stand in ``data``.
        masked: How often what was masked, by kind, field and what it was; never a value.
        facts: What the entry says of itself.
    """

    data: bytes
    canon: str
    times: tuple[int, ...]
    masked: Mapping[str, int]
    facts: Facts


class _LayoutError(Exception):
    """The entry is not laid out as its version's list says. Never leaves this module."""


def canonicalise(kind: str, data: bytes, *, torch_version: str | None, search: bool = True) -> Canonical:
    """The canonical form of an entry as PyTorch wrote it.

    Args:
        kind: ``inductor``, ``aot_autograd`` or ``precompile``; others are taken as they are, ``raw``.
        data: The bytes; nothing in them is executed or imported.
        torch_version: The PyTorch that wrote it, as it calls itself; an unknown one gives ``raw``.
        search: Look for secrets, and report what was masked. Only a caller that holds the result against
            the digest of what was searched before may leave it out; it takes a third of the time.

    Raises:
        FormatError: It is not one whole pickle.
        SecretError: A text that stays in it looks like a secret, or sets environment variables.
    """
    walk = _walked(data)
    facts = read_facts(kind, walk.root)
    layout = layout_of(torch_version)
    masks = _masks_if_known(walk, layout, kind)
    if layout is None or masks is None:
        if search:
            _refuse_secrets(walk, walk.operations, [])
        return Canonical(data, RAW, (), {}, facts)
    stream = masked_stream(walk, masks)
    if search:
        _refuse_secrets(walk, stream, masks)
    times = tuple(mask.time.number for mask in masks if mask.time is not None)
    masked = _report(kind, walk, masks) if search else {}
    return Canonical(emit(stream, walk.protocol), canon_of(layout), times, masked, facts)


def restore(data: bytes, *, canon: str, times: Sequence[int]) -> bytes:
    """The bytes to install: ``data`` with ``times`` put back.

    Args:
        data: Canonical bytes.
        canon: The form they are in.
        times: The masked integers.

    Raises:
        FormatError: The form is not known, the bytes are not in it, or the number of times is wrong.
    """
    return _restored(data, canon, times)[0]


def restore_and_read(
    kind: str, data: bytes, *, canon: str, times: Sequence[int]
) -> tuple[bytes, Facts | None]:
    """As :func:`restore`, with what the entry says of itself; None for bytes that are no pickle, in raw form.

    Raises:
        FormatError: As :func:`restore`.
    """
    restored, walk = _restored(data, canon, times)
    if walk is None:
        try:
            walk = _walked(data)
        except FormatError:
            return restored, None
    return restored, read_facts(kind, walk.root)


def _restored(data: bytes, canon: str, times: Sequence[int]) -> tuple[bytes, Walk | None]:
    if canon == RAW:
        if times:
            raise FormatError("an entry in raw form has no times to put back")
        return data, None
    layout = parse_canon(canon)
    if layout is None:
        raise FormatError(f"the canonical form {canon[:80]!r} is not known", subject=canon[:80])
    walk = _walked(data)
    places = _time_places(walk, data, layout)
    if len(places) != len(times) or len(times) > MAX_TIMES:
        raise FormatError(f"the entry has {len(places)} masked times, and {len(times)} are to be put back")
    return _spliced(data, places, [integer_code(time) for time in times]), walk


def _walked(data: bytes) -> Walk:
    if len(data) > MAX_ENTRY_BYTES:
        raise FormatError(f"the entry is {len(data)} bytes, more than the {MAX_ENTRY_BYTES} allowed")
    walk = walk_pickle(data)
    sort_sets(walk)
    return walk


def _time_places(walk: Walk, data: bytes, layout: Layout) -> list[int]:
    """Where in canonical bytes the masked times stand."""
    kind = next((k for k, roots in layout.roots.items() if _class_of(walk.root) in roots), "")
    masks = _masks_if_known(walk, layout, kind)
    if masks is None:
        raise FormatError(f"the entry is not laid out as {canon_of(layout)} says")
    if emit(masked_stream(walk, masks), walk.protocol) != data:
        raise FormatError(f"the entry is not in the canonical form {canon_of(layout)}")
    return [mask.time.offset for mask in masks if mask.time is not None]


def _spliced(data: bytes, places: list[int], codes: list[bytes]) -> bytes:
    parts, position = [], 0
    for place, code in zip(places, codes, strict=True):
        parts.append(data[position:place])
        parts.append(code)
        position = place + len(ZERO)
    parts.append(data[position:])
    return b"".join(parts)


# ---------------------------------------------------------------------- what is masked


def _class_of(node: Node | None) -> str:
    return node.name if isinstance(node, Value) and node.kind is Kind.OBJECT else ""


def _masks_if_known(walk: Walk, layout: Layout | None, kind: str) -> list[Mask] | None:
    """The masks of all listed fields, or ``None`` if the layout is not the listed one."""
    try:
        return None if layout is None else _masks(walk, layout, kind)
    except _LayoutError:
        return None


def _masks(walk: Walk, layout: Layout, kind: str) -> list[Mask]:
    """The masks of all listed fields, disjoint and in order.

    Raises:
        _LayoutError: Something listed is missing, elsewhere, or of another type.
    """
    if _class_of(walk.root) not in layout.roots.get(kind, ()) or walk.root not in walk.objects:
        raise _LayoutError
    fields: dict[str, list[Field]] = {}
    children: dict[str, list[Child]] = {}
    for field in layout.fields:
        fields.setdefault(field.class_, []).append(field)
    for child in layout.children:
        children.setdefault(child.class_, []).append(child)
    states: dict[tuple[str, Value], None] = {}
    for value in dict.fromkeys(walk.objects):
        name = _class_of(value)
        for child in children.get(name, ()):
            _check_child(value, child)
        for field in fields.get(name, ()):
            if field.required and value.attribute(field.attribute) is None:
                raise _LayoutError
        states.update(((name, state), None) for state in value.states if name in fields)
    return _ordered_masks(walk, ((state, field) for name, state in states for field in fields[name]))


def _ordered_masks(walk: Walk, listed: Iterable[tuple[Value, Field]]) -> list[Mask]:
    """The masks of fields of dicts that objects took their attributes from."""
    masks: dict[int, Mask] = {}
    for state, field in listed:
        # A repeated key is masked every time: what is overwritten when read would still be sent.
        for span in state.entries(field.attribute):
            place = _place(span, field)
            mask = None if place.start in masks else _mask(walk, place, field)
            if mask is not None:
                masks[mask.start] = mask
    if sum(mask.time is not None for mask in masks.values()) > MAX_TIMES:
        raise _LayoutError
    return [masks[start] for start in sorted(masks)]


def _check_child(value: Value, child: Child) -> None:
    span = value.attribute(child.attribute)
    if span is None:
        raise _LayoutError
    if isinstance(span.node, Atom) and span.node.tag == "n" and child.optional:
        return
    if _class_of(span.node) not in child.classes:
        raise _LayoutError


def _place(span: Span, field: Field) -> Span:
    """What of a listed field's value is masked: the second part of a pair, or all of it."""
    if field.rule is not Rule.KEY_AND_DEBUG:
        return span
    if not (isinstance(span.node, Value) and span.node.kind is Kind.TUPLE and len(span.node.items) == 2):
        raise _LayoutError
    return span.node.items[1]


def _mask(walk: Walk, span: Span, field: Field) -> Mask | None:
    """The mask of one value, or ``None`` if it is ``None`` and stays so."""
    node = span.node
    if isinstance(node, Value):
        return _list_mask(walk, span, node, field)
    if span.end - span.start != 1:
        raise _LayoutError
    if node.tag == "n":
        return None
    if field.rule is Rule.TIME and node.tag == "i" and -(1 << 63) <= node.number < 1 << 63:
        return Mask(span.start, span.end, ZERO, field.attribute, time=node)
    if field.rule is Rule.REPRO and node.tag == "s":
        return Mask(span.start, span.end, text_atom(b""), field.attribute)
    raise _LayoutError


def _list_mask(walk: Walk, span: Span, node: Value, field: Field) -> Mask:
    """The mask of a list of texts, which is made there or referred to."""
    if (
        field.rule not in {Rule.DEBUG, Rule.KEY_AND_DEBUG}
        or node.kind is not Kind.LIST
        or not node.texts_only()
    ):
        raise _LayoutError
    if span.end - span.start == 1 and isinstance(walk.operations[span.start], Get):
        return Mask(span.start, span.end, EMPTY_LIST, field.attribute)
    made_there = node.start == span.start and node.end <= span.end
    if not made_there or not all(_belongs(walk.operations[i], node) for i in range(span.start, span.end)):
        raise _LayoutError
    return Mask(span.start, span.end, EMPTY_LIST, field.attribute, hidden=node)


def _belongs(item: Operation, node: Value) -> bool:
    """Whether an operation can be part of making a list of texts."""
    if isinstance(item, Atom):
        return item.tag == "s"
    if isinstance(item, Put):
        return item.value is node
    return isinstance(item, bytes) and item in _LIST_OPCODES


# ---------------------------------------------------------------------- what is reported


def _report(kind: str, walk: Walk, masks: list[Mask]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    texts: dict[str, dict[int, Atom]] = {}
    for mask in masks:
        name = f"{kind}.{mask.attribute}"
        found = [item for item in walk.operations[mask.start : mask.end] if isinstance(item, Atom)]
        if mask.time is not None:
            counts[f"{name}:time"] += mask.time.number != 0
        elif mask.item == EMPTY_LIST:
            counts[f"{name}:debug-lines"] += len(found)
        else:
            counts[f"{name}:repro"] += len(found[0].payload) > 0
        texts.setdefault(name, {}).update((id(atom), atom) for atom in found)
    for name, atoms in texts.items():
        joined = b"\n".join(atom.payload for atom in atoms.values())
        counts[f"{name}:environment"] += len(_ENVIRONMENT_LINE.findall(joined))
        # The lines of a dump are what was just counted.
        counts.update(f"{name}:{secret}" for secret in kinds_in(joined) if secret != ENVIRONMENT_DUMP)
    return {name: count for name, count in sorted(counts.items()) if count}


def _refuse_secrets(walk: Walk, stream: Sequence[Operation], masks: Sequence[Mask]) -> None:
    """Raise if a text or bytes object in the stream looks like a secret.

    Raises:
        SecretError: It does.
    """
    atoms = list({item.key: item for item in stream if isinstance(item, Atom) and item.payload}.values())
    hit = first_secret([*(atom.payload for atom in atoms), *walk.buffers])
    if hit is None:
        return
    index, secret = hit
    masked = frozenset(mask.start for mask in masks)
    field = _path_to(walk.root, atoms[index], masked) if index < len(atoms) else "?"
    raise SecretError(field=field, secret_kind=secret)


def _path_to(root: Node | None, wanted: Atom, masked: frozenset[int]) -> str:
    """Where a text stands, as attribute names from the entry's class on. Keys of dicts are not told.

    Args:
        root: Where paths start.
        wanted: The text.
        masked: Where the values start that do not count, because they are masked.
    """
    names: dict[int, tuple[int, str]] = {}
    pending: deque[Value] = deque()
    if isinstance(root, Value):
        names[id(root)] = (0, root.name.rpartition(".")[2] if _safe(root.name.encode()) else "?")
        pending.append(root)
    while pending:
        value = pending.popleft()
        for label, node in _parts(value, masked, is_state=names[id(value)][1] == ""):
            if isinstance(node, Atom):
                if node.key == wanted.key:
                    return _joined(names, id(value)) + label
            elif id(node) not in names:
                names[id(node)] = (id(value), label)
                pending.append(node)
    return "?"


def _joined(names: dict[int, tuple[int, str]], place: int) -> str:
    labels: list[str] = []
    while place and len(labels) < _MAX_PATH_PARTS:
        place, label = names[place]
        labels.append(label)
    return ("..." if place else "") + "".join(reversed(labels))


def _parts(value: Value, masked: frozenset[int], *, is_state: bool) -> Iterator[tuple[str, Node]]:
    """What a value consists of, attributes first, each with what it is called in a path."""
    for state in value.states:
        yield "", state
    for key, span in value.pairs:
        named = is_state and isinstance(key, Atom) and _safe(bytes(key.payload))
        if span.start not in masked:
            yield (f".{str(key.payload, 'ascii')}" if named and isinstance(key, Atom) else "[]"), span.node
        yield "[key]", key
    for item in value.items:
        if item.start not in masked:
            yield "[]", item.node


def _safe(name: bytes) -> bool:
    """Whether a name may be printed: names, nothing that could be a secret itself."""
    return all(_NAME.fullmatch(part) for part in name.split(b".")) and first_secret([name]) is None
