# SPDX-License-Identifier: Apache-2.0
"""Decorators: retrying, read-only, observed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import DeniedError, NotFoundError, PermanentError, TransientError, UsageError
from torchrelay.storage import (
    Budget,
    Get,
    ObservedBackend,
    ReadOnlyBackend,
    RetryingBackend,
    RetryPolicy,
    open_backend,
)
from torchrelay.testing import FaultyBackend

_numbers = itertools.count()


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 1000.0
        self.pauses = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def memory():
    return open_backend(f"memory://policies{next(_numbers)}")


@pytest.fixture
def faulty(memory):
    return FaultyBackend(memory)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def retrying(faulty, clock):
    policy = RetryPolicy(tries=4, first_s=1.0, longest_s=3.0, total_s=100.0)
    return RetryingBackend(faulty, policy, sleep=clock.sleep, clock=clock, rng=lambda: 1.0)


def names(faulty, operation):
    return [name for kind, name in faulty.calls if kind == operation]


def test_only_what_failed_is_tried_again(retrying, faulty, memory, clock):
    faulty.arm("put", names="b", times=2)
    assert retrying.put_many({"a": b"1", "b": b"2", "c": b"3"}) == {"a": None, "b": None, "c": None}
    assert names(faulty, "put") == ["a", "b", "c", "b", "b"]
    assert memory.get("b", limit=1) == b"2"
    assert clock.pauses == [1.0, 2.0]
    faulty.assert_all_faults_hit()


@pytest.mark.parametrize("error", [DeniedError("no"), PermanentError("full"), NotFoundError("gone")])
def test_what_will_fail_again_is_not_tried_again(retrying, faulty, clock, error):
    faulty.arm("put", error=error)
    assert retrying.put_many({"a": b"1"}) == {"a": error}
    assert names(faulty, "put") == ["a"]
    assert clock.pauses == []


def test_tries_are_bounded(retrying, faulty, clock):
    faulty.arm("put", times=4)
    assert isinstance(retrying.put_many({"a": b"1"})["a"], TransientError)
    assert len(names(faulty, "put")) == 4
    assert clock.pauses == [1.0, 2.0, 3.0], "doubling, up to the longest"
    faulty.assert_all_faults_hit()


def test_time_is_bounded(faulty, clock):
    policy = RetryPolicy(tries=100, first_s=1.0, longest_s=5.0, total_s=20.0)
    backend = RetryingBackend(faulty, policy, sleep=clock.sleep, clock=clock, rng=lambda: 1.0)
    faulty.arm("stat", times=99)
    started = clock.now
    assert isinstance(backend.stat_many(["a"])["a"], TransientError)
    assert clock.now - started <= 20.0


def test_gets_are_handed_on_at_once_and_only_failed_ones_tried_again(retrying, faulty, memory, clock):
    memory.put_many({name: name.encode() for name in "abc"})
    faulty.arm("get", names="b")
    results = retrying.get_many([Get(name, 1) for name in "abc"])
    first = [next(results).get.name, next(results).get.name]
    assert first == ["a", "c"]
    assert clock.pauses == [], "what succeeded does not wait for what failed"
    assert [(got.get.name, got.data) for got in results] == [("b", b"b")]
    assert names(faulty, "get") == ["a", "b", "c", "b"]


def test_gets_that_keep_failing_are_reported(retrying, faulty, memory):
    memory.put_many({"a": b"1", "b": b"2"})
    faulty.arm("get", names="a", times=4)
    results = {got.get.name: got for got in retrying.get_many([Get("a", 1), Get("b", 1), Get("absent", 1)])}
    assert isinstance(results["a"].error, TransientError)
    assert results["b"].data == b"2"
    assert isinstance(results["absent"].error, NotFoundError)
    faulty.assert_all_faults_hit()


def test_the_same_get_twice_is_tried_again_twice(retrying, faulty, memory):
    memory.put("a", b"1")
    faulty.arm("get", times=2)
    assert [got.data for got in retrying.get_many([Get("a", 1)] * 2)] == [b"1", b"1"]


def test_a_page_is_tried_again_by_itself(retrying, faulty, memory):
    memory.put_many({f"p/{i}": b"" for i in range(3500)})
    for nth in (2, 4, 5):
        faulty.arm("list", nth=nth)
    assert len({info.name for info in retrying.list("p/")}) == 3500
    assert len(names(faulty, "list")) == 4 + 3
    faulty.assert_all_faults_hit()


def test_a_listing_that_keeps_failing_raises(retrying, faulty):
    faulty.arm("list", times=4)
    with pytest.raises(TransientError):
        list(retrying.list())
    faulty.assert_all_faults_hit()


def test_deletes_are_tried_again(retrying, faulty, memory):
    memory.put("a", b"1")
    faulty.arm("delete")
    assert retrying.delete_many(["a"]) == {"a": None}
    assert list(memory.list()) == []


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_lie_between_half_and_all(attempt, chance):
    policy = RetryPolicy(first_s=0.5, longest_s=8.0)
    full = min(8.0, 0.5 * 2 ** min(attempt - 1, 10))
    assert full / 2 <= policy.pause(attempt, chance) <= full


@pytest.mark.parametrize("fields", [{"tries": 0}, {"first_s": -1}, {"longest_s": -1}, {"total_s": -1}])
def test_impossible_policies_are_refused(fields):
    with pytest.raises(UsageError):
        RetryPolicy(**fields)


def test_read_only_sends_nothing(faulty, memory):
    memory.put("a", b"1")
    view = ReadOnlyBackend(faulty)
    assert not view.capabilities.writable
    assert isinstance(view.put_many({"a": b"2", "b": b"2"})["b"], DeniedError)
    assert isinstance(view.delete_many(["a"])["a"], DeniedError)
    assert faulty.calls == []
    assert view.get("a", limit=1) == b"1"


def test_observers_count_since_they_were_made_and_retries_too(retrying, faulty, memory):
    memory.put("before", b"123")
    observed = ObservedBackend(retrying)
    assert observed.counters.requests == 0
    observed.put_many({"a": b"12", "b": b"3"})
    inner = ObservedBackend(observed)
    list(inner.get_many([Get("a", 2)]))
    assert (observed.counters.requests, observed.counters.uploaded_bytes) == (3, 3)
    assert (inner.counters.requests, inner.counters.downloaded_bytes) == (1, 2)


def test_a_wrapper_passes_budget_and_close_on(memory):
    wrapped = ObservedBackend(ReadOnlyBackend(memory))
    wrapped.budget = Budget(requests=3)
    assert memory.budget.requests == 3
    wrapped.close()
    with pytest.raises(PermanentError, match="closed"):
        memory.list()
    with pytest.raises(PermanentError, match="closed"):
        wrapped.list()
