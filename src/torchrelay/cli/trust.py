# SPDX-License-Identifier: Apache-2.0
"""``torchrelay trust add|list|remove|revoke``."""

from __future__ import annotations

import argparse
import os
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.cli import options

if TYPE_CHECKING:
    from torchrelay.cli.output import Output
    from torchrelay.cli.parser import Parser
    from torchrelay.cli.reports import KeyInfo, TrustReport
    from torchrelay.reports import Report
    from torchrelay.signing import Policy, TrustedKey


def arguments(parser: Parser) -> None:
    """Declare the actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="torchrelay trust")
    add = _action(actions, "add", "FILE-OR-TEXT [options]", "accept what a key signs")
    add.add_argument("key", metavar="FILE-OR-TEXT", help="a public key, or the file that holds it")
    add.add_argument("--name", metavar="NAME", default="", help="for people [the comment of an OpenSSH line]")
    add.add_argument(
        "--role",
        choices=["writer", "maintainer"],
        action="append",
        help="what it may do [writer]; may be repeated",
    )
    add.add_argument(
        "--for",
        metavar="PATTERN",
        action="append",
        dest="workloads",
        help="workloads it may sign, such as 'acme/**' [all]",
    )
    add.add_argument("--not-after", metavar="DATE", type=_day, help="the last day on which it is accepted")
    listed = _action(actions, "list", "[options]", "show whom this policy trusts")
    removed = _action(actions, "remove", "KEYID [options]", "accept a key no longer; it may be added again")
    revoked = _action(actions, "revoke", "KEYID [options]", "refuse a key for ever")
    for action in (removed, revoked):
        action.add_argument("key", metavar="KEYID", help="the key's id, or its first 8 or more digits")
    for action in (add, listed, removed, revoked):
        action.add_argument("--policy", metavar="FILE", help="the policy's file [this user's own]")
        options.add_output(action)


def _action(actions: argparse._SubParsersAction[Parser], name: str, usage: str, summary: str) -> Parser:
    return actions.add_parser(name, help=summary, usage=usage, description=summary)


def run(args: argparse.Namespace, output: Output) -> Report:
    """Change or show the policy."""
    # The argument named `key` is a public one; the setting of that name is the key that signs.
    given, args.key = getattr(args, "key", ""), None
    path = _policy_file(args, output)
    from torchrelay.signing import trust

    changed = ""
    if args.action == "add":
        changed = trust.add_key(
            path,
            given,
            name=args.name,
            roles=tuple(args.role or ("writer",)),
            workloads=tuple(args.workloads or ("**",)),
            not_after=args.not_after,
        ).key_id
    elif args.action in {"remove", "revoke"}:
        changed = trust.load_policy(path).resolve(given)
        (trust.remove_key if args.action == "remove" else trust.revoke_key)(path, changed)
    policy = trust.load_policy(path, missing_ok=True)
    return report(policy, path, action=args.action, key_id=changed, today=datetime.now(timezone.utc).date())


def report(policy: Policy, path: Path, *, action: str, key_id: str, today: date) -> TrustReport:
    """The policy as it is shown."""
    from torchrelay.cli.reports import KeyInfo, TrustReport

    named = {key.key_id for key in policy.keys}
    keys = [_info(key, policy, today) for key in policy.keys]
    keys += [KeyInfo(key_id=other, revoked=True) for other in sorted(policy.revoked - named)]
    return TrustReport(
        action=action,
        policy=str(path),
        key_id=key_id,
        keys=keys,
        thresholds=dict(policy.thresholds),
        accept_unsigned=policy.accept_unsigned,
        warnings=_warnings(policy, today),
    )


def _policy_file(args: argparse.Namespace, output: Output) -> Path:
    from torchrelay.signing.keyfiles import config_directory
    from torchrelay.signing.trust import POLICY_NAME

    named = options.load_settings(args, output).policy.value
    return named if named is not None else config_directory(os.environ) / POLICY_NAME


def _info(key: TrustedKey, policy: Policy, today: date) -> KeyInfo:
    from torchrelay.cli.reports import KeyInfo

    return KeyInfo(
        key_id=key.key_id,
        name=key.name,
        public_key=key.public_key.text,
        roles=key.roles,
        workloads=key.workloads,
        not_after=str(key.not_after or ""),
        revoked=key.key_id in policy.revoked,
        expired=key.expired(today),
    )


def _warnings(policy: Policy, today: date) -> list[str]:
    found = [
        f"key {key.key_id[:16]} ({key.name}) is accepted only up to {key.not_after}"
        for key in policy.expiring(today)
    ]
    if policy.accept_unsigned:
        found.append("this policy accepts entries that nobody signed: it protects against accidents only")
    return found


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date; write 2026-12-31") from None
