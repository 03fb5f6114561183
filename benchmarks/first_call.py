# SPDX-License-Identifier: Apache-2.0
"""One fresh process of a benchmark: compile a model and run it once; its caches come from somewhere.

Started by ``warm_start.py`` and ``stored_bytes.py``. What is timed runs from before the cache is
filled (by a pull, or from a Mega-Cache blob) to the first result, forward and backward. Importing torch
with the modules of its compiler and building the model come before and are told apart; importing torchrelay
is in the time of its pull. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

_BEGIN = time.perf_counter()

import harness  # noqa: E402 - torch's imports are timed
import models  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402

_IMPORTED = time.perf_counter() - _BEGIN


def relay(arguments: argparse.Namespace) -> Any:
    """The relay of this user, as a program that compiles would make it."""
    from torchrelay import Relay

    return Relay(
        arguments.store,
        workload=harness.WORKLOAD,
        key=arguments.config / "key.pem",
        policy=arguments.config / "trust.toml",
        strict=True,
    )


def main() -> int:
    """Fill the cache, compile, run, push, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--save-mega", type=Path)
    parser.add_argument("--load-mega", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--pull", action="store_true")
    parser.add_argument("--push", action="store_true")
    arguments = parser.parse_args()
    model, x = models.build(arguments.model)
    expected = models.results(model, x, backward=True)
    report: dict[str, Any] = {"import_seconds": _IMPORTED}
    start = time.perf_counter()
    if arguments.load_mega is not None:
        torch.compiler.load_cache_artifacts(arguments.load_mega.read_bytes())
    if arguments.pull:
        pulled = relay(arguments).pull()
        report |= {"installed": pulled.installed, "downloaded_bytes": pulled.downloaded_bytes}
    filled = time.perf_counter()
    got = models.results(torch.compile(model), x, backward=True)
    end = time.perf_counter()
    error = models.largest_error(got, expected)
    if not error < 1e-3:
        raise SystemExit(f"the compiled model is wrong by {error}")
    report |= {"fill_seconds": filled - start, "call_seconds": end - filled, "seconds": end - start}
    report["counters"] = models.counters()
    if arguments.save_mega is not None:
        saved = torch.compiler.save_cache_artifacts()
        arguments.save_mega.write_bytes(b"" if saved is None else saved[0])
    if arguments.push:
        pushed = relay(arguments).push()
        names = ("pushed", "held", "covered", "by_kind", "blobs", "uploaded_bytes", "plain_bytes", "excluded")
        report |= {name: getattr(pushed, name) for name in names}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
