# SPDX-License-Identifier: Apache-2.0
"""What the base class promises whatever an implementer does wrong."""

from __future__ import annotations

import errno
import traceback

import pytest

from torchrelay.errors import (
    DeniedError,
    NotFoundError,
    PermanentError,
    StorageError,
    TooLargeError,
    TransientError,
)
from torchrelay.storage import Backend, Capabilities, Get, Got, ObjectInfo, Page

SECRET = "hunter2"


class Crooked(Backend):
    """Does in each operation what the test says."""

    def __init__(self, act=None, **capabilities):
        super().__init__(capabilities=Capabilities(**capabilities))
        self.act = act
        self.asked = []

    def describe(self):
        return "crooked://x"

    def _do(self, *args):
        self.asked.append(args)
        if isinstance(self.act, BaseException):
            raise self.act
        return self.act(*args) if callable(self.act) else self.act

    _put_many = _stat_many = _delete_many = _get_many = _list_page = _do

    def _close(self):
        self._do()


def results_of_everything(backend):
    """The error of each operation, of two names where it is bulk."""
    errors = [*backend.put_many({"a": b"1", "b": b"2"}).values()]
    errors += [got.error for got in backend.get_many([Get("a", 1), Get("b", 1)])]
    errors += [*backend.stat_many(["a", "b"]).values(), *backend.delete_many(["a", "b"]).values()]
    with pytest.raises(StorageError) as caught:
        list(backend.list())
    return [*errors, caught.value]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (TransientError("later"), TransientError),
        (DeniedError("no"), DeniedError),
        (OSError(errno.ENOSPC, "full"), PermanentError),
        (OSError(errno.EDQUOT, "quota"), PermanentError),
        (OSError(errno.EFBIG, "big"), PermanentError),
        (OSError(errno.EACCES, "no"), DeniedError),
        (OSError(errno.EPERM, "no"), DeniedError),
        (OSError(errno.EROFS, "ro"), DeniedError),
        (OSError(errno.ENOENT, "gone"), NotFoundError),
        (OSError(errno.ECONNRESET, "reset"), TransientError),
        (OSError(errno.ETIMEDOUT, "slow"), TransientError),
        (OSError(errno.ESTALE, "nfs"), TransientError),
        (OSError(errno.EIO, "broken"), PermanentError),
        (OSError("no number"), PermanentError),
        (ValueError("foreign"), PermanentError),
        (MemoryError(), PermanentError),
        (RecursionError("deep"), PermanentError),
    ],
    ids=repr,
)
def test_nothing_foreign_escapes(raised, kind):
    errors = results_of_everything(Crooked(raised))
    assert {type(error) for error in errors} == {kind}
    assert len(errors) == 9
    for error in errors:
        assert error is raised or error.__cause__ is raised
        assert error.remedy


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(stop):
    backend = Crooked(stop())
    with pytest.raises(stop):
        backend.put_many({"a": b"1"})
    with pytest.raises(stop):
        list(backend.get_many([Get("a", 1)]))


def test_secrets_in_foreign_errors_are_masked_and_not_chained():
    cause = ValueError(f"GET https://me:{SECRET}@host/x?X-Sig={SECRET} failed")
    for error in results_of_everything(Crooked(cause)):
        assert SECRET not in error.diagnostics()
        assert "host" in error.message
        assert SECRET not in "".join(traceback.format_exception(error))


def test_a_failed_close_is_an_error_of_ours_once():
    backend = Crooked(ValueError("boom"))
    with pytest.raises(PermanentError):
        backend.close()
    backend.close()


def test_names_without_a_result_get_one():
    errors = results_of_everything_but_list(Crooked(lambda *a: {"a": None, "stranger": None}))
    assert [type(error) for error in errors] == [type(None), PermanentError] * 3


def results_of_everything_but_list(backend):
    return [
        *backend.put_many({"a": b"1", "b": b"2"}).values(),
        *backend.stat_many(["a", "b"]).values(),
        *backend.delete_many(["a", "b"]).values(),
    ]


