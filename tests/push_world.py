# SPDX-License-Identifier: Apache-2.0
"""Builders that push synthetic entries into a store in memory, each with a key and a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from store_samples import local, stored_record
from torchrelay.batch import encode_requires
from torchrelay.caches.base import Entry, Excluded, Reason, Skipped
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalEntry
from torchrelay.digest import Digest, digest_of
from torchrelay.environment import FORMAT, Environment
from torchrelay.reports import PushReport
from torchrelay.signing import Ed25519Signer, Policy, Verifier
from torchrelay.signing.policy import MAINTAINER, WRITER
from torchrelay.statement import Record, Stored
from torchrelay.storage import ObservedBackend
from torchrelay.store.publish import Push, Scope
from torchrelay.store.session import Session
from torchrelay.store.state import ClientState
from torchrelay.store.view import View, load_view
from torchrelay.testing import FaultyBackend
from torchrelay.testing.entries import REQUIRES, TODAY, WORKLOAD, make_segment, trusting
from torchrelay_memory import MemoryBackend
from torchrelay_memory.backend import forget

ENVIRONMENT = Environment(FORMAT, dict(REQUIRES), {})


def empty_store(name: str = "push-world") -> FaultyBackend:
    """A store with nothing in it."""
    forget(name)
    return FaultyBackend(MemoryBackend(name))


@dataclass
class Shelf:
    """The source of a push: entries with their bytes."""

    plains: dict[int, bytes] = field(default_factory=dict)
    items: list[LocalEntry] = field(default_factory=list)
    skipped: Sequence[Skipped] = ()
    changed: set[int] = field(default_factory=set)
    loads: int = 0

    def add(self, plain: bytes, **fields: Any) -> LocalEntry:
        entry = local(plain, **fields)
        self.items.append(entry)
        self.plains[id(entry)] = plain
        return entry

    def load(self, item: LocalEntry) -> Entry:
        self.loads += 1
        if id(item) in self.changed:
            raise Excluded(Reason.GROWING, "changed")
        meta = item.meta
        plain = self.plains[id(item)]
        return Entry(meta.kind, meta.key, meta.variant, meta.needs, meta.facets, meta.canon, plain)


@dataclass
class Builder:
    """Who pushes: a key, whom it trusts, what it has compiled and what it remembers."""

    store: FaultyBackend
    signer: Ed25519Signer = field(default_factory=Ed25519Signer.generate)
    policy: Policy | None = None
    shelf: Shelf = field(default_factory=Shelf)
    state: ClientState = field(default_factory=lambda: ClientState(None))
    ledger: Ledger = field(default_factory=lambda: Ledger(Path("nowhere")))
    workload: str = WORKLOAD

    @property
    def key_id(self) -> Digest:
        return self.signer.public_key.key_id

    def session(self) -> Session:
        policy = self.policy or trusting(self.signer)
        verifier = Verifier(policy, today=TODAY)
        return Session(ObservedBackend(self.store), policy, verifier, self.workload, self.state)

    def push(self, **scope: Any) -> PushReport:
        push = Push(
            self.session(),
            self.shelf,
            environment=ENVIRONMENT,
            signer=self.signer,
            ledger=self.ledger,
            scope=Scope(**scope),
            provenance={},
        )
        return push.run()

    def view(self) -> View:
        return load_view(self.session())

    def planned(self, **scope: Any) -> PushReport:
        return self.push(dry_run=True, **scope)


def builders(count: int, store: FaultyBackend, **settings: Any) -> list[Builder]:
    """Builders who trust each other, as writers and maintainers, with an empty shelf each."""
    made = [Builder(store) for _ in range(count)]
    roles = settings.pop("roles", (WRITER, MAINTAINER))
    policy = trusting(*(b.signer for b in made), settings=settings, roles=roles)
    return [replace(b, policy=policy) for b in made]


def publish_bogus(builder: Builder, plain: bytes, blob: bytes, **fields: Any) -> Record:
    """A true statement of ``plain`` by ``builder``, over a blob that holds something else."""
    record = stored_record(plain, **fields)
    stored = Stored(digest=digest_of(blob), size=len(blob), codec="zstd", copy=0)
    record = msgspec.structs.replace(record, stored=stored, producer=ENVIRONMENT.digest)
    segment = make_segment(builder.signer, [record], environment=ENVIRONMENT.digest)
    builder.store.inner.put(stored.name, blob)
    builder.store.inner.put(f"manifests/{WORKLOAD}/{ENVIRONMENT.digest}/{segment.name}", segment.stored)
    assert encode_requires(REQUIRES)[0] == record.statement.requires
    return record


def blobs(store: FaultyBackend) -> set[str]:
    """Names of the blobs in a store."""
    return {info.name for info in store.inner.list("blobs/")}


def segments(store: FaultyBackend) -> set[str]:
    """Names of the segments in a store."""
    return {info.name for info in store.inner.list("manifests/")}
