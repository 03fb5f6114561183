# SPDX-License-Identifier: Apache-2.0
"""The trust policy: which keys may sign what. ``docs/reference/trust-policy.md``.

Pure: text in, decisions out. Files are read in :mod:`.trust`, and the date is an argument.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import Any

from torchrelay import limits
from torchrelay.digest import Digest, digest_of, is_digest
from torchrelay.errors import UsageError
from torchrelay.signing.keys import PublicKey, parse_public_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POLICY_FORMAT = 1
WRITER = "writer"
MAINTAINER = "maintainer"
ROLES = (WRITER, MAINTAINER)
MAX_THRESHOLD = 100
MAX_NAME = 100
"""Characters of a key's name."""
PREFIX_DIGITS = 8
"""Fewest digits of a key id that may stand for the whole."""
EXPIRY_NOTICE_DAYS = 30
ALL_WORKLOADS = "**"

_REMEDY = "See docs/reference/trust-policy.md, or let `torchrelay trust` write the file."
_COMPONENT = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]*")
_HEADER = "# torchrelay trust policy. `torchrelay trust` rewrites this file and keeps no comments.\n"


def check_pattern(pattern: str) -> str:
    """``pattern``, if it is a pattern of workload names.

    Components joined by ``/``. In a component ``*`` stands for any characters, none included; the
    component ``**`` stands for one or more whole components. All else is literal.

    Raises:
        UsageError: It is not.
    """
    parts = pattern.split("/")
    fine = len(pattern) <= limits.MAX_WORKLOAD_CHARS and all(map(_COMPONENT.fullmatch, parts))
    if not fine or any("**" in part and part != "**" for part in parts):
        raise UsageError(f"{pattern[:80]!r} is not a pattern of workload names", remedy=_REMEDY)
    return pattern


@lru_cache(maxsize=4096)
def matches(pattern: str, workload: str) -> bool:
    """Whether ``pattern`` covers ``workload``; linear in their components, whatever the stars."""
    parts = workload.split("/")
    # reached[i]: the pattern so far covers exactly the first i components.
    reached = [True] + [False] * len(parts)
    for wanted in pattern.split("/"):
        if wanted == "**":
            first = reached.index(True) if True in reached else len(parts)
            reached = [index > first for index in range(len(parts) + 1)]
        else:
            hits = (reached[i] and _covers(wanted, part) for i, part in enumerate(parts))
            reached = [False, *hits]
    return reached[-1]


