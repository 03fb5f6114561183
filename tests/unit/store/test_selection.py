# SPDX-License-Identifier: Apache-2.0
"""What becomes of each local entry in a push, as a table over what the store holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from store_samples import VARIANT, item, live_of, local, stored_record
from torchrelay.batch import encode_requires
from torchrelay.caches.base import Reason
from torchrelay.digest import digest_of
from torchrelay.manifest import Live, union
from torchrelay.statement import Need, Record
from torchrelay.store.selection import (
    Fate,
    Held,
    blobs_of_interest,
    fate,
    in_scope,
    is_divergent,
    known_bytes,
    present_copy,
    reason_counts,
    without_needs,
)
from torchrelay.testing.entries import REQUIRES
from union_samples import accepted, key_id

ME = key_id("me")
MINE = stored_record(b"plain")
OTHERS = stored_record(b"other bytes")
# The same bytes under another canonical form: another statement, and one that is not mine.
RECAST = msgspec.structs.replace(MINE, statement=msgspec.structs.replace(MINE.statement, canon="other"))
COPY = msgspec.structs.replace(MINE, stored=msgspec.structs.replace(MINE.stored, copy=1))


def held(
    *records: Record,
    size: int | None = None,
    doomed: tuple[Record, ...] = (),
    marked: tuple[Record, ...] = (),
) -> Held:
    """A store that has the blobs of ``records``."""
    return Held(
        {r.stored.name: r.stored.size if size is None else size for r in records},
        frozenset(r.stored.name for r in doomed),
        frozenset(r.stored.name for r in marked),
    )


@dataclass(frozen=True)
class Case:
    expected: Fate
    live: Live | None
    held: Held
    own: bool = False
    replace: bool = False
    kind: str = "inductor"


def pgo(plain: bytes) -> Record:
    return stored_record(plain, kind="pgo")


CASES = {
    "nothing-there": Case(Fate.SEND, None, held()),
    "mine-and-there": Case(Fate.HELD, live_of(("me", MINE)), held(MINE)),
    "mine-and-others": Case(Fate.HELD, live_of(("me", MINE), ("bob", MINE)), held(MINE)),
    "mine-but-blob-gone": Case(Fate.SEND, live_of(("me", MINE)), held()),
    "mine-but-blob-cut": Case(Fate.SEND, live_of(("me", MINE)), held(MINE, size=1)),
    "mine-but-blob-empty": Case(Fate.SEND, live_of(("me", MINE)), held(MINE, size=0)),
    "mine-but-doomed": Case(Fate.SEND, live_of(("me", MINE)), held(MINE, doomed=(MINE,))),
    "mine-but-damaged": Case(Fate.SEND, live_of(("me", MINE)), held(MINE, marked=(MINE,))),
    "mine-another-is-doomed": Case(Fate.HELD, live_of(("me", MINE)), held(MINE, doomed=(OTHERS,))),
    "mine-doomed-with-a-copy": Case(
        Fate.HELD, live_of(("me", MINE), ("me", COPY)), held(MINE, COPY, doomed=(MINE,))
    ),
    "anothers-same-bytes": Case(Fate.SIGN, live_of(("bob", MINE)), held(MINE)),
    "anothers-same-bytes-gone": Case(Fate.SEND, live_of(("bob", MINE)), held()),
    "anothers-same-bytes-other-form": Case(Fate.SIGN, live_of(("bob", RECAST)), held(RECAST)),
    "anothers-other-bytes": Case(Fate.COVERED, live_of(("bob", OTHERS)), held(OTHERS)),
    "anothers-other-bytes-gone": Case(Fate.SEND, live_of(("bob", OTHERS)), held()),
    "anothers-other-bytes-doomed": Case(Fate.SEND, live_of(("bob", OTHERS)), held(OTHERS, doomed=(OTHERS,))),
    "anothers-other-bytes-damaged": Case(Fate.SEND, live_of(("bob", OTHERS)), held(OTHERS, marked=(OTHERS,))),
    "mine-lost-but-there": Case(
        Fate.HELD, live_of(("bob", OTHERS), ("carol", OTHERS), ("me", MINE)), held(OTHERS, MINE)
    ),
    "mine-lost-and-gone": Case(
        Fate.COVERED, live_of(("bob", OTHERS), ("carol", OTHERS), ("me", MINE)), held(OTHERS)
    ),
    "mine-won-and-gone-another-is-there": Case(
        Fate.COVERED, live_of(("me", MINE), ("bob", MINE), ("carol", OTHERS)), held(OTHERS)
    ),
    "own-beside-others": Case(Fate.SEND, live_of(("bob", OTHERS)), held(OTHERS), own=True),
    "own-already-there": Case(Fate.HELD, live_of(("me", MINE)), held(MINE), own=True),
    "own-anothers-same-bytes": Case(Fate.SIGN, live_of(("bob", MINE)), held(MINE), own=True),
    "replace-others": Case(Fate.SEND, live_of(("bob", OTHERS)), held(OTHERS), replace=True),
    "replace-with-the-same": Case(Fate.HELD, live_of(("me", MINE)), held(MINE), replace=True),
    "replace-others-beside-mine": Case(
        Fate.SIGN, live_of(("me", MINE), ("bob", OTHERS)), held(MINE, OTHERS), replace=True
    ),
    "own-others-beside-mine": Case(
        Fate.HELD, live_of(("me", MINE), ("bob", OTHERS)), held(MINE, OTHERS), own=True
    ),
    "mine-gone-and-anothers-copy-there": Case(Fate.SIGN, live_of(("me", MINE), ("bob", COPY)), held(COPY)),
    "pgo-newer": Case(Fate.SEND, live_of(("bob", pgo(b"old"))), held(pgo(b"old")), kind="pgo"),
    "pgo-same": Case(Fate.HELD, live_of(("me", pgo(b"plain"))), held(pgo(b"plain")), kind="pgo"),
    "pgo-anothers-same": Case(Fate.SIGN, live_of(("bob", pgo(b"plain"))), held(pgo(b"plain")), kind="pgo"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fate(case: Case) -> None:
    pushed = item(local(kind=case.kind), case.live)
    assert fate(pushed, case.held, ME, own=case.own, replace=case.replace) is case.expected
    copy = present_copy(pushed, case.held)
    assert (copy is not None) == (case.expected in {Fate.HELD, Fate.SIGN})
    if copy is not None:
        assert case.held.has(copy)


def test_what_no_reader_gets_covers_nothing() -> None:
    pushed = replace(item(local(), live_of(("bob", OTHERS))), served=None)
    assert fate(pushed, held(OTHERS), ME, own=False, replace=False) is Fate.SEND
    mine = replace(item(local(), live_of(("me", MINE), ("bob", OTHERS))), served=None)
    assert fate(mine, held(MINE, OTHERS), ME, own=False, replace=False) is Fate.HELD


def test_known_bytes_are_those_of_all_statements() -> None:
    folded = union([accepted("bob", [OTHERS]), accepted("me", [MINE])])
    key = MINE.statement.key
    wanted = {("inductor", key, digest_of(plain)) for plain in (b"plain", b"other bytes")}
    assert known_bytes(folded) == wanted


def test_the_copy_that_is_not_doomed_is_named() -> None:
    pushed = item(local(), live_of(("me", MINE), ("bob", COPY)))
    assert present_copy(pushed, held(MINE, COPY, doomed=(MINE,))) == COPY.stored
    assert present_copy(pushed, held(MINE, COPY, doomed=(COPY,))) == MINE.stored
    assert present_copy(pushed, held(MINE, COPY, doomed=(MINE, COPY))) is None


@pytest.mark.parametrize(
    ("kind", "live", "divergent"),
    [
        ("inductor", None, False),
        ("inductor", live_of(("bob", MINE)), False),
        ("inductor", live_of(("bob", OTHERS)), True),
        ("inductor", live_of(("bob", OTHERS), ("me", MINE)), True),
        ("aot_autograd", live_of(("bob", stored_record(b"x", kind="aot_autograd"))), True),
        ("inductor", live_of(("bob", RECAST)), False),
        ("triton", live_of(("bob", stored_record(b"x", kind="triton"))), False),
        ("pgo", live_of(("bob", pgo(b"x"))), False),
    ],
)
def test_divergent(kind: str, live: Live | None, divergent: bool) -> None:
    assert is_divergent(item(local(kind=kind), live)) is divergent


def test_blobs_of_interest_are_those_of_all_statements() -> None:
    live = live_of(("bob", OTHERS), ("carol", OTHERS), ("me", MINE), ("me", COPY))
    wanted = {r.stored.name for r in (OTHERS, MINE, COPY)}
    assert blobs_of_interest([item(local(), live), item(local(), None)]) == wanted
    assert blobs_of_interest([]) == set()


# --- scope

NEED = Need(kind="cpp", key="k1", variant="")
OLD = local(b"old", key="old", mtimes=(10, 20))
NEW = local(b"new", key="new", mtimes=(10, 300))
NEEDER = local(b"needer", key="needer", mtimes=(300,), needs=(NEED,))
NEEDED = local(b"needed", kind="cpp", key="k1", variant="", mtimes=(10,))
OTHER_VARIANT = local(b"other", kind="cpp", key="k1", variant=VARIANT, mtimes=(10,))
ALL = [OLD, NEW, NEEDER, NEEDED, OTHER_VARIANT]


@pytest.mark.parametrize(
    ("since", "stamped", "chosen"),
    [
        (0, 0, ALL),
        (300, 0, [NEW, NEEDER, NEEDED]),
        (300, 10, [NEW, NEEDER, NEEDED]),
        (300, 11, [NEW, NEEDER]),
        (301, 0, []),
        (20, 0, [OLD, NEW, NEEDER, NEEDED]),
        (20, 20, [OLD, NEW, NEEDER]),
    ],
)
def test_scope(since: int, stamped: int, chosen: list[object]) -> None:
    """What is needed comes along, unless it is older than the stamp."""
    found, older = in_scope(ALL, since, stamped)
    assert sorted(id(e) for e in found) == sorted(id(e) for e in chosen)
    assert older == len(ALL) - len(chosen)


# --- needs


def test_what_needs_something_that_is_nowhere_goes_with_all_that_needs_it() -> None:
    def needs(kind: str, key: str) -> tuple[Need, ...]:
        return (Need(kind=kind, key=key, variant=""),)

    graph = item(local(key="graph", variant="", needs=needs("cpp", "gone")))
    autograd = item(local(key="autograd", kind="aot_autograd", variant="", needs=needs("inductor", "graph")))
    above = item(local(key="above", kind="tree", variant="", needs=needs("aot_autograd", "autograd")))
    fine = item(local(key="fine", variant=""))
    everything = [above, autograd, graph, fine]
    lacking = without_needs(everything, union([]), lambda live: True)
    assert [(i.label, n.key) for i, n in lacking] == [
        ("inductor graph", "gone"),
        ("aot_autograd autograd", "graph"),
        ("tree above", "autograd"),
    ]


def test_a_need_is_met_by_the_push_or_by_a_store_that_really_has_it() -> None:
    needer = item(NEEDER)
    assert without_needs([needer, item(NEEDED)], union([]), lambda live: False) == []
    (lacking,) = without_needs([needer], union([]), lambda live: True)
    assert lacking == (needer, NEED)
    stored = stored_record(b"needed", kind="cpp", key="k1", variant="")
    folded = union([accepted("bob", [stored])])
    assert without_needs([needer], folded, lambda live: True) == []
    assert len(without_needs([needer], folded, lambda live: False)) == 1
    other = stored_record(b"needed", kind="cpp", key="k1", variant=VARIANT)
    assert len(without_needs([needer], union([accepted("bob", [other])]), lambda live: True)) == 1


def test_entries_that_need_each_other_hold_each_other_up() -> None:
    one = item(local(key="one", variant="", needs=(Need(kind="inductor", key="two", variant=""),)))
    two = item(local(key="two", variant="", needs=(Need(kind="inductor", key="one", variant=""),)))
    assert without_needs([one, two], union([]), lambda live: True) == []
    assert len(without_needs([one], union([]), lambda live: True)) == 1


# --- small things


def test_identity_and_label() -> None:
    pushed = item(local())
    assert pushed.identity == ("inductor", pushed.statement.key, VARIANT, encode_requires(REQUIRES)[0])
    assert pushed.label == f"inductor {pushed.statement.key}"
    other = replace(pushed, statement=msgspec.structs.replace(pushed.statement, requires=digest_of(b"r")))
    assert other.identity != pushed.identity


def test_reason_counts_are_sorted_by_name() -> None:
    found = reason_counts([Reason.SECRET, Reason.EMPTY, Reason.SECRET])
    assert list(found.items()) == [("empty", 1), ("secret", 2)]
