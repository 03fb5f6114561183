# SPDX-License-Identifier: Apache-2.0
"""AOTAutograd results: ``aotautograd/<key>/<digest of the content>``.

An unbundled result refers to one or two FX graphs by key and exact guard text, and is a miss
without them; so it is only ever published with its needs. The partitioner may give one key results
that refer to different FX graphs: those lie side by side.

**How a need finds its entry.** The variant of an FX entry also covers PyTorch's key of external
libraries (the digest of libdevice, present on any machine with a GPU), which the AOTAutograd entry
does not hold. So it is not guessed: the need names the variant of the FX entry that lies beside it,
under that key and with that guard text. If there is none the result cannot be hit here or anywhere,
and is left out as incomplete.

PyTorch 2.7 kept one result a key, in a file named ``entry``; such an entry says so in ``files``.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from torchrelay.caches import files
from torchrelay.caches.base import CacheKind, Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.inductor import KEY as GRAPH_KEY
from torchrelay.caches.inductor import graph_files, read_named
from torchrelay.caches.pickled import (
    CONTENT_NAME,
    INDUCTOR_PLACE,
    bad_names,
    canonical_form,
    check_shape,
    content_name,
    file_found,
    graph_facets,
    restored,
)
from torchrelay.canonical import Canonical, GraphRef, variant
from torchrelay.digest import digest_of
from torchrelay.environment import REQUIRED_FACETS
from torchrelay.errors import FormatError
from torchrelay.signing import VerifiedEntry
from torchrelay.statement import File, Need, Statement

KEY = re.compile(r"a[a-z2-7]{51}")
_FOLDER = "aotautograd"
_OLD_NAME = "entry"

VariantOf = Callable[[GraphRef], "str | None"]
"""The variant of the FX entry that is referred to, or None if there is no such entry."""


def variant_beside(root: Path, reference: GraphRef, *, torch_version: str | None) -> str | None:
    """The variant of the FX entry in the directory ``root`` that ``reference`` means.

    With several (the same graph under two sets of external libraries) the lowest, so that the answer
    does not depend on the order of a listing.
    """
    if not GRAPH_KEY.fullmatch(reference.key):
        return None
    found = []
    for file in graph_files(root, reference.key):
        with contextlib.suppress(Excluded):  # not remembered: it may be whole the next time
            guard, named = _guard_and_variant(root, file, torch_version)
            if guard == reference.guard:
                found.append(named)
    return min(found, default=None)


@functools.lru_cache(maxsize=4096)
def _guard_and_variant(root: Path, file: FileStat, torch_version: str | None) -> tuple[str | None, str]:
    """Of one FX file, by its stat: a graph may serve many results, and is walked once.

    Raises:
        Excluded: It is no whole graph, or not one that can be read.
    """
    form = canonical_form("inductor", read_named(root, file), torch_version=torch_version)
    if not form.facts.readable:
        raise Excluded(Reason.UNPARSEABLE, f"{file.name}: what it is cannot be read")
    return form.facts.guards_expr, variant("inductor", form.facts, digest_of(form.data))


class AotAutogradKind(CacheKind):
    """Results of AOTAutograd.

    Args:
        torch_version: As for :class:`torchrelay.caches.inductor.InductorKind`.
    """

    name: ClassVar[str] = "aot_autograd"

    def __init__(self, torch_version: str | None = None) -> None:
        self._torch_version = torch_version

    def scan(self, roots: Roots) -> Iterator[Found | Skipped]:
        """All files one folder below ``aotautograd``."""
        root = roots.inductor
        top = files.scan_folder(root, _FOLDER)
        yield from (*top.skipped, *bad_names(file.name for file in top.files))
        for folder in top.folders:
            yield from self._scan_key(root, folder)

    def _scan_key(self, root: Path, folder: str) -> Iterator[Found | Skipped]:
        key = folder.rpartition("/")[2]
        if not KEY.fullmatch(key):
            yield from bad_names([folder])
            return
        listing = files.scan_folder(root, folder)
        yield from (*listing.skipped, *bad_names(listing.folders))
        for file in listing.files:
            last = file.path_parts[-1]
            fine = last == _OLD_NAME or CONTENT_NAME.fullmatch(last)
            yield file_found(self.name, key, root, file) if fine else Skipped(file.name, Reason.BAD_NAME)

    def read(self, found: Found) -> Iterator[Entry]:
        """The one result in the file, with its needs looked up beside it."""
        yield self._entry(found, search=True)

    def read_again(self, found: Found) -> Iterator[Entry]:
        """The same, without looking for secrets."""
        yield self._entry(found, search=False)

    def _entry(self, found: Found, *, search: bool) -> Entry:
        file = found.files[0]
        old = file.path_parts[-1] == _OLD_NAME
        data = files.read_stable(found.root, file) if old else read_named(found.root, file)

        def beside(reference: GraphRef) -> str | None:
            return variant_beside(found.root, reference, torch_version=self._torch_version)

        return self.entry_from_bytes(found.key, data, variant_of=beside, old_name=old, search=search)

    def entry_from_bytes(
        self, key: str, data: bytes, *, variant_of: VariantOf, old_name: bool = False, search: bool = True
    ) -> Entry:
        """The entry that PyTorch wrote as ``data`` under ``key``.

        Args:
            key: The AOTAutograd key.
            data: The pickle.
            variant_of: Finds the FX entries that it needs.
            old_name: Whether the file is named as PyTorch 2.7 did.
            search: As :func:`canonical_form`.

        Raises:
            Excluded: The key is impossible; ``INCOMPLETE``: an FX entry that it needs is not there;
                or as :func:`canonical_form`.
        """
        if not KEY.fullmatch(key):
            raise Excluded(Reason.BAD_NAME, key[:80])
        form = canonical_form(self.name, data, torch_version=self._torch_version, search=search)
        return Entry(
            kind=self.name,
            key=key,
            variant=variant(self.name, form.facts, digest_of(form.data)),
            needs=_needs(form, variant_of),
            facets=_facets(form),
            canon=form.canon,
            plain=form.data,
            files=(File(name=_OLD_NAME, size=len(form.data)),) if old_name else (),
            times=form.times,
            masked=form.masked,
        )

    def check(self, statement: Statement) -> None:
        """An AOTAutograd key, a variant, needs that are FX graphs, at most the old file name."""
        check_shape(statement, key=KEY, canons=None, variant=True)
        subject = f"{self.name} {statement.key}"
        for need in statement.needs:
            if need.kind != "inductor" or not GRAPH_KEY.fullmatch(need.key) or not need.variant:
                raise FormatError(f"{subject} needs what is no FX graph: {need.key[:80]!r}", subject=subject)
        if len(statement.needs) > 2:
            raise FormatError(f"{subject} needs more than two FX graphs", subject=subject)
        if any(file.name != _OLD_NAME for file in statement.files):
            raise FormatError(f"{subject} names files of its own", subject=subject)

    def install(self, entry: VerifiedEntry, roots: Roots) -> tuple[str, tuple[str, ...]]:
        """Write the file under the name that PyTorch would have given it."""
        data = restored(entry)
        last = _OLD_NAME if entry.statement.files else content_name(data)
        name = f"{_FOLDER}/{entry.statement.key}/{last}"
        return INDUCTOR_PLACE, files.install_files(roots.inductor, [(name, data)])


def _needs(form: Canonical, variant_of: VariantOf) -> tuple[Need, ...]:
    needs = {_need(ref, variant_of) for ref in (form.facts.forward, form.facts.backward) if ref is not None}
    return tuple(sorted(needs, key=lambda need: (need.key, need.variant)))


def _need(reference: GraphRef, variant_of: VariantOf) -> Need:
    found = variant_of(reference)
    if found is None:
        raise Excluded(Reason.INCOMPLETE, f"the FX graph {reference.key[:80]} that it needs is not there")
    return Need(kind="inductor", key=reference.key, variant=found)


def _facets(form: Canonical) -> tuple[str, ...]:
    """A result that refers to FX graphs is a miss without them; one that bundles them needs what they do."""
    unbundled = form.facts.readable and not form.facts.bundled
    return REQUIRED_FACETS["aot_autograd"] if unbundled else graph_facets(form.facts)
