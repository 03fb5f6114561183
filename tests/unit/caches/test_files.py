# SPDX-License-Identifier: Apache-2.0
"""Safe reading and atomic installation."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from torchrelay.caches import files
from torchrelay.caches.base import Excluded, FileStat, Reason, Skipped
from torchrelay.errors import (
    DeniedError,
    FormatError,
    InTheWayError,
    PermanentError,
    StorageError,
    UnsafeDirectoryError,
)

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="another owner can only be set by root")
not_root = pytest.mark.skipif(AS_ROOT, reason="permissions do not bind root")


def tree(root: Path) -> dict[str, bytes]:
    """Everything below ``root`` but our own folder."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and files.OWN_FOLDER not in path.parts
    }


def temporaries(root: Path) -> list[str]:
    folder = root / files.TEMPORARY_FOLDER
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def stat_of(root: Path, name: str) -> FileStat:
    found = files.stat_file(root, name)
    assert isinstance(found, FileStat)
    return found


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


# ---------------------------------------------------------------------- scanning


@pytest.mark.parametrize(
    "name",
    [
        ".123.456.tmp",
        "tmp.pid_9_x",
        "tmpab12_xyz",
        "tmpab12_xyz.so",
        "x.tmp",
        "code_state_a.pkl.tmp",
        "x.tmp.77",
        ".nfs000123",
        "x~",
        "tmp",
    ],
)
def test_temporary_names_are_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"torn")
    found = files.scan_folder(tmp_path)
    assert found == files.Folder(skipped=(Skipped(name, Reason.TEMPORARY),))
    assert files.stat_file(tmp_path, name) == Skipped(name, Reason.TEMPORARY)


@pytest.mark.parametrize("name", ["tmp" + "a" * 48, "entry", "itbkpp", "ctmp"])
def test_names_that_only_resemble_temporary_ones(tmp_path: Path, name: str) -> None:
    """A base32 digest may begin with ``tmp``."""
    (tmp_path / name).write_bytes(b"whole")
    assert [file.name for file in files.scan_folder(tmp_path).files] == [name]


def test_temporary_folders_are_not_entered(tmp_path: Path) -> None:
    (tmp_path / "tmp.pid_9_x").mkdir()
    (tmp_path / "tmp.pid_9_x" / "foo.cubin").write_bytes(b"x")
    found = files.scan_folder(tmp_path)
    assert found.folders == ()
    assert found.skipped == (Skipped("tmp.pid_9_x", Reason.TEMPORARY),)


def test_what_a_scan_tells_apart(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"12345")
    (tmp_path / "empty").touch()
    (tmp_path / "a.lock").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked-folder").symlink_to(tmp_path / "folder")
    (tmp_path / "line\nbreak").write_bytes(b"x")
    (tmp_path / files.OWN_FOLDER).mkdir()
    os.mkfifo(tmp_path / "pipe")
    found = files.scan_folder(tmp_path)
    info = (tmp_path / "good").stat()
    assert found.files == (FileStat("good", 5, info.st_mtime_ns, info.st_ctime_ns, info.st_ino),)
    assert found.folders == ("folder",)
    assert {item.path: item.reason for item in found.skipped} == {
        "a.lock": Reason.LOCKED,
        "empty": Reason.EMPTY,
        "'line\\nbreak'": Reason.BAD_NAME,
        "link": Reason.NOT_A_FILE,
        "linked-folder": Reason.NOT_A_FILE,
        "pipe": Reason.NOT_A_FILE,
    }


@needs_root
def test_files_of_another_user_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"x")
    os.chown(tmp_path / "theirs", 12345, 12345)
    assert files.scan_folder(tmp_path).skipped == (Skipped("theirs", Reason.FOREIGN_OWNER, "uid 12345"),)


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    assert files.scan_folder(tmp_path / "none") == files.Folder()
    assert files.scan_folder(tmp_path, "a/b/c") == files.Folder()
    assert files.stat_file(tmp_path, "a/b/c") is None


def test_a_linked_folder_on_the_way_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "fxgraph").symlink_to(outside)
    found = files.scan_folder(root, "fxgraph")
    assert found.files == ()
    assert [item.reason for item in found.skipped] == [Reason.NOT_A_FILE]
    seen = files.stat_file(root, "fxgraph/file")
    assert isinstance(seen, Skipped)
    assert seen.reason is Reason.NOT_A_FILE


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert [file.name for file in files.scan_folder(tmp_path / "link").files] == ["file"]


# ---------------------------------------------------------------------- reading


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    data = os.urandom(40_000_000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(data)
    assert files.read_stable(tmp_path, stat_of(tmp_path, "a/big")) == data


def _append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"more")


