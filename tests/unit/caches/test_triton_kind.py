# SPDX-License-Identifier: Apache-2.0
"""Triton's kernel groups and stubs: found, relocated, refused, installed whole."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from cache_samples import (
    HASH,
    KERNEL,
    canary,
    contents,
    elf,
    entries_in,
    found_in,
    opened,
    triton_group,
    write,
)
from torchrelay.caches.base import Excluded, Reason, Roots
from torchrelay.caches.triton import GROUP, TritonKind
from torchrelay.digest import digest_of
from torchrelay.environment import FACETS, REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError
from torchrelay.statement import File
from torchrelay.testing.entries import make_record

KIND = TritonKind()


def at(triton: Path) -> Roots:
    return Roots(triton.parent / "inductor", triton)


def children(folder: Path, kernel: str = KERNEL) -> dict[str, str]:
    return json.loads((folder / f"__grp__{kernel}.json").read_bytes())["child_paths"]  # type: ignore[no-any-return]


def test_a_group_goes_round_and_points_into_its_new_place(tmp_path: Path) -> None:
    old = triton_group(tmp_path / "a" / "triton")
    (entry,) = entries_in(KIND, at(tmp_path / "a" / "triton"))
    assert (entry.key, entry.canon, entry.facets) == (f"{HASH}/{KERNEL}", GROUP, REQUIRED_FACETS["triton"])
    assert str(tmp_path).encode() not in entry.plain
    verified = opened(entry)
    KIND.check(verified.statement)
    place, names = KIND.install(verified, at(tmp_path / "b" / "longer" / "triton"))
    new = tmp_path / "b" / "longer" / "triton" / HASH
    assert (place, names[-1]) == ("triton", f"{HASH}/__grp__{KERNEL}.json")
    assert children(new) == {name: str(new / name) for name in children(old)}
    for name in children(old):
        assert (old / name).read_bytes() == (new / name).read_bytes()
    assert entries_in(KIND, at(tmp_path / "b" / "longer" / "triton")) == [entry]


def test_the_digest_does_not_depend_on_the_place(tmp_path: Path) -> None:
    digests = set()
    for place in ("a", "b/much/longer"):
        triton_group(tmp_path / place)
        digests.add(digest_of(entries_in(KIND, at(tmp_path / place))[0].plain))
    inductor = tmp_path / "c"
    triton_group(inductor / "triton" / "3")
    digests.add(digest_of(entries_in(KIND, Roots(inductor))[0].plain))
    assert len(digests) == 1


def test_a_group_of_the_remote_manager_is_taken_and_installed_as_triton_reads_it(tmp_path: Path) -> None:
    triton_group(tmp_path / "list", as_list=True)
    triton_group(tmp_path / "dict")
    (entry,) = entries_in(KIND, at(tmp_path / "list"))
    assert [entry] == entries_in(KIND, at(tmp_path / "dict"))
    KIND.install(opened(entry), at(tmp_path / "b"))
    assert children(tmp_path / "b" / HASH)[f"{KERNEL}.json"] == str(tmp_path / "b" / HASH / f"{KERNEL}.json")


def test_a_copied_group_gives_what_lies_beside_it_not_what_it_names(tmp_path: Path) -> None:
    triton_group(tmp_path / "old", salt=b"old")
    (wanted,) = entries_in(KIND, at(tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "new")
    triton_group(tmp_path / "old", salt=b"another")
    assert entries_in(KIND, at(tmp_path / "new")) == [wanted]


def test_two_kernels_in_one_folder_are_two_entries(tmp_path: Path) -> None:
    triton_group(tmp_path, "add")
    triton_group(tmp_path, "add_more")
    entries = entries_in(KIND, at(tmp_path))
    assert [entry.key for entry in entries] == [f"{HASH}/add", f"{HASH}/add_more"]
    assert all(len(entry.files) == 5 for entry in entries)


def test_without_triton_cache_dir_every_device_that_has_a_folder_gets_it(tmp_path: Path) -> None:
    triton_group(tmp_path / "a")
    (entry,) = entries_in(KIND, at(tmp_path / "a"))
    (tmp_path / "b" / "triton" / "2").mkdir(parents=True)
    (tmp_path / "b" / "triton" / "5").mkdir()
    place, names = KIND.install(opened(entry), Roots(tmp_path / "b"))
    assert place == "inductor"
    assert {name.split("/")[1] for name in names} == {"2", "5"}
    for device in ("2", "5"):
        folder = tmp_path / "b" / "triton" / device / HASH
        assert set(children(folder).values()) == {str(folder / name) for name in children(folder)}
    _, names = KIND.install(opened(entry), Roots(tmp_path / "c"))
    assert {name.split("/")[1] for name in names} == {"0"}


def test_stubs_and_measurements_need_a_host_and_a_gpu(tmp_path: Path) -> None:
    stub = "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    write(tmp_path / "a" / HASH / stub, elf())
    write(tmp_path / "a" / ("B" * 52) / "k.autotune.json", b'{"key":[],"configs_timings":[]}')
    measured, host = sorted(entries_in(KIND, at(tmp_path / "a")), key=lambda entry: entry.key != "B" * 52)
    assert set(host.facets) == set(REQUIRED_FACETS["triton+host"])
    assert set(measured.facets) == {"triton", "gpu_name", "gpu_arch"} <= FACETS.keys()
    for entry in (measured, host):
        verified = opened(entry)
        KIND.check(verified.statement)
        KIND.install(verified, at(tmp_path / "b"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def _group_with(children: Any) -> bytes:
    return json.dumps({"child_paths": children}).encode()


UNREADY = {
    "a member is gone": lambda f: (f / f"{KERNEL}.ttir").unlink(),
    "a member is empty": lambda f: (f / f"{KERNEL}.ttir").write_bytes(b""),
    "a member has a temporary path": lambda f: write(
        f / f"__grp__{KERNEL}.json", _group_with({f"{KERNEL}.json": str(f / "tmp.pid_9_x" / "other.json")})
    ),
    "no description": lambda f: write(
        f / f"__grp__{KERNEL}.json", _group_with({f"{KERNEL}.ttir": str(f / f"{KERNEL}.ttir")})
    ),
    "a member climbs": lambda f: write(
        f / f"__grp__{KERNEL}.json", _group_with([f"{KERNEL}.json", "../../etc/passwd"])
    ),
    "a member of another": lambda f: write(
        f / f"__grp__{KERNEL}.json", _group_with([f"{KERNEL}.json", "other.ttir"])
    ),
    "the group file is empty": lambda f: (f / f"__grp__{KERNEL}.json").write_bytes(b""),
    "the group file is torn": lambda f: (f / f"__grp__{KERNEL}.json").write_bytes(b'{"child_pat'),
    "the group file is deep": lambda f: (f / f"__grp__{KERNEL}.json").write_bytes(b"[" * 100_000),
    "the group file is no group": lambda f: (f / f"__grp__{KERNEL}.json").write_bytes(b"[1]"),
    "the group file is a pickle": lambda f: (f / f"__grp__{KERNEL}.json").write_bytes(canary(f / "loaded")),
    "the description is torn": lambda f: (f / f"{KERNEL}.json").write_bytes(b'{"hash": "aa'),
    "the description is of another": lambda f: (f / f"{KERNEL}.json").write_bytes(
        json.dumps({"hash": "bb" * 32}).encode()
    ),
    "the binary is truncated": lambda f: (f / f"{KERNEL}.cubin").write_bytes(elf(machine=190, type_=2)[:-1]),
    "no group file yet": lambda f: (f / f"__grp__{KERNEL}.json").unlink(),
}


@pytest.mark.parametrize("spoil", UNREADY.values(), ids=UNREADY.keys())
def test_a_group_that_is_not_whole_is_left_out(tmp_path: Path, spoil: Any) -> None:
    folder = triton_group(tmp_path)
    spoil(folder)
    found, skipped = found_in(KIND, at(tmp_path))
    for item in found:
        with pytest.raises(Excluded) as caught:
            list(KIND.read(item))
        skipped.append(caught.value)  # type: ignore[arg-type]
    assert skipped
    assert {item.reason for item in skipped} <= {Reason.INCOMPLETE, Reason.EMPTY, Reason.UNPARSEABLE}
    assert not (folder / "loaded").exists()


def test_temporaries_of_triton_are_left_out(tmp_path: Path) -> None:
    folder = triton_group(tmp_path)
    write(folder / "tmp.pid_9_x" / f"{KERNEL}.cubin", b"half")
    write(folder / f".{KERNEL}.ptx.tmp", b"half")
    (entry,) = entries_in(KIND, at(tmp_path))
    assert b"half" not in entry.plain
    assert {item.reason for item in found_in(KIND, at(tmp_path))[1]} == {Reason.TEMPORARY}


_GROUP_FILES = (f"{KERNEL}.cubin", f"{KERNEL}.json", f"__grp__{KERNEL}.json")
BAD: dict[str, dict[str, Any]] = {
    "lower case": {"key": f"{HASH.lower()}/{KERNEL}"},
    "climbing": {"key": f"{HASH}/../{KERNEL}"},
    "another kernel": {"key": f"{HASH}/other"},
    "no kernel": {"key": HASH},
    "group file first": {"names": (_GROUP_FILES[2], *_GROUP_FILES[:2])},
    "no group file": {"names": _GROUP_FILES[:2]},
    "no description": {"names": (_GROUP_FILES[0], _GROUP_FILES[2])},
    "not sorted": {"names": (_GROUP_FILES[1], _GROUP_FILES[0], _GROUP_FILES[2])},
    "a folder in a name": {"names": (f"x/{KERNEL}.cubin", *_GROUP_FILES[1:])},
    "two group files": {"names": ("__grp__other.json", *_GROUP_FILES[1:])},
    "an unknown form": {"canon": "triton-group-2"},
    "a stub's form": {"canon": "files-1"},
    "a variant": {"variant": "0" * 64},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_statements_that_cannot_be(change: dict[str, Any]) -> None:
    def statement(**fields: Any) -> Any:
        files = tuple(File(name=name, size=1) for name in fields.pop("names"))
        return make_record(b"x" * len(files), kind="triton", files=files, **fields)[0].statement

    sound: dict[str, Any] = {"key": f"{HASH}/{KERNEL}", "names": _GROUP_FILES, "canon": GROUP}
    KIND.check(statement(**sound))
    with pytest.raises(FormatError):
        KIND.check(statement(**{**sound, **change}))


def test_a_signed_group_file_that_leads_elsewhere_is_not_installed(tmp_path: Path) -> None:
    triton_group(tmp_path / "a")
    (entry,) = entries_in(KIND, at(tmp_path / "a"))
    leads = _group_with({file.name: f"/tmp/{file.name}" for file in entry.files[:-1]})
    files = (*entry.files[:-1], File(name=entry.files[-1].name, size=len(leads)))
    bad = opened(entry, plain=entry.plain[: -entry.files[-1].size] + leads, files=files)
    KIND.check(bad.statement)
    with pytest.raises(DamagedError, match="group file"):
        KIND.install(bad, at(tmp_path / "b"))
    assert contents(tmp_path / "b") == {}


INSTALLER = """
    import sys
    from pathlib import Path
    sys.path[:0] = sys.argv[3:]
    from cache_samples import entries_in, opened
    from torchrelay.caches.base import Roots
    from torchrelay.caches.triton import TritonKind
    a, b = Path(sys.argv[1]), Path(sys.argv[2])
    (entry,) = entries_in(TritonKind(), Roots(a, a))
    verified = opened(entry)
    for _ in range(15):
        TritonKind().install(verified, Roots(b, b))
