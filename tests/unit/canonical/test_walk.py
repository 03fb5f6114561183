# SPDX-License-Identifier: Apache-2.0
"""Tests of ``torchrelay.canonical.walk``: any bytes are walked or refused, and none are executed."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

import canonical_entries as entries
from canonical_entries import VERSION, dumps
from torchrelay.canonical import canonicalise, opcodes, restore
from torchrelay.canonical.emit import emit
from torchrelay.canonical.opcodes import walk_pickle
from torchrelay.errors import FormatError


def again(data: bytes) -> bytes:
    walk = walk_pickle(data)
    return emit(walk.operations, walk.protocol)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = [1], "two"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and (self.a, self.b) == (other.a, other.b)

    __hash__ = object.__hash__


class Numbers(list):  # type: ignore[type-arg]
    pass


class Named(dict):  # type: ignore[type-arg]
    pass


def _values() -> list[object]:
    numbers, named = Numbers([1, 2, 3]), Named(a=1, b=[2])
    numbers.label, named.label = "x", "y"  # type: ignore[attr-defined]
    return [
        None,
        True,
        [False, True, None],
        [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**63, -(2**200), 2**3000],
        [0.0, -1.5, 1e300, float("inf")],
        ["", "x", "ä€😀", "\ud800", "line\nfeed \\ backslash", "x" * 300, "x" * 70000],
        [b"", b"x", bytes(range(256)), b"y" * 70000],
        [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
        {"a": {"b": [{"c": 1}]}, 1: 2, None: ()},
        {i: str(i) for i in range(3000)},
        list(range(3000)),
        [set(), {1}, {"a", "b", (1, 2)}, frozenset(), frozenset({1, "x"})],
        [bytearray(b"mutable"), bytearray()],
        [Slots(), numbers, named],
        [int, dict.fromkeys, pickle.Pickler, Path("/x")],
        complex(1, 2),
        range(5),
    ]


@pytest.mark.parametrize("index", range(len(_values())))
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("python", [False, True])
def test_emitted_stream_unpickles_to_the_same(index: int, protocol: int, python: bool) -> None:
    value = _values()[index]
    if protocol < 2 and isinstance(value, list) and value and isinstance(value[0], Slots):
        value = value[1:]  # slots cannot be pickled so
    data = dumps(value, protocol, python=python)
    emitted = again(data)
    loaded = pickle.loads(emitted)
    assert loaded == pickle.loads(data)
    assert pickle.dumps(loaded, protocol) == pickle.dumps(pickle.loads(data), protocol)
    assert again(emitted) == emitted


def test_sharing_and_cycles_survive() -> None:
    shared: list[object] = [1]
    cycle: list[object] = [shared, shared]
    cycle.append(cycle)
    inner: list[object] = []
    recursive = (inner, "x")
    inner.append(recursive)
    loaded = pickle.loads(again(pickle.dumps([cycle, recursive])))
    assert loaded[0][0] is loaded[0][1]
    assert loaded[0][2] is loaded[0]
    assert loaded[1][0][0] is loaded[1]


@pytest.mark.parametrize(
    "code",
    [
        b"(K\x01K\x02l.",  # LIST
        b"(K\x01K\x02d.",  # DICT
        b"]2\x86.",  # DUP: one list twice
        b"K\x012\x86.",
        b"K\x01K\x020.",  # POP
        b"K\x01(0.",  # POP of a mark
        b"K\x01(K\x02K\x031.",  # POP_MARK
        b"(cbuiltins\nlist\n(K\x01K\x02to.",  # OBJ
        b"((K\x01K\x02tibuiltins\nlist\n.",  # INST
        b"I01\nI7\n\x86.",
        b"F1.5\nL7L\n\x86.",
        b"Va\\u20acb\n.",
        b"]p7\n0g7\n.",
        b"]r\x00\x01\x00\x000j\x00\x01\x00\x00.",
        b"\x8b\x03\x00\x00\x00\x01\x02\x03.",
        b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi.",
        b"\x8e\x02\x00\x00\x00\x00\x00\x00\x00hi.",
    ],
)
def test_rare_opcodes_keep_their_meaning(code: bytes) -> None:
    expected, loaded = pickle.loads(code), pickle.loads(again(code))
    assert loaded == expected
    if code.startswith(b"]2"):
        assert loaded[0] is loaded[1]


MALFORMED = {
    "empty": b"",
    "only a stop": b".",
    "no stop": b"K\x01",
    "bytes after the stop": b"K\x01.x",
    "unknown opcode": b"\xff.",
    "protocol 6": b"\x80\x06N.",
    "protocol stated late": b"N0\x80\x04N.",
    "frame longer than the rest": b"\x80\x04\x95\xff\xff\x00\x00\x00\x00\x00\x00N.",
    "text longer than the rest": b"X\xff\xff\xff\xffabc.",
    "text of 2**64 - 1 bytes": b"\x8d" + b"\xff" * 8 + b".",
    "bytes longer than the rest": b"B\xff\xff\xff\x7fabc.",
    "bytes of 2**64 - 1 bytes": b"\x8e" + b"\xff" * 8 + b".",
    "bytearray longer than the rest": b"\x96" + b"\xff" * 8 + b".",
    "number longer than the rest": b"\x8b\xff\xff\xff\x7f\x01.",
    "number of negative length": b"\x8b\xff\xff\xff\xff\x01.",
    "half a number": b"J\x01\x02",
    "line without end": b"I12",
    "decimal that is none": b"I1_0\n.",
    "decimal of 5,000 digits": b"I" + b"9" * 5000 + b"\n.",
    "long decimal that is none": b"LxL\n.",
    "float that is none": b"Fone\n.",
    "text that is not UTF-8": b"\x8c\x01\xff.",
    "text line that is none": b"V\\u12\n.",
    "tuple of too little": b"K\x01\x86.",
    "tuple across a mark": b"K\x01(K\x02\x86.",
    "append to nothing": b"K\x01a.",
    "append to a number": b"K\x01K\x02a.",
    "append to a tuple": b")K\x02a.",
    "appends without a mark": b"]K\x01e.",
    "set item of a list": b"]K\x01K\x02s.",
    "odd number of items": b"}(K\x01u.",
    "add to a list": b"](K\x01\x90.",
    "attributes of a number": b"K\x01}b.",
    "unknown memo entry": b"h\x07.",
    "unknown memo entry by line": b"g7\n.",
    "memo number that is none": b"]p-1\n.",
    "memo number of 30 digits": b"]p" + b"1" * 30 + b"\n.",
    "memoised nothing": b"\x94.",
    "class name that is a number": b"K\x01K\x02\x93.",
    "class name that is bytes": b"C\x01aC\x01b\x93.",
    "class name of 300 characters": b"c" + b"a" * 300 + b"\nb\n.",
    "class name that is not UTF-8": b"c\xff\nb\n.",
    "object without a class": b"(o.",
    "persistent id": b"P1\n.",
    "persistent object": b"K\x01Q.",
    "buffer from outside": b"\x97.",
    "read-only buffer": b"N\x98.",
    "byte string of Python 2": b"U\x01a.",
    "byte string line": b"S'a'\n.",
    "long byte string": b"T\x01\x00\x00\x00a.",
    "pop of nothing": b"0.",
    "mark left open": b"K\x01(.",
    "json": b'{"a": 1}',
    "zip": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("case", sorted(MALFORMED))
def test_malformed_is_refused(case: str) -> None:
    for kind in ("inductor", "aot_autograd"):
        with pytest.raises(FormatError) as caught:
            canonicalise(kind, MALFORMED[case], torch_version=VERSION)
        assert caught.value.remedy
    with pytest.raises(FormatError):
        restore(MALFORMED[case], canon="pickle-1/torch-2.13", times=())


def test_every_opcode_is_decided() -> None:
    assert {code.code.encode("latin-1") for code in pickletools.opcodes} == set(opcodes._TABLE)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_ever_executed(tmp_path: Path, protocol: int) -> None:
    canary = Canary(tmp_path / "ran")
    for kind, value in (
        ("inductor", canary),
        ("inductor", entries.graph(constants=canary)),
        ("inductor", entries.graph(_time_taken_ns=canary, runnable_graph_str="")),
        ("aot_autograd", entries.bundled(guards_expr=canary)),
    ):
        data = dumps(value, protocol)
        form = canonicalise(kind, data, torch_version=VERSION)
        restore(form.data, canon=form.canon, times=form.times)
    assert not (tmp_path / "ran").exists()
    pickle.loads(dumps(canary, protocol))
    assert (tmp_path / "ran").exists(), "the canary is alive"


# ---------------------------------------------------------------------- hostile, well-formed

COUNT = 20_000


def _repeated(make: bytes, use: bytes, count: int) -> bytes:
    """A tuple of ``count`` uses of what ``make`` makes, which has memo number 0."""
    return b"(" + make + b"\x94" + use * count + b"t."


def _states() -> dict[str, bytes]:
    """Objects that share what they are made of."""
    fx = b"ctorch._inductor.output_code\nCompiledFxGraph\n"
    forward = b"ctorch._functorch._aot_autograd.aot_autograd_result\nCompiledForward\n"
    lines = b"](" + b"\x8c\x01x" * COUNT + b"e"
    pairs = b"}(" + b"".join(b"\x8c\x08" + f"{i:08}".encode() + b"N" for i in range(COUNT)) + b"u"
    info = b"h\x01)\x81}\x8c\x13fx_graph_cache_infoNh\x00\x86sb"
    return {
        "one dict as the state of many": _repeated(pairs + b"\x940" + fx, b"h\x01)\x81h\x00b", COUNT),
        "one dict as the state of one, again and again": _repeated(pairs, b"", 0)[1:-2]
        + (b"0" + fx + b")\x81" + b"h\x00b" * COUNT + b"."),
        "one list as the lines of many": _repeated(lines + b"\x940" + forward, info, COUNT // 2),
    }


def _names() -> bytes:
    """Names of classes, put together from a few long parts in many ways."""
    parts = b"".join(b"\x8c\xff" + bytes([97 + i]) * 255 + b"\x94" for i in range(20))
    uses = (bytes([0x68, i % 20, 0x68, i // 20 % 20, 0x93]) for i in range(COUNT))
    return b"(" + parts + b"".join(uses) + b"t."


def _text(unit: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(unit) * COUNT) + unit * COUNT + b"."


def _hostile() -> dict[str, bytes]:
    size = struct.pack("<i", 1 << 20)
    return {
        **_states(),
        "lists in lists": b"]" * COUNT + b"a" * (COUNT - 1) + b".",
        "tuples in tuples": b")" + b"\x85" * COUNT + b".",
        "marks in marks": b"K\x01" + b"(" * COUNT + b"1" * COUNT + b".",
        "sets in sets": b"\x8f(" * COUNT + b"\x8f" + b"\x90" * COUNT + b".",
        "frozen sets in frozen sets": b"(" * COUNT + b"\x91" * COUNT + b".",
        "set filled item by item": b"\x8f" + b"(K\x01\x90" * COUNT + b".",
        "one large number over and over": _repeated(b"\x8b" + size + b"\x01" * (1 << 20), b"h\x00", COUNT),
        "one large text over and over": _repeated(b"X" + size + b"a" * (1 << 20), b"h\x00", COUNT),
        "long names combined": _names(),
        "hints of secrets": _text(b"token="),
        "starts of URLs": _text(b"://a"),
        "starts of tokens": _text(b"eyJa"),
    }


@pytest.mark.parametrize("case", sorted(_hostile()))
def test_cost_stays_in_proportion(case: str) -> None:
    data = _hostile()[case]
    tracemalloc.start()
    started = time.process_time()
    try:
        form = canonicalise("inductor", data, torch_version=VERSION)
        assert len(form.data) <= len(data)
    finally:
        elapsed = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert elapsed < 20, "a quadratic walk would take minutes"
    assert peak < 200 << 20


def test_masks_of_a_shared_state_are_found_once() -> None:
    fx = b"ctorch._inductor.output_code\nCompiledFxGraph\n"
    pairs = b"}(" + b"\x8c\x12runnable_graph_str\x8c\x01x" * 2000 + b"u"
    code = b"(" + pairs + b"\x940" + fx + b"\x94" + b"h\x01)\x81h\x00b" * 20_000 + b"1" + fx + b")\x81h\x00b."
    form = canonicalise("inductor", code, torch_version=VERSION)
    assert form.canon == "pickle-1/torch-2.13"
    assert b"\x01x" not in form.data


def test_too_many_operations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "MAX_PICKLE_OPERATIONS", 100)
    walk_pickle(b"(" + b"N" * 90 + b"t.")
    with pytest.raises(FormatError, match="more than 100"):
        walk_pickle(b"(" + b"N" * 110 + b"t.")
