# SPDX-License-Identifier: Apache-2.0
"""C++ kernels and probes: found, read, refused, installed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from cache_samples import (
    CPP,
    CPP_FOLDER,
    canary,
    contents,
    cpp_kernel,
    elf,
    entries_in,
    found_in,
    opened,
    write,
)
from torchrelay.caches.base import Excluded, Reason, Roots
from torchrelay.caches.cpp import CppKind
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError
from torchrelay.statement import File
from torchrelay.testing.entries import make_record

KIND = CppKind()
OTHER = "c" + "zz7" * 17


def _reasons(root: Path) -> dict[str, Reason]:
    return {item.path: item.reason for item in found_in(KIND, Roots(root))[1]}


def test_a_kernel_goes_round(tmp_path: Path) -> None:
    cpp_kernel(tmp_path / "a")
    (entry,) = entries_in(KIND, Roots(tmp_path / "a"))
    assert (entry.key, entry.variant, entry.needs) == (CPP, "", ())
    assert entry.facets == REQUIRED_FACETS["cpp"]
    assert [file.name for file in entry.files] == [f"{CPP}.main.cpp", f"{CPP}.main.so"]
    verified = opened(entry)
    KIND.check(verified.statement)
    place, names = KIND.install(verified, Roots(tmp_path / "b"))
    assert (place, names[-1]) == ("inductor", f"{CPP_FOLDER}/{CPP}.main.so")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert entries_in(KIND, Roots(tmp_path / "b")) == [entry]


def test_a_probe_with_its_mark_goes_round_and_the_mark_is_last(tmp_path: Path) -> None:
    for name, data in ((".cpp", b"probe"), (".so", elf()), (".so.load_ok", b"")):
        write(tmp_path / "a" / CPP_FOLDER / (CPP + name), data)
    (entry,) = entries_in(KIND, Roots(tmp_path / "a"))
    assert [file.name.removeprefix(CPP) for file in entry.files] == [".cpp", ".so", ".so.load_ok"]
    assert entry.files[-1].size == 0
    verified = opened(entry)
    KIND.check(verified.statement)
    KIND.install(verified, Roots(tmp_path / "b"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert _reasons(tmp_path / "a") == {}


def test_an_object_in_the_folder_of_another_kernel_goes_round(tmp_path: Path) -> None:
    # PyTorch puts it beside the kernel that it was linked into, and compiles it again if it is gone.
    write(tmp_path / "a" / CPP_FOLDER / f"{OTHER}.optimized.o", elf(type_=1))
    write(tmp_path / "a" / OTHER[1:3] / f"{OTHER}.optimized.cpp", b"source")
    (entry,) = entries_in(KIND, Roots(tmp_path / "a"))
    assert entry.key == f"{CPP_FOLDER}/{OTHER}"
    assert _reasons(tmp_path / "a") == {}
    verified = opened(entry)
    KIND.check(verified.statement)
    _, names = KIND.install(verified, Roots(tmp_path / "b"))
    assert names == (f"{CPP_FOLDER}/{OTHER}.optimized.o",)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    folder = tmp_path / CPP_FOLDER
    write(folder / ".123.456.tmp", elf())
    write(folder / "evil.so", elf())
    write(folder / f"{OTHER}.cpp", b"no binary yet")
    write(folder / f"{OTHER[:-1]}a.so", b"")
    write(folder / f"{OTHER}.py", b"a wrapper is no kernel")
    (folder / f"{OTHER[:-1]}b.so").symlink_to("/etc/passwd")
    assert [found.key for found in found_in(KIND, Roots(tmp_path))[0]] == [CPP]
    assert _reasons(tmp_path) == {
        f"{CPP_FOLDER}/.123.456.tmp": Reason.TEMPORARY,
        f"{CPP_FOLDER}/evil.so": Reason.BAD_NAME,
        f"{CPP_FOLDER}/{OTHER}": Reason.INCOMPLETE,
        f"{CPP_FOLDER}/{OTHER[:-1]}a.so": Reason.EMPTY,
        f"{CPP_FOLDER}/{OTHER[:-1]}b.so": Reason.NOT_A_FILE,
    }


@pytest.mark.parametrize(
    "binary",
    [elf(b"x" * 100)[:-1], elf()[:64], elf(machine=4711), elf(type_=2), b"\0" * 500, b"\x80\x04K\x01."],
    ids=["truncated", "header only", "foreign", "an executable", "zeros", "a pickle"],
)
def test_a_binary_that_is_not_whole_is_refused_both_ways(tmp_path: Path, binary: bytes) -> None:
    cpp_kernel(tmp_path / "a")
    (sound,) = entries_in(KIND, Roots(tmp_path / "a"))
    write(tmp_path / "a" / CPP_FOLDER / f"{CPP}.main.so", binary)
    with pytest.raises(Excluded) as caught:
        entries_in(KIND, Roots(tmp_path / "a"))
    assert caught.value.reason is Reason.UNPARSEABLE
    source = sound.files[0]
    plain = sound.plain[: source.size] + binary
    bad = opened(sound, plain=plain, files=(source, File(name=f"{CPP}.main.so", size=len(binary))))
    with pytest.raises(DamagedError, match=CPP):
        KIND.install(bad, Roots(tmp_path / "b"))
    assert contents(tmp_path / "b") == {}


def test_a_kernel_that_is_being_compiled_is_left_alone(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    lock = write(tmp_path / "locks" / f"{CPP}.lock", b"")
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Excluded) as caught:
            entries_in(KIND, Roots(tmp_path))
        assert caught.value.reason is Reason.LOCKED
    assert len(entries_in(KIND, Roots(tmp_path))) == 1


def test_a_kernel_that_changed_after_the_scan_is_left_out(tmp_path: Path) -> None:
    cpp_kernel(tmp_path)
    (found,), _ = found_in(KIND, Roots(tmp_path))
    path = tmp_path / CPP_FOLDER / f"{CPP}.main.so"
    with path.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(Excluded) as caught:
        list(KIND.read(found))
    assert caught.value.reason is Reason.GROWING


def test_a_canary_under_a_good_name_is_never_loaded(tmp_path: Path) -> None:
    write(tmp_path / CPP_FOLDER / f"{CPP}.so", canary(tmp_path / "loaded"))
    with pytest.raises(Excluded):
        entries_in(KIND, Roots(tmp_path))
    assert not (tmp_path / "loaded").exists()


_SO = (File(name=f"{CPP}.so", size=4),)
BAD = {
    "upper case": {"key": CPP.upper()},
    "another letter": {"key": "f" + CPP[1:]},
    "too short": {"key": CPP[:-1]},
    "with a line feed": {"key": CPP, "files": (File(name=f"{CPP}.so\n", size=4),)},
    "climbing key": {"key": f"../{CPP}"},
    "own folder spelled out": {"key": f"{CPP_FOLDER}/{CPP}"},
    "no files": {"files": ()},
    "climbing file": {"files": (File(name=f"../{CPP}.so", size=4),)},
    "file of another": {"files": (File(name=f"{OTHER}.so", size=4),)},
    "a module": {"files": (File(name=f"{CPP}.py", size=4),)},
    "only a source": {"files": (File(name=f"{CPP}.cpp", size=4),)},
    "what is loaded first": {"files": (File(name=f"{CPP}.so", size=4), File(name=f"{CPP}.cpp", size=0))},
    "a variant": {"variant": "0" * 64},
    "an unknown form": {"canon": "files-2"},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_statements_that_cannot_be(change: dict[str, object]) -> None:
    fields: dict[str, Any] = {"kind": "cpp", "key": CPP, "files": _SO, "canon": "files-1"}
    KIND.check(make_record(b"1234", **fields)[0].statement)
    with pytest.raises(FormatError):
        KIND.check(make_record(b"1234", **{**fields, **change})[0].statement)


def test_files_of_another_user_are_not_pushed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    cpp_kernel(tmp_path)
    os.chown(tmp_path / CPP_FOLDER / f"{CPP}.main.so", 12345, -1)
    assert entries_in(KIND, Roots(tmp_path)) == []
    assert Reason.FOREIGN_OWNER in _reasons(tmp_path).values()
