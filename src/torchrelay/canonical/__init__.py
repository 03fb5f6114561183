# SPDX-License-Identifier: Apache-2.0
"""The canonical form of PyTorch's pickled cache entries, computed without unpickling them."""

from __future__ import annotations

from torchrelay.canonical.facts import Facts, GraphRef, variant
from torchrelay.canonical.form import Canonical, canonicalise, restore, restore_and_read

__all__ = ["Canonical", "Facts", "GraphRef", "canonicalise", "restore", "restore_and_read", "variant"]
