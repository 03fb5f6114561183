# SPDX-License-Identifier: Apache-2.0
"""Objects of the store format as plain dictionaries, and an encoder that shares no code with ours.

Tests change one member and see what a reader makes of it, so the good ones hold every member.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.digest import digest_of

Document = dict[str, Any]

REQUIRES: Document = {"cpu_flags": ["avx2", "avx512f"], "cpu_threads": 8, "python": "cpython-3.11"}


def written(value: Any) -> bytes:
    """Canonical JSON by the standard library."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


REQUIRES_DIGEST = digest_of(written(REQUIRES))

STATEMENT: Document = {
    "canon": "pickle-1/torch-2.13",
    "digest": digest_of(b"plain"),
    "files": [{"name": "a/b.so", "size": 3}, {"name": "a/c", "size": 2}],
    "format": 1,
    "key": "f" + "a" * 51,
    "kind": "inductor",
    "needs": [
        {"key": "x1", "kind": "cpp", "variant": ""},
        {"key": "x0", "kind": "triton", "variant": digest_of(b"variant")},
    ],
    "requires": REQUIRES_DIGEST,
    "size": 5,
    "variant": digest_of(b"variant"),
    "workload": "acme/demo",
}
RECORD: Document = {
    "format": 1,
    "producer": digest_of(b"producer"),
    "provenance": {"commit": "abc"},
    "seq": 3,
    "statement": STATEMENT,
    "stored": {"codec": "zstd", "copy": 0, "digest": digest_of(b"stored"), "size": 14},
    "times": [17564153098, -1],
}
WITHDRAWAL: Document = {
    "digest": "*",
    "key": "k",
    "kind": "inductor",
    "requires": REQUIRES_DIGEST,
    "variant": "",
}
READMISSION: Document = {**WITHDRAWAL, "lifts": digest_of(b"batch")}
HEADER: Document = {
    "environment": digest_of(b"environment"),
    "format": 1,
    "readmit": [READMISSION],
    "records": [digest_of(written(RECORD))],
    "requires": {REQUIRES_DIGEST: REQUIRES},
    "supersedes": [digest_of(b"segment")],
    "type": "batch",
    "withdrawn": [WITHDRAWAL],
    "workload": "acme/demo",
}
SIGNATURE: Document = {"algorithm": "ed25519", "key_id": digest_of(b"key"), "signature": "AAAA"}
PACK: Document = {
    "blobs": [
        {"digest": digest_of(b"1"), "offset": 0, "size": 4},
        {"digest": digest_of(b"2"), "offset": 4, "size": 6},
    ],
    "digest": digest_of(b"pack"),
    "size": 10,
}
CHECKPOINT: Document = {
    "batches": [1],
    "environment": digest_of(b"environment"),
    "format": 1,
    "generation": 7,
    "packs": [PACK],
    "supersedes": [digest_of(b"segment")],
    "type": "checkpoint",
    "workload": "acme/demo",
}
FIRST: Document = {"batches": [1], "format": 1, "type": "segment"}

REMOVED = object()


def changed(document: Document, path: str, value: Any) -> Document:
    """A copy with the member at ``path`` (``a.b.0``) replaced, added, or removed."""
    whole = copy.deepcopy(document)
    *outer, last = path.split(".")
    inner: Any = whole
    for step in outer:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    at: Any = int(last) if isinstance(inner, list) else last
    if value is REMOVED:
        del inner[at]
    else:
        inner[at] = value
    return whole


def segment(*lines: Mapping[str, Any] | bytes) -> bytes:
    """The plain bytes of a segment: these lines, each ended by a line feed."""
    return b"".join((line if isinstance(line, bytes) else written(line)) + b"\n" for line in lines)


def members(document: Any, prefix: str = "") -> Sequence[str]:
    """The paths of all members of all objects in ``document`` but those of open tables."""
    paths: list[str] = []
    if isinstance(document, dict):
        for name, value in document.items():
            paths.append(prefix + name)
            if name not in {"provenance", "requires"} or prefix:
                paths += members(value, f"{prefix}{name}.")
    elif isinstance(document, list):
        for at, value in enumerate(document):
            paths += members(value, f"{prefix}{at}.")
    return paths
