# SPDX-License-Identifier: Apache-2.0
"""Key files: a new key pair, or one that the user has. ``docs/reference/trust-policy.md`` §2."""

# `cryptography` takes 30 ms to import, and a machine that only reads has no private key.
# ruff: noqa: PLC0415

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import KeyFileError
from torchrelay.signing.files import check_directory, create_file, make_private_directory, read_file
from torchrelay.signing.keys import MAX_KEY_TEXT, Ed25519Signer, PublicKey, parse_public_key, tidy

KEY_NAME = "key.pem"
PASSPHRASE_VARIABLE = "TORCHRELAY_KEY_PASSPHRASE"  # noqa: S105 - the variable's name
PASSPHRASE_FILE_VARIABLE = "TORCHRELAY_KEY_PASSPHRASE_FILE"  # noqa: S105 - the variable's name

Passphrase = Callable[[], bytes]
"""Asked only where a key is encrypted."""

_WHAT = "key file"
_REMEDY = "Run `torchrelay keygen`, or name an Ed25519 private key (PEM or OpenSSH) with --key."
_LABEL = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----")
_OTHERS = {"RSA PRIVATE KEY": "RSA", "DSA PRIVATE KEY": "DSA", "EC PRIVATE KEY": "ECDSA"}


def config_directory(environ: Mapping[str, str]) -> Path:
    """``$XDG_CONFIG_HOME/torchrelay``, or ``~/.config/torchrelay``.

    Raises:
        KeyFileError: Neither variable says where.
    """
    base = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "torchrelay"
    home = environ.get("HOME", "")
    if not Path(home).is_absolute():
        raise KeyFileError(
            "neither XDG_CONFIG_HOME nor HOME is set to a directory, so there is no place for a key",
            remedy="Set one of them, or name key and policy with --key and --policy.",
        )
    return Path(home) / ".config" / "torchrelay"


def passphrase_from(environ: Mapping[str, str]) -> Passphrase | None:
    """The pass phrase of ``TORCHRELAY_KEY_PASSPHRASE``, or of the file that ``…_FILE`` names."""
    if PASSPHRASE_VARIABLE in environ:
        return environ[PASSPHRASE_VARIABLE].encode
    if PASSPHRASE_FILE_VARIABLE in environ:
        return _FromFile(Path(environ[PASSPHRASE_FILE_VARIABLE]))
    return None


