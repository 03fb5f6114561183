# SPDX-License-Identifier: Apache-2.0
"""What the adapters need to know of an entry, read from the walk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrelay import canonjson
from torchrelay.canonical.nodes import Atom, Kind, Node, Value
from torchrelay.digest import Digest, digest_of

_CPP_MARKS = (
    b"async_compile.cpp",
    b"async_compile.halide",
    b"CppCodeCache",
    b"CppPythonBindingsCodeCache",
    b"CppWrapperCodeCache",
    b"cpp_wrapper_src",
)
_TRUE_CODES = frozenset({b"\x88", b"I01\n"})
_MAX_GUARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GraphRef:
    """A compiled graph.

    Args:
        key: Its FX key; empty for a bundled graph, which has none.
        guard: The guard text it was saved with, if any.
    """

    key: str
    guard: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What an entry says of itself.

    Args:
        root: ``module.QualName`` of the class of the pickled object.
        guards_expr: The guard text of the entry itself, not of the graphs it holds.
        extern_libs_key: PyTorch's key of external libraries (``inductor``).
        readable: Whether everything that tells variants apart could be read.
        forward: The FX entry that an unbundled AOTAutograd entry needs.
        backward: The same for its backward graph, if it has one.
        bundled: The graphs that an AOTAutograd entry holds itself: forward, then backward.
        device_types: Device types of all graphs held, sorted; nothing for an unbundled
            AOTAutograd entry, whose graphs are elsewhere.
        has_cpp: Whether a graph held has kernels in C++, or source that could not be read.
        has_triton_bundle: Whether a graph held carries Triton kernels.
    """

    root: str | None = None
    guards_expr: str | None = None
    extern_libs_key: str | None = None
    readable: bool = False
    forward: GraphRef | None = None
    backward: GraphRef | None = None
    bundled: tuple[GraphRef, ...] = ()
    device_types: tuple[str, ...] = ()
    has_cpp: bool = False
    has_triton_bundle: bool = False


class _UnreadableError(Exception):
    """A field that tells variants apart is missing or of another type. Never leaves this module."""


def read_facts(kind: str, root: Node | None) -> Facts:
    """What the entry whose object is ``root`` says of itself."""
    if not isinstance(root, Value) or root.kind is not Kind.OBJECT:
        return Facts()
    graphs = [root] if kind == "inductor" else _bundled_graphs(root)
    held = Facts(
        root=root.name,
        device_types=tuple(
            sorted({device for graph in graphs for device in _texts_below(graph, "device_types")})
        ),
        has_cpp=any(_has_cpp(graph) for graph in graphs),
        has_triton_bundle=any(_has_triton_bundle(graph) for graph in graphs),
    )
    try:
        return _inductor_facts(root, held) if kind == "inductor" else _aot_facts(root, graphs, held)
    except _UnreadableError:
        return held


def _inductor_facts(root: Value, held: Facts) -> Facts:
    guards, libraries = _text(root, "guards_expr"), _text(root, "extern_libs_key")
    return replace(held, guards_expr=guards, extern_libs_key=libraries, readable=True)


def _aot_facts(root: Value, graphs: list[Value], held: Facts) -> Facts:
    held = replace(held, guards_expr=_text(root, "guards_expr"), readable=True)
    if graphs:
        bundled = tuple(GraphRef(_optional_key(graph), _text(graph, "guards_expr")) for graph in graphs)
        return replace(held, bundled=bundled)
    forward, backward = _reference(root, "compiled_fw"), _reference(root, "compiled_bw")
    if forward is None:
        raise _UnreadableError
    return replace(held, forward=forward, backward=backward)


def _text(value: Value, name: str) -> str | None:
    """A text attribute, or ``None`` if that is what it holds.

    Raises:
        _UnreadableError: It is missing, something else, or not text that JSON can hold.
    """
    span = value.attribute(name)
    if span is None or not isinstance(span.node, Atom):
        raise _UnreadableError
    return None if span.node.tag == "n" else _string(span.node)


