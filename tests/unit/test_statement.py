# SPDX-License-Identifier: Apache-2.0
"""Statements and records: every rule of format.md §1, §4 and §5, by changing one member of a good one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from format_samples import RECORD, REMOVED, changed, members, written
from torchrelay import limits
from torchrelay.digest import digest_of
from torchrelay.errors import FormatError, UsageError
from torchrelay.statement import (
    MAX_INTEGER,
    File,
    Need,
    Record,
    blob_name,
    check_file_name,
    check_workload,
    encode_record,
    is_blob_name,
    parse_record,
    statement_bytes,
)

D = digest_of(b"x")
BYTES = written(RECORD)


def parsed(path: str, value: Any) -> Record:
    return parse_record(written(changed(RECORD, path, value)), name="the record")


def files(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "size": 5 if at == 0 else 0} for at, name in enumerate(names)]


def need(kind: str = "cpp", key: str = "k", variant: str = "") -> dict[str, str]:
    return {"key": key, "kind": kind, "variant": variant}


def test_the_good_one_survives() -> None:
    record = parse_record(BYTES, name="x")
    assert encode_record(record) == BYTES
    assert written(json.loads(statement_bytes(record.statement))) in BYTES
    assert record.statement.identity == (
        "inductor",
        RECORD["statement"]["key"],
        RECORD["statement"]["variant"],
        RECORD["statement"]["requires"],
    )


FINE: list[tuple[str, Any]] = [
    ("statement.canon", "raw"),
    ("statement.canon", "0" + "a" * 63),
    ("statement.key", "!"),
    ("statement.key", "~" * 512),
    ("statement.key", "../x"),  # strict patterns are each kind's own; no path is made of it here
    ("statement.kind", "a"),
    ("statement.kind", "unknown_kind_2"),
    ("statement.kind", "a" * 32),
    ("statement.variant", ""),
    ("statement.needs", []),
    ("statement.needs", [need(key=f"{n:03}") for n in range(256)]),
    ("statement.needs", [need(variant=""), need(variant=D)]),
    ("statement.files", []),
    ("statement.files", files("a")),
    ("statement.files", files("a" * 255)),
    ("statement.files", files("é" * 127)),
    ("statement.files", files("/".join("abcdefgh"))),
    ("statement.files", files(*(f"{n}" for n in range(10_000)))),
    ("statement.files", files("a b", ".hidden", "...", "-rf", "a..b", "~", "a/b", "a.b", "ab")),
    ("statement.workload", "a"),
    ("stored.copy", 1),
    ("stored.size", 0),
    ("seq", 0),
    ("seq", MAX_INTEGER),
    ("times", []),
    ("times", [MAX_INTEGER, -MAX_INTEGER]),
    ("times", [1] * 4096),
    ("provenance", {}),
    ("provenance", {f"{n}": "x" * 1024 for n in range(32)}),
    ("provenance", {"text": "é\n𝄞"}),
]

BAD: list[tuple[str, Any]] = [
    ("format", 0),
    ("format", 2),
    ("format", -1),
    ("format", True),
    ("format", "1"),
    ("statement.format", 2),
    ("statement.format", 0),
    ("statement.canon", ""),
    ("statement.canon", "Raw"),
    ("statement.canon", "a" * 65),
    ("statement.canon", "/raw"),
    ("statement.canon", "raw\n"),
    ("statement.canon", "ra w"),
    *(("statement.digest", bad) for bad in ("", "*", D[:-1], D.upper(), D + "\n", f"sha256:{D}")),
    *(("statement.requires", bad) for bad in ("", D[:-1], D.upper())),
    *(("producer", bad) for bad in ("", D[:-1], D.upper())),
    *(("stored.digest", bad) for bad in ("", D[:-1], D.upper(), "../" + D[3:])),
    *(("statement.variant", bad) for bad in (D[:-1], D.upper(), "x", " ", D + D)),
    *(("statement.kind", bad) for bad in ("", "A", "1a", "_a", "a-b", "a/b", "..", "a" * 33, "ä", "a\n")),
    *(("statement.key", bad) for bad in ("", " ", "a b", "a\tb", "a\n", "a\0", "\x7f", "ä", "x" * 513, "𝄞")),
    *(("statement.needs.0.kind", bad) for bad in ("", "A", "a/b")),
    *(("statement.needs.0.key", bad) for bad in ("", "a b", "x" * 513, "a\n")),
    *(("statement.needs.0.variant", bad) for bad in ("x", D.upper())),
    ("statement.needs", [need(key="b"), need(key="a")]),
    ("statement.needs", [need(kind="d"), need(kind="c")]),
    ("statement.needs", [need(variant=D), need(variant="")]),
    ("statement.needs", [need(), need()]),
    ("statement.needs", [need(key=f"{n:03}") for n in range(257)]),
    ("statement.size", -1),
    ("statement.size", 6),
    ("statement.size", 4),
    ("statement.files.0.size", -1),
    ("statement.files.0.size", 4),
    ("statement.files", [{"name": "a", "size": 6}, {"name": "b", "size": -1}]),
    ("statement.files", [{"name": "a", "size": MAX_INTEGER + 1}, {"name": "b", "size": 4 - MAX_INTEGER}]),
    ("statement.files", files("a", "a")),
    ("statement.files", files("a", "a/b")),
    ("statement.files", files("a/b/c", "a/b")),
    ("statement.files", files(*(f"{n}" for n in range(10_001)))),
    ("stored.codec", ""),
    ("stored.codec", "gzip"),
    ("stored.codec", "ZSTD"),
    *((path, bad) for path in ("stored.size", "stored.copy", "seq") for bad in (-1, 2**53, 2**64, 1.0, "1")),
    ("times", [2**53]),
    ("times", [-(2**53)]),
    ("times", [0.5]),
    ("times", [1] * 4097),
    ("provenance", {f"{n}": "" for n in range(33)}),
    ("provenance", {"a": "x" * 1025}),
    ("provenance", {"a" * 1025: ""}),
    ("provenance", {"é": "x"}),
    ("provenance", {"a": 1}),
    ("provenance", {"a": None}),
    ("provenance", {"a": "\ud800"}),
]


@pytest.mark.parametrize(("path", "value"), FINE)
def test_what_is_read(path: str, value: Any) -> None:
    record = parsed(path, value)
    assert encode_record(record) == written(changed(RECORD, path, value))


@pytest.mark.parametrize(("path", "value"), BAD)
def test_what_is_refused_names_its_object(path: str, value: Any) -> None:
    with pytest.raises(FormatError) as caught:
        parsed(path, value)
    assert caught.value.remedy
    assert "the record" in caught.value.message and caught.value.subject == "the record"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(("path", "value"), BAD)
def test_what_readers_refuse_is_never_signed(path: str, value: Any) -> None:
    try:
        record = msgspec.convert(changed(RECORD, path, value), Record)
    except msgspec.ValidationError:
        return
    with pytest.raises(FormatError):
        encode_record(record)


@pytest.mark.parametrize("path", members(RECORD))
def test_no_member_may_be_missing_or_of_another_type(path: str) -> None:
    for value in (REMOVED, None, [[]], {"a": {}}):
        with pytest.raises(FormatError):
            parsed(path, value)


@pytest.mark.parametrize("place", ["", "statement.", "stored.", "statement.files.0.", "statement.needs.0."])
def test_no_member_may_be_added(place: str) -> None:
    with pytest.raises(FormatError, match="unknown field"):
        parsed(f"{place}zzz", 1)


@pytest.mark.parametrize("number", [0, 2, 9, 10**6])
@pytest.mark.parametrize("extra", [{}, {"new": []}])
def test_another_format_is_named_even_with_unknown_members(number: int, extra: dict[str, Any]) -> None:
    with pytest.raises(
        FormatError, match=f"the record is of format {number}; this torchrelay reads format 1"
    ):
        parse_record(written({**RECORD, **extra, "format": number}), name="the record")


def test_an_entry_of_over_2_gib() -> None:
    most = changed(changed(RECORD, "statement.files", []), "statement.size", limits.MAX_ENTRY_BYTES)
    assert parse_record(written(most), name="x").statement.size == 2**31
    with pytest.raises(FormatError, match="2147483649"):
        parse_record(written(changed(most, "statement.size", 2**31 + 1)), name="x")


def test_a_record_line_that_readers_would_not_take_is_not_signed() -> None:
    """Ten thousand files with long names: all rules hold but that of the line's length."""
    many = tuple(File(name=f"{n:0250}", size=0) for n in range(5_000))
    record = parse_record(BYTES, name="x")
    statement = msgspec.structs.replace(record.statement, files=many, size=0)
    with pytest.raises(FormatError, match="more than readers take"):
        encode_record(msgspec.structs.replace(record, statement=statement))
    with pytest.raises(FormatError, match="more than the 1048576 allowed"):
        parse_record(written(RECORD) + b" " * limits.MIB, name="x")


