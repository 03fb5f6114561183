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
    compile_kernel,
    contents,
    cpp_kernel,
    elf,
    entries_in,
    found_in,
    opened,
    without_origin,
    write,
)
from torchrelay.caches import kernelname
from torchrelay.caches.base import Entry, Excluded, Reason, Roots
from torchrelay.caches.bundle import join, last, split
from torchrelay.caches.cpp import COMMAND, CppKind
from torchrelay.caches.kernelname import Naming, Prefixes, Source
from torchrelay.digest import digest_of
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.signing import VerifiedEntry
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
    assert without_origin(contents(tmp_path / "a")) == contents(tmp_path / "b")
    assert entries_in(KIND, Roots(tmp_path / "b")) == [entry]


def test_where_a_kernel_was_compiled_is_no_part_of_it(tmp_path: Path) -> None:
    """E01: an honest compiler's libraries, one kernel in two directories."""
    for place in ("a", "another_and_longer_directory"):
        write(tmp_path / place / CPP_FOLDER / f"{CPP}.main.cpp", b"int answer() { return 42; }")
        compile_kernel(tmp_path / place / CPP_FOLDER / f"{CPP}.main.cpp")
    first, second = (contents(tmp_path / p) for p in ("a", "another_and_longer_directory"))
    assert first != second
    (one,), (other,) = (entries_in(KIND, Roots(tmp_path / p)) for p in ("a", "another_and_longer_directory"))
    assert one == other
    assert str(tmp_path).encode() not in one.plain


def test_a_library_without_a_source_beside_it_is_taken_as_it_is(tmp_path: Path) -> None:
    """CUTLASS's, say: what else reads its sections is not known."""
    write(tmp_path / CPP_FOLDER / f"{CPP}.so", elf())
    (entry,) = entries_in(KIND, Roots(tmp_path))
    assert entry.plain.endswith(elf())


def test_a_probe_with_its_mark_goes_round_and_the_mark_is_last(tmp_path: Path) -> None:
    for name, data in ((".cpp", b"probe"), (".so", elf()), (".so.load_ok", b"")):
        write(tmp_path / "a" / CPP_FOLDER / (CPP + name), data)
    (entry,) = entries_in(KIND, Roots(tmp_path / "a"))
    assert [file.name.removeprefix(CPP) for file in entry.files] == [".cpp", ".so", ".so.load_ok"]
    assert entry.files[-1].size == 0
    verified = opened(entry)
    KIND.check(verified.statement)
    KIND.install(verified, Roots(tmp_path / "b"))
    assert without_origin(contents(tmp_path / "a")) == contents(tmp_path / "b")
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


# --- under any install prefix -----------------------------------------------------------------

HERE = Prefixes(python_include=("/a/include",), python_lib="/a/lib", torch="/a/torch")
THERE = Prefixes(python_include=("/b/x/include",), python_lib="/b/x/lib", torch="/b/x/torch")
SOURCE = b"\nint main;\n"
NAMED = CppKind(Naming((HERE,)))


def _command() -> str:
    return next(text for text, _ in kernelname._candidates(Naming((HERE,))))


def _compiled(root: Path, prefixes: Prefixes = HERE, body: bytes = b"code", source: bytes = SOURCE) -> str:
    """A kernel as PyTorch compiles it where Python and torch lie in ``prefixes``; its name."""
    key = Source(source).name(prefixes.expand(_command()))
    write(root / key[1:3] / f"{key}.main.cpp", source)
    write(root / key[1:3] / f"{key}.main.so", elf(body))
    return key


def test_a_kernel_gets_the_name_that_it_has_under_another_prefix(tmp_path: Path) -> None:
    made = _compiled(tmp_path / "a")
    (entry,) = entries_in(NAMED, Roots(tmp_path / "a"))
    assert entry.key == Source(SOURCE).name(_command()) != made
    assert entry.canon == COMMAND
    assert [file.name.removeprefix(entry.key) for file in entry.files] == [
        ".main.command",
        ".main.cpp",
        ".main.so",
    ]
    assert b"/a/" not in entry.plain
    assert made.encode() not in entry.plain
    verified = opened(entry)
    KIND.check(verified.statement)
    there = Roots(tmp_path / "b", prefixes=THERE)
    place, names = KIND.install(verified, there)
    expected = _compiled(tmp_path / "c", THERE)
    assert place == "inductor"
    assert [last(name) for name in names] == [
        expected + s for s in (".main.command", ".main.cpp", ".main.so")
    ]
    assert without_origin(contents(tmp_path / "c")).items() <= contents(tmp_path / "b").items()


