# SPDX-License-Identifier: Apache-2.0
"""``torchrelay show``."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from torchrelay.cli import options
from torchrelay.errors import UsageError

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
    """Show.

    Raises:
        UsageError: The store stands where the name should.
    """
    if args.url is None and _is_a_place(args.name):
        raise UsageError(
            f"NAME is missing: {args.name} is a store",
            remedy="Say what to show before the store: torchrelay show NAME URL. `torchrelay ls` lists keys.",
            subject="NAME",
        )
    from torchrelay.cli.reports import ShowReport
    from torchrelay.reports import ListReport

    found = options.open_relay(args, output).show(args.name)
    return ShowReport(**{name: getattr(found, name) for name in ListReport.__struct_fields__})


def _is_a_place(name: str) -> bool:
    """Whether ``name`` is a path or URL, which the name of an entry never is."""
    return "://" in name or os.path.isabs(name) or (bool(name) and os.path.isdir(name))  # noqa: PTH112, PTH117
