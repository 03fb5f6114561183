# SPDX-License-Identifier: Apache-2.0
"""Stores in this process's memory, for tests and demonstrations: ``memory://name``."""

from __future__ import annotations

from torchrelay_memory.backend import MemoryBackend, forget

__all__ = ["MemoryBackend", "forget"]
