# SPDX-License-Identifier: Apache-2.0
"""What an object may be called (``docs/reference/backend-contract.md`` §2).

Names are checked going into a backend and coming out of it. The grammar leaves nothing that a
file system, a URL or a shell would read in a way of its own:

- only ``A-Z a-z 0-9 . _ -``: no escaping, no Unicode forms, no NUL, no backslash, no space;
- a component begins with a letter or digit: no ``.``, ``..``, hidden file, option-like name, and
  the names that begin with a dot stay free for the backend's temporary objects;
- no empty component: neither absolute nor doubly spelled.
"""

from __future__ import annotations

import re

from torchrelay.limits import MAX_NAME_CHARS, MAX_OBJECT_NAME_CHARS

TEMP_PREFIX = ".tmp-"
"""How a backend's temporary objects begin. No object's name can begin so."""

_COMPONENT = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}"
_COMPONENT_RE = re.compile(_COMPONENT)
_NAME_RE = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")


def is_object_name(name: str) -> bool:
    """Whether ``name`` may name an object."""
    return len(name) <= MAX_OBJECT_NAME_CHARS and _NAME_RE.fullmatch(name) is not None


def is_component(text: str) -> bool:
    """Whether ``text`` may be one component of an object's name."""
    return _COMPONENT_RE.fullmatch(text) is not None


def is_prefix(prefix: str) -> bool:
    """Whether ``prefix`` may be listed: empty, or a name with a ``/`` at its end."""
    return prefix == "" or (prefix.endswith("/") and is_object_name(prefix[:-1]))
