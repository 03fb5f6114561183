# SPDX-License-Identifier: Apache-2.0
"""Verification adds up, and calls a thing the same as a pull does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from push_world import ENVIRONMENT, Builder, blobs, builders, empty_store, segments
from store_samples import local, stored_record
from torchrelay.caches.base import Entry
from torchrelay.caches.cpp import CppKind
from torchrelay.caches.index import Index
from torchrelay.caches.ledger import Ledger, noted_of
from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.digest import digest_of
from torchrelay.errors import DeniedError, NotFoundError, StorageError, TooLargeError, TransientError
from torchrelay.reports import Problem, VerifyReport
from torchrelay.signing import Ed25519Signer
from torchrelay.store.check import verify_local, verify_store
from torchrelay.store.documents import read_environments
from torchrelay.store.layout import environment_name
from torchrelay.store.state import ClientState
from torchrelay.testing import FaultyBackend
from torchrelay.testing.entries import WORKLOAD, make_record, make_segment


@pytest.fixture
def store() -> FaultyBackend:
    return empty_store()


@pytest.fixture
def one(store: FaultyBackend) -> Builder:
    (made,) = builders(1, store)
    made.shelf.add(b"plain")
    made.push()
    return made


def adds_up(report: VerifyReport) -> bool:
    problems = len(report.damaged) + len(report.missing) + len(report.refused)
    return report.checked == report.good + report.unsigned + problems


def stranger(store: FaultyBackend) -> None:
    record, _ = make_record(b"strange")
    segment = make_segment(Ed25519Signer.generate(), [record], environment=ENVIRONMENT.digest)
    store.inner.put(f"manifests/{WORKLOAD}/{ENVIRONMENT.digest}/{segment.name}", segment.stored)


def test_a_good_store(one: Builder) -> None:
    report = verify_store(one.session())
    assert (report.checked, report.good, report.exit_code) == (3, 3, 0)  # segment, environment, blob


def test_a_refused_segment_is_not_good(store: FaultyBackend, one: Builder) -> None:
    stranger(store)
    report = verify_store(one.session())
    assert (report.checked, report.good, len(report.refused)) == (4, 3, 1)


def test_everything_at_once_adds_up(store: FaultyBackend, one: Builder) -> None:
    stranger(store)
    store.inner.put(f"manifests/{WORKLOAD}/{ENVIRONMENT.digest}/{digest_of(b'x')}", b"torn")
    store.inner.put(next(iter(blobs(store))), b"rubbish")
    store.inner.delete_many([environment_name(ENVIRONMENT.digest)])
    report = verify_store(one.session())
    assert (len(report.damaged), len(report.missing), len(report.refused)) == (2, 1, 1)
    assert report.good == 1 and adds_up(report)


@pytest.mark.parametrize(
    ("error", "missing", "reason"),
    [
        (NotFoundError("gone"), True, "absent"),
        (DeniedError("no"), True, "unreadable"),
        (TransientError("timeout"), True, "unreadable"),
        (TooLargeError("long"), False, "damaged"),
    ],
)
@pytest.mark.parametrize("which", ["blobs/*", "environments/*"])
def test_what_cannot_be_had_is_missing_and_what_is_too_long_is_damaged(
    store: FaultyBackend,
    one: Builder,
    tmp_path: Path,
    which: str,
    error: StorageError,
    missing: bool,
    reason: str,
) -> None:
    one.state = ClientState(tmp_path / "state")
    with store:
        store.arm("get", names=which, error=error)
        report = verify_store(one.session())
    (problem,) = report.missing if missing else report.damaged
    assert problem.reason == reason and problem.subject.startswith(which[:-1])
    assert adds_up(report)
    assert len(one.state.marked()) == (0 if missing else 1)


def test_a_document_is_called_the_same(store: FaultyBackend, one: Builder) -> None:
    lost: list[Problem] = []
    store.arm("get", names="environments/*", error=DeniedError("no"))
    assert read_environments(one.session(), [ENVIRONMENT.digest], lost) == {}
    assert [problem.reason for problem in lost] == ["unreadable"]


# --- what is installed


class Reread:
    """A kind that reads an entry's bytes again."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    def read_again(self, found: object) -> list[Entry]:
        return [Entry("cpp", local().meta.key, "", (), ("python",), "raw", self.plain)]


def installed(plain: bytes) -> LocalView:
    entry = local(plain, kind="cpp", variant="")
    view = LocalView({"cpp": Reread(plain)}, Index(Path("nowhere")))  # type: ignore[dict-item]
    view._add(LocalEntry(entry.found, entry.meta))
    return view


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("touched", [True, False])
def test_damage_is_that_bytes_changed_and_not_that_a_signer_is_no_longer_trusted(
    store: FaultyBackend, tmp_path: Path, trusted: bool, touched: bool
) -> None:
    one, other = builders(2, store)
    one.shelf.add(b"plain", kind="cpp", variant="")
    one.push()
    ledger = Ledger(tmp_path)
    tmp_path.chmod(0o700)
    ledger.note([noted_of(stored_record(b"plain", kind="cpp", variant="").statement)])
    policy = one.policy if trusted else replace(other.policy, revoked=frozenset({one.key_id}))  # type: ignore[type-var]
    reader = Builder(store, other.signer, policy)
    report = verify_local(reader.session(), installed(b"changed" if touched else b"plain"), ledger, tmp_path)
    assert CppKind.name == "cpp" and adds_up(report)
    assert len(report.damaged) == (1 if touched else 0)
    assert report.unsigned == (1 if not touched and not trusted else 0)
    assert report.good == (1 if not touched and trusted else 0)
    assert len(report.refused) == (0 if trusted else 1)
    assert segments(store)