class _FromFile:
    """The first line of a private file; read when the pass phrase is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> bytes:
        remedy = f"Check {PASSPHRASE_FILE_VARIABLE}."
        text = read_file(self._path, what="pass phrase file", limit=4096, secret=True, remedy=remedy)
        return text.replace("\r\n", "\n").split("\n", 1)[0].encode()


def generate_key(path: Path, passphrase: bytes | None = None) -> Ed25519Signer:
    """Make a key pair; the private key goes to ``path`` with mode 0600, on disk before the return.

    Its directory is made with mode 0700 if it is missing.

    Raises:
        KeyFileError: There is a file already (it is never overwritten), or it cannot be written.
        UnsafeDirectoryError: Others can write the directory.
    """
    signer = Ed25519Signer.generate()
    make_private_directory(path.parent)
    if not create_file(path, signer.to_pem(passphrase), mode=0o600):
        raise KeyFileError(
            f"{path} exists and is not overwritten: what it signed could no longer be vouched for",
            remedy="Use the key as it is, or give another path.",
            subject=str(path),
        )
    return signer


def load_private_key(path: Path, passphrase: Passphrase | None = None) -> Ed25519Signer:
    """The signer for a private key file: Ed25519, PKCS #8 in PEM or OpenSSH's own form.

    A byte order mark, CRLF and missing or extra line ends do no harm.

    Raises:
        KeyFileError: Each cause with a message of its own: missing, unreadable, a directory, empty,
            too large, another user's, open to others, a public key, encrypted and no pass phrase,
            a wrong pass phrase, another algorithm, not a key.
        UnsafeDirectoryError: Others can exchange the file.
    """
    text = tidy(_private_text(path))
    _check_parent(path)
    label = _LABEL.match(text)
    if label is None or label.group(1) == "PUBLIC KEY":
        raise _not_private(text, path)
    if label.group(1) in _OTHERS:
        raise _wrong_algorithm(_OTHERS[label.group(1)], path)
    if not label.group(1).endswith("PRIVATE KEY"):
        raise _error(path, f"holds a {label.group(1).lower()}, not a private key")
    return _of(_load(text, label.group(1), passphrase, path), path)


def read_public_key(text_or_path: str) -> tuple[PublicKey, str]:
    """A public key given as text or as the name of a file with it, and the text.

    Raises:
        KeyFileError: It is neither.
    """
    start = tidy(text_or_path[:64])
    if start.startswith(("ed25519:", "ssh-", "ecdsa-", "sk-", "-----BEGIN ")):
        return parse_public_key(text_or_path), text_or_path
    if not start:
        raise KeyFileError("no key was given", remedy="Give a public key or the file that holds it.")
    remedy = "Give a public key ('ed25519:…', 'ssh-ed25519 …') or the name of the file that holds it."
    text = read_file(
        Path(text_or_path), what="public key file", limit=MAX_KEY_TEXT, secret=False, remedy=remedy
    )
    return parse_public_key(text, name=text_or_path), text


def _private_text(path: Path) -> str:
    try:
        return read_file(path, what=_WHAT, limit=MAX_KEY_TEXT, secret=True, remedy=_REMEDY)
    except KeyFileError as exc:
        # Anybody may read a public key, so its mode is not what is wrong with it.
        if _holds_public_key(path):
            raise _is_public(path) from exc
        raise


def _holds_public_key(path: Path) -> bool:
    try:
        parse_public_key(read_file(path, what=_WHAT, limit=MAX_KEY_TEXT, secret=False, remedy=_REMEDY))
    except KeyFileError:
        return False
    return True


def _check_parent(path: Path) -> None:
    try:
        check_directory(path.resolve().parent)
    except OSError as exc:
        raise _error(path, f"lies in a directory that cannot be looked at: {exc.strerror}") from exc


def _error(path: Path, problem: str, remedy: str = _REMEDY) -> KeyFileError:
    return KeyFileError(f"key file {path} {problem}", remedy=remedy, subject=str(path))


def _not_private(text: str, path: Path) -> KeyFileError:
    try:
        parse_public_key(text)
    except KeyFileError:
        return _error(path, "is not a private key in PEM or OpenSSH form")
    return _is_public(path)


def _is_public(path: Path) -> KeyFileError:
    return _error(
        path,
        "holds a public key; signing needs the private one",
        "Name the private key; `trust add` takes public ones.",
    )


def _wrong_algorithm(found: str, path: Path) -> KeyFileError:
    return _error(
        path, f"is a key of another algorithm ({found}); Ed25519 is needed", "Make one: `torchrelay keygen`."
    )


def _load(text: str, label: str, passphrase: Passphrase | None, path: Path) -> Any:
    """The private key as ``cryptography`` loads it; the pass phrase is asked for only if needed."""
    try:
        return _parse(text, label, None, path)
    except TypeError:
        # What `cryptography` raises where a key is encrypted and there is no pass phrase.
        secret = passphrase() if passphrase else b""
    if not secret:
        raise _error(
            path,
            "is encrypted and there is no pass phrase",
            f"Set {PASSPHRASE_VARIABLE} or {PASSPHRASE_FILE_VARIABLE}.",
        )
    try:
        return _parse(text, label, secret, path)
    except (TypeError, KeyFileError) as exc:
        if "bcrypt" in str(exc):
            raise
        raise _error(
            path,
            "cannot be decrypted: the pass phrase is wrong or the file damaged",
            f"Check {PASSPHRASE_VARIABLE}.",
        ) from exc


def _parse(text: str, label: str, secret: bytes | None, path: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    openssh = label == "OPENSSH PRIVATE KEY"
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    try:
        return load(text.encode() + b"\n", secret)
    except UnsupportedAlgorithm as exc:
        if openssh and secret:
            raise _error(
                path,
                "is an encrypted OpenSSH key, which needs the package bcrypt",
                "Run `pip install bcrypt`.",
            ) from exc
        raise _wrong_algorithm("one that is not supported", path) from exc
    except ValueError as exc:
        raise _error(path, "is damaged: it cannot be parsed as a private key") from exc


def _of(private: Any, path: Path) -> Ed25519Signer:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not isinstance(private, Ed25519PrivateKey):
        raise _wrong_algorithm(type(private).__name__.lstrip("_").removesuffix("PrivateKey"), path)
    return Ed25519Signer.of(private)
