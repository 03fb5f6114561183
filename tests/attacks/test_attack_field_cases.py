# SPDX-License-Identifier: Apache-2.0
"""Faults that peers met in the field, tried here: temporary files, kills, full disks, shared folders.

Processes are forked where many are needed, so that none of the time goes into starting Python.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attack_world import (
    ENVIRONMENT,
    WORKLOAD,
    Machine,
    as_user,
    environ,
    fork,
    join,
    key,
    names,
    objects,
    python,
    write_graphs,
)

from cache_samples import HASH, KERNEL, contents, elf, write
from torchrelay.caches.stamp import Stamp, write_stamp
from torchrelay.digest import digest_of
from torchrelay.errors import InstallError, PermanentError, RelayError, UnsafeDirectoryError
from torchrelay.relay import PullOptions
from torchrelay.signing import trust

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs other users or mounts")
FSYNC = os.fsync
KILLS = 60
SEED = 20240229


@pytest.fixture
def real_fsync(nobody, monkeypatch):
    """Syncs take the time that they take, so that kills fall between them."""
    monkeypatch.setattr(os, "fsync", FSYNC)


def pull(machine: Machine, **changes: object) -> None:
    machine.relay(**changes).pull(PullOptions(environment=ENVIRONMENT))


def is_whole(store: Path) -> bool:
    """Every file under a final name has the digest that names it."""
    finals = {name: data for name, data in objects(store).items() if "/.tmp-" not in f"/{name}"}
    return all(digest_of(data) == Path(name).name for name, data in finals.items())


# -- R01 ------------------------------------------------------------------------------------------


def test_r01_half_written_files_are_neither_signed_nor_uploaded(producer):
    graph = producer.cache / "fxgraph" / key("f", 1)[1:3] / key("f", 1)
    result = producer.cache / "aotautograd" / key("a", 1)
    group = producer.cache / "triton" / "0"
    debris = {
        graph / ".123.456.tmp": b"half",
        graph / ("a" * 51): b"",
        graph / ("b" * 51): b"\x80\x04",
        result / ".1.2.tmp": b"half",
        group / "tmp.pid_9_x" / "foo.cubin": elf(b"half"),
        group / HASH / "tmp.pid_9_x" / f"{KERNEL}.cubin": elf(b"half"),
        group / HASH / f"{KERNEL}.ptx.tmp": b"half",
        group / ("B" * 52) / "other.json": b'{"hash":""}',
        producer.cache / "ab" / "tmpabcd1234": b"half",
        producer.cache / "ab" / f"{key('c', 5)}.main.so": elf(b"code")[:-20],
        producer.cache / "xy" / f"{'e' * 64}.best_config": b'{"XBLOCK": 6',
        producer.cache / "dynamo" / "code_state_job_0_main.pkl.lock": b"x",
        producer.tree / "rank_1" / "model.bin.tmp": b"half",
    }
    for path, data in debris.items():
        write(path, data)
    report = producer.push()
    assert report.pushed == 11, report
    assert sum(report.excluded.values()) >= len(debris) - 2  # a folder is one, whatever it holds
    blobs = [name for name in objects(producer.root) if name.startswith("blobs/")]
    assert len(blobs) == 11
    consumer = Machine.make(producer.base.parent / "consumer", producer.store, trusting=producer)
    assert consumer.pull().installed == 11
    hidden = {path.name for path in debris} & {Path(name).name for name in consumer.installed()}
    assert hidden == {f"{KERNEL}.cubin"}  # the whole one, of the group itself


def test_r01_a_file_that_grows_is_uploaded_in_its_final_form_or_not_at_all(producer):
    """No name tells that it is unfinished, and each of its lengths would do as an entry."""
    path = producer.tree / "rank_7" / "log.txt"
    chunk = os.urandom(4096)
    done = threading.Event()
    write(path, chunk)

    def grow() -> None:
        with path.open("ab", buffering=0) as stream:
            while not done.is_set():
                stream.write(chunk)
                time.sleep(0.0002)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        reports = [producer.push() for _ in range(3)]
        during = {e.key: e for e in producer.relay().entries().entries if e.kind == "tree"}
    finally:
        done.set()
        thread.join()
    assert "vllm/rank_7" not in during
    assert all(report.excluded.get("growing") for report in reports)
    final = path.read_bytes()
    assert producer.push().pushed == 1
    consumer = Machine.make(producer.base.parent / "consumer", producer.store, trusting=producer)
    consumer.pull()
    assert consumer.installed()["tree/rank_7/log.txt"] == final


def test_r01_leftovers_in_a_store_are_ignored(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    entry = world.entries[0]
    folder = (store / entry.blob).parent
    manifest = store / "manifests" / WORKLOAD / ENVIRONMENT.digest
    for path in (folder, manifest, store / "environments", store / "gc", store):
        write(path / ".tmp-123-0123456789abcdef", b"half")
        write(path / "README", b"a note")
        write(path / "empty", b"")
        (path / "folder").mkdir()
        (path / "link").symlink_to("/etc/passwd")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert report.exit_code == 0 and report.warnings == [] and consumer.installed() == world.good
    assert consumer.verify().exit_code == 0
    assert producer.push().pushed == 0


# -- R02 ------------------------------------------------------------------------------------------


def read_group(folder: Path) -> int:
    """Open the group file, then every member, as Triton does: 1 if it was there."""
    try:
        group = json.loads((folder / f"__grp__{KERNEL}.json").read_bytes())
    except FileNotFoundError:
        return 0
    for name, path in group["child_paths"].items():
        data = Path(path).read_bytes()
        assert data and Path(path).name == name
        if name.endswith(".cubin"):
            assert data == elf(b"sass", machine=190, type_=2)
    return 1


def test_r02_a_group_file_never_names_a_member_that_is_not_there(producer, tmp_path):
    """Eight processes pull one group into one folder, one of them is killed, and a ninth reads."""
    producer.push()
    consumer = Machine.make(tmp_path / "consumer", producer.store, trusting=producer)
    chance = random.Random(SEED)
    seen = 0
    for number in range(10):
        triton = tmp_path / f"triton-{number}"
        cache = tmp_path / f"cache-{number}"
        machines = [replace(consumer, base=tmp_path / f"c{number}-{n}") for n in range(8)]
        for machine in machines:
            machine.base.mkdir()

        def work(machine: Machine, triton: Path = triton, cache: Path = cache) -> None:
            pull(machine, triton_cache_dir=triton, cache_dir=cache)

        pids = [fork(lambda m=machine: work(m)) for machine in machines]
        victim = chance.randrange(8)
        moment = time.monotonic() + chance.random() * 0.05
        left = set(pids)
        while left:
            seen += read_group(triton / HASH)
            if moment and time.monotonic() > moment and pids[victim] in left:
                os.kill(pids[victim], signal.SIGKILL)
                moment = 0
            for pid in list(left):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    left.discard(pid)
                    assert status == 0 or pid == pids[victim]
            time.sleep(0.0005)
        assert read_group(triton / HASH) == 1
        assert {path.name for path in (triton / HASH).iterdir()} == {
            f"__grp__{KERNEL}.json",
            *(f"{KERNEL}.{end}" for end in ("source", "ttir", "cubin", "json")),
        }
    assert seen > 0, "the reader never looked at the right time"


def test_r02_the_group_file_of_a_torn_group_is_not_pushed(producer):
    """What this process would miss, no other one gets."""
    (producer.cache / "triton" / "0" / HASH / f"{KERNEL}.cubin").unlink()
    report = producer.push()
    assert report.excluded.get("incomplete") and report.by_kind.get("triton") is None
    assert not [e for e in producer.relay().entries().entries if e.kind == "triton"]


# -- P14 ------------------------------------------------------------------------------------------


def kill_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process that is killed after so long; whether it was killed."""
    pid = fork(work)
    time.sleep(seconds)
    try:
        os.kill(pid, signal.SIGKILL)
    finally:
        (code,) = join(pid)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


