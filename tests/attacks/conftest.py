# SPDX-License-Identifier: Apache-2.0
"""A user with nothing, and a store that holds some of every kind of cache."""

from __future__ import annotations

import os

import pytest
from attack_world import Machine, World

from torchrelay.caches.aot_autograd import _guard_and_variant


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No keys, no settings, no caches of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("TORCHRELAY_", "TORCHINDUCTOR_", "TRITON_", "XDG_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    # Three quarters of the time would go there, and no test in this process cuts the power.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A store that one producer filled; tests work on copies (:meth:`World.copy`)."""
    base = tmp_path_factory.mktemp("world")
    base.chmod(0o700)
    _guard_and_variant.cache_clear()
    return World.make(base)


@pytest.fixture
def producer(tmp_path):
    """A machine with a filled cache and a store of its own that does not exist yet."""
    machine = Machine.make(tmp_path / "producer", tmp_path / "store")
    machine.fill()
    return machine
