# SPDX-License-Identifier: Apache-2.0
"""What a pull does with each live entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from store_samples import KEY, VARIANT, live_of, local, local_view, stored_record
from torchrelay.caches.ledger import Ledger, noted_of
from torchrelay.caches.local import LocalView
from torchrelay.digest import digest_of
from torchrelay.environment import FACETS, REQUIRED_FACETS, Environment, FacetValue
from torchrelay.manifest import Live, union
from torchrelay.statement import File, Need
from torchrelay.store.plan import UNKNOWN_KIND, Plan, is_pulled, lacking_need, local_names, make_plan
from union_samples import accepted

_KNOWN = {"python": "3.11", "torch": "2.13.0", "machine": "x86_64"}
# What every kind asks for; the value of no other facet matters here.
FULL: dict[str, FacetValue] = {
    name: ("avx2",) if facet.comparison == "superset" else _KNOWN.get(name, "1")
    for name, facet in FACETS.items()
    if not facet.optional
}
HERE = Environment(1, FULL, {})
EMPTY = local_view()
CPP = "c" + "ab2" * 17
OTHER_KEY = "f" + "b" * 51


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path)


def entry(plain: bytes = b"plain", signer: str = "bob", **fields: Any) -> Live:
    return stating(live_of((signer, stored_record(plain, **fields))))


def stating(live: Live, **requires: FacetValue) -> Live:
    """``live`` as if it said all that it needs."""
    return replace(live, requires={**FULL, **live.requires, **requires})


def needer(variant: str = VARIANT) -> Live:
    """An entry that names a graph."""
    need = Need(kind="inductor", key=OTHER_KEY, variant=variant)
    return entry(kind="aot_autograd", key="a" + "c" * 51, needs=(need,))


def plan(live: list[Live], ledger: Ledger, view: LocalView = EMPTY) -> Plan:
    return make_plan(live, view, HERE, ledger)


def test_what_is_not_here_is_fetched(ledger: Ledger) -> None:
    found = plan([entry()], ledger)
    assert [e.statement.key for e in found.install] == [KEY] and not found.needers
    assert (found.present, found.kept, dict(found.incompatible)) == (0, 0, {})


@pytest.mark.parametrize(
    ("requires", "facet"),
    [
        ({"python": "3.12"}, "python"),
        ({"python": "3.11", "torch": "2.12.0"}, "torch"),
        ({"torch": "x", "python": "3.12"}, "python"),
        ({"python": "3.11", "gpu_name": "H200"}, "gpu_name"),
        ({"python": "3.11", "facet_of_the_future": "x"}, "facet_of_the_future"),
    ],
)
def test_what_does_not_fit_is_counted_by_facet(ledger: Ledger, requires: dict[str, str], facet: str) -> None:
    records = [stored_record(key=key, requires=requires) for key in (KEY, OTHER_KEY)]
    found = make_plan([_live(record, requires) for record in records], EMPTY, HERE, ledger)
    assert dict(found.incompatible) == {facet: 2} and not found.install and not found.refused


def _live(record: Any, requires: dict[str, str]) -> Live:

    (live,) = union([accepted("bob", [record], requires=[requires])]).live.values()
    return stating(live)


@pytest.mark.parametrize(("kind", "key"), [("inductor", KEY), ("cpp", CPP), ("aot_autograd", "a" + "c" * 51)])
def test_an_entry_that_leaves_out_a_facet_of_its_kind_is_refused(ledger: Ledger, kind: str, key: str) -> None:
    """It would fit every machine that the facet tells apart."""
    for facet in REQUIRED_FACETS[kind]:
        if FACETS[facet].optional:
            continue
        live = entry(kind=kind, key=key)
        found = plan([replace(live, requires={n: v for n, v in FULL.items() if n != facet})], ledger)
        (problem,) = found.refused
        assert problem.reason == "requires" and facet in problem.detail
        assert not found.install and not found.needers and not found.incompatible


def test_a_kind_that_is_not_known_is_left_out_and_counted(ledger: Ledger) -> None:
    found = plan([entry(kind="future", key="any")], ledger)
    assert dict(found.incompatible) == {UNKNOWN_KIND: 1} and not found.install and not found.refused


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "../../etc/passwd"},
        {"key": KEY.upper()},
        {"key": KEY + "a"},
        {"variant": ""},
        {"files": (File(name="../x", size=5),)},
        {"kind": "cpp", "key": "../" + CPP, "variant": ""},
        {"kind": "triton", "key": "../x", "variant": ""},
        {"kind": "autotune", "key": "../" + "0" * 64 + ".best_config", "variant": ""},
        {"kind": "precompile", "key": "..", "variant": ""},
        {"kind": "pgo", "key": "../x", "variant": ""},
        {"kind": "tree", "key": "../x", "variant": ""},
        {"kind": "gemm", "key": "../x", "variant": ""},
        {"kind": "aot_autograd", "key": "../x", "variant": ""},
    ],
)
def test_a_name_that_its_kind_does_not_have_is_refused_before_anything_is_fetched(
    ledger: Ledger, fields: dict[str, Any]
) -> None:
    """Signed by a trusted key or not; the signer is named."""
    live = _unchecked(fields)
    found = plan([live], ledger)
    assert not found.install and not found.needers and not found.incompatible
    (problem,) = found.refused
    assert problem.reason == "name" and problem.key_id == min(live.signers) and problem.detail


def _unchecked(fields: dict[str, Any]) -> Live:
    """A live entry as no parser would give it, where a file's name is bad too."""
    live = entry()
    return replace(live, statement=msgspec.structs.replace(live.statement, **fields))


