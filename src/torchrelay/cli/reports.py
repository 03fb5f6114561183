# SPDX-License-Identifier: Apache-2.0
"""Reports of the commands that need no store; field names are a contract (``docs/reference/json.md``)."""

from __future__ import annotations

import msgspec

from torchrelay.reports import ListReport, Report


class ShowReport(ListReport, frozen=True):
    """As a list, but shown in full."""


class KeygenReport(Report, frozen=True, kw_only=True):
    """A key pair that was made, or was there.

    Attributes:
        key_id: SHA-256 of the public key.
        public_key: The public key on one line, to be handed out.
        file: Where the private key lies.
        public_file: Where the public key was written; empty if nowhere.
        trusted: Whether this user's policy accepts what it signs.
        made: It was made now; otherwise it was there, and nothing was changed.
    """

    key_id: str = ""
    public_key: str = ""
    file: str = ""
    public_file: str = ""
    trusted: bool = False
    made: bool = True


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a trust policy; a revoked key that was never added has only its id."""

    key_id: str
    name: str = ""
    public_key: str = ""
    roles: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    not_after: str = ""
    revoked: bool = False
    expired: bool = False


class TrustReport(Report, frozen=True, kw_only=True):
    """A trust policy, after what was done to it.

    Attributes:
        action: ``add``, ``list``, ``remove`` or ``revoke``.
        policy: The policy's file.
        key_id: The key that was added, removed or revoked; empty for ``list``.
        keys: All keys that the policy names now.
        thresholds: Distinct keys that must vouch for an entry, by pattern of workloads.
        accept_unsigned: The policy accepts what nobody signed.
        warnings: Keys that end soon, and policies that protect nothing.
    """

    action: str = "list"
    policy: str = ""
    key_id: str = ""
    keys: list[KeyInfo]
    thresholds: dict[str, int]
    accept_unsigned: bool = False
    warnings: list[str]


class EnvReport(Report, frozen=True, kw_only=True):
    """This machine.

    Attributes:
        environment: The digest that names it.
        facets: What entries may need of it.
        settings: Settings that PyTorch's keys contain.
        exports: Variables that give another process the same keys.
        without_torchrelay: Variables for producer *and* consumer, so that a fresh machine starts fast
            where torchrelay is not in the process that compiles; they are part of the keys.
        hints: What explains a miss but binds nothing.
        file: Where the document was written; empty if nowhere.
    """

    environment: str = ""
    facets: dict[str, str | int | tuple[str, ...]]
    settings: dict[str, str]
    exports: dict[str, str]
    without_torchrelay: dict[str, str]
    hints: dict[str, str]
    file: str = ""


class SettingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: its value without credentials, and the layer and the very place it is from."""

    value: str | float | dict[str, str] | None
    origin: str
    source: str


class ConfigReport(Report, frozen=True, kw_only=True):
    """Every setting and where it came from."""

    settings: dict[str, SettingInfo]
    file: str = ""
    warnings: list[str]