def _rewrite_in_place(path: Path) -> None:
    path.write_bytes(b"other bytes, same length"[: path.stat().st_size])


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def _link(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


@pytest.mark.parametrize("change", [_append, _rewrite_in_place, _replace, _link, Path.unlink])
def test_a_file_that_changed_since_the_scan(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"twenty-four bytes long..")
    seen = stat_of(tmp_path, "file")
    time.sleep(0.02)  # the clock of a file system may tick no finer than 10 ms
    change(path)
    with pytest.raises(Excluded) as caught:
        files.read_stable(tmp_path, seen)
    assert caught.value.reason is Reason.GROWING


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    seen = stat_of(tmp_path, "file")
    read = os.read

    def growing(descriptor: int, size: int) -> bytes:
        _append(path)
        return read(descriptor, size)

    monkeypatch.setattr(files.os, "read", growing)
    with pytest.raises(Excluded) as caught:
        files.read_stable(tmp_path, seen)
    assert caught.value.reason is Reason.GROWING


def test_a_file_rewritten_in_place_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 24)
    seen = stat_of(tmp_path, "file")
    time.sleep(0.02)
    read = os.read

    def rewritten(descriptor: int, size: int) -> bytes:
        data = read(descriptor, size)
        _rewrite_in_place(path)
        return data

    monkeypatch.setattr(files.os, "read", rewritten)
    with pytest.raises(Excluded) as caught:
        files.read_stable(tmp_path, seen)
    assert caught.value.reason is Reason.GROWING