def test_two_spellings_of_one_statement_do_not_exist() -> None:
    shuffled = json.dumps(dict(reversed(RECORD.items())), separators=(",", ":")).encode()
    for other in (BYTES.replace(b":", b": "), shuffled, BYTES + b"\n", b" " + BYTES):
        with pytest.raises(FormatError):
            parse_record(other, name="x")


GOOD_NAMES = ["a", "a/b", ".a", "...", "a.", "a b", "é", "a:b", "*", "a" * 255, "/".join("abcdefgh")]
BAD_NAMES = [
    "",
    ".",
    "..",
    "/abs",
    "../x",
    "a/../b",
    "a/..",
    "a/.",
    "./a",
    "a//b",
    "a/",
    "/",
    "a\0b",
    "\0",
    "a\nb",
    "a\r",
    "a\tb",
    "\x1b[31m",
    "\x7f",
    "a\\b",
    "..\\x",
    "C:\\x",
    "\u202egpj.exe",
    "a\u200bb",
    "a\u2028b",
    "\ufeffa",
    "a\u00a0b",
    "\ud800",
    "\udcff",
    "a" * 256,
    "a" * 300,
    "é" * 128,
    "a/" + "b" * 256,
    "/".join("abcdefghi"),
]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_file_names(name: str) -> None:
    assert check_file_name(name) == name
    assert parsed("statement.files", files(name)).statement.files[0].name == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_file_gets(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_file_name(name)
    assert len(caught.value.message) < 500
    with pytest.raises(FormatError):
        parsed("statement.files", files(name))


GOOD_WORKLOADS = [
    "a",
    "A0._-",
    "0",
    "acme/llama-8b/prod",
    "a/b/c/d/e",
    "a" * 200,
    "a..b",
    "1.2.3",
    D[:-1],
    D + "0",
]
BAD_WORKLOADS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/..",
    "../a",
    ".a",
    "a/.b",
    "-a",
    "_a",
    "a b",
    "a\n",
    "a\0",
    "ä",
    "a\\b",
    "a*",
    "a?b",
    "a:b",
    "a" * 201,
    D,
    f"a/{D}",
    f"{D}/a",
    "\ud800",
]


