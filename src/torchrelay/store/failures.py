# SPDX-License-Identifier: Apache-2.0
"""What it means that an object could not be had: one answer for pull, verification and documents."""

from __future__ import annotations

from torchrelay.errors import NotFoundError, TooLargeError
from torchrelay.reports import Problem
from torchrelay.storage import Got

DAMAGED = "damaged"


def failure(got: Got, subject: str) -> Problem:
    """The problem of a get without bytes.

    Its reason is ``damaged`` for an object that is longer than was signed, ``absent`` for one that is
    not there, and ``unreadable`` for one that may be there and cannot be had. The last two are missing.
    """
    if isinstance(got.error, TooLargeError):
        reason = DAMAGED
    else:
        reason = "absent" if isinstance(got.error, NotFoundError) else "unreadable"
    return Problem(subject=subject, reason=reason, detail=got.error.message if got.error else "")
