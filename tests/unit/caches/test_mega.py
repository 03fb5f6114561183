# SPDX-License-Identifier: Apache-2.0
"""Mega-Cache blobs, read and written without PyTorch."""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pickles import AOT, FX_A, FX_B, TORCH, dump, graph, result

import canonical_entries
from torchrelay import limits
from torchrelay.caches.base import Entry, Reason, Skipped
from torchrelay.caches.mega import TYPES, MegaItem, encode_mega, entries_from_mega, mega_item, parse_mega
from torchrelay.errors import DamagedError, FormatError
from torchrelay.testing.entries import verified

HEX = "d" * 64
CHOICE = "ab/" + "0" * 64 + ".best_config"
ITEMS = st.builds(MegaItem, st.sampled_from(TYPES), st.text(max_size=20), st.binary(max_size=50))


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def text(value: str) -> bytes:
    encoded = base64.b64encode(value.encode())
    return u64(len(encoded)) + encoded


def sealed(rest: bytes) -> bytes:
    return zlib.crc32(rest).to_bytes(4, "big") + rest


def blob(*records: tuple[str, list[tuple[str, bytes]]]) -> bytes:
    """As PyTorch 2.8 and later write it."""
    rest = u64(1)
    for type_, members in records:
        rest += text(type_) + u64(len(members))
        for key, content in members:
            rest += text(key) + u64(len(content)) + content
    return sealed(rest)


def old_blob(*items: tuple[int, str, bytes]) -> bytes:
    """As PyTorch 2.7 wrote it."""
    rest = u64(1)
    for number, key, content in items:
        rest += u64(number) + u64(len(key)) + key.encode() + u64(len(content)) + content
    return rest


# ---------------------------------------------------------------------- the format


def test_all_records_are_read() -> None:
    """PyTorch keeps the last record of a type only."""
    data = blob(("inductor", [("a", b"1")]), ("pgo", []), ("inductor", [("b", b"2"), ("a", b"1")]))
    assert parse_mega(data) == [
        MegaItem("inductor", "a", b"1"),
        MegaItem("inductor", "b", b"2"),
        MegaItem("inductor", "a", b"1"),
    ]


def test_the_format_of_pytorch_2_7() -> None:
    data = old_blob((0, "f", b"graph"), (2, "a", b"result"), (1, "x/y", b"{}"), (3, "job:None:", b"N."))
    assert [item.type for item in parse_mega(data)] == ["inductor", "aot_autograd", "autotune", "pgo"]
    assert parse_mega(data)[1] == MegaItem("aot_autograd", "a", b"result")


def test_one_record_a_type_is_written() -> None:
    items = [MegaItem("inductor", "a", b"1"), MegaItem("pgo", "b", b""), MegaItem("inductor", "c", b"3")]
    assert encode_mega(items) == blob(("inductor", [("a", b"1"), ("c", b"3")]), ("pgo", [("b", b"")]))
    assert encode_mega([]) == blob()


@given(st.lists(ITEMS, max_size=12))
def test_what_is_written_is_read(items: list[MegaItem]) -> None:
    back = parse_mega(encode_mega(items))
    assert {type_: [i for i in back if i.type == type_] for type_ in TYPES} == {
        type_: [i for i in items if i.type == type_] for type_ in TYPES
    }