@pytest.mark.parametrize("size", [23, 25])
def test_a_size_that_is_not_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A network file system may still tell the old size."""
    (tmp_path / "file").write_bytes(b"x" * 24)
    answers = [b"x" * size, b""]
    monkeypatch.setattr(files.os, "read", lambda _descriptor, _size: answers.pop(0))
    with pytest.raises(Excluded) as caught:
        files.read_stable(tmp_path, stat_of(tmp_path, "file"))
    assert caught.value.reason is Reason.GROWING


def test_short_reads_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    read = os.read
    monkeypatch.setattr(files.os, "read", lambda descriptor, size: read(descriptor, min(size, 3)))
    assert files.read_stable(tmp_path, stat_of(tmp_path, "file")) == b"0123456789"


def test_a_link_to_the_very_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(Excluded):
        files.read_stable(tmp_path, replace(stat_of(tmp_path, "file"), name="link"))


def test_too_large_is_known_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    with pytest.raises(Excluded) as caught:
        files.read_stable(tmp_path, stat_of(tmp_path, "file"), limit=99)
    assert caught.value.reason is Reason.TOO_LARGE


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x")
    seen = stat_of(tmp_path, "a/file")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to("b")
    with pytest.raises(Excluded):
        files.read_stable(tmp_path, seen)


# ---------------------------------------------------------------------- installing


def test_files_are_put_into_place(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    names = files.install_files(root, [("a/b/c", b"1"), ("a/last", b"22"), ("top", b"")])
    assert names == ("a/b/c", "a/last", "top")
    assert tree(root) == {"a/b/c": b"1", "a/last": b"22", "top": b""}
    assert temporaries(root) == []


def test_an_old_file_is_replaced_not_written_into(tmp_path: Path) -> None:
    """A process that has mapped the old file keeps it whole."""
    (tmp_path / "lib.so").write_bytes(b"old")
    inode = (tmp_path / "lib.so").stat().st_ino
    with (tmp_path / "lib.so").open("rb") as old:
        files.install_files(tmp_path, [("lib.so", b"new bytes")])
        assert old.read() == b"old"
    assert (tmp_path / "lib.so").read_bytes() == b"new bytes"
    assert (tmp_path / "lib.so").stat().st_ino != inode


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_modes_follow_the_umask(tmp_path: Path, mask: int, file_mode: int, folder_mode: int) -> None:
    with umask(mask):
        files.install_files(tmp_path, [("a/b", b"x")])
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == file_mode
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == folder_mode
    assert stat.S_IMODE((tmp_path / files.OWN_FOLDER).stat().st_mode) == folder_mode


def test_a_group_shared_folder_hands_on_its_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    with umask(0o002):
        files.install_files(tmp_path, [("a/b", b"x")])
    assert (tmp_path / "a").stat().st_mode & stat.S_ISGID


@pytest.mark.parametrize("name", ["../x", "/abs", "a//b", "a/../b", "a\0b", "", ".", "n" * 300])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    with pytest.raises(FormatError):
        files.install_files(root, [("fine", b"x"), (name, b"evil")])
    assert not root.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("linked", ["a", "a/b", files.OWN_FOLDER, files.TEMPORARY_FOLDER])
def test_nothing_is_installed_through_a_link(tmp_path: Path, linked: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(outside)
    own = linked.startswith(files.OWN_FOLDER)
    with pytest.raises(UnsafeDirectoryError if own else InTheWayError) as caught:
        files.install_files(root, [("a/b/c", b"x")])
    assert caught.value.remedy
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("way", ["folder-for-file", "full-folder-for-file", "file-for-folder", "file-above"])
def test_what_is_in_the_way_of_one_entry_is_told_and_stays(tmp_path: Path, way: str) -> None:
    root = tmp_path / "root"
    names = {"folder-for-file": "a/b/c/", "full-folder-for-file": "a/b/c/d", "file-for-folder": "a/b"}
    name = names.get(way, "a")
    (root / name).parent.mkdir(parents=True)
    if name.endswith("/"):
        (root / name).mkdir()
    else:
        (root / name).write_bytes(b"mine")
    with pytest.raises(InTheWayError) as caught:
        files.install_files(root, [("a2/first", b"x"), ("a/b/c", b"x")])
    assert caught.value.remedy and caught.value.subject
    left = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert left == ({name} if not name.endswith("/") else set())


def test_a_link_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(victim)
    files.install_files(root, [("file", b"new")])
    assert victim.read_bytes() == b"precious"
    assert not (root / "file").is_symlink()
    assert (root / "file").read_bytes() == b"new"


def test_a_failure_takes_back_what_was_new(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "last").mkdir()
    with pytest.raises(PermanentError):
        files.install_files(tmp_path, [("first", b"1"), ("old", b"new"), ("last", b"2")])
    assert not (tmp_path / "first").exists()
    assert (tmp_path / "old").exists()
    assert temporaries(tmp_path) == []


def test_a_file_where_a_folder_must_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a file")
    with pytest.raises(PermanentError):
        files.install_files(tmp_path, [("a/b", b"x")])
    assert tree(tmp_path) == {"a": b"a file"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    opened = os.fdopen
    left = [2]

    def full(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            os.close(args[0])  # type: ignore[arg-type]
            raise OSError(code, os.strerror(code))
        return opened(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "fdopen", full)
    with pytest.raises(PermanentError) as caught:
        files.install_files(tmp_path, [("a", b"1"), ("b", b"2"), ("c", b"3")])
    assert left[0] < 0
    assert "space" in caught.value.remedy
    assert tree(tmp_path) == {}
    assert temporaries(tmp_path) == []


@needs_root
def test_a_really_full_disk(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=False)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        with pytest.raises(PermanentError):
            files.install_files(root, [("e/first", b"x" * 1000), ("e/second", b"y" * 4_000_000)])
        assert tree(root) == {}
        assert temporaries(root) == []
        files.install_files(root, [("e/first", b"x" * 1000)])
    finally:
        subprocess.run(["umount", str(root)], check=True)


@not_root
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DeniedError):
            files.install_files(tmp_path, [("a", b"x")])
    finally:
        tmp_path.chmod(0o700)


def test_denied_is_told_apart(tmp_path: Path) -> None:
    error = files.storage_error(OSError(errno.EROFS, "Read-only file system"), tmp_path)
    assert isinstance(error, DeniedError)
    assert error.remedy


KILLED = """
import sys
from pathlib import Path
from torchrelay.caches import files
root = Path(sys.argv[1])
print("go", flush=True)
n = 0
while True:
    files.install_files(root, [(f"e/{n % 50}/first", b"1" * 200_000), (f"e/{n % 50}/last", b"2" * 200_000)])
    n += 1
"""


def test_a_killed_process_leaves_only_whole_files(tmp_path: Path) -> None:
    for number in range(12):
        root = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.003 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for name, data in tree(root).items():
            folder, last = name.rsplit("/", 1)
            assert data == (b"1" if last == "first" else b"2") * 200_000
            assert last in ("first", "last")
            if last == "last":
                assert (root / folder / "first").exists()


def test_readers_never_see_a_torn_or_foreign_file(tmp_path: Path) -> None:
    """PyTorch unpickles every file of an entry's folder; while files are replaced all are whole."""
    files.install_files(tmp_path, [("e/file", b"0" * 100_000)])
    stop = threading.Event()
    bad: list[str] = []

    def look() -> None:
        while not stop.is_set():
            for path in (tmp_path / "e").iterdir():
                data = path.read_bytes()
                if len(data) != 100_000 or len(set(data)) != 1 or path.name != "file":
                    bad.append(path.name)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(200):
        files.install_files(tmp_path, [("e/file", bytes([number]) * 100_000)])
    stop.set()
    reader.join()
    assert bad == []


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / files.TEMPORARY_FOLDER
    folder.mkdir(parents=True)
    for name, age in (("old", 4000), ("young", 10)):
        (folder / name).write_bytes(b"x")
        then = time.time() - age
        os.utime(folder / name, (then, then))
    files.prepare_root(tmp_path)
    assert temporaries(tmp_path) == ["young"]
    assert files.sweep_temporaries(tmp_path / "none") == 0


