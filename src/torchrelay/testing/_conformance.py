# SPDX-License-Identifier: Apache-2.0
"""The backend contract as tests. Subclass :class:`BackendConformance`; see the contract, §8."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchrelay.errors import DeniedError, NotFoundError, PermanentError, StorageError, TooLargeError
from torchrelay.storage import Backend, Budget, Get, ObjectInfo, ObservedBackend, ReadOnlyBackend
from torchrelay.testing._stateful import run_backend_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE_NAMES = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../x",
    "a/..",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    ".hidden",
    "a/.tmp-1-2",
    "-rf",
    "a\0b",
    "a\nb",
    "a b",
    "a\\b",
    "a%2e%2e/b",
    "a:b",
    "a*b",
    "\u00e4",
    "a\u2028b",
    "\ud800",
    "a" * 256,
    "/".join(["a" * 200] * 3),
]
"""Names that no backend may take, each for a reason of its own."""

PAYLOADS = {
    "empty": b"",
    "nul": b"\0",
    "newlines": b"\r\n\n\r",
    "every-byte": bytes(range(256)) * 8,
    "text-like-an-error": b"Error: NoSuchKey",
    "one-mib-and-one": os.urandom(1024 * 1024 + 1),
}

RANGES: tuple[tuple[int, int | None], ...] = (
    (0, 4),
    (0, 10),
    (3, 4),
    (9, 1),
    (9, 5),
    (10, 1),
    (50, 3),
    (0, 0),
    (4, None),
    (0, None),
    (10, None),
)
"""Offsets and lengths to read from an object of ten bytes."""


class BackendConformance:
    """Every sentence of ``docs/reference/backend-contract.md`` that can be tried from outside.

    A subclass gives a fixture ``place`` and the four methods below. Set ``listing_size`` lower for
    a slow service, but above its page size.
    """

    listing_size = 2_500
    bulk_size = 300
    time_tolerance_s = 120.0
    secret: str | None = None
    """Something secret in the place's URL that must never be shown."""

    @pytest.fixture
    def place(self) -> Any:
        """A fresh, empty place, for each test another."""
        raise NotImplementedError

    def make_backend(self, place: Any) -> Backend:
        """One more connection to ``place``, which may create the store."""
        raise NotImplementedError

    def set_raw(self, place: Any, name: str, data: bytes) -> None:
        """Store an object behind the backend's back."""
        raise NotImplementedError

    def get_raw(self, place: Any, name: str) -> bytes | None:
        """An object's bytes, read behind the backend's back; None if absent."""
        raise NotImplementedError

    def list_raw(self, place: Any) -> set[str]:
        """All names that lie in ``place``, the backend's temporary ones included."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self, place: Any) -> Iterator[Backend]:
        """A connection to ``place`` whose store exists."""
        with self.make_backend(place) as backend:
            yield backend

    @pytest.fixture
    def other(self, place: Any) -> Iterator[Backend]:
        """Another connection to the same place."""
        with self.make_backend(place) as other:
            yield other

    # -- put and get -----------------------------------------------------------------------------

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_put_stores_exactly_the_bytes(self, place: Any, backend: Backend, payload: bytes) -> None:
        assert backend.put_many({"blobs/aa/x.1": payload}) == {"blobs/aa/x.1": None}
        assert self.get_raw(place, "blobs/aa/x.1") == payload
        assert self.list_raw(place) == {"blobs/aa/x.1"}

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_get_gives_exactly_the_bytes(self, place: Any, backend: Backend, payload: bytes) -> None:
        self.set_raw(place, "a/x", payload)
        (got,) = backend.get_many([Get("a/x", len(payload))])
        assert got.error is None
        assert type(got.data) is bytes
        assert got.data == payload

    @pytest.mark.parametrize("size", [0, 3, 5, 9, 100_000])
    def test_put_replaces_rubbish_of_any_size(self, place: Any, backend: Backend, size: int) -> None:
        self.set_raw(place, "a/x", b"r" * size)
        backend.put("a/x", b"right")
        assert self.get_raw(place, "a/x") == b"right"
        assert backend.get("a/x", limit=5) == b"right"
        assert self.list_raw(place) == {"a/x"}

    def test_put_of_the_same_bytes_again_is_fine(self, place: Any, backend: Backend, other: Backend) -> None:
        for connection in (backend, other, backend):
            assert connection.put_many({"a/x": b"same"}) == {"a/x": None}
        assert self.get_raw(place, "a/x") == b"same"

    def test_names_differ_by_case_and_may_be_long(self, place: Any, backend: Backend) -> None:
        names = ["a/x", "a/" + "y" * 200, "-".join(["a"] * 100), "/".join(["d"] * 60), "A.b_c-d/Z"]
        backend.put_many({name: name.encode() for name in names})
        assert self.list_raw(place) == set(names)
        assert {got.get.name: got.data for got in backend.get_many([Get(n, 999) for n in names])} == {
            name: name.encode() for name in names
        }

    def test_nothing_asked_is_nothing_done(self, backend: Backend) -> None:
        watched = ObservedBackend(backend)
        assert watched.put_many({}) == {}
        assert list(watched.get_many([])) == []
        assert watched.stat_many([]) == {}
        assert watched.delete_many([]) == {}
        assert watched.counters.requests == 0

    def test_given_and_returned_buffers_are_not_shared(self, backend: Backend) -> None:
        given = {"a/x": b"first"}
        backend.put_many(given)
        assert given == {"a/x": b"first"}
        given["a/x"] = b"other"
        assert backend.get("a/x", limit=9) == b"first"

    # -- absence ---------------------------------------------------------------------------------

    def test_absent_objects(self, place: Any, backend: Backend) -> None:
        backend.put("a/there", b"1")
        with pytest.raises(NotFoundError) as caught:
            backend.get("a/absent", limit=10)
        assert "a/absent" in str(caught.value)
        assert backend.stat_many(["a/absent", "b/absent"]) == {"a/absent": None, "b/absent": None}
        assert backend.delete_many(["a/absent", "b/absent"]) == {"a/absent": None, "b/absent": None}
        assert list(backend.list("b/")) == []
        assert self.list_raw(place) == {"a/there"}

    def test_a_store_that_may_be_created_is_empty(self, place: Any) -> None:
        with self.make_backend(place) as backend:
            assert list(backend.list()) == []
            assert backend.stat_many(["a/x"]) == {"a/x": None}
            with pytest.raises(NotFoundError):
                backend.get("a/x", limit=1)
            assert self.list_raw(place) == set()

    def test_a_folder_is_not_an_object(self, place: Any, backend: Backend) -> None:
        backend.put("a/b/x", b"1")
        with pytest.raises(NotFoundError):
            backend.get("a/b", limit=10)
        assert backend.stat_many(["a/b"]) == {"a/b": None}
        assert backend.delete_many(["a/b"]) == {"a/b": None}
        assert self.get_raw(place, "a/b/x") == b"1"

    # -- bounds and ranges -----------------------------------------------------------------------

    def test_limit(self, place: Any, backend: Backend) -> None:
        self.set_raw(place, "a/x", b"x" * 1000)
        assert backend.get("a/x", limit=1000) == b"x" * 1000
        for limit in (999, 1, 0):
            with pytest.raises(TooLargeError):
                backend.get("a/x", limit=limit)

    def test_a_huge_object_is_not_fetched(self, place: Any, backend: Backend) -> None:
        self.set_raw(place, "a/x", bytes(8_000_000))
        watched = ObservedBackend(backend)
        (got,) = watched.get_many([Get("a/x", 1000)])
        assert isinstance(got.error, TooLargeError)
        assert watched.counters.downloaded_bytes <= 1001

    def test_ranges(self, place: Any, backend: Backend) -> None:
        self.set_raw(place, "a/x", b"0123456789")
        gets = [Get("a/x", 10, offset, length) for offset, length in RANGES]
        results = {got.get: got for got in backend.get_many(gets)}
        assert set(results) == set(gets)
        for get, got in results.items():
            if get.is_range and not backend.capabilities.ranges:
                assert isinstance(got.error, PermanentError)
                continue
            end = None if get.length is None else get.offset + get.length
            assert got.data == b"0123456789"[get.offset : end], got

    def test_the_rest_of_an_object_is_bounded_too(self, place: Any, backend: Backend) -> None:
        if not backend.capabilities.ranges:
            pytest.skip("declared: no ranges")
        self.set_raw(place, "a/x", b"0123456789")
        whole, long = backend.get_many([Get("a/x", 7, offset=3), Get("a/x", 7, offset=2)])
        by_offset = {got.get.offset: got for got in (whole, long)}
        assert by_offset[3].data == b"3456789"
        assert isinstance(by_offset[2].error, TooLargeError)

    def test_the_same_get_twice_has_two_results(self, place: Any, backend: Backend) -> None:
        self.set_raw(place, "a/x", b"1")
        assert [got.data for got in backend.get_many([Get("a/x", 1)] * 3)] == [b"1"] * 3

    # -- names -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
    def test_hostile_names_are_refused(self, place: Any, backend: Backend, name: str) -> None:
        backend.put("a/x", b"1")
        watched = ObservedBackend(backend)
        assert isinstance(watched.put_many({name: b"evil"})[name], PermanentError)
        (got,) = watched.get_many([Get(name, 10)])
        assert isinstance(got.error, PermanentError)
        assert isinstance(watched.stat_many([name])[name], PermanentError)
        assert isinstance(watched.delete_many([name])[name], PermanentError)
        with pytest.raises(PermanentError):
            watched.list_page(name + "/")
        assert watched.counters.requests == 0
        assert self.list_raw(place) == {"a/x"}

    # -- bulk ------------------------------------------------------------------------------------

    def test_one_failure_leaves_the_others_alone(self, place: Any, backend: Backend) -> None:
        good = {f"blobs/{i % 7}/{i}": b"%d" % i for i in range(self.bulk_size)}
        results = backend.put_many({**good, "../evil": b"x"})
        assert {name for name, error in results.items() if error} == {"../evil"}
        self.set_raw(place, "blobs/0/long", b"x" * 100)
        gets = [Get(n, 9) for n in [*good, "../evil", "blobs/0/absent", "gone/absent", "blobs/0/long"]]
        results_by_name = {got.get.name: got for got in backend.get_many(gets)}
        assert len(results_by_name) == len(gets)
        assert {n: got.data for n, got in results_by_name.items() if got.error is None} == good
        failed = {n: type(got.error) for n, got in results_by_name.items() if got.error is not None}
        assert failed == {
            "../evil": PermanentError,
            "blobs/0/absent": NotFoundError,
            "gone/absent": NotFoundError,
            "blobs/0/long": TooLargeError,
        }
        stats = backend.stat_many([*good, "../evil", "gone/absent"])
        assert stats.pop("gone/absent") is None
        assert isinstance(stats.pop("../evil"), PermanentError)
        assert all(isinstance(s, ObjectInfo) and s.size == len(good[n]) for n, s in stats.items())

    def test_bulk_under_a_small_budget(self, backend: Backend) -> None:
        backend.budget = Budget(requests=2, bytes=1000)
        objects = {f"a/{i}": os.urandom(700) for i in range(30)} | {"a/big": os.urandom(50_000)}
        assert backend.put_many(objects) == dict.fromkeys(objects)
        gets = [Get(name, len(data)) for name, data in objects.items()]
        assert {got.get.name: got.data for got in backend.get_many(gets)} == objects

    def test_a_bulk_get_may_be_dropped(self, backend: Backend) -> None:
        objects = {f"a/{i}": os.urandom(10_000) for i in range(50)}
        backend.put_many(objects)
        gets = [Get(name, 10_000) for name in objects]
        for _ in range(3):
            results = backend.get_many(gets)
            assert next(results).error is None
            results.close()  # type: ignore[attr-defined]
        assert len(list(backend.get_many(gets))) == 50

    # -- listings --------------------------------------------------------------------------------

    def test_list_is_complete_and_exact(self, place: Any, backend: Backend) -> None:
        shape = {f"blobs/{i % 50:02x}/{i}": b"x" * (i % 5) for i in range(self.listing_size)}
        assert not any(backend.put_many(shape).values())
        listed = list(backend.list())
        assert sorted((info.name, info.size) for info in listed) == sorted(
            (n, len(d)) for n, d in shape.items()
        )

    def test_list_of_one_full_folder(self, backend: Backend) -> None:
        names = {f"one/{i}" for i in range(self.listing_size)}
        assert not any(backend.put_many(dict.fromkeys(names, b"")).values())
        listed = [info.name for info in backend.list("one/")]
        assert len(listed) == len(names)
        assert set(listed) == names

    def test_list_stays_below_its_prefix(self, place: Any, backend: Backend) -> None:
        names = {"m/acme/1", "m/acme/x/2", "m/acme-x/3", "m/acme.x", "m/acm/4", "n/5", "m/acme0/6"}
        for name in names:
            self.set_raw(place, name, b"1")
        assert {info.name for info in backend.list("m/acme/")} == {"m/acme/1", "m/acme/x/2"}
        assert {info.name for info in backend.list("m/acme/x/")} == {"m/acme/x/2"}
        assert {info.name for info in backend.list("m/")} == names - {"n/5"}
        assert {info.name for info in backend.list()} == names

    def test_a_page_can_be_asked_for_again(self, backend: Backend) -> None:
        backend.put_many({f"p/{i % 40}/{i}": b"" for i in range(self.listing_size)})
        token = ""
        seen: list[str] = []
        while True:
            page, again = backend.list_page("p/", token), backend.list_page("p/", token)
            assert page == again
            seen.extend(info.name for info in page.objects)
            token = page.next_token
            if not token:
                break
        assert len(seen) == len(set(seen)) == self.listing_size

    def test_times_are_the_stores(self, backend: Backend) -> None:
        if not backend.capabilities.store_time:
            pytest.skip("declared: no store time")
        backend.put("a/1", b"1")
        first = self._modified(backend, "a/1")
        assert abs(first - time.time()) < self.time_tolerance_s
        time.sleep(1.1)
        backend.put_many({"a/1": b"1", "a/2": b"2"})
        assert self._modified(backend, "a/1") > first, "a put of the same bytes sets the time anew"
        assert self._modified(backend, "a/2") > first

    def _modified(self, backend: Backend, name: str) -> float:
        (listed,) = (info for info in backend.list() if info.name == name)
        stated = backend.stat_many([name])[name]
        assert isinstance(stated, ObjectInfo)
        assert listed.modified is not None
        assert stated.modified is not None
        assert abs(stated.modified - listed.modified) <= 1.0
        return stated.modified

    # -- read after write ------------------------------------------------------------------------

    def test_other_connections_see_everything_at_once(self, backend: Backend, other: Backend) -> None:
        backend.put("a/0", b"0")
        assert [i.name for i in other.list("a/")] == ["a/0"]
        for i in range(1, 20):
            backend.put(f"a/{i}", b"%d" % i)
            assert other.get(f"a/{i}", limit=9) == b"%d" % i
            assert len(list(other.list("a/"))) == i + 1
            assert other.stat_many([f"a/{i}"])[f"a/{i}"] is not None

    def test_deletes_are_seen_at_once(self, place: Any, backend: Backend, other: Backend) -> None:
        names = [f"a/{i}" for i in range(30)]
        backend.put_many(dict.fromkeys(names, b"1"))
        if not backend.capabilities.deletes:
            assert all(isinstance(e, StorageError) for e in backend.delete_many(names).values())
            assert self.list_raw(place) == set(names)
            return
        assert backend.delete_many(names[:20]) == dict.fromkeys(names[:20])
        assert self.list_raw(place) == set(names[20:])
        assert {info.name for info in other.list()} == set(names[20:])
        assert other.stat_many(names[:1]) == {names[0]: None}
        assert backend.delete_many(names) == dict.fromkeys(names)
        assert list(other.list()) == []

    # -- atomicity, threads, processes -----------------------------------------------------------

    def test_readers_see_a_whole_object_or_none(self, backend: Backend, other: Backend) -> None:
        versions = [bytes([i]) * (3_000_000 + 500_000 * i) for i in range(3)]
        backend.put("a/x", versions[0])
        stop = threading.Event()

        def write() -> None:
            for i in range(12):
                backend.put("a/x", versions[i % 3])
            stop.set()

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            reads = 0
            while not stop.is_set() or reads == 0:
                if writer.done():
                    stop.set()
                (got,) = other.get_many([Get("a/x", 5_000_000)])
                # It is there from the first put on: being replaced is no reason to be away.
                assert got.data in versions, got.error
                (info,) = other.list("a/")
                assert info.size in {len(v) for v in versions}
                reads += 1
            writer.result()

    def test_threads_share_a_backend(self, backend: Backend) -> None:
        shared = {f"shared/{i}": b"%d" % i for i in range(20)}

        def work(number: int) -> None:
            own = {f"t{number}/{i}": os.urandom(2000) for i in range(20)}
            assert not any(backend.put_many({**own, **shared}).values())
            gets = [Get(name, 2000) for name in (*own, *shared)]
            assert {got.get.name: got.data for got in backend.get_many(gets)} == {**own, **shared}
            assert {info.name for info in backend.list(f"t{number}/")} == set(own)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, i) for i in range(8)]:
                done.result()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
    def test_fork_after_use(self, backend: Backend) -> None:
        objects = {f"a/{i}": hashlib.sha256(b"%d" % i).digest() for i in range(20)}
        backend.put_many(objects)
        assert len(list(backend.list())) == 20
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_use_in_child, args=(backend, objects)) for _ in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for child in children:
                child.start()
        for _ in range(5):
            assert {g.get.name: g.data for g in backend.get_many([Get(n, 32) for n in objects])} == objects
        for child in children:
            child.join(60)
            alive = child.is_alive()
            if alive:
                child.kill()
            assert not alive, "a forked child hangs"
            assert child.exitcode == 0

    # -- life ------------------------------------------------------------------------------------

    def test_close(self, place: Any) -> None:
        with self.make_backend(place) as warm:
            warm.put_many({f"a/{i}": b"1" for i in range(20)})
        threads, descriptors = set(threading.enumerate()), _descriptors()
        backend = self.make_backend(place)
        backend.put_many({f"a/{i}": b"1" for i in range(20)})
        assert len(list(backend.get_many([Get(f"a/{i}", 1) for i in range(20)]))) == 20
        dropped = backend.get_many([Get(f"a/{i}", 1) for i in range(20)])
        next(dropped)
        dropped.close()  # type: ignore[attr-defined]
        backend.close()
        backend.close()
        assert set(threading.enumerate()) <= threads
        assert _descriptors() <= descriptors
        for call in (
            lambda: backend.put_many({"a/x": b"1"}),
            lambda: backend.get_many([Get("a/1", 1)]),
            lambda: backend.stat_many(["a/1"]),
            lambda: backend.delete_many(["a/1"]),
            backend.list,
        ):
            with pytest.raises(PermanentError, match="closed"):
                call()
        assert self.list_raw(place) == {f"a/{i}" for i in range(20)}

    def test_no_secret_is_shown(self, backend: Backend) -> None:
        assert backend.describe()
        if self.secret is not None:
            for text in (backend.describe(), repr(backend), str(backend)):
                assert self.secret not in text

    def test_a_read_only_view_changes_nothing(self, place: Any, backend: Backend) -> None:
        backend.put("a/x", b"1")
        view = ObservedBackend(ReadOnlyBackend(backend))
        assert isinstance(view.put_many({"a/x": b"2"})["a/x"], DeniedError)
        assert isinstance(view.delete_many(["a/x"])["a/x"], DeniedError)
        assert view.counters.requests == 0
        assert view.get("a/x", limit=1) == b"1"
        assert self.get_raw(place, "a/x") == b"1"

    def test_what_goes_over_the_wire_is_counted(self, backend: Backend) -> None:
        objects = {f"a/{i}": b"x" * 1000 for i in range(10)}
        watched = ObservedBackend(backend)
        watched.put_many(objects)
        puts = watched.counters
        assert puts.requests >= 1
        assert puts.uploaded_bytes == 10_000
        assert puts.downloaded_bytes == 0
        list(watched.get_many([Get(name, 1000) for name in objects]))
        gets = watched.counters - puts
        assert 1 <= gets.requests <= 10
        assert gets.downloaded_bytes == 10_000
        before = watched.counters
        assert len(list(watched.list())) == 10
        assert (watched.counters - before).requests == 1

    def test_against_a_dict(self, place: Any) -> None:
        run_backend_machine(lambda: self.make_backend(place))


def _use_in_child(backend: Backend, objects: dict[str, bytes]) -> None:
    found = {got.get.name: got.data for got in backend.get_many([Get(name, 32) for name in objects])}
    assert found == objects
    assert not any(backend.put_many({f"child/{os.getpid()}-{i}": b"1" for i in range(10)}).values())
    assert len(list(backend.list("a/"))) == len(objects)


def _descriptors() -> set[str]:
    """What this process's descriptors point to, where the system tells."""
    found = set()
    for link in Path("/proc/self/fd").glob("*") if Path("/proc/self/fd").exists() else ():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if not target.startswith("/proc/"):
            found.add(target)
    return found