def _string(node: Node) -> str:
    if not isinstance(node, Atom) or node.tag != "s" or len(node.payload) > _MAX_GUARD_BYTES:
        raise _UnreadableError
    try:
        return str(node.payload, "utf-8")
    except UnicodeDecodeError:  # lone surrogates
        raise _UnreadableError from None


def _optional_key(graph: Value) -> str:
    """The FX key of a bundled graph; PyTorch bundles graphs before they have one."""
    return "" if graph.attribute("_fx_graph_cache_key") is None else _text(graph, "_fx_graph_cache_key") or ""


def _reference(root: Value, name: str) -> GraphRef | None:
    """The FX entry that ``compiled_fw`` or ``compiled_bw`` refers to, or ``None`` for no graph."""
    span = root.attribute(name)
    if span is None:
        raise _UnreadableError
    if isinstance(span.node, Atom):
        if span.node.tag == "n":
            return None
        raise _UnreadableError
    info = span.node.attribute("fx_graph_cache_info")
    if (
        info is None
        or not isinstance(info.node, Value)
        or info.node.kind is not Kind.TUPLE
        or not info.node.items
    ):
        raise _UnreadableError
    return GraphRef(_string(info.node.items[0].node), _text(span.node, "fx_graph_guard_expr"))


def _bundled_graphs(root: Value) -> list[Value]:
    """The graphs that the entry holds itself."""
    graphs: list[Value] = []
    for name in ("compiled_fw", "compiled_bw"):
        side = root.attribute(name)
        result = side.node.attribute("result") if side and isinstance(side.node, Value) else None
        if result is not None and isinstance(result.node, Value):
            graphs.append(result.node)
    return graphs


def _texts_below(graph: Value, name: str) -> set[str]:
    """The texts in an attribute, however deep: sets are pickled in several ways."""
    span = graph.attribute(name)
    pending = [span.node] if span else []
    seen: set[int] = set()
    texts: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, Atom):
            if node.tag == "s":
                texts.add(str(node.payload, "utf-8", "replace"))
        elif id(node) not in seen:
            seen.add(id(node))
            pending.extend(item.node for item in node.items)
            pending.extend(key for key, _ in node.pairs)
            pending.extend(node.states)
    return texts


def _has_cpp(graph: Value) -> bool:
    source = graph.attribute("source_code")
    if source is None or not isinstance(source.node, Atom) or source.node.tag != "s":
        return True  # what cannot be read is taken to need the machine it was made on
    options = graph.attribute("fx_kwargs")
    wrapper = options.node.attribute("cpp_wrapper") if options and isinstance(options.node, Value) else None
    if wrapper and isinstance(wrapper.node, Atom) and wrapper.node.code in _TRUE_CODES:
        return True
    return any(mark in bytes(source.node.payload) for mark in _CPP_MARKS)


def _has_triton_bundle(graph: Value) -> bool:
    span = graph.attribute("_triton_bundle")
    if span is None or not isinstance(span.node, Value):
        return False
    parts = [span.node.attribute(name) for name in ("kernel_artifacts", "static_autotuners")]
    return any(part is not None and isinstance(part.node, Value) and bool(part.node.items) for part in parts)


def variant(kind: str, facts: Facts, digest: Digest) -> str:
    """What tells entries under one key apart (``docs/reference/canonical-form.md``, "Variant").

    Args:
        kind: The kind of the entry.
        facts: What it says of itself.
        digest: The digest of its canonical bytes, for an entry that cannot be read.

    Returns:
        A digest in hexadecimal; empty for a kind that keeps one entry under a key.
    """
    if kind not in {"inductor", "aot_autograd"}:
        return ""
    if not facts.readable:
        return digest
    if kind == "inductor":
        return digest_of(canonjson.encode([facts.guards_expr, facts.extern_libs_key]))
    graphs = facts.bundled or (facts.forward, facts.backward)
    return digest_of(canonjson.encode([facts.guards_expr, *(ref and [ref.key, ref.guard] for ref in graphs)]))
