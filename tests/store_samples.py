# SPDX-License-Identifier: Apache-2.0
"""Local entries and live ones for tests of what push and pull decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrelay.batch import encode_requires
from torchrelay.caches.base import FileStat, Found
from torchrelay.caches.index import Index, Meta
from torchrelay.caches.local import LocalEntry, LocalView
from torchrelay.digest import digest_of
from torchrelay.manifest import Live, union
from torchrelay.statement import FORMAT, Need, Record, Statement
from torchrelay.store.selection import Item
from torchrelay.testing.entries import REQUIRES, WORKLOAD, make_record
from union_samples import accepted

KEY = "f" + "a" * 51
VARIANT = digest_of(b"guards")


def local(
    plain: bytes = b"plain",
    *,
    kind: str = "inductor",
    key: str = KEY,
    variant: str = VARIANT,
    needs: tuple[Need, ...] = (),
    mtimes: Sequence[int] = (100,),
) -> LocalEntry:
    """An entry in a cache directory."""
    files = tuple(FileStat(f"{key}/{n}", 1, mtime, mtime, n) for n, mtime in enumerate(mtimes))
    meta = Meta(
        kind=kind,
        key=key,
        variant=variant,
        needs=needs,
        facets=tuple(sorted(REQUIRES)),
        canon="raw",
        files=(),
        times=(),
        masked={},
        digest=digest_of(plain),
        size=len(plain),
    )
    return LocalEntry(Found(kind, key, Path("nowhere"), "inductor", files), meta)


def local_view(*entries: LocalEntry) -> LocalView:
    """What a scan that found ``entries`` gives."""
    view = LocalView({}, Index(Path("nowhere")))
    for entry in entries:
        view._add(entry)
    return view


def stored_record(plain: bytes = b"plain", **fields: Any) -> Record:
    """A record as a store holds it, of the same identity as :func:`local` gives."""
    fields = {"kind": "inductor", "key": KEY, "variant": VARIANT} | fields
    return make_record(plain, **fields)[0]


def live_of(*claims: tuple[str, Record]) -> Live:
    """The live entry of records by these signers; they must be of one identity."""
    (live,) = union([accepted(signer, [record]) for signer, record in claims]).live.values()
    return live


def item(entry: LocalEntry, live: Live | None = None) -> Item:
    """What a push makes of a local entry."""
    meta = entry.meta
    statement = Statement(
        format=FORMAT,
        canon=meta.canon,
        workload=WORKLOAD,
        kind=meta.kind,
        key=meta.key,
        variant=meta.variant,
        requires=encode_requires(REQUIRES)[0],
        needs=meta.needs,
        digest=meta.digest,
        size=meta.size,
        files=meta.files,
    )
    return Item(entry, statement, REQUIRES, live, live)
