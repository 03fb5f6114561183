# SPDX-License-Identifier: Apache-2.0
"""The command line's grammar: argparse, strict, and alike on every version of Python.

argparse and not a framework, because ``torchrelay --help`` must come within 200 ms of bare Python:
cyclopts takes 80 ms to import and 170 ms to print help, argparse 10 ms and 20 ms. What it lacks is
here: errors as :class:`~torchrelay.errors.UsageError` with the near match of a misspelt option, no
abbreviations (``--ke`` must not become ``--key`` one day and ``--keep`` the next), and help whose
layout neither Python's version nor a terminal's colours change.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchrelay.config import closest
from torchrelay.errors import UsageError

MAX_WIDTH = 100


class Shown(Exception):  # noqa: N818 - not an error: the text was asked for
    """Help was asked for; ``str()`` is the text."""


class Formatter(argparse.HelpFormatter):
    """Help with options as ``-w, --workload W`` on every version of Python."""

    def __init__(self, prog: str, **_: Any) -> None:
        width = max(60, min(shutil.get_terminal_size().columns, MAX_WIDTH))
        super().__init__(prog, max_help_position=34, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(action.option_strings) + value


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Shown(parser.format_help())


class Parser(argparse.ArgumentParser):
    """One command's options.

    Args:
        prog: The command as it is typed.
        usage: What follows it, in short.
        description: What it does.
    """

    def __init__(self, prog: str, *, usage: str = "[options]", description: str = "", **_: Any) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}".rstrip(),
            description=description,
            formatter_class=Formatter,
            add_help=False,
            allow_abbrev=False,
        )
        if sys.version_info >= (3, 14):
            self.color = False
        self.register("action", "shown_help", _Help)
        self.add_argument("-h", "--help", action="shown_help", nargs=0, help="show this text")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything, or say what cannot be.

        Raises:
            UsageError: An option or argument is unknown, missing or malformed.
            Shown: Help was asked for.
        """
        try:
            # Intermixed: with `FILE --option X URL` argparse would find the URL one argument too many.
            parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
            args, left = parse(list(argv))
        except argparse.ArgumentError as exc:  # pragma: no cover - error() is called first
            self.error(str(exc))
        if left:
            self._refuse(left)
        return args

    def _refuse(self, left: Sequence[str]) -> NoReturn:
        option = next((token.partition("=")[0] for token in left if token.startswith("-")), "")
        if not option:
            # Not repeated: what is one argument too many may well be a URL with a password.
            raise UsageError(f"too many arguments for {self.prog}", remedy=f"Run `{self.prog} --help`.")
        near = closest(option, self._options())
        raise UsageError(
            f"{self.prog} has no option {option}",
            remedy=f"Did you mean {near}?" if near else f"Run `{self.prog} --help`.",
            subject=option,
        )

    def _options(self) -> list[str]:
        below = [
            option
            for action in self._actions
            if isinstance(action.choices, dict)
            for parser in action.choices.values()
            for option in parser._options()
        ]
        return [*(option for action in self._actions for option in action.option_strings), *below]

    def error(self, message: str) -> NoReturn:
        """What argparse calls for a value that it cannot read.

        Raises:
            UsageError: Always.
        """
        raise UsageError(message, remedy=f"Run `{self.prog} --help`.")
