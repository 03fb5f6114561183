# SPDX-License-Identifier: Apache-2.0
"""Laws of the format: what is written is read again, and the union cares for nothing but its batches."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from format_samples import written
from torchrelay import frame
from torchrelay.batch import (
    ANY,
    BatchHeader,
    CheckpointHeader,
    Pack,
    PackedBlob,
    Readmission,
    Signature,
    Withdrawal,
    encode_checkpoint,
    encode_doomed,
    encode_header,
    encode_requires,
    encode_segment,
    parse_doomed,
    parse_segment,
)
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import UsageError
from torchrelay.manifest import LATEST_KINDS, Accepted, Union, union
from torchrelay.statement import (
    MAX_INTEGER,
    File,
    Need,
    Record,
    Statement,
    Stored,
    blob_name,
    check_workload,
    encode_record,
    is_blob_name,
    parse_record,
    statement_bytes,
)
from torchrelay.store.layout import SegmentName, parse_segment_name
from union_samples import accepted, key_id, readmission, record, withdrawal

# --- generated objects

digests = st.binary(min_size=1, max_size=4).map(digest_of)
counts = st.integers(0, MAX_INTEGER)
kinds = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)
keys = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=60)
variants = st.just("") | digests
parts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
workloads = st.lists(parts, min_size=1, max_size=4).map("/".join)
printable = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=20
)
file_names = st.lists(printable.filter(lambda p: p not in {".", ".."}), min_size=1, max_size=8).map("/".join)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ascii_texts = st.text(st.characters(max_codepoint=127), max_size=10)
facet_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.integers(
    -MAX_INTEGER, MAX_INTEGER
)
facets = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True),
    facet_values | st.lists(texts, max_size=3).map(tuple),
    max_size=4,
)
needs = (
    st.lists(st.builds(Need, kind=kinds, key=keys, variant=variants), max_size=4)
    .map(lambda ns: {(n.kind, n.key, n.variant): n for n in ns})
    .map(lambda ns: tuple(ns[name] for name in sorted(ns)))
)


def without_folders(names: list[str]) -> list[str]:
    """Those of ``names`` that are no other one's folder."""
    return [n for n in names if not any(other.startswith(f"{n}/") for other in names)]


@st.composite
def statements(draw: st.DrawFn, workload: str = "acme/demo", requires: Any = None) -> Statement:
    names = without_folders(draw(st.lists(file_names, max_size=4, unique=True)))
    sizes = draw(st.lists(st.integers(0, 2**28), min_size=len(names), max_size=len(names)))
    return Statement(
        format=1,
        canon=draw(st.sampled_from(["raw", "pickle-1/torch-2.13", "0"])),
        workload=workload,
        kind=draw(kinds),
        key=draw(keys),
        variant=draw(variants),
        requires=draw(digests) if requires is None else requires,
        needs=draw(needs),
        digest=draw(digests),
        size=sum(sizes) if names else draw(st.integers(0, 2**31)),
        files=tuple(File(name=name, size=size) for name, size in zip(names, sizes, strict=True)),
    )


@st.composite
def records(draw: st.DrawFn, workload: str = "acme/demo", requires: Any = None) -> Record:
    return Record(
        format=1,
        statement=draw(statements(workload, requires)),
        stored=Stored(digest=draw(digests), size=draw(counts), codec="zstd", copy=draw(counts)),
        times=tuple(draw(st.lists(st.integers(-MAX_INTEGER, MAX_INTEGER), max_size=5))),
        seq=draw(counts),
        producer=draw(digests),
        provenance=draw(st.dictionaries(ascii_texts, texts, max_size=3)),
    )


decided: dict[str, Any] = {
    "kind": kinds,
    "key": keys,
    "variant": variants,
    "requires": digests,
    "digest": st.just(ANY) | digests,
}
signatures = st.builds(Signature, algorithm=ascii_texts, key_id=digests, signature=ascii_texts)


