# SPDX-License-Identifier: Apache-2.0
"""``torchrelay push``."""

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
    scope = parser.add_argument_group("what is pushed")
    which = scope.add_mutually_exclusive_group()
    which.add_argument(
        "--all", action="store_true", help="everything, also what is older than the directory's stamp"
    )
    which.add_argument(
        "--since",
        metavar="T",
        type=options.moment,
        help="what was made since: 2h (ago), 2026-01-31T12:00, @EPOCH",
    )
    scope.add_argument("--own", action="store_true", help="also what is held with other bytes, beside it")
    scope.add_argument("--replace", action="store_true", help="in place of what is held with other bytes")
    scope.add_argument(
        "--repair", action="store_true", help="send again what is missing or damaged in the store"
    )
    scope.add_argument(
        "--max-bytes", metavar="N", type=options.byte_count, help="upload at most so many bytes"
    )
    scope.add_argument(
        "--max-entries", metavar="N", type=options.entry_count, help="record at most so many entries"
    )
    scope.add_argument(
        "--assume-environment",
        choices=["this"],
        help="vouch that a directory without a stamp was filled in this environment",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be pushed, and write nothing")
    options.add_output(parser)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Push."""
    settings = options.load_settings(args, output)
    relay = options.relay_of(settings)
    from torchrelay.relay import PushOptions

    with options.telling_of_a_new_key(settings, output), output.progress() as progress:
        return relay.push(
            PushOptions(
                all=args.all,
                since=args.since,
                own=args.own,
                replace=args.replace,
                repair=args.repair,
                assume_environment=args.assume_environment == "this",
                max_bytes=args.max_bytes,
                max_entries=args.max_entries,
                dry_run=args.dry_run,
                progress=progress,
            )
        )
