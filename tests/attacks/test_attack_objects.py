# SPDX-License-Identifier: Apache-2.0
"""Every object of a store, damaged in every way: never installed, always named, healed by a push."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from attack_world import ENVIRONMENT, WORKLOAD, Machine, World, environ, names, names_of, objects, python

from torchrelay.batch import encode_doomed
from torchrelay.digest import digest_of
from torchrelay.environment import Environment
from torchrelay.errors import DamagedError

ZEROS = 100 * 1024 * 1024

BLOBS = (
    "aot_autograd",
    "autotune",
    "cpp",
    "gemm",
    "inductor 0",
    "inductor 1",
    "inductor 2",
    "inductor 3",
    "pgo",
    "precompile",
    "tree",
    "triton",
)
"""The blob of the n-th entry of a kind, in the order of keys."""

FLIPS = (0, 5, -1)
"""In the frame's magic number or header, and at the end; a flip in the middle comes on top."""


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x10
    return bytes(changed)


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def zeros(path: Path) -> None:
    """A hundred megabytes, none of which take room on the disk."""
    os.truncate(path, 0)
    os.truncate(path, ZEROS)


Damage = Callable[[Path, bytes], None]
"""Does something to the file; the second argument is another good object of its kind."""

DAMAGES: dict[str, Damage] = {
    **{f"bit-{at}": lambda path, _, at=at: put(path, flip(path.read_bytes(), at)) for at in FLIPS},
    "bit-middle": lambda path, _: put(path, flip(path.read_bytes(), path.stat().st_size // 2)),
    "cut-half": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "cut-one": lambda path, _: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path, _: os.truncate(path, 0),
    "swapped": put,
    "zeros": lambda path, _: zeros(path),
    "same-size-zeros": lambda path, _: put(path, bytes(path.stat().st_size)),
}


def blob_of(world: World, name: str) -> tuple[str, str]:
    """Object name and label of the entry that ``name`` stands for in :data:`BLOBS`."""
    kind, _, number = name.partition(" ")
    entry = [e for e in world.entries if e.kind == kind][int(number or 0)]
    return entry.blob, f"{entry.kind} {entry.key}"


def everything_is_whole(world: World, store: Path, base: Path, producer: Machine) -> None:
    """A pull on a machine that never saw this store gets all there is, and nothing is amiss."""
    fresh = Machine.make(base / "fresh", store, trusting=producer)
    report = fresh.pull()
    assert (report.exit_code, report.damaged, report.missing) == (0, [], []), report
    assert fresh.installed() == world.good


def test_the_table_names_every_blob(world):
    assert {blob_of(world, name)[0] for name in BLOBS} == {e.blob for e in world.entries}
    assert len(BLOBS) == len(world.entries)
    stored = {name for name in objects(world.producer.root) if name.startswith("blobs/")}
    assert stored == {entry.blob for entry in world.entries}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", BLOBS)
def test_a_damaged_blob_is_named_left_out_and_healed(world, tmp_path, name, damage):
    producer, store = world.copy(tmp_path / "w")
    blob, label = blob_of(world, name)
    other, _ = blob_of(world, BLOBS[(BLOBS.index(name) + 1) % len(BLOBS)])
    size = (store / blob).stat().st_size
    DAMAGES[damage](store / blob, (store / other).read_bytes())

    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert report.exit_code == 1
    assert [problem.subject for problem in report.damaged] == [blob]
    assert label in report.damaged[0].detail
    assert consumer.installed() == world.without({label})
    assert report.installed + len(report.damaged) + len(report.missing) == len(world.entries)

    found = consumer.verify()
    assert (found.exit_code, found.checked - found.good) == (1, 1)
    assert blob in names_of(found.damaged)

    # What has another size shows in the listing; for the rest somebody must have looked.
    if (store / blob).stat().st_size == size:
        if damage == "bit-middle":
            assert producer.verify().exit_code == 1
            healed = producer.push()
        else:
            healed = producer.push(repair=True)
    else:
        healed = producer.push()
    assert (healed.exit_code, healed.blobs, healed.pushed) == (0, 1, 1), healed
    everything_is_whole(world, store, tmp_path, producer)
    assert producer.verify().exit_code == 0

    again = consumer.pull()
    assert again.exit_code == 0 and consumer.installed() == world.good


@pytest.mark.parametrize("name", BLOBS)
def test_a_vanished_blob_is_named_and_healed(world, tmp_path, name):
    producer, store = world.copy(tmp_path / "w")
    blob, label = blob_of(world, name)
    (store / blob).unlink()

    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert report.exit_code == 1 and report.damaged == []
    assert blob in names_of(report.missing)
    assert consumer.installed() == world.without({label})
    assert blob in names_of(consumer.verify().missing)

    assert producer.push().blobs == 1
    everything_is_whole(world, store, tmp_path, producer)


def test_a_blob_planted_under_a_name_never_wins(world, tmp_path):
    """Rubbish that was there first, at the very size that the blob will have."""
    producer, store = world.copy(tmp_path / "w")
    blob, _ = blob_of(world, "cpp")
    planted = bytes((store / blob).stat().st_size)
    empty = tmp_path / "empty"
    path = empty / blob
    path.parent.mkdir(parents=True)
    path.write_bytes(planted)
    moved = Machine.make(tmp_path / "moved", empty, trusting=producer)
    moved.fill()
    (moved.base / "config" / "key.pem").write_bytes(producer.key.read_bytes())
    (moved.base / "config" / "key.pem").chmod(0o600)
    assert moved.push().exit_code == 0
    assert path.read_bytes() == (store / blob).read_bytes()
    assert Machine.make(tmp_path / "reader", empty, trusting=producer).pull().exit_code == 0


# -- segments ------------------------------------------------------------------------------------


def segments(store: Path) -> list[Path]:
    """The larger one first: all entries but one."""
    found = [path for path in (store / "manifests").rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_size)


@pytest.mark.parametrize("damage", [*DAMAGES, "vanished"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_segment_is_named_and_put_back(world, tmp_path, which, damage):
    producer, store = world.copy(tmp_path / "w")
    both = segments(store)
    hit, other = both[which], both[1 - which]
    before = hit.read_bytes()
    if damage == "vanished":
        hit.unlink()
    else:
        DAMAGES[damage](hit, other.read_bytes())
    late = {f"{e.kind} {e.key}" for e in world.entries if e.seq == 2}
    early = {f"{e.kind} {e.key}" for e in world.entries if e.seq == 1}
    assert len(late) == 1 and len(early) == len(world.entries) - 1

    name = hit.relative_to(store).as_posix()
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert consumer.installed() == world.without(late if which else early)
    if damage != "vanished":
        assert report.exit_code == 1
        assert [problem.subject for problem in report.damaged] == [name]
        assert name in names_of(consumer.verify().damaged)
        assert hit.stat().st_size != len(before) or name in names_of(producer.verify().damaged)

    pushed = producer.push()
    assert pushed.exit_code == 0
    assert pushed.blobs == (len(late if which else early) if damage == "vanished" else 0)
    if damage != "vanished":
        assert hit.read_bytes() == before and f"{name} was damaged" in "\n".join(pushed.warnings)
    everything_is_whole(world, store, tmp_path, producer)
    assert consumer.pull().exit_code == 0 and consumer.installed() == world.good


def test_a_damaged_segment_is_found_by_a_client_that_has_read_it_before(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    assert consumer.pull().exit_code == 0
    hit = segments(store)[0]
    name = hit.relative_to(store).as_posix()
    good = hit.read_bytes()

    hit.write_bytes(flip(good, len(good) // 2))
    found = consumer.verify()
    assert (found.exit_code, [p.subject for p in found.damaged]) == (1, [name])

    os.truncate(hit, 100)
    report = consumer.pull()
    assert (report.exit_code, [p.subject for p in report.damaged]) == (1, [name])
    assert report.present == len(world.entries) and consumer.installed() == world.good


def test_the_owner_whose_memory_is_lost_publishes_anew(world, tmp_path):
    """Nobody has kept the damaged segment: everything in it is signed and published once more."""
    producer, store = world.copy(tmp_path / "w")
    hit = segments(store)[0]
    hit.write_bytes(flip(hit.read_bytes(), 100))
    for path in sorted(producer.state.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    pushed = producer.push()
    assert pushed.exit_code == 0 and pushed.pushed == len(world.entries) - 1
    fresh = Machine.make(tmp_path / "fresh", store, trusting=producer)
    report = fresh.pull()
    assert fresh.installed() == world.good
    # What is left of the damaged one is still named, until a compaction.
    assert [p.subject for p in report.damaged] == [hit.relative_to(store).as_posix()]


# -- environment documents ------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [*DAMAGES, "vanished"])
def test_a_damaged_environment_decides_nothing_and_is_put_back(world, tmp_path, damage):
    producer, store = world.copy(tmp_path / "w")
    path = store / "environments" / ENVIRONMENT.digest
    name, good = path.relative_to(store).as_posix(), path.read_bytes()
    if damage == "vanished":
        path.unlink()
    else:
        other = Environment(ENVIRONMENT.format, ENVIRONMENT.facets, {"threads": "16"})
        DAMAGES[damage](path, other.encode())

    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    assert consumer.pull().exit_code == 0 and consumer.installed() == world.good
    found = consumer.verify()
    assert found.exit_code == 1
    assert name in names_of([*found.damaged, *found.missing])
    explained = consumer.relay().explain(None, ENVIRONMENT)
    assert all(group.fits for group in explained.groups)

    same_size = path.exists() and path.stat().st_size == len(good)
    pushed = producer.push(repair=same_size)
    assert (pushed.exit_code, pushed.blobs, pushed.segment) == (0, 0, "")
    assert path.read_bytes() == good
    everything_is_whole(world, store, tmp_path, producer)
    assert producer.verify().exit_code == 0


# -- doomed lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_doomed_list_stops_a_push_before_anything_is_uploaded(world, tmp_path, damage):
    producer, store = world.copy(tmp_path / "w")
    listed = encode_doomed(["blobs/aa/" + "a" * 64, "blobs/bb/" + "b" * 64, "blobs/cc/" + "c" * 64])
    path = store / "gc" / digest_of(listed)
    path.parent.mkdir()
    path.write_bytes(listed)
    DAMAGES[damage](path, encode_doomed(["blobs/dd/" + "d" * 64]))
    name = path.relative_to(store).as_posix()
    (store / blob_of(world, "cpp")[0]).unlink()  # so that there is something to push
    before = names(store)

    with pytest.raises(DamagedError) as caught:
        producer.push()
    assert path.name in caught.value.message and name in caught.value.remedy
    assert names(store) == before

    assert Machine.make(tmp_path / "consumer", store, trusting=producer).pull().damaged == []
    assert name in names_of(producer.verify().damaged)

    path.unlink()
    assert producer.push().blobs == 1
    everything_is_whole(world, store, tmp_path, producer)


# -- memory ---------------------------------------------------------------------------------------

BOUNDED = """
import resource, sys
from attack_world import ENVIRONMENT, Machine
from pathlib import Path
from torchrelay.caches import registry
from torchrelay.signing import keys
from torchrelay.store import fetch
base, store, config = sys.argv[1:]
machine = Machine(Path(base), store, Path(config) / "none.pem", Path(config) / "trust.toml")
machine.relay().entries  # everything is imported
import torchrelay.workplace
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 80 * 1024 * 1024,) * 2)
report, found = machine.pull(), machine.verify()
print(report.installed, len(report.damaged), len(found.damaged))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit on memory here")
def test_a_hundred_megabytes_of_zeros_everywhere_are_not_read(world, tmp_path):
    """All objects but one segment, in a process that may have 80 MB more than its modules."""
    producer, store = world.copy(tmp_path / "w")
    listed = encode_doomed(["blobs/aa/" + "a" * 64])
    (store / "gc").mkdir()
    (store / "gc" / digest_of(listed)).write_bytes(listed)
    spared = segments(store)[0].relative_to(store).as_posix()
    hit = names(store) - {spared}
    for name in hit:
        os.truncate(store / name, ZEROS)
    base = tmp_path / "reader"
    base.mkdir(mode=0o700)
    command = python("-c", BOUNDED, str(base), str(store), str(producer.policy.parent))
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    blobs = len(world.entries) - 1
    # The segment and the blobs, but not the one that needs others; for verify also that one, the
    # environment and the doomed list.
    assert done.stdout.split() == ["0", str(blobs), str(blobs + 3)], done.stdout
    assert not (base / "cache" / "fxgraph").exists()
    assert WORKLOAD in spared


@pytest.mark.parametrize("damage", ["emptied", "same-size-zeros", "vanished"])
def test_a_process_that_follows_the_producers_settings_names_a_damaged_environment(
    world, tmp_path, monkeypatch, damage
):
    """Without the document the keys may not agree, so it is worth a word; what fits is installed."""
    producer, store = world.copy(tmp_path / "w")
    path = store / "environments" / ENVIRONMENT.digest
    if damage == "vanished":
        path.unlink()
    else:
        DAMAGES[damage](path, b"")
    monkeypatch.setattr("torchrelay.workplace.this_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr("torchrelay.caches.settings.skip_needless_headers", lambda: None)
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.relay(in_process=True).pull()
    assert (report.exit_code, [p.subject for p in report.damaged]) == (1, [f"environments/{path.name}"])
    assert consumer.installed() == world.good
