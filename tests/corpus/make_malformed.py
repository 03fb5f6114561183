# SPDX-License-Identifier: Apache-2.0
"""Writes ``malformed/``: objects that break one rule each; a file's name says how.

``python make_malformed.py`` from this folder, with ``tests`` and ``src`` on the path. The files are
committed, so that another implementation can be held against them.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from format_samples import CHECKPOINT, FIRST, HEADER, RECORD, SIGNATURE, changed, segment, written
from torchrelay import frame
from torchrelay.digest import digest_of
from torchrelay.statement import blob_name

SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00evil"


def _raw_frame(content: bytes, *, stated: int | None = None, window: int = 0x50) -> bytes:
    size = len(content) if stated is None else stated
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    return b"\x28\xb5\x2f\xfd" + bytes([0x80, window]) + struct.pack("<I", size) + block


def _bomb(stated: int) -> bytes:
    """A gibibyte of zeros in 32 KiB."""
    repeated = struct.pack("<I", 131072 << 3 | 2)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd\x80\x50" + struct.pack("<I", stated) + repeated * 8192


def _batch(record: Any = RECORD, header: Any = None) -> bytes:
    header = header or changed(HEADER, "records", [digest_of(written(record))])
    return segment(FIRST, header, SIGNATURE, record)


def _doomed(*names: str, **changes: Any) -> bytes:
    return written({"format": 1, "names": list(names), "type": "doomed", **changes})


def _record(path: str, value: Any) -> bytes:
    return _batch(changed(RECORD, path, value))


def _one_file(name: str) -> bytes:
    return _record("statement.files", [{"name": name, "size": 5}])


GOOD = _batch()
BLOB = blob_name(digest_of(b"x"))
FRAMES = {
    "segment-empty": b"",
    "segment-not-compressed": GOOD,
    "segment-two-frames": frame.compress(GOOD) * 2,
    "segment-skippable-frame-before": SKIPPABLE + frame.compress(GOOD),
    "segment-skippable-frame-after": frame.compress(GOOD) + SKIPPABLE,
    "segment-line-feed-after": frame.compress(GOOD) + b"\n",
    "segment-cut": frame.compress(GOOD)[:-1],
    "segment-window-128-mib": _raw_frame(GOOD, window=17 << 3),
    "segment-states-a-byte-less": _raw_frame(GOOD, stated=len(GOOD) - 1),
    "segment-states-a-byte-more": _raw_frame(GOOD, stated=len(GOOD) + 1),
    "segment-bomb": _bomb(1 << 30),
    "segment-bomb-that-lies": _bomb(1000),
}
PLAIN = {
    "segment-newer-format": segment({**FIRST, "format": 2, "new": 1}),
    "segment-without-last-line-feed": GOOD[:-1],
    "segment-crlf": GOOD.replace(b"\n", b"\r\n"),
    "segment-byte-order-mark": b"\xef\xbb\xbf" + GOOD,
    "segment-smuggled-line": GOOD + written(changed(RECORD, "seq", 9)) + b"\n",
    "segment-million-levels": b"[" * 1_000_000 + b"\n",
    "segment-hundred-million-records": segment({**FIRST, "batches": [100_000_000]}, HEADER, SIGNATURE),
    "segment-record-twice": segment({**FIRST, "batches": [2]}, HEADER, SIGNATURE, RECORD, RECORD),
    "segment-record-not-listed": _batch(changed(RECORD, "seq", 9), HEADER),
    "header-duplicate-member": segment(
        FIRST, written(HEADER).replace(b'"type":', b'"type":"batch","type":'), SIGNATURE, RECORD
    ),
    "header-unknown-member": _batch(header={**HEADER, "trusted": True}),
    "header-false-requires": _batch(
        header={**HEADER, "requires": {next(iter(HEADER["requires"])): {"python": "any"}}}
    ),
    "header-dot-dot-workload": _batch(header={**HEADER, "workload": "acme/../other"}),
    "header-digest-as-workload": _batch(header={**HEADER, "workload": digest_of(b"x")}),
    "checkpoint-negative-generation": segment(
        {**CHECKPOINT, "generation": -1}, SIGNATURE, HEADER, SIGNATURE, RECORD
    ),
    "checkpoint-overlapping-pack": segment(
        changed(CHECKPOINT, "packs.0.blobs.1.offset", 3), SIGNATURE, HEADER, SIGNATURE, RECORD
    ),
    "checkpoint-unsigned": segment(CHECKPOINT, HEADER, SIGNATURE, RECORD),
    "record-file-dot-dot": _one_file("../../.ssh/authorized_keys"),
    "record-file-absolute": _one_file("/etc/passwd"),
    "record-file-nul": _one_file("a\0b"),
    "record-file-backslash": _one_file("..\\x"),
    "record-file-right-to-left": _one_file("a\u202eb"),
    "record-file-300-characters": _one_file("a" * 300),
    "record-file-is-a-folder": _record(
        "statement.files", [{"name": "a", "size": 5}, {"name": "a/b", "size": 0}]
    ),
    "record-file-twice": _record("statement.files", [{"name": "a", "size": 5}, {"name": "a", "size": 0}]),
    "record-sizes-do-not-add-up": _record("statement.size", 6),
    "record-number-beyond-2-53": _record("seq", 2**53),
    "record-float": _record("seq", 1.0),
    "record-other-codec": _record("stored.codec", "none"),
    "record-blob-outside": _record("stored.digest", "../" + digest_of(b"x")[3:]),
    "record-key-with-line-feed": _record("statement.key", "a\nb"),
    "record-lone-surrogate": segment(
        FIRST,
        HEADER,
        SIGNATURE,
        written(changed(RECORD, "provenance", {"a": "X"})).replace(b'"X"', b'"\\ud800"'),
    ),
    "doomed-manifest": _doomed(f"manifests/acme/{digest_of(b'x')}/{digest_of(b'x')}"),
    "doomed-outside": _doomed("../outside"),
    "doomed-twice": _doomed(BLOB, BLOB),
    "doomed-newer-format": _doomed(BLOB, format=2),
}


def make(folder: Path) -> None:
    """Write all of them into ``folder``."""
    objects = FRAMES | {name: frame.compress(plain) for name, plain in PLAIN.items()}
    for name, stored in objects.items():
        (folder / name).write_bytes(stored)


if __name__ == "__main__":
    make(Path(__file__).parent / "malformed")
