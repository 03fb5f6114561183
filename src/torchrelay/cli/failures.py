# SPDX-License-Identifier: Apache-2.0
"""The one error handler: an exception becomes a message, a remedy and an exit code.

``docs/reference/exit-codes.md`` is the contract. Nothing else in the command line catches errors.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping

from torchrelay.cli.output import Output, OutputLostError
from torchrelay.cli.text import Line, shortened
from torchrelay.config import DEBUG_VARIABLE
from torchrelay.errors import DamagedError, InstallError, RelayError, StorageError, TrustError, UsageError

DONE = 0
FAILED = 1
USAGE = 2
REFUSED = 3
UNREACHABLE = 4
INTERRUPTED = 130
BROKEN_PIPE = 141

_CODES: tuple[tuple[type[RelayError], int], ...] = (
    (UsageError, USAGE),
    (StorageError, UNREACHABLE),
    (TrustError, REFUSED),
    (DamagedError, FAILED),
    (InstallError, FAILED),
)
_MAX_MESSAGE = 2000
_REPORT = (
    "This is a fault of torchrelay. Please report it with the command and the text that "
    f"{DEBUG_VARIABLE}=1 adds; CONTRIBUTING.md says where."
)


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def report_failure(
    error: BaseException, output: Output, *, as_json: bool, environ: Mapping[str, str] = os.environ
) -> int:
    """Tell the user, once: message and remedy on stderr, with ``--json`` also an object on stdout.

    Returns:
        The exit code.
    """
    code = exit_code(error)
    if code == BROKEN_PIPE:
        _hush()
        return code
    message, remedy, subject = _told(error)
    if environ.get(DEBUG_VARIABLE):
        output.message(_traceback(error))
    output.message([Line(f"error: {message}", "bad"), *([Line(f"  {remedy}")] if remedy else [])])
    if as_json and not isinstance(error, OutputLostError):
        output.object(
            {"error": {"code": code, "message": message, "remedy": remedy, "subject": subject}},
        )
    return code


def _told(error: BaseException) -> tuple[str, str, str]:
    from torchrelay.storage.location import redact_text

    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "What was done so far is kept; run the command again to go on.", ""
    if isinstance(error, RelayError):
        texts = error.message, error.remedy, error.subject
    elif isinstance(error, OutputLostError):
        texts = str(error), "Free some space, or send the output elsewhere.", "stdout"
    else:
        texts = f"internal error: {type(error).__name__}: {error}", _REPORT, ""
    message, remedy, subject = (shortened(redact_text(text), _MAX_MESSAGE) for text in texts)
    return message, remedy, subject


def _traceback(error: BaseException) -> list[Line]:
    """Where it happened; without the values of variables, and without what looks like a secret."""
    from torchrelay.storage.location import redact_text

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return [Line(redact_text(line), "dim") for line in text.splitlines()]


def _hush() -> None:
    """Whoever read our output has gone; nothing more is to be said, at exit neither."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
