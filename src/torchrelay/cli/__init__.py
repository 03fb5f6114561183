# SPDX-License-Identifier: Apache-2.0
"""The command line: ``torchrelay`` and ``python -m torchrelay``.

A module for each command declares its options and returns a report; one renderer turns reports
into text, one handler turns errors into a message and an exit code. Names, flags, JSON fields and
exit codes are a contract: ``docs/reference/cli.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchrelay import __version__
from torchrelay.cli import failures
from torchrelay.cli.commands import COMMANDS, Command, overview
from torchrelay.cli.output import Output
from torchrelay.cli.parser import Shown
from torchrelay.config import closest
from torchrelay.errors import UsageError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments, without the program's name; by default those of this process.

    Returns:
        The exit code (``docs/reference/exit-codes.md``). Nothing is raised.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    output = Output(sys.stdout, sys.stderr)
    try:
        code = _run(given, output)
        output.flush()
    except BaseException as exc:  # noqa: BLE001 - the one place where every error ends
        code = _failed(exc, output, as_json="--json" in given)
    return code


def _run(argv: list[str], output: Output) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        output.text(overview())
        return failures.DONE if argv else failures.USAGE
    if argv[0] == "--version":
        output.text(f"torchrelay {__version__}\n")
        return failures.DONE
    command = _command(argv[0])
    try:
        args = command.parser().read(argv[1:])
    except Shown as shown:
        output.text(str(shown))
        return failures.DONE
    report = command.module.run(args, output)
    output.report(report, as_json=args.json)
    return report.exit_code


def _command(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    if name.startswith("-"):
        raise UsageError("the command comes first, its options after it", remedy="Run `torchrelay --help`.")
    near = closest(name, list(COMMANDS))
    raise UsageError(
        f"there is no command {name!r}",
        remedy=f"Did you mean `torchrelay {near}`?" if near else "Run `torchrelay --help`.",
        subject=name,
    )


def _failed(error: BaseException, output: Output, *, as_json: bool) -> int:
    try:
        code = failures.report_failure(error, output, as_json=as_json)
        output.flush()
    except Exception:  # noqa: BLE001 - stdout or stderr is gone too; only the code is left to tell
        return failures.exit_code(error)
    return code
