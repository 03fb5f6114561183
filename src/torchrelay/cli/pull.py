# SPDX-License-Identifier: Apache-2.0
"""``torchrelay pull``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchrelay.cli import options

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.reports import Report


def arguments(parser: Parser) -> None:
    """Declare the options."""
    options.add_store(parser)
    options.add_environment(parser)
    parser.add_argument("--deadline", metavar="S", help="seconds after which no more is fetched")
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Pull."""
    environment = options.read_environment(args.environment)
    settings = options.load_settings(args, output)
    relay = options.relay_of(settings)
    from torchrelay.relay import PullOptions

    with output.progress() as progress:
        return relay.pull(
            PullOptions(environment=environment, deadline=settings.deadline.value, progress=progress)
        )
