# SPDX-License-Identifier: Apache-2.0
"""Which backend a URL belongs to, by entry point, imported when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.errors import UsageError
from torchrelay.storage.backend import Backend
from torchrelay.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint, EntryPoints
    from pathlib import Path

GROUP = "torchrelay.backends"


def installed_schemes() -> list[str]:
    """The schemes for which a backend is installed, sorted. Nothing is imported."""
    return sorted({point.name for point in _registered()})


def backend_class(scheme: str) -> type[Backend]:
    """The backend registered for ``scheme``.

    Raises:
        UsageError: None is, several are, or it cannot be imported.
    """
    point = _entry_point(scheme)
    try:
        found = point.load()
    except ImportError as exc:
        raise UsageError(
            f"the backend for {scheme}:// cannot be imported: {exc}",
            remedy=f'Install what it needs, for torchrelay\'s own with `pip install "torchrelay[{scheme}]"`.',
            subject=scheme,
        ) from exc
    except Exception as exc:
        raise UsageError(
            f"the backend for {scheme}:// ({point.value}) fails on import: {exc}", subject=scheme
        ) from exc
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise UsageError(f"{point.value}, registered for {scheme}://, is not a Backend", subject=scheme)
    return found


def open_backend(
    url: str | Path | Location, *, options: Mapping[str, str] | None = None, create: bool = False
) -> Backend:
    """Open the store at ``url``.

    Args:
        url: A URL, a path or a parsed location.
        options: Settings for the backend, by name.
        create: Whether a put may make the store if it does not exist.

    Raises:
        UsageError: The URL cannot be read, no backend is installed for it, or an option is unknown.
    """
    location = url if isinstance(url, Location) else Location.parse(url)
    return backend_class(location.scheme).open(location, options=options or {}, create=create)


def _registered() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415 - 20 ms that `import torchrelay` is spared

    return entry_points(group=GROUP)


def _entry_point(scheme: str) -> EntryPoint:
    # A distribution that lies on the path twice registers the same value twice, which is harmless.
    points = {point.value: point for point in _registered() if point.name == scheme}
    if not points:
        installed = ", ".join(installed_schemes()) or "none"
        raise UsageError(
            f"no backend is installed for {scheme}://; installed are: {installed}",
            remedy="Check the scheme, or install the package or extra that brings this backend.",
            subject=scheme,
        )
    if len(points) > 1:
        raise UsageError(
            f"several backends are registered for {scheme}://: {', '.join(sorted(points))}",
            remedy="Uninstall all but one of the packages that register it.",
            subject=scheme,
        )
    return next(iter(points.values()))