def test_results_of_strangers_are_dropped():
    backend = Crooked(lambda *a: {"a": None, "stranger": None})
    assert backend.put_many({"a": b"1"}) == {"a": None}
    assert backend.delete_many(["a"]) == {"a": None}


def gots(*results):
    return lambda gets: iter(results)


A, B = Get("a", 3), Get("b", 3)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Got(A, b"123"), Got(B, b"")], {"a": b"123", "b": b""}),
        ([Got(A, b"1234"), Got(B, b"1")], {"a": TooLargeError, "b": b"1"}),
        ([Got(A, ValueError("oops")), Got(B, b"1")], {"a": PermanentError, "b": b"1"}),
        ([Got(A, "text"), Got(B, bytearray(b"1"))], {"a": PermanentError, "b": PermanentError}),
        ([Got(A, b"1", NotFoundError("x")), Got(B, b"1")], {"a": NotFoundError, "b": b"1"}),
        ([Got(A, b"1")], {"a": b"1", "b": PermanentError}),
        ([], {"a": PermanentError, "b": PermanentError}),
        ([Got(A, b"1"), Got(A, b"2"), Got(Get("c", 9), b"3"), Got(B, b"1")], {"a": b"1", "b": b"1"}),
    ],
)
def test_each_get_has_one_honest_result(answers, expected):
    results = list(Crooked(gots(*answers)).get_many([A, B]))
    assert len(results) == 2
    for got in results:
        assert (got.data is None) != (got.error is None)
    assert {g.get.name: g.data if g.error is None else type(g.error) for g in results} == expected


def test_a_get_that_breaks_half_way_keeps_what_came():
    def half(gets):
        yield Got(gets[0], b"1")
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    results = list(Crooked(half).get_many([A, B]))
    assert results[0].data == b"1"
    assert isinstance(results[1].error, TransientError)


def test_a_dropped_get_closes_its_source():
    closed = []

    def source(gets):
        try:
            for get in gets:
                yield Got(get, b"1")
        finally:
            closed.append(True)

    results = Crooked(source).get_many([A, B])
    next(results)
    results.close()
    assert closed == [True]


def test_an_error_of_the_caller_is_not_taken_for_one_of_the_store():
    def source(gets):
        for get in gets:
            yield Got(get, b"1")

    results = Crooked(source).get_many([A, B])
    next(results)
    with pytest.raises(ZeroDivisionError):
        results.throw(ZeroDivisionError())


def test_listings_show_objects_only():
    names = ["p/a", "p/.tmp-1", "p/../x", "/p/b", "q/c", "p/", "p", "p/b c", "p/\0"]
    page = Page(tuple(ObjectInfo(name, 1, None) for name in names), "")
    assert [info.name for info in Crooked(page).list("p/")] == ["p/a"]


def test_listings_walk_their_pages():
    pages = {"": ("a", "t1"), "t1": ("b", "t2"), "t2": ("c", "")}

    def page(prefix, token):
        name, following = pages[token]
        return Page((ObjectInfo(name, 1, None),), following)

    backend = Crooked(page)
    assert [info.name for info in backend.list()] == ["a", "b", "c"]
    assert backend.asked == [("", ""), ("", "t1"), ("", "t2")]


def test_capabilities_are_enforced_before_anything_is_sent():
    read_only = Crooked({}, writable=False)
    assert isinstance(read_only.put_many({"a": b"1"})["a"], DeniedError)
    assert isinstance(read_only.delete_many(["a"])["a"], DeniedError)
    no_deletes = Crooked({}, deletes=False)
    assert isinstance(no_deletes.delete_many(["a"])["a"], PermanentError)
    no_ranges = Crooked(gots(Got(A, b"1")), ranges=False)
    ranged, whole = no_ranges.get_many([Get("a", 3, 1), A])
    assert isinstance(ranged.error, PermanentError)
    assert whole.data == b"1"
    assert not read_only.asked
    assert not no_deletes.asked
    assert no_ranges.asked == [((A,),)]


def test_names_may_come_from_a_generator_and_repeat():
    backend = Crooked(dict.fromkeys)
    assert backend.stat_many(n for n in ["a", "b", "a"]) == {"a": None, "b": None}
    assert backend.asked == [(("a", "b"),)]
