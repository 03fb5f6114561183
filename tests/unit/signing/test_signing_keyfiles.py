# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from torchrelay.errors import KeyFileError, RelayError, UnsafeDirectoryError
from torchrelay.signing import Ed25519Signer
from torchrelay.signing.keyfiles import (
    config_directory,
    generate_key,
    load_private_key,
    passphrase_from,
    read_public_key,
)

ROOT = os.geteuid() == 0
SIGNER = Ed25519Signer.generate()
PEM = SIGNER.to_pem()
OPENSSH = SIGNER._private.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
)


def foreign(key: object, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM, form, serialization.NoEncryption()
    )


RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "key.pem"


def put(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Within the block, root is a user who owns nothing; others stay who they are."""
    if not ROOT:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def visible() -> Iterator[Path]:
    """A directory that every user can look into; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


# --- making one


def test_a_new_key_is_private_and_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config" / "torchrelay" / "key.pem"
    before = os.umask(0)
    try:
        signer = generate_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_private_key(path).public_key == signer.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["key.pem"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o444])
def test_a_public_key_is_told_as_such_whatever_its_mode(tmp_path: Path, mode: int) -> None:
    public = tmp_path / "k.pub"
    public.write_text(Ed25519Signer.generate().public_key.text)
    public.chmod(mode)
    with pytest.raises(KeyFileError, match="holds a public key") as caught:
        load_private_key(public)
    assert "chmod" not in caught.value.diagnostics()


def test_two_keys_differ(tmp_path: Path) -> None:
    assert generate_key(tmp_path / "a").public_key != generate_key(tmp_path / "b").public_key


@pytest.mark.parametrize("existing", [b"", b"precious", PEM])
def test_a_file_that_is_there_is_never_overwritten(path: Path, existing: bytes) -> None:
    put(path, existing)
    with pytest.raises(KeyFileError, match="not overwritten"):
        generate_key(path)
    assert path.read_bytes() == existing
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_dangling_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError):
        generate_key(path)
    assert not (tmp_path / "elsewhere").exists()


def test_no_key_into_a_directory_that_others_can_write(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError, match="written by others"):
        generate_key(path)
    assert list(path.parent.iterdir()) == []


def test_no_key_without_write_permission(visible: Path) -> None:
    (visible / "config").mkdir(mode=0o555)
    with as_nobody(), pytest.raises(KeyFileError, match=r"cannot be written|cannot make") as caught:
        generate_key(visible / "config" / "key.pem")
    assert caught.value.remedy
    assert list((visible / "config").iterdir()) == []


def test_parent_is_a_file(tmp_path: Path) -> None:
    put(tmp_path / "file", b"x")
    with pytest.raises(RelayError):
        generate_key(tmp_path / "file" / "key.pem")


# --- loading one that is fine

GOOD = {
    "pem": PEM,
    "pem-no-final-newline": PEM.rstrip(b"\n"),
    "pem-extra-newlines": b"\n" + PEM + b"\n\n",
    "pem-crlf": PEM.replace(b"\n", b"\r\n"),
    "pem-crlf-no-final-newline": PEM.rstrip(b"\n").replace(b"\n", b"\r\n"),
    "pem-bom-crlf": b"\xef\xbb\xbf" + PEM.replace(b"\n", b"\r\n"),
    "openssh": OPENSSH,
    "openssh-no-final-newline": OPENSSH.rstrip(b"\n"),
    "openssh-crlf": OPENSSH.replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_good_files(path: Path, data: bytes) -> None:
    signer = load_private_key(put(path, data))
    assert signer.public_key == SIGNER.public_key
    assert SIGNER.public_key.verify(signer.sign(b"m"), b"m")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_private_modes(path: Path, mode: int) -> None:
    assert load_private_key(put(path, PEM, mode)).public_key == SIGNER.public_key


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_key_made_by_ssh_keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me@here", "-f", str(path)], check=True
    )
    public, _ = read_public_key(f"{path}.pub")
    assert load_private_key(path).public_key == public


