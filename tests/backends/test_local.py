# SPDX-License-Identifier: Apache-2.0
"""What is special to the local backend: disks, users, links, kills."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from torchrelay.errors import (
    DeniedError,
    NotFoundError,
    PermanentError,
    StorageError,
    TransientError,
    UsageError,
)
from torchrelay.storage import Get, Location, open_backend
from torchrelay_local import LocalBackend

HERE = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "src"), str(HERE / "backends")])}


def files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def descriptor_path(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def backend(root):
    root.mkdir()
    with LocalBackend(root) as backend:
        yield backend


# -- killed writers ------------------------------------------------------------------------------

WRITER = """
import hashlib, os, random, sys
from pathlib import Path
from torchrelay_local import LocalBackend
backend = LocalBackend(Path(sys.argv[1]), create=True)
print("ready", flush=True)
while True:
    objects = {}
    for _ in range(random.choice([1, 5, 40])):
        data = os.urandom(random.choice([10, 20_000, 3_000_000 // 4]))
        name = hashlib.sha256(data).hexdigest()
        objects[f"blobs/{name[:2]}/{name}"] = data
    assert not any(backend.put_many(objects).values())
    sys.stdout.write("".join(f"{name}\\n" for name in objects))
    sys.stdout.flush()
"""


def wrong_objects(root: Path, checked: set[str]) -> list[str]:
    wrong = []
    with LocalBackend(root) as reader:
        infos = [info for info in reader.list("blobs/") if info.name not in checked]
        for got in reader.get_many([Get(info.name, 1_000_000) for info in infos]):
            if got.data is None or hashlib.sha256(got.data).hexdigest() != got.get.name.rpartition("/")[2]:
                wrong.append(f"{got.get.name}: {got.error}")
            checked.add(got.get.name)
    return wrong


def test_kill_at_random_leaves_only_whole_objects(root):
    """P14: whatever is killed when, what lies under a final name has the hash that it is named by."""
    rounds = int(os.environ.get("TORCHRELAY_KILL_ROUNDS", "60"))
    ends = time.monotonic() + 60
    root.mkdir()
    checked: set[str] = set()
    wrong: list[str] = []
    reported = 0
    killed = 0
    for number in range(rounds):
        if time.monotonic() > ends and number >= 10:
            break
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert writer.stdout.readline() == "ready\n"
        # At times that lie anywhere within the first batches.
        deadline = time.monotonic() + 0.001 * (number * 37 % 150)
        while time.monotonic() < deadline:
            wrong += wrong_objects(root, checked)
        writer.kill()
        promised = {line for line in writer.communicate()[0].splitlines() if len(line) == 73}
        killed += writer.returncode == -9
        reported += len(promised)
        wrong += wrong_objects(root, checked)
        assert not wrong
        assert promised <= checked, "an object was reported as stored and is not there"
        for name in checked:
            (root / name).unlink(missing_ok=True)
        checked.clear()
    assert killed >= 10
    assert reported > 0
    assert any("/.tmp-" in name for name in files(root)), "no kill hit a write: the test proved nothing"


def test_leftovers_are_ignored_and_the_old_ones_swept(root, backend):
    """R01, for a store: what killed writers leave is nobody's object and does not pile up."""
    folder = root / "blobs" / "aa"
    folder.mkdir(parents=True)
    old, young, other = folder / ".tmp-1-old", folder / ".tmp-2-young", root / "blobs" / ".tmp-3-elsewhere"
    for path in (old, young, other):
        path.write_bytes(b"half")
    hour_ago = time.time() - 3700
    os.utime(old, (hour_ago, hour_ago))
    os.utime(other, (hour_ago, hour_ago))
    assert list(backend.list()) == []
    assert isinstance(backend.stat_many(["blobs/aa/.tmp-2-young"])["blobs/aa/.tmp-2-young"], PermanentError)
    backend.put("blobs/aa/x", b"1")
    assert files(root) == {"blobs/aa/x", "blobs/aa/.tmp-2-young", "blobs/.tmp-3-elsewhere"}
    assert [info.name for info in backend.list()] == ["blobs/aa/x"]


def test_a_writer_whose_temporary_file_was_swept_says_so(root, backend, monkeypatch):
    rename = os.rename

    def sweep_then_rename(src, dst, **fds):
        os.unlink(src, dir_fd=fds["src_dir_fd"])
        return rename(src, dst, **fds)

    monkeypatch.setattr(os, "rename", sweep_then_rename)
    error = backend.put_many({"a/x": b"1"})["a/x"]
    assert isinstance(error, TransientError)
    assert files(root) == set()


# -- order of writing ----------------------------------------------------------------------------


def test_files_are_synced_before_they_get_their_name_and_folders_after(root, backend, monkeypatch):
    events: list[tuple[str, str]] = []
    lock = threading.Lock()
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd):
        with lock:
            events.append(("sync", descriptor_path(fd)))
        fsync(fd)

    def note_rename(src, dst, **fds):
        folder = descriptor_path(fds["src_dir_fd"])
        events.append(("rename", f"{folder}/{src}"))
        rename(src, dst, **fds)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    backend.put_many({f"blobs/{i % 3}/{i}": b"x" for i in range(12)})
    renames = [what for kind, what in events if kind == "rename"]
    assert len(renames) == 12
    for temp in renames:
        assert events.index(("sync", temp)) < events.index(("rename", temp))
    last_rename = max(i for i, (kind, _) in enumerate(events) if kind == "rename")
    synced_after = [what for kind, what in events[last_rename:] if kind == "sync"]
    folders = [root, root / "blobs", *(root / "blobs" / str(i) for i in range(3))]
    assert sorted(synced_after) == sorted(map(str, folders)), "each folder once, and those above"


@pytest.mark.parametrize("objects", [1, 20])
def test_a_failed_sync_is_a_failed_put(root, backend, monkeypatch, objects):
    backend.put("a/0", b"old")
    fsync = os.fsync

    def broken(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", broken)
    results = backend.put_many({f"a/{i}": b"new" for i in range(objects)})
    assert all(isinstance(error, PermanentError) for error in results.values())
    assert files(root) == {"a/0"}
    assert (root / "a/0").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("folder", "failing"),
    [("a", {"a/1", "a/2"}), ("deep", {"deep/c/1"}), ("", {"a/1", "a/2", "b/1", "deep/c/1"})],
)
def test_a_folder_that_cannot_be_synced_is_a_failed_put(root, backend, monkeypatch, folder, failing):
    fsync = os.fsync

    def broken(fd):
        if descriptor_path(fd) == str(root / folder):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", broken)
    results = backend.put_many({"a/1": b"1", "a/2": b"1", "b/1": b"1", "deep/c/1": b"1"})
    assert {name for name, error in results.items() if error} == failing
    assert all(isinstance(results[name], PermanentError) for name in failing)


def test_a_file_system_without_folder_sync_is_used_all_the_same(backend, monkeypatch):
    fsync = os.fsync

    def unsupported(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", unsupported)
    assert backend.put_many({"a/1": b"1"}) == {"a/1": None}


@pytest.mark.parametrize("at", [1, 5, 20])
def test_an_interrupt_leaves_no_debris(root, backend, monkeypatch, at):
    calls = []
    fsync = os.fsync

    def interrupted(fd):
        calls.append(fd)
        if len(calls) == at:
            raise KeyboardInterrupt
        fsync(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.put_many({f"blobs/a/{i}": b"1" for i in range(30)})
    assert not [name for name in files(root) if ".tmp-" in name]


def test_put_works_in_an_exit_hook(root):
    """Pushes run at exit, when an interpreter starts no more threads."""
    script = textwrap.dedent(f"""
        import atexit
        from pathlib import Path
        from torchrelay_local import LocalBackend
        backend = LocalBackend(Path({str(root)!r}), create=True)
        objects = {{f"a/{{i}}": b"1" for i in range(20)}}
        atexit.register(lambda: print(sorted(set(backend.put_many(objects).values()), key=str)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.strip() == "[None]", done.stderr
    assert len(files(root)) == 20


# -- full disks ----------------------------------------------------------------------------------

FULL_DISK = """
    import os
    from pathlib import Path
    from torchrelay.errors import PermanentError
    from torchrelay_local import LocalBackend
    root = Path({root!r})
    backend = LocalBackend(root / "store", create=True)
    objects = {{f"blobs/{{i % 9}}/{{i}}": os.urandom(100_000) for i in range(80)}}
    results = backend.put_many(objects)
    failed = {{name for name, error in results.items() if error}}
    there = {{str(p.relative_to(root / "store")) for p in root.rglob("*") if p.is_file()}}
    assert 20 < len(failed) < 60, len(failed)
    assert len(there) > 20
    for name in failed:
        assert type(results[name]) is PermanentError, repr(results[name])
        assert "no room" in results[name].message and name in results[name].message
        assert "Free space" in results[name].remedy
    assert there == set(objects) - failed, "no debris, and nothing is lost"
    for name in there:
        assert (root / "store" / name).read_bytes() == objects[name]
    assert not any(backend.delete_many(there).values())
    assert not any(backend.put_many({{n: objects[n] for n in sorted(failed)[:20]}}).values()), "space is back"
    # An existing object survives the attempt to replace it.
    backend.put("blobs/0/keep", b"old")
    for i in range(99):
        if backend.put_many({{f"fill/{{i}}": bytes(100_000)}})[f"fill/{{i}}"]:
            break
    assert isinstance(backend.put_many({{"blobs/0/keep": bytes(3_000_000)}})["blobs/0/keep"], PermanentError)
    assert backend.get("blobs/0/keep", limit=9) == b"old"
    print("fine")
"""


def test_full_disk(tmp_path, in_mount_namespace):
    disk = tmp_path / "disk"
    disk.mkdir()
    out = in_mount_namespace(f"mount -t tmpfs -o size=4m tmpfs {disk}", FULL_DISK.format(root=str(disk)))
    assert out == "fine\n"


def test_full_of_inodes(tmp_path, in_mount_namespace):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
        from pathlib import Path
        from torchrelay.errors import PermanentError
        from torchrelay_local import LocalBackend
        root = Path({str(disk)!r})
        results = LocalBackend(root / "s", create=True).put_many({{f"f{{i}}/x": b"1" for i in range(40)}})
        kinds = {{type(error) for error in results.values()}}
        assert kinds == {{type(None), PermanentError}}, kinds
        there = {{str(p.relative_to(root / "s")) for p in root.rglob("*") if p.is_file()}}
        assert there == {{name for name, error in results.items() if error is None}}
        print("fine")
    """
    out = in_mount_namespace(f"mount -t tmpfs -o size=4m,nr_inodes=30 tmpfs {disk}", script)
    assert out == "fine\n"


def test_file_size_limit(root):
    """A quota of another sort, which needs no mount."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            results = LocalBackend(root, create=True).put_many({"a/1": bytes(40_000), "a/2": bytes(60_000)})
            right = results["a/1"] is None and type(results["a/2"]) is PermanentError
            code = 0 if right and files(root) == {"a/1"} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_read_only_mount(tmp_path, in_mount_namespace):
    disk = tmp_path / "disk"
    (disk / "a").mkdir(parents=True)
    (disk / "a/x").write_bytes(b"1")
    script = f"""
        from pathlib import Path
        from torchrelay.errors import DeniedError
        from torchrelay_local import LocalBackend
        backend = LocalBackend(Path({str(disk)!r}), create=True)
        for name in ("a/y", "new/y"):
            error = backend.put_many({{name: b"1"}})[name]
            assert isinstance(error, DeniedError) and "read-only" in error.message, repr(error)
        assert isinstance(backend.delete_many(["a/x"])["a/x"], DeniedError)
        assert [i.name for i in backend.list()] == ["a/x"] and backend.get("a/x", limit=1) == b"1"
        print("fine")
    """
    out = in_mount_namespace(f"mount --bind {disk} {disk} && mount -o remount,ro,bind {disk}", script)
    assert out == "fine\n"


# -- users and modes -----------------------------------------------------------------------------

UMASKS = [(0o002, 0o664, 0o775), (0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]


@pytest.mark.parametrize(("umask", "file_mode", "dir_mode"), UMASKS, ids=["002", "022", "077"])
def test_modes_follow_the_umask(root, umask, file_mode, dir_mode):
    before = os.umask(umask)
    try:
        with LocalBackend(root, create=True) as backend:
            backend.put_many({"blobs/aa/x": b"1", "y": b"2"})
    finally:
        os.umask(before)
    assert [mode(root / n) for n in ("blobs/aa/x", "y")] == [file_mode] * 2
    assert [mode(p) for p in (root, root / "blobs", root / "blobs/aa")] == [dir_mode] * 3


def test_temporary_files_are_born_with_their_final_mode(root, backend, monkeypatch):
    seen = []
    fsync = os.fsync

    def look(fd):
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            seen.append(stat.S_IMODE(status.st_mode))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", look)
    before = os.umask(0o002)
    try:
        backend.put("a/x", b"1")
    finally:
        os.umask(before)
    assert seen == [0o664]


def test_a_group_shares_a_store(open_dir, as_user):
    """D03: two users of one group, umask 002, setgid folder: both read, write, replace and delete."""
    store, group, alice, bob = open_dir / "store", 4242, 4001, 4002
    store.mkdir()
    os.chown(store, alice, group)
    store.chmod(0o2775)

    def put(name, data):
        return lambda: LocalBackend(store).put_many({name: data})

    def listed():
        return sorted(info.name for info in LocalBackend(store).list())

    assert as_user(put("blobs/aa/1", b"a"), uid=alice, gid=group, umask=0o002) == {"blobs/aa/1": None}
    assert as_user(put("blobs/aa/2", b"b"), uid=bob, gid=group, umask=0o002) == {"blobs/aa/2": None}
    assert as_user(put("blobs/bb/3", b"b"), uid=bob, gid=group, umask=0o002) == {"blobs/bb/3": None}
    assert as_user(put("blobs/bb/4", b"a"), uid=alice, gid=group, umask=0o002) == {"blobs/bb/4": None}
    assert as_user(put("blobs/aa/1", b"healed"), uid=bob, gid=group, umask=0o002) == {"blobs/aa/1": None}
    for user in (alice, bob):
        assert as_user(listed, uid=user, gid=group) == [
            "blobs/aa/1",
            "blobs/aa/2",
            "blobs/bb/3",
            "blobs/bb/4",
        ]
    for path in store.rglob("*"):
        assert path.stat().st_gid == group
        assert mode(path) == (0o2775 if path.is_dir() else 0o664)
    assert as_user(lambda: LocalBackend(store).get("blobs/aa/1", limit=9), uid=alice, gid=group) == b"healed"
    gone = as_user(lambda: LocalBackend(store).delete_many(["blobs/bb/3"]), uid=alice, gid=group)
    assert gone == {"blobs/bb/3": None}


def test_a_private_store_stays_private(open_dir, as_user):
    store = open_dir / "store"
    store.mkdir()
    os.chown(store, 4001, 4001)
    store.chmod(0o700)
    assert as_user(lambda: LocalBackend(store).put_many({"a/x": b"1"}), uid=4001, gid=4001, umask=0o077) == {
        "a/x": None
    }
    assert mode(store / "a/x") == 0o600

    def look():
        backend = LocalBackend(store)
        with pytest.raises(DeniedError) as listed:
            list(backend.list())
        (got,) = backend.get_many([Get("a/x", 9)])
        (stated,) = backend.stat_many(["a/x"]).values()
        (put,) = backend.put_many({"a/y": b"1"}).values()
        (deleted,) = backend.delete_many(["a/x"]).values()
        return [type(e).__name__ for e in (listed.value, got.error, stated, put, deleted)], put.remedy

    kinds, remedy = as_user(look, uid=4002, gid=4002)
    assert kinds == ["DeniedError"] * 5
    assert "chmod" in remedy
    assert files(store) == {"a/x"}


def test_a_store_that_this_user_may_only_read(open_dir, as_user):
    store = open_dir / "store"
    with LocalBackend(store, create=True) as backend:
        backend.put("a/x", b"1")

    def work():
        reader = LocalBackend(store, create=True)
        results = reader.put_many({"a/y": b"1", "b/y": b"1", "y": b"1"})
        results.update(reader.delete_many(["a/x"]))
        return [i.name for i in reader.list()], {n: type(e).__name__ for n, e in results.items()}

    listed, errors = as_user(work, uid=65534, gid=65534)
    assert listed == ["a/x"]
    assert errors == dict.fromkeys(["a/y", "b/y", "y", "a/x"], "DeniedError")
    assert files(store) == {"a/x"}


def test_a_folder_that_cannot_be_read_fails_the_listing(open_dir, as_user):
    """A listing that leaves something out would be worse than none."""
    store = open_dir / "store"
    with LocalBackend(store, create=True) as backend:
        backend.put_many({"a/x": b"1", "b/x": b"1"})
    (store / "b").chmod(0o700)

    def work():
        with pytest.raises(DeniedError):
            list(LocalBackend(store).list())
        return [i.name for i in LocalBackend(store).list("a/")]

    assert as_user(work, uid=65534, gid=65534) == ["a/x"]


# -- the root ------------------------------------------------------------------------------------


def every_error(backend: LocalBackend) -> list[StorageError]:
    with pytest.raises(StorageError) as listed:
        list(backend.list())
    (got,) = backend.get_many([Get("a/x", 9)])
    (stated,) = backend.stat_many(["a/x"]).values()
    (put,) = backend.put_many({"a/x": b"1"}).values()
    return [listed.value, got.error, stated, put]


def test_a_root_that_does_not_exist(root):
    errors = every_error(LocalBackend(root))
    assert {type(error) for error in errors} == {NotFoundError}
    assert all(str(root) in error.message and error.remedy for error in errors)
    assert not root.exists()


def test_a_root_is_made_by_the_first_put_if_allowed(tmp_path):
    root = tmp_path / "deep" / "store"
    backend = LocalBackend(root, create=True)
    assert list(backend.list()) == []
    assert list(backend.list("a/")) == []
    assert backend.stat_many(["a/x"]) == {"a/x": None}
    assert backend.delete_many(["a/x"]) == {"a/x": None}
    with pytest.raises(NotFoundError):
        backend.get("a/x", limit=9)
    assert not root.parent.exists(), "reading makes nothing"
    backend.put("a/x", b"1")
    assert files(root) == {"a/x"}


def test_a_root_is_not_made_for_a_bad_name(root):
    assert isinstance(LocalBackend(root, create=True).put_many({"../x": b"1"})["../x"], PermanentError)
    assert not root.exists()


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("below", ["", "deeper/store"])
def test_a_root_that_is_a_file(tmp_path, create, below):
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    errors = every_error(LocalBackend(file / below if below else file, create=create))
    assert {type(error) for error in errors} == {PermanentError}
    assert all("not a directory" in error.message and error.remedy for error in errors)
    assert file.read_bytes() == b"precious"


def test_a_root_that_is_a_dangling_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    backend = LocalBackend(link, create=True)
    assert isinstance(backend.put_many({"x": b"1"})["x"], PermanentError)
    with pytest.raises(NotFoundError):
        backend.list()
    assert not (tmp_path / "nowhere").exists()


def test_a_root_may_be_a_link_and_have_odd_characters(tmp_path):
    real = tmp_path / "mit leer zeichen & ä?#"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    open_backend(str(link)).put("a/x", b"1")
    assert open_backend(str(real)).get("a/x", limit=1) == b"1"
    assert open_backend(Location.parse(str(real)).url).get("a/x", limit=1) == b"1"


@pytest.mark.parametrize("url", ["/", "file:///", "file:///tmp/.."])
def test_the_root_of_the_file_system_is_no_store(url):
    with pytest.raises(UsageError):
        open_backend(url)


def test_unknown_options_are_refused(root):
    with pytest.raises(UsageError, match="colour"):
        open_backend(root, options={"colour": "red"})


def test_a_store_removed_while_it_is_open(root, backend):
    backend.put("a/x", b"1")
    root.rename(root.with_name("away"))
    assert {type(error) for error in every_error(backend)} == {NotFoundError}
    root.with_name("away").rename(root)
    assert backend.get("a/x", limit=1) == b"1"


# -- links and other things that are no objects --------------------------------------------------


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_bytes(b"secret")
    return path


def test_a_linked_object_is_not_followed(root, backend, outside):
    (root / "a").mkdir()
    (root / "a/x").symlink_to(outside / "secret")
    (root / "a/dangling").symlink_to(outside / "absent")
    for name in ("a/x", "a/dangling"):
        with pytest.raises(NotFoundError):
            backend.get(name, limit=99)
        assert backend.stat_many([name]) == {name: None}
    assert list(backend.list()) == []
    backend.put_many({"a/x": b"healed", "a/dangling": b"healed"})
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (outside / "absent").exists()
    assert not (root / "a/x").is_symlink()
    assert backend.get("a/x", limit=9) == b"healed"


def test_deleting_a_link_leaves_its_target(root, backend, outside):
    (root / "x").symlink_to(outside / "secret")
    assert backend.delete_many(["x"]) == {"x": None}
    assert not (root / "x").is_symlink()
    assert (outside / "secret").exists()


@pytest.mark.parametrize("depth", ["a", "a/b"])
def test_a_linked_folder_is_not_followed(root, backend, outside, depth):
    link = root / depth
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside, target_is_directory=True)
    name = f"{depth}/secret"
    with pytest.raises(NotFoundError):
        backend.get(name, limit=99)
    assert backend.stat_many([name]) == {name: None}
    assert list(backend.list()) == []
    assert list(backend.list(f"{depth}/")) == []
    assert backend.delete_many([name]) == {name: None}
    results = backend.put_many({name: b"evil", f"{depth}/new": b"evil", "fine/x": b"1"})
    assert isinstance(results[name], PermanentError)
    assert isinstance(results[f"{depth}/new"], PermanentError)
    assert results["fine/x"] is None
    assert files(outside) == {"secret"}
    assert (outside / "secret").read_bytes() == b"secret"


def test_links_in_a_circle_end(root, backend):
    backend.put("a/x", b"1")
    (root / "a/loop").symlink_to(root)
    (root / "a/self").symlink_to("self")
    assert [info.name for info in backend.list()] == ["a/x"]


def test_fifos_sockets_and_folders_are_no_objects_and_block_nothing(root, backend):
    (root / "a").mkdir()
    os.mkfifo(root / "a/fifo")
    (root / "a/folder").mkdir()
    where = Path.cwd()
    os.chdir(root / "a")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
    finally:
        os.chdir(where)
    for name in ("a/fifo", "a/folder", "a/socket"):
        with pytest.raises(NotFoundError):
            backend.get(name, limit=99)
        assert backend.stat_many([name]) == {name: None}
    assert list(backend.list()) == []
    results = backend.put_many({"a/fifo": b"1", "a/socket": b"1", "a/folder": b"1"})
    assert results["a/fifo"] is None
    assert results["a/socket"] is None
    assert isinstance(results["a/folder"], PermanentError)
    assert files(root) == {"a/fifo", "a/socket"}, "no debris of the one that failed"


def test_a_file_where_a_folder_must_be(root, backend):
    backend.put("a", b"1")
    results = backend.put_many({"a/x": b"1", "b/x": b"1"})
    assert isinstance(results["a/x"], PermanentError)
    assert results["b/x"] is None
    assert backend.stat_many(["a/x"]) == {"a/x": None}
    with pytest.raises(NotFoundError):
        backend.get("a/x", limit=1)
    assert files(root) == {"a", "b/x"}


def test_foreign_names_are_not_listed(root, backend):
    backend.put("a/x", b"1")
    for name in (b".hidden", b"with space", b"\xff\xfe", b"new\nline", b"lost+found", "ä".encode(), b"-rf"):
        Path(os.fsdecode(os.fsencode(root / "a") + b"/" + name)).write_bytes(b"?")
        folder = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
        folder.mkdir()
        (folder / "x").write_bytes(b"?")
    (root / "lost+found").chmod(0)
    assert [info.name for info in backend.list()] == ["a/x"]


def test_a_folder_of_great_depth_ends(root, backend):
    backend.put("a/x", b"1")
    deep = root / "/".join(["d"] * 300)
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"1")
    assert [info.name for info in backend.list()] == ["a/x"]


def test_many_files_need_few_descriptors(root, backend):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        objects = {f"blobs/{i % 256:02x}/{i}": b"1" for i in range(1000)}
        assert not any(backend.put_many(objects).values())
        assert len(list(backend.get_many([Get(name, 1) for name in objects]))) == 1000
        assert len(list(backend.list())) == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_running_out_of_descriptors_is_transient(root, backend):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend.put("a/x", b"1")
    used = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 1, hard))
    try:
        (got,) = backend.get_many([Get("a/x", 1)])
        (put,) = backend.put_many({"a/y": b"1"}).values()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(used[0])
    assert isinstance(got.error, TransientError)
    assert isinstance(put, TransientError)
    assert files(root) == {"a/x"}


def test_objects_that_vanish_under_a_reader(root, backend):
    objects = {f"a/{i}": b"1" for i in range(10)}
    backend.put_many(objects)
    results = backend.get_many([Get(name, 1) for name in objects])
    next(results)
    for name in objects:
        (root / name).unlink()
    (root / "a").rmdir()
    assert {type(got.error) for got in results} == {NotFoundError}


def test_a_growing_file_is_bounded(root, backend):
    """Nobody grows an object, but what lies under its name may be anything."""
    stop = threading.Event()
    (root / "a").mkdir()

    def grow():
        with (root / "a/x").open("ab", buffering=0) as file:
            for _ in range(2000):
                file.write(b"g" * 1000)
                if stop.is_set():
                    return

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(300):
            (got,) = backend.get_many([Get("a/x", 50_000)])
            assert got.data is None or len(got.data) <= 50_000
    finally:
        stop.set()
        writer.join()
