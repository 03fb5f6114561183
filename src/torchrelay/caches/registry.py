# SPDX-License-Identifier: Apache-2.0
"""The kinds of caches that this torchrelay knows. What it does not know is left out and counted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchrelay.caches.aot_autograd import AotAutogradKind
from torchrelay.caches.autotune import AutotuneKind
from torchrelay.caches.base import CacheKind
from torchrelay.caches.cpp import CppKind
from torchrelay.caches.gemm import GemmKind
from torchrelay.caches.inductor import InductorKind
from torchrelay.caches.kernelname import Naming
from torchrelay.caches.pgo import PgoKind
from torchrelay.caches.precompile import PrecompileKind
from torchrelay.caches.tree import TreeKind
from torchrelay.caches.triton import TritonKind

_IN_ORDER: tuple[CacheKind, ...] = (
    CppKind(),
    TritonKind(),
    AutotuneKind(),
    GemmKind(),
    InductorKind(),
    AotAutogradKind(),
    PgoKind(),
    PrecompileKind(),
    TreeKind(),
)

KINDS: Mapping[str, CacheKind] = MappingProxyType({kind.name: kind for kind in _IN_ORDER})
"""All kinds by name, in the order of installation: what is needed before what needs it, and a graph
after its kernels, so that a process that starts meanwhile finds them together or not at all."""


def kinds_for(torch_version: str | None, naming: Naming | None = None) -> Mapping[str, CacheKind]:
    """The kinds as they read a directory that this PyTorch filled: its fields decide what is masked.

    Args:
        torch_version: As PyTorch calls itself, or None if it is not known; then pickles stay ``raw``.
        naming: How C++ kernels were named; None: only those that a pull installed are recognised.
    """
    kinds = dict(KINDS)
    kinds[InductorKind.name] = InductorKind(torch_version)
    kinds[AotAutogradKind.name] = AotAutogradKind(torch_version)
    kinds[PrecompileKind.name] = PrecompileKind(torch_version)
    kinds[CppKind.name] = CppKind(naming or Naming())
    return MappingProxyType(kinds)


def kind_of(name: str) -> CacheKind | None:
    """The kind called ``name``; None if this version does not know it."""
    return KINDS.get(name)