@st.composite
def batches(draw: st.DrawFn, workload: str) -> tuple[BatchHeader, Signature, list[Record]]:
    table = draw(facets)
    digest, _ = encode_requires(table)
    made = draw(st.lists(records(workload, digest), max_size=3, unique_by=encode_record))
    header = BatchHeader(
        format=1,
        type="batch",
        workload=workload,
        environment=draw(digests),
        records=tuple(digest_of(encode_record(one)) for one in made),
        requires={digest: table},
        withdrawn=tuple(draw(st.lists(st.builds(Withdrawal, **decided), max_size=2))),
        readmit=tuple(draw(st.lists(st.builds(Readmission, **decided, lifts=digests), max_size=2))),
        supersedes=tuple(draw(st.lists(digests, max_size=2))),
    )
    return header, draw(signatures), made


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    at, blobs = 0, []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=4)):
        blobs.append(PackedBlob(digest=draw(digests), offset=at + gap, size=size))
        at += gap + size
    return Pack(digest=draw(digests), size=at + draw(st.integers(0, 9)), blobs=tuple(blobs))


# --- parse(encode(x)) == x, and the bytes are those of an independent encoder


@given(records())
def test_records(made: Record) -> None:
    data = encode_record(made)
    assert parse_record(data, name="x") == made
    assert encode_record(parse_record(data, name="x")) == data == written(msgspec.to_builtins(made))
    assert b'"statement":' + statement_bytes(made.statement) + b"," in data
    assert b"\n" not in data


@given(batches("acme/demo"))
def test_segments(made: tuple[BatchHeader, Signature, list[Record]]) -> None:
    header, signature, lines = made
    body = encode_header(header)
    assert body == written(msgspec.to_builtins(header))
    stored = frame.compress(encode_segment(body, signature, [encode_record(one) for one in lines]))
    found = parse_segment(stored, name=digest_of(stored))
    (batch,) = found.batches
    assert (batch.header, batch.signed.body, batch.signed.signature) == (header, body, signature)
    assert batch.digest == digest_of(body)
    assert [one for _, one in batch.records] == lines
    assert tuple(digest for digest, _ in batch.records) == header.records
    assert found.checkpoint is None


@given(st.data(), st.lists(packs(), max_size=2), counts)
def test_checkpoints(data: st.DataObject, made_packs: list[Pack], generation: int) -> None:
    made = data.draw(st.lists(batches("acme/demo"), max_size=3))
    bodies = []
    for header, signature, lines in made:
        kept = [one for one in lines if data.draw(st.booleans())]
        bodies.append((encode_header(header), signature, [encode_record(one) for one in kept]))
    header = CheckpointHeader(
        format=1,
        type="checkpoint",
        batches=tuple(len(lines) for _, _, lines in bodies),
        workload="acme/demo",
        environment=data.draw(digests),
        generation=generation,
        supersedes=tuple(data.draw(st.lists(digests, max_size=3))),
        packs=tuple(made_packs),
    )
    signature = data.draw(signatures)
    stored = frame.compress(encode_checkpoint(header, signature, bodies))
    found = parse_segment(stored, name=digest_of(stored))
    assert found.checkpoint == header
    assert found.checkpoint_signed is not None and found.checkpoint_signed.signature == signature
    assert [
        (b.signed.body, b.signed.signature, [encode_record(r) for _, r in b.records]) for b in found.batches
    ] == bodies


@given(st.lists(st.tuples(digests, st.integers(0, 1000)), max_size=6))
def test_doomed_lists(blobs: list[tuple[Digest, int]]) -> None:
    names = [blob_name(digest, copy) for digest, copy in blobs]
    assert all(map(is_blob_name, names))
    stored = encode_doomed(names)
    assert parse_doomed(stored, name=digest_of(stored)) == frozenset(names)
    assert encode_doomed(names[::-1] * 2) == stored


