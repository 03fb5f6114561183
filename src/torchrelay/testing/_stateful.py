# SPDX-License-Identifier: Apache-2.0
"""A backend against a ``dict``, by random operations."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from torchrelay.errors import NotFoundError, TooLargeError
from torchrelay.storage import Backend, Get, ObjectInfo
from torchrelay.testing._strategies import object_names, payloads

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = object_names()


class _BackendMachine(RuleBasedStateMachine):
    """Each run works below a prefix of its own, so that a place need not be emptied in between."""

    def __init__(self, backend: Backend, prefix: str) -> None:
        super().__init__()
        self.backend = backend
        self.prefix = prefix
        self.model: dict[str, bytes] = {}

    @rule(objects=st.dictionaries(_NAMES, payloads(), max_size=4))
    def put(self, objects: dict[str, bytes]) -> None:
        full = {self.prefix + name: data for name, data in objects.items()}
        assert self.backend.put_many(full) == dict.fromkeys(full)
        self.model.update(full)

    @rule(pick=st.integers(0, 99))
    def overwrite(self, pick: int) -> None:
        """A rule of its own: names drawn at random seldom meet one that is there already."""
        if not self.model:
            return
        name = sorted(self.model)[pick % len(self.model)]
        # One byte longer, so that no backend gets by with what was there.
        self.put({name.removeprefix(self.prefix): self.model[name] + b"+"})

    @rule(names=st.lists(_NAMES, max_size=4), slack=st.integers(-1, 1))
    def get(self, names: list[str], slack: int) -> None:
        gets = [
            Get(name, max(0, len(self.model.get(name, b"")) + slack))
            for name in (self.prefix + short for short in names)
        ]
        results = list(self.backend.get_many(gets))
        assert sorted(map(repr, (got.get for got in results))) == sorted(map(repr, gets))
        for got in results:
            expected = self.model.get(got.get.name)
            if expected is None:
                assert isinstance(got.error, NotFoundError), got
            elif len(expected) > got.get.limit:
                assert isinstance(got.error, TooLargeError), got
            else:
                assert got.data == expected, got

    @rule(name=_NAMES, offset=st.integers(0, 100), length=st.integers(0, 100))
    def get_range(self, name: str, offset: int, length: int) -> None:
        full = self.prefix + name
        if not self.backend.capabilities.ranges or full not in self.model:
            return
        (got,) = self.backend.get_many([Get(full, 100, offset, length)])
        assert got.data == self.model[full][offset : offset + length], got

    @rule(names=st.lists(_NAMES, max_size=3))
    def delete(self, names: list[str]) -> None:
        if not self.backend.capabilities.deletes:
            return
        full = [self.prefix + name for name in names]
        assert self.backend.delete_many(full) == dict.fromkeys(full)
        for name in full:
            self.model.pop(name, None)

    @rule(names=st.lists(_NAMES, max_size=4))
    def stat(self, names: list[str]) -> None:
        full = {self.prefix + name for name in names}
        for name, info in self.backend.stat_many(full).items():
            if name in self.model:
                assert isinstance(info, ObjectInfo)
                assert (info.name, info.size) == (name, len(self.model[name]))
            else:
                assert info is None

    @rule(folder=st.sampled_from(["d/", "d0/", "d.1/d/", "dZ_/"]))
    def list_folder(self, folder: str) -> None:
        self._compare(self.prefix + folder)

    @invariant()
    def listing_agrees(self) -> None:
        self._compare(self.prefix)

    def _compare(self, prefix: str) -> None:
        listed = [(info.name, info.size) for info in self.backend.list(prefix)]
        expected = [(name, len(data)) for name, data in self.model.items() if name.startswith(prefix)]
        assert sorted(listed) == sorted(expected)


def run_backend_machine(open_backend: Callable[[], Backend], *, examples: int = 30, steps: int = 20) -> None:
    """Hold a backend against a ``dict``.

    Args:
        open_backend: Opens a connection to an empty, writable place; called once and closed at the end.
        examples: Random runs.
        steps: Operations in each.
    """
    numbers = itertools.count()
    with open_backend() as backend:
        # Without its place the store need not exist yet, and a listing would say so.
        backend.put("machine/o", b"")
        run_state_machine_as_test(
            lambda: _BackendMachine(backend, f"machine/r{next(numbers)}/"),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                # Runs are short enough to read as they are; shrinking takes minutes on a real service.
                phases=(Phase.generate,),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
