# SPDX-License-Identifier: Apache-2.0
"""The one error tree. Every error says what happened, to what, and what to do next.

Errors are grouped by who can act: the caller (:class:`UsageError`), whoever runs the store
(:class:`StorageError`), whoever decides on trust (:class:`TrustError`), or nobody but a heal by
the next push (:class:`DamagedError`). The command line turns them into exit codes in one place
(``docs/reference/exit-codes.md``).
"""

from __future__ import annotations


class RelayError(Exception):
    """Base of all errors raised by torchrelay; never raised directly.

    Args:
        message: What happened, to what. One sentence, no trailing full stop.
        remedy: What the user can do next. One sentence; empty only where the class has a default.
        subject: Name of the object, file or setting concerned, if there is one.
    """

    default_remedy = ""

    def __init__(self, message: str, *, remedy: str = "", subject: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy or self.default_remedy
        self.subject = subject

    def diagnostics(self) -> str:
        """Human text: the message, then the remedy on a line of its own."""
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class UsageError(RelayError):
    """The caller asked for something that cannot be done as asked: flags, configuration, names."""

    default_remedy = "Check the command line and `torchrelay config`."


class KeyFileError(UsageError):
    """A signing or public key file is missing, unreadable, of the wrong sort, or open to others."""

    default_remedy = "Run `torchrelay keygen`, or name another key with --key."


class StampError(UsageError):
    """The cache directory was filled under another environment than the one asked for."""


class UnsafeDirectoryError(UsageError):
    """A directory that must be private belongs to another user or is writable by others."""


class DirectoryError(UsageError):
    """A local directory is missing, full, or cannot be read or written; the store is not to blame."""

    default_remedy = "Check the cache directory, then run the command again."


class SecretError(UsageError):
    """An entry holds a text that looks like a secret, so it must not leave this machine.

    Neither the message nor any field has the text itself.

    Args:
        field: Where it stands, as a path of attribute names.
        secret_kind: What it looks like.
    """

    default_remedy = (
        "The entry was left out. Remove the secret from the code, constants or configuration that are "
        "compiled, and compile again."
    )

    def __init__(self, *, field: str, secret_kind: str, subject: str = "") -> None:
        super().__init__(f"{field} holds what looks like a secret ({secret_kind})", subject=subject)
        self.field = field
        self.secret_kind = secret_kind


class StorageError(RelayError):
    """The store could not be reached or refused the request."""

    default_remedy = "Check that the store URL is right and reachable, then run the command again."


class NotFoundError(StorageError):
    """The named object, or the store itself, does not exist."""


class DeniedError(StorageError):
    """The store refused the request for lack of permission."""

    default_remedy = "Check the credentials and the permissions of the store."


class TransientError(StorageError):
    """The request failed in a way that a later attempt may not: timeout, reset, throttling."""


class PermanentError(StorageError):
    """The request failed and will fail again unless something changes: full disk, bad name."""


class InTheWayError(PermanentError):
    """A local file keeps one entry from being installed, and no other one."""

    default_remedy = "Move the file away, then pull again."


class TooLargeError(StorageError):
    """The object is longer than the reader allows; it was not read. To the store it is damaged."""

    default_remedy = "Nothing was installed. The next push of a machine that has the object replaces it."


class InstallError(RelayError):
    """The local cache directory cannot take what was fetched: full, read-only, or denied."""

    default_remedy = "Make room or grant access, then pull again; what was installed before is kept."


class TrustError(RelayError):
    """A signature, name, binding or policy does not hold. Nothing was installed."""

    default_remedy = "Run `torchrelay trust list`; add the signer's key if you trust it."


class DamagedError(RelayError):
    """Bytes are not what they must be: wrong digest, not one frame, not canonical, too large."""

    default_remedy = "Nothing was installed. The next push of a machine that has the entry heals it."


class FormatError(DamagedError):
    """An object is of a newer or unknown format, or breaks the format's rules."""

    default_remedy = "Upgrade torchrelay if the store was written by a newer version."
