# SPDX-License-Identifier: Apache-2.0
"""Where Python and torch lie: read without torch, and noted for a directory."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from torchrelay import canonjson
from torchrelay.caches import prefixes as module
from torchrelay.caches.kernelname import Prefixes
from torchrelay.caches.prefixes import note_prefixes, read_prefixes, this_prefixes
from torchrelay.caches.state import state_path, write_state
from torchrelay.errors import UnsafeDirectoryError

HERE = Prefixes(python_include=("/a/include",), python_lib="/a/lib", torch="/a/torch")
THERE = Prefixes(python_include=("/b/include",), python_lib="/b/lib", torch="/b/torch")


@pytest.fixture
def torch_at(monkeypatch: pytest.MonkeyPatch) -> object:
    def place(origin: str | None) -> None:
        spec = None if origin is None else ModuleSpec("torch", None, origin=origin)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return place


def test_the_places_are_those_of_this_interpreter(torch_at: object) -> None:
    assert callable(torch_at)
    torch_at("/some/where/torch/__init__.py")
    found = this_prefixes()
    assert found is not None
    assert found.torch == "/some/where/torch"
    assert found.python_include[0] == sysconfig.get_path("include")
    assert found.python_lib == sysconfig.get_config_var("LIBDIR")


@pytest.mark.parametrize("origin", [None, "/with space/torch/__init__.py", "/it's/torch/__init__.py"])
def test_without_a_torch_that_could_compile_there_are_none(torch_at: object, origin: str | None) -> None:
    assert callable(torch_at)
    torch_at(origin)
    assert this_prefixes() is None


def test_a_torch_that_is_no_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert this_prefixes() is None


def test_two_different_include_directories_are_both_there(
    torch_at: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(torch_at)
    torch_at("/t/torch/__init__.py")
    paths = {None: "/usr/local/include/python3", "posix_prefix": "/usr/include/python3"}
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name, scheme=None: paths[scheme])
    found = this_prefixes()
    assert found is not None
    assert found.python_include == ("/usr/local/include/python3", "/usr/include/python3")


def test_what_is_noted_is_read_and_the_last_one_stays(tmp_path: Path) -> None:
    assert read_prefixes(tmp_path) is None
    note_prefixes(tmp_path, None)
    assert read_prefixes(tmp_path) is None
    note_prefixes(tmp_path, HERE)
    assert read_prefixes(tmp_path) == HERE
    note_prefixes(tmp_path, None)
    assert read_prefixes(tmp_path) == HERE
    note_prefixes(tmp_path, THERE)
    assert read_prefixes(tmp_path) == THERE


def test_noting_the_same_again_writes_nothing(tmp_path: Path) -> None:
    note_prefixes(tmp_path, HERE)
    path = state_path(tmp_path) / "prefixes.json"
    before = path.stat()
    note_prefixes(tmp_path, HERE)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\x80\x04K\x01.", b"[" * 10_000, b" " * 20_000, canonjson.encode({"torch": "/x"})],
)
def test_damage_is_as_if_nothing_was_noted(tmp_path: Path, data: bytes) -> None:
    write_state(tmp_path, "prefixes.json", data)
    assert read_prefixes(tmp_path) is None
    note_prefixes(tmp_path, HERE)
    assert read_prefixes(tmp_path) == HERE


def test_a_state_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    note_prefixes(tmp_path, HERE)
    state_path(tmp_path).chmod(0o777)
    assert read_prefixes(tmp_path) is None
    with pytest.raises(UnsafeDirectoryError):
        note_prefixes(tmp_path, THERE)
