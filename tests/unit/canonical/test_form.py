# SPDX-License-Identifier: Apache-2.0
"""Tests of ``torchrelay.canonical.form``: what is masked, what stays, what is refused."""

from __future__ import annotations

import copy
import pickle
import pickletools
import time
import tracemalloc

import pytest

import canonical_entries as entries
from canonical_entries import VERSION, dumps, kind_of, loads
from torchrelay.canonical import canonicalise, restore, variant
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import FormatError, SecretError

NAMES = sorted(entries.ENTRIES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("python", [False, True])
def test_restored_entry_is_equal_but_for_listed_fields(name: str, protocol: int, python: bool) -> None:
    value = entries.ENTRIES[name]()
    form = canonicalise(kind_of(name), dumps(value, protocol, python=python), torch_version=VERSION)
    assert form.canon == "pickle-1/torch-2.13"
    assert loads(restore(form.data, canon=form.canon, times=form.times)) == entries.masked(value)


@pytest.mark.parametrize("name", NAMES)
def test_canonical_bytes_have_no_frame_no_dump_and_a_dense_memo(name: str) -> None:
    form = canonicalise(kind_of(name), dumps(entries.ENTRIES[name]()), torch_version=VERSION)
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(form.data)]
    memoised = sum(name == "MEMOIZE" for name, _ in codes)
    recalled = {argument for name, argument in codes if name in {"BINGET", "LONG_BINGET"}}
    assert not {name for name, _ in codes} & {"FRAME", "PUT", "BINPUT", "LONG_BINPUT"}
    assert recalled == set(range(memoised)), "what is put is referred to"
    for leak in (b"hunter2", b"/home/alice", b"140017360620576", b"0x7f5830bd0cc0"):
        assert leak not in form.data


def test_times_come_in_order_of_appearance() -> None:
    assert canonicalise("inductor", dumps(entries.graph()), torch_version=VERSION).times == (17564153098,)
    unbundled = canonicalise("aot_autograd", dumps(entries.unbundled()), torch_version=VERSION)
    assert unbundled.times == (18169808264, 802193553)
    bundled = canonicalise("aot_autograd", dumps(entries.bundled()), torch_version=VERSION)
    assert bundled.times == (291260652, 12)
    package = canonicalise("precompile", dumps(entries.package()), torch_version=VERSION)
    assert package.times == (291260652, 12, 291260652, 12)


@pytest.mark.parametrize(
    "number",
    [
        0,
        1,
        255,
        256,
        65535,
        65536,
        2**31 - 1,
        2**31,
        2**40,
        2**63 - 1,
        -1,
        -128,
        -129,
        -(2**31),
        -(2**31) - 1,
        -(2**63),
    ],
)
def test_times_of_every_size_survive_as_python_writes_them(number: int) -> None:
    data = dumps(entries.graph(_time_taken_ns=number, runnable_graph_str="", _fx_graph_cache_debug_lines=[]))
    form = canonicalise("inductor", data, torch_version=VERSION)
    restored = restore(form.data, canon=form.canon, times=form.times)
    assert form.times == (number,)
    assert loads(restored)._time_taken_ns == number
    assert b"\x8c\x0e_time_taken_ns" + pickle.dumps(number, 3)[2:-1] in restored


def test_none_stays_none_and_takes_no_place_among_the_times() -> None:
    value = entries.graph(_time_taken_ns=None, _fx_graph_cache_debug_lines=None)
    form = canonicalise("inductor", dumps(value), torch_version=VERSION)
    assert form.times == ()
    loaded = loads(restore(form.data, canon=form.canon, times=()))
    assert loaded._time_taken_ns is None
    assert loaded._fx_graph_cache_debug_lines is None


def test_report_names_fields_and_kinds_and_no_values() -> None:
    form = canonicalise("inductor", dumps(entries.graph()), torch_version=VERSION)
    assert dict(form.masked) == {
        "inductor._fx_graph_cache_debug_lines:debug-lines": 2,
        "inductor._time_taken_ns:time": 1,
        "inductor.runnable_graph_str:environment": 3,
        "inductor.runnable_graph_str:repro": 1,
        "inductor.runnable_graph_str:url-password": 1,
    }