@pytest.mark.parametrize("kind", [KIND, NAMED, CppKind(Naming((THERE,)))])
def test_an_installed_kernel_is_recognised_by_any_process(tmp_path: Path, kind: CppKind) -> None:
    """Also by one without torch, or with torch elsewhere: the command lies beside it."""
    _compiled(tmp_path / "a")
    (entry,) = entries_in(NAMED, Roots(tmp_path / "a"))
    there = Roots(tmp_path / "b", prefixes=THERE)
    KIND.install(opened(entry), there)
    (again,) = entries_in(kind, there)
    assert (again.key, again.canon, again.plain, again.files) == (
        entry.key,
        entry.canon,
        entry.plain,
        entry.files,
    )
    assert again.alias == KIND.alias(opened(entry), there)
    assert _reasons(tmp_path / "b") == {}


def test_two_prefixes_give_one_identity(tmp_path: Path) -> None:
    keys = set()
    for prefixes in (HERE, THERE):
        root = tmp_path / prefixes.torch[1]
        _compiled(root, prefixes, body=prefixes.torch.encode())
        (entry,) = entries_in(CppKind(Naming((prefixes,))), Roots(root))
        keys.add((entry.key, entry.canon, entry.variant))
    assert len(keys) == 1


def test_what_cannot_be_shown_stays_as_it_is(tmp_path: Path) -> None:
    key = _compiled(tmp_path)
    (entry,) = entries_in(KIND, Roots(tmp_path))
    assert (entry.key, entry.canon, entry.alias) == (key, "files-1", None)
    # An object besides: a C++ wrapper, whose name hashes another text too.
    write(tmp_path / key[1:3] / f"{key}.main.o", elf(type_=1))
    (entry,) = entries_in(NAMED, Roots(tmp_path))
    assert (entry.key, entry.canon) == (key, "files-1")


@pytest.mark.parametrize("planted", [b"{}", b"\x80\x04K\x01.", b"x" * 100_000])
def test_a_planted_command_is_neither_believed_nor_pushed(tmp_path: Path, planted: bytes) -> None:
    key = _compiled(tmp_path)
    write(tmp_path / key[1:3] / f"{key}.main.command", planted)
    (entry,) = entries_in(KIND, Roots(tmp_path))
    assert (entry.key, entry.canon) == (key, "files-1")
    assert [file.name.removeprefix(key) for file in entry.files] == [".main.cpp", ".main.so"]
    (proved,) = entries_in(NAMED, Roots(tmp_path))
    assert proved.canon == COMMAND
    assert planted not in proved.plain


def test_the_alias_is_the_entry_of_whoever_cannot_tell(tmp_path: Path) -> None:
    """So that an entry is known again, whether or not its command can be shown."""
    _compiled(tmp_path)
    (plain,) = entries_in(KIND, Roots(tmp_path))
    (entry,) = entries_in(NAMED, Roots(tmp_path))
    assert entry.alias is not None
    assert (entry.alias.key, entry.alias.canon) == (plain.key, plain.canon)
    assert entry.alias.digest == digest_of(plain.plain)


def _changed(entry: Entry, index: int, data: bytes) -> VerifiedEntry:
    """``entry`` signed with other bytes in one file."""
    files = list(split(opened(entry).statement, entry.plain))
    files[index] = (files[index][0], data)
    plain, names = join(files)
    return opened(entry, plain=plain, files=names)


