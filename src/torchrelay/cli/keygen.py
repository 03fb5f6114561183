# SPDX-License-Identifier: Apache-2.0
"""``torchrelay keygen``."""

from __future__ import annotations

import argparse
import os
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
        "--key", metavar="FILE", help="where to write the private key [this user's own]; never overwritten"
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Make a key pair; this user's own is trusted by this user, another only once it is added."""
    from torchrelay.cli.reports import KeygenReport
    from torchrelay.signing.keyfiles import KEY_NAME, config_directory, generate_key, passphrase_from
    from torchrelay.signing.trust import first_use

    settings = options.load_settings(args, output)
    ask = passphrase_from(os.environ)
    named = settings.key.value
    path = named if named is not None else config_directory(os.environ) / KEY_NAME
    key = generate_key(path, ask() if ask else None).public_key
    trusted = named is None and first_use(path.parent, ask).trusted
    return KeygenReport(key_id=key.key_id, public_key=key.text, file=_absolute(path), trusted=trusted)


def _absolute(path: Path) -> str:
    return str(path.absolute())
