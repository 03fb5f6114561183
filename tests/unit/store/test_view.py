# SPDX-License-Identifier: Apache-2.0
"""What a client remembers of a store, and when it says that the store went backwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from push_world import ENVIRONMENT, Builder, builders, empty_store, segments
from torchrelay import frame
from torchrelay.digest import digest_of
from torchrelay.errors import TrustError
from torchrelay.signing import Ed25519Signer
from torchrelay.store.state import ClientState
from torchrelay.testing import FaultyBackend
from torchrelay.testing.entries import WORKLOAD, make_record, make_segment


@pytest.fixture
def store() -> FaultyBackend:
    return empty_store()


@pytest.fixture
def reader(store: FaultyBackend, tmp_path: Path) -> Builder:
    """Somebody who trusts one builder, who has pushed once, and has looked once."""
    (made,) = builders(1, store)
    made.shelf.add(b"plain")
    made.push()
    made.state = ClientState(tmp_path / "state")
    assert made.view().warnings == ()
    return made


def put(store: FaultyBackend, data: bytes, name: str | None = None, folder: str | None = None) -> str:
    folder = folder or ENVIRONMENT.digest
    path = f"manifests/{WORKLOAD}/{folder}/{name or digest_of(data)}"
    store.inner.put(path, data)
    return path


def strangers_segment() -> bytes:
    record, _ = make_record(b"strange")
    return make_segment(Ed25519Signer.generate(), [record], environment=ENVIRONMENT.digest).stored


def test_a_segment_that_counted_and_is_gone_is_an_alarm(store: FaultyBackend, reader: Builder) -> None:
    store.inner.delete_many(list(segments(store)))
    for _ in range(2):
        (warning,) = reader.view().warnings
        assert "1 segments seen before are gone" in warning


@pytest.mark.parametrize("what", ["empty", "junk", "frame", "unknown-key", "copy-in-another-place"])
def test_rubbish_that_was_listed_and_is_deleted_is_none(
    store: FaultyBackend, reader: Builder, what: str
) -> None:
    (honest,) = segments(store)
    names = {
        "empty": lambda: put(store, b"", digest_of(b"x")),
        "junk": lambda: put(store, b"junk"),
        "frame": lambda: put(store, frame.compress(b"junk")),
        "unknown-key": lambda: put(store, strangers_segment()),
        "copy-in-another-place": lambda: put(
            store, store.inner.get(honest, limit=1 << 20), folder=digest_of(b"elsewhere")
        ),
    }
    name = names[what]()
    seen = reader.view()
    assert seen.damaged or seen.refused
    assert reader.state.memory(WORKLOAD).segments == (honest,)
    store.inner.delete_many([name])
    assert reader.view().warnings == ()


def test_who_cannot_sign_cannot_make_a_client_forget(store: FaultyBackend, reader: Builder) -> None:
    (honest,) = segments(store)
    junk = [put(store, b"", digest_of(b"%d" % number)) for number in range(2000)]
    reader.view()
    assert reader.state.memory(WORKLOAD).segments == (honest,)
    store.inner.delete_many([*junk, honest])
    assert reader.view().warnings


def test_a_segment_that_counted_and_is_damaged_now_is_remembered(
    store: FaultyBackend, reader: Builder, tmp_path: Path
) -> None:
    (honest,) = segments(store)
    good = store.inner.get(honest, limit=1 << 20)
    store.inner.put(honest, b"x" * len(good))
    for kept in tmp_path.rglob(honest.rpartition("/")[2]):
        kept.unlink()
    assert reader.view().damaged
    assert reader.state.memory(WORKLOAD).segments == (honest,)
    store.inner.delete_many([honest])
    assert reader.view().warnings


def test_a_policy_may_ask_for_a_generation(store: FaultyBackend) -> None:
    (strict,) = builders(1, store, minimum_generation=(("acme/*", 5), (WORKLOAD, 9)))
    (warning,) = strict.view().warnings
    assert "the policy asks for 9" in warning
    (other,) = builders(1, store, minimum_generation=(("other/*", 5), (WORKLOAD, 0)))
    assert other.view().warnings == ()


@pytest.mark.parametrize("rollback", ["warn", "refuse"])
def test_a_memory_that_cannot_be_read_is_an_alarm(
    store: FaultyBackend, reader: Builder, tmp_path: Path, rollback: str
) -> None:
    (remembered,) = tmp_path.rglob("*.json")
    remembered.write_bytes(b" " * 100)
    if rollback == "refuse":
        (strict,) = builders(1, store, rollback="refuse")
        strict.state = reader.state
        for _ in range(2):
            with pytest.raises(TrustError, match="cannot be read"):
                strict.view()
        return
    (warning,) = reader.view().warnings
    assert "cannot be read" in warning
    assert reader.view().warnings == ()
    assert reader.state.memory(WORKLOAD).segments == tuple(segments(store))
