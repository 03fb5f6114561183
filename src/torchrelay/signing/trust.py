# SPDX-License-Identifier: Apache-2.0
"""The trust policy's file: read, changed and written whole. ``docs/reference/trust-policy.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from torchrelay import limits
from torchrelay.errors import KeyFileError
from torchrelay.signing.files import (
    check_directory,
    create_file,
    locked,
    make_private_directory,
    read_file,
    replace_file,
)
from torchrelay.signing.keyfiles import (
    KEY_NAME,
    Passphrase,
    generate_key,
    load_private_key,
    read_public_key,
)
from torchrelay.signing.keys import Ed25519Signer, comment_of
from torchrelay.signing.policy import (
    ALL_WORKLOADS,
    MAINTAINER,
    MAX_NAME,
    WRITER,
    Policy,
    TrustedKey,
    dump_policy,
    parse_policy,
)

POLICY_NAME = "trust.toml"
_MODE = 0o644
_REMEDY = "Run `torchrelay trust add FILE-OR-TEXT` with the public key of whoever pushes."


@dataclass(frozen=True, slots=True)
class FirstUse:
    """This user's signer and policy.

    Attributes:
        signer: The key of this configuration directory.
        policy: Its trust policy.
        made_key: The key pair was made now, or would be.
        made_policy: The policy was made now, or would be.
    """

    signer: Ed25519Signer
    policy: Policy
    made_key: bool
    made_policy: bool

    @property
    def trusted(self) -> bool:
        """Whether the policy trusts the key; a policy that was there is never changed for it."""
        key_id = self.signer.public_key.key_id
        return self.policy.key(key_id) is not None and key_id not in self.policy.revoked


def load_policy(path: Path, *, missing_ok: bool = False) -> Policy:
    """The policy in ``path``.

    Args:
        path: The file.
        missing_ok: A missing file is the policy that accepts nothing.

    Raises:
        KeyFileError: Missing, unreadable, another user's, or writable by others.
        UnsafeDirectoryError: Others can exchange the file.
        UsageError: The text is no policy; names the field.
    """
    if missing_ok and not path.is_symlink() and not path.exists():
        return Policy()
    text = read_file(path, what="trust policy", limit=limits.MAX_DOCUMENT_BYTES, secret=False, remedy=_REMEDY)
    try:
        check_directory(path.resolve().parent)
    except OSError as exc:
        raise KeyFileError(f"the directory of {path} cannot be looked at", subject=str(path)) from exc
    return parse_policy(text, str(path))


def save_policy(path: Path, policy: Policy) -> None:
    """Write ``policy`` to ``path``, whole or not at all; its mode is kept, 0644 if it is new.

    Raises:
        KeyFileError: It cannot be written; what was there is unchanged.
        UnsafeDirectoryError: Others can write the directory.
    """
    make_private_directory(path.parent)
    replace_file(path, dump_policy(policy).encode(), mode=_MODE)


def update_policy(path: Path, change: Callable[[Policy], Policy]) -> Policy:
    """Read, change and write the policy under a lock, so that no change of another is lost.

    Raises:
        UsageError: As :func:`load_policy` and ``change``; the file is unchanged.
    """
    make_private_directory(path.parent)
    with locked(path):
        before = load_policy(path, missing_ok=True)
        after = change(before)
        if after != before:
            save_policy(path, after)
    return after


def add_key(
    path: Path,
    text_or_file: str,
    *,
    name: str = "",
    roles: tuple[str, ...] = (WRITER,),
    workloads: tuple[str, ...] = (ALL_WORKLOADS,),
    not_after: date | None = None,
) -> TrustedKey:
    """Trust a public key, given as text or as a file; said again, the newest word counts.

    Args:
        path: The policy's file; made if it is missing.
        text_or_file: The public key.
        name: For people; by default the comment of an OpenSSH line.
        roles: As in :class:`~torchrelay.signing.policy.TrustedKey`.
        workloads: Likewise.
        not_after: Likewise.

    Raises:
        UsageError: No public key, a revoked one, or a field that cannot be; nothing is changed.
    """
    public_key, text = read_public_key(text_or_file)
    if not name:
        name = "".join(char for char in comment_of(text) if char.isprintable())[:MAX_NAME]
    key = TrustedKey(public_key, name, roles, workloads, not_after)
    update_policy(path, lambda policy: policy.with_key(key))
    return key


def remove_key(path: Path, key_id: str) -> Policy:
    """Trust a key no longer; it could be added again.

    Raises:
        UsageError: No such key, or the prefix stands for several; nothing is changed.
    """
    return update_policy(path, lambda policy: policy.without_key(policy.resolve(key_id)))


def revoke_key(path: Path, key_id: str) -> Policy:
    """Refuse a key for ever, whatever else the policy says.

    Raises:
        UsageError: As :func:`remove_key`; a whole id need not be known.
    """
    return update_policy(path, lambda policy: policy.revoke(policy.resolve(key_id)))


def first_use(config_dir: Path, passphrase: Passphrase | None = None) -> FirstUse:
    """This user's key pair and policy; each that is missing is made.

    The key is made with mode 0600 and trusted as writer and maintainer of every workload, also by a
    policy that is there already (``trust add`` may have come first). A policy is never changed for a
    key that was there before. Processes that come at once agree on one key; one that was killed in
    between is carried on.

    Raises:
        KeyFileError: A file is there and cannot be used, or none can be made.
        UsageError: The policy that is there is none.
    """
    key_path, policy_path = config_dir / KEY_NAME, config_dir / POLICY_NAME
    made_key = False
    if not key_path.is_symlink() and not key_path.exists():
        made_key = _made(key_path)
    signer = load_private_key(key_path, passphrase)
    own = TrustedKey(signer.public_key, "own key", (WRITER, MAINTAINER))
    made_policy = False
    if not policy_path.is_symlink() and not policy_path.exists():
        make_private_directory(config_dir)
        made_policy = create_file(policy_path, dump_policy(Policy((own,))).encode(), mode=_MODE)
    elif made_key:
        update_policy(policy_path, lambda policy: policy.with_key(own))
    return FirstUse(signer, load_policy(policy_path), made_key, made_policy)


def planned_first_use(config_dir: Path, passphrase: Passphrase | None = None) -> FirstUse:
    """What :func:`first_use` would give, without making any file.

    A key that it would make is one in memory, lost when the process ends.

    Raises:
        KeyFileError: A file is there and cannot be used.
        UsageError: The policy that is there is none.
    """
    key_path, policy_path = config_dir / KEY_NAME, config_dir / POLICY_NAME
    made_key = not key_path.is_symlink() and not key_path.exists()
    made_policy = not policy_path.is_symlink() and not policy_path.exists()
    signer = Ed25519Signer.generate() if made_key else load_private_key(key_path, passphrase)
    own = TrustedKey(signer.public_key, "own key", (WRITER, MAINTAINER))
    policy = Policy((own,)) if made_policy else load_policy(policy_path)
    if made_key and not made_policy:
        policy = policy.with_key(own)
    return FirstUse(signer, policy, made_key, made_policy)


def _made(path: Path) -> bool:
    """Make the key unless another process was quicker; whether this one made it."""
    try:
        generate_key(path)
    except KeyFileError:
        # Where nobody was quicker, whatever the trouble is must be told.
        if not path.exists():
            raise
        return False
    return True


__all__ = [
    "POLICY_NAME",
    "FirstUse",
    "add_key",
    "first_use",
    "load_policy",
    "planned_first_use",
    "remove_key",
    "revoke_key",
    "save_policy",
    "update_policy",
]
