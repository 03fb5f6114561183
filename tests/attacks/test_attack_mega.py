# SPDX-License-Identifier: Apache-2.0
"""Mega-Cache blobs: nobody's bytes become one's own by a detour, and no file is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from attack_world import ENVIRONMENT, Machine

from torchrelay.errors import StampError, UsageError
from torchrelay.relay import PullOptions, PushOptions
from torchrelay.signing import trust
from torchrelay.store.mega import mega_file

HERE = PullOptions(environment=ENVIRONMENT)
MADE_HERE = PushOptions(environment=ENVIRONMENT)


@pytest.fixture
def consumer(world, tmp_path):
    """A machine that has pulled, and has a key of its own that everybody here trusts."""
    producer, store = world.copy(tmp_path / "w")
    machine = Machine.make(tmp_path / "consumer", store)
    for public in (producer.signer.public_key, machine.signer.public_key):
        trust.add_key(machine.policy, public.text)
    assert machine.pull().installed
    return machine


def signed_by(machine: Machine) -> set[str]:
    own = machine.signer.public_key.key_id
    return {entry.kind for entry in machine.relay().entries().entries if own in entry.signers}


def test_what_was_pulled_and_exported_is_not_signed_when_it_is_imported(consumer, tmp_path):
    blob = tmp_path / "blob.bin"
    assert consumer.relay().export_mega(blob, HERE).installed
    for options in (MADE_HERE, PushOptions(environment=ENVIRONMENT, own=True, all=True)):
        report = consumer.relay().import_mega(blob, options)
        assert (report.pushed, report.segment) == (0, "")
        assert report.held > 0
    assert signed_by(consumer) == set()


def test_nobody_is_asked_but_who_imports_where_a_blob_was_made(consumer, tmp_path):
    blob = tmp_path / "blob.bin"
    consumer.relay().export_mega(blob, HERE)
    empty = consumer.at(tmp_path / "empty")
    with pytest.raises(StampError, match="does not say where it was made"):
        empty.relay().import_mega(blob, PushOptions())
    with pytest.raises(UsageError, match="does not say when"):
        empty.relay().import_mega(blob, PushOptions(environment=ENVIRONMENT, since=1.0))
    assert not empty.root.exists()


def test_a_rehearsed_import_writes_nothing(world, tmp_path):
    producer, _ = world.copy(tmp_path / "w")
    blob = tmp_path / "blob.bin"
    producer.relay().export_mega(blob, HERE)
    elsewhere = producer.at(tmp_path / "elsewhere")
    report = elsewhere.relay().import_mega(blob, PushOptions(environment=ENVIRONMENT, dry_run=True))
    assert report.pushed > 0 and report.segment == ""
    assert not elsewhere.root.exists()


# -- the file -------------------------------------------------------------------------------------


def test_a_blob_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), mega_file(path):
        raise ZeroDivisionError
    assert path.read_bytes() == b"before"
    with mega_file(path) as write:
        assert path.read_bytes() == b"before"
        write(b"after")
    assert path.read_bytes() == b"after"
    assert [found.name for found in tmp_path.glob("*out*")] == ["out"]


def test_it_is_as_open_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        with mega_file(tmp_path / "out") as write:
            write(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["", ".", "..", "/", "folder", "folder/..", "missing/x", "device", "a\0b"])
def test_what_cannot_be_a_file_is_told_at_once(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("device").symlink_to("/dev/null")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught, mega_file(Path(name)):
        raise AssertionError("something was fetched for it")
    assert caught.value.remedy
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_in_place_of_the_file_is_replaced_and_its_target_kept(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "out").symlink_to(precious)
    with mega_file(tmp_path / "out") as write:
        write(b"blob")
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "out").is_symlink()