@given(workloads, digests, digests, parts)
def test_segment_names(workload: str, environment: Digest, digest: Digest, deeper: str) -> None:
    try:
        check_workload(workload)
    except UsageError:
        return
    name = SegmentName(workload, environment, digest)
    assert parse_segment_name(workload, str(name)) == name
    # What lies below another workload is never taken for this one's, nor the other way round.
    below = SegmentName(f"{workload}/{deeper}", environment, digest)
    assert parse_segment_name(workload, str(below)) is None
    assert parse_segment_name(f"{workload}/{deeper}", str(name)) is None


# --- the union

SIGNERS = ("alice", "bob", "carol", "boss")
POOL = [
    record(b"%d" % plain, entry=entry, seq=seq, kind=kind)
    for kind in ("inductor", "pgo")
    for entry in "ab"
    for plain in range(3)
    for seq in (1, 2)
]


@st.composite
def histories(draw: st.DrawFn) -> list[Accepted]:
    """Pushes, withdrawals and readmissions, one after another, by writers and one maintainer."""
    history: list[Accepted] = []
    for number in range(draw(st.integers(1, 7))):
        signer = draw(st.sampled_from(SIGNERS))
        chosen = draw(st.lists(st.sampled_from(POOL), max_size=3, unique_by=encode_record))
        gone = [
            withdrawal(one, draw(st.sampled_from([None, ANY])))
            for one in draw(st.lists(st.sampled_from(POOL), max_size=2))
        ]
        back = [
            readmission(item, earlier)
            for earlier in history
            for item in earlier.batch.header.withdrawn
            if draw(st.booleans())
        ]
        history.append(
            accepted(
                signer,
                chosen,
                maintainer=signer == "boss",
                withdrawn=tuple(gone),
                readmit=tuple(back),
                segment=str(number),
            )
        )
    return history


def withdrawn_by_the_book(history: list[Accepted], by: Accepted, one: Record) -> bool:
    """Format.md §10.1, read aloud."""
    statement = one.statement
    for item in history:
        for gone in item.batch.header.withdrawn:
            meant = gone.identity == statement.identity and gone.digest in (ANY, statement.digest)
            if not meant or not (item.maintainer or item.key_id == by.key_id):
                continue
            lifted = any(
                back.lifts == item.batch.digest
                and (back.identity, back.digest) == (gone.identity, gone.digest)
                and (other.maintainer or (not item.maintainer and other.key_id == item.key_id))
                for other in history
                for back in other.batch.header.readmit
            )
            if not lifted:
                return True
    return False


def winners_by_the_book(history: list[Accepted], threshold: int) -> dict[Any, Statement]:
    """Format.md §10.2, read aloud."""
    signers: dict[Any, dict[Statement, set[str]]] = defaultdict(lambda: defaultdict(set))
    newest: dict[Statement, int] = defaultdict(int)
    for item in history:
        for _, one in item.batch.records:
            if not withdrawn_by_the_book(history, item, one):
                signers[one.statement.identity][one.statement].add(item.key_id)
                newest[one.statement] = max(newest[one.statement], one.seq)

    def rank(statement: Statement) -> tuple[int, int, str]:
        grows = statement.kind in LATEST_KINDS
        keys = signers[statement.identity][statement]
        return -len(keys), -newest[statement] if grows else 0, digest_of(statement_bytes(statement))

    enough = {
        identity: [s for s, keys in found.items() if len(keys) >= threshold]
        for identity, found in signers.items()
    }
    return {identity: min(found, key=rank) for identity, found in enough.items() if found}


def same(one: Union, other: Union) -> bool:
    return (
        dict(one.live) == dict(other.live)
        and one.outvoted == other.outvoted
        and one.divergent == other.divergent
        and one.highest_seq == other.highest_seq
    )


