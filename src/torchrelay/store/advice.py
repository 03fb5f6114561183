# SPDX-License-Identifier: Apache-2.0
"""Settings that PyTorch's keys contain: where producer and consumer differ, nothing is a hit."""

from __future__ import annotations

from torchrelay.environment import SETTINGS, Environment, diff_settings
from torchrelay.store.documents import read_environments
from torchrelay.store.look import nearest_producer
from torchrelay.store.session import Session
from torchrelay.store.view import View


def settings_warnings(session: Session, view: View, environment: Environment) -> list[str]:
    """A warning for each setting in which the workload's producers and ``environment`` differ.

    None if one of the producers had the same machine and settings: then its entries are hits.

    Args:
        session: The store.
        view: What the workload holds.
        environment: Where the entries are, or are to be, used.

    Raises:
        StorageError: The store could not be reached.
    """
    made = {vouched.record.producer for live in view.union.live.values() for vouched in live.vouched}
    if environment.digest in made:
        return []
    for producer in read_environments(session, made).values():
        if producer.facets == environment.facets and not _differing(producer, environment):
            return []
    nearest = nearest_producer(session, view, environment)
    return [] if nearest is None else [_warning(*found) for found in _differing(nearest, environment)]


def _differing(producer: Environment, environment: Environment) -> list[tuple[str, str, str]]:
    """What both state, and not alike; an older torchrelay may not have stated a setting."""
    found = diff_settings(producer, environment)
    return [(name, there, here) for name, there, here in found if there is not None and here is not None]


def _warning(name: str, there: str, here: str) -> str:
    setting = SETTINGS.get(name)
    title = setting.title if setting else name
    variable = setting.variable if setting else ""
    remedy = f"; to have hits, export {variable}={there} where they are used" if variable else ""
    return (
        f"{title} ({name}): the workload was compiled with {there or 'nothing'}, here it is "
        f"{here or 'nothing'}, and PyTorch's keys contain it{remedy}"
    )
