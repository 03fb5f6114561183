# SPDX-License-Identifier: Apache-2.0
"""``torchrelay explain``."""

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
    parser.add_argument("--entry", metavar="NAME", help="only entries whose key or digest begins so")
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Explain."""
    environment = options.read_environment(args.environment)
    return options.open_relay(args, output).explain(args.entry, environment=environment)
