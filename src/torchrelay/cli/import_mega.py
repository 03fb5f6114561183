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
    options.add_environment(parser)
    parser.add_argument(
        "--assume-environment",
        choices=["this"],
        help="vouch that the blob was made in this environment: it does not say in which",
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Publish a Mega-Cache blob."""
    environment = options.read_environment(args.environment)
    settings = options.load_settings(args, output)
    relay = options.relay_of(settings)
    from torchrelay.relay import PushOptions

    with options.telling_of_a_new_key(settings, output), output.progress() as progress:
        assumed = args.assume_environment == "this"
        return relay.import_mega(
            Path(args.file),
            PushOptions(assume_environment=assumed, environment=environment, progress=progress),
        )
