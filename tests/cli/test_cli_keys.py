# SPDX-License-Identifier: Apache-2.0
"""`keygen` and `trust` with real keys and files."""

from __future__ import annotations

import stat
from datetime import date, timedelta
from pathlib import Path

import pytest

from cache_samples import contents
from torchrelay.signing import Ed25519Signer, parse_public_key, trust
from torchrelay.signing.keyfiles import load_private_key


@pytest.fixture
def theirs():
    """Somebody else's public key."""
    return Ed25519Signer.generate().public_key


def policy_of(home) -> Path:
    return home / ".config" / "torchrelay" / "trust.toml"


def test_keygen_makes_this_users_key_and_trusts_it(run, home):
    found = run("keygen", "--json").json
    path = Path(found["file"])
    assert path == home / ".config" / "torchrelay" / "key.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    signer = load_private_key(path)
    assert parse_public_key(found["public_key"]) == signer.public_key
    assert found["key_id"] == signer.public_key.key_id
    assert found["trusted"] is True
    assert trust.load_policy(policy_of(home)).key(found["key_id"]) is not None


def test_keygen_shows_the_key_that_is_there_and_changes_nothing(run, home):
    first = run("keygen", "--json").json
    assert first["made"] is True
    before = contents(home)
    again = run("keygen", "--json")
    assert (again.code, again.json) == (0, {**first, "made": False})
    shown = run("keygen")
    assert "was there already" in shown.out
    assert f"torchrelay trust add {first['public_key']}" in shown.out
    assert contents(home) == before


@pytest.mark.parametrize("taken", ["ci", "ci.pub"])
def test_keygen_never_overwrites(run, taken):
    Path(taken).write_text("precious")
    ran = run("keygen", "--key", "ci")
    assert ran.code == 2
    assert f"{taken} exists and is not overwritten" in ran.err
    assert Path(taken).read_text() == "precious"
    assert [path.name for path in Path.cwd().iterdir()] == [taken]


def test_keygen_writes_the_public_key_beside_the_private_one(run):
    made = run("keygen", "--key", "ci", "--json").json
    public = Path("ci.pub")
    assert made["public_file"] == str(public.absolute())
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert parse_public_key(public.read_text()).text == made["public_key"]
    assert run("trust", "add", "ci.pub", "--json").json["key_id"] == made["key_id"]


def test_trust_list_shows_the_public_key(run, theirs):
    run("trust", "add", theirs.text)
    assert theirs.text in run("trust", "list").out


def test_a_key_made_elsewhere_is_trusted_only_once_it_is_added(run, home):
    ran = run("keygen", "--key", "ci.pem", "--json")
    assert ran.json["trusted"] is False
    assert ran.json["file"] == str(Path.cwd() / "ci.pem")
    assert not policy_of(home).exists()
    assert run("trust", "add", ran.json["public_key"]).code == 0
    assert trust.load_policy(policy_of(home)).key(ran.json["key_id"]) is not None


def test_keygen_says_how_to_hand_the_key_out_and_shows_no_private_part(run):
    ran = run("keygen", "--key", "ci.pem")
    public = load_private_key(Path("ci.pem")).public_key.text
    assert f"torchrelay trust add {public}" in ran.out
    lines = Path("ci.pem").read_text().splitlines()
    assert not any(line in ran.out for line in lines[1:-1])


