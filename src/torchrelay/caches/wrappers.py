# SPDX-License-Identifier: Apache-2.0
"""Wrapper sources that PyTorch writes beside its entries, and runs in their place.

On a hit, Inductor writes an entry's source to ``<2>/<key>.py`` unless the file is there already, and
runs the file. torchrelay never installs one, but somebody who can write the directory can. The key
is a digest of the text, and stands in the entry, so a file that was exchanged shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torchrelay.caches.base import Excluded, FileStat
from torchrelay.caches.files import read_stable, stat_file
from torchrelay.caches.pickled import content_name
from torchrelay.limits import MIB

_NAME = re.compile(rb"c[a-z2-7]{51}")
_MOST = 64 * MIB


def named_sources(plain: bytes) -> frozenset[str]:
    """Keys of source files that an entry names."""
    return frozenset(match.decode() for match in _NAME.findall(plain))


def exchanged_sources(root: Path, names: Iterable[str]) -> list[str]:
    """Those of the named sources that lie in ``root`` with another text than their key is a digest of."""
    exchanged = []
    for key in sorted(names):
        file = stat_file(root, f"{key[1:3]}/{key}.py")
        if file is None:
            continue
        if not isinstance(file, FileStat) or not _is_whole(root, file, key):
            exchanged.append(f"{key[1:3]}/{key}.py")
    return exchanged


def _is_whole(root: Path, file: FileStat, key: str) -> bool:
    try:
        data = read_stable(root, file, limit=_MOST)
    except Excluded:
        return False
    return source_key(data) == key


def source_key(text: bytes) -> str:
    """PyTorch's name for a source (``codecache.code_hash``; surrounding white space does not count)."""
    return "c" + content_name(text.strip())
