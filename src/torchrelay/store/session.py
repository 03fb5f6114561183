# SPDX-License-Identifier: Apache-2.0
"""What every operation on a store works with: a backend, a verifier, a workload and a memory."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.options import Progress
from torchrelay.signing import Policy, Verifier
from torchrelay.storage import ObservedBackend
from torchrelay.store.state import ClientState


def silent(stage: str, done: int, total: int) -> None:
    """The progress that nobody looks at."""


@dataclass(frozen=True, slots=True)
class Session:
    """One workload of one store, seen with one policy.

    Attributes:
        backend: Counts what goes over the wire.
        policy: Whom the reader trusts.
        verifier: Bound to ``policy``; the one choke point.
        workload: The name that entries are published under.
        state: What this client remembers of the store.
        progress: Told how far a long operation is.
    """

    backend: ObservedBackend
    policy: Policy
    verifier: Verifier
    workload: str
    state: ClientState
    progress: Progress = silent