@pytest.mark.parametrize("name", GOOD_WORKLOADS)
def test_workloads(name: str) -> None:
    assert check_workload(name) == name
    assert parsed("statement.workload", name).statement.workload == name


@pytest.mark.parametrize("name", BAD_WORKLOADS)
def test_names_that_no_workload_has(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_workload(name)
    assert caught.value.subject == name[:80]
    with pytest.raises(FormatError):
        parsed("statement.workload", name)


def test_blob_names() -> None:
    assert blob_name(D) == f"blobs/{D[:2]}/{D}"
    assert blob_name(D, 3) == f"blobs/{D[:2]}/{D}.3"
    for copy in (0, 1, 9, 10, MAX_INTEGER):
        assert is_blob_name(blob_name(D, copy))


@pytest.mark.parametrize(
    "name",
    [
        "",
        D,
        f"blobs/{D}",
        f"blobs/00/{D}",
        f"blobs/{D[:2]}/{D}.0",
        f"blobs/{D[:2]}/{D}.01",
        f"blobs/{D[:2]}/{D}.",
        f"blobs/{D[:2]}/{D}.x",
        f"blobs/{D[:2]}/{D}.1\n",
        f"blobs/{D[:2]}/{D}.-1",
        f"/blobs/{D[:2]}/{D}",
        f"blobs/{D[:2]}/{D}/x",
        f"packs/{D}",
        f"manifests/a/{D}/{D}",
    ],
)
def test_what_is_no_blob_name(name: str) -> None:
    assert not is_blob_name(name)


def test_needs_are_values() -> None:
    assert Need(kind="cpp", key="k", variant="") == Need(kind="cpp", key="k", variant="")
    with pytest.raises(AttributeError):
        Need(kind="cpp", key="k", variant="").kind = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[" * 1_000_000, b'{"statement":' * 100_000, b"\xff\xfe"]
)
def test_rubbish(data: bytes) -> None:
    with pytest.raises(FormatError, match="the record"):
        parse_record(data, name="the record")
