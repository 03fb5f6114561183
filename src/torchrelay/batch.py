# SPDX-License-Identifier: Apache-2.0
"""Batches of records under one signature, and the segments that hold them.

``docs/reference/format.md`` §6 to §9. Pure: bytes in, data out. Whether a signature is *accepted*
is decided in :mod:`torchrelay.signing`; here only the shape is checked.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchrelay import canonjson, frame, limits
from torchrelay.digest import Digest, digest_of, is_digest
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.shared import Shared
from torchrelay.statement import (
    FORMAT,
    MAX_INTEGER,
    Identity,
    Record,
    Wire,
    check_digests,
    check_format,
    check_identity,
    check_integers,
    check_workload,
    encode_record,
    is_blob_name,
    parse_record,
    parse_versioned,
)

FacetValue = str | int | tuple[str, ...]
Requires = Mapping[str, FacetValue]

BATCH_TYPE = "application/vnd.torchrelay.batch.v1"
CHECKPOINT_TYPE = "application/vnd.torchrelay.checkpoint.v1"

_FACET = re.compile(r"[a-z][a-z0-9_]{0,63}")

ANY = "*"
"""In a withdrawal: whatever digest the identity has."""


class Withdrawal(Wire, frozen=True):
    """An identity that no longer counts, with one digest or any."""

    kind: str
    key: str
    variant: str
    requires: Digest
    digest: str

    @property
    def identity(self) -> Identity:
        """The identity withdrawn."""
        return Identity(self.kind, self.key, self.variant, self.requires)


class Readmission(Wire, frozen=True):
    """Lifts the withdrawals of the same identity and digest that stand in the batch ``lifts``."""

    kind: str
    key: str
    variant: str
    requires: Digest
    digest: str
    lifts: Digest

    @property
    def identity(self) -> Identity:
        """The identity readmitted."""
        return Identity(self.kind, self.key, self.variant, self.requires)


class BatchHeader(Wire, frozen=True):
    """What one signature covers: the digest of each record, and what else the signer decides."""

    format: int
    type: Literal["batch"]
    workload: str
    environment: Digest
    records: tuple[Digest, ...]
    requires: dict[str, dict[str, str | int | tuple[str, ...]]]
    withdrawn: tuple[Withdrawal, ...]
    readmit: tuple[Readmission, ...]
    supersedes: tuple[Digest, ...]


class Signature(Wire, frozen=True):
    """One signature: the key's id, the algorithm, and the raw signature in base64."""

    algorithm: str
    key_id: Digest
    signature: str


class PackedBlob(Wire, frozen=True):
    """Where one blob lies in a pack: byte offset and stored size."""

    digest: Digest
    offset: int
    size: int


class Pack(Wire, frozen=True):
    """A pack's digest, size in bytes, and table of blobs."""

    digest: Digest
    size: int
    blobs: tuple[PackedBlob, ...]


class SegmentHeader(Wire, frozen=True):
    """First line of a plain segment: how many record lines each batch has."""

    format: int
    type: Literal["segment"]
    batches: tuple[int, ...]


class CheckpointHeader(Wire, frozen=True):
    """First line of a checkpoint; a signature of its own follows it."""

    format: int
    type: Literal["checkpoint"]
    batches: tuple[int, ...]
    workload: str
    environment: Digest
    generation: int
    supersedes: tuple[Digest, ...]
    packs: tuple[Pack, ...]


class DoomedList(Wire, frozen=True):
    """Names of blobs that a gc is about to delete."""

    format: int
    type: Literal["doomed"]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signed:
    """Bytes and the signature over them; nothing is said of whether it holds."""

    body: bytes
    payload_type: str
    signature: Signature


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as read from a segment.

    Attributes:
        digest: Of the header's bytes; names the batch.
        header: The parsed header.
        signed: The header's bytes with their signature.
        records: Those present, in the header's order, with the digest of their bytes.
    """

    digest: Digest
    header: BatchHeader
    signed: Signed
    records: tuple[tuple[Digest, Record], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One object under ``manifests/``; ``checkpoint`` is None for a plain segment."""

    name: Digest
    batches: tuple[Batch, ...]
    checkpoint: CheckpointHeader | None = None
    checkpoint_signed: Signed | None = None


