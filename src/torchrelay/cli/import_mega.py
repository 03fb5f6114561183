# SPDX-License-Identifier: Apache-2.0
"""``torchrelay import-mega``."""

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
        "file", metavar="FILE", help="what `torch.compiler.save_cache_artifacts` returned, in a file"
    )
    options.add_store(parser)
    parser.add_argument(
        "--assume-environment",
        choices=["this"],
        help="vouch that the blob was made in this environment: it does not say in which",
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Publish a Mega-Cache blob."""
    relay = options.open_relay(args, output)
    from torchrelay.relay import PushOptions

    with output.progress() as progress:
        return relay.import_mega(
            Path(args.file),
            PushOptions(assume_environment=args.assume_environment == "this", progress=progress),
        )