def test_encrypted_key_with_pass_phrase(path: Path) -> None:
    put(path, SIGNER.to_pem(b"open sesame"))
    ask = passphrase_from({"TORCHRELAY_KEY_PASSPHRASE": "open sesame"})
    assert load_private_key(path, ask).public_key == SIGNER.public_key


@pytest.mark.parametrize("text", [b"open sesame", b"open sesame\n", b"open sesame\r\n"])
def test_encrypted_key_with_pass_phrase_file(path: Path, text: bytes) -> None:
    put(path, SIGNER.to_pem(b"open sesame"))
    put(path.with_name("pass"), text)
    ask = passphrase_from({"TORCHRELAY_KEY_PASSPHRASE_FILE": str(path.with_name("pass"))})
    assert load_private_key(path, ask).public_key == SIGNER.public_key


def test_the_pass_phrase_is_not_asked_for_without_need(path: Path) -> None:
    def ask() -> bytes:
        raise AssertionError

    assert load_private_key(put(path, PEM), ask).public_key == SIGNER.public_key


def test_a_pass_phrase_file_must_be_private(path: Path) -> None:
    put(path, SIGNER.to_pem(b"x"))
    put(path.with_name("pass"), b"x", 0o644)
    ask = passphrase_from({"TORCHRELAY_KEY_PASSPHRASE_FILE": str(path.with_name("pass"))})
    with pytest.raises(KeyFileError, match=r"pass phrase file .* others can read"):
        load_private_key(path, ask)


