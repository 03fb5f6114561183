# SPDX-License-Identifier: Apache-2.0
"""The closed list of fields that differ between identical compiles, per PyTorch version.

Nothing that is not listed here is ever changed. What is listed is read by nobody but PyTorch's
logs and statistics; code, constants, guards and kernels are never on this list.
Read ``docs/reference/canonical-form.md`` for how each line was found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_OUTPUT = "torch._inductor.output_code"
_RESULT = "torch._functorch._aot_autograd.aot_autograd_result"
_TRITON = "torch._inductor.runtime.triton_heuristics"

COMPILED_FX_GRAPH = f"{_OUTPUT}.CompiledFxGraph"
AOT_RESULT = f"{_RESULT}.AOTAutogradResult"
BUNDLED_RESULT = f"{_RESULT}.BundledAOTAutogradResult"
PACKAGE = "torch._dynamo.package.PrecompileCacheEntry"


class Rule(Enum):
    """What is done with a listed field."""

    TIME = "time"
    """An integer becomes 0 and is kept in ``times``; ``None`` stays."""
    REPRO = "repro"
    """A text becomes the empty text; ``None`` stays."""
    DEBUG = "debug-lines"
    """A list of texts becomes the empty list; ``None`` stays."""
    KEY_AND_DEBUG = "key-and-debug-lines"
    """A pair whose second part is treated as ``DEBUG``."""


@dataclass(frozen=True, slots=True)
class Field:
    """One listed field.

    Args:
        class_: ``module.QualName`` of the class whose attribute it is.
        attribute: The attribute.
        rule: What is done with it.
        required: Whether an object of the class without it means an unknown layout.
    """

    class_: str
    attribute: str
    rule: Rule
    required: bool


@dataclass(frozen=True, slots=True)
class Child:
    """An attribute that must hold an object of one of some classes, or ``None`` where allowed."""

    class_: str
    attribute: str
    classes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of the entries of one PyTorch version.

    Args:
        version: ``major.minor``.
        roots: For each kind of entry the classes that one may be an object of.
        fields: The closed list.
        children: Where listed objects lie, so that none goes unseen in a layout that moved them.
    """

    version: str
    roots: dict[str, tuple[str, ...]]
    fields: tuple[Field, ...]
    children: tuple[Child, ...]


_FIELDS = (
    Field(COMPILED_FX_GRAPH, "runnable_graph_str", Rule.REPRO, required=True),
    # Set after construction, so graphs bundled in an AOTAutograd entry may lack the next two.
    Field(COMPILED_FX_GRAPH, "_time_taken_ns", Rule.TIME, required=False),
    Field(COMPILED_FX_GRAPH, "_fx_graph_cache_debug_lines", Rule.DEBUG, required=False),
    Field(f"{_RESULT}.CompiledForward", "fx_graph_cache_info", Rule.KEY_AND_DEBUG, required=True),
    Field(f"{_RESULT}.CompiledBackward", "fx_graph_cache_info", Rule.KEY_AND_DEBUG, required=True),
    Field(AOT_RESULT, "forward_time_taken_ns", Rule.TIME, required=True),
    Field(AOT_RESULT, "backward_time_taken_ns", Rule.TIME, required=True),
    Field(BUNDLED_RESULT, "forward_time_taken_ns", Rule.TIME, required=True),
    Field(BUNDLED_RESULT, "backward_time_taken_ns", Rule.TIME, required=True),
    Field(f"{_TRITON}.CachingAutotuner", "precompile_time_taken_ns", Rule.TIME, required=False),
    Field(f"{_TRITON}.CachingAutotuner", "autotune_time_taken_ns", Rule.TIME, required=False),
    Field(f"{_TRITON}.DebugAutotuner", "precompile_time_taken_ns", Rule.TIME, required=False),
    Field(f"{_TRITON}.DebugAutotuner", "autotune_time_taken_ns", Rule.TIME, required=False),
)

_CHILDREN = (
    Child(AOT_RESULT, "compiled_fw", (f"{_RESULT}.CompiledForward",)),
    Child(AOT_RESULT, "compiled_bw", (f"{_RESULT}.CompiledBackward",), optional=True),
    Child(BUNDLED_RESULT, "compiled_fw", (f"{_RESULT}.BundledCompiledForward",)),
    Child(BUNDLED_RESULT, "compiled_bw", (f"{_RESULT}.BundledCompiledBackward",), optional=True),
    # Another output, such as RegionalOutputCode, is a pickle in a bytes object: it is not looked into.
    Child(f"{_RESULT}.BundledCompiledForward", "result", (COMPILED_FX_GRAPH,)),
    Child(f"{_RESULT}.BundledCompiledBackward", "result", (COMPILED_FX_GRAPH,)),
    # What a package holds for each graph that Dynamo took from the function.
    Child(f"{_RESULT}.BundledAOTAutogradCacheArtifact", "content", (BUNDLED_RESULT,)),
)

_ROOTS = {
    "inductor": (COMPILED_FX_GRAPH,),
    "aot_autograd": (AOT_RESULT, BUNDLED_RESULT),
    "precompile": (PACKAGE,),
}

# One list serves all three: read in 2.12.0, 2.13.0 and 2.14.1. What these versions changed between
# them (min_cut_info_str, _compile_context, kernel_free_cudagraph, ...) differs in no two compiles.
LAYOUTS = {version: Layout(version, _ROOTS, _FIELDS, _CHILDREN) for version in ("2.12", "2.13", "2.14")}

FORM = "pickle-1"
RAW = "raw"
_VERSION = re.compile(r"(\d{1,4}\.\d{1,4})(?:\.|$|[a-z+])")


def layout_of(torch_version: str | None) -> Layout | None:
    """The layout of a PyTorch version such as ``2.13.0+cpu``, if it is a known one."""
    match = _VERSION.match(torch_version or "")
    return LAYOUTS.get(match.group(1)) if match else None


def canon_of(layout: Layout) -> str:
    """The name of the canonical form with this layout's list. Law: ``parse_canon(canon_of(l)) is l``."""
    return f"{FORM}/torch-{layout.version}"


def parse_canon(canon: str) -> Layout | None:
    """The layout whose canonical form has this name; ``None`` for any other name, ``raw`` included."""
    return next((layout for layout in LAYOUTS.values() if canon_of(layout) == canon), None)
