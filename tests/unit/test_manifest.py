# SPDX-License-Identifier: Apache-2.0
"""The union as tables: format.md §10, rule by rule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from torchrelay.batch import ANY, Withdrawal
from torchrelay.digest import Digest, digest_of
from torchrelay.manifest import Accepted, Live, Union, superseded, union
from torchrelay.statement import Record, Stored, statement_bytes
from union_samples import accepted, key_id, readmission, record, withdrawal

RECORD = record()
OTHER = record(b"other")


def the_live(found: Union) -> Live:
    (live,) = found.live.values()
    return live


def digest_alive(*batches: Accepted, threshold: int = 1) -> set[str]:
    """What lives of one identity; the same for every order."""
    results = {
        frozenset(live.statement.digest for live in union(order, threshold=threshold).live.values())
        for order in itertools.permutations(batches)
    }
    assert len(results) == 1
    return set(results.pop())


def alive(*batches: Accepted) -> bool:
    return bool(digest_alive(*batches))


def lowest(*records: Record) -> str:
    """The digest of the bytes of the statement that sorts first."""
    return min(records, key=lambda r: digest_of(statement_bytes(r.statement))).statement.digest


def test_nothing() -> None:
    found = union([])
    assert (dict(found.live), found.outvoted, found.divergent, found.highest_seq) == ({}, (), (), 0)


def test_one_record() -> None:
    live = the_live(union([accepted("alice", [RECORD])]))
    assert live.statement == RECORD.statement and live.signers == {key_id("alice")}
    assert dict(live.requires) == {"python": "3.11"} and live.others == () and live.seq == 1
    (vouched,) = live.vouched
    assert vouched.record == RECORD and vouched.key_id == key_id("alice")


def test_entries_that_differ_in_any_part_of_their_identity_live_side_by_side() -> None:
    records = [
        RECORD,
        record(entry="b"),
        record(kind="aot_autograd"),
        record(variant=digest_of(b"v")),
        record(requires={"python": "3.12"}),
    ]
    batch = accepted("alice", records, requires=[{"python": "3.11"}, {"python": "3.12"}])
    assert set(union([batch]).live) == {r.statement.identity for r in records}


# --- 1. withdrawn

WRITER, MAINTAINER = False, True
# whose withdrawal, with which authority, for a record by alice: does the record live?
WITHDRAWALS = [
    ("alice", WRITER, False),
    ("alice", MAINTAINER, False),
    ("bob", WRITER, True),
    ("bob", MAINTAINER, False),
]


@pytest.mark.parametrize("digest", [None, ANY])
@pytest.mark.parametrize(("signer", "maintainer", "lives"), WITHDRAWALS)
def test_who_may_withdraw(signer: str, maintainer: bool, lives: bool, digest: str | None) -> None:
    gone = accepted(signer, maintainer=maintainer, withdrawn=(withdrawal(RECORD, digest),))
    assert alive(accepted("alice", [RECORD]), gone) is lives


def test_a_withdrawal_beats_later_records() -> None:
    gone = accepted("boss", maintainer=True, withdrawn=(withdrawal(RECORD),))
    later = accepted("alice", [record(seq=99)])
    again = accepted("boss", [record(seq=100)], maintainer=True)
    assert not alive(accepted("alice", [RECORD]), gone, later, again)


def test_a_withdrawal_in_the_batch_that_has_the_record() -> None:
    assert not alive(accepted("alice", [RECORD], withdrawn=(withdrawal(RECORD),)))


def test_a_digest_is_withdrawn_and_not_the_entry() -> None:
    gone = accepted("boss", maintainer=True, withdrawn=(withdrawal(RECORD),))
    both = accepted("alice", [RECORD]), accepted("alice", [OTHER])
    assert digest_alive(*both, gone) == {OTHER.statement.digest}
    everything = accepted("boss", maintainer=True, withdrawn=(withdrawal(RECORD, ANY),))
    assert digest_alive(*both, everything) == set()


@pytest.mark.parametrize("member", ["kind", "key", "variant", "requires"])
def test_only_the_very_identity_is_withdrawn(member: str) -> None:
    fields = {name: getattr(withdrawal(RECORD), name) for name in Withdrawal.__struct_fields__}
    other = digest_of(b"other") if member in {"variant", "requires"} else "other"
    gone = accepted("boss", maintainer=True, withdrawn=(Withdrawal(**(fields | {member: other})),))
    assert alive(accepted("alice", [RECORD]), gone)


def test_a_writer_withdraws_its_word_and_no_other() -> None:
    gone = accepted("alice", withdrawn=(withdrawal(RECORD),))
    found = union([accepted("alice", [RECORD]), accepted("bob", [RECORD]), gone])
    assert the_live(found).signers == {key_id("bob")}


# who withdrew, who readmits, and whether the withdrawal of alice's record is lifted
READMISSIONS = [
    (("alice", WRITER), ("alice", WRITER), True),
    (("alice", WRITER), ("bob", WRITER), False),
    (("alice", WRITER), ("boss", MAINTAINER), True),
    (("boss", MAINTAINER), ("alice", WRITER), False),
    (("boss", MAINTAINER), ("boss", MAINTAINER), True),
    (("boss", MAINTAINER), ("chief", MAINTAINER), True),
    # One key that was a maintainer's for the one batch and is a writer's for the other cannot be: a
    # policy gives a key the same roles for all. Should it happen, the lower authority lifts nothing.
    (("boss", MAINTAINER), ("boss", WRITER), False),
]


@pytest.mark.parametrize("digest", [None, ANY])
@pytest.mark.parametrize(("by", "lifter", "lifted"), READMISSIONS)
def test_who_may_readmit(
    by: tuple[str, bool], lifter: tuple[str, bool], lifted: bool, digest: str | None
) -> None:
    withdrawn = withdrawal(RECORD, digest)
    gone = accepted(by[0], maintainer=by[1], withdrawn=(withdrawn,))
    back = accepted(lifter[0], maintainer=lifter[1], readmit=(readmission(withdrawn, gone),))
    assert not alive(accepted("alice", [RECORD]), gone)
    assert alive(accepted("alice", [RECORD]), gone, back) is lifted


def test_a_readmission_lifts_the_batch_that_it_names_and_no_other() -> None:
    withdrawn = withdrawal(RECORD)
    first = accepted("boss", maintainer=True, withdrawn=(withdrawn,))
    second = accepted("boss", maintainer=True, withdrawn=(withdrawn,), supersedes=(digest_of(b"x"),))
    back = accepted("boss", maintainer=True, readmit=(readmission(withdrawn, first),))
    assert not alive(accepted("alice", [RECORD]), first, second, back)
    both = accepted(
        "boss", maintainer=True, readmit=(readmission(withdrawn, first), readmission(withdrawn, second))
    )
    assert alive(accepted("alice", [RECORD]), first, second, both)


def test_a_readmission_lifts_what_was_withdrawn_word_for_word() -> None:
    whole, one = withdrawal(RECORD, ANY), withdrawal(RECORD)
    gone = accepted("boss", maintainer=True, withdrawn=(whole,))
    assert not alive(
        accepted("alice", [RECORD]),
        gone,
        accepted("boss", maintainer=True, readmit=(readmission(one, gone),)),
    )
    gone = accepted("boss", maintainer=True, withdrawn=(one,))
    assert not alive(
        accepted("alice", [RECORD]),
        gone,
        accepted("boss", maintainer=True, readmit=(readmission(whole, gone),)),
    )


def test_a_writer_who_signs_a_maintainers_header_neither_weakens_nor_lifts_it() -> None:
    """Both batches have one digest; each counts with its own signer's authority."""
    gone = (withdrawal(RECORD),)
    alice = accepted("alice", [RECORD])
    by_boss, by_eve = accepted("boss", maintainer=True, withdrawn=gone), accepted("eve", withdrawn=gone)
    assert by_boss.batch.digest == by_eve.batch.digest
    assert not alive(alice, by_boss, by_eve)
    back = (readmission(gone[0], by_boss),)
    assert not alive(alice, by_boss, by_eve, accepted("eve", readmit=back))
    assert alive(alice, by_boss, by_eve, accepted("boss", maintainer=True, readmit=back))


