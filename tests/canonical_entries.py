# SPDX-License-Identifier: Apache-2.0
"""Cache entries for tests that need no torch: pickles of classes with PyTorch's names and fields."""

from __future__ import annotations

import io
import pickle
import sys
from types import ModuleType
from typing import Any
from unittest import mock

VERSION = "2.13.0+cpu"
OUTPUT = "torch._inductor.output_code"
RESULT = "torch._functorch._aot_autograd.aot_autograd_result"
TRITON = "torch._inductor.runtime.triton_heuristics"
PACKAGE = "torch._dynamo.package"
SETS = "torch.utils._ordered_set"


class Record:
    """Equal to another object of its class with equal attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__!r})"


def _record(module: str, name: str) -> type[Record]:
    return type(name, (Record,), {"__module__": module, "__qualname__": name})


class OrderedSet(Record):
    """Pickled as PyTorch's: a call with a list."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values=values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.values,)


OrderedSet.__module__ = SETS

CompiledFxGraph = _record(OUTPUT, "CompiledFxGraph")
RegionalOutputCode = _record(OUTPUT, "RegionalOutputCode")
AOTAutogradResult = _record(RESULT, "AOTAutogradResult")
BundledAOTAutogradResult = _record(RESULT, "BundledAOTAutogradResult")
CompiledForward = _record(RESULT, "CompiledForward")
CompiledBackward = _record(RESULT, "CompiledBackward")
BundledCompiledForward = _record(RESULT, "BundledCompiledForward")
BundledCompiledBackward = _record(RESULT, "BundledCompiledBackward")
BundledAOTAutogradCacheArtifact = _record(RESULT, "BundledAOTAutogradCacheArtifact")
PrecompileCacheEntry = _record(PACKAGE, "PrecompileCacheEntry")
CachingAutotuner = _record(TRITON, "CachingAutotuner")
TritonBundle = _record("torch._inductor.triton_bundler", "TritonBundle")

CLASSES = (
    OrderedSet,
    CompiledFxGraph,
    RegionalOutputCode,
    AOTAutogradResult,
    BundledAOTAutogradResult,
    CompiledForward,
    CompiledBackward,
    BundledCompiledForward,
    BundledCompiledBackward,
    BundledAOTAutogradCacheArtifact,
    PrecompileCacheEntry,
    CachingAutotuner,
    TritonBundle,
)


def _modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {"torch": ModuleType("torch")}
    for class_ in CLASSES:
        module = modules.setdefault(class_.__module__, ModuleType(class_.__module__))
        setattr(module, class_.__name__, class_)
    return modules


_MODULES = _modules()


def fake_torch() -> Any:
    """A context in which the classes are found under PyTorch's module names."""
    return mock.patch.dict(sys.modules, _MODULES)


def dumps(value: Any, protocol: int = 4, *, python: bool = False, memo: bool = True) -> bytes:
    """Pickle with CPython's pickler in C or in Python, with or without a memo."""
    stream = io.BytesIO()
    pickler = (pickle._Pickler if python else pickle.Pickler)(stream, protocol)
    pickler.fast = not memo
    with fake_torch():
        pickler.dump(value)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    with fake_torch():
        return pickle.loads(data)


DUMP = """
import os
os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/home/alice/cache'
os.environ['TORCHINDUCTOR_REDIS_URL'] = 'redis://:hunter2@cache.example:6379/0'
os.environ['_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR'] = '140017360620576'
os.environ.pop('TORCHDYNAMO_REPRO_AFTER', None)
"""
LINES = ("[abc] gm: GraphModule()", "[def] fx_kwargs[get_decomp_fn]: <function f at 0x7f5830bd0cc0>")


def graph(**changes: Any) -> Any:
    """A compiled FX graph as `inductor` entries hold it."""
    fields: dict[str, Any] = {
        "current_callable": None,
        "cache_key": "c3wwzw4ktrieiqvdsrealuikwpfm",
        "source_code": "# AOT ID: ['0_forward']\nasync_compile.cpp_pybinding(['float*'], '''int x;''')",
        "runnable_graph_str": DUMP,
        "device_types": OrderedSet(["cpu"]),
        "constants": {},
        "guards_expr": "6 <= L['t0']",
        "extern_libs_key": None,
        "fx_kwargs": {"cpp_wrapper": False},
        "_time_taken_ns": 17564153098,
        "_fx_graph_cache_key": "fro3uv4min56k3psjjogszbnw6bf3o43j2ketxdfda552ay7rfhm",
        "_fx_graph_cache_debug_lines": list(LINES),
        "_triton_bundle": TritonBundle(kernel_artifacts=[], static_autotuners=[]),
    }
    return CompiledFxGraph(**{**fields, **changes})


def unbundled(**changes: Any) -> Any:
    """An `aot_autograd` entry that refers to FX entries."""
    fields: dict[str, Any] = {
        "compiled_fw": CompiledForward(
            fx_graph_cache_info=("f" + "a" * 51, list(LINES)), fx_graph_guard_expr="g0"
        ),
        "compiled_bw": CompiledBackward(
            fx_graph_cache_info=("f" + "b" * 51, list(LINES)),
            fx_graph_guard_expr=None,
            backward_state_indices=[],
        ),
        "aot_forward_graph_str": "class GraphModule: ...",
        "forward_time_taken_ns": 18169808264,
        "backward_time_taken_ns": 802193553,
        "guards_expr": "outer",
    }
    return AOTAutogradResult(**{**fields, **changes})


def bundled(**changes: Any) -> Any:
    """An `aot_autograd` entry that holds its graphs; they have no key and no times of their own."""
    own = {"_fx_graph_cache_key": None, "guards_expr": "inner"}
    forward, backward = graph(**own), graph(**own, device_types=OrderedSet(["cuda"]))
    for side in (forward, backward):
        del side._time_taken_ns, side._fx_graph_cache_debug_lines
    fields: dict[str, Any] = {
        "compiled_fw": BundledCompiledForward(result=forward),
        "compiled_bw": BundledCompiledBackward(result=backward, backward_state_indices=[]),
        "forward_time_taken_ns": 291260652,
        "backward_time_taken_ns": 12,
        "guards_expr": "outer",
    }
    return BundledAOTAutogradResult(**{**fields, **changes})


def package(**changes: Any) -> Any:
    """A `precompile` entry: a function of which Dynamo made two graphs."""
    backends = {
        name: BundledAOTAutogradCacheArtifact(key=name, content=bundled())
        for name in ("__compiled_fn_1", "__compiled_fn_2")
    }
    return PrecompileCacheEntry(**{"dynamo": {"guards_state": b"guards"}, "backends": backends, **changes})


ENTRIES = {"inductor": graph, "aot_autograd": unbundled, "bundled": bundled, "precompile": package}


def kind_of(name: str) -> str:
    return "aot_autograd" if name == "bundled" else name


def masked(value: Any) -> Any:
    """The same object as the canonical form describes it, times left as they are; changes it in place."""
    if isinstance(value, CompiledFxGraph):
        value.runnable_graph_str = "" if value.runnable_graph_str is not None else None
        if getattr(value, "_fx_graph_cache_debug_lines", None) is not None:
            value._fx_graph_cache_debug_lines = []
    for side in (getattr(value, "compiled_fw", None), getattr(value, "compiled_bw", None)):
        if hasattr(side, "fx_graph_cache_info"):
            key, lines = side.fx_graph_cache_info
            side.fx_graph_cache_info = (key, [] if lines is not None else None)
        if hasattr(side, "result"):
            masked(side.result)
    for artifact in getattr(value, "backends", {}).values():
        masked(getattr(artifact, "content", None))
    return value
