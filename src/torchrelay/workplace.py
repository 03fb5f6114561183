# SPDX-License-Identifier: Apache-2.0
"""One store, one workload and one set of cache directories, opened for one operation.

Here the parts meet: the directory's stamp, ledger and index; the user's key and policy; the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec.structs import replace as replace_fields

from torchrelay import directories
from torchrelay.batch import encode_requires
from torchrelay.caches import settings
from torchrelay.caches.base import Roots
from torchrelay.caches.index import Index
from torchrelay.caches.ledger import Ledger
from torchrelay.caches.local import LocalView
from torchrelay.caches.machine import this_environment, this_hints
from torchrelay.caches.mega import TYPES as MEGA_TYPES
from torchrelay.caches.registry import kinds_for
from torchrelay.caches.stamp import Stamp
from torchrelay.directories import scanned
from torchrelay.environment import Environment, requires_of
from torchrelay.errors import DamagedError, NotFoundError, StampError, TrustError, UsageError
from torchrelay.identity import own_directory, reading_policy, signing_credentials, today
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
from torchrelay.signing import Policy, Signer, Verifier
from torchrelay.storage import Location, ObservedBackend, RetryingBackend, open_backend
from torchrelay.store import look
from torchrelay.store.advice import settings_warnings
from torchrelay.store.check import verify_local, verify_store
from torchrelay.store.fetch import CacheDirectories, Fetch, Fetched
from torchrelay.store.mega import MegaSink, MegaSource, mega_file
from torchrelay.store.plan import Plan, keep_kinds, local_names, make_plan
from torchrelay.store.publish import Push, Scope
from torchrelay.store.session import Session, silent
from torchrelay.store.state import ClientState
from torchrelay.store.view import View, load_view

P = ParamSpec("P")
Timed = TypeVar("Timed", PushReport, PullReport, VerifyReport)


def _timed(work: Callable[P, Timed]) -> Callable[P, Timed]:
    """``work``, with all the time that it took in its report."""

    @wraps(work)
    def timed(*args: P.args, **kwargs: P.kwargs) -> Timed:
        started = time.monotonic()
        report = work(*args, **kwargs)
        return replace_fields(report, seconds=time.monotonic() - started)

    return timed


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

    @_timed
    def push(self, options: PushOptions) -> PushReport:
        """See :meth:`torchrelay.relay.Relay.push`."""
        roots = self._roots()
        directories.check_all(roots)
        found = signing_credentials(self.key, self.policy, self.workload, planned=options.dry_run)
        planned = directories.stamp_for_push(
            roots, replace(options, dry_run=True), in_process=self.in_process
        )
        keep = not options.dry_run
        with self._session(found.policy, create=True) as session, scanned(roots, planned, keep=keep) as local:
            since_ns = _scope(planned, options).since_ns
            directories.require_own_vectors(local, roots, planned.environment, since_ns)
            # Not before: a stamp that the directory disproves would stay.
            stamp = directories.stamp_for_push(roots, options, in_process=self.in_process)
            view = load_view(session, thorough=options.repair)
            if not options.all:
                directories.leave_out_older(local, roots)
            # Not before the scan: a pull beside this one notes what it installs before it does.
            ledger = directories.ledger_of(roots)
            report = self._planned(
                session, local, stamp=stamp, signer=found.signer, ledger=ledger, options=options
            ).run(view)
            told = [*found.notes, *settings_warnings(session, view, stamp.environment)]
            return replace_fields(report, warnings=[*report.warnings, *told])

    def _planned(
        self,
        session: Session,
        local: LocalView,
        *,
        stamp: Stamp,
        signer: Signer,
        ledger: Ledger,
        options: PushOptions,
    ) -> Push:
        return Push(
            session,
            local,
            environment=stamp.environment,
            signer=signer,
            ledger=ledger,
            scope=_scope(stamp, options),
            provenance=options.provenance,
        )

    @_timed
    def pull(self, options: PullOptions) -> PullReport:
        """See :meth:`torchrelay.relay.Relay.pull`."""
        started = time.monotonic()
        roots = self._roots()
        with self._session(reading_policy(self.policy)) as session:
            try:
                view = load_view(session)
            except NotFoundError as exc:
                if not self.in_process:
                    raise
                return self._pulled_nothing(roots, options, exc)
            lost: list[Problem] = []
            environment = options.environment or self._follow(session, view, lost)
            roots, stamp = directories.prepare(roots, environment, options)
            ledger = directories.ledger_of(roots)
            with scanned(roots, stamp) as local:
                live = view.union.live.values()
                known = roots.prefixes is not None
                plan = make_plan(live, local, environment, ledger, roots.trees, has_prefixes=known)
                deadline = None if options.deadline is None else started + options.deadline
                sink = CacheDirectories(roots, ledger, local.index, live)
                fetch = Fetch(session, sink, packed=view.packed, deadline=deadline)
                fetched = fetch.run(plan.install, plan.needers, local_names(local))
            told = settings_warnings(session, view, environment)
            report = _pull_report(session, view, plan, fetched, environment=environment)
            return replace_fields(
                report, damaged=[*report.damaged, *lost], warnings=[*report.warnings, *told]
            )

    def _pulled_nothing(self, roots: Roots, options: PullOptions, why: NotFoundError) -> PullReport:
        """The first run of all: this process fills the directory, and its push makes the store."""
        settings.skip_needless_headers()
        environment = options.environment or this_environment()
        directories.prepare(roots, environment, options)
        return PullReport(
            workload=self.workload,
            environment=environment.digest,
            warnings=[f"nothing to pull: {why.message}"],
        )

    # -- looking ---------------------------------------------------------------------------------

    def status(self) -> StatusReport:
        """See :meth:`torchrelay.relay.Relay.status`."""
        roots = self._roots()
        stamp = directories.stamp_of(roots.inductor)
        environment, told = _known_environment(stamp)
        with self._session(reading_policy(self.policy)) as session, scanned(roots, stamp) as local:
            view = load_view(session)
            plan = _pull_plan(view, local, environment, roots, told) if environment else Plan()
            to_push, hindrances = self._to_push(session, view, local, roots)
            told += settings_warnings(session, view, environment) if environment else []
            return StatusReport(
                store=session.backend.describe(),
                workload=self.workload,
                environment=environment.digest if environment else "",
                stamped=stamp is not None,
                local=len(local.items),
                live=len(view.union.live),
                segments=len(view.segments),
                to_push=to_push,
                to_pull=len(plan.install) + len(plan.needers),
                incompatible=dict(plan.incompatible),
                refused=[*view.refused, *plan.refused],
                damaged=list(view.damaged),
                warnings=[*view.warnings, *hindrances, *told],
            )

    def _to_push(self, session: Session, view: View, local: LocalView, roots: Roots) -> tuple[int, list[str]]:
        """How much a push would record, and what keeps it from doing so.

        A machine that only pulls has no key that anybody trusts, and its status is fine all the same.
        """
        if not local.items:
            return 0, []
        options = PushOptions(dry_run=True)
        try:
            directories.check_all(roots)
            stamp = directories.stamp_for_push(roots, options, in_process=self.in_process)
            found = signing_credentials(self.key, self.policy, self.workload, planned=True)
            since_ns = _scope(stamp, options).since_ns
            directories.require_own_vectors(local, roots, stamp.environment, since_ns)
            directories.leave_out_older(local, roots)
            ledger = directories.ledger_of(roots)
            report = self._planned(
                session, local, stamp=stamp, signer=found.signer, ledger=ledger, options=options
            ).run(view)
        except (UsageError, TrustError, DamagedError) as exc:
            return 0, [f"nothing can be pushed from here: {exc.message}"]
        return report.pushed, list(found.notes) if report.pushed else []

    def entries(self, environment: Environment | None) -> ListReport:
        """See :meth:`torchrelay.relay.Relay.entries`."""
        with self._session(reading_policy(self.policy)) as session:
            return look.list_entries(session, environment)

    def show(self, name: str) -> ListReport:
        """See :meth:`torchrelay.relay.Relay.show`."""
        with self._session(reading_policy(self.policy)) as session:
            return look.show(session, name)

    def diff(self, other: str | None) -> DiffReport:
        """See :meth:`torchrelay.relay.Relay.diff`."""
        with self._session(reading_policy(self.policy)) as session:
            if other is not None:
                return look.diff_workloads(session, other)
            roots = self._roots()
            stamp = directories.stamp_of(roots.inductor)
            with scanned(roots, stamp) as local:
                facets = {entry.meta.facets for entry in local.items}
                requires = {}
                if facets:  # what is compared with nothing needs no environment, and so no torch
                    environment = stamp.environment if stamp else this_environment()
                    requires = {n: encode_requires(requires_of(environment, n))[0] for n in facets}
                return look.diff_local(session, local, requires)

    def explain(self, name: str | None, environment: Environment | None) -> ExplainReport:
        """See :meth:`torchrelay.relay.Relay.explain`."""
        with self._session(reading_policy(self.policy)) as session:
            here, hints = self._this_or_stamped() if environment is None else (environment, [])
            known = bool(directories.all_prefixes(self._roots().inductor))
            return look.explain_entries(session, name, here, hints, trees=self.trees, has_prefixes=known)

    @_timed
    def verify(self, *, local: bool) -> VerifyReport:
        """See :meth:`torchrelay.relay.Relay.verify`."""
        with self._session(reading_policy(self.policy)) as session:
            if not local:
                return verify_store(session)
            roots = self._roots()
            directories.check_all(roots)
            # What a file holds is asked of the file, never of the index.
            with scanned(roots, directories.stamp_of(roots.inductor), fresh=True) as here:
                return verify_local(session, here, directories.ledger_of(roots), roots.inductor)

    # -- Mega-Cache ------------------------------------------------------------------------------

    @_timed
    def import_mega(self, path: Path, options: PushOptions) -> PushReport:
        """See :meth:`torchrelay.relay.Relay.import_mega`."""
        environment = _blob_environment(path, options)
        found = signing_credentials(self.key, self.policy, self.workload, planned=options.dry_run)
        source = MegaSource(path, environment)
        with self._session(found.policy, create=True) as session:
            view = load_view(session, thorough=options.repair)
            push = Push(
                session,
                source,
                environment=environment,
                signer=found.signer,
                # What a pull installed here and PyTorch saved again is still somebody else's.
                ledger=directories.ledger_of(self._roots()),
                scope=_scope(Stamp(environment, 0), options),
                provenance=options.provenance,
            )
            report = push.run(view)
            told = [*found.notes, *settings_warnings(session, view, environment)]
            return replace_fields(report, warnings=[*report.warnings, *told])

    @_timed
    def export_mega(self, path: Path, options: PullOptions) -> PullReport:
        """See :meth:`torchrelay.relay.Relay.export_mega`."""
        started = time.monotonic()
        with mega_file(path) as write, self._session(reading_policy(self.policy)) as session:
            view = load_view(session)
            environment = options.environment or this_environment()
            nothing = LocalView(kinds_for(None), Index.none())
            plan = make_plan(view.union.live.values(), nothing, environment, Ledger.none())
            sink = MegaSink()
            deadline = None if options.deadline is None else started + options.deadline
            keep_kinds(plan, MEGA_TYPES)
            fetch = Fetch(session, sink, packed=view.packed, deadline=deadline)
            fetched = fetch.run(plan.install, plan.needers, ())
            write(sink.encode())
            return _pull_report(session, view, plan, fetched, environment=environment)

    # -- where, and for whom ---------------------------------------------------------------------

    def _roots(self) -> Roots:
        private = (self.key, self._state_root(), own_directory())
        held = (path for path in private if path is not None)
        return directories.locate(self.cache_dir, self.triton_cache_dir, self.trees, held)

    def _this_or_stamped(self) -> tuple[Environment, list[str]]:
        """What a pull would pull for, and hints; where torch is not installed, what the stamp says."""
        stamp = directories.stamp_of(self._roots().inductor)
        stamped = stamp.environment if stamp else None
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

    # -- the store -------------------------------------------------------------------------------

    @contextmanager
    def _session(self, policy: Policy, *, create: bool = False) -> Iterator[Session]:
        location = Location.parse(self.url)
        backend = open_backend(self.url, options=self.options, create=create)
        with ObservedBackend(RetryingBackend(backend)) as observed:
            yield Session(
                backend=observed,
                policy=policy,
                verifier=Verifier(policy, today=today()),
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


def _known_environment(stamp: Stamp | None) -> tuple[Environment | None, list[str]]:
    """What a pull would pull for; None, and why, where nothing tells."""
    if stamp is not None:
        return stamp.environment, []
    try:
        return this_environment(), []
    except UsageError as exc:
        return None, [f"what would be pulled is not known, since the directory has no stamp: {exc.message}"]


def _pull_plan(view: View, local: LocalView, environment: Environment, roots: Roots, told: list[str]) -> Plan:
    try:
        ledger = directories.ledger_of(roots)
    except DamagedError as exc:
        ledger = Ledger.none()
        told.append(f"nothing can be pulled: {exc.message}")
    known = bool(directories.all_prefixes(roots.inductor))
    return make_plan(view.union.live.values(), local, environment, ledger, roots.trees, has_prefixes=known)


def _blob_environment(path: Path, options: PushOptions) -> Environment:
    """Where a Mega-Cache blob was made: said by whoever imports it, never taken from elsewhere.

    Raises:
        StampError: Nobody says.
        UsageError: Only newer entries are asked for, and a blob holds no times.
    """
    if options.since is not None:
        raise UsageError(
            "a Mega-Cache blob does not say when its entries were made, so `since` cannot be kept",
            remedy="Import all of it.",
            subject=str(path),
        )
    if options.environment is not None:
        return options.environment
    if options.assume_environment:
        return this_environment()
    raise StampError(
        "a Mega-Cache blob does not say where it was made",
        remedy="If this machine made it, import with --assume-environment this; else name the machine's "
        "document with --environment.",
        subject=str(path),
    )


def _this_hints() -> list[str]:
    try:
        hints = this_hints()
    except UsageError:
        return []
    return [f"{name}: {getattr(hints, name)}" for name in hints.__struct_fields__]


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
    session: Session, view: View, plan: Plan, fetched: Fetched, *, environment: Environment
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
        divergent=[f"{d.identity.kind} {d.identity.key}" for d in view.union.divergent],
        warnings=list(view.warnings),
    )
