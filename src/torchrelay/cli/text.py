# SPDX-License-Identifier: Apache-2.0
"""Text for people: safe for a terminal, aligned, bounded in length."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MAX_SHOWN = 20
"""Items of one list that are shown; ``--json`` shows all."""

MAX_TEXT_CHARS = 400
"""Characters of one value from outside that are shown."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Controls, formatting (which can reorder a line), line separators, unpaired surrogates, unassigned.
_NOT_PRINTED = {"Cc", "Cf", "Zl", "Zp", "Cs", "Cn", "Co"}


class Line(NamedTuple):
    """One line of output, and what it means: ``good``, ``bad``, ``warn``, ``dim``, ``head`` or nothing."""

    text: str
    style: str = ""


def printable(text: str) -> str:
    """``text`` with everything that could drive a terminal as a visible escape.

    Laws: the result holds no control character; ``printable(printable(t)) == printable(t)``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in _NOT_PRINTED else _escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """``text``, or its beginning and an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def size(count: int) -> str:
    """A number of bytes with the unit that suits it."""
    value, unit = float(count), 0
    # 1023.95 would be shown as 1024.0 of the smaller unit.
    while value >= (1024 if unit == 0 else 1023.95) and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def plural(count: int, noun: str) -> str:
    """``1 entry``, ``2 entries``."""
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else many}"


def counts(found: Mapping[str, int]) -> str:
    """``a 3, b 1``: the larger first, then by name."""
    pairs = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{shortened(name, 80)} {count}" for name, count in pairs[:MAX_SHOWN]]
    return ", ".join([*shown, f"… and {len(pairs) - MAX_SHOWN} more"] if len(pairs) > MAX_SHOWN else shown)


def pairs(rows: Iterable[tuple[str, str]], indent: int = 0) -> list[Line]:
    """Names and values, the values below each other."""
    kept = list(rows)
    width = max((len(name) for name, _ in kept), default=0)
    return [Line(f"{' ' * indent}{name:<{width}}  {value}".rstrip()) for name, value in kept]


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[int] = frozenset(),
    widest: int = 120,
) -> list[Line]:
    """A table without rules; columns in ``right`` are aligned to the right, cells cut at ``widest``."""
    # What is escaped later would be wider than the column that was measured.
    cells = [[shortened(printable(cell), widest) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines: list[Line] = []
    for row in cells:
        parts = [
            f"{cell:>{widths[i]}}" if i in right else f"{cell:<{widths[i]}}" for i, cell in enumerate(row)
        ]
        lines.append(Line("  ".join(parts).rstrip(), "head" if not lines else ""))
    return lines


def bounded(items: Sequence[str], indent: int = 2, style: str = "") -> list[Line]:
    """At most :data:`MAX_SHOWN` items, and how many more there are."""
    lines = [Line(" " * indent + shortened(item), style) for item in items[:MAX_SHOWN]]
    if len(items) > MAX_SHOWN:
        lines.append(Line(f"{' ' * indent}… and {len(items) - MAX_SHOWN} more (--json shows all)", "dim"))
    return lines