# --- 2. which record wins


def test_most_signers_win_before_anything_else() -> None:
    batches = [accepted("alice", [RECORD]), accepted("bob", [OTHER]), accepted("carol", [OTHER])]
    assert digest_alive(*batches) == {OTHER.statement.digest}
    batches = [accepted("alice", [OTHER]), accepted("bob", [RECORD]), accepted("carol", [RECORD])]
    assert digest_alive(*batches) == {RECORD.statement.digest}


def test_signers_are_keys_and_not_batches_or_records() -> None:
    often = [accepted("alice", [record(seq=n)]) for n in range(1, 5)]
    batches = [*often, accepted("bob", [OTHER]), accepted("carol", [OTHER])]
    found = union(batches)
    assert the_live(found).statement == OTHER.statement
    assert len(the_live(found).others[0].vouched) == 4
    assert the_live(found).others[0].signers == {key_id("alice")}


@pytest.mark.parametrize("kind", ["pgo", "precompile"])
def test_the_highest_seq_wins_where_entries_grow(kind: str) -> None:
    old, new = record(b"old", kind=kind, seq=1), record(b"new", kind=kind, seq=2)
    assert digest_alive(accepted("alice", [old]), accepted("bob", [new])) == {new.statement.digest}
    old, new = record(b"new", kind=kind, seq=1), record(b"old", kind=kind, seq=2)
    assert digest_alive(accepted("alice", [old]), accepted("bob", [new])) == {new.statement.digest}
    # But signers come first, and a tie goes by the statement's digest.
    batches = [accepted("alice", [old]), accepted("bob", [old]), accepted("carol", [new])]
    assert digest_alive(*batches) == {old.statement.digest}
    one, two = record(b"one", kind=kind), record(b"two", kind=kind)
    assert digest_alive(accepted("alice", [one]), accepted("bob", [two])) == {lowest(one, two)}


