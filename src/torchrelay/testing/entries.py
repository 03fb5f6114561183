# SPDX-License-Identifier: Apache-2.0
"""Signed entries for tests, made the way that a push makes them.

There is no other way to a :class:`~torchrelay.signing.VerifiedEntry`, so tests of what takes one
go through real signatures too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from torchrelay import frame
from torchrelay.batch import BatchHeader, Requires, encode_requires, encode_segment
from torchrelay.digest import Digest, digest_of
from torchrelay.manifest import union
from torchrelay.signing import (
    Ed25519Signer,
    Policy,
    Signer,
    TrustedKey,
    VerifiedEntry,
    Verifier,
    sign_batch,
)
from torchrelay.statement import FORMAT, File, Need, Record, Statement, Stored, encode_record

WORKLOAD = "acme/demo"
ENVIRONMENT = digest_of(b"an environment")
REQUIRES: Requires = {"python": "3.11"}
TODAY = date(2026, 6, 15)


def make_record(
    plain: bytes,
    *,
    kind: str = "inductor",
    key: str = "f" + "a" * 51,
    variant: str = "",
    workload: str = WORKLOAD,
    requires: Requires = REQUIRES,
    needs: tuple[Need, ...] = (),
    files: tuple[File, ...] = (),
    times: tuple[int, ...] = (),
    seq: int = 1,
    canon: str = "raw",
) -> tuple[Record, bytes]:
    """A record of ``plain`` and the blob that it names."""
    stored = frame.compress(plain)
    statement = Statement(
        format=FORMAT,
        canon=canon,
        workload=workload,
        kind=kind,
        key=key,
        variant=variant,
        requires=encode_requires(requires)[0],
        needs=needs,
        digest=digest_of(plain),
        size=len(plain),
        files=files,
    )
    claims = Stored(digest=digest_of(stored), size=len(stored), codec="zstd", copy=0)
    record = Record(
        format=FORMAT,
        statement=statement,
        stored=claims,
        times=times,
        seq=seq,
        producer=ENVIRONMENT,
        provenance={},
    )
    return record, stored


def make_header(
    records: Sequence[Record],
    *,
    workload: str = WORKLOAD,
    environment: Digest = ENVIRONMENT,
    requires: Sequence[Requires] = (REQUIRES,),
    **decisions: Any,
) -> BatchHeader:
    """The header of a batch of ``records``; ``withdrawn``, ``readmit`` and ``supersedes`` as given."""
    return BatchHeader(
        format=FORMAT,
        type="batch",
        workload=workload,
        environment=environment,
        records=tuple(digest_of(encode_record(record)) for record in records),
        requires={encode_requires(table)[0]: dict(table) for table in requires},
        withdrawn=decisions.get("withdrawn", ()),
        readmit=decisions.get("readmit", ()),
        supersedes=decisions.get("supersedes", ()),
    )


@dataclass(frozen=True, slots=True)
class SegmentObject:
    """A segment as it lies in a store."""

    name: Digest
    stored: bytes


def make_segment(signer: Signer, records: Sequence[Record], **header: Any) -> SegmentObject:
    """A segment with one batch of ``records``, signed by ``signer``."""
    body, signature = sign_batch(signer, make_header(records, **header))
    stored = frame.compress(encode_segment(body, signature, [encode_record(record) for record in records]))
    return SegmentObject(digest_of(stored), stored)


def trusting(*signers: Signer, settings: Mapping[str, Any] | None = None, **key: Any) -> Policy:
    """A policy that trusts ``signers``; ``key`` are fields of each, ``settings`` of the policy."""
    keys = tuple(TrustedKey(signer.public_key, **key) for signer in signers)
    return Policy(keys=keys, **(settings or {}))


def verified(plain: bytes, **record: Any) -> VerifiedEntry:
    """``plain`` as it comes out of the choke point; ``record`` as :func:`make_record` takes it."""
    signer = Ed25519Signer.generate()
    made, stored = make_record(plain, **record)
    workload = made.statement.workload
    segment = make_segment(signer, [made], workload=workload, requires=[record.get("requires", REQUIRES)])
    verifier = Verifier(trusting(signer), today=TODAY)
    admission = verifier.admit(segment.stored, name=segment.name, workload=workload, environment=ENVIRONMENT)
    (live,) = union(admission.accepted).live.values()
    return verifier.open(live, stored)
