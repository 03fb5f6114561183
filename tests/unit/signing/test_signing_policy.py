# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import re
import time
from datetime import date, datetime, timedelta
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.digest import Digest, digest_of
from torchrelay.errors import UsageError
from torchrelay.signing import Ed25519Signer, Policy, PublicKey, TrustedKey, dump_policy, parse_policy
from torchrelay.signing.policy import check_pattern, matches

KEYS = [PublicKey("ed25519", bytes([n]) * 32) for n in range(3, 8)]
TEXT = KEYS[0].text

PATTERNS = [
    ("acme/llama", "acme/llama", True),
    ("acme/llama", "acme/llama2", False),
    ("acme/llama", "Acme/llama", False),
    ("acme", "acme/llama", False),
    ("acme/*", "acme/llama", True),
    ("acme/*", "acme", False),
    ("acme/*", "acme/llama/prod", False),
    ("*", "acme", True),
    ("*", "acme/llama", False),
    ("**", "acme", True),
    ("**", "acme/llama/prod", True),
    ("acme/**", "acme/llama", True),
    ("acme/**", "acme/llama/prod", True),
    ("acme/**", "acme", False),
    ("acme/**", "acme2/llama", False),
    ("acme/**", "evil/acme/llama", False),
    ("**/prod", "acme/llama/prod", True),
    ("**/prod", "prod", False),
    ("acme/**/prod", "acme/a/b/prod", True),
    ("acme/**/prod", "acme/prod", False),
    ("acme/*/prod", "acme/a/b/prod", False),
    ("**/x/**", "a/x/b", True),
    ("**/x/**", "x/b", False),
    ("**/**", "a", False),
    ("**/**", "a/b", True),
    ("acme/llama-*", "acme/llama-8b", True),
    ("acme/llama-*", "acme/llama-", True),
    ("acme/*-8b", "acme/llama-8b", True),
    ("acme/a*a", "acme/a", False),
    ("acme/a*b*c", "acme/axbxc", True),
    ("acme/a*b*c", "acme/acb", False),
    ("a.b", "axb", False),
    ("a*.b", "axyb", False),
]


@pytest.mark.parametrize(("pattern", "workload", "expected"), PATTERNS)
def test_patterns(pattern: str, workload: str, expected: bool) -> None:
    assert matches(check_pattern(pattern), workload) is expected


@given(
    st.lists(st.sampled_from(["a", "ab", "*", "a*", "*b", "a*b*", "**"]), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "ab", "b", "aab", "abb"]), min_size=1, max_size=6),
)
def test_matches_as_the_obvious_definition(pattern: list[str], workload: list[str]) -> None:
    def slow(wanted: list[str], parts: list[str]) -> bool:
        if not wanted:
            return not parts
        if wanted[0] == "**":
            return any(slow(wanted[1:], parts[n:]) for n in range(1, len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], wanted[0]) and slow(wanted[1:], parts[1:])

    assert matches("/".join(pattern), "/".join(workload)) is slow(pattern, workload)


def test_a_pattern_full_of_stars_costs_nothing() -> None:
    started = time.process_time()
    assert not matches("*a" * 90 + "*b", "a" * 199)
    assert not matches("/".join(["**"] * 60 + ["b"]), "/".join("a" * 100))
    assert time.process_time() - started < 1