STEPS = {"open", "os.rename", "os.mkdir", "os.remove", "os.truncate"}


def steps(work: Callable[[], object], place: Path) -> int:
    """How many files ``work`` opens, makes, renames and removes, until it is done."""
    done: list[str] = []

    def counted() -> None:
        sys.addaudithook(lambda event, _: done.append(event) if event in STEPS else None)
        work()
        place.write_text(str(len(done)))

    assert join(fork(counted)) == [0]
    return int(place.read_text())


def kill_at(step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process that is killed right before it opens, makes or renames its n-th file.

    Whether it was killed: it may come to its end before the last few steps, which vary.
    """
    left = list(range(step))

    def hook(event: str, _: object) -> None:
        if event in STEPS and left:
            left.pop()
            if not left:  # which a kill, an event itself, does not find again
                os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        sys.addaudithook(hook)
        work()

    (code,) = join(fork(killed))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def duration(work: Callable[[], object]) -> float:
    started = time.monotonic()
    assert join(fork(work)) == [0]
    return time.monotonic() - started


def test_p14_a_push_that_is_killed_leaves_nothing_half_done(producer, tmp_path, real_fsync):
    """Of each three the first is killed at a step, the second at some moment, the third is let be."""
    producer.at(tmp_path / "first").push()  # from here on nothing local is read for the first time
    count = steps(producer.at(tmp_path / "second").push, tmp_path / "steps")
    whole = duration(producer.at(tmp_path / "third").push)
    chance = random.Random(SEED)
    rounds = KILLS // 2
    kills = 0
    for number in range(rounds):
        machine = producer.at(tmp_path / f"store-{number}")
        reader = replace(machine, base=tmp_path / f"reader-{number}")
        kills += kill_at(1 + number * (count - 1) // rounds, machine.push)
        check_store(machine.root, reader)
        kill_after(chance.random() * whole, machine.push)
        check_store(machine.root, reader)

        report = machine.push()
        assert report.exit_code == 0 and report.pushed + report.held == 11
        assert reader.verify().exit_code == 0
        consumer = Machine.make(tmp_path / f"consumer-{number}", machine.store, trusting=producer)
        assert consumer.pull().installed == 11
    assert kills > rounds * 3 // 4


def check_store(store: Path, reader: Machine) -> None:
    """What lies under a final name is whole, and no record names what is not there."""
    if store.exists():
        assert is_whole(store)
        found = reader.verify()
        assert (found.damaged, found.missing, found.refused) == ([], [], [])


def test_p14_a_pull_that_is_killed_leaves_nothing_torn_and_nothing_to_sign(world, tmp_path, real_fsync):
    producer, store = world.copy(tmp_path / "w")
    first = Machine.make(tmp_path / "first", store, trusting=producer)
    count = steps(lambda: pull(first), tmp_path / "steps")
    second = Machine.make(tmp_path / "second", store, trusting=producer)
    whole = duration(lambda: pull(second))
    chance = random.Random(SEED)
    partial = 0
    for number in range(KILLS // 2):
        consumer = Machine.make(tmp_path / f"consumer-{number}", store, trusting=producer)
        if number % 2:
            kill_after(chance.random() * whole, lambda c=consumer: pull(c))
        else:
            step = 1 + number * (count - 1) // (KILLS // 2)
            kill_at(step, lambda c=consumer: pull(c))
        installed = consumer.installed()
        assert installed.items() <= world.good.items()
        partial += 0 < len(installed) < len(world.good)

        # A key that may sign, a directory that is stamped: still nothing here is its own.
        trust.add_key(consumer.policy, make_key(consumer).public_key.text)
        write_stamp(consumer.cache, Stamp(ENVIRONMENT, 0))
        elsewhere = consumer.at(tmp_path / f"other-{number}")
        report = elsewhere.push(all=True)
        assert report.pushed == 0 and report.segment == "", report
        assert not elsewhere.root.exists() or names(elsewhere.root) == set()

        assert consumer.pull().exit_code == 0
        assert consumer.installed() == world.good
        assert elsewhere.push(all=True).pushed == 0
    assert partial > 2, "no pull was killed while it installed"


def make_key(machine: Machine):
    from torchrelay.signing import keyfiles

    return keyfiles.generate_key(machine.key)


# -- many at once ---------------------------------------------------------------------------------


def test_eight_pushers_at_once_lose_nothing(tmp_path):
    """On one store; half of what each has, all others have too."""
    (tmp_path / "m").mkdir(mode=0o700)
    machines = [Machine.make(tmp_path / "m" / f"p{n}", tmp_path / "store") for n in range(8)]
    texts = [machine.signer.public_key.text for machine in machines]
    for machine in machines:
        for text in texts:
            trust.add_key(machine.policy, text)
        machine.stamp()
    expected = set()
    for turn in range(10):
        for number, machine in enumerate(machines):
            write_graphs(machine.cache, 2, start=1000 * turn)
            write_graphs(machine.cache, 2, start=1000 * turn + 10 + 2 * number)
        expected |= {key("f", 1000 * turn + n) for n in (0, 1, *range(10, 26))}
        assert join(*(fork(lambda m=machine: m.push()) for machine in machines)) == [0] * 8
        assert is_whole(tmp_path / "store")
        reader = replace(machines[0], base=tmp_path / f"reader-{turn}")
        assert {entry.key for entry in reader.relay().entries().entries} == expected
    found = reader.verify()
    assert (found.exit_code, found.damaged, found.missing) == (0, [], [])
    assert len([name for name in names(tmp_path / "store") if name.startswith("blobs/")]) == len(expected)
    consumer = Machine.make(tmp_path / "consumer", tmp_path / "store", trusting=machines[0])
    assert consumer.pull().installed == len(expected)
    # Nobody has anything left to say.
    assert [machine.push().pushed for machine in machines] == [0] * 8


# -- E01, E11 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["gone", "other-bytes"])
def test_e01_entries_do_not_depend_on_where_they_lay(producer, tmp_path, elsewhere):
    producer.push()
    group = producer.cache / "triton" / "0" / HASH
    assert str(producer.cache).encode() in (group / f"__grp__{KERNEL}.json").read_bytes()
    for data in objects(producer.root).values():
        assert str(producer.base).encode() not in data
    if elsewhere == "gone":
        producer.cache.rename(tmp_path / "moved")
    else:
        for path in group.iterdir():
            path.write_bytes(b"other bytes")
    base = tmp_path / "a" / "much" / "longer" / "path" / "than" / "before"
    base.parent.mkdir(parents=True)
    consumer = Machine.make(base, producer.store, trusting=producer)
    assert consumer.pull().exit_code == 0
    assert str(producer.base) not in repr(contents(consumer.cache))
    assert read_group(consumer.cache / "triton" / "0" / HASH) == 1

    # What was pulled has the very same digests where it lies now.
    assert consumer.verify(local=True).exit_code == 0
    second = Machine.make(tmp_path / "second-machine", producer.store)
    second.fill()
    trust.add_key(second.policy, producer.signer.public_key.text)
    report = second.push()
    assert (report.blobs, report.pushed, report.divergent) == (0, 11, [])


def test_e11_what_was_pulled_is_not_pushed_again_and_nothing_shrinks(tmp_path):
    store = tmp_path / "store"
    first = Machine.make(tmp_path / "first", store)
    write_graphs(first.cache, 100)
    first.stamp()
    assert first.push().blobs == 100
    for generation in range(1, 6):
        machine = Machine.make(tmp_path / f"machine-{generation}", store, trusting=first)
        trust.add_key(machine.policy, make_key(machine).public_key.text)
        for older in range(1, generation):
            other = tmp_path / f"machine-{older}" / "config" / "key.pem"
            from torchrelay.signing import keyfiles

            trust.add_key(machine.policy, keyfiles.load_private_key(other).public_key.text)
        count = 100 + 3 * (generation - 1)
        pulled = machine.pull()
        assert (pulled.installed, pulled.exit_code) == (count, 0)
        write_graphs(machine.cache, 3, start=1000 * generation)
        before = {name for name in names(store) if name.startswith("blobs/")}
        pushed = machine.push()
        assert (pushed.pushed, pushed.blobs, pushed.held) == (3, 3, count)
        after = {name for name in names(store) if name.startswith("blobs/")}
        assert len(after - before) == 3 and before < after
        entries = machine.relay().entries().entries
        own = machine.signer.public_key.key_id
        assert len(entries) == count + 3 and sum(own in e.signers for e in entries) == 3


# -- D01, D03 -------------------------------------------------------------------------------------


@needs_root
def test_d01_two_users_with_defaults_on_one_machine(world, tmp_path):
    """The second one works fully, and meets no file of the first."""
    _, store = world.copy(tmp_path / "w")
    open_up(tmp_path)
    shared = tmp_path / "shared-tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    reports = {}
    for name, uid in (("alice", 60001), ("bob", 60002)):
        home = tmp_path / name
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        done = default_user(name, uid, home, shared, home / "store", "push")
        assert done.returncode == 0, done.stderr
        reports[name] = json.loads(done.stdout)
        assert reports[name] == {"pushed": 1, "installed": 1}
        assert {path.stat().st_uid for path in home.rglob("*")} == {uid}
        folder = shared / f"torchinductor_{name}"
        assert {path.lstat().st_uid for path in [folder, *folder.rglob("*")]} == {uid}
        assert stat.S_IMODE((home / ".config" / "torchrelay" / "key.pem").stat().st_mode) == 0o600
    assert store.exists()


@needs_root
def test_d01_a_default_directory_of_somebody_else_is_refused(tmp_path):
    """Both say that they are alice: the directory of the first is not used by the second."""
    open_up(tmp_path)
    shared = tmp_path / "shared-tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for uid in (60001, 60002):
        home = tmp_path / str(uid)
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
    first = default_user("alice", 60001, tmp_path / "60001", shared, tmp_path / "60001" / "store", "push")
    assert first.returncode == 0, first.stderr
    before = objects(shared)
    second = default_user("alice", 60002, tmp_path / "60002", shared, tmp_path / "60002" / "store", "pull")
    assert UnsafeDirectoryError.__name__ in second.stderr and "torchinductor_alice" in second.stderr
    assert objects(shared) == before


DEFAULTS = """
import json, sys
from attack_world import *
warm_up()
{user}
relay = Relay({store!r}, workload=WORKLOAD, in_process=False, strict=True)
cache = Path({shared!r}) / "torchinductor_{name}"
if {what!r} == "push":
    cache.mkdir(mode=0o755)
    write_graphs(cache, 1)
    write_stamp(cache, Stamp(ENVIRONMENT, 0))
    pushed = relay.push().pushed
    import shutil
    shutil.rmtree(cache)
    installed = relay.pull(PullOptions(environment=ENVIRONMENT)).installed
    print(json.dumps({{"pushed": pushed, "installed": installed}}))
else:
    Path({store!r}).mkdir()
    relay.pull(PullOptions(environment=ENVIRONMENT))
"""


def default_user(
    name: str, uid: int, home: Path, shared: Path, store: Path, what: str
) -> subprocess.CompletedProcess[str]:
    """A push and a pull, or only a pull, by a user who names neither directory nor key."""
    code = DEFAULTS.format(user=as_user(uid), store=str(store), shared=str(shared), name=name, what=what)
    variables = {**environ(), "HOME": str(home), "TMPDIR": str(shared), "USER": name, "LOGNAME": name}
    return subprocess.run(
        python("-c", code), env=variables, cwd="/", capture_output=True, text=True, check=False
    )


def open_up(path: Path) -> None:
    """Let other users through to ``path``."""
    for above in (path, *path.parents):
        if above != Path("/") and above.stat().st_mode & 0o011 != 0o011:
            above.chmod(above.stat().st_mode | 0o055)


GROUP = 60100


@needs_root
def test_d03_a_store_and_a_cache_that_are_shared_by_a_group(tmp_path):
    open_up(tmp_path)
    store, cache = tmp_path / "store", tmp_path / "cache"
    for folder in (store, cache):
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2775)
    users = {uid: Machine.make(tmp_path / str(uid), store) for uid in (60001, 60002)}
    texts = [machine.signer.public_key.text for machine in users.values()]
    for machine in users.values():
        for text in texts:
            trust.add_key(machine.policy, text)
    for uid, machine in users.items():
        for path in [machine.base, *machine.base.rglob("*")]:
            os.chown(path, uid, GROUP)
    first, second = users

    def turn(uid: int, start: int) -> list[int]:
        """Pull into the shared directory, add three of one's own, push."""
        machine = users[uid]
        code = f"""
from attack_world import *
warm_up()
{as_user(uid, GROUP, 0o002)}
machine = Machine.of({[str(machine.base), machine.store, str(machine.key), str(machine.policy)]})
relay = machine.relay(cache_dir={str(cache)!r})
pulled = relay.pull(PullOptions(environment=ENVIRONMENT))
write_graphs(Path({str(cache)!r}), 3, start={start})
pushed = relay.push()
print(pulled.installed, pulled.present, pushed.pushed, pulled.exit_code, pushed.exit_code)
"""
        done = subprocess.run(
            python("-c", code),
            env={**environ(), "HOME": str(machine.base)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    assert turn(first, 0) == [0, 0, 3, 0, 0]
    # Files of the other user in the directory are neither signed nor in the way.
    second_turn = turn(second, 100)
    assert second_turn[2:] == [3, 0, 0]
    assert turn(first, 200)[2:] == [3, 0, 0]
    assert {path.stat().st_uid for path in (store / "blobs").rglob("*")} == {first, second}
    for path in store.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert path.stat().st_gid == GROUP
        assert mode == (0o2775 if path.is_dir() else 0o664), f"{path}: {mode:o}"
    for machine in users.values():
        assert stat.S_IMODE(machine.key.stat().st_mode) == 0o600
    reader = Machine.make(tmp_path / "reader", store, trusting=users[first])
    assert reader.pull().installed == 9


def test_d03_with_a_private_umask_everything_stays_private(world, tmp_path):
    producer, _ = world.copy(tmp_path / "w")
    machine = producer.at(tmp_path / "private")

    def work() -> None:
        os.umask(0o077)
        machine.push()
        consumer = Machine.make(tmp_path / "consumer", machine.store, trusting=producer)
        consumer.pull()

    assert join(fork(work)) == [0]
    consumer = tmp_path / "consumer"
    for path in [machine.root, *machine.root.rglob("*"), *(consumer / "cache").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# -- full disks -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if not made or made.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


def large_entries(tree: Path) -> None:
    """Twelve entries of 512 KiB that cannot be compressed."""
    chance = random.Random(SEED)
    for number in range(12):
        write(tree / f"rank_{number}" / "weights.bin", chance.randbytes(512 * 1024))


@needs_root
def test_a_full_store_is_told_and_keeps_what_it_has(tmp_path, small_disk):
    machine = Machine.make(tmp_path / "machine", small_disk / "store")
    write_graphs(machine.cache, 3)
    machine.stamp()
    assert machine.push().pushed == 3
    before = objects(machine.root)
    large_entries(machine.tree)
    report = machine.push()
    assert report.exit_code == 1 and report.failed
    assert all("no room" in problem.detail for problem in report.failed)
    assert report.pushed + len(report.failed) == 12

    with pytest.raises(PermanentError, match="no room") as caught:  # now not one of the rest fits
        machine.push()
    assert "Free space" in caught.value.remedy
    left = objects(machine.root)
    assert before.items() <= left.items()
    assert not [name for name in left if ".tmp" in name]
    assert is_whole(machine.root)
    reader = replace(machine, base=tmp_path / "reader")
    found = reader.verify()
    assert (found.exit_code, found.damaged, found.missing) == (0, [], [])

    make_room(small_disk)
    machine.push()
    assert len(machine.relay().entries().entries) == 15
    assert Machine.make(tmp_path / "consumer", machine.store, trusting=machine).pull().installed == 15


@needs_root
@pytest.mark.parametrize("which", ["cache", "tree", "both"])
def test_a_full_cache_directory_is_told_and_holds_nothing_torn(tmp_path, small_disk, which):
    machine = Machine.make(tmp_path / "machine", tmp_path / "store")
    write_graphs(machine.cache, 3)
    large_entries(machine.tree)
    machine.stamp()
    machine.push()
    complete = Machine.make(tmp_path / "complete", machine.store, trusting=machine)
    complete.pull()
    good = complete.installed()
    consumer = Machine.make(tmp_path / "consumer", machine.store, trusting=machine)
    for name in ("cache", "tree"):
        if which in (name, "both"):
            (small_disk / name).mkdir(mode=0o700)
            (consumer.base / name).symlink_to(small_disk / name)
    if which == "cache":  # fill it up, so that what is small does not fit either
        write(small_disk / "filler", bytes((4 << 20) - 12 * 1024))
    with pytest.raises(RelayError) as caught:
        consumer.pull()
    assert isinstance(caught.value, InstallError | PermanentError), repr(caught.value)
    assert "No space left" in caught.value.message and "Free some space" in caught.value.remedy
    installed = consumer.installed()
    assert installed.items() <= good.items()
    debris = [
        p for p in small_disk.rglob("*") if p.is_file() and (".tmp" in p.name or p.parent.name == "tmp")
    ]
    assert debris == []

    make_room(small_disk)
    (small_disk / "filler").unlink(missing_ok=True)
    report = consumer.pull()
    assert report.exit_code == 0 and report.installed + report.present == 15
    assert consumer.installed() == good


@needs_root
def test_a_full_disk_under_the_memory_costs_only_the_memory(world, tmp_path, small_disk):
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    (small_disk / "state").mkdir(mode=0o700)
    consumer.state.symlink_to(small_disk / "state")
    write(small_disk / "filler", bytes((4 << 20) - 8 * 1024))
    assert consumer.pull().exit_code == 0
    assert consumer.installed() == world.good