def _covers(wanted: str, part: str) -> bool:
    """One component, without backtracking: each literal piece at the first place where it fits."""
    head, *rest = wanted.split("*")
    if not rest:
        return head == part
    *middle, tail = rest
    if not part.startswith(head) or len(part) < len(head) + len(tail) or not part.endswith(tail):
        return False
    at, end = len(head), len(part) - len(tail)
    for piece in middle:
        found = part.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key and what it may do.

    Attributes:
        public_key: The key.
        name: For people; printable, at most 100 characters.
        roles: ``writer`` signs entries; ``maintainer`` decides for others and signs checkpoints.
        workloads: Patterns (:func:`check_pattern`) of the workloads that it may sign.
        not_after: The last day, in UTC, on which its signatures are accepted; None: no end.
    """

    public_key: PublicKey
    name: str = ""
    roles: tuple[str, ...] = (WRITER,)
    workloads: tuple[str, ...] = (ALL_WORKLOADS,)
    not_after: date | None = None

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise UsageError(
                f"a key's name is at most {MAX_NAME} printable characters, not {self.name[:40]!r}",
                remedy=_REMEDY,
            )
        if not self.roles or len(set(self.roles)) != len(self.roles) or not set(self.roles) <= set(ROLES):
            raise UsageError(f"roles are some of {ROLES}, not {self.roles!r}"[:300], remedy=_REMEDY)
        if not self.workloads or len(set(self.workloads)) != len(self.workloads):
            raise UsageError("a key has at least one workload pattern, none twice", remedy=_REMEDY)
        for pattern in self.workloads:
            check_pattern(pattern)
        if isinstance(self.not_after, datetime):
            raise UsageError("not_after is a date without time", remedy=_REMEDY)

    @property
    def key_id(self) -> Digest:
        """The id of the public key."""
        return self.public_key.key_id

    def covers(self, workload: str) -> bool:
        """Whether the key may sign ``workload``."""
        return any(matches(pattern, workload) for pattern in self.workloads)

    def expired(self, today: date) -> bool:
        """Whether ``today`` is after the last day of the key."""
        return self.not_after is not None and today > self.not_after


@dataclass(frozen=True, slots=True)
class Policy:
    """What a reader accepts; the empty policy accepts nothing.

    Attributes:
        keys: Trusted keys, no id twice.
        revoked: Ids never accepted, whatever else the policy says.
        thresholds: ``(pattern, n)``: distinct keys that must vouch for a statement. The highest of
            all that cover a workload counts, so their order does not; 1 where none does.
        accept_unsigned: Also accept what no trusted key has signed. Protects against accidents only.
        divergent: ``report`` or ``refuse`` entries of one identity with different bytes.
        rollback: ``warn`` or ``refuse`` when the store goes backwards.
        minimum_generation: ``(pattern, n)``: lowest generation that a workload may show; the
            highest of all that cover it counts.
    """

    keys: tuple[TrustedKey, ...] = ()
    revoked: frozenset[Digest] = frozenset()
    thresholds: tuple[tuple[str, int], ...] = ()
    accept_unsigned: bool = False
    divergent: str = "report"
    rollback: str = "warn"
    minimum_generation: tuple[tuple[str, int], ...] = ()
    _by_id: Mapping[Digest, TrustedKey] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {key.key_id: key for key in self.keys}
        if len(by_id) != len(self.keys):
            raise UsageError("a policy lists a key twice", remedy=_REMEDY)
        if not all(map(is_digest, self.revoked)):
            raise UsageError("revoked lists whole key ids: 64 hexadecimal digits", remedy=_REMEDY)
        _check_choice("divergent", self.divergent, ("report", "refuse"))
        _check_choice("rollback", self.rollback, ("warn", "refuse"))
        _check_numbers("thresholds", self.thresholds, 1, MAX_THRESHOLD)
        _check_numbers("minimum_generation", self.minimum_generation, 0, 2**53 - 1)
        object.__setattr__(self, "_by_id", by_id)

    def key(self, key_id: str) -> TrustedKey | None:
        """The trusted key with this id. It may be revoked: ask :attr:`revoked` first."""
        return self._by_id.get(Digest(key_id))

    def threshold(self, workload: str) -> int:
        """How many distinct keys must vouch for a statement of ``workload``; at least 1."""
        return _highest(self.thresholds, workload, 1)

    def generation(self, workload: str) -> int:
        """The lowest generation that ``workload`` may show; 0 if none is set."""
        return _highest(self.minimum_generation, workload, 0)

    def expiring(self, today: date) -> tuple[TrustedKey, ...]:
        """Keys that still hold and end within 30 days, soonest first."""
        last = today + timedelta(days=EXPIRY_NOTICE_DAYS)
        due = [(key.not_after, key) for key in self.keys if key.not_after and today <= key.not_after <= last]
        return tuple(
            key for _, key in sorted(due, key=lambda item: item[0]) if key.key_id not in self.revoked
        )

    def with_key(self, key: TrustedKey) -> Policy:
        """This policy with ``key``, in place of what it said of the same key.

        Raises:
            UsageError: The key is revoked.
        """
        if key.key_id in self.revoked:
            raise UsageError(
                f"key {key.key_id} is revoked",
                remedy="Use another key; a revocation is only lifted by editing the policy by hand.",
                subject=key.key_id,
            )
        others = tuple(other for other in self.keys if other.key_id != key.key_id)
        return replace(self, keys=(*others, key))

    def without_key(self, key_id: str) -> Policy:
        """This policy without the key; a revocation stays.

        Raises:
            UsageError: The key is not in it.
        """
        if key_id not in self._by_id:
            raise _unknown(key_id)
        return replace(self, keys=tuple(key for key in self.keys if key.key_id != key_id))

    def revoke(self, key_id: Digest) -> Policy:
        """This policy with ``key_id`` revoked; its entry stays, so that lists can name it."""
        return replace(self, revoked=self.revoked | {key_id})

    def resolve(self, prefix: str) -> Digest:
        """The key id that ``prefix`` (8 hexadecimal digits or more) stands for.

        A whole id stands for itself, known or not, so that a key can be revoked before it is seen.

        Raises:
            UsageError: Too short, no such key, or several.
        """
        wanted = prefix.strip().lower()
        if is_digest(wanted):
            return Digest(wanted)
        if not re.fullmatch(rf"[0-9a-f]{{{PREFIX_DIGITS},63}}", wanted):
            raise UsageError(
                f"{prefix[:80]!r} is not a key id",
                remedy=f"Give {PREFIX_DIGITS} or more digits of an id shown by `torchrelay trust list`.",
                subject=prefix[:80],
            )
        found = sorted(key_id for key_id in {*self._by_id, *self.revoked} if key_id.startswith(wanted))
        if not found:
            raise _unknown(wanted)
        if len(found) > 1:
            raise UsageError(
                f"{wanted} stands for {len(found)} keys",
                remedy=f"Give more digits: {', '.join(key_id[:16] for key_id in found[:4])}.",
                subject=wanted,
            )
        return found[0]

    def digest(self) -> Digest:
        """Changes whenever a decision could; what is remembered under a policy is keyed with it."""
        return digest_of(dump_policy(self).encode())


def _unknown(key_id: str) -> UsageError:
    return UsageError(f"no key {key_id} in the policy", remedy="Run `torchrelay trust list`.", subject=key_id)


def _highest(table: tuple[tuple[str, int], ...], workload: str, least: int) -> int:
    return max((number for pattern, number in table if matches(pattern, workload)), default=least)


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{what} is one of {choices}, not {value[:40]!r}", remedy=_REMEDY)


def _check_numbers(what: str, table: tuple[tuple[str, int], ...], least: int, most: int) -> None:
    for pattern, number in table:
        check_pattern(pattern)
        if not least <= number <= most:
            raise UsageError(f"{what} are from {least} to {most}, not {number}", remedy=_REMEDY)
    if len({pattern for pattern, _ in table}) != len(table):
        raise UsageError(f"{what} names a pattern twice", remedy=_REMEDY)


def parse_policy(text: str, name: str) -> Policy:
    """A policy from its TOML text; nothing unknown, misspelt or of a wrong type is passed over.

    Law: ``parse_policy(dump_policy(p), "") == p``.

    Args:
        text: The file's text.
        name: The file's name, for errors.

    Raises:
        UsageError: Names the file and the field.
    """
    if len(text) > limits.MAX_DOCUMENT_BYTES:
        raise UsageError(f"{name} is too large to be a trust policy", remedy=_REMEDY, subject=name)
    try:
        document = tomllib.loads(text)
        return _policy(_Table(document, ""))
    except UsageError as exc:
        raise UsageError(f"{name}: {exc.message}", remedy=exc.remedy, subject=name) from exc
    # Besides its own error the parser lets out ValueError (an impossible date) and RecursionError.
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{name} is not valid TOML: {exc}"[:300], remedy=_REMEDY, subject=name) from exc


class _Table:
    """Reads a table field by field, and knows at the end whether any was not asked for."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where

    def take(self, key: str, type_: type, default: Any) -> Any:
        value = self._values.pop(key, default)
        # bool is an int and datetime a date to isinstance; neither is meant here.
        if value is not default and type(value) is not type_:
            raise UsageError(f"{self.place(key)} must be {_TYPE_NAMES[type_]}", remedy=_REMEDY)
        return value

    def strings(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        values = self.take(key, list, None)
        if values is None:
            return default
        if not all(isinstance(value, str) for value in values):
            raise UsageError(f"{self.place(key)} must be a list of strings", remedy=_REMEDY)
        if len(set(values)) != len(values):
            raise UsageError(f"{self.place(key)} lists something twice", remedy=_REMEDY)
        return tuple(values)

    def numbers(self, key: str) -> tuple[tuple[str, int], ...]:
        values = self.take(key, dict, {})
        if not all(type(value) is int for value in values.values()):
            raise UsageError(f"{self.place(key)} must be patterns with whole numbers", remedy=_REMEDY)
        return tuple(values.items())

    def place(self, key: str) -> str:
        return f"{self._where}{key}"

    def end(self) -> None:
        if self._values:
            unknown = ", ".join(sorted(self.place(key)[:80] for key in self._values))
            raise UsageError(f"unknown field {unknown}", remedy=_REMEDY)


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
    date: "a date such as 2027-01-31, without quotes and time",
}


