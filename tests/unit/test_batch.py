# SPDX-License-Identifier: Apache-2.0
"""Batches, segments, checkpoints and doomed lists: every rule of format.md §6 to §9 and §11."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from format_samples import (
    CHECKPOINT,
    FIRST,
    HEADER,
    PACK,
    READMISSION,
    RECORD,
    REMOVED,
    REQUIRES,
    REQUIRES_DIGEST,
    SIGNATURE,
    WITHDRAWAL,
    changed,
    members,
    segment,
    written,
)
from torchrelay import frame, limits
from torchrelay.batch import (
    BATCH_TYPE,
    CHECKPOINT_TYPE,
    BatchHeader,
    CheckpointHeader,
    Segment,
    Signature,
    encode_checkpoint,
    encode_checkpoint_header,
    encode_doomed,
    encode_header,
    encode_requires,
    encode_segment,
    pae,
    parse_doomed,
    parse_segment,
)
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError, FormatError
from torchrelay.statement import MAX_INTEGER, blob_name

D = digest_of(b"x")
OTHER_RECORD = changed(RECORD, "seq", 4)
THIRD_RECORD = changed(RECORD, "seq", 5)
ALL_DIGESTS = [digest_of(written(record)) for record in (RECORD, OTHER_RECORD, THIRD_RECORD)]
THREE = changed(HEADER, "records", ALL_DIGESTS)


def read(plain: bytes) -> Segment:
    stored = frame.compress(plain)
    return parse_segment(stored, name=digest_of(stored))


def refuse(plain: bytes, match: str = "segment") -> FormatError:
    """The refusal, which must name the segment in message and subject."""
    name = digest_of(frame.compress(plain))
    with pytest.raises(FormatError, match=match) as caught:
        read(plain)
    assert name in caught.value.subject and caught.value.remedy
    return caught.value


def plain_of(header: Any = HEADER, *records: Any, first: Any = None, signature: Any = SIGNATURE) -> bytes:
    records = records or (RECORD,)
    return segment(first or {**FIRST, "batches": [len(records)]}, header, signature, *records)


def header_with(path: str, value: Any) -> bytes:
    return plain_of(changed(HEADER, path, value))


def checkpoint_with(path: str, value: Any) -> bytes:
    return segment(changed(CHECKPOINT, path, value), SIGNATURE, HEADER, SIGNATURE, RECORD)


# --- segments


def test_the_good_one() -> None:
    found = read(plain_of())
    (batch,) = found.batches
    assert found.checkpoint is None and found.checkpoint_signed is None
    assert batch.digest == digest_of(written(HEADER))
    assert batch.signed.body == written(HEADER)
    assert batch.signed.payload_type == BATCH_TYPE
    assert msgspec.to_builtins(batch.signed.signature) == SIGNATURE
    assert [digest for digest, _ in batch.records] == HEADER["records"]
    assert encode_header(batch.header) == written(HEADER)
    assert encode_segment(written(HEADER), batch.signed.signature, [written(RECORD)]) == plain_of()


def test_several_batches_and_empty_ones() -> None:
    empty = changed(HEADER, "records", [])
    found = read(
        segment(
            {**FIRST, "batches": [0, 1, 0]}, empty, SIGNATURE, HEADER, SIGNATURE, RECORD, empty, SIGNATURE
        )
    )
    assert [len(batch.records) for batch in found.batches] == [0, 1, 0]
    assert read(segment({**FIRST, "batches": []})).batches == ()


BAD_LINES = {
    "no-line-feed-at-the-end": plain_of()[:-1],
    "carriage-return": plain_of().replace(b"\n", b"\r\n"),
    "empty": b"",
    "one-line-feed": b"\n",
    "empty-line-first": b"\n" + plain_of(),
    "empty-line-last": plain_of() + b"\n",
    "empty-line-between": plain_of().replace(b"\n", b"\n\n", 1),
    "one-record-more": plain_of() + written(OTHER_RECORD) + b"\n",
    "the-record-twice": plain_of() + written(RECORD) + b"\n",
    "rubbish-after": plain_of() + b"x\n",
    "no-record": segment(FIRST, HEADER, SIGNATURE),
    "no-signature": segment(FIRST, HEADER, RECORD),
    "no-header": segment(FIRST, SIGNATURE, RECORD),
    "header-and-signature-swapped": segment(FIRST, SIGNATURE, HEADER, RECORD),
    "only-the-first-line": segment(FIRST),
    "a-batch-less": plain_of(first={**FIRST, "batches": [1, 1]}),
    "a-batch-more": plain_of(first={**FIRST, "batches": []}),
    "count-too-low": plain_of(THREE, RECORD, OTHER_RECORD, THIRD_RECORD, first={**FIRST, "batches": [2]}),
    "count-negative": plain_of(first={**FIRST, "batches": [-1]}),
    "count-as-text": plain_of(first={**FIRST, "batches": ["1"]}),
    "counts-beyond-the-bound": plain_of(first={**FIRST, "batches": [1, 100_000]}),
    "sum-beyond-64-bit": plain_of(first={**FIRST, "batches": [MAX_INTEGER] * 3}),
    "first-line-of-another-type": plain_of(first={**FIRST, "type": "batch"}),
    "first-line-with-more": plain_of(first={**FIRST, "x": 1}),
    "first-line-with-less": plain_of(first={"format": 1, "type": "segment"}),
    "first-line-not-canonical": plain_of(first=b'{"batches": [1],"format":1,"type":"segment"}'),
    "first-line-too-long": plain_of(first=written({**FIRST, "batches": [1]}) + b" " * limits.MIB),
    "record-not-listed": plain_of(HEADER, OTHER_RECORD),
    "order-of-records": plain_of(THREE, OTHER_RECORD, RECORD, THIRD_RECORD),
    "one-record-missing": plain_of(THREE, RECORD, THIRD_RECORD),
    "record-spelt-otherwise": plain_of(HEADER, written(RECORD).replace(b'"seq":3', b'"seq": 3')),
    "record-changed": plain_of(HEADER, changed(RECORD, "statement.key", "g" + "a" * 51)),
}


@pytest.mark.parametrize("plain", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_lines(plain: bytes) -> None:
    refuse(plain)


def test_the_message_names_the_line() -> None:
    assert "line 4" in refuse(plain_of(HEADER, changed(RECORD, "seq", -1))).message
    assert "line 2" in refuse(header_with("environment", "x")).message


@pytest.mark.parametrize("cut", range(1, 5))
def test_cut_after_any_line(cut: int) -> None:
    lines = plain_of(THREE, RECORD, OTHER_RECORD, THIRD_RECORD).split(b"\n")[:-1]
    refuse(b"\n".join(lines[:cut]) + b"\n")


# --- batch headers

BAD_HEADERS: list[tuple[str, Any]] = [
    ("format", 0),
    ("format", 2),
    ("type", "segment"),
    ("type", "checkpoint"),
    ("environment", "x"),
    ("environment", D.upper()),
    ("workload", ""),
    ("workload", "../x"),
    ("workload", "/abs"),
    ("workload", D),
    ("workload", "acme/other"),  # the record's is another
    ("records", []),
    ("records", ["x"]),
    ("records", [D.upper()]),
    ("records", [HEADER["records"][0], HEADER["records"][0]]),
    ("supersedes", ["x"]),
    ("requires", {}),
    ("requires", {D: REQUIRES}),
    ("requires", {REQUIRES_DIGEST: {}}),
    ("requires", {REQUIRES_DIGEST: {**REQUIRES, "python": "3.12"}}),
    ("requires", {REQUIRES_DIGEST: REQUIRES, D: {"python": "3.12"}}),
    ("requires", {REQUIRES_DIGEST: REQUIRES, "x": {}}),
    *(
        ("requires", {REQUIRES_DIGEST: REQUIRES, digest_of(written(table)): table})
        for table in (
            {"Python": "x"},
            {"é": "x"},
            {"": "x"},
            {"a" * 65: "x"},
            {"../x": "x"},
            {"a": 2**53},
            {"a": -(2**53)},
            {"a": 1.5},
            {"a": True},
            {"a": None},
            {"a": [1]},
            {"a": {}},
        )
    ),
    *(
        (f"{what}.0.{member}", bad)
        for what in ("withdrawn", "readmit")
        for member, bad in (
            ("kind", "A"),
            ("kind", ""),
            ("key", ""),
            ("key", "a b"),
            ("variant", "x"),
            ("requires", "*"),
            ("requires", "x"),
            ("digest", ""),
            ("digest", "**"),
            ("digest", D.upper()),
            ("digest", "x"),
        )
    ),
    ("readmit.0.lifts", "*"),
    ("readmit.0.lifts", ""),
    ("withdrawn", [READMISSION]),
    ("readmit", [WITHDRAWAL]),
]


@pytest.mark.parametrize(("path", "value"), BAD_HEADERS)
def test_headers(path: str, value: Any) -> None:
    refuse(header_with(path, value))


@pytest.mark.parametrize(("path", "value"), BAD_HEADERS)
def test_what_readers_refuse_is_never_signed(path: str, value: Any) -> None:
    try:
        header = msgspec.convert(changed(HEADER, path, value), BatchHeader)
    except msgspec.ValidationError:
        return
    if path == "workload" and value == "acme/other":
        return
    if path == "records" and value == []:
        return
    if path == "requires" and not value:
        return
    with pytest.raises(FormatError):
        encode_header(header)


@pytest.mark.parametrize("path", members(HEADER))
def test_no_member_of_a_header_may_be_missing_or_of_another_type(path: str) -> None:
    for value in (REMOVED, None, 1.5, True):
        refuse(header_with(path, value))


@pytest.mark.parametrize("place", ["", "withdrawn.0.", "readmit.0."])
def test_no_member_of_a_header_may_be_added(place: str) -> None:
    refuse(header_with(f"{place}zzz", 1), "unknown field")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("withdrawn.0.digest", D),
        ("readmit.0.digest", D),
        ("withdrawn", []),
        ("withdrawn", [WITHDRAWAL, WITHDRAWAL]),
        ("supersedes", []),
        ("withdrawn.0.kind", "unknown_kind"),
        (
            "requires",
            {REQUIRES_DIGEST: REQUIRES, digest_of(b'{"unknown_facet":"x"}'): {"unknown_facet": "x"}},
        ),
    ],
)
def test_headers_that_are_read(path: str, value: Any) -> None:
    assert encode_header(read(header_with(path, value)).batches[0].header) == written(
        changed(HEADER, path, value)
    )


def test_a_record_of_another_workload_or_of_facets_that_are_not_there() -> None:
    for record in (
        changed(RECORD, "statement.workload", "acme/other"),
        changed(RECORD, "statement.requires", D),
    ):
        header = changed(HEADER, "records", [digest_of(written(record))])
        assert "does not belong" in refuse(plain_of(header, record)).message


def test_more_records_than_a_batch_may_have() -> None:
    many = [f"{n:064x}" for n in range(limits.MAX_RECORDS + 1)]
    refuse(header_with("records", many), "lists 100001 records")
    header = msgspec.convert(changed(HEADER, "records", many), BatchHeader)
    with pytest.raises(FormatError, match="100001"):
        encode_header(header)


# --- signatures: only the shape; whether they hold is the verifier's business


@pytest.mark.parametrize("path", ["algorithm", "key_id", "signature"])
@pytest.mark.parametrize("value", [REMOVED, None, 1, [], {}])
def test_signatures(path: str, value: Any) -> None:
    refuse(plain_of(signature=changed(SIGNATURE, path, value)))


@pytest.mark.parametrize("bad", ["", "x", D.upper(), D + "\n"])
def test_a_key_id_is_a_digest(bad: str) -> None:
    refuse(plain_of(signature={**SIGNATURE, "key_id": bad}))


def test_a_signature_has_nothing_else() -> None:
    refuse(plain_of(signature={**SIGNATURE, "certificate": ""}), "unknown field")


def test_what_is_signed() -> None:
    assert pae("t", b"body") == b"DSSEv1 1 t 4 body"
    assert pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 "
    assert BATCH_TYPE == "application/vnd.torchrelay.batch.v1"
    assert CHECKPOINT_TYPE == "application/vnd.torchrelay.checkpoint.v1"
    # Neither type nor body can eat into the other.
    assert pae("a", b"b 1 c") != pae("a b", b"1 c") != pae("a", b"b 1 c ")


# --- checkpoints


def test_a_good_checkpoint() -> None:
    plain = segment(CHECKPOINT, SIGNATURE, HEADER, SIGNATURE, RECORD)
    found = read(plain)
    assert found.checkpoint is not None and found.checkpoint_signed is not None
    assert found.checkpoint_signed.body == written(CHECKPOINT) == encode_checkpoint_header(found.checkpoint)
    assert found.checkpoint_signed.payload_type == CHECKPOINT_TYPE
    signature = msgspec.convert(SIGNATURE, Signature)
    assert (
        encode_checkpoint(found.checkpoint, signature, [(written(HEADER), signature, [written(RECORD)])])
        == plain
    )


@pytest.mark.parametrize("kept", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_a_checkpoint_may_leave_records_out(kept: tuple[int, ...]) -> None:
    records = [(RECORD, OTHER_RECORD, THIRD_RECORD)[at] for at in kept]
    first = {**CHECKPOINT, "batches": [len(kept)]}
    (batch,) = read(segment(first, SIGNATURE, THREE, SIGNATURE, *records)).batches
    assert [digest for digest, _ in batch.records] == [ALL_DIGESTS[at] for at in kept]
    assert batch.digest == digest_of(written(THREE))


@pytest.mark.parametrize("order", [(1, 0), (2, 0), (0, 0), (2, 1, 0), (0, 1, 1)])
def test_but_neither_turn_nor_repeat_them(order: tuple[int, ...]) -> None:
    records = [(RECORD, OTHER_RECORD, THIRD_RECORD)[at] for at in order]
    refuse(segment({**CHECKPOINT, "batches": [len(order)]}, SIGNATURE, THREE, SIGNATURE, *records))


def test_nor_add_any() -> None:
    refuse(segment(CHECKPOINT, SIGNATURE, HEADER, SIGNATURE, OTHER_RECORD), "does not list")


def test_a_plain_segment_has_all_records() -> None:
    refuse(segment(FIRST, THREE, SIGNATURE, RECORD), "does not list")


BAD_CHECKPOINTS: list[tuple[str, Any]] = [
    ("format", 2),
    ("workload", "../x"),
    ("workload", D),
    ("environment", "x"),
    ("generation", -1),
    ("generation", 2**53),
    ("generation", 1.0),
    ("supersedes", ["x"]),
    ("supersedes", [D.upper()]),
    ("batches", [-1]),
    ("batches", [100_001]),
    ("packs.0.digest", "x"),
    ("packs.0.size", -1),
    ("packs.0.size", 9),
    ("packs.0.size", 2**53),
    ("packs.0.blobs.0.digest", "x"),
    ("packs.0.blobs.0.offset", -1),
    ("packs.0.blobs.0.size", -4),
    ("packs.0.blobs.0.size", 5),
    ("packs.0.blobs.1.offset", 3),
    ("packs.0.blobs.1.offset", 5),
    ("packs.0.blobs.1.size", 7),
    ("packs.0.blobs.1.size", 2**53),
    ("packs.0.blobs", PACK["blobs"][::-1]),
]


@pytest.mark.parametrize(("path", "value"), BAD_CHECKPOINTS)
def test_checkpoint_headers(path: str, value: Any) -> None:
    refuse(checkpoint_with(path, value))
    try:
        header = msgspec.convert(changed(CHECKPOINT, path, value), CheckpointHeader)
    except msgspec.ValidationError:
        return
    with pytest.raises(FormatError):
        encode_checkpoint_header(header)


@pytest.mark.parametrize("path", members(CHECKPOINT))
def test_no_member_of_a_checkpoint_may_be_missing(path: str) -> None:
    for value in (REMOVED, None, True):
        refuse(checkpoint_with(path, value))


@pytest.mark.parametrize("place", ["", "packs.0.", "packs.0.blobs.0."])
def test_no_member_of_a_checkpoint_may_be_added(place: str) -> None:
    refuse(checkpoint_with(f"{place}zzz", 1), "unknown field")


def test_a_checkpoint_without_its_own_signature() -> None:
    refuse(segment(CHECKPOINT, HEADER, SIGNATURE, RECORD))


def test_packs_may_have_gaps_and_empty_blobs() -> None:
    blobs = [{"digest": D, "offset": 0, "size": 0}, {"digest": D, "offset": 2, "size": 8}]
    found = read(checkpoint_with("packs.0.blobs", blobs)).checkpoint
    assert found is not None and found.packs[0].blobs[1].offset == 2


# --- whole objects


def test_a_segment_under_another_name() -> None:
    stored = frame.compress(plain_of())
    with pytest.raises(DamagedError, match="does not have the digest") as caught:
        parse_segment(stored, name=D)
    assert caught.value.subject == f"segment {D}"


@pytest.mark.parametrize(
    "stored", [b"", plain_of(), frame.compress(plain_of()) * 2, frame.compress(plain_of())[:-1]]
)
def test_a_segment_that_is_not_one_frame(stored: bytes) -> None:
    with pytest.raises(DamagedError, match=digest_of(stored)):
        parse_segment(stored, name=digest_of(stored))


@pytest.mark.parametrize(
    "plain",
    [
        plain_of(first={**FIRST, "format": 2}),
        plain_of(first={"format": 2, "type": "something", "more": [1]}),
        segment({**CHECKPOINT, "format": 2}, SIGNATURE, HEADER, SIGNATURE, RECORD),
        plain_of({**HEADER, "format": 2, "new": 1}),
        plain_of(HEADER, {**RECORD, "format": 2, "new": 1}),
        plain_of(HEADER, changed(RECORD, "statement.format", 2)),
    ],
)
def test_a_newer_format_is_named(plain: bytes) -> None:
    assert "format 2" in refuse(plain).message


def test_a_segment_of_over_64_mib_is_neither_inflated_nor_written() -> None:
    stored = frame.compress(b"\n" * (limits.MAX_SEGMENT_BYTES + 1))
    with pytest.raises(DamagedError, match="67108865"):
        parse_segment(stored, name=digest_of(stored))
    signature = msgspec.convert(SIGNATURE, Signature)
    with pytest.raises(FormatError, match="readers take"):
        encode_segment(b"h" * limits.MAX_SEGMENT_BYTES, signature, [])
    header = msgspec.convert(CHECKPOINT, CheckpointHeader)
    with pytest.raises(FormatError, match="readers take"):
        encode_checkpoint(header, signature, [(b"h" * limits.MAX_SEGMENT_BYTES, signature, [])])


def test_a_header_of_over_16_mib_is_neither_read_nor_signed() -> None:
    names = [f"{n:064x}" for n in range(260_000)]
    refuse(header_with("supersedes", names), "more than the 16777216 allowed")
    refuse(checkpoint_with("supersedes", names), "more than the 16777216 allowed")
    with pytest.raises(FormatError, match="readers take"):
        encode_header(msgspec.convert(changed(HEADER, "supersedes", names), BatchHeader))
    with pytest.raises(FormatError, match="readers take"):
        encode_checkpoint_header(msgspec.convert(changed(CHECKPOINT, "supersedes", names), CheckpointHeader))


MEMORY = """
import resource, sys
from pathlib import Path
from torchrelay.batch import parse_doomed, parse_segment
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError
stored = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_segment(stored, name=digest_of(stored))
except DamagedError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
FIRST_LINES = {
    "empty-lines": b"\n",
    "after-a-good-first-line": segment(FIRST),
    "in-a-checkpoint": segment(CHECKPOINT),
}