def pae(payload_type: str, body: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed, so that a type cannot be confused.

    Source: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(body), body)


def encode_requires(requires: Requires) -> tuple[Digest, bytes]:
    """The digest that stands in statements for a table of facets, and the table's bytes."""
    data = canonjson.encode(dict(requires))
    return digest_of(data), data


def encode_header(header: BatchHeader) -> bytes:
    """The bytes that are signed.

    Raises:
        FormatError: The header breaks a rule of the format.
    """
    name = "a batch to be signed"
    _check_header(header, name)
    return _bounded(canonjson.encode(header), limits.MAX_HEADER_BYTES, name)


def encode_checkpoint_header(header: CheckpointHeader) -> bytes:
    """The bytes that are signed, and the first line of the checkpoint.

    Raises:
        FormatError: The header breaks a rule of the format.
    """
    name = "a checkpoint to be signed"
    _counts(header.batches, name)
    _check_checkpoint(header, name)
    return _bounded(canonjson.encode(header), limits.MAX_HEADER_BYTES, name)


def _bounded(data: bytes, limit: int, name: str) -> bytes:
    """``data``, if readers take so much: what nobody could read must not be published."""
    if len(data) > limit:
        raise FormatError(
            f"{name} has {len(data)} bytes, more than the {limit} that readers take",
            remedy="Publish it in several parts.",
            subject=name,
        )
    return data


def encode_segment(header: bytes, signature: Signature, records: Sequence[bytes]) -> bytes:
    """The plain bytes of a segment with one batch.

    Raises:
        FormatError: They are more than readers take.
    """
    first = SegmentHeader(format=FORMAT, type="segment", batches=(len(records),))
    lines = [canonjson.encode(first), header, canonjson.encode(signature), *records]
    return _bounded(b"\n".join(lines) + b"\n", limits.MAX_SEGMENT_BYTES, "a segment")


def encode_checkpoint(
    header: CheckpointHeader,
    signature: Signature,
    batches: Sequence[tuple[bytes, Signature, Sequence[bytes]]],
) -> bytes:
    """The plain bytes of a checkpoint.

    Raises:
        FormatError: They are more than readers take, or the header breaks a rule of the format.
    """
    lines = [encode_checkpoint_header(header), canonjson.encode(signature)]
    for body, signed, records in batches:
        lines += [body, canonjson.encode(signed), *records]
    return _bounded(b"\n".join(lines) + b"\n", limits.MAX_SEGMENT_BYTES, "a checkpoint")


def parse_segment(stored: bytes, *, name: Digest) -> Segment:
    """Parse the object ``manifests/…/<name>``.

    Raises:
        DamagedError: The bytes are not those that the name promises, or not one frame.
        FormatError: A rule of the format is broken, or the format is a newer one.
    """
    label = f"segment {name}"
    if digest_of(stored) != name:
        raise DamagedError(f"{label} does not have the digest that names it", subject=label)
    plain = frame.decompress_bounded(stored, limit=limits.MAX_SEGMENT_BYTES, name=label)
    lines = _Lines(plain, label)
    first = lines.next()
    # Which of the two headers it is, is read from the strict parse: each names its type.
    if b'"type":"checkpoint"' in first:
        return _parse_checkpoint(first, lines, name)
    header = parse_versioned(first, SegmentHeader, name=label, limit=limits.MAX_DOCUMENT_BYTES)
    batches = tuple(_parse_batch(lines, count, whole=True) for count in _counts(header.batches, label))
    lines.end()
    return Segment(name, batches)


def encode_doomed(names: Sequence[str]) -> bytes:
    """The stored bytes of a doomed list.

    Raises:
        FormatError: A name is not a blob's, or there are more than readers take.
    """
    name = "a doomed list"
    doomed = DoomedList(format=FORMAT, type="doomed", names=tuple(sorted(set(names))))
    _check_doomed(doomed, name)
    return frame.compress(_bounded(canonjson.encode(doomed), limits.MAX_SEGMENT_BYTES, name))


