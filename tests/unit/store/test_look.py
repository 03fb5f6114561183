# SPDX-License-Identifier: Apache-2.0
"""Comparing a workload with local caches: what is the same entry is not called different."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from push_world import ENVIRONMENT, Builder, builders, empty_store
from store_samples import local, local_view
from torchrelay.batch import encode_requires
from torchrelay.caches.base import Alias
from torchrelay.caches.local import LocalEntry
from torchrelay.digest import digest_of
from torchrelay.reports import DiffReport
from torchrelay.signing import Ed25519Signer
from torchrelay.statement import Need
from torchrelay.store.look import diff_local, explain_entries, list_entries
from torchrelay.testing import FaultyBackend
from torchrelay.testing.entries import REQUIRES, WORKLOAD, make_record, make_segment

REQUIRED = {tuple(sorted(REQUIRES)): encode_requires(REQUIRES)[0]}


@pytest.fixture
def store() -> FaultyBackend:
    return empty_store()


@pytest.fixture
def one(store: FaultyBackend) -> Builder:
    (made,) = builders(1, store)
    made.shelf.add(b"plain")
    made.push()
    return made


def diff(reader: Builder, *entries: LocalEntry) -> DiffReport:
    return diff_local(reader.session(), local_view(*entries), REQUIRED)


def counts(report: DiffReport) -> tuple[int, int, int, int]:
    return report.same, len(report.only_left), len(report.only_right), len(report.differing)


@pytest.mark.parametrize("turn", [1, -1])
def test_one_of_two_local_entries_under_an_identity_is_enough(one: Builder, turn: int) -> None:
    entries = [local(b"plain"), local(b"other")][::turn]
    assert counts(diff(one, *entries)) == (1, 0, 0, 0)
    assert counts(diff(one, local(b"other"))) == (0, 0, 0, 1)


def aliased(plain: bytes, key: str, digest: str) -> LocalEntry:
    entry = local(plain, key=key)
    alias = Alias(local().meta.key, "raw", digest_of(digest.encode()))
    return replace(entry, meta=msgspec.structs.replace(entry.meta, alias=alias))


def test_an_entry_in_another_form_is_the_same_entry(one: Builder) -> None:
    assert counts(diff(one, aliased(b"own form", "f" + "b" * 51, "plain"))) == (1, 0, 0, 0)
    assert counts(diff(one, aliased(b"own form", "f" + "b" * 51, "other"))) == (0, 0, 0, 1)


def test_what_is_on_no_side_is_told(store: FaultyBackend, one: Builder) -> None:
    record, _ = make_record(b"strange")
    segment = make_segment(Ed25519Signer.generate(), [record], environment=ENVIRONMENT.digest)
    folder = f"manifests/{WORKLOAD}/{ENVIRONMENT.digest}"
    store.inner.put(f"{folder}/{segment.name}", segment.stored)
    store.inner.put(f"{folder}/{digest_of(b'x')}", b"torn")
    report = diff(one, local(b"plain"))
    assert counts(report) == (1, 0, 0, 0)
    assert (len(report.refused), len(report.damaged)) == (1, 1)


@pytest.mark.parametrize(("graph", "fit"), [("2.36", True), ("9.99", False)])
def test_what_needs_a_graph_of_another_machine_does_not_fit_either(
    store: FaultyBackend, one: Builder, graph: str, fit: bool
) -> None:
    """As a pull sees it: without the graph it would never be a hit."""
    name, here = "f" + "b" * 51, {**REQUIRES, "glibc": "2.36"}
    there = {**REQUIRES, "glibc": graph}
    need = Need(kind="inductor", key=name, variant="")
    records = [
        make_record(b"graph", key=name, requires=there)[0],
        make_record(b"entry", kind="aot_autograd", key="a" + "b" * 51, needs=(need,))[0],
    ]
    segment = make_segment(one.signer, records, environment=ENVIRONMENT.digest, requires=[REQUIRES, there])
    store.inner.put(f"manifests/{WORKLOAD}/{ENVIRONMENT.digest}/{segment.name}", segment.stored)
    environment = msgspec.structs.replace(ENVIRONMENT, facets=here)

    groups = explain_entries(one.session(), "a" + "b" * 51, environment, ()).groups
    assert [(group.kinds, group.fits) for group in groups] == [({"aot_autograd": 1}, fit)]
    assert (groups[0].facets[0].facet == "needs") is not fit
    listed = list_entries(one.session(), environment).entries
    assert {e.kind: e.fits for e in listed if e.key.endswith("b" * 51)} == {
        "inductor": fit,
        "aot_autograd": fit,
    }
