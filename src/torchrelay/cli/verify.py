# SPDX-License-Identifier: Apache-2.0
"""``torchrelay verify``."""

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
    parser.add_argument(
        "--local",
        action="store_true",
        help="check what is installed in this directory, not the store's objects",
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Check every byte."""
    relay = options.open_relay(args, output)
    with output.progress() as progress:
        return relay.verify(local=args.local, progress=progress)