def parse_doomed(stored: bytes, *, name: Digest) -> frozenset[str]:
    """The names in the object ``gc/<name>``.

    Raises:
        DamagedError: As :func:`parse_segment`.
    """
    label = f"doomed list {name}"
    if digest_of(stored) != name:
        raise DamagedError(f"{label} does not have the digest that names it", subject=label)
    plain = frame.decompress_bounded(stored, limit=limits.MAX_SEGMENT_BYTES, name=label)
    doomed: DoomedList = parse_versioned(plain, DoomedList, name=label, limit=limits.MAX_SEGMENT_BYTES)
    _check_doomed(doomed, label)
    return frozenset(doomed.names)


def _check_doomed(doomed: DoomedList, name: str) -> None:
    """Only blobs, each once and in order: nobody may get anything else deleted by a planted list."""
    for text in doomed.names:
        if not is_blob_name(text):
            raise FormatError(f"{name} holds {text[:100]!r}, which is no blob", subject=name)
    if any(a >= b for a, b in itertools.pairwise(doomed.names)):
        raise FormatError(f"{name} is not sorted and distinct", subject=name)


class _Lines:
    """The lines of a segment, each canonical JSON; all of them end with a line feed."""

    def __init__(self, plain: bytes, label: str) -> None:
        if not plain.endswith(b"\n"):
            raise FormatError(f"{label} does not end with a line feed", subject=label)
        self.label = label
        self._lines = _split(plain)
        self._number = 0

    def next(self) -> bytes:
        self._number += 1
        line = next(self._lines, None)
        if line is None:
            raise FormatError(f"{self.label} ends before line {self._number}", subject=self.label)
        return line

    @property
    def place(self) -> str:
        return f"{self.label} line {self._number}"

    def end(self) -> None:
        if next(self._lines, None) is not None:
            raise FormatError(f"{self.label} goes on after its last record", subject=self.label)


def _split(plain: bytes) -> Iterator[bytes]:
    """One line at a time: sixty million empty ones must not become as many objects."""
    start = 0
    while start < len(plain):
        end = plain.index(b"\n", start)
        yield plain[start:end]
        start = end + 1


def _parse_checkpoint(first: bytes, lines: _Lines, name: Digest) -> Segment:
    label = lines.label
    header: CheckpointHeader = parse_versioned(
        first, CheckpointHeader, name=label, limit=limits.MAX_HEADER_BYTES
    )
    _check_checkpoint(header, label)
    signed = Signed(first, CHECKPOINT_TYPE, _parse_signature(lines))
    batches = tuple(_parse_batch(lines, count, whole=False) for count in _counts(header.batches, label))
    lines.end()
    return Segment(name, batches, header, signed)


def _check_checkpoint(header: CheckpointHeader, label: str) -> None:
    check_format(header.format, name=label)
    _check_place(header.workload, header.environment, label)
    check_integers((header.generation,), name=label)
    check_digests(header.supersedes, name=label)
    for pack in header.packs:
        _check_pack(pack, label)


def _check_pack(pack: Pack, label: str) -> None:
    check_digests((pack.digest, *(blob.digest for blob in pack.blobs)), name=label)
    check_integers((pack.size, *(n for blob in pack.blobs for n in (blob.offset, blob.size))), name=label)
    end = 0
    for blob in pack.blobs:
        if blob.offset < end or blob.offset + blob.size > pack.size:
            raise FormatError(f"{label} has a pack whose blobs overlap or leave it", subject=label)
        end = blob.offset + blob.size


def _parse_batch(lines: _Lines, count: int, *, whole: bool) -> Batch:
    body = lines.next()
    place = lines.place
    header: BatchHeader = parse_versioned(body, BatchHeader, name=place, limit=limits.MAX_HEADER_BYTES)
    _check_header(header, place)
    signed = Signed(body, BATCH_TYPE, _parse_signature(lines))
    shared = Shared({digest: digest for digest in header.records})
    records = tuple(_parse_line(lines, header, shared) for _ in range(count))
    _check_members(header, [digest for digest, _ in records], place, whole=whole)
    return Batch(digest_of(body), header, signed, records)