"""


def test_a_reader_never_sees_a_group_without_its_members(tmp_path: Path) -> None:
    """R02: eight processes install one group while this one follows the group file."""
    triton_group(tmp_path / "a")
    (wanted,) = entries_in(KIND, at(tmp_path / "a"))
    command = [sys.executable, "-c", textwrap.dedent(INSTALLER), str(tmp_path / "a"), str(tmp_path / "b")]
    processes = [subprocess.Popen([*command, *sys.path]) for _ in range(8)]
    group = tmp_path / "b" / HASH / f"__grp__{KERNEL}.json"
    seen = 0
    while any(process.poll() is None for process in processes):
        if group.exists():
            for name, path in json.loads(group.read_bytes())["child_paths"].items():
                size = {file.name: file.size for file in wanted.files}[name]
                assert len(Path(path).read_bytes()) == size
            seen += 1
    assert [process.wait() for process in processes] == [0] * 8
    assert seen > 0
    assert entries_in(KIND, at(tmp_path / "b")) == [wanted]
    assert list((tmp_path / "b" / ".torchrelay" / "tmp").iterdir()) == []


def _install_for_ever(a: str, b: str, ready: Any) -> None:
    (entry,) = entries_in(KIND, at(Path(a)))
    verified = opened(entry)
    ready.set()
    while True:
        KIND.install(verified, at(Path(b)))


def test_a_killed_installer_never_leaves_a_group_without_its_members(tmp_path: Path) -> None:
    """R02: kill -9 at a random moment; what the group file names is there, or there is none."""
    triton_group(tmp_path / "a")
    (entry,) = entries_in(KIND, at(tmp_path / "a"))
    context = multiprocessing.get_context("fork")
    chance = random.Random(7)
    whole = 0
    for number in range(20):
        b, ready = tmp_path / f"b{number}", context.Event()
        process = context.Process(target=_install_for_ever, args=(str(tmp_path / "a"), str(b), ready))
        process.start()
        assert ready.wait(30)
        time.sleep(chance.random() * 0.003 * (1 + number))  # later ones end whole on a busy machine, too
        process.kill()
        process.join()
        if (b / HASH / f"__grp__{KERNEL}.json").exists():
            assert entries_in(KIND, at(b)) == [entry]
            whole += 1
        KIND.install(opened(entry), at(b))
        assert entries_in(KIND, at(b)) == [entry]
    assert whole


def test_what_lies_beside_the_folders_is_counted(tmp_path: Path) -> None:
    triton_group(tmp_path / "triton" / "0")
    write(tmp_path / "triton" / "0" / "tmp.pid_9_x" / "foo.cubin", elf())
    write(tmp_path / "triton" / "0" / "no-hash" / "foo.cubin", elf())
    write(tmp_path / "triton" / "0" / "stray", b"x")
    write(tmp_path / "triton" / "no-device" / "foo.cubin", elf())
    write(tmp_path / "triton" / "stray", b"x")
    found, skipped = found_in(TritonKind(), Roots(tmp_path))
    assert len(found) == 1
    assert {item.path: item.reason for item in skipped} == {
        "triton/0/tmp.pid_9_x": Reason.TEMPORARY,
        "triton/0/no-hash": Reason.BAD_NAME,
        "triton/0/stray": Reason.BAD_NAME,
        "triton/no-device": Reason.BAD_NAME,
        "triton/stray": Reason.BAD_NAME,
    }
