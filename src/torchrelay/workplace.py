# SPDX-License-Identifier: Apache-2.0
"""One store, one workload and one set of cache directories, opened for one operation.

Here the parts meet: the directory's stamp, ledger and index; the user's key and policy; the store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from msgspec.structs import replace as replace_fields

from torchrelay.batch import encode_requires
from torchrelay.caches import settings
from torchrelay.caches.base import Roots
from torchrelay.caches.files import check_private, prepare_root
from torchrelay.caches.index import Index
from torchrelay.caches.kernelname import Naming, Prefixes
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalView, scan_local
from torchrelay.caches.machine import this_environment, this_hints
from torchrelay.caches.mega import TYPES as MEGA_TYPES
from torchrelay.caches.prefixes import note_prefixes, read_prefixes, this_prefixes
from torchrelay.caches.registry import kinds_for
from torchrelay.caches.stamp import Stamp, read_stamp, require_same, write_stamp
from torchrelay.config import default_cache_dir
from torchrelay.digest import digest_of
from torchrelay.environment import Environment, requires_of
from torchrelay.errors import KeyFileError, StampError, TrustError, UsageError
from torchrelay.options import Progress, PullOptions, PushOptions
from torchrelay.reports import (
    DiffReport,
    ExplainReport,
    ListReport,
    Problem,
    PullReport,
    PushReport,
    StatusReport,
    VerifyReport,
)
from torchrelay.signing import Policy, Signer, Verifier, trust
from torchrelay.signing.keyfiles import config_directory, load_private_key, passphrase_from
from torchrelay.storage import Location, ObservedBackend, RetryingBackend, open_backend
from torchrelay.store import look
from torchrelay.store.check import verify_local, verify_store
from torchrelay.store.fetch import CacheDirectories, Fetch, Fetched
from torchrelay.store.mega import MegaSink, MegaSource
from torchrelay.store.plan import Plan, keep_kinds, local_names, make_plan
from torchrelay.store.publish import Push, Scope
from torchrelay.store.session import Session, silent
from torchrelay.store.state import ClientState
from torchrelay.store.view import View, load_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What :class:`torchrelay.relay.Relay` was made with, and the operations themselves."""

    url: str
    workload: str
    cache_dir: Path | None
    triton_cache_dir: Path | None
    trees: Mapping[str, Path]
    key: Path | None
    policy: Path | None
    state_dir: Path | None
    options: Mapping[str, str] = field(default_factory=dict)
    in_process: bool = False
    progress: Progress | None = None

    # -- push and pull ---------------------------------------------------------------------------

    def push(self, options: PushOptions) -> PushReport:
        """See :meth:`torchrelay.relay.Relay.push`."""
        signer, policy = self._signer_and_policy()
        roots = self._roots()
        for root in _directories(roots):
            if root == roots.inductor or os.path.lexists(root):
                check_private(root)
        stamp = self._stamp_for_push(roots, options)
        with self._session(policy, create=not options.dry_run) as session, _scanned(roots, stamp) as local:
            # Not before the scan: a pull beside this one notes what it installs before it does.
            ledger = Ledger.open(roots.inductor)
            push = Push(
                session,
                local,
                environment=stamp.environment,
                signer=signer,
                ledger=ledger,
                scope=_scope(stamp, options),
                provenance=options.provenance,
            )
            return push.run()

    def pull(self, options: PullOptions) -> PullReport:
        """See :meth:`torchrelay.relay.Relay.pull`."""
        started = time.monotonic()
        roots = self._roots()
        with self._session(self._reading_policy()) as session:
            view = load_view(session)
            lost: list[Problem] = []
            environment = options.environment or self._follow(session, view, lost)
            for root in _directories(roots):
                prepare_root(root)
            stamp = write_stamp(roots.inductor, Stamp(environment, time.time_ns()))
            roots = _with_prefixes(roots, options)
            ledger = Ledger.open(roots.inductor)
            with _scanned(roots, stamp) as local:
                live = view.union.live.values()
                known = roots.prefixes is not None
                plan = make_plan(live, local, environment, ledger, roots.trees, has_prefixes=known)
                deadline = None if options.deadline is None else started + options.deadline
                sink = CacheDirectories(roots, ledger, local.index, live)
                fetch = Fetch(session, sink, packed=view.packed, deadline=deadline)
                fetched = fetch.run(plan.install, plan.needers, local_names(local))
            seconds = time.monotonic() - started
            report = _pull_report(session, view, plan, fetched, environment=environment, seconds=seconds)
            return replace_fields(report, damaged=[*report.damaged, *lost]) if lost else report

    # -- looking ---------------------------------------------------------------------------------

    def status(self) -> StatusReport:
        """See :meth:`torchrelay.relay.Relay.status`."""
        pushed, hindrances = self._planned_push(PushOptions(dry_run=True))
        roots = self._roots()
        with self._session(self._reading_policy()) as session:
            view = load_view(session)
            stamp = read_stamp(roots.inductor) if roots.inductor.is_dir() else None
            environment = stamp.environment if stamp else this_environment()
            with _scanned(roots, stamp) as local:
                ledger = Ledger.open(roots.inductor)
                live = view.union.live.values()
                known = bool(_all_prefixes(roots.inductor))
                plan = make_plan(live, local, environment, ledger, roots.trees, has_prefixes=known)
                return StatusReport(
                    store=session.backend.describe(),
                    workload=self.workload,
                    environment=environment.digest,
                    stamped=stamp is not None,
                    local=len(local.items),
                    live=len(view.union.live),
                    segments=len(view.segments),
                    to_push=pushed.pushed if pushed else 0,
                    to_pull=len(plan.install) + len(plan.needers),
                    incompatible=dict(plan.incompatible),
                    refused=[*view.refused, *plan.refused],
                    damaged=list(view.damaged),
                    warnings=[*view.warnings, *hindrances],
                )

    def _planned_push(self, options: PushOptions) -> tuple[PushReport | None, list[str]]:
        """What a push would do; None where nothing could be pushed without more being said.

        A machine that only pulls has no key that anybody trusts, and its status is fine all the same.
        """
        roots = self._roots()
        if not roots.inductor.is_dir() or read_stamp(roots.inductor) is None:
            return None, []
        try:
            return self.push(options), []
        except (KeyFileError, TrustError) as exc:
            return None, [f"nothing can be pushed from here: {exc.message}"]

    def entries(self, environment: Environment | None) -> ListReport:
        """See :meth:`torchrelay.relay.Relay.entries`."""
        with self._session(self._reading_policy()) as session:
            return look.list_entries(session, environment)

    def show(self, name: str) -> ListReport:
        """See :meth:`torchrelay.relay.Relay.show`."""
        with self._session(self._reading_policy()) as session:
            return look.show(session, name)

    def diff(self, other: str | None) -> DiffReport:
        """See :meth:`torchrelay.relay.Relay.diff`."""
        with self._session(self._reading_policy()) as session:
            if other is not None:
                return look.diff_workloads(session, other)
            roots = self._roots()
            stamp = read_stamp(roots.inductor)
            environment = stamp.environment if stamp else this_environment()
            with _scanned(roots, stamp) as local:
                facets = {entry.meta.facets for entry in local.items}
                requires = {names: encode_requires(requires_of(environment, names))[0] for names in facets}
                return look.diff_local(session, local, requires)

    def explain(self, name: str | None, environment: Environment | None) -> ExplainReport:
        """See :meth:`torchrelay.relay.Relay.explain`."""
        with self._session(self._reading_policy()) as session:
            if environment is not None:
                return look.explain_entries(session, name, environment, ())
            here, hints = self._this_or_stamped()
            return look.explain_entries(session, name, here, hints)

    def verify(self, *, local: bool) -> VerifyReport:
        """See :meth:`torchrelay.relay.Relay.verify`."""
        with self._session(self._reading_policy()) as session:
            if not local:
                return verify_store(session)
            roots = self._roots()
            check_private(roots.inductor)
            # What a file holds is asked of the file, never of the index.
            with _scanned(roots, read_stamp(roots.inductor), fresh=True) as here:
                return verify_local(session, here, Ledger.open(roots.inductor), roots.inductor)

    # -- Mega-Cache ------------------------------------------------------------------------------

    def import_mega(self, path: Path, options: PushOptions) -> PushReport:
        """See :meth:`torchrelay.relay.Relay.import_mega`."""
        signer, policy = self._signer_and_policy()
        environment = options.environment or (this_environment() if options.assume_environment else None)
        environment = environment or self._stamped_environment()
        if environment is None:
            raise StampError(
                "a Mega-Cache blob does not say where it was made",
                remedy="If this machine made it, import with --assume-environment this; else name the "
                "machine's document with --environment.",
                subject=str(path),
            )
        source = MegaSource(path, environment)
        with self._session(policy, create=not options.dry_run) as session:
            push = Push(
                session,
                source,
                environment=environment,
                signer=signer,
                ledger=Ledger.open(self._roots().inductor),
                scope=replace(_scope(Stamp(environment, 0), options), since_ns=0, stamped_ns=0),
                provenance=options.provenance,
            )
            return push.run()

    def export_mega(self, path: Path, options: PullOptions) -> PullReport:
        """See :meth:`torchrelay.relay.Relay.export_mega`."""
        started = time.monotonic()
        with self._session(self._reading_policy()) as session:
            view = load_view(session)
            environment = options.environment or this_environment()
            nothing = LocalView(kinds_for(None), Index(path.parent))
            plan = make_plan(view.union.live.values(), nothing, environment, Ledger(path.parent))
            sink = MegaSink()
            deadline = None if options.deadline is None else started + options.deadline
            keep_kinds(plan, MEGA_TYPES)
            fetch = Fetch(session, sink, packed=view.packed, deadline=deadline)
            fetched = fetch.run(plan.install, plan.needers, ())
            sink.write(path)
            seconds = time.monotonic() - started
            return _pull_report(session, view, plan, fetched, environment=environment, seconds=seconds)

    # -- the user's key, policy and directories --------------------------------------------------

    def _signer_and_policy(self) -> tuple[Signer, Policy]:
        """A key that the policy trusts: without one nothing is uploaded.

        Raises:
            KeyFileError: The key cannot be used.
            TrustError: The policy does not trust the key for this workload.
        """
        directory = config_directory(os.environ)
        passphrase = passphrase_from(os.environ)
        if self.key is not None:
            signer: Signer = load_private_key(self.key, passphrase)
            policy = self._reading_policy()
        else:
            first = trust.first_use(directory, passphrase)
            signer = first.signer
            policy = first.policy if self.policy is None else trust.load_policy(self.policy)
        key_id = signer.public_key.key_id
        trusted = policy.key(key_id)
        if not policy.accept_unsigned and (
            trusted is None or key_id in policy.revoked or not trusted.covers(self.workload)
        ):
            raise TrustError(
                f"the trust policy does not let key {key_id[:16]} sign {self.workload}",
                remedy=f"Name another key, or run `torchrelay trust add '{signer.public_key.text}'`.",
                subject=key_id,
            )
        return signer, policy

    def _reading_policy(self) -> Policy:
        if self.policy is not None:
            return trust.load_policy(self.policy)
        # Reading makes no key: a replica has only public ones, and perhaps a read-only home.
        return trust.load_policy(config_directory(os.environ) / trust.POLICY_NAME, missing_ok=True)

    def _roots(self) -> Roots:
        inductor = self.cache_dir or _named("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(os.environ)
        triton = self.triton_cache_dir or _named("TRITON_CACHE_DIR")
        return Roots(inductor.absolute(), triton.absolute() if triton else None, dict(self.trees))

    def _stamped_environment(self) -> Environment | None:
        roots = self._roots()
        stamp = read_stamp(roots.inductor) if roots.inductor.is_dir() else None
        return stamp.environment if stamp else None

    def _this_or_stamped(self) -> tuple[Environment, list[str]]:
        """What a pull would pull for, and hints; where torch is not installed, what the stamp says."""
        stamped = self._stamped_environment()
        try:
            here = this_environment()
        except UsageError:
            if stamped is None:
                raise
            return stamped, ["torch is not installed here: this is what the directory's stamp says"]
        differing = sorted(
            name
            for name in here.facets.keys() | (stamped or here).facets.keys()
            if here.facets.get(name) != (stamped or here).facets.get(name)
        )
        told = [f"the directory is stamped with other facets than this process: {', '.join(differing)}"]
        return here, (told if differing else []) + _this_hints()

    def _stamp_for_push(self, roots: Roots, options: PushOptions) -> Stamp:
        """The directory's stamp; one that has none is stamped only if somebody vouches for it.

        Raises:
            StampError: Nobody does, or this process compiled under another environment.
        """
        stamp = read_stamp(roots.inductor)
        if self.in_process and "torch" in sys.modules:
            # This process compiled into the directory itself, since it began.
            here = this_environment()
            note_prefixes(roots.inductor, this_prefixes())
            if stamp is None:
                return write_stamp(roots.inductor, Stamp(here, _process_start_ns()))
            require_same(roots.inductor, stamp, here)
        if stamp is not None:
            return stamp
        if not options.assume_environment:
            raise StampError(
                f"{roots.inductor} is not stamped, so nobody knows where its entries were compiled",
                remedy="If this machine compiled them, push with --assume-environment this.",
                subject=str(roots.inductor),
            )
        note_prefixes(roots.inductor, this_prefixes())
        return write_stamp(roots.inductor, Stamp(this_environment(), 0))

    # -- the store -------------------------------------------------------------------------------

    @contextmanager
    def _session(self, policy: Policy, *, create: bool = False) -> Iterator[Session]:
        location = Location.parse(self.url)
        backend = open_backend(self.url, options=self.options, create=create)
        with ObservedBackend(RetryingBackend(backend)) as observed:
            yield Session(
                backend=observed,
                policy=policy,
                verifier=Verifier(policy, today=datetime.now(timezone.utc).date()),
                workload=self.workload,
                state=ClientState.of_store(self._state_root(), location.normalised),
                progress=self.progress or silent,
            )

    def _state_root(self) -> Path | None:
        if self.state_dir is not None:
            return self.state_dir
        base = os.environ.get("XDG_STATE_HOME", "")
        if not Path(base).is_absolute():
            home = os.environ.get("HOME", "")
            if not Path(home).is_absolute():
                return None
            base = f"{home}/.local/state"
        return Path(base) / "torchrelay"

    def _follow(self, session: Session, view: View, lost: list[Problem]) -> Environment:
        """This machine's environment, after this process took over the workload's settings (ADR 0005).

        Documents that cannot be had are added to ``lost``: without them the settings may not agree.
        """
        if not self.in_process:
            return this_environment()
        producer = look.nearest_producer(session, view, this_environment(), lost)
        if producer is not None:
            settings.apply_settings(producer.settings)
        settings.skip_needless_headers()
        return this_environment()


def _directories(roots: Roots) -> tuple[Path, ...]:
    """All that is read and installed into: each of them decides what this machine runs."""
    return (roots.inductor, *((roots.triton,) if roots.triton is not None else ()), *roots.trees.values())


def _named(variable: str) -> Path | None:
    """The directory that a variable of PyTorch's or Triton's names, if it is set."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def _this_hints() -> list[str]:
    try:
        hints = this_hints()
    except UsageError:
        return []
    return [f"{name}: {getattr(hints, name)}" for name in hints.__struct_fields__]


def _process_start_ns() -> int:
    """When this process began, by the clock that stamps files."""
    try:
        return Path("/proc/self").stat().st_ctime_ns
    except OSError:
        return 0


@contextmanager
def _scanned(roots: Roots, stamp: Stamp | None, *, fresh: bool = False) -> Iterator[LocalView]:
    """What lies in the cache directories; what was learned is kept in the index afterwards.

    Args:
        roots: The directories.
        stamp: Says which PyTorch filled them.
        fresh: Read every file, also those that the index knows.
    """
    version = str(stamp.environment.facets.get("torch", "")).partition(" ")[0] if stamp else None
    naming = _naming(roots.inductor, stamp)
    reading = f"{version or ''} {digest_of(repr(naming).encode())[:16]}"
    index = (Index if fresh else Index.load)(roots.inductor, reading=reading)
    try:
        yield scan_local(roots, index=index, kinds=kinds_for(version, naming))
    finally:
        index.save()


def _with_prefixes(roots: Roots, options: PullOptions) -> Roots:
    """``roots`` with the places of Python and torch for the processes that are pulled for.

    Those of this interpreter; for another machine those that one of its processes noted, if any did.
    """
    here = this_prefixes()
    if options.environment is None:
        note_prefixes(roots.inductor, here)
        return replace(roots, prefixes=here)
    return replace(roots, prefixes=read_prefixes(roots.inductor) or here)


def _all_prefixes(root: Path) -> tuple[Prefixes, ...]:
    """The places that kernels in ``root`` may have been named for."""
    known = (read_prefixes(root) if root.is_dir() else None, this_prefixes())
    return tuple(dict.fromkeys(prefixes for prefixes in known if prefixes is not None))


def _naming(root: Path, stamp: Stamp | None) -> Naming:
    settings_ = stamp.environment.settings if stamp else {}
    compiler, march = settings_.get("cpp_compiler", "g++"), settings_.get("cpp_march", "native")
    return Naming(_all_prefixes(root), compiler, march)


def _scope(stamp: Stamp, options: PushOptions) -> Scope:
    stamped = 0 if options.all else stamp.since_ns
    since = stamped if options.since is None else max(stamped, int(options.since * 1e9))
    return Scope(
        since_ns=since,
        stamped_ns=stamped,
        own=options.own,
        replace=options.replace,
        repair=options.repair,
        max_bytes=options.max_bytes,
        max_entries=options.max_entries,
        dry_run=options.dry_run,
    )


def _pull_report(
    session: Session, view: View, plan: Plan, fetched: Fetched, *, environment: Environment, seconds: float
) -> PullReport:
    counters = session.backend.counters
    return PullReport(
        workload=session.workload,
        environment=environment.digest,
        installed=sum(fetched.installed.values()),
        present=plan.present,
        kept=plan.kept,
        incompatible=dict(sorted((plan.incompatible + fetched.incompatible).items())),
        refused=[*view.refused, *plan.refused, *fetched.refused],
        damaged=[*view.damaged, *fetched.damaged],
        missing=[*plan.missing, *fetched.missing],
        by_kind=dict(sorted(fetched.installed.items())),
        downloaded_bytes=counters.downloaded_bytes,
        plain_bytes=fetched.plain_bytes,
        requests=counters.requests,
        seconds=seconds,
        divergent=[f"{d.identity.kind} {d.identity.key}" for d in view.union.divergent],
        warnings=list(view.warnings),
    )
