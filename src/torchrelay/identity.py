# SPDX-License-Identifier: Apache-2.0
"""Who signs and whom this user trusts: the key and policy that an operation works with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path

from torchrelay.errors import KeyFileError, TrustError
from torchrelay.signing import Policy, PublicKey, Rule, Signer, Verifier, trust
from torchrelay.signing.keyfiles import config_directory, load_private_key, passphrase_from

NO_KEY_YET = "this user has no key yet: a push makes one and trusts it here"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key, and a policy that accepts what it signs.

    Attributes:
        signer: Signs; for a plan perhaps one that exists in memory only.
        policy: Accepts what ``signer`` signs for the workload.
        notes: What the user should know.
    """

    signer: Signer
    policy: Policy
    notes: tuple[str, ...] = ()


def today() -> date:
    """The day by which keys end, everywhere the same."""
    return datetime.now(timezone.utc).date()


def own_directory() -> Path | None:
    """Where this user's key and policy lie; None if no variable says where."""
    try:
        return config_directory(os.environ)
    except KeyFileError:
        return None


def reading_policy(policy: Path | None) -> Policy:
    """The policy in a file, or this user's. Nothing is made: a replica has only public keys.

    Raises:
        UsageError: The file cannot be used, or a named one is missing.
    """
    if policy is not None:
        return trust.load_policy(policy)
    return trust.load_policy(config_directory(os.environ) / trust.POLICY_NAME, missing_ok=True)


def signing_credentials(
    key: Path | None, policy: Path | None, workload: str, *, planned: bool = False
) -> Credentials:
    """The key that signs, which readers with the same policy accept: without one nothing is uploaded.

    Args:
        key: The private key's file; by default this user's own, made on first use.
        policy: The policy's file; by default this user's own, made on first use.
        workload: What is to be signed for.
        planned: Make no file; a key that would be made is one in memory.

    Raises:
        KeyFileError: The key cannot be used.
        UsageError: The policy cannot be used.
        TrustError: The policy does not accept what the key would sign.
    """
    found = _named(key, policy) if key is not None else _own(policy, planned=planned)
    _require_accepted(found.signer.public_key, found.policy, workload)
    return found


def _named(key: Path, policy: Path | None) -> Credentials:
    return Credentials(load_private_key(key, passphrase_from(os.environ)), reading_policy(policy))


def _own(policy: Path | None, *, planned: bool) -> Credentials:
    use = trust.planned_first_use if planned else trust.first_use
    first = use(config_directory(os.environ), passphrase_from(os.environ))
    notes = (NO_KEY_YET,) if planned and first.made_key else ()
    return Credentials(first.signer, first.policy if policy is None else trust.load_policy(policy), notes)


def _require_accepted(key: PublicKey, policy: Policy, workload: str) -> None:
    """The readers' own rule, asked before anything is uploaded that they would refuse."""
    refused = Verifier(policy, today=today()).objection(key.key_id, workload)
    if refused is None:
        return
    rule, detail = refused
    raise TrustError(
        f"nobody with this policy would accept what this push signs for {workload}: {detail}",
        remedy=_remedy(rule, key),
        subject=key.key_id,
    )


def _remedy(rule: Rule, key: PublicKey) -> str:
    add = f"torchrelay trust add '{key.text}'"
    return {
        "unknown-key": f"Name another key with --key, or run `{add}`.",
        "revoked": "A revocation is for ever. Make another key with `torchrelay keygen --key FILE`, let "
        "readers trust FILE.pub, and push with --key FILE.",
        "workload": f"Name another key with --key, or allow it: `{add} --for PATTERN`.",
        "expired": f"Name another key with --key, or extend it: `{add} --not-after DATE`.",
        "role": f"Name another key with --key, or make it a writer: `{add} --role writer`.",
    }.get(rule, "Run `torchrelay trust list`.")
