# SPDX-License-Identifier: Apache-2.0
"""``torchrelay ls``."""

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
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """List."""
    environment = options.read_environment(args.environment)
    return options.open_relay(args, output).entries(environment=environment)