def test_canonical_bytes_do_not_depend_on_what_was_interned() -> None:
    shared = "a text that appears twice"
    one = entries.graph(constants={"x": shared, "y": shared, "z": b"raw", "w": b"raw"})
    other = entries.graph(
        constants={"x": shared, "y": "".join(list(shared)), "z": b"raw", "w": bytes(bytearray(b"raw"))}
    )
    forms = [canonicalise("inductor", dumps(value), torch_version=VERSION).data for value in (one, other)]
    assert dumps(one) != dumps(other)
    assert forms[0] == forms[1]


@pytest.mark.parametrize("python", [False, True])
def test_canonical_bytes_do_not_depend_on_the_pickler(python: bool) -> None:
    value = entries.bundled()
    expected = canonicalise("aot_autograd", dumps(value), torch_version=VERSION).data
    assert canonicalise("aot_autograd", dumps(value, python=python), torch_version=VERSION).data == expected


def test_sets_of_atoms_are_written_in_order() -> None:
    texts = [f"name{i}" for i in range(2500)]
    forms = set()
    for order in (texts, texts[::-1]):
        forms.add(canonicalise("inductor", _with_set(order), torch_version=VERSION).data)
    assert len(forms) == 1
    assert set(loads(forms.pop()).constants["s"]) == set(texts)


def _with_set(order: list[str]) -> bytes:
    """An entry with a set whose elements are written in the given order, in batches as CPython does."""
    data = dumps(entries.graph(constants={"s": ["placeholder"]}), python=True, memo=False)
    batches = [order[i : i + 1000] for i in range(0, len(order), 1000)]
    code = b"\x8f\x94" + b"".join(
        b"(" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() + b"\x94" for t in batch) + b"\x90"
        for batch in batches
    )
    old = b"]\x8c\x0bplaceholdera"
    head = data.index(b"\x95")
    assert data.count(old) == 1
    return data[:head] + data[head + 9 :].replace(old, code)


def test_dump_that_is_also_a_constant_stays_there_whole() -> None:
    dump = "a text without anything to hide"
    lines = ["one", "two"]
    for constants in ({"x": dump, "y": lines}, {"y": lines, "x": dump, "again": lines}):
        before = entries.graph(
            constants=constants, runnable_graph_str=dump, _fx_graph_cache_debug_lines=lines
        )
        after = entries.CompiledFxGraph(runnable_graph_str=dump, _fx_graph_cache_debug_lines=lines)
        after.__dict__.update({k: v for k, v in before.__dict__.items() if k not in after.__dict__})
        for value in (before, after):
            form = canonicalise("inductor", dumps(value), torch_version=VERSION)
            loaded = loads(form.data)
            assert (loaded.runnable_graph_str, loaded._fx_graph_cache_debug_lines) == ("", [])
            assert loaded.constants == constants
            assert canonicalise("inductor", form.data, torch_version=VERSION).data == form.data
            if "again" in constants:
                assert loaded.constants["y"] is loaded.constants["again"]


def test_fields_of_the_same_name_elsewhere_are_left_alone() -> None:
    constants = {"runnable_graph_str": "kept", "_time_taken_ns": 7, "_fx_graph_cache_debug_lines": ["kept"]}
    form = canonicalise("inductor", dumps(entries.graph(constants=constants)), torch_version=VERSION)
    assert loads(form.data).constants == constants
    assert form.times == (17564153098,)


def test_triton_autotuner_times_are_masked() -> None:
    tuner = entries.CachingAutotuner(precompile_time_taken_ns=11, autotune_time_taken_ns=22, filename="k.py")
    bundle = entries.TritonBundle(kernel_artifacts=[b"cubin"], static_autotuners=[tuner])
    form = canonicalise(
        "inductor", dumps(entries.graph(_triton_bundle=bundle, _time_taken_ns=33)), torch_version=VERSION
    )
    assert sorted(form.times) == [11, 22, 33]
    assert form.facts.has_triton_bundle
    assert loads(restore(form.data, canon=form.canon, times=form.times))._triton_bundle == bundle


def test_repeated_attribute_is_masked_every_time() -> None:
    data = dumps(entries.graph(runnable_graph_str="SECOND"), memo=False)
    name = b"\x8c\x12runnable_graph_str"
    doubled = data.replace(name, name + b"\x8c\x05FIRST" + name, 1)
    head = doubled.index(b"\x95")
    form = canonicalise("inductor", doubled[:head] + doubled[head + 9 :], torch_version=VERSION)
    assert b"FIRST" not in form.data
    assert b"SECOND" not in form.data


