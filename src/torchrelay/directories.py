# SPDX-License-Identifier: Apache-2.0
"""The cache directories of an operation: where they are, whose, stamped how, and what lies in them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torchrelay.caches.base import Reason, Roots
from torchrelay.caches.files import OWN_FOLDER, check_private, prepare_root, storage_error
from torchrelay.caches.index import Index
from torchrelay.caches.kernelname import Naming, Prefixes
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalView, scan_local
from torchrelay.caches.machine import this_environment
from torchrelay.caches.prefixes import note_prefixes, read_prefixes, this_prefixes
from torchrelay.caches.registry import kinds_for
from torchrelay.caches.stamp import Stamp, read_stamp, require_same, write_stamp
from torchrelay.caches.tree import check_trees
from torchrelay.config import default_cache_dir
from torchrelay.digest import digest_of
from torchrelay.environment import Environment
from torchrelay.errors import DirectoryError, StampError, StorageError
from torchrelay.options import PullOptions, PushOptions


def locate(
    cache_dir: Path | None,
    triton_cache_dir: Path | None,
    trees: Mapping[str, Path],
    private: Iterable[Path] = (),
) -> Roots:
    """The directories that are named, or where PyTorch and Triton look by themselves.

    Raises:
        UsageError: A tree takes in another of them, or something of ``private``.
    """
    inductor = cache_dir or _named("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(os.environ)
    triton = triton_cache_dir or _named("TRITON_CACHE_DIR")
    roots = Roots(inductor.absolute(), triton.absolute() if triton else None, dict(trees))
    check_trees(roots, private)
    return roots


def _named(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


@contextmanager
def local_trouble() -> Iterator[None]:
    """What goes wrong inside is a local directory's fault, not the store's, and is told as such.

    Raises:
        DirectoryError: In place of a StorageError.
    """
    try:
        yield
    except StorageError as exc:
        raise DirectoryError(exc.message, remedy=exc.remedy, subject=exc.subject) from exc


def all_of(roots: Roots) -> tuple[Path, ...]:
    """All that is read and installed into: each of them decides what this machine runs."""
    return (roots.inductor, *((roots.triton,) if roots.triton is not None else ()), *roots.trees.values())


def check_all(roots: Roots) -> None:
    """The cache directory is there, and it and the others that are there are private.

    Raises:
        UnsafeDirectoryError: One is not private.
        DirectoryError: The cache directory is missing, or one cannot be looked at.
    """
    with local_trouble():
        for root in all_of(roots):
            if root == roots.inductor or os.path.lexists(root):
                check_private(root)


def prepare(roots: Roots, environment: Environment, options: PullOptions) -> tuple[Roots, Stamp]:
    """Make the directories fit to install into, and stamp them; with the places that kernels have there.

    Raises:
        UnsafeDirectoryError: One is not private.
        StampError: They were filled under another environment.
        DirectoryError: One cannot be made or written.
    """
    with local_trouble():
        for root in all_of(roots):
            prepare_root(root)
        now = Stamp(environment, time.time_ns())
        stamp = write_stamp(roots.inductor, now)
        for root in all_of(roots)[1:]:
            write_stamp(root, now)
        return _with_prefixes(roots, options), stamp


def stamp_of(root: Path) -> Stamp | None:
    """The stamp of ``root``; None if it has none or is not there.

    Raises:
        StampError, UnsafeDirectoryError: It cannot be used.
        DirectoryError: It cannot be read.
    """
    with local_trouble():
        return read_stamp(root) if root.is_dir() else None


def ledger_of(roots: Roots) -> Ledger:
    """What pulls installed in the directories. Read it after a scan, never before.

    Raises:
        DamagedError, UnsafeDirectoryError: It cannot be used.
        DirectoryError: It cannot be read.
    """
    with local_trouble():
        return Ledger.of(roots)


def stamp_for_push(roots: Roots, options: PushOptions, *, in_process: bool) -> Stamp:
    """The directory's stamp; one that has none is stamped only if somebody vouches for it.

    The same is asked of Triton's directory and of each tree: others may compile into them, too. One that
    lies in the cache directory has been filled as that was.

    A dry run writes nothing: it gets the stamp that would be written.

    Raises:
        StampError: Nobody does, this process compiled under another environment, or the directories were
            not filled under the same one.
        UnsafeDirectoryError, DirectoryError: The stamp cannot be read or written.
    """
    with local_trouble():
        held = read_stamp(roots.inductor)
        compiled_here = in_process and "torch" in sys.modules
        if held is not None and compiled_here:
            require_same(roots.inductor, held, this_environment())
        stamp = held or _vouched(roots.inductor, options, compiled_here=compiled_here)
        _stamp_others(roots, stamp, options, compiled_here=compiled_here)
        if not options.dry_run and (compiled_here or held is None):
            note_prefixes(roots.inductor, this_prefixes())
        return stamp if held is not None or options.dry_run else write_stamp(roots.inductor, stamp)


def _stamp_others(roots: Roots, stamp: Stamp, options: PushOptions, *, compiled_here: bool) -> None:
    """Make sure that what lies elsewhere was made under the environment of ``stamp``, too."""
    inductor = Path(os.path.realpath(roots.inductor))
    for root in all_of(roots)[1:]:
        if not _is_filled(root):
            continue
        held = read_stamp(root)
        within = inductor in Path(os.path.realpath(root)).parents
        made = held or (stamp if within else _vouched(root, options, compiled_here=compiled_here))
        require_same(root, made, stamp.environment)
        if held is None and not options.dry_run:
            write_stamp(root, made)


def _is_filled(root: Path) -> bool:
    try:
        return any(name != OWN_FOLDER for name in os.listdir(root))  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise storage_error(exc, root) from exc


def leave_out_older(local: LocalView, roots: Roots) -> None:
    """Leave out what lies in Triton's directory or a tree and is older than the stamp of that.

    Raises:
        StampError, UnsafeDirectoryError: A stamp cannot be used.
        DirectoryError: One cannot be read.
    """
    for place in roots.places[1:]:
        stamp = stamp_of(roots.root(place))
        if stamp is not None and stamp.since_ns:
            local.leave_out_older(place, stamp.since_ns)


def _vouched(root: Path, options: PushOptions, *, compiled_here: bool) -> Stamp:
    if options.assume_environment:
        return Stamp(this_environment(), 0)
    if compiled_here:
        # This process compiled into the directory itself, since it began.
        return Stamp(this_environment(), process_start_ns())
    raise StampError(
        f"{root} is not stamped, so nobody knows where its entries were compiled",
        remedy="If this machine compiled them, push with --assume-environment this.",
        subject=str(root),
    )


def process_start_ns() -> int:
    """When this process began, by the clock that stamps files; rather too late than too early.

    Raises:
        StampError: The system does not tell: then nobody knows which files this process made.
    """
    now = time.time_ns()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5), in ticks since the system started; the name before may hold spaces.
        ticks, rate = int(fields[19]), os.sysconf("SC_CLK_TCK")
        started = now - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + (ticks + 1) * 10**9 // rate
    except (OSError, ValueError, IndexError, AttributeError):
        ticks, started = 0, 0
    if ticks <= 0 or not 0 < started <= now:
        raise StampError(
            "this system does not tell when a process began, so nobody knows which entries this one made",
            remedy="Pull before the first compile, which stamps the directory; or push with "
            "assume_environment=True if all of the directory was compiled on this machine.",
        )
    return started


@contextmanager
def scanned(
    roots: Roots, stamp: Stamp | None, *, fresh: bool = False, keep: bool = True
) -> Iterator[LocalView]:
    """What lies in the cache directories; what was learned is kept in the index afterwards.

    Args:
        roots: The directories.
        stamp: Says which PyTorch filled them.
        fresh: Read every file, also those that the index knows.
        keep: Write the index.
    """
    version = str(stamp.environment.facets.get("torch", "")).partition(" ")[0] if stamp else None
    naming = _naming(roots.inductor, stamp)
    reading = f"{version or ''} {digest_of(repr(naming).encode())[:16]}"
    index = (Index if fresh else Index.load)(roots.inductor, reading=reading)
    try:
        yield scan_local(roots, index=index, kinds=kinds_for(version, naming))
    finally:
        if keep:
            index.save()


def all_prefixes(root: Path) -> tuple[Prefixes, ...]:
    """The places that kernels in ``root`` may have been named for."""
    known = (read_prefixes(root) if root.is_dir() else None, this_prefixes())
    return tuple(dict.fromkeys(prefixes for prefixes in known if prefixes is not None))


def _with_prefixes(roots: Roots, options: PullOptions) -> Roots:
    """``roots`` with the places of Python and torch for the processes that are pulled for.

    Those of this interpreter; for another machine those that one of its processes noted, if any did.
    """
    here = this_prefixes()
    if options.environment is None:
        note_prefixes(roots.inductor, here)
        return replace(roots, prefixes=here)
    return replace(roots, prefixes=read_prefixes(roots.inductor) or here)


def _naming(root: Path, stamp: Stamp | None) -> Naming:
    settings = stamp.environment.settings if stamp else {}
    compiler, march = settings.get("cpp_compiler", "g++"), settings.get("cpp_march", "native")
    return Naming(all_prefixes(root), compiler, march, _vectors(stamp))


def _vectors(stamp: Stamp | None) -> tuple[str, ...] | None:
    said = stamp.environment.facets.get("vector_isa") if stamp else None
    return said if isinstance(said, tuple) else (said,) if isinstance(said, str) else None


def require_own_vectors(local: LocalView, roots: Roots, environment: Environment, since_ns: int) -> None:
    """Make sure that no kernel in the directory disproves the environment that a push would sign.

    The graphs beside such a kernel were made for the same other vectors and do not show it, and a
    machine that is given them computes wrong numbers or corrupts its heap. So nothing is pushed.

    Args:
        local: What was found.
        roots: Where.
        environment: What the push would state.
        since_ns: Files last written before are no part of the push.

    Raises:
        StampError: There is one.
    """
    for item in local.skipped:
        if item.reason is Reason.OTHER_VECTORS and _written_since(roots.inductor / item.path, since_ns):
            said = ", ".join(_vectors(Stamp(environment, 0)) or ()) or "no vectors"
            raise StampError(
                f"{item.path} was {item.detail}, but this directory is said to be of a machine that "
                f"compiles for {said}: its entries were made under another environment",
                remedy="Push with the variables that were set for the compile (ATEN_CPU_CAPABILITY). A "
                "directory that is stamped already: use one for each environment (TORCHINDUCTOR_CACHE_DIR).",
                subject=str(roots.inductor / item.path),
            )


def _written_since(path: Path, since_ns: int) -> bool:
    try:
        return path.lstat().st_mtime_ns >= since_ns
    except OSError:
        return False
