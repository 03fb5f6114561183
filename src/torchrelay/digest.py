# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests as a value type."""

from __future__ import annotations

import hashlib
import re
from typing import NewType

from torchrelay.errors import FormatError

Digest = NewType("Digest", str)
"""A SHA-256 digest as 64 lower-case hexadecimal digits.

A plain string at run time, because ten thousand records hold thirty thousand of them; a type of
its own for the type checker. Make one with :func:`digest_of` or :func:`parse_digest`.
"""

DIGEST_PATTERN = r"^[0-9a-f]{64}$"
_DIGEST = re.compile(r"[0-9a-f]{64}")

EMPTY_DIGEST = Digest("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """The digest of ``data``."""
    return Digest(hashlib.sha256(data).hexdigest())


def is_digest(text: str) -> bool:
    """Whether ``text`` is a digest: exactly 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def parse_digest(text: str) -> Digest:
    """``text`` as a digest.

    Law: ``parse_digest(d) == d`` for every digest ``d``.

    Raises:
        FormatError: ``text`` is not 64 lower-case hexadecimal digits.
    """
    if not is_digest(text):
        raise FormatError(f"{text[:80]!r} is not a SHA-256 digest", subject=text[:80])
    return Digest(text)
