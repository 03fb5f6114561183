# SPDX-License-Identifier: Apache-2.0
"""Directories, stores, keys and settings that are not as they should be.

Whatever is wrong, the error says what and where and what to do, with the exit code of its family, and
nothing has been stored or installed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attack_world import (
    ENVIRONMENT,
    SYSTEM,
    WORKLOAD,
    Machine,
    World,
    as_user,
    environ,
    key,
    names,
    names_of,
    objects,
    python,
    write_graph,
)

import cache_samples
from cache_samples import contents, write
from torchrelay import cli, directories
from torchrelay.caches import index
from torchrelay.caches.base import Found
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.cli.failures import exit_code
from torchrelay.environment import Environment
from torchrelay.errors import (
    DeniedError,
    DirectoryError,
    InstallError,
    KeyFileError,
    NotFoundError,
    PermanentError,
    RelayError,
    StampError,
    StorageError,
    TrustError,
    UnsafeDirectoryError,
    UsageError,
)
from torchrelay.relay import PullOptions, PushOptions, Relay, TorchrelayWarning
from torchrelay.signing import keyfiles, trust

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can make files of others")
OTHER = 65534


@pytest.fixture
def consumer(world, tmp_path):
    """A machine that has not pulled yet."""
    producer, store = world.copy(tmp_path / "w")
    return Machine.make(tmp_path / "consumer", store, trusting=producer)


def failed(call: Callable[[], Any], kind: type[RelayError], *words: str) -> RelayError:
    """The call raises ``kind``, and its text has these words and a remedy."""
    with pytest.raises(RelayError) as caught:
        call()
    error = caught.value
    assert isinstance(error, kind), repr(error)
    for word in words:
        assert word in error.diagnostics(), error.diagnostics()
    assert error.remedy, error.message
    return error


# -- the cache directory --------------------------------------------------------------------------


def foreign(path: Path) -> None:
    path.mkdir(parents=True)
    os.chown(path, OTHER, OTHER)


def open_to_all(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o777)


def below_one_open_to_all(path: Path) -> None:
    path.parent.chmod(0o777)
    path.mkdir(parents=True)


def a_file(path: Path) -> None:
    path.write_bytes(b"")


BAD_DIRECTORIES: dict[str, tuple[Callable[[Path], None], type[RelayError]]] = {
    "of-another-user": (foreign, UnsafeDirectoryError),
    "writable-by-all": (open_to_all, UnsafeDirectoryError),
    "below-one-writable-by-all": (below_one_open_to_all, UnsafeDirectoryError),
    "a-file": (a_file, DirectoryError),
}


@needs_root
@pytest.mark.parametrize("how", BAD_DIRECTORIES)
@pytest.mark.parametrize("which", ["cache", "triton", "tree"])
def test_nothing_is_installed_into_a_bad_directory(world, consumer, tmp_path, which, how):
    make, kind = BAD_DIRECTORIES[how]
    bad = tmp_path / "elsewhere" / "bad"
    bad.parent.mkdir(mode=0o755)
    make(bad)
    changes: dict[str, Any] = {
        "cache": {"cache_dir": bad},
        "triton": {"triton_cache_dir": bad},
        "tree": {"trees": {"vllm": bad}},
    }[which]
    relay = consumer.relay(**changes)
    options = {"environment": ENVIRONMENT}
    word = str(bad.parent if how.startswith("below") else bad)
    failed(lambda: relay.pull(pull_options(**options)), kind, word)
    left = [path for path in bad.parent.rglob("*") if path != bad]
    assert left == [], left
    assert consumer.installed() == {}


def pull_options(**options: Any) -> Any:
    from torchrelay.relay import PullOptions

    return PullOptions(**options)


@needs_root
@pytest.mark.parametrize("how", ["of-another-user", "writable-by-all"])
@pytest.mark.parametrize("which", ["cache", "triton", "tree"])
def test_nothing_is_signed_from_a_bad_directory(producer, which, how):
    bad = {"cache": producer.cache, "triton": producer.base / "triton", "tree": producer.tree}[which]
    changes: dict[str, Any] = {}
    if which == "triton":
        shutil.move(producer.cache / "triton" / "0", bad)
        changes["triton_cache_dir"] = bad
    if how == "of-another-user":
        os.chown(bad, OTHER, OTHER)
    else:
        bad.chmod(0o777)
    failed(lambda: producer.relay(**changes).push(), UnsafeDirectoryError, str(bad))
    assert not producer.root.exists()


@pytest.mark.parametrize(
    "part",
    ["fxgraph", f"fxgraph/{key('f', 1)[1:3]}", "aotautograd", "ab", "triton", "triton/0", "cache", "dynamo"],
)
def test_nothing_is_installed_through_a_link(world, consumer, tmp_path, part):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = consumer.cache / part
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    report = consumer.pull()
    assert {problem.reason for problem in report.missing} <= {"in-the-way", "needs"}
    assert report.exit_code == 1 and "in-the-way" in {problem.reason for problem in report.missing}
    assert report.installed + len(report.missing) == len(world.entries)
    assert list(outside.iterdir()) == []
    for name, data in contents(consumer.cache).items():
        assert data.replace(str(consumer.cache).encode(), b"<cache>") == world.good[name]


def test_the_cache_directory_itself_may_be_a_link(world, consumer, tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    consumer.cache.symlink_to(real)
    assert consumer.pull().exit_code == 0
    assert consumer.installed() == world.good and contents(real)


@pytest.mark.parametrize("name", [".torchrelay", ".torchrelay/tmp", ".torchrelay/state-0"])
def test_the_own_folder_is_no_link(consumer, tmp_path, name):
    if name.endswith("-0"):
        name = name.replace("-0", f"-{os.geteuid()}")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    link = consumer.cache / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    failed(consumer.pull, UsageError)
    assert list(outside.iterdir()) == [] and contents(consumer.cache) == {}


def test_a_directory_that_was_filled_on_another_machine_is_left_alone(consumer, world):

    facets = {**ENVIRONMENT.facets, "cpu_isa": "AVX512"}
    write_stamp(consumer.cache, Stamp(Environment(1, facets, {}), 0))
    failed(consumer.pull, StampError, "cpu_isa", str(consumer.cache))
    assert consumer.installed() == {}


def test_a_directory_without_a_stamp_is_not_signed(producer):
    shutil.rmtree(producer.cache / ".torchrelay")
    failed(producer.push, StampError, "--assume-environment this", str(producer.cache))
    assert not producer.root.exists()


# -- the store ------------------------------------------------------------------------------------


def test_a_store_that_does_not_exist(producer):
    error = failed(producer.pull, NotFoundError, producer.store, "does not exist")
    assert exit_code(error) == 4 and not producer.root.exists()
    failed(producer.verify, NotFoundError, producer.store)
    rehearsed = producer.push(dry_run=True)
    assert rehearsed.exit_code == 0 and rehearsed.pushed > 0 and not producer.root.exists()
    assert producer.push().exit_code == 0
    assert producer.root.is_dir()


@pytest.mark.parametrize("what", ["file", "link-to-nowhere", "below-a-file"])
def test_a_store_that_is_no_directory(producer, tmp_path, what):
    producer.root.parent.mkdir(exist_ok=True)
    machine = producer
    if what == "link-to-nowhere":
        producer.root.symlink_to(tmp_path / "nowhere")
    else:
        producer.root.write_bytes(b"precious")
        machine = producer.at(producer.root / "below") if what == "below-a-file" else producer
    before = names(tmp_path)
    for call in (machine.push, machine.pull, machine.verify):
        error = failed(call, StorageError, str(producer.root))
        assert exit_code(error) == 4
    assert {name for name in names(tmp_path) - before if not name.startswith("producer/")} == set()
    if what != "link-to-nowhere":
        assert producer.root.read_bytes() == b"precious"


@pytest.mark.parametrize("folder", ["blobs", "environments", f"manifests/{WORKLOAD}"])
def test_a_folder_of_the_store_that_is_a_link_is_not_followed(producer, tmp_path, folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    (producer.root / folder).parent.mkdir(parents=True)
    (producer.root / folder).symlink_to(outside)
    failed(producer.push, PermanentError, folder.partition("/")[0])
    assert list(outside.iterdir()) == []
    assert not [name for name in names(producer.root) if name.startswith("manifests/") and "/" in name[20:]]


@needs_root
def test_a_store_that_is_read_only(world, tmp_path):
    """Pull works as ever; a push says what is wrong, and leaves nothing."""
    producer, store = world.copy(tmp_path / "w")
    write_graph(producer.cache, key("f", 50), guards_expr=None)
    for path in [store, *store.rglob("*")]:
        os.chown(path, 0, 0)
        path.chmod(0o755 if path.is_dir() else 0o644)
    give(tmp_path, producer)
    before = objects(store)
    done = child(as_user(OTHER), producer, "print(machine.pull().exit_code)\nmachine.push(all=True)")
    assert done.stdout.split() == ["0"], done.stderr
    assert "DeniedError" in done.stderr and str(store) in done.stderr
    assert "no permission for" in done.stderr
    assert objects(store) == before


def give(tmp_path: Path, machine: Machine, uid: int = OTHER) -> None:
    """A machine's directories to another user, who can also get there."""
    for path in [machine.base, *machine.base.rglob("*")]:
        os.chown(path, uid, uid, follow_symlinks=False)
    for above in machine.base.parents:
        if above.stat().st_mode & 0o055 != 0o055 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)


