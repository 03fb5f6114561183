# SPDX-License-Identifier: Apache-2.0
"""``torchrelay config``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchrelay.cli import options
from torchrelay.config import shown

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.reports import Report


def arguments(parser: Parser) -> None:
    """Declare the options: all that set something, to try what they would do."""
    options.add_store(parser)
    parser.add_argument("--deadline", metavar="S", help="seconds that a pull may take")
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Show the settings."""
    from torchrelay.cli.reports import ConfigReport, SettingInfo

    settings = options.load_settings(args, output)
    return ConfigReport(
        settings={
            setting.name: SettingInfo(value=shown(found.value), origin=found.layer, source=found.source)
            for setting, found in settings.items()
        },
        file=str(settings.file or ""),
        warnings=list(settings.warnings),
    )