# --- loading one that is not: field case X06


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def holds(data: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    return lambda path: put(path, data, mode) and None


SSH_PUBLIC = SIGNER._private.public_key().public_bytes(
    serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
)
PEM_PUBLIC = SIGNER._private.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
PKCS8, PKCS1 = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL

BAD = {
    "missing": (missing, "there is no key file"),
    "dangling-link": (dangling, "there is no key file"),
    "directory": (directory, "is a directory"),
    "fifo": (fifo, "not a regular file"),
    "empty": (holds(b""), "is empty"),
    "blank": (holds(b"\r\n \n"), "is empty"),
    "bom-only": (holds(b"\xef\xbb\xbf"), "not a private key|is empty"),
    "too-large": (holds(PEM + b"\n" * 20_000), "too large"),
    "zeros": (holds(b"\0" * 500), "not a private key"),
    "binary": (holds(b"\xff\xfe" * 50), "not text"),
    "text": (holds(b"hello"), "not a private key in PEM"),
    "pickle-canary": (holds(b"cos\nsystem\n(S'touch /tmp/torchrelay-canary'\ntR."), "not a private key"),
    "public-openssh": (holds(SSH_PUBLIC), "holds a public key"),
    "public-pem": (holds(PEM_PUBLIC), "holds a public key"),
    "public-one-line": (holds(SIGNER.public_key.text.encode()), "holds a public key"),
    "rsa-pkcs8": (holds(foreign(RSA, PKCS8)), r"another algorithm \(RSA\)"),
    "rsa-pkcs1": (holds(foreign(RSA, PKCS1)), r"another algorithm \(RSA\)"),
    "rsa-openssh": (holds(foreign(RSA, serialization.PrivateFormat.OpenSSH)), r"another algorithm \(RSA\)"),
    "ec-pkcs8": (holds(foreign(EC, PKCS8)), "another algorithm"),
    "ec-sec1": (holds(foreign(EC, PKCS1)), r"another algorithm \(ECDSA\)"),
    "certificate": (holds(b"-----BEGIN CERTIFICATE-----\nAAAA\n"), "certificate"),
    "truncated": (holds(PEM[:-40]), "damaged"),
    "one-letter-changed": (holds(PEM.replace(b"MC4CAQ", b"MC5CAQ")), "damaged"),
    "openssh-truncated": (holds(OPENSSH[:200]), "damaged"),
    "encrypted": (holds(SIGNER.to_pem(b"x")), "encrypted and there is no pass phrase"),
    "world-readable": (holds(PEM, 0o644), "0644: others can read"),
    "group-readable": (holds(PEM, 0o640), "0640: others can read"),
    "group-writable": (holds(PEM, 0o620), "0620: others can write"),
    "world-executable": (holds(PEM, 0o601), "0601"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_key_files(path: Path, make: Callable[[Path], None], message: str) -> None:
    make(path)
    with pytest.raises(KeyFileError, match=message) as caught:
        load_private_key(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_each_cause_reads_differently() -> None:
    causes = {message for name, (_, message) in BAD.items() if name not in ("public-pem", "public-one-line")}
    assert len(causes) >= 18


def test_wrong_pass_phrase(path: Path) -> None:
    put(path, SIGNER.to_pem(b"right"))
    with pytest.raises(KeyFileError, match="pass phrase is wrong") as caught:
        load_private_key(path, lambda: b"wrong-and-secret")
    assert "wrong-and-secret" not in caught.value.diagnostics()


def test_empty_pass_phrase_is_none(path: Path) -> None:
    put(path, SIGNER.to_pem(b"right"))
    ask = passphrase_from({"TORCHRELAY_KEY_PASSPHRASE": ""})
    with pytest.raises(KeyFileError, match="no pass phrase"):
        load_private_key(path, ask)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_encrypted_openssh_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "sesame", "-f", str(path)], check=True)
    with pytest.raises(KeyFileError, match="encrypted and there is no pass phrase"):
        load_private_key(path)
    if importlib.util.find_spec("bcrypt"):
        signer = load_private_key(path, lambda: b"sesame")
        assert signer.public_key == read_public_key(f"{path}.pub")[0]
    else:
        with pytest.raises(KeyFileError, match="needs the package bcrypt"):
            load_private_key(path, lambda: b"sesame")


def test_unreadable(visible: Path) -> None:
    path = put(visible / "key.pem", PEM, 0o600 if ROOT else 0)
    with as_nobody(), pytest.raises(KeyFileError, match="not readable for this user") as caught:
        load_private_key(path)
    assert caught.value.remedy


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_of_another_user(path: Path) -> None:
    put(path, PEM)
    os.chown(path, 12345, 12345)
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        load_private_key(path)


def test_in_a_directory_that_others_can_write(path: Path) -> None:
    put(path, PEM)
    path.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError):
        load_private_key(path)


def test_in_a_sticky_directory(path: Path) -> None:
    put(path, PEM)
    path.parent.chmod(0o1777)
    assert load_private_key(path).public_key == SIGNER.public_key


def test_through_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    put(tmp_path / "real" / "key", PEM)
    path.symlink_to(tmp_path / "real" / "key")
    assert load_private_key(path).public_key == SIGNER.public_key


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_impossible_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        load_private_key(tmp_path / name)


# --- public keys by text or file


def test_public_key_by_text_and_by_file(path: Path) -> None:
    put(path, SSH_PUBLIC + b" me@here\r\n", 0o644)
    assert read_public_key(str(path))[0] == SIGNER.public_key
    assert read_public_key(SIGNER.public_key.text)[0] == SIGNER.public_key
    assert read_public_key(PEM_PUBLIC.decode())[0] == SIGNER.public_key


@pytest.mark.parametrize(
    ("data", "mode", "message"),
    [(PEM, 0o600, "private key"), (b"", 0o644, "empty"), (SSH_PUBLIC, 0o666, "others can write")],
    ids=["private", "empty", "writable"],
)
def test_bad_public_key_files(path: Path, data: bytes, mode: int, message: str) -> None:
    put(path, data, mode)
    with pytest.raises(KeyFileError, match=message):
        read_public_key(str(path))


@pytest.mark.parametrize("text", ["", "   ", "no-such-file", "ed25519:zzz", "ssh-rsa AAAA"])
def test_neither_text_nor_file(text: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        read_public_key(text)
    assert caught.value.remedy


# --- places


def test_config_directory() -> None:
    assert config_directory({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/torchrelay")
    assert config_directory({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == Path("/h/.config/torchrelay")
    assert config_directory({"HOME": "/h"}) == Path("/h/.config/torchrelay")
    for environ in ({}, {"HOME": ""}, {"HOME": "relative"}):
        with pytest.raises(KeyFileError):
            config_directory(environ)


def test_no_variables_no_pass_phrase() -> None:
    assert passphrase_from({}) is None
