# SPDX-License-Identifier: Apache-2.0
"""Which key signs, which policy decides, and what a plan may make: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.errors import KeyFileError, TrustError, UsageError
from torchrelay.identity import NO_KEY_YET, reading_policy, signing_credentials
from torchrelay.signing import Ed25519Signer, Policy, TrustedKey, trust
from torchrelay.signing.keyfiles import generate_key, load_private_key


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("TORCHRELAY_KEY_PASSPHRASE", "TORCHRELAY_KEY_PASSPHRASE_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "torchrelay"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}


def test_the_first_use_makes_a_key_that_the_policy_accepts(config: Path) -> None:
    found = signing_credentials(None, None, "acme/x")
    assert found.signer.public_key == load_private_key(config / "key.pem").public_key
    assert found.policy == trust.load_policy(config / "trust.toml")
    assert found.notes == ()


def test_a_plan_makes_nothing_and_says_that_there_is_no_key(config: Path) -> None:
    found = signing_credentials(None, None, "acme/x", planned=True)
    assert found.notes == (NO_KEY_YET,)
    assert found.policy.key(found.signer.public_key.key_id) is not None
    assert not config.exists()


def test_a_plan_beside_a_policy_that_came_first_leaves_it_as_it_is(config: Path) -> None:
    other = Ed25519Signer.generate().public_key
    trust.add_key(config / "trust.toml", other.text)
    before = files(config)
    found = signing_credentials(None, None, "acme/x", planned=True)
    assert {key.key_id for key in found.policy.keys} == {other.key_id, found.signer.public_key.key_id}
    assert files(config) == before


def test_a_plan_takes_the_key_that_is_there(config: Path) -> None:
    made = signing_credentials(None, None, "acme/x").signer.public_key
    before = files(config)
    planned = signing_credentials(None, None, "acme/x", planned=True)
    assert (planned.signer.public_key, planned.notes) == (made, ())
    assert files(config) == before


def test_a_plan_that_lost_its_policy_is_what_the_push_would_make(config: Path) -> None:
    signing_credentials(None, None, "acme/x")
    (config / "trust.toml").unlink()
    planned = signing_credentials(None, None, "acme/x", planned=True)
    assert not (config / "trust.toml").exists()
    assert planned.policy == signing_credentials(None, None, "acme/x").policy


def test_a_named_key_is_asked_of_the_named_policy(config: Path, tmp_path: Path) -> None:
    key = generate_key(tmp_path / "k.pem").public_key
    trust.save_policy(tmp_path / "p.toml", Policy((TrustedKey(key),)))
    found = signing_credentials(tmp_path / "k.pem", tmp_path / "p.toml", "acme/x")
    assert found.signer.public_key == key
    assert not config.exists()
    with pytest.raises(TrustError, match="is not in the trust policy") as caught:
        signing_credentials(tmp_path / "k.pem", None, "acme/x")
    assert key.text in caught.value.remedy
    assert not config.exists()


def test_an_own_key_that_a_named_policy_does_not_know_is_refused_as_a_plan_too(tmp_path: Path) -> None:
    trust.save_policy(tmp_path / "p.toml", Policy())
    for planned in (True, False):
        with pytest.raises(TrustError):
            signing_credentials(None, tmp_path / "p.toml", "acme/x", planned=planned)


@pytest.mark.parametrize("planned", [True, False])
def test_a_key_that_is_there_and_cannot_be_used_is_never_replaced(config: Path, planned: bool) -> None:
    config.mkdir(mode=0o700)
    (config / "key.pem").write_text("nonsense")
    (config / "key.pem").chmod(0o600)
    with pytest.raises(KeyFileError):
        signing_credentials(None, None, "acme/x", planned=planned)
    assert files(config) == {"key.pem": b"nonsense"}


def test_reading_makes_nothing_and_a_named_policy_must_be_there(config: Path, tmp_path: Path) -> None:
    assert reading_policy(None) == Policy()
    assert not config.exists()
    with pytest.raises(UsageError, match="there is no trust policy"):
        reading_policy(tmp_path / "missing.toml")