def child(begin: str, machine: Machine, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in another process, with ``machine`` in it."""
    places = [str(machine.base), machine.store, str(machine.key), str(machine.policy)]
    begin = f"from attack_world import Machine, warm_up\nwarm_up()\n{begin}"
    text = f"{begin}\nmachine = Machine.of({places})\n{code}\n"
    variables = {**environ(), "HOME": str(machine.base)}
    return subprocess.run(
        python("-c", text), env=variables, cwd="/", capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "..", "/abs", "a//b", ".hidden", "a/.b", "", "a b", "a" * 64]
)
def test_a_workload_that_could_lead_elsewhere(producer, name):
    if name == "a" * 64:
        name = "acme/" + name  # could pass for an environment
    error = failed(lambda: producer.relay(workload=name), UsageError, "workload")
    assert exit_code(error) == 2
    assert not producer.root.exists()


# -- keys -----------------------------------------------------------------------------------------


def public_instead(path: Path) -> None:
    path.write_text(keyfiles.load_private_key(path).public_key.text + "\n")


def encrypted(path: Path) -> None:
    signer = keyfiles.load_private_key(path)
    path.write_bytes(signer.to_pem(b"a pass phrase"))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def another(path: Path) -> None:
    path.unlink()
    keyfiles.generate_key(path)


BAD_KEYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "there is no key file"),
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "line-feeds": (lambda path: path.write_bytes(b"\n\n"), "empty"),
    "public": (public_instead, "holds a public key"),
    "encrypted": (encrypted, "encrypted"),
    "truncated": (truncated, str(Path("key.pem"))),
    "open-to-all": (lambda path: path.chmod(0o644), "0644"),
    "writable-by-group": (lambda path: path.chmod(0o620), "0620"),
    "folder": (folder_instead, "directory"),
    "rubbish": (lambda path: path.write_bytes(bytes(range(256))), "not text"),
    "huge": (lambda path: os.truncate(path, 100 << 20), "too large"),
    "untrusted": (another, "is not in the trust policy"),
}


@pytest.mark.parametrize("how", BAD_KEYS)
def test_a_key_that_cannot_sign_stops_a_push_before_any_upload(producer, how):
    spoil, word = BAD_KEYS[how]
    spoil(producer.key)
    relay = producer.relay(key=producer.key)
    error = failed(relay.push, TrustError if how == "untrusted" else KeyFileError, word)
    assert exit_code(error) == (3 if how == "untrusted" else 2)
    assert "pass phrase" not in error.message or how == "encrypted"
    assert not producer.root.exists()


@pytest.mark.parametrize("how", sorted(BAD_KEYS.keys() - {"missing", "untrusted"}))
def test_the_users_own_key_is_not_replaced_when_it_cannot_sign(producer, how):
    """Without ``--key``: only a key that is not there is made."""
    home = Path(os.environ["HOME"])
    shutil.copytree(producer.base / "config", home / ".config" / "torchrelay")
    own = home / ".config" / "torchrelay" / "key.pem"
    BAD_KEYS[how][0](own)
    before = own.read_bytes() if own.is_file() else b""
    failed(producer.relay(key=None, policy=None).push, KeyFileError, str(own))
    assert not producer.root.exists()
    assert (own.read_bytes() if own.is_file() else b"") == before


@pytest.mark.parametrize("change", ["CRLF", "no-line-feed", "more-line-feeds", "byte-order-mark"])
def test_a_key_that_went_through_an_editor_still_signs(producer, change):
    data = producer.key.read_bytes()
    producer.key.write_bytes(
        {
            "CRLF": data.replace(b"\n", b"\r\n"),
            "no-line-feed": data.rstrip(b"\n"),
            "more-line-feeds": b"\n\n" + data + b"\n\n",
            "byte-order-mark": b"\xef\xbb\xbf" + data,
        }[change]
    )
    assert producer.push().pushed > 0
    assert producer.verify().exit_code == 0


@needs_root
def test_a_key_that_this_user_may_not_read(producer, tmp_path):
    give(tmp_path, producer)
    os.chown(producer.key, 0, 0)
    producer.key.chmod(0o600)
    done = child(as_user(OTHER), producer, "machine.relay(key=machine.key).push()")
    assert "KeyFileError" in done.stderr and "not readable" in done.stderr, done.stderr
    assert not producer.root.exists()


def test_an_encrypted_key_signs_with_its_pass_phrase(producer, monkeypatch):
    encrypted(producer.key)
    monkeypatch.setenv("TORCHRELAY_KEY_PASSPHRASE", "wrong")
    failed(producer.push, KeyFileError, "cannot be decrypted")
    assert not producer.root.exists()
    monkeypatch.setenv("TORCHRELAY_KEY_PASSPHRASE", "a pass phrase")
    assert producer.push().exit_code == 0


# -- X06: signing is never silently off -----------------------------------------------------------

MISSPELT: dict[str, tuple[list[str], dict[str, str], str]] = {
    "flag": (["--kye", "{key}"], {}, "--key"),
    "flag-abbreviated": (["--ke", "{key}"], {}, "--key"),
    "flag-for-the-policy": (["--polcy", "{policy}"], {}, "--policy"),
    "flag-to-turn-it-off": (["--no-sign"], {}, "--no-sign"),
    "variable": ([], {"TORCHRELAY_KYE": "{key}"}, "TORCHRELAY_KYE"),
    "variable-of-a-signing-key": ([], {"TORCHRELAY_SIGNING_KEY": "{key}"}, "TORCHRELAY_SIGNING_KEY"),
    "variable-in-lower-case": ([], {"torchrelay_key": "{key}"}, "torchrelay_key"),
    "variable-empty": ([], {"TORCHRELAY_KEY": ""}, "TORCHRELAY_KEY"),
    "key-missing": (["--key", "{key}.not-there"], {}, "not-there"),
    "key-in-a-variable-missing": ([], {"TORCHRELAY_KEY": "{key}.not-there"}, "not-there"),
}


@pytest.mark.parametrize("how", MISSPELT)
def test_x06_a_misspelt_key_is_an_error_before_any_upload(producer, capsys, monkeypatch, how):
    extra, variables, word = MISSPELT[how]
    places = {"key": producer.key, "policy": producer.policy}
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(**places))
    # No --key of its own, so that only what is misspelt says which one is meant.
    argv = producer.arguments("push", "--all")
    at = argv.index("--key")
    code = cli.main([*argv[:at], *argv[at + 2 :], *(part.format(**places) for part in extra)])
    err = capsys.readouterr().err
    assert code == 2 and word in err, err
    assert not producer.root.exists()


@pytest.mark.parametrize(
    "line", ['kye = "k.pem"', 'key = ""', "key = 5", "sign = false", "accept-unsigned = true"]
)
def test_x06_a_misspelt_key_in_a_file_is_an_error_before_any_upload(producer, capsys, line):
    Path("torchrelay.toml").write_text(line + "\n")
    argv = producer.arguments("push", "--all")
    at = argv.index("--key")
    assert cli.main([*argv[:at], *argv[at + 2 :]]) == 2
    assert "torchrelay.toml" in capsys.readouterr().err
    assert not producer.root.exists()


@pytest.mark.parametrize("query", ["?key=x", "?sign=off", "?kye=x", "#key"])
def test_x06_a_parameter_of_the_url_is_an_error_before_any_upload(producer, capsys, query):
    url = f"file://{producer.store}{query}"
    argv = producer.arguments("push", "--all")
    argv[argv.index(producer.store)] = url
    assert cli.main(argv) == 2
    assert "query" in capsys.readouterr().err
    assert not [path for path in producer.root.parent.iterdir() if path.name.startswith("store")]


def test_x06_a_pull_without_trusted_keys_refuses_everything(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    consumer.policy.write_text("format = 1\n")
    report = consumer.pull()
    assert report.exit_code == 3 and report.installed == 0 and consumer.installed() == {}
    assert {problem.reason for problem in report.refused} == {"unknown-key"}
    assert {problem.key_id for problem in report.refused} == {producer.signer.public_key.key_id}


def test_x06_the_default_of_a_new_user_trusts_nobody_else(world, tmp_path):
    _, store = world.copy(tmp_path / "w")
    relay = Relay(
        store,
        workload=WORKLOAD,
        cache_dir=tmp_path / "cache",
        state_dir=tmp_path / "state",
        in_process=False,
        strict=True,
    )
    report = relay.pull(pull_options(environment=ENVIRONMENT))
    assert report.exit_code == 3 and report.installed == 0
    assert contents(tmp_path / "cache") == {}


# -- used as a library ----------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["no-store", "store-is-a-file", "bad-policy", "bad-key"])
def test_trouble_is_one_warning_and_never_an_exception(producer, trouble):
    if trouble == "store-is-a-file":
        producer.root.write_bytes(b"")
    elif trouble == "bad-policy":
        producer.policy.write_text("nonsense")
    elif trouble == "bad-key":
        producer.key.write_text("nonsense")
    options = pull_options(environment=ENVIRONMENT)
    relay = producer.relay(strict=False)
    with pytest.warns(TorchrelayWarning) as seen:
        reports = [relay.push() if trouble == "bad-key" else relay.pull(options) for _ in range(3)]
    assert all(report.error and report.exit_code == 1 for report in reports)
    assert trouble != "bad-key" or str(producer.key) in str(seen[0].message)
    assert len(seen) == 1
    assert not producer.root.is_dir()


def test_an_error_of_the_cache_directory_is_one_of_installing(consumer):
    """A full or read-only cache directory is no fault of the store's."""
    write(consumer.cache / ".torchrelay" / "tmp", b"a file where a folder must be")
    error = failed(consumer.pull, InstallError, ".torchrelay/tmp")
    assert exit_code(error) == 1
    assert not isinstance(error, DeniedError)


def test_world_is_untouched(world: World):
    """The store that all tests copy from."""
    assert world.producer.verify().exit_code == 0


def test_a_local_file_that_cannot_be_merged_into_keeps_only_its_own_entries_out(world, consumer):
    broken = write(consumer.cache / "cache" / SYSTEM, b'{"torn": ')
    report = consumer.pull()
    assert report.exit_code == 1 and report.installed == len(world.entries) - 1
    assert [(p.reason, str(broken) in p.detail) for p in report.missing] == [("in-the-way", True)]
    assert broken.read_bytes() == b'{"torn": '
    assert {n for n in world.good if n not in consumer.installed()} == set()
    broken.unlink()
    assert consumer.pull().installed == 1 and consumer.installed() == world.good


@pytest.mark.parametrize("kind", ["cpp", "triton"])
def test_a_pulled_kernel_that_was_changed_is_named_never_signed_and_replaced(world, consumer, tmp_path, kind):
    """Whole, of this machine, under its own name, and not what was signed."""
    consumer.pull()
    name = next(n for n in world.good if n.endswith({"cpp": ".main.so", "triton": ".cubin"}[kind]))
    path = consumer.cache / name
    data = bytearray(path.read_bytes())
    data[data.index(b"code" if kind == "cpp" else b"sass")] ^= 1
    path.write_bytes(data)

    found = consumer.verify(local=True)
    assert found.exit_code == 1 and [p.subject.partition(" ")[0] for p in found.damaged] == [kind]

    keyfiles.generate_key(consumer.key)
    trust.add_key(consumer.policy, consumer.signer.public_key.text)
    report = consumer.at(tmp_path / "elsewhere").push(all=True, own=True)
    assert (report.pushed, report.held, report.excluded) == (0, 0, {"pulled": len(world.entries)})
    assert not names(tmp_path / "elsewhere")

    assert consumer.pull().installed == 1
    assert consumer.installed() == world.good and consumer.verify(local=True).exit_code == 0


def test_status_of_a_machine_that_only_pulls_says_what_it_cannot_do(world, consumer):
    consumer.pull()
    report = consumer.relay().status()
    assert (report.exit_code, report.live, report.to_pull, report.to_push) == (0, len(world.entries), 0, 0)
    assert "nothing can be pushed from here" in "".join(report.warnings)


def test_a_pull_beside_a_push_leaves_nothing_to_sign(world, tmp_path, monkeypatch):
    """The ledger is read after the scan, so it knows whatever the scan can have found."""
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store)
    trust.add_key(consumer.policy, producer.signer.public_key.text)
    consumer.stamp()
    real = index.Index.load
    pulled: list[Any] = []

    def load(root: Path, *, reading: str = "") -> index.Index:
        if not pulled:
            pulled.append(None)
            pulled[0] = consumer.pull()
        return real(root, reading=reading)

    monkeypatch.setattr(index.Index, "load", load)  # what a push does right before it scans
    report = consumer.push()
    assert pulled[0].installed == len(world.entries)
    assert (report.pushed, report.segment) == (0, "")


