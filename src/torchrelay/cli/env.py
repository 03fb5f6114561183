# SPDX-License-Identifier: Apache-2.0
"""``torchrelay env``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.cli import options
from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.reports import Report


def arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--out", metavar="FILE", help="write the environment, for `pull --environment FILE`")
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Describe this machine."""
    options.load_settings(args, output)
    import msgspec

    from torchrelay.caches.machine import this_environment, this_hints
    from torchrelay.caches.settings import recommended_exports
    from torchrelay.cli.reports import EnvReport
    from torchrelay.environment import exports

    environment = this_environment()
    if args.out is not None:
        _write(Path(args.out), environment.encode())
    return EnvReport(
        environment=environment.digest,
        facets=dict(environment.facets),
        settings=dict(environment.settings),
        exports=exports(environment),
        without_torchrelay=recommended_exports(),
        hints=msgspec.to_builtins(this_hints()),
        file=args.out or "",
    )


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"{path} cannot be written: {reason}", remedy="Name another file with --out.", subject=str(path)
        ) from exc