# ---------------------------------------------------------------------- raw


def _without(value: object, name: str) -> object:
    delattr(value, name)
    return value


RAW_CASES = {
    "unknown version": ("inductor", entries.graph(), "2.99.0"),
    "no version": ("inductor", entries.graph(), None),
    "not a version": ("inductor", entries.graph(), "nightly"),
    "kind with another root": ("aot_autograd", entries.graph(), VERSION),
    "unknown root": ("inductor", entries.RegionalOutputCode(x=1), VERSION),
    "root without class": ("inductor", {"runnable_graph_str": "x"}, VERSION),
    "kind without a list": ("pgo", entries.graph(), VERSION),
    "dump missing": ("inductor", _without(entries.graph(), "runnable_graph_str"), VERSION),
    "dump of another type": ("inductor", entries.graph(runnable_graph_str=["x"]), VERSION),
    "time of another type": ("inductor", entries.graph(_time_taken_ns=1.5), VERSION),
    "time is a boolean": ("inductor", entries.graph(_time_taken_ns=True), VERSION),
    "time too large": ("inductor", entries.graph(_time_taken_ns=1 << 63), VERSION),
    "lines of another type": ("inductor", entries.graph(_fx_graph_cache_debug_lines=[1]), VERSION),
    "lines are a tuple": ("inductor", entries.graph(_fx_graph_cache_debug_lines=("x",)), VERSION),
    "time missing": ("aot_autograd", _without(entries.unbundled(), "backward_time_taken_ns"), VERSION),
    "forward missing": ("aot_autograd", _without(entries.unbundled(), "compiled_fw"), VERSION),
    "forward is None": ("aot_autograd", entries.unbundled(compiled_fw=None), VERSION),
    "key without lines": (
        "aot_autograd",
        entries.unbundled(
            compiled_fw=entries.CompiledForward(fx_graph_cache_info=("f",), fx_graph_guard_expr=None)
        ),
        VERSION,
    ),
    "bundled output of another class": (
        "aot_autograd",
        entries.bundled(
            compiled_fw=entries.BundledCompiledForward(result=entries.RegionalOutputCode(x=b"y"))
        ),
        VERSION,
    ),
}


@pytest.mark.parametrize("case", sorted(RAW_CASES))
def test_unknown_layout_is_kept_as_it_is(case: str) -> None:
    kind, value, version = RAW_CASES[case]
    value = copy.deepcopy(value)
    for graph in (
        value,
        *(getattr(getattr(value, side, None), "result", None) for side in ("compiled_fw", "compiled_bw")),
    ):
        if getattr(graph, "runnable_graph_str", None) == entries.DUMP:
            graph.runnable_graph_str = "no secret"
    data = dumps(value)
    form = canonicalise(kind, data, torch_version=version)
    assert (form.data, form.canon, form.times, dict(form.masked)) == (data, "raw", (), {})
    assert restore(form.data, canon="raw", times=()) == data


def test_raw_entry_with_a_secret_in_its_dump_is_refused() -> None:
    with pytest.raises(SecretError) as caught:
        canonicalise("inductor", dumps(entries.graph()), torch_version="2.99.0")
    assert (caught.value.field, caught.value.secret_kind) == (
        "CompiledFxGraph.runnable_graph_str",
        "url-password",
    )
    assert "hunter2" not in caught.value.diagnostics()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", [None, "2.11.0", "2.99.0"])
def test_raw_entry_with_a_dump_is_refused_whatever_its_values_are(name: str, version: str | None) -> None:
    harmless = "import os\nos.environ['TORCH_MYAUTH'] = 'correct-horse-battery'\n"
    data = dumps(entries.ENTRIES[name]()).replace(
        entries.DUMP.encode(), harmless.ljust(len(entries.DUMP)).encode()
    )
    if name == "aot_autograd":  # it refers to graphs, and holds none
        assert canonicalise(kind_of(name), data, torch_version=version).canon == "raw"
        return
    with pytest.raises(SecretError) as caught:
        canonicalise(kind_of(name), data, torch_version=version)
    assert caught.value.secret_kind == "environment-dump"
    assert caught.value.field.endswith(".runnable_graph_str")
    assert "correct" not in caught.value.diagnostics()


