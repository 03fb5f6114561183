# SPDX-License-Identifier: Apache-2.0
"""Pickles as PyTorch writes them, made without PyTorch: the opcodes are put together by hand."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

OUTPUT = "torch._inductor.output_code"
RESULT = "torch._functorch._aot_autograd.aot_autograd_result"
TORCH = "2.13.0+cpu"
FX_A, FX_B = "f" + "a" * 51, "f" + "b" * 51
AOT = "a" + "c" * 51


@dataclass
class Obj:
    """An object of a class that is not here."""

    module: str
    name: str
    state: dict[str, Any]


def dump(value: Any) -> bytes:
    return b"\x80\x04" + _code(value) + b"."


def _code(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        raw = value.to_bytes(16, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, str):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, (list, tuple)):
        return b"(" + b"".join(map(_code, value)) + (b"l" if isinstance(value, list) else b"t")
    if isinstance(value, dict):
        return b"(" + b"".join(_code(k) + _code(v) for k, v in value.items()) + b"d"
    assert isinstance(value, Obj)
    return f"c{value.module}\n{value.name}\n".encode() + b")\x81" + _code(value.state) + b"b"


def graph(
    guards: str | None = "True",
    *,
    time: int = 123_456_789,
    source: str = "def call(args): pass",
    libs: str | None = None,
    devices: tuple[str, ...] = ("cpu",),
    **more: Any,
) -> bytes:
    """An FX entry."""
    state = {
        "guards_expr": guards,
        "extern_libs_key": libs,
        "runnable_graph_str": "import os\nos.environ['HOME'] = '/root'\n",
        "_time_taken_ns": time,
        "_fx_graph_cache_debug_lines": ["[abc] line", "at 0x7f1234"],
        "device_types": list(devices),
        "source_code": source,
        **more,
    }
    return dump(Obj(OUTPUT, "CompiledFxGraph", state))


def result(
    forward: tuple[str, str | None] = (FX_A, "True"),
    backward: tuple[str, str | None] | None = None,
    *,
    guards: str | None = None,
    time: int = 5,
) -> bytes:
    """An unbundled AOTAutograd entry."""

    def side(name: str, reference: tuple[str, str | None] | None) -> Obj | None:
        if reference is None:
            return None
        info = (reference[0], ["[abc] line"])
        return Obj(RESULT, name, {"fx_graph_cache_info": info, "fx_graph_guard_expr": reference[1]})

    state = {
        "compiled_fw": side("CompiledForward", forward),
        "compiled_bw": side("CompiledBackward", backward),
        "guards_expr": guards,
        "forward_time_taken_ns": time,
        "backward_time_taken_ns": time + 1,
    }
    return dump(Obj(RESULT, "AOTAutogradResult", state))
