# SPDX-License-Identifier: Apache-2.0
"""``torchrelay demo``."""

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
        "--dir", metavar="DIR", help="work in this empty directory and keep it, instead of a temporary one"
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Compile, push, pull, prove and compare; the user's own settings, keys and caches play no part."""
    from torchrelay.demo import run as run_demo

    with output.progress(plain=True) as progress:
        return run_demo(Path(args.dir) if args.dir else None, progress=progress)
