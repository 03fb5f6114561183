# SPDX-License-Identifier: Apache-2.0
"""The local view: every entry that lies in a machine's cache directories, without their bytes.

Push subtracts from it what the store holds, pull what is installed. Files that have not changed since
they were last read are not read again; the bytes of no entry are held, and read once more when a push
needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchrelay.caches.base import Alias, CacheKind, Entry, Excluded, Found, Reason, Roots, Skipped
from torchrelay.caches.index import Index, Meta, meta_of
from torchrelay.caches.registry import KINDS
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import DamagedError, RelayError

# What the very same files will give again; the others may pass without a file being touched. Whether an
# entry is incomplete depends on other files than its own.
_LASTING = frozenset(
    {
        Reason.UNPARSEABLE,
        Reason.EMPTY,
        Reason.BAD_NAME,
        Reason.TOO_LARGE,
        Reason.SECRET,
        Reason.UNSTABLE_KEY,
        Reason.OTHER_VECTORS,
    }
)


@dataclass(frozen=True, slots=True)
class LocalEntry:
    """One entry in a cache directory: where it was found, and all but its bytes."""

    found: Found
    meta: Meta

    @property
    def digest(self) -> Digest:
        """Of the canonical bytes."""
        return self.meta.digest

    @property
    def size(self) -> int:
        """Of the canonical bytes."""
        return self.meta.size

    @property
    def forms(self) -> tuple[Alias, ...]:
        """Key, form and digest of all entries that these files are."""
        own = Alias(self.meta.key, self.meta.canon, self.meta.digest)
        return (own,) if self.meta.alias is None else (own, self.meta.alias)

    def digests_of(self, key: str) -> set[Digest]:
        """What an entry of this key may have as digest, to be these files."""
        return {form.digest for form in self.forms if form.key == key}


@dataclass(slots=True)
class LocalView:
    """What one scan found.

    Attributes:
        items: The entries, in the order of kinds and names; each identity and digest once.
        skipped: What is left out, each path and reason once.
        read: How many :class:`Found` were read because they were new or changed.
        remembered: How many the index knew.
        duplicates: Entries that lie in a second place too, byte for byte (one device each).
    """

    kinds: Mapping[str, CacheKind]
    index: Index
    items: list[LocalEntry] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    read: int = 0
    remembered: int = 0
    duplicates: int = 0
    _by_name: dict[tuple[str, str, str], tuple[LocalEntry, ...]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LocalEntry]:
        """The entries."""
        return iter(self.items)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self.items)

    def find(self, kind: str, key: str, variant: str) -> tuple[LocalEntry, ...]:
        """The entries here of this identity, but for what they require: that is this machine's."""
        return self._by_name.get((kind, key, variant), ())

    def has_needs(self, meta: Meta) -> bool:
        """Whether what an entry needs was found; kinds that others need are looked at first."""
        return all(self.find(need.kind, need.key, need.variant) for need in meta.needs)

    def excluded(self) -> dict[str, int]:
        """What is left out, counted by reason."""
        return dict(sorted(Counter(item.reason.value for item in self.skipped).items()))

    def leave_out_older(self, place: str, since_ns: int) -> None:
        """Leave out entries in ``place`` of which no file was written since, by the file system's clock."""
        old = [
            item
            for item in self.items
            if item.found.place == place and all(file.mtime_ns < since_ns for file in item.found.files)
        ]
        gone = {id(item) for item in old}
        self.items = [item for item in self.items if id(item) not in gone]
        self.skipped += [Skipped(_path(item.found), Reason.OLDER_THAN_SCOPE) for item in old]

    def load(self, item: LocalEntry) -> Entry:
        """Read an entry's bytes again.

        Raises:
            Excluded: Its files changed since the scan, or are gone.
        """
        wanted = item.meta
        try:
            for entry in self.kinds[wanted.kind].read_again(item.found):
                name = (entry.key, entry.variant)
                if name == (wanted.key, wanted.variant) and digest_of(entry.plain) == wanted.digest:
                    return entry
        except (RelayError, OSError) as exc:
            raise Excluded(Reason.GROWING, f"{wanted.key}: {exc}") from exc
        raise Excluded(Reason.GROWING, f"{wanted.key}: not what was found before")

    def _add(self, item: LocalEntry) -> None:
        name = (item.meta.kind, item.meta.key, item.meta.variant)
        known = self._by_name.get(name, ())
        if any(other.digest == item.digest for other in known):
            self.duplicates += 1
            return
        self.items.append(item)
        self._by_name[name] = (*known, item)
        if (alias := item.meta.alias) is not None:
            other = (item.meta.kind, alias.key, item.meta.variant)
            self._by_name[other] = (*self._by_name.get(other, ()), item)


def scan_local(roots: Roots, *, index: Index, kinds: Mapping[str, CacheKind] | None = None) -> LocalView:
    """Look at every place of every kind; read what is new or changed; never raise for one bad file.

    Args:
        roots: The directories to look into.
        index: What was found before; call :meth:`Index.save` when the work is done.
        kinds: The kinds to look for; all by default.
    """
    view = LocalView(KINDS if kinds is None else kinds, index)
    index.scans(roots.places)
    skipped: dict[tuple[str, Reason], Skipped] = {}
    for kind in view.kinds.values():
        for seen in kind.scan(roots):
            for item in (seen,) if isinstance(seen, Skipped) else _look(view, kind, seen):
                skipped.setdefault((item.path, item.reason), item)
    view.skipped = list(skipped.values())
    return view


def _look(view: LocalView, kind: CacheKind, found: Found) -> Iterator[Skipped]:
    """Add the entries in ``found`` to the view; what is left out of it."""
    known = view.index.get(found)
    if known is not None and all(view.has_needs(meta) for meta in known.metas):
        view.remembered += 1
        for meta in known.metas:
            view._add(LocalEntry(found, meta))
        yield from (Skipped(*item) for item in known.skipped)
        return
    view.read += 1
    metas: list[Meta] = []
    problem: Excluded | None = None
    try:
        metas.extend(meta_of(entry) for entry in kind.read(found))
    except Excluded as exc:
        problem = exc
    except DamagedError as exc:
        problem = Excluded(Reason.UNPARSEABLE, exc.message)
    except (RelayError, OSError) as exc:  # the disk or a limit, not the bytes: looked at again next time
        problem = Excluded(Reason.GROWING, str(exc))
    for meta in metas:
        view._add(LocalEntry(found, meta))
    skipped = [] if problem is None else [Skipped(_path(found), problem.reason, problem.detail)]
    yield from skipped
    if problem is None or problem.reason in _LASTING:
        view.index.put(found, metas, skipped)


def _path(found: Found) -> str:
    return found.files[-1].name if found.files else found.key