@pytest.mark.parametrize(
    "content", [entries.DUMP, [entries.graph()], entries.unbundled(), pickle.dumps(entries.DUMP)]
)
def test_package_that_holds_something_else_than_bundled_results_is_raw(content: object) -> None:
    artifact = entries.BundledAOTAutogradCacheArtifact(key="k", content=content)
    package = entries.package(backends={"k": artifact})
    data = dumps(package).replace(entries.DUMP.encode(), b"x" * len(entries.DUMP))
    assert canonicalise("precompile", data, torch_version=VERSION).canon == "raw"


# ---------------------------------------------------------------------- secrets in place

SECRET = "s3://AKIA" + "IOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source_code": f"x = '{SECRET}'"}, "CompiledFxGraph.source_code"),
        ({"constants": {"deep": [{"x": (SECRET,)}]}}, "CompiledFxGraph.constants[][][][]"),
        ({"constants": {SECRET: 1}}, "CompiledFxGraph.constants[key]"),
        ({"_serialized_original_gm": pickle.dumps({"x": SECRET})}, "CompiledFxGraph._serialized_original_gm"),
        (
            {"_triton_bundle": entries.TritonBundle(kernel_artifacts=[SECRET])},
            "CompiledFxGraph._triton_bundle.kernel_artifacts[]",
        ),
        ({SECRET: SECRET}, "CompiledFxGraph[]"),
        ({"buffer": bytearray(SECRET.encode())}, "CompiledFxGraph.buffer[][]"),
    ],
)
def test_secret_outside_the_dumps_excludes_the_entry(changes: dict[str, object], field: str) -> None:
    with pytest.raises(SecretError) as caught:
        canonicalise("inductor", dumps(entries.graph(**changes)), torch_version=VERSION)
    assert (caught.value.field, caught.value.secret_kind) == (field, "aws-access-key")
    assert "AKIA" not in caught.value.diagnostics() + repr(caught.value) + caught.value.field


def test_secret_that_is_masked_and_stands_elsewhere_too_is_found_there() -> None:
    with pytest.raises(SecretError) as caught:
        canonicalise("inductor", dumps(entries.graph(constants=[entries.DUMP])), torch_version=VERSION)
    assert (caught.value.field, caught.value.secret_kind) == ("CompiledFxGraph.constants[]", "url-password")


def test_secret_in_a_bytearray_of_protocol_5_is_found() -> None:
    data = dumps(entries.graph(buffer=bytearray(SECRET.encode())), protocol=5)
    assert b"\x96" in data
    with pytest.raises(SecretError) as caught:
        canonicalise("inductor", data, torch_version=VERSION)
    assert caught.value.secret_kind == "aws-access-key"


# ---------------------------------------------------------------------- restore


def test_restore_refuses_what_it_cannot_put_back() -> None:
    form = canonicalise("aot_autograd", dumps(entries.unbundled()), torch_version=VERSION)
    for times in ((), (1,), (1, 2, 3)):
        with pytest.raises(FormatError, match="2 masked times"):
            restore(form.data, canon=form.canon, times=times)
    for canon in ("", "pickle-1", "pickle-2/torch-2.13", "pickle-1/torch-9.9", "raw "):
        with pytest.raises(FormatError, match="not known"):
            restore(form.data, canon=canon, times=form.times)
    with pytest.raises(FormatError, match="no times"):
        restore(form.data, canon="raw", times=(1,))


def test_restore_refuses_bytes_that_are_not_canonical() -> None:
    form = canonicalise("inductor", dumps(entries.graph()), torch_version=VERSION)
    for data in (dumps(entries.graph()), restore(form.data, canon=form.canon, times=form.times)):
        with pytest.raises(FormatError, match="canonical form"):
            restore(data, canon=form.canon, times=form.times)
    with pytest.raises(FormatError, match="laid out"):
        restore(dumps({"a": 1}), canon=form.canon, times=())


# ---------------------------------------------------------------------- facts and variant


