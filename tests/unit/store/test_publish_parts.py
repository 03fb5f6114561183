# SPDX-License-Identifier: Apache-2.0
"""A large push becomes several segments, each of which readers take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.limits import MAX_HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORDS, MAX_SEGMENT_BYTES
from torchrelay.store.publish import MAX_STATEMENT_BYTES, SEGMENT_BYTES, SEGMENT_RECORDS, parts


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([1], [(0, 1)]),
        ([1000] * SEGMENT_RECORDS, [(0, SEGMENT_RECORDS)]),
        ([1000] * (SEGMENT_RECORDS + 1), [(0, SEGMENT_RECORDS), (SEGMENT_RECORDS, SEGMENT_RECORDS + 1)]),
        ([SEGMENT_BYTES, 1], [(0, 1), (1, 2)]),
        ([SEGMENT_BYTES - 1, 1, 1], [(0, 2), (2, 3)]),
    ],
)
def test_parts(sizes: list[int], runs: list[tuple[int, int]]) -> None:
    assert list(parts(sizes)) == runs


@given(st.lists(st.integers(1, MAX_RECORD_BYTES), max_size=300))
def test_every_record_is_in_one_part_and_every_part_fits(sizes: list[int]) -> None:
    runs = list(parts(sizes))
    assert [at for start, end in runs for at in range(start, end)] == list(range(len(sizes)))
    for start, end in runs:
        assert 0 < end - start <= SEGMENT_RECORDS and sum(sizes[start:end]) <= SEGMENT_BYTES


def test_the_bounds_leave_room() -> None:
    digest_and_withdrawal = 67 + 5 * 15 + 3 * 67 + 32 + 100  # of keys as long as those of real kinds
    assert SEGMENT_RECORDS <= MAX_RECORDS and SEGMENT_RECORDS * digest_and_withdrawal < MAX_HEADER_BYTES
    assert SEGMENT_BYTES + MAX_HEADER_BYTES < MAX_SEGMENT_BYTES
    masked_numbers, provenance = 4096 * 18, 32 * 2 * 1024 * 6
    assert MAX_STATEMENT_BYTES + masked_numbers + provenance + 1024 < MAX_RECORD_BYTES