@settings(max_examples=300)
@given(histories(), st.integers(1, 3))
def test_the_union_does_what_the_book_says(history: list[Accepted], threshold: int) -> None:
    found = union(history, threshold=threshold)
    assert {identity: live.statement for identity, live in found.live.items()} == winners_by_the_book(
        history, threshold
    )
    for live in found.live.values():
        for statement in (live, *live.others):
            assert len(statement.signers) >= threshold
            assert statement.signers == {v.key_id for v in statement.vouched}
            assert all(v.record.statement == statement.statement for v in statement.vouched)
        assert live.statement not in [other.statement for other in live.others]


@given(histories(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_order_does_not_matter(history: list[Accepted], threshold: int, chance: random.Random) -> None:
    turned = list(history)
    chance.shuffle(turned)
    assert same(union(history, threshold=threshold), union(turned, threshold=threshold))


@given(histories(), st.integers(1, 3), st.data())
def test_a_batch_in_several_segments_counts_once(
    history: list[Accepted], threshold: int, data: st.DataObject
) -> None:
    again = data.draw(st.lists(st.sampled_from(history), max_size=4))
    copies = [
        Accepted(item.batch, digest_of(b"another segment"), item.key_id, item.maintainer) for item in again
    ]
    assert same(union(history, threshold=threshold), union([*copies, *history], threshold=threshold))


@given(histories(), st.integers(1, 3), st.integers(0, 2))
def test_a_checkpoint_without_its_dead_shows_the_same(
    history: list[Accepted], threshold: int, beside: int
) -> None:
    """Instead of the segments, and beside any of them that are still there.

    Dead is what is withdrawn for good: a record below the threshold, or one that lost, still speaks.
    """
    checkpoint = [
        accepted(
            next(name for name in SIGNERS if key_id(name) == item.key_id),
            [one for _, one in item.batch.records],
            maintainer=item.maintainer,
            present=[one for _, one in item.batch.records if not withdrawn_by_the_book(history, item, one)],
            withdrawn=item.batch.header.withdrawn,
            readmit=item.batch.header.readmit,
        )
        for item in history
    ]
    assert [a.batch.digest for a in checkpoint] == [a.batch.digest for a in history]
    before = union(history, threshold=threshold)
    for order in ([*checkpoint, *history[:beside]], [*history[:beside], *checkpoint]):
        after = union(order, threshold=threshold)
        assert dict(after.live) == dict(before.live)
        assert (after.outvoted, after.divergent) == (before.outvoted, before.divergent)


@given(histories(), st.sampled_from(POOL), st.integers(1, 99))
def test_no_writer_brings_back_what_a_maintainer_withdrew(
    history: list[Accepted], one: Record, seq: int
) -> None:
    gone = accepted("boss", maintainer=True, withdrawn=(withdrawal(one),), supersedes=(digest_of(b"last"),))
    later = msgspec.structs.replace(one, seq=seq)
    eve = accepted("eve", [later], readmit=(readmission(withdrawal(one), gone),))
    found = union([*history, gone, eve])
    digests_alive = {
        statement.statement.digest
        for live in found.live.values()
        for statement in (live, *live.others)
        if live.statement.identity == one.statement.identity
    }
    assert one.statement.digest not in digests_alive


@given(histories(), histories())
def test_a_batch_by_a_writer_never_removes_anothers_record(
    mine: list[Accepted], yours: list[Accepted]
) -> None:
    """Only its own, so no writer can empty a workload; a maintainer can, which is what it is for."""
    writers = [item for item in yours if not item.maintainer]
    others = [item for item in mine if not item.maintainer and item.key_id not in {w.key_id for w in writers}]
    vouched = {
        (v.digest, v.key_id)
        for live in union(others).live.values()
        for x in (live, *live.others)
        for v in x.vouched
    }
    after = union([*others, *writers])
    still = {
        (v.digest, v.key_id) for live in after.live.values() for x in (live, *live.others) for v in x.vouched
    }
    assert vouched <= still


def test_the_pool_is_as_meant() -> None:
    assert len({one.statement.identity for one in POOL}) == 4
    assert len({one.statement.digest for one in POOL}) == 3
