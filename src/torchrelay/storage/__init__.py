# SPDX-License-Identifier: Apache-2.0
"""The storage interface: what backends implement and the store uses.

Everything that a backend outside this repository needs is here and in :mod:`torchrelay.errors`.
The contract is ``docs/reference/backend-contract.md``; :class:`Backend` repeats it in short.
"""

from __future__ import annotations

from torchrelay.storage.backend import Backend, bad_name, not_found, too_large
from torchrelay.storage.location import Location, redact_text
from torchrelay.storage.names import TEMP_PREFIX, is_component, is_object_name, is_prefix
from torchrelay.storage.observed import ObservedBackend
from torchrelay.storage.oserrors import classify_oserror
from torchrelay.storage.readonly import ReadOnlyBackend
from torchrelay.storage.registry import backend_class, installed_schemes, open_backend
from torchrelay.storage.retrying import RetryingBackend, RetryPolicy
from torchrelay.storage.types import Budget, Capabilities, Counters, Get, Got, ObjectInfo, Page, Traffic
from torchrelay.storage.wrapper import WrapperBackend

__all__ = [
    "TEMP_PREFIX",
    "Backend",
    "Budget",
    "Capabilities",
    "Counters",
    "Get",
    "Got",
    "Location",
    "ObjectInfo",
    "ObservedBackend",
    "Page",
    "ReadOnlyBackend",
    "RetryPolicy",
    "RetryingBackend",
    "Traffic",
    "WrapperBackend",
    "backend_class",
    "bad_name",
    "classify_oserror",
    "installed_schemes",
    "is_component",
    "is_object_name",
    "is_prefix",
    "not_found",
    "open_backend",
    "redact_text",
    "too_large",
]
