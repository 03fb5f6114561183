# SPDX-License-Identifier: Apache-2.0
"""Public keys and signers: bytes in, bytes out; files are read in :mod:`.keyfiles`.

``docs/reference/trust-policy.md`` §2. What differs between algorithms stands in one table, so a
further one is one more row.
"""

# `cryptography` takes 30 ms to import and whoever needs only the types should not wait for it.
# ruff: noqa: PLC0415

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torchrelay.digest import Digest
from torchrelay.errors import KeyFileError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ED25519 = "ed25519"
MAX_KEY_TEXT = 16 * 1024
"""Characters of a key in any text form; an RSA-16384 key, to be told that it is one, has 12,000."""

_ADD_REMEDY = "Give an Ed25519 public key: 'ed25519:…', a 'ssh-ed25519 …' line, or a PEM file."
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----")


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """One row of the table.

    Attributes:
        size: Bytes of a raw public key.
        signature_size: Bytes of a signature.
        spki_prefix: What stands before the raw key in SubjectPublicKeyInfo DER (RFC 8410 §4).
        verify: ``(raw key, signature, message)`` to whether it holds; never raises.
        weak: Raw keys for which anybody can make signatures.
    """

    size: int
    signature_size: int
    spki_prefix: bytes
    verify: Callable[[bytes, bytes, bytes], bool]
    weak: frozenset[bytes]


def _verify_ed25519(raw: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _small_order_points() -> frozenset[bytes]:
    """Encodings of the points of small order, with both sign bits.

    For such a key one signature holds for many messages, so it names nobody. The list is that of
    libsodium (``ge25519_has_small_order``).
    """
    p = 2**255 - 19
    order8 = int.from_bytes(
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
    )
    values = {0, 1, order8, p - order8, p - 1, p, p + 1}
    return frozenset((y | sign << 255).to_bytes(32, "little") for y in values for sign in (0, 1))


_ALGORITHMS: Mapping[str, _Algorithm] = {
    ED25519: _Algorithm(
        size=32,
        signature_size=64,
        spki_prefix=bytes.fromhex("302a300506032b6570032100"),
        verify=_verify_ed25519,
        weak=_small_order_points(),
    )
}


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key; equal keys have equal ids, however they were written.

    Law: ``parse_public_key(key.text) == key``.

    Attributes:
        algorithm: Its name in texts and signatures.
        raw: The key itself.
        key_id: SHA-256 of its SubjectPublicKeyInfo in DER.

    Raises:
        KeyFileError: Unknown algorithm, wrong length, or a key that binds nobody.
    """

    algorithm: str
    raw: bytes
    key_id: Digest = field(init=False, compare=False)

    def __post_init__(self) -> None:
        row = _ALGORITHMS.get(self.algorithm)
        if row is None:
            raise KeyFileError(f"{self.algorithm[:40]!r} keys are not supported", remedy=_ADD_REMEDY)
        if len(self.raw) != row.size:
            raise KeyFileError(
                f"an {self.algorithm} public key has {row.size} bytes, not {len(self.raw)}",
                remedy=_ADD_REMEDY,
            )
        if self.raw in row.weak:
            raise KeyFileError(
                "this public key is a point of small order, for which anybody can make signatures",
                remedy="Do not trust it; ask its owner for a key made by `torchrelay keygen`.",
            )
        object.__setattr__(self, "key_id", Digest(hashlib.sha256(self.spki).hexdigest()))

    @property
    def spki(self) -> bytes:
        """The key as SubjectPublicKeyInfo in DER."""
        return _ALGORITHMS[self.algorithm].spki_prefix + self.raw

    @property
    def text(self) -> str:
        """The one-line form: ``<algorithm>:<base64>``."""
        return f"{self.algorithm}:{base64.b64encode(self.raw).decode('ascii')}"

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` over exactly ``message`` was made with this key; never raises."""
        row = _ALGORITHMS[self.algorithm]
        return len(signature) == row.signature_size and row.verify(self.raw, signature, message)


@runtime_checkable
class Signer(Protocol):
    """Whoever can sign: a key in memory, or a service that may take seconds for each call."""

    @property
    def public_key(self) -> PublicKey:
        """The key that the signatures hold under."""

    def sign(self, message: bytes) -> bytes:
        """The raw signature over exactly ``message``."""


@dataclass(frozen=True, slots=True, repr=False)
class Ed25519Signer:
    """A signer that holds its key in memory; neither ``repr`` nor pickle gives it away."""

    _private: Ed25519PrivateKey
    public_key: PublicKey

    @classmethod
    def generate(cls) -> Ed25519Signer:
        """A new key from the system's random source."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls.of(Ed25519PrivateKey.generate())

    @classmethod
    def of(cls, private: Ed25519PrivateKey) -> Ed25519Signer:
        """The signer for a key that was loaded."""
        return cls(private, PublicKey(ED25519, private.public_key().public_bytes_raw()))

    def sign(self, message: bytes) -> bytes:
        """The 64 bytes of the signature (RFC 8032, pure Ed25519)."""
        return self._private.sign(message)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """The private key as PKCS #8 in PEM, encrypted if there is a pass phrase."""
        from cryptography.hazmat.primitives import serialization as s

        encryption = s.BestAvailableEncryption(passphrase) if passphrase else s.NoEncryption()
        return self._private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, encryption)

    def __repr__(self) -> str:
        return f"<Ed25519Signer {self.public_key.key_id[:16]}>"

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled")


