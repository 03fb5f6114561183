# SPDX-License-Identifier: Apache-2.0
"""What is claimed of one entry: the statement, and the record that one signer makes of it.

``docs/reference/format.md`` §4 and §5. Pure data: everything here is checked against the rules of
the format when it is parsed, so code behind it never sees a hostile name or an absurd number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from torchrelay import canonjson, limits
from torchrelay.digest import Digest, is_digest
from torchrelay.errors import FormatError, UsageError

FORMAT = 1
"""The version of every object that this torchrelay writes, and the highest that it reads."""

CODEC = "zstd"
MAX_INTEGER = canonjson.MAX_INTEGER

_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_KEY = re.compile(r"[\x21-\x7e]+")
_BLOB = re.compile(r"blobs/([0-9a-f]{2})/\1[0-9a-f]{62}(\.[1-9][0-9]{0,15})?")
_CANON = re.compile(r"[a-z0-9][a-z0-9./+-]{0,63}")


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Base of all objects that stand in the store as canonical JSON."""


class File(Wire, frozen=True):
    """One file of an entry: its name below the entry's folder and its size in bytes."""

    name: str
    size: int


class Need(Wire, frozen=True):
    """An entry that another one refers to; any record of it that fits the machine will do."""

    kind: str
    key: str
    variant: str


class Identity(NamedTuple):
    """What tells two entries apart: several may lie under one key."""

    kind: str
    key: str
    variant: str
    requires: str


class Statement(Wire, frozen=True):
    """What is claimed of an entry; equal bytes for independent builders of the same thing."""

    format: int
    canon: str
    workload: str
    kind: str
    key: str
    variant: str
    requires: Digest
    needs: tuple[Need, ...]
    digest: Digest
    size: int
    files: tuple[File, ...]

    @property
    def identity(self) -> Identity:
        """``(kind, key, variant, requires)``."""
        return Identity(self.kind, self.key, self.variant, self.requires)


class Stored(Wire, frozen=True):
    """Where the bytes lie: the blob's digest and size in bytes, and its copy number."""

    digest: Digest
    size: int
    codec: str
    copy: int

    @property
    def name(self) -> str:
        """The blob's object name."""
        return blob_name(self.digest, self.copy)


class Record(Wire, frozen=True):
    """A statement and the claims of one signer."""

    format: int
    statement: Statement
    stored: Stored
    times: tuple[int, ...]
    seq: int
    producer: Digest
    provenance: dict[str, str]


def blob_name(digest: Digest, copy: int = 0) -> str:
    """``blobs/<aa>/<digest>``, with ``.n`` for the n-th copy after a deletion."""
    suffix = f".{copy}" if copy else ""
    return f"blobs/{digest[:2]}/{digest}{suffix}"


def is_blob_name(name: str) -> bool:
    """Whether :func:`blob_name` gives ``name`` for some digest and copy number."""
    return _BLOB.fullmatch(name) is not None


def check_workload(name: str) -> str:
    """``name``, if it is a workload name.

    Components of letters, digits, ``.``, ``_`` and ``-`` that begin with a letter or digit, joined
    by ``/``. So none is ``..`` or hidden; and none may look like a digest, since the digest of the
    environment follows the workload in object names.

    Raises:
        UsageError: It is not.
    """
    fine = len(name) <= limits.MAX_WORKLOAD_CHARS and _WORKLOAD.fullmatch(name)
    if not fine or any(is_digest(part) for part in name.split("/")):
        raise UsageError(
            f"{name[:80]!r} is not a workload name",
            remedy="Use letters, digits, '.', '_' and '-', in parts joined by '/': acme/llama-8b/prod.",
            subject=name[:80],
        )
    return name


def check_file_name(name: str) -> str:
    """``name``, if it can be a file below an entry's folder.

    A relative path of at most eight components, none empty, ``.`` or ``..``, without control
    characters or backslashes, each at most 255 bytes.

    Raises:
        FormatError: It is not.
    """
    parts = name.split("/")
    if len(parts) > 8 or not all(map(_is_component, parts)):
        raise FormatError(f"{name[:80]!r} is not allowed as a file name", subject=name[:80])
    return name


def _is_component(part: str) -> bool:
    if part in ("", ".", "..") or "\\" in part or not part.isprintable():
        return False
    try:
        return len(part.encode()) <= limits.MAX_NAME_CHARS
    except UnicodeEncodeError:
        return False


def encode_record(record: Record) -> bytes:
    """The canonical bytes of ``record``; always a record that :func:`parse_record` accepts.

    Raises:
        FormatError: The record breaks a rule of the format, so it must not be signed.
    """
    name = "a record to be signed"
    _check_record(record, name)
    data = canonjson.encode(record)
    if len(data) > limits.MAX_RECORD_BYTES:
        raise FormatError(f"{name} has {len(data)} bytes, more than readers take", subject=name)
    return data


def parse_record(data: bytes, *, name: str) -> Record:
    """Parse and check one record.

    Law: ``encode_record(parse_record(b)) == b``.

    Raises:
        FormatError: Unknown format version, or any rule of the format broken.
    """
    record: Record = parse_versioned(data, Record, name=name, limit=limits.MAX_RECORD_BYTES)
    _check_record(record, name)
    return record


def statement_bytes(statement: Statement) -> bytes:
    """The bytes that independent builders agree on; a literal part of each of their records."""
    return canonjson.encode(statement)