@pytest.mark.parametrize(
    ("index", "data"),
    [
        (0, b"g++ i -O0 {torch}"),
        (0, b"g++ {torch} $(id)"),
        (0, b"\xff{torch}"),
        (0, b""),
        (1, b"int another;"),
        (1, b"\xff"),
    ],
)
def test_a_command_that_does_not_give_the_name_is_refused(tmp_path: Path, index: int, data: bytes) -> None:
    _compiled(tmp_path / "a")
    (entry,) = entries_in(NAMED, Roots(tmp_path / "a"))
    bad = _changed(entry, index, data)
    there = Roots(tmp_path / "b", prefixes=THERE)
    with pytest.raises(DamagedError, match=entry.key):
        KIND.install(bad, there)
    assert KIND.alias(bad, there) is None
    assert contents(tmp_path / "b") == {}


def test_without_a_place_nothing_is_installed(tmp_path: Path) -> None:
    _compiled(tmp_path / "a")
    (entry,) = entries_in(NAMED, Roots(tmp_path / "a"))
    with pytest.raises(UsageError, match="where torch is installed"):
        KIND.install(opened(entry), Roots(tmp_path / "b"))
    assert KIND.alias(opened(entry), Roots(tmp_path / "b")) is None
    assert contents(tmp_path / "b") == {}


def _of(*suffixes: str) -> tuple[File, ...]:
    return tuple(File(name=CPP + suffix, size=4) for suffix in suffixes)


@pytest.mark.parametrize(
    ("canon", "key", "suffixes"),
    [
        (COMMAND, CPP, (".main.cpp", ".main.so")),
        (COMMAND, CPP, (".main.command", ".main.so")),
        (COMMAND, CPP, (".main.command", ".main.cpp", ".main.o")),
        (COMMAND, CPP, (".main.command", ".cpp", ".so")),
        (COMMAND, CPP, (".main.cpp", ".main.command", ".main.so")),
        (COMMAND, f"zz/{CPP}", (".main.command", ".main.cpp", ".main.so")),
        ("files-1", CPP, (".main.command", ".main.cpp", ".main.so")),
        ("kernel-command-2", CPP, (".main.command", ".main.cpp", ".main.so")),
    ],
)
def test_statements_of_kernels_that_cannot_be(canon: str, key: str, suffixes: tuple[str, ...]) -> None:
    good = make_record(
        b"1" * 12, kind="cpp", key=CPP, canon=COMMAND, files=_of(".main.command", ".main.cpp", ".main.so")
    )
    KIND.check(good[0].statement)
    bad = make_record(b"1" * (4 * len(suffixes)), kind="cpp", key=key, canon=canon, files=_of(*suffixes))
    with pytest.raises(FormatError):
        KIND.check(bad[0].statement)


@pytest.mark.parametrize(
    ("vectors", "disproved"),
    [
        (None, ""),
        ((), "avx2"),
        (("avx2",), ""),
        (("avx512", "avx512_vnni"), "avx2"),
    ],
)
def test_a_kernel_disproves_a_machine_that_uses_other_vectors(tmp_path, vectors, disproved) -> None:
    command = next(
        text for text, _ in kernelname._candidates(Naming((HERE,))) if "CPU_CAPABILITY_AVX2" in text
    )
    naming = Naming((HERE,), vectors=vectors)
    assert naming.contradiction(command) == disproved
    assert naming.contradiction(_command()) == "", "a kernel without vectors is everybody's"
    key = Source(SOURCE).name(HERE.expand(command))
    write(tmp_path / key[1:3] / f"{key}.main.cpp", SOURCE)
    write(tmp_path / key[1:3] / f"{key}.main.so", elf())
    ((found,), _) = found_in(CppKind(naming), Roots(tmp_path))
    if disproved:
        with pytest.raises(Excluded, match="compiled for avx2") as caught:
            list(CppKind(naming).read(found))
        assert caught.value.reason is Reason.OTHER_VECTORS
    else:
        assert [entry.canon for entry in CppKind(naming).read(found)] == [COMMAND]


@pytest.mark.parametrize("capability", ["CPU_CAPABILITY_NEON", "CPU_CAPABILITY_SVE256"])
@pytest.mark.parametrize("vectors", [("neon",), ("bf16", "sve"), ()])
def test_no_kernel_of_an_arm_machine_disproves_it(capability, vectors) -> None:
    command = next(text for text, _ in kernelname._candidates(Naming((HERE,))) if capability in text)
    assert Naming((HERE,), vectors=vectors).contradiction(command) == ""
