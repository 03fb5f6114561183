# SPDX-License-Identifier: Apache-2.0
"""What the kinds share whose entries PyTorch wrote as pickles or as JSON of its own.

Nothing here unpickles. What an entry says of itself comes from the walk of
:mod:`torchrelay.canonical`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchrelay import canonical
from torchrelay.caches.base import Excluded, FileStat, Found, Reason, Skipped
from torchrelay.canonical.fields import RAW, parse_canon
from torchrelay.canonical.secrets import first_secret
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError, SecretError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import Statement

INDUCTOR_PLACE = "inductor"
"""The place of everything below ``TORCHINDUCTOR_CACHE_DIR``."""

CONTENT_NAME = re.compile(r"[a-z2-7]{51}")
"""What :func:`content_name` gives."""

_HOST_DEVICES = frozenset({"cpu", "meta"})


def content_name(data: bytes) -> str:
    """The file name that PyTorch gives to an entry with this content (``codecache.sha256_hash``)."""
    return base64.b32encode(hashlib.sha256(data).digest()).decode("ascii")[:51].lower()


def canonical_form(
    kind: str, data: bytes, *, torch_version: str | None, search: bool = True
) -> canonical.Canonical:
    """The canonical form of what PyTorch wrote; ``search`` as :func:`torchrelay.canonical.canonicalise`.

    Raises:
        Excluded: ``UNPARSEABLE``: it is not one whole pickle; ``SECRET``: it holds one, or a dump of
            environment variables elsewhere than where it is known that such an entry keeps them.
    """
    try:
        return canonical.canonicalise(kind, data, torch_version=torch_version, search=search)
    except SecretError as exc:
        raise Excluded(Reason.SECRET, f"{exc.secret_kind} in {exc.field}") from exc
    except FormatError as exc:
        raise Excluded(Reason.UNPARSEABLE, exc.message) from exc


def restored(entry: VerifiedEntry) -> bytes:
    """The bytes to install: what was masked is put back.

    Raises:
        DamagedError: The bytes are not in the form, or not the variant, that the statement names.
    """
    statement = entry.statement
    name = f"{statement.kind} {statement.key}"
    try:
        data, facts = canonical.restore_and_read(
            statement.kind, entry.plain, canon=statement.canon, times=entry.record.times
        )
    except FormatError as exc:
        raise DamagedError(f"{name}: {exc.message}", subject=name) from exc
    # A variant that is not the content's would stand beside the true one, and never be found here.
    if facts is not None and canonical.variant(statement.kind, facts, statement.digest) != statement.variant:
        raise DamagedError(f"{name} is of another variant than its signer states", subject=name)
    return data


def refuse_secrets(texts: Iterable[str], where: str) -> None:
    """Leave out what holds a text that looks like a secret.

    Raises:
        Excluded: ``SECRET``; the detail names the kind, never the value.
    """
    hit = first_secret([text.encode("utf-8", "surrogatepass") for text in texts])
    if hit is not None:
        raise Excluded(Reason.SECRET, f"{hit[1]} in {where}")


def graph_facets(facts: canonical.Facts) -> tuple[str, ...]:
    """The facets that the compiled graphs in an entry need, by what they are made of.

    What cannot be read is taken to need everything that a graph can need.
    """
    gpu = facts.has_triton_bundle or not _HOST_DEVICES.issuperset(facts.device_types)
    sort = "inductor"
    if facts.has_cpp or not facts.readable:
        sort += "+cpp"
    if gpu or not facts.readable:
        sort += "+gpu"
    return REQUIRED_FACETS[sort]


def file_found(kind: str, key: str, root: Path, file: FileStat) -> Found:
    """An entry that is one file below the Inductor root."""
    return Found(kind, key, root, INDUCTOR_PLACE, (file,))


def bad_names(names: Iterable[str]) -> Iterator[Skipped]:
    """Each of ``names`` as something that cannot be an entry."""
    return (Skipped(name, Reason.BAD_NAME) for name in names)


def check_shape(
    statement: Statement, *, key: re.Pattern[str], canons: tuple[str, ...] | None, variant: bool
) -> None:
    """Hold the parts of a statement against what its kind allows.

    Args:
        statement: As it came in; the format's own rules hold already.
        key: The pattern of the whole key.
        canons: The canonical forms that there are; None for those of pickles.
        variant: Whether an entry of this kind has a variant, or never has one.

    Raises:
        FormatError: A part does not fit.
    """
    subject = f"{statement.kind} {statement.key[:80]}"
    if key.fullmatch(statement.key) is None:
        raise FormatError(f"{statement.key[:80]!r} is not a key of {statement.kind}", subject=subject)
    if bool(statement.variant) is not variant:
        raise FormatError(f"{subject} {'lacks' if variant else 'must not have'} a variant", subject=subject)
    if not _is_canon(statement.canon, canons):
        raise FormatError(f"{subject} has the unknown form {statement.canon!r}", subject=subject)
    if statement.size == 0:
        raise FormatError(f"{subject} is empty", subject=subject)


def check_plain(statement: Statement) -> None:
    """An entry that needs no other and whose one file is named by its key or its content.

    Raises:
        FormatError: It names needs or files.
    """
    if statement.needs or statement.files:
        subject = f"{statement.kind} {statement.key[:80]}"
        raise FormatError(f"{subject} must not name needs or files", subject=subject)


def _is_canon(name: str, canons: tuple[str, ...] | None) -> bool:
    return name == RAW or parse_canon(name) is not None if canons is None else name in canons