def test_a_pass_phrase_encrypts_the_key(run, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_KEY_PASSPHRASE", "open sesame")
    ran = run("keygen")
    assert ran.code == 0
    [path] = Path.home().rglob("key.pem")
    assert b"ENCRYPTED" in path.read_bytes()
    assert "open sesame" not in ran.out + ran.err


def test_keygen_heeds_the_key_that_is_configured(run, monkeypatch):
    monkeypatch.setenv("TORCHRELAY_KEY", "conf.pem")
    assert run("keygen").code == 0
    assert Path("conf.pem").exists()


def test_trust_add_list_remove_revoke(run, home, theirs):
    added = run(
        "trust",
        "add",
        theirs.text,
        "--name",
        "build",
        "--role",
        "writer",
        "--role",
        "maintainer",
        "--for",
        "acme/**",
        "--json",
    ).json
    assert added["key_id"] == theirs.key_id
    [key] = run("trust", "list", "--json").json["keys"]
    assert key == {
        "key_id": theirs.key_id,
        "name": "build",
        "public_key": theirs.text,
        "roles": ["writer", "maintainer"],
        "workloads": ["acme/**"],
        "not_after": "",
        "revoked": False,
        "expired": False,
    }
    assert run("trust", "remove", theirs.key_id[:10]).code == 0
    assert run("trust", "list", "--json").json["keys"] == []
    assert run("trust", "revoke", theirs.key_id).code == 0
    [gone] = run("trust", "list", "--json").json["keys"]
    assert (gone["key_id"], gone["revoked"]) == (theirs.key_id, True)
    refused = run("trust", "add", theirs.text)
    assert refused.code == 2
    assert "is revoked" in refused.err


def test_trust_add_takes_a_file_and_pem_text(run, theirs):
    Path("k.pub").write_text(theirs.text + "\r\n")
    assert run("trust", "add", "k.pub", "--json").json["key_id"] == theirs.key_id
    import base64

    body = base64.b64encode(theirs.spki).decode()
    pem = f"-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----\n"
    assert run("trust", "add", pem, "--json").json["key_id"] == theirs.key_id


@pytest.mark.parametrize("what", ["missing.pub", "", "ed25519:AAAA", "ssh-rsa AAAA x"])
def test_what_is_no_public_key_is_refused_and_nothing_is_stored(run, home, what):
    ran = run("trust", "add", what)
    assert ran.code == 2
    assert not policy_of(home).exists()


def test_a_private_key_is_refused_and_not_shown(run, home):
    run("keygen", "--key", "ci.pem")
    secret = Path("ci.pem").read_text()
    for given in ("ci.pem", secret):
        ran = run("trust", "add", given, "--json")
        assert ran.code == 2
        assert "private key" in ran.err
        assert secret.splitlines()[1] not in ran.out + ran.err
    assert not policy_of(home).exists()


@pytest.mark.parametrize("action", ["remove", "revoke"])
@pytest.mark.parametrize("key_id", ["abc", "zz" * 32, "0123456789"])
def test_a_key_that_is_not_there_is_told(run, theirs, action, key_id):
    run("trust", "add", theirs.text)
    ran = run("trust", action, key_id)
    assert ran.code == 2
    assert "trust list" in ran.err


def test_the_policy_may_lie_elsewhere(run, home, theirs):
    assert run("trust", "add", theirs.text, "--policy", "p.toml").code == 0
    assert not policy_of(home).exists()
    assert run("trust", "list", "--policy", "p.toml", "--json").json["keys"][0]["key_id"] == theirs.key_id


def test_list_warns_of_keys_that_end_soon_and_of_policies_that_protect_nothing(run, theirs):
    day = date.today() + timedelta(days=5)
    run("trust", "add", theirs.text, "--not-after", str(day), "--policy", "p.toml")
    text = Path("p.toml").read_text()
    assert "accept_unsigned = false" in text
    Path("p.toml").write_text(text.replace("accept_unsigned = false", "accept_unsigned = true"))
    ran = run("trust", "list", "--policy", "p.toml")
    assert ran.code == 0, ran.err
    assert str(day) in ran.out
    assert "nobody signed" in ran.out


def test_an_empty_policy_says_what_that_means(run):
    assert "trusts nobody" in run("trust", "list").out


def test_a_damaged_policy_is_named(run):
    Path("p.toml").write_text("keys = 3\n")
    ran = run("trust", "list", "--policy", "p.toml")
    assert ran.code == 2
    assert "p.toml" in ran.err
