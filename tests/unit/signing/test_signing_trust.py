# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import os
import stat
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from torchrelay.errors import KeyFileError, RelayError, UnsafeDirectoryError, UsageError
from torchrelay.signing import Ed25519Signer, Policy, PublicKey, TrustedKey, dump_policy
from torchrelay.signing.keyfiles import generate_key
from torchrelay.signing.trust import (
    add_key,
    first_use,
    load_policy,
    remove_key,
    revoke_key,
    save_policy,
    update_policy,
)

KEYS = [PublicKey("ed25519", bytes([n]) * 32) for n in range(3, 8)]
POLICY = Policy((TrustedKey(KEYS[0], "a"), TrustedKey(KEYS[1], "b")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "torchrelay" / "trust.toml"


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_saved_is_loaded(path: Path) -> None:
    save_policy(path, POLICY)
    assert load_policy(path) == POLICY
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(path) == ["trust.toml"]


def test_saving_keeps_the_mode_and_the_link(path: Path, tmp_path: Path) -> None:
    save_policy(tmp_path / "real" / "policy.toml", Policy())
    (tmp_path / "real" / "policy.toml").chmod(0o600)
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "real" / "policy.toml")
    save_policy(path, POLICY)
    assert path.is_symlink()
    assert load_policy(path) == POLICY
    assert stat.S_IMODE((tmp_path / "real" / "policy.toml").stat().st_mode) == 0o600


def test_missing_is_an_error_or_trusts_nobody(path: Path) -> None:
    with pytest.raises(KeyFileError, match="there is no trust policy") as caught:
        load_policy(path)
    assert "trust add" in caught.value.remedy
    assert load_policy(path, missing_ok=True) == Policy()


def test_a_dangling_link_is_not_the_empty_policy(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.symlink_to("gone")
    with pytest.raises(KeyFileError):
        load_policy(path, missing_ok=True)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_policy_that_others_can_write_is_refused(path: Path, mode: int) -> None:
    save_policy(path, POLICY)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="others can write") as caught:
        load_policy(path)
    assert "chmod go-w" in caught.value.remedy


def test_a_policy_in_a_directory_that_others_can_write_is_refused(path: Path) -> None:
    save_policy(path, POLICY)
    path.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError):
        load_policy(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_policy_of_another_user_is_refused(path: Path) -> None:
    save_policy(path, POLICY)
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        load_policy(path)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\0" * 100, b"format = 9", b"x" * 2_000_000])
def test_a_bad_policy_names_the_file(path: Path, data: bytes) -> None:
    save_policy(path, POLICY)
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        load_policy(path, missing_ok=True)
    assert str(path) in caught.value.message


def test_crlf_and_bom_do_no_harm(path: Path) -> None:
    save_policy(path, POLICY)
    path.write_bytes(b"\xef\xbb\xbf" + dump_policy(POLICY).replace("\n", "\r\n").encode())
    assert load_policy(path) == POLICY


def test_add_list_remove_revoke(path: Path) -> None:
    a = add_key(path, KEYS[0].text, name="farm", roles=("writer", "maintainer"), not_after=date(2027, 1, 1))
    b = add_key(path, KEYS[1].text, workloads=("acme/**",))
    assert load_policy(path).keys == (a, b)
    narrower = add_key(path, KEYS[0].text, name="farm")
    assert load_policy(path).keys == (b, narrower)
    remove_key(path, b.key_id[:8])
    assert load_policy(path).keys == (narrower,)
    revoke_key(path, a.key_id[:10])
    revoke_key(path, KEYS[4].key_id)
    assert load_policy(path).revoked == {a.key_id, KEYS[4].key_id}
    with pytest.raises(UsageError, match="revoked"):
        add_key(path, KEYS[4].text)


def test_add_from_a_file_takes_the_comment_as_name(path: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    signer = Ed25519Signer.generate()
    line = Ed25519PublicKey.from_public_bytes(signer.public_key.raw).public_bytes(
        Encoding.OpenSSH, PublicFormat.OpenSSH
    )
    (tmp_path / "farm.pub").write_bytes(line + b" build \x1b[31mfarm\r\n")
    key = add_key(path, str(tmp_path / "farm.pub"))
    assert key.public_key == signer.public_key
    assert key.name == "build [31mfarm"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: add_key(path, "ed25519:zzz"),
        lambda path: add_key(path, KEYS[2].text, roles=("admin",)),
        lambda path: add_key(path, KEYS[2].text, workloads=("../x",)),
        lambda path: add_key(path, KEYS[2].text, name="\x1b[31m"),
        lambda path: remove_key(path, "00000000"),
        lambda path: remove_key(path, "1234"),
        lambda path: remove_key(path, KEYS[3].key_id),
        lambda path: revoke_key(path, "0000"),
    ],
)
def test_a_change_that_fails_changes_nothing(path: Path, change: Any) -> None:
    save_policy(path, POLICY)
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        change(path)
    assert caught.value.remedy
    assert path.read_bytes() == before
    assert [name for name in names(path) if not name.endswith(".lock")] == ["trust.toml"]