def test_facts_of_each_sort_of_entry() -> None:
    facts = canonicalise("inductor", dumps(entries.graph()), torch_version=VERSION).facts
    assert (facts.root, facts.guards_expr, facts.extern_libs_key) == (
        "torch._inductor.output_code.CompiledFxGraph",
        "6 <= L['t0']",
        None,
    )
    assert (facts.readable, facts.device_types, facts.has_cpp, facts.has_triton_bundle) == (
        True,
        ("cpu",),
        True,
        False,
    )
    facts = canonicalise("aot_autograd", dumps(entries.unbundled()), torch_version=VERSION).facts
    assert facts.forward is not None
    assert facts.backward is not None
    assert (facts.forward.key, facts.forward.guard) == ("f" + "a" * 51, "g0")
    assert (facts.backward.key, facts.backward.guard, facts.guards_expr) == ("f" + "b" * 51, None, "outer")
    facts = canonicalise("aot_autograd", dumps(entries.bundled()), torch_version=VERSION).facts
    assert facts.guards_expr == "outer", "not a nested graph's"
    assert [(graph.key, graph.guard) for graph in facts.bundled] == [("", "inner"), ("", "inner")]
    assert (facts.device_types, facts.has_cpp) == (("cpu", "cuda"), True)


@pytest.mark.parametrize(
    ("changes", "has_cpp"),
    [
        ({"source_code": "async_compile.triton('x')"}, False),
        ({"source_code": "async_compile.triton('x')", "fx_kwargs": {"cpp_wrapper": True}}, True),
        ({"source_code": "async_compile.cpp_pybinding([], '')"}, True),
        ({"source_code": None}, True),
    ],
)
def test_cpp_code_is_recognised(changes: dict[str, object], has_cpp: bool) -> None:
    facts = canonicalise("inductor", dumps(entries.graph(**changes)), torch_version=VERSION).facts
    assert facts.has_cpp is has_cpp


DIGEST = digest_of(b"the entry")


def _variant(kind: str, value: object, digest: Digest = DIGEST) -> str:
    return variant(kind, canonicalise(kind, dumps(value), torch_version=VERSION).facts, digest)


def test_variant_of_an_fx_entry_is_its_guards_and_libraries() -> None:
    base = _variant("inductor", entries.graph())
    assert base == digest_of(b"[\"6 <= L['t0']\",null]")
    assert _variant("inductor", entries.graph(source_code="other", _time_taken_ns=1)) == base
    assert _variant("inductor", entries.graph(guards_expr=None)) != base
    assert _variant("inductor", entries.graph(extern_libs_key="k")) != base


def test_variant_of_an_aot_entry_has_its_graphs() -> None:
    base = _variant("aot_autograd", entries.unbundled())
    forward, backward = "f" + "a" * 51, "f" + "b" * 51
    assert base == digest_of(f'["outer",["{forward}","g0"],["{backward}",null]]'.encode())
    other = entries.CompiledForward(fx_graph_cache_info=("f" + "c" * 51, []), fx_graph_guard_expr="g0")
    assert _variant("aot_autograd", entries.unbundled(compiled_fw=other)) != base
    inference = _variant("aot_autograd", entries.unbundled(compiled_bw=None))
    assert inference == digest_of(f'["outer",["{forward}","g0"],null]'.encode())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("inductor", entries.graph(guards_expr=5)),
        ("inductor", entries.graph(guards_expr="\ud800")),
        ("inductor", _without(entries.graph(), "extern_libs_key")),
        ("inductor", entries.graph(guards_expr="x" * (1 << 21))),
        ("aot_autograd", _without(entries.unbundled(), "guards_expr")),
        (
            "aot_autograd",
            entries.unbundled(compiled_bw=entries.CompiledBackward(fx_graph_cache_info=("f", []))),
        ),
        ("aot_autograd", entries.bundled(guards_expr=b"x")),
    ],
)
def test_unreadable_identity_falls_back_to_the_digest(kind: str, value: object) -> None:
    assert _variant(kind, value) == DIGEST


def test_other_kinds_have_no_variant() -> None:
    facts = canonicalise("inductor", dumps(entries.graph()), torch_version=VERSION).facts
    assert variant("triton", facts, DIGEST) == ""


# ---------------------------------------------------------------------- cost


def test_half_a_megabyte_takes_well_under_a_second_and_little_memory() -> None:
    value = entries.graph(constants={f"name{i}": [i, f"value {i} of the constants"] for i in range(6000)})
    data = dumps(value)
    assert len(data) > 250_000
    started = time.process_time()
    canonicalise("inductor", data, torch_version=VERSION)
    assert time.process_time() - started < 1.0


def test_large_bytes_are_not_copied_over_and_over() -> None:
    data = dumps(entries.graph(kernel=bytes(32 << 20)))
    tracemalloc.start()
    form = canonicalise("inductor", data, torch_version=VERSION)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(form.data) > 32 << 20
    assert peak < (32 << 20) * 1.5, "one copy, the result, beside what was given"
