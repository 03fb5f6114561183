# SPDX-License-Identifier: Apache-2.0
"""``torchrelay export-mega``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.cli import options

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.reports import Report


def arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument(
        "file", metavar="FILE", help="where to write what `torch.compiler.load_cache_artifacts` reads"
    )
    options.add_store(parser)
    options.add_environment(parser)
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Write a Mega-Cache blob."""
    environment = options.read_environment(args.environment)
    relay = options.open_relay(args, output)
    from torchrelay.relay import PullOptions

    with output.progress() as progress:
        return relay.export_mega(Path(args.file), PullOptions(environment=environment, progress=progress))
