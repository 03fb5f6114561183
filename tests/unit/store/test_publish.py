# SPDX-License-Identifier: Apache-2.0
"""Push: it converges, it signs only what it has checked, and one bad blob costs that blob's entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from push_world import Builder, blobs, builders, empty_store, publish_bogus, segments
from torchrelay import frame
from torchrelay.batch import encode_doomed
from torchrelay.caches.ledger import Ledger, noted_of
from torchrelay.digest import digest_of
from torchrelay.errors import (
    DeniedError,
    PermanentError,
    StorageError,
    TooLargeError,
    TransientError,
)
from torchrelay.signing.policy import WRITER
from torchrelay.statement import Need, Statement, blob_name
from torchrelay.store import publish, upload
from torchrelay.store.layout import DOOMED
from torchrelay.store.view import View
from torchrelay.testing import FaultyBackend
from torchrelay.testing.entries import WORKLOAD


@pytest.fixture
def store() -> Iterator[FaultyBackend]:
    """An empty store; a fault that is armed and not hit fails the test."""
    made = empty_store()
    yield made
    made.assert_all_faults_hit()


def key(number: int) -> str:
    return "f" + "abcdefgh"[number] * 51


def blob_of(plain: bytes) -> str:
    return blob_name(digest_of(frame.compress(plain)))


def winner(view: View) -> Statement:
    (live,) = view.union.live.values()
    return live.statement


# --- it converges


@pytest.mark.parametrize("settings", [{}, {"thresholds": ((WORKLOAD, 2),)}, {"divergent": "refuse"}])
def test_a_second_push_adds_nothing_whatever_the_policy_lets_readers_have(
    store: FaultyBackend, settings: dict[str, object]
) -> None:
    one, two = builders(2, store, **settings)
    one.shelf.add(b"plain")
    assert one.push().pushed == 1
    again = one.push()
    assert (again.pushed, again.held, again.blobs, again.segment) == (0, 1, 0, "")
    assert len(segments(store)) == 1
    two.shelf.add(b"plain")
    signed = two.push()
    assert (signed.pushed, signed.blobs) == (1, 0)
    assert (two.push().held, one.push().held) == (1, 1)
    (live,) = two.view().union.live.values()
    assert live.signers == {one.key_id, two.key_id} and len(segments(store)) == 2


def test_a_builder_with_other_bytes_does_not_keep_two_others_from_a_quorum(store: FaultyBackend) -> None:
    bad, one, two = builders(3, store, thresholds=((WORKLOAD, 2),))
    for builder, plain in ((bad, b"bad"), (one, b"plain"), (two, b"plain")):
        builder.shelf.add(plain)
        assert builder.push().pushed == 1
    assert winner(one.view()).digest == digest_of(b"plain")
    assert [builder.push().pushed for builder in (one, two)] == [0, 0]
    late = bad.push()
    assert (late.pushed, late.held) == (0, 1)


def test_what_a_policy_refuses_as_divergent_is_pushed_once(store: FaultyBackend) -> None:
    one, two = builders(2, store, divergent="refuse")
    one.shelf.add(b"one")
    two.shelf.add(b"two")
    assert one.push().pushed == 1
    assert two.push().covered == 1
    assert two.push(own=True).pushed == 1
    for builder in (one, two):
        assert not builder.view().union.live
        report = builder.push()
        assert (report.pushed, report.held, report.blobs) == (0, 1, 0)


# --- own and replace


def test_replace_withdraws_also_where_ones_own_bytes_are_there_already(store: FaultyBackend) -> None:
    for attempt in range(8):  # either of the two may have the lower digest, which wins
        store = empty_store()
        bad, good = builders(2, store)
        bad.shelf.add(b"bad %d" % attempt)
        good.shelf.add(b"good")
        bad.push()
        assert good.push(own=True).divergent == [f"inductor {good.shelf.items[0].meta.key}"]
        report = good.push(replace=True)
        assert (report.pushed, report.blobs, report.warnings) == (1, 0, [])
        assert winner(good.view()).digest == digest_of(b"good")
        assert good.push(replace=True).held == 1


def test_replace_by_who_may_not_withdraw_for_others_says_so(store: FaultyBackend) -> None:
    bad, good = builders(2, store, roles=(WRITER,))
    bad.shelf.add(b"bad")
    good.shelf.add(b"good")
    bad.push()
    (warning,) = good.push(replace=True).warnings
    assert "no maintainer" in warning


def test_divergent_names_what_is_covered_and_not_what_is_held_or_sent(store: FaultyBackend) -> None:
    one, two = builders(2, store)
    one.shelf.add(b"one")
    two.shelf.add(b"two")
    one.push()
    covered = two.push()
    assert covered.covered == 1 and len(covered.divergent) == 1
    two.push(own=True)
    assert two.push().divergent == []
    store.inner.delete_many([blob_of(b"one"), blob_of(b"two")])
    sent = two.push()
    assert (sent.pushed, sent.divergent) == (1, [])


# --- others' blobs


@pytest.mark.parametrize(
    "blob",
    [os.urandom(40), frame.compress(b"other"), frame.compress(b"plain") + b"x", b"", os.urandom(1 << 17)],
    ids=["junk", "other-bytes", "two-frames", "empty", "far-too-long"],
)
def test_a_blob_that_holds_something_else_is_not_signed_over(store: FaultyBackend, blob: bytes) -> None:
    mallory, honest = builders(2, store)
    publish_bogus(mallory, b"plain", blob)
    honest.shelf.add(b"plain")
    report = honest.push()
    assert (report.pushed, report.blobs) == (1, 1)
    mine = [v for live in honest.view().held.live.values() for v in live.vouched if v.key_id == honest.key_id]
    assert [v.record.stored.name for v in mine] == [blob_of(b"plain")]
    assert honest.push().held == 1


def test_a_bogus_blob_does_not_stand_in_for_ones_own_that_is_gone(store: FaultyBackend) -> None:
    mallory, honest = builders(2, store)
    honest.shelf.add(b"plain")
    honest.push()
    publish_bogus(mallory, b"plain", b"junk")
    store.inner.delete_many([blob_of(b"plain")])
    assert honest.push().blobs == 1
    assert blob_of(b"plain") in blobs(store)


def test_a_good_blob_of_another_zstd_is_read_once_and_reused(store: FaultyBackend) -> None:
    plain = repr([n * n for n in range(3000)]).encode()
    other = next(b for n in (1, 9, 19) if (b := _compressed(plain, n)) != frame.compress(plain))
    bob, me = builders(2, store)
    publish_bogus(bob, plain, other)
    me.shelf.add(plain)
    report = me.push()
    assert (report.pushed, report.blobs) == (1, 0)
    assert blobs(store) == {blob_name(digest_of(other))}
    reads = len([c for c in store.calls if c == ("get", blob_name(digest_of(other)))])
    assert reads == 1 and me.push().held == 1
    assert len([c for c in store.calls if c == ("get", blob_name(digest_of(other)))]) == 1


def _compressed(plain: bytes, level: int) -> bytes:
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd.compress(plain, level)


def test_an_entry_that_changed_before_it_was_signed_is_left_out(store: FaultyBackend) -> None:
    one, two = builders(2, store)
    one.shelf.add(b"plain")
    one.push()
    two.shelf.changed.add(id(two.shelf.add(b"plain")))
    report = two.push()
    assert (report.pushed, report.excluded, report.segment) == (0, {"growing": 1}, "")
    assert len(segments(store)) == 1


# --- blobs that are there without a record


def test_another_workload_stores_nothing_twice_and_replaces_rubbish_under_its_names(
    store: FaultyBackend,
) -> None:
    (one,) = builders(1, store)
    for number in range(5):
        one.shelf.add(b"plain %d" % number * 50, key=key(number))
    assert one.push().blobs == 5
    before = blobs(store)
    name = blob_of(b"plain 0" * 50)
    whole = store.inner.get(name, limit=10_000)
    store.inner.put(name, bytes(len(whole)))
    report = replace(one, workload="acme/other").push()
    assert (report.pushed, report.blobs) == (5, 5), "what is there is not relied on"
    assert blobs(store) == before
    assert store.inner.get(name, limit=10_000) == whole


# --- uploads that fail


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "CHUNK_ENTRIES", 1)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("error", [PermanentError("no"), TransientError("no"), TooLargeError("no")])
def test_one_refused_blob_costs_its_own_entry(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch, failing: int, error: StorageError
) -> None:
    small_chunks(monkeypatch)
    (me,) = builders(1, store)
    plains = [b"plain %d" % number for number in range(3)]
    for number, plain in enumerate(plains):
        me.shelf.add(plain, key=key(number))
    store.arm("put", names=blob_of(plains[failing]), error=error)
    report = me.push()
    assert (report.pushed, report.exit_code) == (2, 1)
    assert [p.subject for p in report.failed] == [f"inductor {key(failing)}"]
    assert len(me.view().union.live) == 2 and blob_of(plains[failing]) not in blobs(store)
    assert me.push().pushed == 1


def test_a_store_that_takes_nothing_is_an_error_and_not_asked_for_ever(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    (me,) = builders(1, store)
    for number in range(8):
        me.shelf.add(b"plain %d" % number, key=key(number))
    store.arm("put", times=upload.HOPELESS_CHUNKS, error=DeniedError("no"))
    with pytest.raises(DeniedError):
        me.push()
    assert not segments(store) and not blobs(store)
    assert len([c for c in store.calls if c[0] == "put"]) == upload.HOPELESS_CHUNKS


def test_a_blob_that_no_store_of_its_kind_takes_is_reported_and_nothing_is_published(
    store: FaultyBackend,
) -> None:
    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    store.arm("put", error=TooLargeError("too large"))
    report = me.push()
    assert (report.pushed, len(report.failed), report.exit_code) == (0, 1, 1)
    assert not segments(store)


def test_a_store_that_fills_up_keeps_what_it_took(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    (me,) = builders(1, store)
    for number in range(8):
        me.shelf.add(b"plain %d" % number, key=key(number))
    store.arm("put", nth=3, names="blobs/*", times=upload.HOPELESS_CHUNKS, error=PermanentError("full"))
    report = me.push()
    assert (report.pushed, len(report.failed)) == (2, 6)
    assert len(me.view().union.live) == 2


def test_what_needs_a_blob_that_failed_is_not_recorded(store: FaultyBackend) -> None:
    """Also if the store has a record of what is needed, whose blob is gone."""
    (me,) = builders(1, store)
    me.shelf.add(b"needed", key=key(0), variant="")
    me.push()
    store.inner.delete_many([blob_of(b"needed")])
    me.shelf.add(b"needer", key=key(1), needs=(Need(kind="inductor", key=key(0), variant=""),))
    store.arm("put", names=blob_of(b"needed"), error=TooLargeError("no"))
    report = me.push()
    assert (report.pushed, report.excluded, len(report.failed)) == (0, {"incomplete": 1}, 1)


# --- a gc beside it


def dooming(store: FaultyBackend, *names: str) -> Callable[[str], None]:
    """A gc that writes its list while a segment is put."""
    list_ = encode_doomed(names)
    return lambda _: store.inner.put(f"{DOOMED}{digest_of(list_)}", list_)


def test_the_last_round_that_a_gc_allows_is_a_success(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "GC_ROUNDS", 2)
    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    store.arm("put", names="manifests/*", before=dooming(store, blob_of(b"plain")))
    report = me.push()
    assert report.pushed == 1 and len(report.segments) == 2 and report.segment == report.segments[-1]
    (live,) = me.view().union.live.values()
    assert live.vouched[0].record.stored.copy == 1 or live.vouched[1].record.stored.copy == 1


def test_a_gc_that_never_ends_is_an_error(store: FaultyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "GC_ROUNDS", 2)
    (me,) = builders(1, store)
    me.shelf.add(b"plain")
    digest = digest_of(frame.compress(b"plain"))
    for nth in (1, 2):
        store.arm("put", names="manifests/*", nth=nth, before=dooming(store, blob_name(digest, nth - 1)))
    with pytest.raises(TransientError, match="gc"):
        me.push()


@pytest.mark.parametrize("how", ["fails", "changes", "budget"])
def test_what_cannot_be_sent_again_after_a_gc_is_counted_once(store: FaultyBackend, how: str) -> None:
    (me,) = builders(1, store)
    needed = me.shelf.add(b"needed", key=key(0), variant="")
    me.shelf.add(b"needer", key=key(1), needs=(Need(kind="inductor", key=key(0), variant=""),))
    me.shelf.add(b"alone", key=key(2))
    sizes = sum(len(frame.compress(plain)) for plain in (b"needed", b"needer", b"alone"))
    doom = dooming(store, blob_of(b"needed"))

    def before(name: str) -> None:
        doom(name)
        if how == "changes":
            me.shelf.changed.add(id(needed))

    store.arm("put", names="manifests/*", before=before)
    if how == "fails":
        store.arm("put", names=f"{blob_of(b'needed')}.1", error=PermanentError("no"))
    report = me.push(max_bytes=sizes + 1 if how == "budget" else None)
    out = {"fails": {}, "changes": {"growing": 1}, "budget": {"over-budget": 1}}[how]
    assert report.excluded == dict(sorted({**out, "incomplete": 1}.items()))
    assert report.pushed == 1 and report.by_kind == {"inductor": 1}
    assert len(report.failed) == (1 if how == "fails" else 0)
    assert report.pushed + sum(report.excluded.values()) + len(report.failed) == 3


# --- segments


def test_a_push_of_several_segments_names_all_and_sends_its_environment_once(
    store: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SEGMENT_RECORDS", 2)
    (me,) = builders(1, store)
    for number in range(5):
        me.shelf.add(b"plain %d" % number, key=key(number))
    report = me.push()
    assert report.pushed == 5 and len(report.segments) == 3 and report.segment == report.segments[-1]
    assert {name.rpartition("/")[2] for name in segments(store)} == set(report.segments)
    assert len([c for c in store.calls if c[0] == "put" and c[1].startswith("environments/")]) == 1


# --- what a pull installed


def test_what_a_pull_installed_is_held_only_where_the_store_has_it(
    store: FaultyBackend, tmp_path: Path
) -> None:
    one, two = builders(2, store)
    entry = one.shelf.add(b"plain")
    one.push()
    (live,) = one.view().union.live.values()
    tmp_path.chmod(0o700)
    ledger = Ledger(tmp_path)
    ledger.note([noted_of(live.statement)])
    two.shelf.items, two.shelf.plains, two.ledger = [entry], one.shelf.plains, ledger
    held = two.push()
    assert (held.pushed, held.held, held.excluded) == (0, 1, {})
    elsewhere = empty_store("elsewhere")
    lone = Builder(elsewhere, two.signer, two.policy, two.shelf, ledger=ledger)
    report = lone.push()
    assert (report.pushed, report.held, report.excluded) == (0, 0, {"pulled": 1})
    assert not segments(elsewhere) and not blobs(elsewhere)
