# SPDX-License-Identifier: Apache-2.0
"""A VerifiedEntry comes out of Verifier.open and from nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from torchrelay.signing import VerifiedEntry
from torchrelay.testing.entries import make_record, verified

PLAIN = b"bytes of an entry" * 10


def test_what_it_holds() -> None:
    entry = verified(PLAIN, times=(1, 2))
    assert entry.plain == PLAIN
    assert entry.record.times == (1, 2)
    assert entry.statement == entry.record.statement
    assert len(entry.signers) == 1
    assert "inductor" in repr(entry)


def test_no_constructor() -> None:
    record, _ = make_record(PLAIN)
    for seal in (None, object(), True, "seal"):
        with pytest.raises(TypeError):
            VerifiedEntry(record, PLAIN, frozenset(), seal=seal)
    with pytest.raises(TypeError):
        VerifiedEntry(record, PLAIN, frozenset())  # type: ignore[call-arg]


def test_an_empty_shell_gives_nothing_out() -> None:
    shell = object.__new__(VerifiedEntry)
    for name in ("plain", "record", "statement", "signers"):
        with pytest.raises(TypeError):
            getattr(shell, name)


def test_a_shell_filled_by_hand_gives_nothing_out() -> None:
    record, _ = make_record(PLAIN)
    shell = object.__new__(VerifiedEntry)
    for name, value in (("plain", b"evil"), ("record", record), ("signers", frozenset()), ("seal", object())):
        object.__setattr__(shell, f"_VerifiedEntry__{name}", value)
    with pytest.raises(TypeError):
        shell.plain


def test_no_subclass() -> None:
    with pytest.raises(TypeError):
        type("Forged", (VerifiedEntry,), {})


def test_no_look_alike_by_class_assignment() -> None:
    class Fake:
        __slots__ = ("__plain", "__record", "__seal", "__signers")

    fake = Fake()
    try:
        fake.__class__ = VerifiedEntry  # type: ignore[assignment]
    except TypeError:
        return
    with pytest.raises(TypeError):
        fake.plain  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["plain", "record", "signers", "_VerifiedEntry__plain", "anything"])
def test_no_change(name: str) -> None:
    entry = verified(PLAIN)
    with pytest.raises((TypeError, AttributeError)):
        setattr(entry, name, b"evil")
    with pytest.raises((TypeError, AttributeError)):
        delattr(entry, name)
    assert entry.plain == PLAIN


def test_no_copy_and_no_pickle() -> None:
    entry = verified(PLAIN)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(entry)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(entry, protocol)
    with pytest.raises(TypeError):
        entry.__setstate__((None, {}))
    assert not dataclasses.is_dataclass(entry)


def test_a_pickle_that_builds_one_gives_a_shell_at_most() -> None:
    shell = b"\x80\x02ctorchrelay.signing.verifier\nVerifiedEntry\n)\x81"
    with pytest.raises(TypeError, match="did not come from"):
        pickle.loads(shell + b".").plain
    with pytest.raises(TypeError, match="not unpickled"):
        pickle.loads(shell + b"N}X\x05\x00\x00\x00plainX\x04\x00\x00\x00evils\x86b.")
