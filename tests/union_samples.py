# SPDX-License-Identifier: Apache-2.0
"""Accepted batches for tests of the union, which never looks at a signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrelay.batch import BATCH_TYPE, Batch, Readmission, Signature, Signed, Withdrawal, encode_header
from torchrelay.digest import Digest, digest_of
from torchrelay.manifest import Accepted
from torchrelay.statement import Record, encode_record
from torchrelay.testing.entries import make_header, make_record


def key_id(name: str) -> Digest:
    return digest_of(b"key " + name.encode())


def record(plain: bytes = b"plain", *, entry: str = "a", seq: int = 1, **fields: Any) -> Record:
    """A record of ``plain`` under the key that ``entry`` gives."""
    return make_record(plain, key="f" + entry * 51, seq=seq, **fields)[0]


def accepted(
    signer: str,
    records: Sequence[Record] = (),
    *,
    maintainer: bool = False,
    present: Sequence[Record] | None = None,
    segment: str = "segment",
    **decisions: Any,
) -> Accepted:
    """A batch by ``signer``; of its records those in ``present`` are there, as in a checkpoint."""
    header = make_header(records, **decisions)
    body = encode_header(header)
    lines = tuple((digest_of(encode_record(r)), r) for r in (records if present is None else present))
    signature = Signature(algorithm="ed25519", key_id=key_id(signer), signature="")
    batch = Batch(digest_of(body), header, Signed(body, BATCH_TYPE, signature), lines)
    return Accepted(batch, digest_of(segment.encode()), key_id(signer), maintainer)


def withdrawal(of: Record, digest: str | None = None) -> Withdrawal:
    statement = of.statement
    return Withdrawal(
        kind=statement.kind,
        key=statement.key,
        variant=statement.variant,
        requires=statement.requires,
        digest=statement.digest if digest is None else digest,
    )


def readmission(of: Withdrawal, lifts: Accepted) -> Readmission:
    return Readmission(
        kind=of.kind,
        key=of.key,
        variant=of.variant,
        requires=of.requires,
        digest=of.digest,
        lifts=lifts.batch.digest,
    )
