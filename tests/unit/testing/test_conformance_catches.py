# SPDX-License-Identifier: Apache-2.0
"""The suite fails for backends that break the contract: a suite that passes everything proves nothing."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest

from torchrelay.errors import PermanentError
from torchrelay.storage import Got, ObjectInfo, Page
from torchrelay.testing import BackendConformance
from torchrelay_memory import MemoryBackend
from torchrelay_memory.backend import _stores

_numbers = itertools.count()


class SkipsExisting(MemoryBackend):
    def _put_many(self, objects):
        super()._put_many({n: d for n, d in objects.items() if n not in self._objects})
        return dict.fromkeys(objects)


class Torn(MemoryBackend):
    def _put_many(self, objects):
        for name, data in objects.items():
            super()._put_many({name: data[: len(data) // 2]})
            time.sleep(0.002)
            super()._put_many({name: data})
        return dict.fromkeys(objects)


class LeavesDebris(MemoryBackend):
    def _put_many(self, objects):
        self._objects[".tmp-1-2"] = (b"half", 1.0)
        return super()._put_many(objects)


class FirstPageOnly(MemoryBackend):
    def _list_page(self, prefix, token):
        return Page(super()._list_page(prefix, token).objects, "")


class RepeatsAnObject(MemoryBackend):
    def _list_page(self, prefix, token):
        page = super()._list_page(prefix, token)
        return Page((*page.objects, *page.objects[:1]), page.next_token)


class LyingSizes(MemoryBackend):
    def _list_page(self, prefix, token):
        page = super()._list_page(prefix, token)
        return Page(tuple(ObjectInfo(o.name, o.size + 1, o.modified) for o in page.objects), page.next_token)


class CachesListings(MemoryBackend):
    def _list_page(self, prefix, token):
        cache = self.__dict__.setdefault("cache", {})
        return cache.setdefault((prefix, token), super()._list_page(prefix, token))


class ForgetsTokens(MemoryBackend):
    def _list_page(self, prefix, token):
        used = self.__dict__.setdefault("used", set())
        if token and token in used:
            return Page((), "")
        used.add(token)
        return super()._list_page(prefix, token)


class FrozenTimes(MemoryBackend):
    def _info(self, name):
        info = super()._info(name)
        return info and ObjectInfo(name, info.size, 1e9)


class KeepsOldTime(MemoryBackend):
    def _put_many(self, objects):
        old = {n: self._objects[n][1] for n in objects if n in self._objects}
        results = super()._put_many(objects)
        for name, when in old.items():
            self._objects[name] = (self._objects[name][0], when)
        return results


class AllOrNothing(MemoryBackend):
    def _get_many(self, gets):
        results = list(super()._get_many(gets))
        if any(got.error for got in results):
            raise PermanentError("one of them failed")
        return iter(results)


class ErrorsAsData(MemoryBackend):
    def _get_many(self, gets):
        for got in super()._get_many(gets):
            yield Got(got.get, repr(got.error).encode()[: got.get.limit]) if got.error else got


class IgnoresLimits(MemoryBackend):
    def _get_many(self, gets):
        for get in gets:
            data = self._objects[get.name][0]
            self._wire.add(requests=1, downloaded_bytes=len(data))
            yield Got(get, data[: get.limit])


class IgnoresOffsets(MemoryBackend):
    def _get_many(self, gets):
        for get in gets:
            yield Got(get, self._objects[get.name][0][: get.bound])


class PrefixWithoutSlash(MemoryBackend):
    def _list_page(self, prefix, token):
        page = super()._list_page(prefix.rstrip("/"), token)
        return Page(tuple(ObjectInfo(prefix + o.name[len(prefix) :], o.size, 1.0) for o in page.objects), "")


class DeleteOfAbsentFails(MemoryBackend):
    def _delete_many(self, names):
        return {n: None if self._objects.pop(n, None) else PermanentError("absent") for n in names}


class DeletesNothing(MemoryBackend):
    def _delete_many(self, names):
        return dict.fromkeys(names)


class CountsNothing(MemoryBackend):
    def __init__(self, name):
        super().__init__(name)
        self._wire.add = lambda **_: None


class LeaksThreads(MemoryBackend):
    def _put_many(self, objects):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        return super()._put_many(objects)


class LeaksDescriptors(MemoryBackend):
    def _put_many(self, objects):
        self.__dict__.setdefault("leaked", []).append(os.memfd_create(f"leak{next(_numbers)}"))
        return super()._put_many(objects)

    def __del__(self):
        for fd in self.__dict__.get("leaked", []):
            os.close(fd)


class HangsAfterFork(MemoryBackend):
    def _after_fork(self):
        os._exit(3)


class ShowsItsSecret(MemoryBackend):
    def describe(self):
        return "memory://user:hunter2@x"


class NotAtomicInThreads(MemoryBackend):
    def _put_many(self, objects):
        self.current = dict(objects)
        time.sleep(0.001)
        return super()._put_many(self.current) and dict.fromkeys(objects)


CASES = [
    (SkipsExisting, "test_put_replaces_rubbish_of_any_size", {"size": 9}),
    (SkipsExisting, "test_against_a_dict", {}),
    (Torn, "test_readers_see_a_whole_object_or_none", {}),
    (LeavesDebris, "test_put_stores_exactly_the_bytes", {"payload": b"1"}),
    (FirstPageOnly, "test_list_is_complete_and_exact", {}),
    (FirstPageOnly, "test_list_of_one_full_folder", {}),
    (RepeatsAnObject, "test_list_is_complete_and_exact", {}),
    (RepeatsAnObject, "test_against_a_dict", {}),
    (LyingSizes, "test_list_is_complete_and_exact", {}),
    (CachesListings, "test_other_connections_see_everything_at_once", {}),
    (CachesListings, "test_deletes_are_seen_at_once", {}),
    (ForgetsTokens, "test_a_page_can_be_asked_for_again", {}),
    (FrozenTimes, "test_times_are_the_stores", {}),
    (KeepsOldTime, "test_times_are_the_stores", {}),
    (AllOrNothing, "test_one_failure_leaves_the_others_alone", {}),
    (ErrorsAsData, "test_one_failure_leaves_the_others_alone", {}),
    (ErrorsAsData, "test_absent_objects", {}),
    (IgnoresLimits, "test_limit", {}),
    (IgnoresLimits, "test_a_huge_object_is_not_fetched", {}),
    (IgnoresOffsets, "test_ranges", {}),
    (IgnoresOffsets, "test_the_rest_of_an_object_is_bounded_too", {}),
    (PrefixWithoutSlash, "test_list_stays_below_its_prefix", {}),
    (DeleteOfAbsentFails, "test_absent_objects", {}),
    (DeletesNothing, "test_deletes_are_seen_at_once", {}),
    (CountsNothing, "test_what_goes_over_the_wire_is_counted", {}),
    (LeaksThreads, "test_close", {}),
    (LeaksDescriptors, "test_close", {}),
    (HangsAfterFork, "test_fork_after_use", {}),
    (ShowsItsSecret, "test_no_secret_is_shown", {}),
    (NotAtomicInThreads, "test_threads_share_a_backend", {}),
]


@pytest.mark.parametrize(
    ("broken", "test", "extra"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_backend_fails(broken, test, extra):
    class Suite(BackendConformance):
        secret = "hunter2"

        def make_backend(self, place):
            return broken(place)

        def set_raw(self, place, name, data):
            _stores.setdefault(place, {})[name] = (data, 1.0)

        def get_raw(self, place, name):
            return _stores[place].get(name, (None,))[0]

        def list_raw(self, place):
            return set(_stores.get(place, {}))

    place = f"broken{next(_numbers)}"
    suite = Suite()
    function = getattr(suite, test)
    wanted = function.__func__.__code__.co_varnames[: function.__func__.__code__.co_argcount]
    given = {"place": place, **extra}
    given |= {name: suite.make_backend(place) for name in ("backend", "other")}
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        function(**{name: given[name] for name in wanted if name != "self"})
