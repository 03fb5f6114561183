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
from torchrelay.environment import Environment
from torchrelay.manifest import Live, union
from torchrelay.statement import File, Need
from torchrelay.store.plan import UNKNOWN_KIND, Plan, is_pulled, lacking_need, local_names, make_plan
from union_samples import accepted

HERE = Environment(1, {"python": "3.11", "torch": "2.13.0", "machine": "x86_64"}, {})
EMPTY = local_view()
CPP = "c" + "ab2" * 17
OTHER_KEY = "f" + "b" * 51


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path)


def entry(plain: bytes = b"plain", signer: str = "bob", **fields: Any) -> Live:
    return live_of((signer, stored_record(plain, **fields)))


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
        ({"gpu_name": "H200"}, "gpu_name"),
        ({"facet_of_the_future": "x"}, "facet_of_the_future"),
    ],
)
def test_what_does_not_fit_is_counted_by_facet(ledger: Ledger, requires: dict[str, str], facet: str) -> None:
    records = [stored_record(key=key, requires=requires) for key in (KEY, OTHER_KEY)]
    found = make_plan([_live(record, requires) for record in records], EMPTY, HERE, ledger)
    assert dict(found.incompatible) == {facet: 2} and not found.install and not found.refused


def _live(record: Any, requires: dict[str, str]) -> Live:

    (live,) = union([accepted("bob", [record], requires=[requires])]).live.values()
    return live


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
    found = plan([live], ledger, local_view(local()))
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
