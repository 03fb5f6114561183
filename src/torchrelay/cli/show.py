# SPDX-License-Identifier: Apache-2.0
"""``torchrelay show``."""

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
    parser.add_argument("name", metavar="NAME", help="how the key, digest, blob or segment begins")
    options.add_store(parser)
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Show."""
    from torchrelay.cli.reports import ShowReport
    from torchrelay.reports import ListReport

    found = options.open_relay(args, output).show(args.name)
    return ShowReport(**{name: getattr(found, name) for name in ListReport.__struct_fields__})