def test_a_policy_that_cannot_be_read_is_not_overwritten(path: Path) -> None:
    save_policy(path, POLICY)
    path.write_text("format = 99")
    with pytest.raises(UsageError):
        add_key(path, KEYS[2].text)
    assert path.read_text() == "format = 99"


def _add(path: Path, raw: bytes) -> None:
    add_key(path, PublicKey("ed25519", raw).text)


def test_changes_of_several_processes_are_all_kept(path: Path) -> None:
    raws = [bytes([n]) * 32 for n in range(10, 16)]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, raw)) for raw in raws]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert {key.public_key.raw for key in load_policy(path).keys} == set(raws)


def test_update_without_change_does_not_write(path: Path) -> None:
    save_policy(path, POLICY)
    before = path.stat()
    update_policy(path, lambda policy: policy)
    assert path.stat().st_ino == before.st_ino


# --- first use


def test_first_use_makes_and_trusts_a_key(tmp_path: Path) -> None:
    config = tmp_path / "home" / "torchrelay"
    first = first_use(config)
    assert (first.made_key, first.made_policy, first.trusted) == (True, True, True)
    (key,) = first.policy.keys
    assert key.public_key == first.signer.public_key
    assert (key.roles, key.workloads, key.not_after) == (("writer", "maintainer"), ("**",), None)
    assert stat.S_IMODE((config / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(config.stat().st_mode) == 0o700
    assert sorted(entry.name for entry in config.iterdir()) == ["key.pem", "trust.toml"]


def test_first_use_again_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "torchrelay"
    first = first_use(config)
    before = {entry.name: entry.read_bytes() for entry in config.iterdir()}
    again = first_use(config)
    assert (again.made_key, again.made_policy, again.trusted) == (False, False, True)
    assert again.signer.public_key == first.signer.public_key
    assert {entry.name: entry.read_bytes() for entry in config.iterdir()} == before


def test_first_use_carries_on_where_it_was_killed(tmp_path: Path) -> None:
    config = tmp_path / "torchrelay"
    signer = generate_key(config / "key.pem")
    first = first_use(config)
    assert (first.made_key, first.made_policy, first.trusted) == (False, True, True)
    assert first.signer.public_key == signer.public_key


def test_a_key_made_now_is_trusted_by_a_policy_that_trust_add_made_before(tmp_path: Path) -> None:
    config = tmp_path / "torchrelay"
    save_policy(config / "trust.toml", POLICY)
    first = first_use(config)
    assert (first.made_key, first.made_policy, first.trusted) == (True, False, True)
    after = load_policy(config / "trust.toml")
    assert after.without_key(first.signer.public_key.key_id) == POLICY, "everything else stands as it was"


def test_a_policy_is_never_changed_for_a_key_that_was_there(tmp_path: Path) -> None:
    config = tmp_path / "torchrelay"
    generate_key(config / "key.pem")
    save_policy(config / "trust.toml", POLICY)
    assert not first_use(config).trusted
    assert load_policy(config / "trust.toml") == POLICY


def test_a_revoked_own_key_is_not_trusted(tmp_path: Path) -> None:
    config = tmp_path / "torchrelay"
    first = first_use(config)
    revoke_key(config / "trust.toml", first.signer.public_key.key_id)
    assert not first_use(config).trusted


@pytest.mark.parametrize("bad", [b"", b"rubbish", b"\0" * 10])
def test_first_use_does_not_replace_a_bad_key(tmp_path: Path, bad: bytes) -> None:
    config = tmp_path / "torchrelay"
    config.mkdir(mode=0o700)
    (config / "key.pem").write_bytes(bad)
    (config / "key.pem").chmod(0o600)
    with pytest.raises(KeyFileError):
        first_use(config)
    assert (config / "key.pem").read_bytes() == bad
    assert not (config / "trust.toml").exists()


def _first(config: Path, queue: Any) -> None:
    first = first_use(config)
    queue.put((first.signer.public_key.key_id, first.made_key, first.made_policy, first.trusted))


def test_first_use_of_several_processes_agrees_on_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(4):
        config = tmp_path / f"round-{round_}"
        queue = context.Queue()
        workers = [context.Process(target=_first, args=(config, queue)) for _ in range(6)]
        for worker in workers:
            worker.start()
        results = [queue.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join(60)
        assert len({key_id for key_id, *_ in results}) == 1
        assert sum(made for _, made, _, _ in results) == 1
        assert sum(made for _, _, made, _ in results) == 1
        assert all(trusted for *_, trusted in results)
        assert sorted(entry.name for entry in config.iterdir()) == ["key.pem", "trust.toml"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    config = tmp_path / "torchrelay"
    save_policy(config / "trust.toml", POLICY)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space left"):
        first_use(config)
    with pytest.raises(RelayError, match="No space left"):
        save_policy(config / "trust.toml", Policy())
    monkeypatch.undo()
    assert [entry.name for entry in config.iterdir()] == ["trust.toml"]
    assert load_policy(config / "trust.toml") == POLICY
