# SPDX-License-Identifier: Apache-2.0
"""Stores in a directory: ``file:///srv/relay``, ``/srv/relay``, ``~/relay``. See the contract, §9."""

from __future__ import annotations

from torchrelay_local.backend import LocalBackend

__all__ = ["LocalBackend"]