def _parse_line(lines: _Lines, header: BatchHeader, shared: Shared) -> tuple[Digest, Record]:
    line = lines.next()
    record = parse_record(line, name=lines.place)
    statement = record.statement
    if statement.workload != header.workload or statement.requires not in header.requires:
        raise FormatError(f"{lines.place} does not belong to its batch", subject=lines.label)
    shared.share(record, "producer", "times")
    shared.share(statement, "canon", "workload", "kind", "variant", "requires", "needs", "files")
    shared.share(record.stored, "codec")
    return shared.one(digest_of(line)), record


def _parse_signature(lines: _Lines) -> Signature:
    signature = canonjson.decode(lines.next(), Signature, name=lines.place, limit=limits.MAX_DOCUMENT_BYTES)
    check_digests((signature.key_id,), name=lines.place)
    return signature


def _check_members(header: BatchHeader, present: list[Digest], place: str, *, whole: bool) -> None:
    """All records in a segment, in a checkpoint those that live; always in the header's order."""
    if whole:
        fine = tuple(present) == header.records
    else:
        listed = iter(header.records)
        fine = all(digest in listed for digest in present)
    if not fine:
        raise FormatError(f"{place} does not list the records that follow it", subject=place)


def _check_header(header: BatchHeader, name: str) -> None:
    check_format(header.format, name=name)
    _check_place(header.workload, header.environment, name)
    if len(header.records) > limits.MAX_RECORDS:
        raise FormatError(f"{name} lists {len(header.records)} records", subject=name)
    if len(set(header.records)) != len(header.records):
        raise FormatError(f"{name} lists a record twice", subject=name)
    check_digests((*header.records, *header.supersedes), name=name)
    for digest, requires in header.requires.items():
        _check_requires(requires, name)
        if encode_requires(requires)[0] != digest:
            raise FormatError(f"{name} has a table of requirements under a wrong digest", subject=name)
    decisions: tuple[Withdrawal | Readmission, ...] = (*header.withdrawn, *header.readmit)
    for item in decisions:
        check_identity(item.kind, item.key, item.variant, name=name)
        check_digests((item.requires,), name=name)
        if item.digest != ANY and not is_digest(item.digest):
            raise FormatError(f"{name} withdraws or readmits no possible digest", subject=name)
    check_digests((item.lifts for item in header.readmit), name=name)


def _check_requires(requires: Requires, name: str) -> None:
    """Names and values as any version may write them; what an unknown facet means is not judged."""
    if not all(map(_FACET.fullmatch, requires)):
        raise FormatError(f"{name} has a facet whose name is not allowed", subject=name)
    numbers = (value for value in requires.values() if isinstance(value, int))
    check_integers(numbers, name=name, least=-MAX_INTEGER)


def _check_place(workload: str, environment: str, name: str) -> None:
    try:
        check_workload(workload)
    except UsageError as exc:
        raise FormatError(f"{name}: {exc.message}", subject=name) from exc
    check_digests((environment,), name=name)


def _counts(counts: tuple[int, ...], label: str) -> tuple[int, ...]:
    check_integers(counts, name=label)
    if sum(counts) > limits.MAX_RECORDS or len(counts) > limits.MAX_RECORDS:
        raise FormatError(f"{label} claims {sum(counts)} records", subject=label)
    return counts


__all__ = [
    "ANY",
    "BATCH_TYPE",
    "CHECKPOINT_TYPE",
    "Batch",
    "BatchHeader",
    "CheckpointHeader",
    "DoomedList",
    "FacetValue",
    "Pack",
    "PackedBlob",
    "Readmission",
    "Requires",
    "Segment",
    "SegmentHeader",
    "Signature",
    "Signed",
    "Withdrawal",
    "encode_checkpoint",
    "encode_checkpoint_header",
    "encode_doomed",
    "encode_header",
    "encode_record",
    "encode_requires",
    "encode_segment",
    "pae",
    "parse_doomed",
    "parse_segment",
]