def tidy(text: str) -> str:
    """``text`` without byte order mark, carriage returns, and white space at both ends."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").strip()


def parse_public_key(text: str, *, name: str = "the key") -> PublicKey:
    """A public key from any of its text forms.

    ``ed25519:<base64>``, an OpenSSH line ``ssh-ed25519 <base64> [comment]``, or PEM. A byte order
    mark, CRLF, and missing or extra line ends do no harm.

    Args:
        text: The key.
        name: Where it came from, for the error.

    Raises:
        KeyFileError: Empty, too long, a private key, another algorithm, or not a key.
    """
    if len(text) > MAX_KEY_TEXT:
        raise KeyFileError(f"{name} is too long to be a public key", remedy=_ADD_REMEDY, subject=name)
    text = tidy(text)
    if not text:
        raise KeyFileError(f"{name} is empty", remedy=_ADD_REMEDY, subject=name)
    try:
        return _parse(text, name)
    except KeyFileError as exc:
        raise KeyFileError(f"{name}: {exc.message}", remedy=exc.remedy, subject=name) from exc


def comment_of(text: str) -> str:
    """The comment of an OpenSSH line, or nothing."""
    parts = tidy(text).split(None, 2)
    return parts[2] if len(parts) == 3 and parts[0] == "ssh-ed25519" else ""


def _parse(text: str, name: str) -> PublicKey:
    pem = _PEM.match(text)
    if pem:
        return _parse_pem(text, pem.group(1))
    if "\n" in text:
        raise KeyFileError("holds several lines and is not PEM", remedy=_ADD_REMEDY)
    word = text.split(None, 1)[0]
    if word.startswith(("ssh-", "ecdsa-", "sk-")):
        return _parse_openssh(text)
    algorithm, colon, encoded = text.partition(":")
    if not colon or not re.fullmatch(r"[a-z0-9-]{1,40}", algorithm):
        raise KeyFileError("is not a public key in a known form", remedy=_ADD_REMEDY)
    return PublicKey(algorithm, decode_base64(encoded))


def decode_base64(encoded: str) -> bytes:
    """The bytes of standard base64 in its one canonical spelling.

    Raises:
        KeyFileError: It is not.
    """
    try:
        raw = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise KeyFileError("is not valid base64", remedy=_ADD_REMEDY) from exc
    if base64.b64encode(raw).decode("ascii") != encoded:
        raise KeyFileError("is not canonical base64", remedy=_ADD_REMEDY)
    return raw


def _parse_openssh(text: str) -> PublicKey:
    word, _, rest = text.partition(" ")
    if word != "ssh-ed25519":
        raise KeyFileError(f"is a key of type {word[:40]!r}; Ed25519 is needed", remedy=_ADD_REMEDY)
    blob = decode_base64(rest.strip().split(None, 1)[0] if rest.strip() else "")
    prefix = b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20"
    if not blob.startswith(prefix):
        raise KeyFileError("is not an OpenSSH Ed25519 public key", remedy=_ADD_REMEDY)
    return PublicKey(ED25519, blob[len(prefix) :])


def _parse_pem(text: str, label: str) -> PublicKey:
    if "PRIVATE KEY" in label:
        raise KeyFileError(
            "is a private key, and only the public key is to be handed out",
            remedy="Give the public key, as `torchrelay keygen` or `ssh-keygen -y -f KEY` prints it.",
        )
    if label != "PUBLIC KEY":
        raise KeyFileError(f"is a PEM {label.lower()}, not a public key", remedy=_ADD_REMEDY)
    lines = text.split("\n")
    if lines[-1].strip() != "-----END PUBLIC KEY-----":
        raise KeyFileError("is a PEM public key without its end", remedy=_ADD_REMEDY)
    der = decode_base64("".join(line.strip() for line in lines[1:-1]))
    for algorithm, row in _ALGORITHMS.items():
        if der.startswith(row.spki_prefix):
            return PublicKey(algorithm, der[len(row.spki_prefix) :])
    raise KeyFileError("is a public key of another algorithm; Ed25519 is needed", remedy=_ADD_REMEDY)