# ---------------------------------------------------------------------- privacy


@pytest.fixture
def private(tmp_path: Path) -> Path:
    root = tmp_path / "above" / "cache"
    root.mkdir(parents=True)
    root.chmod(0o700)
    return root


def test_a_private_directory_passes(private: Path) -> None:
    files.check_private(private)


def test_a_group_may_be_let_in(private: Path) -> None:
    private.chmod(0o2775)
    files.check_private(private)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_writable_by_all(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(UnsafeDirectoryError) as caught:
        files.prepare_root(private)
    assert "chmod o-w" in caught.value.remedy
    assert list(private.iterdir()) == []


def test_a_component_writable_by_all(private: Path) -> None:
    private.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError) as caught:
        files.check_private(private)
    assert caught.value.subject == str(private.parent)


def test_a_sticky_component_is_fine(private: Path) -> None:
    private.parent.chmod(0o1777)
    files.check_private(private)
    private.parent.parent.chmod(0o1777)
    files.check_private(private)


@needs_root
def test_a_directory_of_another_user(private: Path) -> None:
    os.chown(private, 12345, 12345)
    with pytest.raises(UnsafeDirectoryError) as caught:
        files.prepare_root(private)
    assert "12345" in caught.value.message
    assert "TORCHINDUCTOR_CACHE_DIR" in caught.value.remedy


@needs_root
def test_below_a_folder_that_another_user_made_in_tmp(tmp_path: Path) -> None:
    """Whoever comes first to /tmp/torchinductor_me could swap what I put below it (D01)."""
    shared, theirs = tmp_path / "tmp", tmp_path / "tmp" / "torchinductor_me"
    (theirs / "cache").mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(UnsafeDirectoryError) as caught:
        files.check_private(theirs / "cache")
    assert caught.value.subject == str(theirs)


@needs_root
@pytest.mark.parametrize("mode", [0o2775, 0o2755, 0o2777])
@pytest.mark.parametrize("groups", [[4242], []])
def test_a_directory_shared_with_a_group(mode: int, groups: list[int]) -> None:
    """A cache of user A with mode 2775 is one for B in the group, and for nobody else (D03)."""
    base = Path(tempfile.mkdtemp(prefix="torchrelay-shared-"))
    try:
        base.chmod(0o755)
        root = base / "cache"
        root.mkdir()
        os.chown(root, 11111, 4242)
        root.chmod(mode)
        works = as_user(22222, groups, lambda: shared_install(root))
        assert works is (mode == 0o2775 and groups == [4242])
        assert (root / "e" / "file").exists() is works
        assert not works or (root / "e").stat().st_gid == 4242
        assert not works or stat.S_IMODE((root / "e" / "file").stat().st_mode) == 0o664
    finally:
        shutil.rmtree(base)


@needs_root
def test_no_group_lets_in_what_lies_directly_in_tmp(tmp_path: Path) -> None:
    """Anyone could have made it there, with a group that its victim is in."""
    base = Path(tempfile.mkdtemp(prefix="torchrelay-shared-"))
    try:
        os.chown(base, 11111, 4242)
        base.chmod(0o2775)
        assert not as_user(22222, [4242], lambda: shared_install(base))
        assert list(base.iterdir()) == []
    finally:
        shutil.rmtree(base)


def shared_install(root: Path) -> None:
    os.umask(0o002)
    files.prepare_root(root)
    files.install_files(root, [("e/file", b"x")])


def as_user(uid: int, groups: list[int], action: Callable[[], None]) -> bool:
    """Whether ``action`` ends without an UnsafeDirectoryError for another user; any other error fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads of pytest's plugins
        child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            action()
            code = 0
        except UnsafeDirectoryError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0


def test_the_real_path_is_what_counts(private: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(private)
    files.check_private(tmp_path / "link")
    private.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError):
        files.check_private(tmp_path / "link")


def test_a_directory_that_cannot_be_resolved(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "none"):
        with pytest.raises(StorageError):
            files.check_private(path)


def test_a_file_is_no_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError):
        files.prepare_root(tmp_path / "file")
