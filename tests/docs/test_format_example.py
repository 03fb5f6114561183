# SPDX-License-Identifier: Apache-2.0
"""The worked example of the store format holds: every byte of it follows from the key and the rules."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from torchrelay import frame
from torchrelay.batch import parse_segment
from torchrelay.caches.registry import kinds_for
from torchrelay.digest import Digest, digest_of
from torchrelay.environment import parse_environment
from torchrelay.manifest import union
from torchrelay.signing import Ed25519Signer, Verifier
from torchrelay.testing.entries import TODAY, trusting

PAGE = Path(__file__).parents[2] / "docs/reference/format.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## 15. Worked example\n")[2]
BLOCKS = re.findall(r"^```(?:json)?\n(.*?)\n```$", SECTION, re.MULTILINE | re.DOTALL)
(SPKI, KEY_ID, BLOB, TABLE, ENVIRONMENT, RECORD, HEADER, ENCODING, BEGINNING, SIGNATURE, SIGNED, FIRST) = (
    BLOCKS
)
SEED = bytes(range(32))
PLAIN = b"hello, store\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> str:
    """Canonical JSON of ASCII text, by another encoder than the product's."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pae() -> bytes:
    kind, body = b"application/vnd.torchrelay.batch.v1", HEADER.encode()
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(body)).encode(), body])


def segment() -> bytes:
    return "".join(f"{line}\n" for line in (FIRST, HEADER, SIGNED, RECORD)).encode()


def private_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(SEED)


def test_the_key() -> None:
    assert f"`{SEED.hex()}`" in SECTION
    public = private_key().public_key()
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert (der.hex(), sha256(der)) == (SPKI, KEY_ID)


def test_the_blob() -> None:
    assert f"`{PLAIN.hex()}`" in SECTION
    blob = bytes.fromhex(BLOB)
    assert f"the {len(blob)} bytes" in SECTION
    assert f"`blobs/{sha256(blob)[:2]}/{sha256(blob)}`" in SECTION
    assert frame.decompress(blob, size=len(PLAIN), name="the example") == PLAIN


@pytest.mark.parametrize("text", [TABLE, ENVIRONMENT, RECORD, HEADER, SIGNED, FIRST])
def test_json_is_canonical(text: str) -> None:
    assert canonical(json.loads(text)) == text


@pytest.mark.parametrize(
    "data", [TABLE.encode(), ENVIRONMENT.encode(), RECORD.encode(), HEADER.encode(), pae(), segment()]
)
def test_sizes_and_digests_are_stated_of(data: bytes) -> None:
    assert re.search(rf"{len(data)} bytes, with the digest `{sha256(data)}`", SECTION)


def test_each_names_the_other() -> None:
    record, header = json.loads(RECORD), json.loads(HEADER)
    statement, stored = record["statement"], record["stored"]
    assert (statement["digest"], statement["size"]) == (sha256(PLAIN), len(PLAIN))
    assert (stored["digest"], stored["size"]) == (sha256(bytes.fromhex(BLOB)), len(BLOB) // 2)
    assert statement["requires"] == sha256(TABLE.encode())
    assert header["requires"] == {sha256(TABLE.encode()): json.loads(TABLE)}
    assert header["records"] == [sha256(RECORD.encode())]
    assert header["environment"] == record["producer"] == sha256(ENVIRONMENT.encode())


def test_the_encoding_that_is_signed() -> None:
    assert ENCODING.replace("{…the batch header…}", HEADER).encode() == pae()
    beginning = bytes.fromhex(BEGINNING)
    assert beginning + HEADER.encode() == pae()
    assert f"the first {len(beginning)} of them" in SECTION


def test_the_signature() -> None:
    signature = private_key().sign(pae())
    assert signature.hex() == SIGNATURE
    assert json.loads(SIGNED) == {
        "algorithm": "ed25519",
        "key_id": KEY_ID,
        "signature": base64.b64encode(signature).decode(),
    }


def test_a_reader_takes_the_entry() -> None:
    stored = frame.compress(segment())
    found = parse_segment(stored, name=digest_of(stored))
    header = found.batches[0].header
    verifier = Verifier(trusting(Ed25519Signer.of(private_key())), today=TODAY)
    admission = verifier.admit(
        stored, name=found.name, workload=header.workload, environment=header.environment
    )
    (live,) = union(admission.accepted).live.values()
    entry = verifier.open(live, bytes.fromhex(BLOB))
    assert entry.plain == PLAIN and entry.signers == {Digest(KEY_ID)}
    kinds_for(None)[entry.statement.kind].check(entry.statement)
    assert parse_environment(ENVIRONMENT.encode()).encode() == ENVIRONMENT.encode()
