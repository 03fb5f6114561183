# SPDX-License-Identifier: Apache-2.0
"""The fault wrappers do what they say, or the tests that use them prove nothing."""

from __future__ import annotations

import itertools

import pytest

from torchrelay.errors import DeniedError, NotFoundError, TransientError, UsageError
from torchrelay.storage import Budget, Get, open_backend
from torchrelay.testing import FaultyBackend, SlowBackend, StaleListBackend

_numbers = itertools.count()


@pytest.fixture
def memory():
    return open_backend(f"memory://faults{next(_numbers)}")


@pytest.fixture
def faulty(memory):
    return FaultyBackend(memory)


def test_the_nth_put_fails_and_does_not_arrive(faulty, memory):
    fault = faulty.arm("put", nth=2)
    results = faulty.put_many({"a": b"1", "b": b"2", "c": b"3"})
    assert isinstance(results["b"], TransientError)
    assert (results["a"], results["c"]) == (None, None)
    assert {info.name for info in memory.list()} == {"a", "c"}
    assert fault.hit_names == ["b"]


def test_a_torn_put_may_lie_or_fail(faulty, memory):
    faulty.arm("put", names="liar", keep=2)
    faulty.arm("put", names="torn", keep=3, error=TransientError("cut"))
    results = faulty.put_many({"liar": b"12345", "torn": b"12345", "fine": b"12345"})
    assert results["liar"] is None
    assert isinstance(results["torn"], TransientError)
    assert [memory.get(n, limit=9) for n in ("liar", "torn", "fine")] == [b"12", b"123", b"12345"]


def test_gets_are_spoilt(faulty, memory):
    memory.put_many(dict.fromkeys(("cut", "bit", "other", "gone", "fine"), b"\x00\x00"))
    faulty.arm("get", names="cut", keep=1)
    faulty.arm("get", names="bit", flip=9)
    faulty.arm("get", names="other", replace=b"!")
    faulty.arm("get", names="gone", error=NotFoundError("gone"))
    with faulty:
        wanted = [Get(name, 2) for name in ("cut", "bit", "other", "gone", "fine")]
        got = {g.get.name: g.data or type(g.error) for g in faulty.get_many(wanted)}
    expected = {"cut": b"\x00", "bit": b"\x00\x02", "other": b"!", "gone": NotFoundError, "fine": b"\x00\x00"}
    assert got == expected


def test_other_operations_fail(faulty, memory):
    memory.put("p/a", b"1")
    faulty.arm("stat", names="p/a", error=DeniedError("no"))
    faulty.arm("delete", names="p/*")
    faulty.arm("list", names="p/")
    assert isinstance(faulty.stat_many(["p/a", "p/b"])["p/a"], DeniedError)
    assert isinstance(faulty.delete_many(["p/a"])["p/a"], TransientError)
    with pytest.raises(TransientError):
        faulty.list("p/")
    assert [info.name for info in faulty.list("p/")] == ["p/a"]
    faulty.assert_all_faults_hit()


def test_another_actor_may_step_in(faulty, memory):
    faulty.arm("list", before=lambda prefix: memory.put("late", b"1"))
    assert [info.name for info in faulty.list()] == ["late"]


def test_a_fault_that_was_not_hit_fails_the_test(faulty):
    faulty.arm("put", times=2)
    faulty.put_many({"b": b"1"})
    with pytest.raises(AssertionError, match="put \\*: 1 of 2"):
        faulty.assert_all_faults_hit()
    with pytest.raises(AssertionError), faulty:
        pass


def test_an_error_of_the_test_is_not_hidden_by_an_unhit_fault(faulty):
    faulty.arm("put")
    with pytest.raises(ZeroDivisionError), faulty:
        raise ZeroDivisionError


@pytest.mark.parametrize(("operation", "fields"), [("stat", {"keep": 1}), ("list", {"flip": 1}), ("fly", {})])
def test_faults_that_cannot_be_are_refused(faulty, operation, fields):
    with pytest.raises(UsageError):
        faulty.arm(operation, **fields)


def test_round_trips_are_counted(memory):
    slept = []
    slow = SlowBackend(memory, 0.5, sleep=slept.append)
    slow.budget = Budget(requests=10)
    slow.put_many({f"a/{i}": b"1" for i in range(25)})
    assert len(list(slow.get_many([Get(f"a/{i}", 1) for i in range(25)]))) == 25
    slow.stat_many([f"a/{i}" for i in range(10)])
    list(slow.list())
    slow.delete_many(["a/1"])
    assert slow.round_trips == 3 + 3 + 1 + 1 + 1
    assert sum(slept) == 9 * 0.5


def test_a_stale_listing_is_stale_until_it_settles(memory):
    stale = StaleListBackend(memory)
    stale.put_many({"p/old": b"1", "q/old": b"1"})
    stale.freeze()
    stale.put("p/new", b"1")
    stale.delete_many(["q/old"])
    assert [info.name for info in stale.list("p/")] == ["p/old"]
    assert [info.name for info in stale.list("q/")] == ["q/old"]
    assert stale.get("p/new", limit=1) == b"1"
    assert stale.stale_listings == 2
    stale.settle()
    assert [info.name for info in stale.list()] == ["p/new", "p/old"]
