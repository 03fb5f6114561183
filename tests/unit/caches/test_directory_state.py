# SPDX-License-Identifier: Apache-2.0
"""The lock of a cache directory: excludes this user's other processes, and holds nobody up for long."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrelay.caches import files, state
from torchrelay.errors import DamagedError, InTheWayError, UnsafeDirectoryError

COUNTING = """
import sys
from pathlib import Path
from torchrelay.caches import state
root = Path(sys.argv[1])
for _ in range(20):
    with state.directory_lock(root, "count", patience=60):
        number = int((root / "number").read_text())
        (root / "number").write_text(str(number + 1))
"""


def test_the_lock_excludes_other_processes(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", COUNTING, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "number").read_text() == "80"


def test_the_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / files.OWN_FOLDER).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeDirectoryError), state.directory_lock(root, "x"):
        pass
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_lock_that_is_held_is_waited_for_and_then_told(tmp_path: Path) -> None:
    """Whoever may open the file could keep it for ever, if only to read."""
    with state.directory_lock(tmp_path, "x"):
        pass
    path = state.state_path(tmp_path) / "x.lock"
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        started = time.monotonic()
        with pytest.raises(InTheWayError) as caught, state.directory_lock(tmp_path, "x", patience=0.1):
            raise AssertionError("it was not excluded")
        assert 0.1 <= time.monotonic() - started < 5
        assert caught.value.remedy and str(path) in caught.value.message
    finally:
        os.close(descriptor)
    with state.directory_lock(tmp_path, "x"):
        pass


def test_a_lock_that_is_no_file_is_not_opened(tmp_path: Path) -> None:
    with state.directory_lock(tmp_path, "x"):
        pass
    path = state.state_path(tmp_path) / "x.lock"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedError), state.directory_lock(tmp_path, "x"):
        pass