def test_what_is_here_is_not_fetched(ledger: Ledger) -> None:
    found = plan([entry()], ledger, local_view(local()))
    assert found.present == 1 and not found.install


def test_what_lost_there_and_is_here_will_do(ledger: Ledger) -> None:
    """Else two machines would replace each other's bytes for ever."""
    other = stored_record(b"other")
    live = live_of(("bob", other), ("carol", other), ("dave", stored_record()))
    found = plan([stating(live)], ledger, local_view(local()))
    assert found.present == 1 and not found.install


def test_ones_own_bytes_are_kept(ledger: Ledger) -> None:
    found = plan([entry(b"other")], ledger, local_view(local()))
    assert found.kept == 1 and not found.install


def test_bytes_that_a_pull_installed_are_replaced(ledger: Ledger) -> None:
    here = local(b"pulled")
    ledger.note([noted_of(stored_record(b"pulled").statement)])
    assert is_pulled(ledger, here)
    found = plan([entry(b"newer")], ledger, local_view(here))
    assert found.kept == 0 and len(found.install) == 1
    # With bytes of one's own beside them, nothing is.
    found = plan([entry(b"newer")], ledger, local_view(here, local(b"mine")))
    assert found.kept == 1 and not found.install


@pytest.mark.parametrize("field", ["key", "variant"])
def test_another_entry_that_is_here_does_not_count(ledger: Ledger, field: str) -> None:
    other = {"key": "f" + "b" * 51, "variant": digest_of(b"other guards")}[field]
    found = plan([entry()], ledger, local_view(local(**{field: other})))
    assert len(found.install) == 1 and not found.present


def test_needs_are_met_from_here_or_from_what_is_fetched_too(ledger: Ledger) -> None:
    found = plan([needer(), entry(key=OTHER_KEY)], ledger)
    assert [e.statement.key for e in found.install] == [OTHER_KEY]
    assert [e.statement.kind for e in found.needers] == ["aot_autograd"] and not found.missing
    found = plan([needer()], ledger, local_view(local(key=OTHER_KEY)))
    assert len(found.needers) == 1 and not found.missing


@pytest.mark.parametrize("there", [[], [entry(key=OTHER_KEY)], [entry()]])
def test_a_need_that_is_not_to_be_had(ledger: Ledger, there: list[Live]) -> None:
    found = plan([needer(variant=digest_of(b"other guards")), *there], ledger)
    assert not found.needers and len(found.install) == len(there)
    (problem,) = found.missing
    assert problem.reason == "needs" and OTHER_KEY in problem.detail
    assert problem.subject == f"aot_autograd a{'c' * 51}"


def test_a_need_that_does_not_fit_this_machine_is_not_to_be_had(ledger: Ledger) -> None:
    requires = {"python": "3.12"}
    found = plan([needer(), _live(stored_record(key=OTHER_KEY, requires=requires), requires)], ledger)
    assert not found.needers and not found.install
    assert dict(found.incompatible) == {"python": 2} and not found.missing


def test_small_things() -> None:
    view = local_view(local(), local(key=OTHER_KEY))
    assert local_names(view) == {("inductor", KEY, VARIANT), ("inductor", OTHER_KEY, VARIANT)}
    assert lacking_need(needer(), local_names(view)) is None
    assert lacking_need(needer(), set()) == Need(kind="inductor", key=OTHER_KEY, variant=VARIANT)
    assert lacking_need(entry(), set()) is None


def bad(**fields: Any) -> Live:
    """A statement of the same identity as :func:`entry` that no entry of its kind can have."""
    return _unchecked({"files": (File(name="x", size=5),)} | fields)