@pytest.mark.parametrize("which", ["kernel", "second device"])
def test_verify_local_asks_the_files_and_not_the_index(world, consumer, monkeypatch, which):
    """An index that was planted, or a file that looks unchanged, hides nothing."""

    def blind(found: Found) -> str:
        return f"{found.kind} {found.key} {[file.name for file in found.files]}"

    monkeypatch.setattr(index, "fingerprint", blind)
    for device in ("0", "1"):
        (consumer.cache / "triton" / device).mkdir(parents=True)
    assert consumer.pull().exit_code == 0
    assert consumer.verify(local=True).exit_code == 0
    name = "triton/1/*/*.source" if which == "second device" else "*/*.main.so"
    (path,) = consumer.cache.glob(name)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"code", b"CODE").replace(b"source", b"SOURCE"))
    assert path.read_bytes() != data
    report = consumer.verify(local=True)
    assert report.exit_code == 1 and len(report.damaged) == 1, report
    assert ("triton" if which == "second device" else "cpp") in report.damaged[0].subject


def test_a_blob_of_pulled_entries_adds_up_and_is_not_signed(world, tmp_path):
    """What a pull installed here is somebody else's by way of a Mega-Cache blob, too."""
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store)
    trust.add_key(consumer.policy, producer.signer.public_key.text)
    consumer.pull()
    blob = tmp_path / "consumer" / "blob.bin"
    report = consumer.relay().export_mega(blob, PullOptions(environment=ENVIRONMENT))
    assert report.incompatible == {"no-place": 3, "undeclared-tree": 1}  # cpp, triton, gemm
    assert report.installed + 4 == len(world.entries)
    before = objects(store)
    imported = consumer.relay().import_mega(blob, PushOptions(environment=ENVIRONMENT))
    assert imported.pushed == 0 and objects(store) == before