@pytest.mark.parametrize("kind", ["inductor", "triton", "cpp", "autotune", "gemm", "tree", "unknown"])
def test_any_will_do_elsewhere_whatever_its_seq(kind: str) -> None:
    one, two = record(b"one", kind=kind, seq=1), record(b"two", kind=kind, seq=9)
    assert digest_alive(accepted("alice", [one]), accepted("bob", [two])) == {lowest(one, two)}
    one, two = record(b"one", kind=kind, seq=9), record(b"two", kind=kind, seq=1)
    assert digest_alive(accepted("alice", [one]), accepted("bob", [two])) == {lowest(one, two)}


def test_what_loses_comes_next_in_the_same_order() -> None:
    records = [record(b"%d" % n) for n in range(4)]
    batches = [accepted(f"s{n}", [r]) for n, r in enumerate(records)] + [accepted("more", [records[2]])]
    live = the_live(union(batches))
    rest = sorted(records[:2] + records[3:], key=lambda r: digest_of(statement_bytes(r.statement)))
    assert [live.statement, *(o.statement for o in live.others)] == [
        records[2].statement,
        *(r.statement for r in rest),
    ]


def test_the_newest_record_of_a_statement_comes_first() -> None:
    moved = Stored(digest=digest_of(b"moved"), size=1, codec="zstd", copy=1)
    newer = record(seq=7)
    newer = type(newer)(**{n: getattr(newer, n) for n in newer.__struct_fields__} | {"stored": moved})
    live = the_live(union([accepted("alice", [RECORD]), accepted("bob", [newer])]))
    assert [v.record.seq for v in live.vouched] == [7, 1] and live.seq == 7


@pytest.mark.parametrize(("threshold", "wins"), [(1, b"other"), (2, b"other"), (3, None)])
def test_a_threshold_counts_distinct_keys(threshold: int, wins: bytes | None) -> None:
    batches = [
        accepted("alice", [RECORD]),
        accepted("alice", [record(seq=2)]),
        accepted("alice", [record(seq=3)]),
        accepted("bob", [OTHER]),
        accepted("carol", [OTHER]),
    ]
    found = union(batches, threshold=threshold)
    if wins is None:
        assert not found.live and found.outvoted == (RECORD.statement.identity,)
    else:
        assert the_live(found).statement.digest == digest_of(wins) and found.outvoted == ()
        assert len(the_live(found).others) == (1 if threshold == 1 else 0)


def test_two_keys_over_one_header_are_two() -> None:
    alice, bob = accepted("alice", [RECORD]), accepted("bob", [RECORD])
    assert alice.batch.digest == bob.batch.digest
    assert the_live(union([alice, bob], threshold=2)).signers == {key_id("alice"), key_id("bob")}


