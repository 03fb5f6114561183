# SPDX-License-Identifier: Apache-2.0
"""``torchrelay keygen``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.cli import options
from torchrelay.errors import KeyFileError

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.cli.reports import KeygenReport
    from torchrelay.reports import Report
    from torchrelay.signing import PublicKey


def arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--key",
        metavar="FILE",
        help="make the pair FILE and FILE.pub, never overwritten [this user's own, shown if it is there]",
    )
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Make a key pair; this user's own is trusted by this user, another only once it is added."""
    named = options.load_settings(args, output).key.value
    return _own() if named is None else _another(named)


def _own() -> KeygenReport:
    """This user's own pair: one that is there is shown, since every machine that pulls needs it."""
    from torchrelay.signing.keyfiles import KEY_NAME, config_directory, generate_key, passphrase_from
    from torchrelay.signing.trust import first_use

    ask = passphrase_from(os.environ)
    path = config_directory(os.environ) / KEY_NAME
    made = not os.path.lexists(path)
    if made:
        generate_key(path, ask() if ask else None)
    first = first_use(path.parent, ask)
    return _report(first.signer.public_key, path, trusted=first.trusted, made=made)


def _another(path: Path) -> KeygenReport:
    """A pair for another user or machine, trusted by nobody yet."""
    from torchrelay.signing.files import create_file
    from torchrelay.signing.keyfiles import generate_key, passphrase_from

    ask = passphrase_from(os.environ)
    public = path.with_name(f"{path.name}.pub")
    if os.path.lexists(public):
        raise _exists(public)
    key = generate_key(path, ask() if ask else None).public_key
    if not create_file(public, f"{key.text}\n".encode(), mode=0o644):
        raise _exists(public)
    return _report(key, path, public=public)


def _exists(path: Path) -> KeyFileError:
    return KeyFileError(
        f"{path} exists and is not overwritten",
        remedy="Give another path, or move the file away.",
        subject=str(path),
    )


def _report(
    key: PublicKey, path: Path, *, trusted: bool = False, made: bool = True, public: Path | None = None
) -> KeygenReport:
    from torchrelay.cli.reports import KeygenReport

    return KeygenReport(
        key_id=key.key_id,
        public_key=key.text,
        file=str(path.absolute()),
        public_file=str(public.absolute()) if public else "",
        trusted=trusted,
        made=made,
    )