def _policy(table: _Table) -> Policy:
    number = table.take("format", int, None)
    if number != POLICY_FORMAT:
        raise UsageError(f"format must be {POLICY_FORMAT}", remedy=_REMEDY)
    entries = table.take("keys", list, [])
    keys = tuple(_key(entry, f"keys[{index}].") for index, entry in enumerate(entries, 1))
    policy = Policy(
        keys=keys,
        revoked=frozenset(map(Digest, table.strings("revoked", ()))),
        thresholds=table.numbers("thresholds"),
        accept_unsigned=table.take("accept_unsigned", bool, False),
        divergent=table.take("divergent", str, "report"),
        rollback=table.take("rollback", str, "warn"),
        minimum_generation=table.numbers("minimum_generation"),
    )
    table.end()
    return policy


def _key(entry: Any, where: str) -> TrustedKey:
    if not isinstance(entry, dict):
        raise UsageError("keys must be a list of tables: [[keys]]", remedy=_REMEDY)
    table = _Table(entry, where)
    text = table.take("public_key", str, None)
    if text is None:
        raise UsageError(f"{where}public_key is missing", remedy=_REMEDY)
    public_key = parse_public_key(text, name=f"{where}public_key")
    name = table.take("name", str, "")
    roles = table.strings("roles", (WRITER,))
    workloads = table.strings("workloads", (ALL_WORKLOADS,))
    not_after = table.take("not_after", date, None)
    table.end()
    try:
        return TrustedKey(public_key, name, roles, workloads, not_after)
    except UsageError as exc:
        raise UsageError(f"{where.rstrip('.')}: {exc.message}", remedy=exc.remedy) from exc