def test_a_batch_in_two_segments_counts_once() -> None:
    twice = [accepted("alice", [RECORD], segment="1"), accepted("alice", [RECORD], segment="2")]
    assert union(twice) == union(twice[:1])
    assert not union(twice, threshold=2).live


def test_a_withdrawn_word_does_not_count_for_the_threshold() -> None:
    gone = accepted("alice", withdrawn=(withdrawal(RECORD),))
    batches = [accepted("alice", [RECORD]), accepted("bob", [RECORD])]
    assert union(batches, threshold=2).live
    assert not union([*batches, gone], threshold=2).live


def test_the_highest_seq_counts_what_is_withdrawn_too() -> None:
    gone = accepted("boss", maintainer=True, withdrawn=(withdrawal(RECORD, ANY),))
    assert union([accepted("alice", [record(seq=41)]), gone]).highest_seq == 41


# --- 3. divergent


def test_divergence_is_reported_with_all_digests_in_order() -> None:
    third = record(b"third")
    found = union([accepted("alice", [RECORD, OTHER, third])])
    (divergence,) = found.divergent
    assert divergence.identity == RECORD.statement.identity
    assert list(divergence.digests) == sorted(r.statement.digest for r in (RECORD, OTHER, third))


@pytest.mark.parametrize("kind", ["pgo", "precompile"])
def test_what_grows_never_diverges(kind: str) -> None:
    found = union([accepted("alice", [record(b"1", kind=kind), record(b"2", kind=kind)])])
    assert found.divergent == ()


def test_equal_bytes_under_different_statements_do_not_diverge() -> None:
    found = union([accepted("alice", [RECORD]), accepted("bob", [record(canon="other")])])
    assert found.divergent == () and len(the_live(found).others) == 1


def test_what_is_withdrawn_does_not_diverge() -> None:
    gone = accepted("boss", maintainer=True, withdrawn=(withdrawal(OTHER),))
    assert union([accepted("alice", [RECORD, OTHER]), gone]).divergent == ()


# --- checkpoints


@pytest.mark.parametrize("order", [1, -1])
def test_a_record_that_a_checkpoint_leaves_out_is_not_hidden_where_it_is(order: int) -> None:
    other = record(entry="b")
    whole = accepted("alice", [RECORD, other])
    part = accepted("alice", [RECORD, other], present=[RECORD])
    assert union([whole, part][::order]) == union([whole])
    assert set(union([part]).live) == {RECORD.statement.identity}


def test_a_withdrawal_counts_where_no_record_is_left() -> None:
    empty = accepted(
        "boss", [record(entry="b")], maintainer=True, present=[], withdrawn=(withdrawal(RECORD),)
    )
    assert not alive(accepted("alice", [RECORD]), empty)


# --- 4. superseded

OLD = digest_of(b"old segment")


@pytest.mark.parametrize(
    ("signer", "maintainer", "owners", "gone"),
    [
        ("alice", False, ["alice"], True),
        ("alice", False, ["bob"], False),
        ("alice", False, ["alice", "bob"], False),
        ("alice", False, [], False),
        ("alice", False, None, False),
        ("boss", True, ["alice", "bob"], True),
        ("boss", True, None, True),
    ],
)
def test_superseded(signer: str, maintainer: bool, owners: Sequence[str] | None, gone: bool) -> None:
    batch = accepted(signer, maintainer=maintainer, supersedes=(OLD,))
    known: dict[Digest, frozenset[Digest]] = {}
    if owners is not None:
        known[OLD] = frozenset(map(key_id, owners))
    assert superseded([batch], known) == ({OLD} if gone else frozenset())


def test_withdrawals_and_readmissions_are_not_held_against_each_other_one_by_one() -> None:
    """Ten thousand of each, by one signer: a product of the two would take minutes."""
    records = [record(kind=f"k{n}") for n in range(10_000)]
    withdrawn = tuple(map(withdrawal, records))
    gone = accepted("boss", maintainer=True, withdrawn=withdrawn)
    back = accepted("boss", maintainer=True, readmit=tuple(readmission(w, gone) for w in withdrawn))
    start = time.process_time()
    assert len(union([accepted("alice", records), gone, back]).live) == 10_000
    assert time.process_time() - start < 10
