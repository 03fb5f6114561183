# SPDX-License-Identifier: Apache-2.0
"""Equal values become one object, and nothing else changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.shared import Shared
from torchrelay.statement import Need, Stored, encode_record, parse_record
from torchrelay.testing.entries import make_record

texts = st.text(max_size=3)
needs = st.builds(Need, kind=texts, key=texts, variant=texts)


@given(st.lists(needs, max_size=8))
def test_what_is_shared_is_equal_to_what_it_was(structs: list[Need]) -> None:
    before = [Need(kind=need.kind, key=need.key, variant=need.variant) for need in structs]
    shared = Shared()
    for need in structs:
        shared.share(need, "kind", "key", "variant")
    assert structs == before
    for one in structs:
        for other in structs:
            assert one.kind != other.kind or one.kind is other.kind
            assert one.kind != other.key or one.kind is other.key


def test_fields_that_are_not_named_stay_as_they_are() -> None:
    first, second = ("".join(["ab", "c"]) for _ in range(2))
    assert first is not second
    shared, kept = Shared(), Stored(digest="d", size=1, codec=second, copy=0)  # type: ignore[arg-type]
    shared.one(first)
    shared.share(kept, "size")
    assert kept.codec is second
    shared.share(kept, "codec")
    assert kept.codec is first


def test_the_records_of_a_batch_still_encode_to_their_bytes() -> None:
    lines = [encode_record(make_record(str(number).encode())[0]) for number in range(3)]
    shared = Shared()
    records = [parse_record(line, name="a record") for line in lines]
    for record in records:
        shared.share(record.statement, "canon", "workload", "kind", "variant", "requires", "needs", "files")
        shared.share(record, "producer", "times")
    assert [encode_record(record) for record in records] == lines
    assert len({id(record.statement.workload) for record in records}) == 1
