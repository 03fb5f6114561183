# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import pickle

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import KeyFileError
from torchrelay.signing import Ed25519Signer, PublicKey, Signer, comment_of, parse_public_key

# RFC 8032 §7.1, test 2.
RFC_PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
RFC_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)
KEY = PublicKey("ed25519", RFC_PUBLIC)


def pem(key: object = None) -> str:
    public = key or Ed25519PublicKey.from_public_bytes(RFC_PUBLIC)
    return public.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def openssh(comment: str = "") -> str:
    blob = b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20" + RFC_PUBLIC
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}{' ' + comment if comment else ''}"


def test_key_id_is_the_digest_of_the_spki_that_others_compute_too() -> None:
    der = Ed25519PublicKey.from_public_bytes(RFC_PUBLIC).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert KEY.spki == der
    assert KEY.key_id == hashlib.sha256(der).hexdigest()


def test_verifies_the_vector_of_the_rfc() -> None:
    assert KEY.verify(RFC_SIGNATURE, b"\x72")
    assert not KEY.verify(RFC_SIGNATURE, b"\x73")


@pytest.mark.parametrize(
    "signature", [b"", b"\0" * 63, RFC_SIGNATURE + b"\0", RFC_SIGNATURE[:-1], b"\xff" * 64]
)
def test_what_is_no_signature_does_not_hold_and_does_not_raise(signature: bytes) -> None:
    assert not KEY.verify(signature, b"\x72")


def test_a_signature_with_the_group_order_added_does_not_hold() -> None:
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(RFC_SIGNATURE[32:], "little") + order
    assert not KEY.verify(RFC_SIGNATURE[:32] + s.to_bytes(32, "little"), b"\x72")


FORMS = {
    "one-line": KEY.text,
    "one-line-newlines": f"{KEY.text}\n\n\n",
    "one-line-crlf": f"{KEY.text}\r\n",
    "one-line-bom": f"\ufeff{KEY.text}",
    "pem": pem(),
    "pem-no-final-newline": pem().rstrip("\n"),
    "pem-crlf": pem().replace("\n", "\r\n"),
    "pem-cr": pem().replace("\n", "\r"),
    "pem-bom-crlf-extra-lines": "\ufeff\r\n" + pem().replace("\n", "\r\n") + "\r\n\r\n",
    "openssh": openssh(),
    "openssh-comment": openssh("ci@build farm"),
    "openssh-crlf": openssh("ci@build") + "\r\n",
    "openssh-bom": "\ufeff" + openssh("x") + "\n",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_key(text: str) -> None:
    assert parse_public_key(text) == KEY
    assert parse_public_key(text).key_id == KEY.key_id


@given(st.binary(min_size=32, max_size=32))
def test_text_law(raw: bytes) -> None:
    try:
        key = PublicKey("ed25519", raw)
    except KeyFileError:
        return
    assert parse_public_key(key.text) == key


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(KeyFileError):
        parse_public_key(text)


NOT_KEYS = {
    "empty": ("", "empty"),
    "blank": (" \r\n ", "empty"),
    "bom-only": ("\ufeff", "empty"),
    "word": ("hello", "known form"),
    "url": ("https://example.org/key", "base64|supported"),
    "other-algorithm": ("ed448:" + "A" * 76, "not supported"),
    "upper-case-algorithm": (KEY.text.replace("ed25519", "ED25519"), "known form"),
    "short": ("ed25519:" + base64.b64encode(RFC_PUBLIC[:-1]).decode(), "32 bytes"),
    "long": ("ed25519:" + base64.b64encode(RFC_PUBLIC + b"x").decode(), "32 bytes"),
    "not-base64": ("ed25519:" + "?" * 44, "base64"),
    "base64-loose-bits": (KEY.text[:-2] + chr(ord(KEY.text[-2]) + 1) + "=", "canonical base64"),
    "base64-url-alphabet": ("ed25519:" + "_" * 43 + "=", "base64"),
    "two-lines": (f"{KEY.text}\n{KEY.text}", "several lines"),
    "trailing-words": (f"{KEY.text} me", "base64"),
    "ssh-rsa": ("ssh-rsa AAAAB3NzaC1yc2E=", "ssh-rsa"),
    "ssh-ecdsa": ("ecdsa-sha2-nistp256 AAAA", "ecdsa"),
    "ssh-security-key": ("sk-ssh-ed25519@openssh.com AAAA", "sk-ssh"),
    "ssh-certificate": ("ssh-ed25519-cert-v01@openssh.com AAAA", "cert"),
    "ssh-without-key": ("ssh-ed25519", "not an OpenSSH"),
    "ssh-lying-type": (
        "ssh-ed25519 " + base64.b64encode(b"\x00\x00\x00\x07ssh-rsa\x00\x00\x00\x20" + RFC_PUBLIC).decode(),
        "not an OpenSSH",
    ),
    "pem-without-end": (pem().split("-----END")[0], "without its end"),
    "pem-damaged": (pem().replace("MC", "M?"), "base64"),
    "pem-certificate": ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "certificate"),
    "pem-private": (Ed25519Signer.generate().to_pem().decode(), "private key"),
    "pem-rsa": (pem(rsa.generate_private_key(65537, 2048).public_key()), "another algorithm"),
    "pem-p256": (pem(ec.generate_private_key(ec.SECP256R1()).public_key()), "another algorithm"),
    "too-long": ("ed25519:" + "A" * 20_000, "too long"),
}


@pytest.mark.parametrize(("text", "message"), NOT_KEYS.values(), ids=NOT_KEYS)
def test_what_is_no_key_is_told_why(text: str, message: str) -> None:
    with pytest.raises(KeyFileError, match=message) as caught:
        parse_public_key(text, name="farm.pub")
    assert caught.value.subject == "farm.pub"
    assert caught.value.remedy


def test_a_private_key_given_as_public_is_not_repeated_in_the_error() -> None:
    text = Ed25519Signer.generate().to_pem().decode()
    with pytest.raises(KeyFileError) as caught:
        parse_public_key(text)
    assert text.split("\n")[1] not in caught.value.diagnostics()


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize(
    "y",
    [
        0,
        1,
        2**255 - 20,
        2**255 - 19,
        2**255 - 18,
        int.from_bytes(
            bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
        ),
        int.from_bytes(
            bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
        ),
    ],
)
def test_points_of_small_order_are_no_keys(y: int, sign: int) -> None:
    with pytest.raises(KeyFileError, match="small order"):
        PublicKey("ed25519", (y | sign << 255).to_bytes(32, "little"))


def test_why_small_order_matters() -> None:
    # For the neutral element as key, this one signature holds for every message.
    neutral = (1).to_bytes(32, "little")
    key = Ed25519PublicKey.from_public_bytes(neutral)
    for message in (b"a", b"anything else"):
        key.verify(neutral + b"\0" * 32, message)


def test_signer_signs_and_does_not_leak() -> None:
    signer = Ed25519Signer.generate()
    assert isinstance(signer, Signer)
    assert signer.public_key.verify(signer.sign(b"m"), b"m")
    assert not signer.public_key.verify(signer.sign(b"m"), b"n")
    assert repr(signer) == f"<Ed25519Signer {signer.public_key.key_id[:16]}>"
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leak(signer)


def test_comment() -> None:
    assert comment_of(openssh("ci@farm 2")) == "ci@farm 2"
    assert comment_of(openssh()) == ""
    assert comment_of(KEY.text) == ""
