# SPDX-License-Identifier: Apache-2.0
"""Where Python and torch are installed, for the names of C++ kernels (ADR 0006).

Read from the interpreter, without importing torch. Kept in the state of a cache directory too, for
processes that look into it from another installation, or from one without torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sysconfig
from pathlib import Path

from torchrelay import canonjson
from torchrelay.caches.kernelname import MAX_PLACED_BYTES, Prefixes
from torchrelay.caches.state import read_state, write_state
from torchrelay.errors import RelayError

_NAME = "prefixes.json"


def this_prefixes() -> Prefixes | None:
    """What ``torch._inductor.cpp_builder`` finds in a process of this interpreter.

    None if torch is not installed, or lies where it could not compile.
    """
    torch = _torch_directory()
    library = sysconfig.get_config_var("LIBDIR")
    include, posix = sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix")
    if torch is None or not isinstance(library, str):
        return None
    includes = dict.fromkeys((str(Path(include)), posix))
    try:
        return Prefixes(python_include=tuple(includes), python_lib=library, torch=torch)
    except ValueError:
        return None


def _torch_directory() -> str | None:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return os.path.dirname(os.path.abspath(spec.origin))  # noqa: PTH100, PTH120 - what torch does


def read_prefixes(root: Path) -> Prefixes | None:
    """What was noted for the cache directory ``root``; None if nothing was, or it cannot be used.

    It decides only which names are tried, so it is never worth failing for.
    """
    with contextlib.suppress(RelayError, ValueError):
        data = read_state(root, _NAME, limit=MAX_PLACED_BYTES)
        if data is not None:
            return canonjson.decode(data, Prefixes, name=_NAME, limit=MAX_PLACED_BYTES)
    return None


def note_prefixes(root: Path, prefixes: Prefixes | None) -> None:
    """Keep ``prefixes`` for ``root``, if they are known and not what is kept already.

    Raises:
        UnsafeDirectoryError, StorageError: The state cannot be written.
    """
    if prefixes is not None and prefixes != read_prefixes(root):
        write_state(root, _NAME, canonjson.encode(prefixes))