def test_a_statement_that_breaks_a_rule_hides_none_that_does_not(ledger: Ledger) -> None:
    """It is refused, and the next one takes its place."""
    found = plan([replace(bad(), others=(entry(b"honest"), entry(b"third")))], ledger)
    (taken,) = found.install
    assert taken.statement.digest == digest_of(b"honest")
    assert [other.statement.digest for other in taken.others] == [digest_of(b"third")]
    assert [problem.reason for problem in found.refused] == ["name"]


def test_a_statement_that_breaks_a_rule_is_nothing_to_fall_back_on(ledger: Ledger) -> None:
    found = plan([replace(entry(), others=(bad(), entry(b"good")))], ledger)
    (taken,) = found.install
    assert [other.statement.digest for other in taken.others] == [digest_of(b"good")]
    assert len(found.refused) == 1


def test_what_is_here_counts_only_as_what_could_be_installed(ledger: Ledger) -> None:
    """Bytes that only a refused statement names are one's own."""
    view = local_view(local(b"bad"))
    found = plan([replace(entry(), others=(bad(digest=digest_of(b"bad")),))], ledger, view)
    assert (found.present, found.kept) == (0, 1) and len(found.refused) == 1


def test_a_kernel_that_has_no_name_here_is_nothing_to_fall_back_on(ledger: Ledger) -> None:
    own = entry(
        kind="cpp", key=CPP, variant="", canon="files-1", files=(File(name=f"{CPP}.main.so", size=5),)
    )
    names = (f"{CPP}{suffix}" for suffix in (".main.command", ".main.cpp", ".main.so"))
    files = tuple(File(name=name, size=size) for name, size in zip(names, (1, 1, 3), strict=True))
    renamed = entry(b"moved", kind="cpp", key=CPP, variant="", canon="kernel-command-1", files=files)
    for first, second in ((own, renamed), (renamed, own)):
        found = make_plan([replace(first, others=(second,))], EMPTY, HERE, ledger, has_prefixes=False)
        (taken,) = found.install
        assert taken.statement == own.statement and taken.others == () and not found.incompatible
    found = make_plan([renamed], EMPTY, HERE, ledger, has_prefixes=False)
    assert dict(found.incompatible) == {"install-prefix": 1} and not found.install


def test_needs_are_asked_of_each_statement(ledger: Ledger) -> None:
    """One that names a need that is not to be had hides none whose needs are, nor stands in for it."""
    lacking, complete = needer(digest_of(b"other guards")), needer()
    for first, second in ((lacking, complete), (complete, lacking)):
        found = plan([replace(first, others=(second,)), entry(key=OTHER_KEY)], ledger)
        (taken,) = found.needers
        assert taken.statement == complete.statement and taken.others == () and not found.missing


def test_of_entries_that_differ_only_in_what_they_require_one_is_enough(ledger: Ledger) -> None:
    """Both fit, and both are the same files: a pull that took both would replace them for ever."""
    tables: list[dict[str, str]] = [{"python": "3.11"}, {"python": "3.11", "torch": "2.13.0"}]
    records = [stored_record(b"bytes %d" % n, requires=table) for n, table in enumerate(tables)]
    live = [_live(record, table) for record, table in zip(records, tables, strict=True)]
    for order in (live, live[::-1]):
        found = plan(order, ledger)
        (taken,) = found.install
        assert taken.statement.digest == min(record.statement.digest for record in records)
        assert [o.statement.digest for o in taken.others] == [max(r.statement.digest for r in records)]
        assert found.present == 1
    ledger.note([noted_of(record.statement) for record in records])
    for number in (0, 1):  # whichever was installed, nothing more is to be done
        found = plan(live, ledger, local_view(local(b"bytes %d" % number)))
        assert (found.present, found.kept) == (2, 0) and not found.install
    found = plan(live, ledger, local_view(local(b"mine")))
    assert (found.present, found.kept) == (0, 2) and not found.install


def test_of_them_the_one_with_most_signers_is_taken(ledger: Ledger) -> None:
    tables: list[dict[str, str]] = [{"python": "3.11"}, {"python": "3.11", "torch": "2.13.0"}]
    for signed_twice in (0, 1):
        records = [stored_record(b"bytes %d" % n, requires=table) for n, table in enumerate(tables)]
        live = []
        for number, (record, table) in enumerate(zip(records, tables, strict=True)):
            signers = ["bob", "carol"] if number == signed_twice else ["bob"]
            batches = [accepted(signer, [record], requires=[table]) for signer in signers]
            live += map(stating, union(batches).live.values())
        (taken,) = plan(live, ledger).install
        assert taken.statement == records[signed_twice].statement
