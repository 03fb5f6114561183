# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import NotFoundError, StorageError, UsageError
from torchrelay.storage import Budget, Counters, Get, Got, Traffic

counts = st.builds(Traffic, st.integers(0), st.integers(0), st.integers(0))


@pytest.mark.parametrize(
    "fields",
    [{"limit": -1}, {"limit": 5, "offset": -1}, {"limit": 5, "length": 6}, {"limit": 5, "length": -1}],
)
def test_impossible_gets_are_refused(fields):
    with pytest.raises(UsageError):
        Get("a", **fields)


def test_bounds_of_a_get():
    assert Get("a", 9).bound == 9
    assert Get("a", 9, length=3).bound == 3
    assert [g.is_range for g in (Get("a", 9), Get("a", 9, 1), Get("a", 9, 0, 9))] == [False, True, True]


def test_unwrap():
    assert Got(Get("a", 1), b"").unwrap() == b""
    with pytest.raises(NotFoundError):
        Got(Get("a", 1), error=NotFoundError("gone")).unwrap()
    with pytest.raises(StorageError):
        Got(Get("a", 1)).unwrap()


@pytest.mark.parametrize("fields", [{"requests": 0}, {"bytes": 0}])
def test_a_budget_is_positive(fields):
    with pytest.raises(UsageError):
        Budget(**fields)


@given(counts, counts)
def test_counts_add_and_subtract(a, b):
    assert (a + b) - b == a
    assert a + b == b + a


def test_counters_lose_nothing_between_threads():
    counters = Counters()

    def work(_):
        for _ in range(500):
            counters.add(requests=1, uploaded_bytes=2, downloaded_bytes=3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert counters.total() == Traffic(4000, 8000, 12000)
