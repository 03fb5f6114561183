# SPDX-License-Identifier: Apache-2.0
"""Other users, full disks and mounts for the backend tests."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def open_dir():
    """A directory that every user may enter, as pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="relay-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def as_user():
    """Runs a function in a child process as another user; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    return run_as


def run_as(function, *, uid, gid, umask=0o022):
    """The result of ``function()`` in a forked child with this user, group and umask."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            os.setgroups([gid])
            os.setgid(gid)
            os.setuid(uid)
            os.umask(umask)
            answer = ("result", function())
        except BaseException:
            answer = ("failed", traceback.format_exc())
        with os.fdopen(writable, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        kind, value = pickle.load(pipe)
    os.waitpid(child, 0)
    assert kind == "result", value
    return value


@pytest.fixture
def in_mount_namespace(tmp_path):
    """Runs a script in its own mount namespace; skips only where the system offers none."""
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this system cannot mount a tmpfs here")

    def run(mount: str, script: str) -> str:
        program = tmp_path / "script.py"
        program.write_text(textwrap.dedent(script))
        command = f"{mount} && exec {sys.executable} {program}"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "backends")])
        done = subprocess.run(
            [unshare, "-m", "sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
