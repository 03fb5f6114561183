# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to what lies in a store: it comes out as it was signed, or not at all.

The attacker of these tests can write to the store and names objects as he likes, so a changed
segment is also tried under the digest of its changed bytes.
"""

from __future__ import annotations

import base64
import gc
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay import frame, limits, manifest
from torchrelay.batch import encode_segment, parse_doomed, parse_segment
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import DamagedError, RelayError, TrustError
from torchrelay.signing import Ed25519Signer, Verifier, parse_policy, parse_public_key, sign_batch
from torchrelay.signing.keyfiles import load_private_key, read_public_key
from torchrelay.signing.trust import first_use, load_policy
from torchrelay.statement import Record, encode_record, parse_record
from torchrelay.testing.entries import (
    ENVIRONMENT,
    TODAY,
    WORKLOAD,
    make_header,
    make_record,
    make_segment,
    trusting,
)

SIGNER = Ed25519Signer.generate()
POLICY = trusting(SIGNER)
PLAIN = bytes(range(256)) * 8
RECORD, BLOB = make_record(PLAIN, times=(5, 6))
OTHER_RECORD, OTHER_BLOB = make_record(PLAIN[::-1], key="f" + "b" * 51)
BODY, SIGNATURE = sign_batch(SIGNER, make_header([RECORD, OTHER_RECORD]))
LINES = [encode_record(RECORD), encode_record(OTHER_RECORD)]
TEXT = encode_segment(BODY, SIGNATURE, LINES)
STORED = frame.compress(TEXT)
NAME = digest_of(STORED)


def bits(data: bytes, step: int = 1) -> list[bytes]:
    """``data`` with one bit flipped, at every ``step``-th byte, each bit of a byte in turn."""
    changed = []
    for position in range(0, len(data), step):
        copy = bytearray(data)
        copy[position] ^= 1 << (position // step) % 8
        changed.append(bytes(copy))
    return changed


def lengths(data: bytes) -> list[bytes]:
    return [b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", data + data, b"\0" * len(data)]


def outcome(stored: bytes, name: Digest) -> list[tuple[Record, bytes]]:
    """Everything that can be got out of a segment, with each of the two blobs tried for each entry."""
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(stored, name=name, workload=WORKLOAD, environment=ENVIRONMENT)
    got = []
    for live in manifest.union(admission.accepted).live.values():
        for blob in (BLOB, OTHER_BLOB):
            try:
                entry = verifier.open(live, blob)
            except DamagedError:
                continue
            got.append((entry.record, entry.plain))
    return got


SIGNED = [(RECORD, PLAIN), (OTHER_RECORD, PLAIN[::-1])]


def test_unchanged_it_comes_out() -> None:
    assert sorted(outcome(STORED, NAME), key=str) == sorted(SIGNED, key=str)


@pytest.mark.parametrize("changed", [bits(STORED), lengths(STORED)], ids=["bits", "lengths"])
def test_a_changed_segment_under_its_old_name_is_damage(changed: list[bytes]) -> None:
    for stored in changed:
        with pytest.raises(DamagedError, match="digest that names it"):
            outcome(stored, NAME)


def test_a_changed_segment_under_a_new_name_is_damage_or_nothing() -> None:
    for stored in [*bits(STORED), *lengths(STORED)]:
        try:
            got = outcome(stored, digest_of(stored))
        except DamagedError:
            continue
        assert all(item in SIGNED for item in got)


def test_changed_lines_under_a_new_name_are_damage_or_refused() -> None:
    refused = damaged = 0
    for text in [*bits(TEXT), *lengths(TEXT)]:
        stored = frame.compress(text)
        try:
            got = outcome(stored, digest_of(stored))
        except DamagedError:
            damaged += 1
            continue
        assert got == []
        refused += 1
    # Bits of the signature are refused; of the rest, what still parses.
    assert refused > 80
    assert damaged > 1000


@pytest.mark.parametrize("blob", [BLOB, OTHER_BLOB], ids=["one", "other"])
def test_a_changed_blob_is_damage(blob: bytes) -> None:
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(STORED, name=NAME, workload=WORKLOAD, environment=ENVIRONMENT)
    (live,) = [
        live
        for live in manifest.union(admission.accepted).live.values()
        if live.vouched[0].record.stored.digest == digest_of(blob)
    ]
    another = OTHER_BLOB if blob is BLOB else BLOB
    for stored in [*bits(blob), *lengths(blob), another, STORED]:
        with pytest.raises(DamagedError) as caught:
            verifier.open(live, stored)
        assert caught.value.subject.startswith("blob blobs/")
        with pytest.raises(DamagedError):
            verifier.open(live, memoryview(stored))
    assert verifier.open(live, memoryview(blob)).plain in (PLAIN, PLAIN[::-1])


def test_a_hundred_megabytes_of_zeros() -> None:
    zeros = bytes(100 * limits.MIB)
    verifier = Verifier(POLICY, today=TODAY)
    with pytest.raises(DamagedError):
        verifier.admit(zeros, name=NAME, workload=WORKLOAD, environment=ENVIRONMENT)
    with pytest.raises(DamagedError):
        verifier.admit(zeros, name=digest_of(zeros), workload=WORKLOAD, environment=ENVIRONMENT)
    admission = verifier.admit(STORED, name=NAME, workload=WORKLOAD, environment=ENVIRONMENT)
    live = next(iter(manifest.union(admission.accepted).live.values()))
    with pytest.raises(DamagedError, match="104857600 bytes where"):
        verifier.open(live, zeros)
    bomb = frame.compress(zeros)
    with pytest.raises(DamagedError, match="inflates to 104857600"):
        verifier.admit(bomb, name=digest_of(bomb), workload=WORKLOAD, environment=ENVIRONMENT)


# --- blobs that were signed, but should not have been


def raw_frame(content: bytes, *, stated: int | None = None, window_log: int = 20) -> bytes:
    """A zstd frame by hand (RFC 8878 §3.1.1): one raw block, any window, any stated size."""
    size = len(content) if stated is None else stated
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    return b"\x28\xb5\x2f\xfd" + bytes([0x80, (window_log - 10) << 3]) + struct.pack("<I", size) + block


def no_size(content: bytes) -> bytes:
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    return b"\x28\xb5\x2f\xfd\x00\x50" + block


def skippable(content: bytes) -> bytes:
    return b"\x50\x2a\x4d\x18" + struct.pack("<I", len(content)) + content


SMALL = b"content" * 10
ZEROS = bytes(50 * limits.MIB)
EVIL_BLOBS = {
    "bomb-that-states-its-size": (frame.compress(ZEROS), SMALL, "states 52428800 plain bytes where 70"),
    "bomb-that-lies": (raw_frame(SMALL * 50, stated=len(SMALL)), SMALL, "cannot be decompressed|not exactly"),
    "states-more-than-it-has": (raw_frame(SMALL[:-1], stated=len(SMALL)), SMALL, "cannot be|not exactly"),
    "two-frames": (frame.compress(SMALL[:35]) + frame.compress(SMALL[35:]), SMALL, "states 35"),
    "same-frame-twice": (frame.compress(SMALL) * 2, SMALL, "not exactly one"),
    "skippable-before": (skippable(b"x") + frame.compress(SMALL), SMALL, "not a zstd frame"),
    "skippable-after": (frame.compress(SMALL) + skippable(b"x"), SMALL, "not exactly one"),
    "only-skippable": (skippable(SMALL), SMALL, "not a zstd frame"),
    "bytes-after": (frame.compress(SMALL) + b"x", SMALL, "not exactly one"),
    "window-128-mib": (raw_frame(SMALL, window_log=27), SMALL, "window of 134217728"),
    "window-16-mib": (raw_frame(SMALL, window_log=24), SMALL, "window of 16777216"),
    "no-size": (no_size(SMALL), SMALL, "does not state"),
    "cut": (frame.compress(SMALL)[:-3], SMALL, "cannot be|not exactly"),
    "not-compressed": (SMALL, SMALL, "not a zstd frame"),
    "empty": (b"", SMALL, "not a zstd frame"),
    "other-content": (frame.compress(SMALL[::-1]), SMALL, "does not hold the bytes"),
}


def open_signed(stored: bytes, plain: bytes) -> bytes:
    record, _ = make_record(plain)
    claims = msgspec.structs.replace(record.stored, digest=digest_of(stored), size=len(stored))
    found = make_segment(SIGNER, [msgspec.structs.replace(record, stored=claims)])
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(found.stored, name=found.name, workload=WORKLOAD, environment=ENVIRONMENT)
    (live,) = manifest.union(admission.accepted).live.values()
    return verifier.open(live, stored).plain


@pytest.mark.parametrize(
    ("stored", "plain", "message"), [pytest.param(*case, id=name) for name, case in EVIL_BLOBS.items()]
)
def test_evil_blobs(stored: bytes, plain: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message) as caught:
        open_signed(stored, plain)
    assert caught.value.subject == f"blob blobs/{digest_of(stored)[:2]}/{digest_of(stored)}"


def test_frames_by_hand_are_fine_where_they_keep_the_rules() -> None:
    assert open_signed(raw_frame(SMALL, window_log=23), SMALL) == SMALL


def test_the_right_blob_among_several_claims_is_taken() -> None:
    by_hand = raw_frame(PLAIN)
    claims = msgspec.structs.replace(RECORD.stored, digest=digest_of(by_hand), size=len(by_hand))
    second = msgspec.structs.replace(RECORD, stored=claims, seq=9, times=(1, 2))
    found = make_segment(SIGNER, [RECORD, second])
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(found.stored, name=found.name, workload=WORKLOAD, environment=ENVIRONMENT)
    (live,) = manifest.union(admission.accepted).live.values()
    assert verifier.open(live, by_hand).record == second
    assert verifier.open(live, BLOB).record == RECORD


# --- a caller that is confused, or worse


def test_a_live_entry_put_together_by_hand_opens_nothing() -> None:
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(STORED, name=NAME, workload=WORKLOAD, environment=ENVIRONMENT)
    good = next(
        live
        for live in manifest.union(admission.accepted).live.values()
        if live.statement == RECORD.statement
    )
    vouched = good.vouched[0]
    evil, evil_blob = make_record(b"evil" * 100)
    swapped = manifest.Vouched(vouched.digest, evil, vouched.batch, vouched.key_id)
    stranger = manifest.Vouched(vouched.digest, vouched.record, vouched.batch, digest_of(b"stranger"))
    for forged in (
        manifest.Live(evil.statement, good.requires, (swapped,), good.signers),
        manifest.Live(evil.statement, good.requires, good.vouched, good.signers),
        manifest.Live(good.statement, good.requires, (), good.signers),
        manifest.Live(good.statement, good.requires, (stranger,), good.signers),
    ):
        for stored in (evil_blob, BLOB):
            with pytest.raises(TrustError):
                verifier.open(forged, stored)
    # The record that was accepted counts, not the one that was handed in.
    mixed = manifest.Live(good.statement, good.requires, (swapped,), good.signers)
    assert verifier.open(mixed, BLOB).record == RECORD
    with pytest.raises(DamagedError):
        verifier.open(mixed, evil_blob)


# --- sign, mutate, verify


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A signed segment's text, and the same text with up to three edits."""
    plains = draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3, unique=True))
    records = [make_record(plain, key=f"f{n:051d}", seq=n)[0] for n, plain in enumerate(plains)]
    body, signature = sign_batch(SIGNER, make_header(records))
    text = encode_segment(body, signature, [encode_record(record) for record in records])
    changed = bytearray(text)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        match draw(st.sampled_from(["set", "insert", "delete", "copy"])):
            case "set":
                changed[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                changed[at:at] = draw(st.binary(min_size=1, max_size=3))
            case "delete":
                del changed[at : at + draw(st.integers(1, 80))]
            case _:
                changed[at:at] = changed[draw(st.integers(0, at)) : at]
    return text, bytes(changed)


@settings(max_examples=300, deadline=None)
@given(edits())
def test_only_what_was_signed_is_ever_accepted(pair: tuple[bytes, bytes]) -> None:
    text, changed = pair
    signed = admitted(text)
    assert signed
    try:
        got = admitted(changed)
    except DamagedError:
        return
    assert got in ([], signed)


def admitted(text: bytes) -> list[tuple[Digest, Record]]:
    stored = frame.compress(text)
    verifier = Verifier(POLICY, today=TODAY)
    admission = verifier.admit(stored, name=digest_of(stored), workload=WORKLOAD, environment=ENVIRONMENT)
    return [pair for item in admission.accepted for pair in item.batch.records]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for stored in (data, frame.compress(data)):
        with pytest.raises(DamagedError):
            outcome(stored, digest_of(stored))


# --- canaries: a pickle is never loaded, whatever it is planted as


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def canaries(path: Path) -> list[bytes]:
    pickles = [pickle.dumps(Canary(path), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [*pickles, *map(base64.b64encode, pickles), *map(frame.compress, pickles)]


def parsers(tmp_path: Path) -> Sequence[Callable[[bytes], object]]:
    config = tmp_path / "config"
    config.mkdir(mode=0o700)

    def planted(data: bytes, name: str) -> Path:
        (config / name).write_bytes(data)
        (config / name).chmod(0o600)
        return config / name

    def text(data: bytes) -> str:
        return data.decode("latin-1")

    return [
        lambda data: parse_segment(data, name=digest_of(data)),
        lambda data: parse_doomed(data, name=digest_of(data)),
        lambda data: parse_record(data, name="x"),
        lambda data: outcome(data, digest_of(data)),
        lambda data: parse_policy(text(data), "x"),
        lambda data: parse_public_key(text(data)),
        lambda data: load_private_key(planted(data, "key.pem")),
        lambda data: read_public_key(str(planted(data, "key.pub"))),
        lambda data: load_policy(planted(data, "trust.toml")),
        lambda data: planted(data, "key.pem") and first_use(config),
    ]


def test_canaries_are_alive(tmp_path: Path) -> None:
    pickle.loads(canaries(tmp_path / "canary")[0])
    assert (tmp_path / "canary").exists()


def test_no_parser_loads_a_pickle(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for parse in parsers(tmp_path):
        for data in canaries(canary):
            with pytest.raises(RelayError):
                parse(data)
    gc.collect()
    assert not canary.exists()


def test_a_signed_pickle_comes_out_as_bytes(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(Canary(canary))
    assert open_signed(frame.compress(data), data) == data
    assert not canary.exists()
