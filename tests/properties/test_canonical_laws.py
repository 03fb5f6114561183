# SPDX-License-Identifier: Apache-2.0
"""The laws of the canonical form, on entries put together at random and on broken ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import canonical_entries as entries
from canonical_entries import VERSION, dumps, kind_of, loads
from torchrelay.canonical import Canonical, canonicalise, fields, restore, variant
from torchrelay.digest import digest_of
from torchrelay.errors import FormatError, SecretError

TEXTS = st.one_of(
    st.sampled_from(["", "runnable_graph_str", "_time_taken_ns", "fx_graph_cache_info", "a", "shared text"]),
    st.text(st.characters(codec=None), max_size=12),
    st.text("ab", min_size=250, max_size=300),
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**600, 2**601),
    st.floats(allow_nan=False),
    TEXTS,
    st.binary(max_size=8),
)
HASHABLE = st.one_of(TEXTS, st.integers(), st.binary(max_size=4))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
    ),
    max_leaves=12,
)
TIMES = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 300))
# As long as a dump and shaped like one, but allowed to stand elsewhere too, where it would not be masked.
CLEAN_DUMP = entries.DUMP.replace("redis://:hunter2@", "redis://").replace("os.environ[", "os_environ[")
DUMPS = st.one_of(st.none(), TEXTS, st.just(CLEAN_DUMP))
LINES = st.one_of(st.none(), st.lists(TEXTS, max_size=4))
GUARDS = st.one_of(st.none(), st.text(max_size=10))


@st.composite
def graphs(draw: st.DrawFn, pool: list[Any]) -> Any:
    """A graph whose attributes come from a pool, so that some are one object and some only equal."""
    shared = st.sampled_from(pool)
    value = entries.graph(
        runnable_graph_str=draw(DUMPS),
        _time_taken_ns=draw(TIMES),
        _fx_graph_cache_debug_lines=draw(LINES),
        guards_expr=draw(GUARDS),
        constants=draw(st.dictionaries(TEXTS, shared, max_size=4)),
        inputs_to_check=draw(shared),
    )
    lines = value._fx_graph_cache_debug_lines
    if draw(st.booleans()):
        value.constants["lines"], value.constants["dump"] = lines, value.runnable_graph_str
    if draw(st.booleans()):  # put the listed fields last, so that others are made first
        for name in ("_fx_graph_cache_debug_lines", "runnable_graph_str"):
            value.__dict__[name] = value.__dict__.pop(name)
    return value


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(sorted(entries.ENTRIES)))
    pool = draw(st.lists(VALUES, min_size=1, max_size=4))
    if name == "inductor":
        return kind_of(name), draw(graphs(pool))
    times = {"forward_time_taken_ns": draw(TIMES), "backward_time_taken_ns": draw(TIMES)}
    rest = {"guards_expr": draw(GUARDS), "runtime_metadata": draw(st.sampled_from(pool))}
    if name in {"bundled", "precompile"}:
        forward = entries.BundledCompiledForward(result=draw(graphs(pool)))
        backward = entries.BundledCompiledBackward(result=draw(graphs(pool)), backward_state_indices=[])
        value = entries.bundled(compiled_fw=forward, compiled_bw=backward, **times, **rest)
    else:
        forward = entries.CompiledForward(
            fx_graph_cache_info=("f1", draw(LINES)), fx_graph_guard_expr=draw(GUARDS)
        )
        value = entries.unbundled(compiled_fw=forward, **times, **rest)
    if draw(st.booleans()):
        value.compiled_bw = None
    if name == "precompile":
        artifact = entries.BundledAOTAutogradCacheArtifact(key="k", content=value)
        value = entries.package(backends={"k": artifact, "other": draw(st.sampled_from(pool))})
    return kind_of(name), value


PICKLES = st.tuples(objects(), st.integers(0, 5), st.booleans(), st.booleans())
SLOW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def _results_of(value: Any) -> list[Any]:
    """The results in a package; of another entry, itself."""
    artifacts = getattr(value, "backends", {"": None}).values()
    return [getattr(artifact, "content", value) for artifact in artifacts]


def _graphs_of(value: Any) -> list[Any]:
    """Every object that may be a graph."""
    return [
        graph
        for result in _results_of(value)
        for graph in (
            result,
            *(getattr(getattr(result, s, None), "result", None) for s in ("compiled_fw", "compiled_bw")),
        )
    ]


def _times_of(value: Any) -> list[int]:
    found = [getattr(graph, "_time_taken_ns", None) for graph in _graphs_of(value)]
    for side in ("forward", "backward"):
        found += [getattr(result, f"{side}_time_taken_ns", None) for result in _results_of(value)]
    return sorted(time for time in found if time is not None)


@SLOW
@given(PICKLES)
def test_laws(drawn: tuple[tuple[str, Any], int, bool, bool]) -> None:
    (kind, value), protocol, python, memo = drawn
    data = dumps(value, protocol, python=python, memo=memo)
    form = canonicalise(kind, data, torch_version=VERSION)
    assert form.canon == "pickle-1/torch-2.13"
    assert sorted(form.times) == _times_of(value)

    again = canonicalise(kind, form.data, torch_version=VERSION)
    assert again.data == form.data, "idempotent"
    assert set(again.times) <= {0}
    assert again.facts == form.facts

    restored = restore(form.data, canon=form.canon, times=form.times)
    back = canonicalise(kind, restored, torch_version=VERSION)
    assert (back.data, back.times, back.facts) == (form.data, form.times, form.facts)
    assert loads(restored) == entries.masked(copy.deepcopy(loads(data)))
    assert variant(kind, form.facts, digest_of(form.data)) != digest_of(form.data), "readable"


@SLOW
@given(PICKLES, TIMES, DUMPS, LINES)
def test_what_is_listed_does_not_show(
    drawn: tuple[tuple[str, Any], int, bool, bool],
    time: int | None,
    dump: str | None,
    lines: list[str] | None,
) -> None:
    """Whatever the listed fields held, the canonical bytes are the same."""
    (kind, value), protocol, python, memo = drawn
    other = copy.deepcopy(value)
    for graph in _graphs_of(other):
        if isinstance(graph, entries.CompiledFxGraph):
            _change(graph, "runnable_graph_str", dump)
            _change(graph, "_time_taken_ns", time)
            _change(graph, "_fx_graph_cache_debug_lines", lines)
    forms = [
        canonicalise(kind, dumps(v, protocol, python=python, memo=memo), torch_version=VERSION).data
        for v in (copy.deepcopy(value), other)
    ]
    if not _has_listed_in_constants(value):
        assert forms[0] == forms[1]


def _change(graph: Any, name: str, value: Any) -> None:
    """Another value where there was one: whether a field is ``None`` is not masked."""
    if graph.__dict__[name] is not None and value is not None:
        graph.__dict__[name] = copy.deepcopy(value)


def _has_listed_in_constants(value: Any) -> bool:
    return any("lines" in getattr(graph, "constants", {}) for graph in _graphs_of(value))


REAL = [dumps(make()) for make in entries.ENTRIES.values()]
FORMS = [
    canonicalise(kind_of(name), dumps(make()), torch_version=VERSION)
    for name, make in entries.ENTRIES.items()
]


def _survives(kind: str, data: bytes) -> None:
    """Refused for a stated reason, or taken and then within the laws."""
    try:
        form: Canonical = canonicalise(kind, data, torch_version=VERSION)
    except (FormatError, SecretError):
        return
    restored = restore(form.data, canon=form.canon, times=form.times)
    assert canonicalise(kind, form.data, torch_version=VERSION).data == form.data
    back = canonicalise(kind, restored, torch_version=VERSION)
    assert (back.data, back.times) == (form.data, form.times)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(REAL),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)
def test_broken_entries_are_refused_or_within_the_laws(
    data: bytes, changes: list[tuple[float, int]], length: float
) -> None:
    broken = bytearray(data if length > 0.7 else data[: int(len(data) * length)])
    for place, byte in changes:
        if broken:
            broken[int(place * len(broken))] = byte
    for kind in ("inductor", "aot_autograd", "precompile"):
        _survives(kind, bytes(broken))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([bytes([c]) for c in range(256)] + [b"\x8c\x01a", b"K\x07", b"h\x00", b"\x94"]),
        max_size=40,
    )
)
def test_random_programs_are_refused_or_within_the_laws(code: list[bytes]) -> None:
    _survives("inductor", b"".join(code) + b".")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMS), st.floats(0, 0.999), st.integers(0, 255))
def test_restore_of_broken_bytes_is_refused_or_keeps_the_laws(
    form: Canonical, place: float, byte: int
) -> None:
    broken = bytearray(form.data)
    broken[int(place * len(broken))] = byte
    try:
        restored = restore(bytes(broken), canon=form.canon, times=form.times)
    except FormatError:
        return
    roots = {f"{entries.OUTPUT}.CompiledFxGraph": "inductor", fields.PACKAGE: "precompile"}
    kind = roots.get(form.facts.root or "", "aot_autograd")
    try:
        assert canonicalise(kind, restored, torch_version=VERSION).data == bytes(broken)
    except SecretError:  # restore need not look for secrets: nothing leaves the machine there
        return


@pytest.mark.parametrize("data", REAL)
def test_every_truncation_is_refused(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(FormatError):
            canonicalise("inductor", data[:length], torch_version=VERSION)
