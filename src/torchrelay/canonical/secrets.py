# SPDX-License-Identifier: Apache-2.0
"""Texts that look like secrets, and dumps of environment variables, which may hold any.

The patterns look for secrets that are recognisable by form, and for assignments to names that say
so. They must not fire on what compilers write: hashes, base32 keys, machine code, names such as
``num_tokens``. Each begins with a literal, so that nearly all texts are decided by a substring
search, and each repetition is bounded, so that no text takes more than linear time.

PyTorch's repro scripts set each variable whose name has to do with it or Triton, and a user's password
may stand in one of those in any form. So a line of such a script counts, whatever its value looks like.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of secret.

    Args:
        name: What a report calls it.
        hints: Lower-case literals, one of which every match has.
        expression: What a match is; over UTF-8 bytes.
    """

    name: str
    hints: tuple[bytes, ...]
    expression: re.Pattern[bytes]


def _pattern(name: str, hints: tuple[str, ...], expression: str) -> Pattern:
    return Pattern(name, tuple(hint.encode() for hint in hints), re.compile(expression.encode()))


ENVIRONMENT_DUMP = "environment-dump"
"""The kind of a line that sets an environment variable, as PyTorch writes it into its repro scripts."""

_TELLING_NAME = r"(?i:password|passwd|passphrase|secret|token|api_?key|access_?key|credentials?)"
_HINTS = (
    "passw",
    "passphrase",
    "secret",
    "token",
    "api_key",
    "apikey",
    "access_key",
    "accesskey",
    "credential",
)
# A value of at least eight characters with a digit among them, but not a name with a number such as
# `primals_1`: what names and words look like is not taken for a secret.
_VALUE = r"(?![A-Za-z_.]{1,64}[0-9]{1,3}(?:['\"\s&]|$))(?=[^'\"\\\s]{0,80}[0-9])[^'\"\\\s(){}\[\],]{8,512}"

# The backslashes are those of a script that was quoted before it was written.
_DUMP = _pattern(
    ENVIRONMENT_DUMP,
    ("os.environ[",),
    r"os\.environ\[\\{0,8}['\"][^'\"\\\n]{1,512}\\{0,8}['\"]\]\s{0,8}=(?!=)",
)