class _Version(msgspec.Struct):
    format: int


_VERSION = msgspec.json.Decoder(_Version)


def parse_versioned(data: bytes, type_: type[Any], *, name: str, limit: int) -> Any:
    """Parse an object that states its ``format``, and say so if it is a newer one.

    Raises:
        FormatError: As :func:`torchrelay.canonjson.decode`, or the format is not 1.
    """
    try:
        value = canonjson.decode(data, type_, name=name, limit=limit)
    except FormatError:
        _refuse_newer(data[:limit], name)
        raise
    check_format(value.format, name=name)
    return value


def _refuse_newer(data: bytes, name: str) -> None:
    try:
        stated = _VERSION.decode(data).format
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return
    check_format(stated, name=name)


def check_format(stated: int, *, name: str) -> None:
    """``stated`` is the version of the format that this torchrelay reads and writes.

    Raises:
        FormatError: It is not.
    """
    if stated != FORMAT:
        raise FormatError(
            f"{name} is of format {stated}; this torchrelay reads format {FORMAT}", subject=name
        )


def check_integers(values: Iterable[int], *, name: str, least: int = 0) -> None:
    """Each of ``values`` is an integer from ``least`` to 2^53 - 1.

    Raises:
        FormatError: One is not.
    """
    for value in values:
        if not least <= value <= MAX_INTEGER:
            raise FormatError(f"{name} holds the number {value}, out of bounds", subject=name)


def check_digests(values: Iterable[str], *, name: str) -> None:
    """Each of ``values`` is a digest.

    Raises:
        FormatError: One is not.
    """
    for value in values:
        if not is_digest(value):
            raise FormatError(f"{name} holds {value[:80]!r} where a digest must be", subject=name)


def check_identity(kind: str, key: str, variant: str, *, name: str) -> None:
    """The three textual parts of an identity are well formed.

    Raises:
        FormatError: One is not.
    """
    fine = (
        _KIND.fullmatch(kind)
        and len(key) <= limits.MAX_KEY_CHARS
        and _KEY.fullmatch(key)
        and (not variant or is_digest(variant))
    )
    if not fine:
        raise FormatError(f"{name} names no possible entry: {kind[:40]!r}, {key[:80]!r}", subject=name)


def _check_record(record: Record, name: str) -> None:
    check_format(record.format, name=name)
    _check_statement(record.statement, name)
    stored = record.stored
    check_digests((stored.digest, record.producer), name=name)
    check_integers((stored.size, stored.copy, record.seq), name=name)
    check_integers(record.times, name=name, least=-MAX_INTEGER)
    if stored.codec != CODEC:
        raise FormatError(f"{name} uses the unknown codec {stored.codec[:40]!r}", subject=name)
    _check_count(record.times, limits.MAX_TIMES, name)
    _check_count(record.provenance, 32, name)
    if any(len(text) > 1024 for item in record.provenance.items() for text in item):
        raise FormatError(f"{name} has a provenance text of over 1,024 characters", subject=name)
    if not all(member.isascii() for member in record.provenance):
        raise FormatError(f"{name} has a provenance whose name is not ASCII", subject=name)


def _check_statement(statement: Statement, name: str) -> None:
    check_format(statement.format, name=name)
    try:
        check_workload(statement.workload)
    except UsageError as exc:
        raise FormatError(f"{name}: {exc.message}", subject=name) from exc
    check_identity(statement.kind, statement.key, statement.variant, name=name)
    check_digests((statement.requires, statement.digest), name=name)
    if not _CANON.fullmatch(statement.canon):
        raise FormatError(f"{name} has no valid name of a canonical form", subject=name)
    _check_needs(statement.needs, name)
    _check_files(statement, name)


def _check_needs(needs: tuple[Need, ...], name: str) -> None:
    _check_count(needs, limits.MAX_NEEDS, name)
    for need in needs:
        check_identity(need.kind, need.key, need.variant, name=name)
    ordered = sorted({(need.kind, need.key, need.variant) for need in needs})
    if ordered != [(need.kind, need.key, need.variant) for need in needs]:
        raise FormatError(f"{name} has needs that are not sorted and distinct", subject=name)


def _check_files(statement: Statement, name: str) -> None:
    _check_count(statement.files, limits.MAX_FILES, name)
    check_integers((statement.size, *(file.size for file in statement.files)), name=name)
    if statement.size > limits.MAX_ENTRY_BYTES:
        raise FormatError(f"{name} claims an entry of {statement.size} bytes", subject=name)
    try:
        names = {check_file_name(file.name) for file in statement.files}
    except FormatError as exc:
        raise FormatError(f"{name}: {exc.message}", subject=name) from exc
    if len(names) != len(statement.files):
        raise FormatError(f"{name} names a file twice", subject=name)
    if any(folder in names for file in names for folder in _folders(file)):
        raise FormatError(f"{name} has a file that is another one's folder", subject=name)
    if statement.files and sum(file.size for file in statement.files) != statement.size:
        raise FormatError(f"{name} has files whose sizes do not add up to the entry's", subject=name)


def _folders(file: str) -> Iterator[str]:
    parts = file.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _check_count(items: Any, most: int, name: str) -> None:
    if len(items) > most:
        raise FormatError(f"{name} lists {len(items)} items where at most {most} are allowed", subject=name)
