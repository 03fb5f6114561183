# SPDX-License-Identifier: Apache-2.0
"""Key-affecting settings of this process, and precompiled headers (ADR 0005).

PyTorch mixes its configuration into the cache keys. Here it is read without importing Inductor,
which takes a second; and the one setting that nothing but compile time depends on is followed.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from torchrelay.environment import SETTINGS

_log = logging.getLogger(__name__)

_MODULES = {
    "precompile_headers": ("torch._inductor.config", "cpp_cache_precompile_headers"),
    "cache_key_tag": ("torch.compiler.config", "cache_key_tag"),
    "cpp_march": ("torch._inductor.config", "cpp.march"),
    "cpp_wrapper": ("torch._inductor.config", "cpp_wrapper"),
    "freezing": ("torch._inductor.config", "freezing"),
    "max_autotune": ("torch._inductor.config", "max_autotune"),
    "keep_static_cubin": ("torch._inductor.config", "keep_static_cubin_raw"),
    "bundled_autograd": ("torch._functorch.config", "bundled_autograd_cache"),
    "caching_precompile": ("torch._dynamo.config", "caching_precompile"),
}
"""Where PyTorch keeps a setting once the module is imported; before that, its variable decides."""

FOLLOWED = ("precompile_headers",)
"""Settings that a process takes over from the workload it pulls: they change how long a compile
takes and the key, never a result. All others are the user's, and a difference is only reported."""

WITHOUT_TORCHRELAY = {"precompile_headers": "0"}
"""What both sides set where PyTorch runs without torchrelay in the process. With it there is nothing
to set: :func:`skip_needless_headers` saves the same at a warm start, and a cold compile without
precompiled headers takes more than twice as long."""


def this_settings() -> dict[str, str]:
    """The key-affecting settings of this process, as text; all names of ``SETTINGS``.

    Requires that torch can be imported.
    """
    import torch

    return {name: str(threads(torch)) if name == "threads" else _read(name) for name in SETTINGS}


def threads(torch: Any) -> int:
    """The number of CPU threads that Inductor generates code for."""
    configured = _configured("torch._inductor.config", "cpp.threads")
    return configured if isinstance(configured, int) and configured >= 1 else int(torch.get_num_threads())


def simdlen() -> int | None:
    """The vector width in bits that the user forces, if any."""
    value = _configured("torch._inductor.config", "cpp.simdlen")
    return value if isinstance(value, int) else None


def has_compiled() -> bool:
    """Whether this process has begun to compile, so that settings are part of keys in use."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(module, "FRAME_COUNTER", 0))


def apply_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Follow a workload's recorded settings in this process, before its first compile.

    Only :data:`FOLLOWED` settings are taken, only the values ``0`` and ``1``, and none for which
    the user set the variable. Child processes follow too, since the variable is set as well.

    Args:
        settings: As recorded in the workload's environment.

    Returns:
        What was changed, by name of the setting; empty after the first compile.
    """
    if has_compiled():
        return {}
    changed = {}
    for name in FOLLOWED:
        value = settings.get(name)
        if value not in ("0", "1") or SETTINGS[name].variable in os.environ or value == _read(name):
            continue
        if _set(name, value):
            changed[name] = value
    return changed


def recommended_exports() -> dict[str, str]:
    """Variables for builders and replicas that only pull before they start: the same on all of them."""
    return {SETTINGS[name].variable: value for name, value in WITHOUT_TORCHRELAY.items()}


def skip_needless_headers() -> bool:
    """Precompile a header only where a kernel is really compiled with it.

    PyTorch makes, or at least preprocesses and hashes, a header of 155 MB before it looks whether
    the kernel is there already. The keys and names do not change. It imports Inductor's code
    cache, so call it when a compile is about to import that anyway.

    Returns:
        Whether it is in effect; ``False`` with a torch that is built otherwise, which stays as it is.
    """
    try:
        from torch._inductor import codecache
    except (ImportError, OSError):
        return False
    original = getattr(codecache, "_precompile_header", None)
    if getattr(original, "_torchrelay", False):
        return True
    loader = getattr(getattr(codecache, "CppCodeCache", None), "load_async", None)
    code = getattr(getattr(loader, "__func__", None), "__code__", None)
    if original is None or code is None or not {"main_path", "main_build_option"} <= _locals_of(code):
        _log.debug("this torch loads kernels in another way; precompiled headers are left alone")
        return False
    codecache._precompile_header = _only_if_needed(original, code)
    return True


def _only_if_needed(original: Callable[..., str], loader: CodeType) -> Callable[..., str]:
    @functools.wraps(original)
    def precompile_header(header: str, *arguments: Any, **options: Any) -> str:
        # An empty path is PyTorch's own "no precompiled header". The kernel's name is known to the
        # caller alone, and only its one frame is looked at; AOTInductor calls from elsewhere.
        if _kernel_exists(sys._getframe(1), loader):
            return ""
        return original(header, *arguments, **options)

    precompile_header._torchrelay = True  # type: ignore[attr-defined]
    for name in ("cache_clear", "cache_info"):
        if hasattr(original, name):
            setattr(precompile_header, name, getattr(original, name))
    return precompile_header


def _kernel_exists(caller: FrameType, loader: CodeType) -> bool:
    if caller.f_code is not loader:
        return False
    source = caller.f_locals.get("main_path")
    return isinstance(source, str) and os.path.exists(source.removesuffix(".cpp") + ".so")  # noqa: PTH110


def _locals_of(code: CodeType) -> set[str]:
    return {*code.co_varnames, *code.co_cellvars}


def _read(name: str) -> str:
    setting = SETTINGS[name]
    module, attribute = _MODULES.get(name, ("", ""))
    value = _configured(module, attribute) if module in sys.modules else None
    if value is None:
        value = os.environ.get(setting.variable, setting.default) if setting.variable else setting.default
    return _text(value)


def _configured(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)[:200]


def _set(name: str, value: str) -> bool:
    module, attribute = _MODULES[name]
    loaded = sys.modules.get(module)
    if loaded is not None:
        try:
            setattr(loaded, attribute, value == "1")
        except (AttributeError, TypeError, ValueError):
            return False
    os.environ[SETTINGS[name].variable] = value
    return True
