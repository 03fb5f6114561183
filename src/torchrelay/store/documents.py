# SPDX-License-Identifier: Apache-2.0
"""Environment documents: bound by their digest, which stands in signed headers and in object names."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.digest import Digest, digest_of
from torchrelay.environment import Environment, parse_environment
from torchrelay.errors import DamagedError
from torchrelay.limits import MAX_DOCUMENT_BYTES
from torchrelay.reports import Problem
from torchrelay.storage import Get
from torchrelay.store.failures import DAMAGED, failure
from torchrelay.store.layout import environment_name
from torchrelay.store.session import Session


def read_environments(
    session: Session, digests: Iterable[Digest], lost: list[Problem] | None = None
) -> dict[Digest, Environment]:
    """Those of the documents that are there and intact; one bulk call for what is not remembered.

    They explain and advise, they decide nothing, so one that is damaged is left out.

    Args:
        session: The store.
        digests: Which documents.
        lost: Those that are not there or damaged are added to it.
    """
    found: dict[Digest, Environment] = {}
    wanted: list[Get] = []
    for digest in sorted(digests):
        kept = session.state.document(digest)
        if kept is None or not _take(digest, kept, found):
            wanted.append(Get(environment_name(digest), MAX_DOCUMENT_BYTES))
    for got in session.backend.get_many(wanted) if wanted else ():
        digest = Digest(got.get.name.rpartition("/")[2])
        if got.data is not None and _take(digest, got.data, found):
            session.state.keep_document(digest, got.data)
        elif lost is not None:
            lost.append(failure(got, got.get.name) if got.data is None else _changed(got.get.name))
    return found


def _changed(name: str) -> Problem:
    return Problem(subject=name, reason=DAMAGED, detail="does not have the digest that names it")


def _take(digest: Digest, data: bytes, found: dict[Digest, Environment]) -> bool:
    if digest_of(data) != digest:
        return False
    try:
        found[digest] = parse_environment(data, name=f"environment {digest}")
    except DamagedError:
        return False
    return True
