# SPDX-License-Identifier: Apache-2.0
"""torchrelay: compile once, pass it on.

A content-addressed, signed store for the caches of ``torch.compile`` and Triton. The names below are
the public interface; they are loaded when they are first used, so that importing this costs nothing
in a process that may never need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrelay.version import __version__

if TYPE_CHECKING:
    from torchrelay.environment import Environment
    from torchrelay.errors import RelayError
    from torchrelay.options import PullOptions, PushOptions
    from torchrelay.relay import Relay, TorchrelayWarning
    from torchrelay.reports import PullReport, PushReport, StatusReport

__all__ = [
    "Environment",
    "PullOptions",
    "PullReport",
    "PushOptions",
    "PushReport",
    "Relay",
    "RelayError",
    "StatusReport",
    "TorchrelayWarning",
    "__version__",
]

_MODULES = {
    "Environment": "environment",
    "PullOptions": "options",
    "PullReport": "reports",
    "PushOptions": "options",
    "PushReport": "reports",
    "Relay": "relay",
    "RelayError": "errors",
    "StatusReport": "reports",
    "TorchrelayWarning": "relay",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'torchrelay' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - not needed unless something is used

    value = globals()[name] = getattr(import_module(f"torchrelay.{_MODULES[name]}"), name)
    return value
