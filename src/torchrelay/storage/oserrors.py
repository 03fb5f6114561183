# SPDX-License-Identifier: Apache-2.0
"""Operating system errors as errors of ours, by number, never by text."""

from __future__ import annotations

import errno

from torchrelay.errors import DeniedError, NotFoundError, PermanentError, StorageError, TransientError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM}
_ABSENT = {errno.ENOENT}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
}


def classify_oserror(exc: OSError, *, what: str, subject: str = "") -> StorageError:
    """The error for ``exc``, which happened to ``what``. The caller chains the cause."""
    number = exc.errno
    reason = exc.strerror or type(exc).__name__
    if number in _FULL:
        return PermanentError(
            f"no room to store {what}: {reason}",
            remedy="Free space or raise the quota, then run the command again; what was stored is kept.",
            subject=subject,
        )
    if number == errno.EROFS:
        return DeniedError(
            f"{what} is on a file system that is mounted read-only",
            remedy="Use a store that you may write to.",
            subject=subject,
        )
    if number in _DENIED:
        return DeniedError(
            f"no permission for {what}: {reason}",
            remedy="Check the owner and mode of the store's folder; a store shared by a group needs "
            "`chmod 2775` and `umask 002`.",
            subject=subject,
        )
    if number in _ABSENT:
        return NotFoundError(f"{what} does not exist", subject=subject)
    if number in _TRANSIENT:
        return TransientError(f"{what}: {reason}", subject=subject)
    return PermanentError(f"{what}: {reason}", subject=subject)