def test_a_secret_in_a_kernel_keeps_it_here(producer):
    """The ways in: a source, a library and a GPU kernel's source."""
    folder = cache_samples.CPP_FOLDER
    source = producer.cache / folder / f"{cache_samples.CPP}.main.cpp"
    source.write_bytes(b"// redis://:hunter2pw@host:6379\nint main;")
    cache_samples.triton_group(producer.cache / "triton" / "0", salt=b"\npassword = 'hunter2hunter2'\n")
    report = producer.push()
    assert {p.reason for p in report.excluded_entries} == {"secret"} and report.excluded["secret"] == 2
    assert "hunter2" not in names_of(report.excluded_entries)
    assert not {"cpp", "triton"} & report.by_kind.keys() and report.pushed


def a_folder(cache: Path) -> None:
    (cache / cache_samples.CPP_FOLDER / f"{cache_samples.CPP}.main.so").mkdir(parents=True)


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "folder": a_folder,
    "file": lambda cache: write(cache / cache_samples.CPP_FOLDER, b"x"),
    "file-above": lambda cache: write(cache / "triton", b"x"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_in_the_way_keeps_only_its_own_entry_out(world, consumer, what):
    IN_THE_WAY[what](consumer.cache)
    for _ in range(2):
        report = consumer.pull()
        (problem,) = report.missing
        assert problem.reason == "in-the-way" and report.exit_code == 1
    kind = problem.subject.partition(" ")[0]
    assert kind == ("triton" if what == "file-above" else "cpp")
    installed = {n: d for n, d in consumer.installed().items() if n in world.good}
    assert installed == world.without({problem.subject})


def test_an_entry_whose_file_has_the_name_of_anothers_folder_keeps_only_that_out(world, tmp_path):
    """Both are signed by trusted writers, and no machine can hold both."""
    producer, store = world.copy(tmp_path / "w")
    other = Machine.make(tmp_path / "other", store)
    trust.add_key(other.policy, producer.signer.public_key.text)
    write(other.tree / "rank_0", b"not a folder")
    other.cache.mkdir()
    other.stamp()
    assert other.push().pushed == 1
    consumer = Machine.make(tmp_path / "consumer", store, trusting=other)
    report = consumer.pull()
    assert [problem.reason for problem in report.missing] == ["in-the-way"]
    assert report.installed == len(world.entries)  # of one more


def test_a_lock_that_somebody_keeps_holds_no_pull_up(world, consumer):
    """A file that others may open, as an earlier version had it, does not count."""
    path = write(consumer.cache / ".torchrelay" / "gemm.lock", b"")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert consumer.pull().exit_code == 0
    finally:
        os.close(descriptor)
    assert consumer.installed() == world.good


# -- directories that several of Inductor's share -----------------------------------------------------


@dataclass(frozen=True)
class Shared(Machine):
    """A machine whose kernels lie in a Triton directory of their own, used with two of Inductor's."""

    second: bool = False

    @property
    def cache(self) -> Path:
        return self.base / ("second" if self.second else "cache")

    def relay(self, **changes: Any) -> Relay:
        return super().relay(triton_cache_dir=self.base / "kernels", **changes)


def two_of(machine: Machine) -> tuple[Shared, Shared]:
    places = (machine.base, machine.store, machine.key, machine.policy)
    return Shared(*places), Shared(*places, second=True)


def test_a_directory_that_is_shared_keeps_what_was_pulled_into_it_unsigned(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    plain = Machine.make(tmp_path / "consumer", store)
    trust.add_key(plain.policy, producer.signer.public_key.text)
    first, second = two_of(plain)
    assert first.pull().exit_code == 0
    assert list((plain.base / "kernels").glob("*/*.cubin"))
    write_stamp(second.cache, Stamp(ENVIRONMENT, 0))
    before = objects(store)
    report = second.push(all=True)
    assert report.pushed == 0 and objects(store) == before


def test_a_shared_directory_is_not_signed_under_another_environment(producer):
    """What lies in it was compiled under one; a push from a directory of the other must not state that."""
    _, second = two_of(producer)
    cache_samples.triton_group(producer.base / "kernels")
    write_stamp(producer.base / "kernels", Stamp(ENVIRONMENT, 0))
    elsewhere = Environment(1, {**ENVIRONMENT.facets, "triton": "3.9.9"}, {})
    write_stamp(second.cache, Stamp(elsewhere, 0))
    failed(second.push, StampError, "triton", str(producer.base / "kernels"))
    assert not producer.root.exists()


def test_a_filled_directory_without_a_stamp_is_not_signed(producer):
    """Others may have compiled into it: somebody must vouch for each directory."""
    first, _ = two_of(producer)
    cache_samples.triton_group(producer.base / "kernels")
    failed(first.push, StampError, "kernels", "--assume-environment")
    assert not producer.root.exists()
    write_stamp(producer.base / "kernels", Stamp(ENVIRONMENT, 0))
    assert first.push().by_kind["triton"] == 1


def test_what_is_older_than_the_stamp_of_its_own_directory_is_not_signed(producer):
    first, _ = two_of(producer)
    folder = cache_samples.triton_group(producer.base / "kernels")
    for path in folder.iterdir():
        os.utime(path, ns=(10**9, 10**9))
    write_stamp(producer.base / "kernels", Stamp(ENVIRONMENT, 2 * 10**9))
    report = first.push()
    assert "triton" not in report.by_kind and report.excluded["older-than-scope"] == 1
    assert first.push(all=True).by_kind == {"triton": 1}


LAUNDRY = {
    "tree-touched": lambda m: os.utime(m.tree / "rank_0" / "graph.py", (2e9, 2e9)),
    "tree-added": lambda m: write(m.tree / "rank_0" / "other.json", b'{"n":1}'),
    "gemm-respelt": lambda m: _respell(m.cache / "cache" / SYSTEM),
    "stub-added": lambda m: write(
        m.cache / "triton" / "0" / cache_samples.HASH / "k.autotune.json", b'{"a":1}'
    ),
}


def _respell(path: Path) -> None:
    data = path.read_bytes()
    assert b"0.125" in data
    path.write_bytes(data.replace(b"0.125", b"1.25e-1"))


@pytest.mark.parametrize("how", LAUNDRY)
def test_an_entry_of_parts_that_a_pull_installed_is_not_signed_once_one_changed(tmp_path, how):
    """Not even where its signer is trusted no more, so that nothing in the store covers it."""
    producer = Machine.make(tmp_path / "producer", tmp_path / "store")
    producer.fill()
    if how == "stub-added":
        shutil.rmtree(producer.cache / "triton")
        write(producer.cache / "triton" / "0" / cache_samples.HASH / "cuda_utils.so", cache_samples.elf())
    producer.push()
    consumer = Machine.make(tmp_path / "consumer", producer.store)
    own = consumer.policy.read_text()
    trust.add_key(consumer.policy, producer.signer.public_key.text)
    assert consumer.pull().exit_code == 0
    LAUNDRY[how](consumer)
    consumer.policy.write_text(own)
    before = objects(producer.root)
    report = consumer.push(all=True, own=True)
    assert report.pushed == 0 and objects(producer.root) == before


def test_explain_says_what_a_pull_does_where_there_is_no_place(world, consumer, monkeypatch):
    """Both go by the same rules: trees that are declared, and where torch is installed."""
    monkeypatch.setattr(directories, "this_prefixes", lambda: None)
    relay = consumer.relay(trees={})
    explained = relay.explain(None, ENVIRONMENT)
    lacking = {group.facets[0].facet: group.kinds for group in explained.groups if not group.fits}
    assert lacking == {"undeclared-tree": {"tree": 1}}
    assert relay.pull(PullOptions(environment=ENVIRONMENT)).incompatible == {"undeclared-tree": 1}
    assert all(group.fits for group in consumer.relay().explain(None, ENVIRONMENT).groups)