@given(st.lists(ITEMS, min_size=1, max_size=3), st.data())
def test_any_bit_of_a_blob_matters(items: list[MegaItem], data: st.DataObject) -> None:
    good = encode_mega(items)
    place = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[place // 8] ^= 1 << place % 8
    with pytest.raises(FormatError):
        parse_mega(bytes(bad))


@given(st.binary(max_size=60))
def test_rubbish_raises_nothing_but_our_error(rest: bytes) -> None:
    for data in (rest, sealed(u64(1) + rest), u64(1) + rest):
        with contextlib.suppress(FormatError):
            assert all(len(item.content) <= len(data) for item in parse_mega(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 4,
        blob()[:-1],
        sealed(u64(2)),
        sealed(u64(1) + text("inductor")),
        sealed(u64(1) + text("inductor") + u64(2**63)),
        sealed(u64(1) + text("inductor") + u64(1) + text("a") + u64(2**63) + b"x"),
        sealed(u64(1) + text("inductor") + u64(1) + text("a") + u64(5) + b"1234"),
        sealed(u64(1) + u64(3) + b"!!!"),
        sealed(u64(1) + u64(4) + base64.b64encode(b"\xff")),
        sealed(u64(1) + text("i" * 20_000) + u64(0)),
        blob(("inductor", [("a", b"1")]))[:-1],
        blob(("inductor", [("a", b"1")])) + b"x",
        old_blob((9, "a", b"x")),
        old_blob((0, "a", b"x"))[:-1],
        u64(1) + u64(0) + u64(2) + b"\xff\xff" + u64(0),
    ],
)
def test_damaged_blobs(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_mega(data)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    data = blob(("pgo", [("a", b"")] * 4))
    monkeypatch.setattr(limits, "MAX_RECORDS", 3)
    with pytest.raises(FormatError, match="more than 3 items"):
        parse_mega(data)
    monkeypatch.setattr("torchrelay.caches.mega.MAX_BLOB_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match="more than the"):
        parse_mega(data)


def test_a_type_that_would_spoil_the_whole_blob_is_not_written() -> None:
    with pytest.raises(FormatError):
        encode_mega([MegaItem("gemm", "a", b"")])


# ---------------------------------------------------------------------- to entries and back

CONTENT = json.dumps({"configs_hash": "c", "time_taken_ms": 9}).encode()
WHOLE = [
    MegaItem("aot_autograd", AOT, result((FX_A, "s0 < 3"))),
    MegaItem("inductor", FX_A, graph("s0 < 3", libs="libdevice")),
    MegaItem("inductor", FX_A, graph("s0 >= 3", libs="libdevice")),
    MegaItem("autotune", CHOICE, CONTENT),
    MegaItem("pgo", "job:None:", dump({"a": 1})),
    MegaItem("precompile", HEX, dump({"b": 1})),
]


def made(items: list[MegaItem]) -> tuple[list[Entry], list[Skipped]]:
    found = entries_from_mega(items, torch_version=TORCH)
    return [i for i in found if isinstance(i, Entry)], [i for i in found if isinstance(i, Skipped)]


def given_by(entry: Entry, **changes: Any) -> Any:
    names = ("kind", "key", "variant", "needs", "files", "canon", "times")
    return verified(entry.plain, **{**{name: getattr(entry, name) for name in names}, **changes})


def test_every_type_becomes_an_entry() -> None:
    entries, skipped = made(WHOLE)
    assert skipped == []
    assert [entry.kind for entry in entries] == [item.type for item in WHOLE]
    (need,) = entries[0].needs
    assert (need.key, need.variant) == (FX_A, entries[1].variant)
    assert entries[4].key == "job_None_"


def test_entries_become_items_again() -> None:
    """What differs is what was masked; the rest is the same, times included."""
    entries, _ = made(WHOLE)
    items = [mega_item(given_by(entry)) for entry in entries]
    assert all(items)
    again, skipped = made([item for item in items if item])
    assert skipped == []
    assert [(e.key, e.plain, e.times, e.needs) for e in again] == [
        (e.key, e.plain, e.times, e.needs) for e in entries
    ]


def test_a_kind_that_mega_cache_does_not_hold() -> None:
    assert mega_item(verified(b"x", kind="cpp", key="c" * 52)) is None


def test_signed_bytes_that_are_no_item() -> None:
    entries, _ = made(WHOLE)
    for entry, change in ((entries[1], {"times": ()}), (entries[3], {"times": (1, 2)})):
        with pytest.raises(DamagedError):
            mega_item(given_by(entry, **change))


def test_of_equal_items_the_first_or_the_latest_counts() -> None:
    entries, _ = made(
        [
            MegaItem("inductor", FX_A, graph(time=1)),
            MegaItem("inductor", FX_A, graph(time=2)),
            MegaItem("pgo", "job:None:", dump({"a": 1})),
            MegaItem("pgo", "job:None:", dump({"a": 2})),
        ]
    )
    assert [entry.times for entry in entries] == [(1,), ()]
    assert entries[1].plain == dump({"a": 2})


def test_what_is_left_out_is_told() -> None:
    items = [
        MegaItem("inductor_triton", HEX, b"N."),
        MegaItem("inductor", "../../x", graph()),
        MegaItem("autotune", "../../" + CHOICE, CONTENT),
        MegaItem("precompile", "/etc/cron.d/x", b"N."),
        MegaItem("pgo", "mast:job:1:None:", dump({})),
        MegaItem("inductor", FX_A, graph()[:-1]),
        MegaItem("aot_autograd", AOT, result((FX_B, "True"))),
        MegaItem("inductor", FX_B, graph(source="redis://u:hunter2hunter2@h/0")),
    ]
    entries, skipped = made(items)
    assert entries == []
    assert [item.reason for item in skipped] == [
        Reason.BAD_NAME,
        Reason.BAD_NAME,
        Reason.BAD_NAME,
        Reason.BAD_NAME,
        Reason.UNSTABLE_KEY,
        Reason.UNPARSEABLE,
        Reason.INCOMPLETE,
        Reason.SECRET,
    ]
    assert "hunter2" not in str(skipped)


def test_a_package_in_a_blob_is_masked_as_one_in_a_directory() -> None:
    item = MegaItem("precompile", HEX, canonical_entries.dumps(canonical_entries.package()))
    (entry,), skipped = made([item])
    assert skipped == []
    assert entry.canon == "pickle-1/torch-2.13"
    assert b"os.environ[" in item.content and b"os.environ[" not in entry.plain
    (left_out,) = entries_from_mega([item], torch_version=None)
    assert isinstance(left_out, Skipped) and left_out.reason is Reason.SECRET


def test_a_blob_of_pytorch_2_7_has_its_old_file_name() -> None:
    graph_ = MegaItem("inductor", FX_A, graph("s0 < 3", runnable_graph_str="# none"))
    found = entries_from_mega([WHOLE[0], graph_], torch_version="2.7.1")
    assert [file.name for file in found[0].files] == ["entry"]  # type: ignore[union-attr]