BAD_PATTERNS = [
    "", "/", "a/", "/a", "a//b", "..", "a/../b", ".a", "a**", "**a", "a/***", "a?", "[a]", "a b", "a\n", "é",
    "a" * 201, "{a,b}", "a\\b", "-a", "a/.hidden",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(UsageError, match="pattern"):
        check_pattern(pattern)


def test_the_empty_policy_trusts_nobody() -> None:
    policy = parse_policy("format = 1", "trust.toml")
    assert policy == Policy()
    assert policy.keys == () and policy.accept_unsigned is False
    assert policy.key(KEYS[0].key_id) is None
    assert policy.threshold("acme") == 1


def test_all_fields() -> None:
    policy = parse_policy(
        f"""
        format = 1
        accept_unsigned = true
        divergent = "refuse"
        rollback = "refuse"
        revoked = ["{KEYS[2].key_id}"]
        [thresholds]
        "acme/**" = 2
        "**" = 1
        "acme/prod" = 3
        [minimum_generation]
        "acme/prod" = 12
        [[keys]]
        name = "build farm"
        public_key = "{TEXT}"
        roles = ["writer", "maintainer"]
        workloads = ["acme/**", "demo"]
        not_after = 2027-01-31
        [[keys]]
        public_key = "{KEYS[1].text}"
        """,
        "trust.toml",
    )
    first, second = policy.keys
    assert first == TrustedKey(
        KEYS[0], "build farm", ("writer", "maintainer"), ("acme/**", "demo"), date(2027, 1, 31)
    )
    assert (second.roles, second.workloads, second.not_after) == (("writer",), ("**",), None)
    assert [policy.threshold(w) for w in ("other", "acme/x", "acme/prod")] == [1, 2, 3]
    assert [policy.generation(w) for w in ("acme/x", "acme/prod")] == [0, 12]
    assert policy.revoked == {KEYS[2].key_id}
    assert (policy.accept_unsigned, policy.divergent, policy.rollback) == (True, "refuse", "refuse")


K = f'[[keys]]\npublic_key = "{TEXT}"\n'
BAD_POLICIES = {
    "empty": ("", "format must be 1"),
    "newer-format": ("format = 2", "format must be 1"),
    "format-boolean": ("format = true", "format must be a whole number"),
    "not-toml": ("format = ", "TOML"),
    "nul": ("format = 1\0", "TOML"),
    "duplicate-field": ("format = 1\nformat = 1", "TOML"),
    "unknown-field": ("format = 1\nacept_unsigned = true", "unknown field acept_unsigned"),
    "misspelt-keys": (f"format = 1\n{K.replace('keys', 'key')}", "unknown field key"),
    "unknown-in-key": (f"format = 1\n{K}expires = 2027-01-01", r"unknown field keys\[1\]\.expires"),
    "unsigned-as-text": ('format = 1\naccept_unsigned = "no"', "accept_unsigned must be true or false"),
    "unsigned-as-number": ("format = 1\naccept_unsigned = 1", "accept_unsigned must be true or false"),
    "keys-not-tables": ("format = 1\nkeys = [1]", r"\[\[keys\]\]"),
    "keys-a-table": (f'format = 1\n[keys]\npublic_key = "{TEXT}"', "keys must be a list"),
    "key-missing": ("format = 1\n[[keys]]\nname = 'x'", r"keys\[1\]\.public_key is missing"),
    "key-not-a-key": ("format = 1\n[[keys]]\npublic_key = 'x'", r"keys\[1\]\.public_key"),
    "key-private": (
        f'format = 1\n[[keys]]\npublic_key = """{Ed25519Signer.generate().to_pem().decode()}"""',
        "private key",
    ),
    "key-twice": (f"format = 1\n{K}{K}", "lists a key twice"),
    "role-unknown": (f"format = 1\n{K}roles = ['admin']", r"keys\[1\]: roles"),
    "role-none": (f"format = 1\n{K}roles = []", r"keys\[1\]: roles"),
    "role-twice": (f"format = 1\n{K}roles = ['writer', 'writer']", "twice"),
    "role-as-text": (f"format = 1\n{K}roles = 'writer'", r"keys\[1\]\.roles must be a list"),
    "workloads-none": (f"format = 1\n{K}workloads = []", r"keys\[1\]: .*workload"),
    "workload-dots": (f"format = 1\n{K}workloads = ['../x']", r"keys\[1\]: '\.\./x'"),
    "workload-number": (f"format = 1\n{K}workloads = [1]", r"keys\[1\]\.workloads"),
    "date-as-text": (f"format = 1\n{K}not_after = '2027-01-01'", r"keys\[1\]\.not_after must be a date"),
    "date-with-time": (f"format = 1\n{K}not_after = 2027-01-01T00:00:00Z", "not_after must be a date"),
    "date-impossible": (f"format = 1\n{K}not_after = 2027-02-30", "TOML"),
    "name-control": (f'format = 1\n{K}name = "\\u001b[31mred"', "printable"),
    "name-long": (f"format = 1\n{K}name = '{'x' * 101}'", "printable"),
    "revoked-prefix": ("format = 1\nrevoked = ['abcdef12']", "whole key ids"),
    "revoked-upper-case": (f"format = 1\nrevoked = ['{KEYS[0].key_id.upper()}']", "whole key ids"),
    "revoked-table": ("format = 1\n[revoked]\nx = 1", "revoked must be a list"),
    "threshold-zero": ("format = 1\n[thresholds]\n'**' = 0", "thresholds are from 1"),
    "threshold-boolean": ("format = 1\n[thresholds]\n'**' = true", "thresholds must be"),
    "threshold-huge": ("format = 1\n[thresholds]\n'**' = 101", "thresholds are from 1"),
    "threshold-pattern": ("format = 1\n[thresholds]\n'a**' = 2", "pattern"),
    "generation-negative": ("format = 1\n[minimum_generation]\n'**' = -1", "minimum_generation are from 0"),
    "divergent": ("format = 1\ndivergent = 'ignore'", "divergent is one of"),
    "rollback": ("format = 1\nrollback = 'report'", "rollback is one of"),
    "deep": ("format = 1\nx = " + "[" * 50_000 + "]" * 50_000, "TOML|unknown field"),
    "deep-keys": ("format = 1\n" + "a." * 20_000 + "b = 1", "TOML|unknown field"),
    "huge": ("#" * (1024 * 1024 + 1), "too large"),
    "pickle": ("cos\nsystem\n(S'true'\ntR.", "TOML"),
}


@pytest.mark.parametrize(("text", "message"), BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_bad_policies_name_file_and_field(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_policy(text, "/etc/trust.toml")
    assert caught.value.message.startswith("/etc/trust.toml")
    assert caught.value.remedy
    assert len(caught.value.message) < 600


def patterns() -> st.SearchStrategy[str]:
    part = st.from_regex(r"[a-z][a-z0-9._-]{0,5}\*?", fullmatch=True) | st.just("**")
    return st.lists(part, min_size=1, max_size=4).map("/".join)


def policies() -> st.SearchStrategy[Policy]:
    names = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
    roles = st.sampled_from([("writer",), ("maintainer",), ("writer", "maintainer")])
    fields = st.tuples(
        names,
        roles,
        st.lists(patterns(), min_size=1, max_size=3, unique=True).map(tuple),
        st.none() | st.dates(),
    )
    keys = st.lists(fields, max_size=len(KEYS)).map(
        lambda rows: tuple(TrustedKey(key, *row) for key, row in zip(KEYS, rows, strict=False))
    )
    table = st.dictionaries(patterns(), st.integers(1, 100), max_size=3).map(lambda d: tuple(d.items()))
    return st.builds(
        Policy,
        keys=keys,
        revoked=st.frozensets(st.sampled_from([key.key_id for key in KEYS])),
        thresholds=table,
        accept_unsigned=st.booleans(),
        divergent=st.sampled_from(["report", "refuse"]),
        rollback=st.sampled_from(["warn", "refuse"]),
        minimum_generation=table,
    )


@given(policies())
def test_dump_law(policy: Policy) -> None:
    assert parse_policy(dump_policy(policy), "x") == policy


@given(policies(), policies())
def test_digest_tells_policies_apart(one: Policy, other: Policy) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@given(st.text(max_size=300))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_policy(text, "x")


def test_changes_make_new_policies() -> None:
    a, b = TrustedKey(KEYS[0], "a"), TrustedKey(KEYS[1], "b")
    policy = Policy().with_key(a).with_key(b)
    assert policy.keys == (a, b)
    wider = TrustedKey(KEYS[0], "a", ("maintainer",))
    assert set(policy.with_key(wider).keys) == {wider, b}
    assert policy.without_key(a.key_id).keys == (b,)
    revoked = policy.revoke(a.key_id)
    assert revoked.revoked == {a.key_id} and revoked.keys == policy.keys
    assert policy.revoked == frozenset()
    with pytest.raises(UsageError, match="revoked"):
        revoked.with_key(wider)
    assert revoked.without_key(a.key_id).revoked == {a.key_id}
    with pytest.raises(UsageError, match="no key"):
        policy.without_key(digest_of(b"other"))


def test_key_id_prefixes() -> None:
    policy = Policy(
        (TrustedKey(KEYS[0]), TrustedKey(KEYS[1])),
        frozenset({Digest("ab" * 32), Digest("abab" * 15 + "cdef")}),
    )
    whole = KEYS[0].key_id
    for text in (whole, whole[:8], whole[:63], f" {whole[:12].upper()}\n"):
        assert policy.resolve(text) == whole
    assert policy.resolve("cd" * 32) == "cd" * 32
    for text, message in [
        (whole[:7], "not a key id"),
        ("", "not a key id"),
        ("zzzzzzzz", "not a key id"),
        ("0" * 65, "not a key id"),
        ("00000000", "no key"),
        ("abababab", "2 keys"),
    ]:
        with pytest.raises(UsageError, match=message):
            policy.resolve(text)


def test_expiry_is_inclusive() -> None:
    key = TrustedKey(KEYS[0], not_after=date(2027, 1, 31))
    assert not key.expired(date(2027, 1, 31))
    assert key.expired(date(2027, 2, 1))
    assert not TrustedKey(KEYS[0]).expired(date.max)


def test_expiring_within_thirty_days() -> None:
    today = date(2027, 1, 1)
    due = [0, 30, 31, -1, 5]
    keys = [TrustedKey(key, not_after=today + timedelta(n)) for key, n in zip(KEYS, due, strict=True)]
    policy = Policy(tuple(keys)).revoke(KEYS[4].key_id)
    assert policy.expiring(today) == (keys[0], keys[1])


def test_dates_with_time_are_refused() -> None:
    with pytest.raises(UsageError, match="date"):
        TrustedKey(KEYS[0], not_after=datetime(2027, 1, 1))


def test_the_documented_example_parses() -> None:
    from pathlib import Path

    page = Path(__file__).parents[3] / "docs/reference/trust-policy.md"
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        parse_policy(block, "example")
