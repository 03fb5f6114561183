# SPDX-License-Identifier: Apache-2.0
"""Every backend of this repository, and the decorators, through the shipped suite."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import torchrelay_memory
import torchrelay_memory.backend
from torchrelay.storage import ObservedBackend, RetryingBackend, open_backend
from torchrelay.testing import BackendConformance, FaultyBackend, SlowBackend, StaleListBackend

_numbers = itertools.count()


class TestLocal(BackendConformance):
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path / "store"

    def make_backend(self, place):
        return open_backend(place, create=True)

    def set_raw(self, place, name, data):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, place, name):
        path = place / name
        return path.read_bytes() if path.is_file() else None

    def list_raw(self, place):
        return {str(p.relative_to(place)) for p in Path(place).rglob("*") if not p.is_dir()}


class TestMemory(BackendConformance):
    @pytest.fixture
    def place(self):
        name = f"conformance{next(_numbers)}"
        yield name
        torchrelay_memory.forget(name)

    def _objects(self, place):
        return torchrelay_memory.backend._stores.setdefault(place, {})

    def make_backend(self, place):
        return open_backend(f"memory://{place}", create=True)

    def set_raw(self, place, name, data):
        self._objects(place)[name] = (data, 1.0)

    def get_raw(self, place, name):
        found = self._objects(place).get(name)
        return None if found is None else found[0]

    def list_raw(self, place):
        return set(self._objects(place))


class TestDecorated(TestLocal):
    """All decorators at once keep the whole contract."""

    def make_backend(self, place):
        inner = SlowBackend(super().make_backend(place), 0.0)
        return ObservedBackend(RetryingBackend(StaleListBackend(FaultyBackend(inner))))