def dump_policy(policy: Policy) -> str:
    """The TOML text of ``policy``; every field is written, so that the file tells its defaults."""
    lines = [
        f"format = {POLICY_FORMAT}",
        f"accept_unsigned = {'true' if policy.accept_unsigned else 'false'}",
        f"divergent = {_quote(policy.divergent)}",
        f"rollback = {_quote(policy.rollback)}",
        f"revoked = {_array(sorted(policy.revoked))}",
    ]
    for title, table in (
        ("thresholds", policy.thresholds),
        ("minimum_generation", policy.minimum_generation),
    ):
        if table:
            lines += ["", f"[{title}]", *(f"{_quote(pattern)} = {number}" for pattern, number in table)]
    for key in policy.keys:
        lines += ["", *_key_lines(key)]
    return _HEADER + "\n".join(lines) + "\n"


def _key_lines(key: TrustedKey) -> list[str]:
    lines = [
        "[[keys]]",
        f"name = {_quote(key.name)}",
        f"public_key = {_quote(key.public_key.text)}",
        f"roles = {_array(key.roles)}",
        f"workloads = {_array(key.workloads)}",
    ]
    return lines + ([f"not_after = {key.not_after.isoformat()}"] if key.not_after else [])


def _array(values: tuple[str, ...] | list[Digest]) -> str:
    return f"[{', '.join(map(_quote, values))}]"


def _quote(text: str) -> str:
    """A basic string; what is written is printable, so only these two need an escape."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