@pytest.mark.parametrize("start", FIRST_LINES.values(), ids=FIRST_LINES.keys())
def test_sixty_million_lines_cost_no_more_than_their_bytes(start: bytes, tmp_path: Path) -> None:
    """A few kilobytes in the store; anybody who may write there can put them."""
    path = tmp_path / "object"
    path.write_bytes(frame.compress(start + b"ab\n" * ((limits.MAX_SEGMENT_BYTES - len(start)) // 3)))
    assert path.stat().st_size < 16 * 1024
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150, "MiB"


# --- tables of facets


def test_tables_of_facets() -> None:
    digest, data = encode_requires(REQUIRES)
    assert data == written(REQUIRES) and digest == digest_of(data) == REQUIRES_DIGEST
    assert encode_requires(dict(reversed(REQUIRES.items())))[0] == digest
    with pytest.raises(FormatError):
        encode_requires({"a": 1.5})  # type: ignore[dict-item]


# --- doomed lists

BLOBS = sorted([blob_name(digest_of(b"1")), blob_name(digest_of(b"2"), 3)])
DOOMED = {"format": 1, "names": BLOBS, "type": "doomed"}


def doomed(document: Any) -> frozenset[str]:
    stored = frame.compress(document if isinstance(document, bytes) else written(document))
    return parse_doomed(stored, name=digest_of(stored))


def test_a_good_doomed_list() -> None:
    assert doomed(DOOMED) == frozenset(BLOBS)
    assert encode_doomed([*BLOBS[::-1], BLOBS[0]]) == frame.compress(written(DOOMED))
    assert doomed({**DOOMED, "names": []}) == frozenset()


BAD_DOOMED: dict[str, Any] = {
    "newer": {**DOOMED, "format": 2},
    "other-type": {**DOOMED, "type": "segment"},
    "unknown-member": {**DOOMED, "until": 1},
    "missing-member": {"format": 1, "type": "doomed"},
    "line-feed": written(DOOMED) + b"\n",
    "not-sorted": {**DOOMED, "names": BLOBS[::-1]},
    "twice": {**DOOMED, "names": [BLOBS[0], BLOBS[0]]},
    "a-segment": {**DOOMED, "names": [f"manifests/a/{D}/{D}"]},
    "an-environment": {**DOOMED, "names": [f"environments/{D}"]},
    "a-doomed-list": {**DOOMED, "names": [f"gc/{D}"]},
    "other-shard": {**DOOMED, "names": [f"blobs/00/{D}"]},
    "outside": {**DOOMED, "names": [f"blobs/../{D}"]},
    "copy-zero": {**DOOMED, "names": [f"{blob_name(D)}.0"]},
    "not-text": {**DOOMED, "names": [1]},
    "empty-name": {**DOOMED, "names": [""]},
    "rubbish": b"\xff",
}


@pytest.mark.parametrize("document", BAD_DOOMED.values(), ids=BAD_DOOMED.keys())
def test_doomed_lists(document: Any) -> None:
    with pytest.raises(FormatError, match="doomed list"):
        doomed(document)


def test_nothing_but_blobs_is_doomed() -> None:
    with pytest.raises(FormatError, match="no blob"):
        encode_doomed([f"manifests/a/{D}/{D}"])


def test_a_doomed_list_under_another_name_or_not_one_frame() -> None:
    stored = encode_doomed(BLOBS)
    with pytest.raises(DamagedError, match="digest"):
        parse_doomed(stored, name=D)
    for bad in (b"", stored[:-1], stored + b"x", written(DOOMED)):
        with pytest.raises(DamagedError, match=digest_of(bad)):
            parse_doomed(bad, name=digest_of(bad))
