# SPDX-License-Identifier: Apache-2.0
"""Writes ``golden/format-1``: a small store of format 1, which every later version must read.

It was run once. The store is never written again: a new version that would write other bytes (a newer
zstd does) must still read these. ``python make_golden.py FOLDER`` writes it elsewhere, to look at.

THE KEYS BELOW ARE TEST KEYS. Their private halves are published here; never trust them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from torchrelay import frame
from torchrelay.batch import (
    BatchHeader,
    CheckpointHeader,
    Pack,
    PackedBlob,
    Readmission,
    Withdrawal,
    encode_checkpoint,
    encode_doomed,
    encode_requires,
    encode_segment,
)
from torchrelay.digest import Digest, digest_of
from torchrelay.environment import Environment
from torchrelay.signing import Ed25519Signer, Policy, TrustedKey, sign_batch, sign_checkpoint
from torchrelay.signing.policy import dump_policy
from torchrelay.statement import File, Need, Record, Statement, Stored, blob_name, encode_record

WORKLOAD = "acme/golden"


def _test_key(text: bytes) -> Ed25519Signer:
    return Ed25519Signer.of(Ed25519PrivateKey.from_private_bytes(text))


WRITER = _test_key(b"TEST KEY of a writer, not secret")
SECOND = _test_key(b"TEST KEY of another, not secret!")
MAINTAINER = _test_key(b"TEST KEY of maintainer, public!!")

POLICY = Policy(
    (
        TrustedKey(WRITER.public_key, "TEST writer", ("writer",), ("acme/*",)),
        TrustedKey(SECOND.public_key, "TEST second writer", ("writer",), ("acme/*",)),
        TrustedKey(MAINTAINER.public_key, "TEST maintainer", ("writer", "maintainer"), ("acme/**",)),
    )
)

FACETS: dict[str, Any] = {
    "cpu_flags": ("avx2", "avx512f"),
    "cpu_isa": "AVX512",
    "cpu_threads": 8,
    "glibc": "2.35",
    "machine": "x86_64",
    "python": "cpython-3.11",
    "torch": "2.13.0+cpu",
}
ENVIRONMENTS = [
    Environment(1, FACETS, {"cpp_compiler": "g++ 12.2 \u00e9"}),
    Environment(1, {**FACETS, "cpu_flags": ("avx2",), "cpu_isa": "AVX2"}, {}),
]
PICKLE: dict[str, Any] = {"python": "cpython-3.11", "torch": "2.13.0+cpu"}
CPP: dict[str, Any] = {
    "cpu_flags": ("avx2", "avx512f"),
    "cpu_threads": 8,
    "glibc": "2.35",
    "machine": "x86_64",
}


@dataclass
class _Store:
    root: Path
    written: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.written[name] = data

    def record(
        self,
        kind: str,
        key: str,
        plain: bytes,
        requires: dict[str, Any],
        *,
        seq: int,
        environment: int = 0,
        variant: str = "",
        files: Sequence[tuple[str, int]] = (),
        needs: tuple[Need, ...] = (),
        canon: str = "raw",
        times: tuple[int, ...] = (),
        copy: int = 0,
        provenance: dict[str, str] | None = None,
    ) -> Record:
        stored = frame.compress(plain)
        claims = Stored(digest=digest_of(stored), size=len(stored), codec="zstd", copy=copy)
        self.put(claims.name, stored)
        statement = Statement(
            format=1,
            canon=canon,
            workload=WORKLOAD,
            kind=kind,
            key=key,
            variant=variant,
            requires=encode_requires(requires)[0],
            needs=needs,
            digest=digest_of(plain),
            size=len(plain),
            files=tuple(File(name=name, size=size) for name, size in files),
        )
        return Record(
            format=1,
            statement=statement,
            stored=claims,
            times=times,
            seq=seq,
            producer=ENVIRONMENTS[environment].digest,
            provenance=provenance or {},
        )

    def batch(
        self, signer: Ed25519Signer, records: Sequence[Record], *, environment: int = 0, **decisions: Any
    ) -> tuple[bytes, Any, list[bytes]]:
        lines = [encode_record(record) for record in records]
        header = BatchHeader(
            format=1,
            type="batch",
            workload=WORKLOAD,
            environment=ENVIRONMENTS[environment].digest,
            records=tuple(map(digest_of, lines)),
            requires={encode_requires(table)[0]: table for table in (PICKLE, CPP)},
            withdrawn=decisions.get("withdrawn", ()),
            readmit=decisions.get("readmit", ()),
            supersedes=decisions.get("supersedes", ()),
        )
        body, signature = sign_batch(signer, header)
        return body, signature, lines

    def segment(self, batch: tuple[bytes, Any, list[bytes]], environment: int = 0) -> Digest:
        return self._manifest(encode_segment(*batch), environment)

    def _manifest(self, plain: bytes, environment: int) -> Digest:
        stored = frame.compress(plain)
        name = digest_of(stored)
        self.put(f"manifests/{WORKLOAD}/{ENVIRONMENTS[environment].digest}/{name}", stored)
        return name

    def checkpoint(
        self,
        batches: Sequence[tuple[bytes, Any, list[bytes]]],
        packs: tuple[Pack, ...],
        supersedes: tuple[Digest, ...],
    ) -> Digest:
        header = CheckpointHeader(
            format=1,
            type="checkpoint",
            batches=tuple(len(lines) for _, _, lines in batches),
            workload=WORKLOAD,
            environment=ENVIRONMENTS[0].digest,
            generation=7,
            supersedes=supersedes,
            packs=packs,
        )
        _, signature = sign_checkpoint(MAINTAINER, header)
        return self._manifest(encode_checkpoint(header, signature, batches), 0)

    def pack(self, records: Sequence[Record]) -> Pack:
        blobs, data = [], b""
        for record in records:
            stored = self.written[record.stored.name]
            blobs.append(PackedBlob(digest=record.stored.digest, offset=len(data), size=len(stored)))
            data += stored
        self.put(f"packs/{digest_of(data)}", data)
        return Pack(digest=digest_of(data), size=len(data), blobs=tuple(blobs))


def _withdrawal(of: Record, digest: str) -> Withdrawal:
    statement = of.statement
    return Withdrawal(
        kind=statement.kind,
        key=statement.key,
        variant=statement.variant,
        requires=statement.requires,
        digest=digest,
    )


def _readmission(of: Withdrawal, lifts: bytes) -> Readmission:
    names = ("kind", "key", "variant", "requires", "digest")
    return Readmission(**{name: getattr(of, name) for name in names}, lifts=digest_of(lifts))


def make(root: Path) -> None:
    """Write the store below ``root``."""
    store = _Store(root)
    for environment in ENVIRONMENTS:
        store.put(f"environments/{environment.digest}", environment.encode())
    guards = digest_of(b"guards")
    cpp = store.record(
        "cpp",
        "c" + "ab2" * 17,
        b"int main;" + b"\x7fELF" + b"1",
        CPP,
        seq=1,
        files=((f"c{'ab2' * 17}.main.cpp", 9), (f"c{'ab2' * 17}.main.so", 4), (f"c{'ab2' * 17}_p", 1)),
        provenance={"commit": "0123abc", "job": "nightly \u2713"},
    )
    graph = store.record(
        "inductor",
        "f" + "g" * 51,
        b"\x80\x04canonical pickle of a graph" * 20,
        PICKLE,
        seq=1,
        variant=guards,
        needs=(Need(kind="cpp", key=cpp.statement.key, variant=""),),
        canon="pickle-1/torch-2.13",
        times=(17564153098, 0, -5),
    )
    same = store.record(
        "inductor",
        "f" + "g" * 51,
        b"\x80\x04canonical pickle of a graph" * 20,
        PICKLE,
        seq=2,
        environment=1,
        variant=guards,
        needs=graph.statement.needs,
        canon="pickle-1/torch-2.13",
    )
    bad = store.record("inductor", "f" + "b" * 51, b"withdrawn for good", PICKLE, seq=1)
    back = store.record("aot_autograd", "a" + "c" * 51, b"withdrawn and readmitted", PICKLE, seq=1)
    old = store.record("pgo", "job_None_tag", b"shapes seen at first", PICKLE, seq=1)
    new = store.record("pgo", "job_None_tag", b"shapes seen later", PICKLE, seq=3)
    future = store.record("future_kind", "any/key~", b"of a kind that is not known", PICKLE, seq=3, copy=2)
    one = store.record("autotune", "ab/" + "0" * 64 + ".best_config", b"{}", PICKLE, seq=2)
    two = store.record("autotune", "ab/" + "0" * 64 + ".best_config", b"{ }", PICKLE, seq=3, environment=1)
    empty = store.record("tree", "root/empty", b"", PICKLE, seq=3, files=(("sub/\u00e9mpty", 0),))

    first = store.batch(WRITER, [cpp, graph, bad, back, old])
    second = store.batch(SECOND, [same, two], environment=1)
    gone = (_withdrawal(bad, bad.statement.digest), _withdrawal(back, "*"))
    withdrawing = store.batch(MAINTAINER, [], withdrawn=gone)
    names = [store.segment(first), store.segment(withdrawing)]
    store.segment(second, 1)
    pack = store.pack([cpp, graph])
    body, signature, lines = first
    store.checkpoint(
        [(body, signature, [lines[at] for at in (0, 1, 3, 4)]), withdrawing], (pack,), tuple(names)
    )
    store.segment(store.batch(MAINTAINER, [], readmit=(_readmission(gone[1], withdrawing[0]),)))
    store.segment(store.batch(WRITER, [new, future, one, empty], supersedes=(names[0],)))
    store.put(
        f"gc/{digest_of(doomed := encode_doomed([bad.stored.name, blob_name(digest_of(b'x'), 1)]))}", doomed
    )
    (root / "trust.toml").write_text(dump_policy(POLICY), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
