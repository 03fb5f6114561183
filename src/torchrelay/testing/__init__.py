# SPDX-License-Identifier: Apache-2.0
"""Tools for those who write a backend, or code on top of one: the contract as tests, and faults.

Needs the extra ``testing`` (pytest, Hypothesis). Nothing else in torchrelay imports this package.
"""

from __future__ import annotations

import pytest

# Before the import, so that a failing assertion of the suite shows its values in your project too.
pytest.register_assert_rewrite("torchrelay.testing._conformance", "torchrelay.testing._stateful")

from torchrelay.testing._conformance import BackendConformance  # noqa: E402
from torchrelay.testing._faulty import Fault, FaultyBackend  # noqa: E402
from torchrelay.testing._slow import SlowBackend  # noqa: E402
from torchrelay.testing._stale import StaleListBackend  # noqa: E402
from torchrelay.testing._stateful import run_backend_machine  # noqa: E402
from torchrelay.testing._strategies import object_names, payloads  # noqa: E402

__all__ = [
    "BackendConformance",
    "Fault",
    "FaultyBackend",
    "SlowBackend",
    "StaleListBackend",
    "object_names",
    "payloads",
    "run_backend_machine",
]