PATTERNS = (
    _pattern("url-password", ("://",), r"://[^\s/@:'\"<>{}]{0,128}:[^\s/@'\"<>{}]{1,256}@[A-Za-z0-9\[]"),
    _pattern("private-key", ("private key",), r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY"),
    _pattern("aws-access-key", ("akia", "asia"), r"(?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _pattern(
        "aws-secret-key",
        ("aws_secret", "aws-secret"),
        r"(?i:aws[_-]secret[_-](?:access[_-])?key)[^A-Za-z0-9]{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    ),
    _pattern(
        "github-token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        r"(?<![A-Za-z0-9_])gh[pousr]_[A-Za-z0-9]{36}",
    ),
    _pattern("github-token", ("github_pat_",), r"github_pat_[A-Za-z0-9_]{22}"),
    _pattern("gitlab-token", ("glpat-",), r"glpat-[A-Za-z0-9_-]{20}"),
    _pattern("huggingface-token", ("hf_",), r"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{30,40}(?![A-Za-z0-9_])"),
    _pattern("slack-token", ("xox",), r"(?<![A-Za-z0-9])xox[abeprs]-[0-9A-Za-z]{8,}"),
    _pattern("google-api-key", ("aiza",), r"(?<![A-Za-z0-9_-])AIza[0-9A-Za-z_-]{35}(?![A-Za-z0-9_-])"),
    _pattern(
        "openai-key",
        ("sk-",),
        r"(?<![A-Za-z0-9_-])sk-(?:proj-|ant-)?(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{32}",
    ),
    _pattern(
        "jwt",
        ("eyj",),
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,512}\.eyJ[A-Za-z0-9_-]{16}",
    ),
    _pattern(
        "bearer",
        ("bearer ",),
        r"(?i:authorization)['\"]?\s{0,4}[:=,]\s{0,4}['\"]?(?i:bearer)\s[A-Za-z0-9._~+/-]{16}",
    ),
    # name = 'value', "name": "value", os.environ['NAME'] = 'value'
    _pattern(
        "assignment",
        _HINTS,
        rf"{_TELLING_NAME}['\"]?\]?\s{{0,8}}[:=]\s{{0,8}}(?P<quote>['\"]){_VALUE}(?P=quote)",
    ),
    _pattern(
        "assignment",
        ("passw",),
        r"(?i:password|passwd)['\"]?\]?\s{0,8}[:=]\s{0,8}(?P<quote>['\"])[^'\"\s%{}]{4,512}(?P=quote)",
    ),
    # ?token=value&..., NAME_TOKEN=value on a line of its own
    _pattern(
        "assignment",
        _HINTS,
        rf"(?:[?&][A-Za-z_-]{{0,32}}|(?m:^)[A-Z][A-Z0-9_]{{0,64}}_|(?m:^))(?:{_TELLING_NAME})=(?!['\"]){_VALUE}",
    ),
    _DUMP,  # last: what else a text holds says more about it
)


def _families() -> tuple[tuple[re.Pattern[bytes], tuple[bytes, ...]], ...]:
    """The hints by first letter, with one expression for all of a letter.

    Searched for in one go, they take half the time of one by one.
    """
    hints = sorted({hint for pattern in PATTERNS for hint in pattern.hints})
    groups = [tuple(group) for _, group in itertools.groupby(hints, key=lambda hint: hint[0])]
    return tuple((re.compile(b"|".join(map(re.escape, group))), group) for group in groups)


_FAMILIES = _families()
_PRINTABLE = re.compile(rb"[\t\n\r\x20-\x7e]{8,}")
_BATCH = 1 << 20
_BEFORE = 128  # no expression matches further than this before its literal,
_AFTER = 1024  # or ends further than this behind it


def kinds_in(text: bytes) -> list[str]:
    """The kinds of secrets found in ``text``, each named once, sorted."""
    return sorted(set(_kinds(text, _possible([text]))))


def first_secret(texts: Sequence[bytes | memoryview]) -> tuple[int, str] | None:
    """The index of the first text that looks like a secret, and the kind."""
    possible = _possible(texts)
    if not possible:
        return None
    for index, text in enumerate(texts):
        kind = next(_kinds(text, possible), None)
        if kind is not None:
            return index, kind
    return None


def holds_dump(data: bytes) -> bool:
    """Whether environment variables are set anywhere in ``data``, as in :data:`ENVIRONMENT_DUMP`."""
    return any(hint in data for hint in _DUMP.hints) and _DUMP.expression.search(data) is not None


def secret_in_file(data: bytes) -> str | None:
    """The kind of the first secret in a file's contents, whatever sort of file it is; None if there is none.

    In a file that is no text, only runs of printable characters count: what stands between them cannot
    be part of a secret, and would join what does not belong together.
    """
    if not _possible([data]):
        return None
    hit = first_secret([data] if b"\0" not in data else _PRINTABLE.findall(data))
    return None if hit is None else hit[1]


def _possible(texts: Iterable[bytes | memoryview]) -> list[Pattern]:
    """The patterns of which a literal stands anywhere in ``texts``."""
    found: set[bytes] = set()
    batch: list[bytes] = []
    size = 0
    for part in (part for text in texts for part in _parts(text)):
        batch.append(part)
        size += len(part)
        if size > _BATCH:
            found.update(_hints_in(batch))
            batch, size = [], 0
    found.update(_hints_in(batch))
    return [pattern for pattern in PATTERNS if not found.isdisjoint(pattern.hints)]


def _hints_in(texts: list[bytes]) -> Iterator[bytes]:
    lowered = b"\0".join(texts).lower()
    for expression, hints in _FAMILIES:
        if expression.search(lowered) is not None:
            yield from (hint for hint in hints if hint in lowered)


def _parts(text: bytes | memoryview) -> Iterator[bytes]:
    """``text`` in parts that overlap by more than any match is long, so that a large one is not copied."""
    if len(text) <= 2 * _BATCH:
        yield bytes(text)
        return
    for start in range(0, len(text), _BATCH):
        yield bytes(text[start : start + _BATCH + _BEFORE + _AFTER])


def _kinds(text: bytes | memoryview, possible: list[Pattern]) -> Iterator[str]:
    for part in _parts(text):
        lowered = part.lower()
        for pattern in possible:
            for start, end in _regions(pattern, lowered):
                if pattern.expression.search(part, start, end) is not None:
                    yield pattern.name
                    break


def _regions(pattern: Pattern, lowered: bytes) -> Iterator[tuple[int, int]]:
    """Where a match can be: around each literal. Regions that touch are one, so no byte is read twice."""
    places = sorted(place for hint in pattern.hints for place in _occurrences(hint, lowered))
    begin = end = -1
    for place in places:
        if place - _BEFORE > end:
            if end > 0:
                yield begin, end
            begin = max(0, place - _BEFORE)
        end = place + _AFTER
    if end > 0:
        yield begin, end


def _occurrences(hint: bytes, lowered: bytes) -> Iterator[int]:
    place = lowered.find(hint)
    while place >= 0:
        yield place
        place = lowered.find(hint, place + len(hint))
