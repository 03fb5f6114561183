# SPDX-License-Identifier: Apache-2.0
"""What push, pull and the rest report: typed, and with ``--json`` printed as they stand.

Field names are a contract (``docs/reference/json.md``). A report always adds up: every entry that
was looked at is in exactly one of the counts.
"""

from __future__ import annotations

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all reports."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command line: 3 refused, 1 damaged, missing or failed, 0 done."""
        return 0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One object that is not as it should be: which one, the rule or reason, and details."""

    subject: str
    reason: str
    detail: str = ""
    key_id: str = ""


class PushReport(Report, frozen=True):
    """What a push did.

    Attributes:
        workload: The name the entries were published under.
        environment: Digest of the producer's environment.
        pushed: Entries newly recorded, of which some may have needed no upload.
        held: Entries that the store holds already.
        covered: Entries whose identity the store holds with other bytes.
        divergent: Those of `covered`, and with `--own` or `--replace` of `pushed`, whose bytes should
            have been the same as the store's and are not.
        excluded: Entries and files left out, by reason.
        excluded_entries: What was left out for a reason worth a look (secrets, damage).
        masked: What was masked, by field and kind; never a value.
        by_kind: `pushed` by kind.
        blobs: Blobs uploaded.
        uploaded_bytes: Bytes sent, segment included.
        plain_bytes: Canonical bytes of the pushed entries, before compression.
        requests: Requests made to the store.
        segment: Name of the last segment published; empty if there was nothing to publish.
        segments: All segments published: usually one, more if one would be too large or a gc was at work.
        failed: Blobs that could not be uploaded; their entries were not recorded.
        refused: Objects of the workload that this policy does not accept.
        damaged: Objects of the workload that are not what was signed.
        warnings: What the user should know.
        dry_run: Nothing was written; the counts say what would have been.
        seconds: Wall time.
        error: Why it could not be done, where :class:`torchrelay.Relay` went on without it; else empty.
    """

    workload: str = ""
    environment: str = ""
    pushed: int = 0
    held: int = 0
    covered: int = 0
    divergent: list[str] = []
    excluded: dict[str, int] = {}
    excluded_entries: list[Problem] = []
    masked: dict[str, int] = {}
    by_kind: dict[str, int] = {}
    blobs: int = 0
    uploaded_bytes: int = 0
    plain_bytes: int = 0
    requests: int = 0
    segment: str = ""
    segments: list[str] = []
    failed: list[Problem] = []
    refused: list[Problem] = []
    damaged: list[Problem] = []
    warnings: list[str] = []
    dry_run: bool = False
    seconds: float = 0.0
    error: str = ""

    @property
    def exit_code(self) -> int:
        """1 if it or a blob failed; what others published wrongly is reported, not this push's failure."""
        return 1 if self.failed or self.error else 0


class PullReport(Report, frozen=True):
    """What a pull did.

    Attributes:
        workload: The name the entries were published under.
        environment: Digest of the environment that was pulled for.
        installed: Entries installed now.
        present: Entries that were installed or compiled here before, with the same bytes.
        kept: Local files of one's own that a pull would have replaced.
        incompatible: Entries that do not fit this machine, by facet.
        refused: What the policy does not accept, by rule and signer.
        damaged: Objects whose bytes are not what was signed; an entry may have been installed from another.
        missing: Entries whose blob, or an entry they need, is not there, and of which neither `damaged`
            nor `refused` tells.
        by_kind: `installed` by kind.
        downloaded_bytes: Bytes received.
        plain_bytes: Bytes installed.
        requests: Requests made to the store.
        seconds: Wall time.
        divergent: Identities that different signers gave different bytes.
        warnings: What the user should know.
        error: As in a push's report.
    """

    workload: str = ""
    environment: str = ""
    installed: int = 0
    present: int = 0
    kept: int = 0
    incompatible: dict[str, int] = {}
    refused: list[Problem] = []
    damaged: list[Problem] = []
    missing: list[Problem] = []
    by_kind: dict[str, int] = {}
    downloaded_bytes: int = 0
    plain_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0
    divergent: list[str] = []
    warnings: list[str] = []
    error: str = ""

    @property
    def exit_code(self) -> int:
        """3 if something was refused, else 1 if something was damaged or missing, or it failed."""
        if self.refused:
            return 3
        return 1 if self.damaged or self.missing or self.error else 0


class StatusReport(Report, frozen=True):
    """What a push and a pull would do, and what they stand on."""

    store: str = ""
    workload: str = ""
    environment: str = ""
    stamped: bool = False
    local: int = 0
    live: int = 0
    segments: int = 0
    to_push: int = 0
    to_pull: int = 0
    incompatible: dict[str, int] = {}
    refused: list[Problem] = []
    damaged: list[Problem] = []
    warnings: list[str] = []
    error: str = ""

    @property
    def exit_code(self) -> int:
        """As a pull's."""
        if self.refused:
            return 3
        return 1 if self.damaged or self.error else 0


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry, for `ls`, `show` and `explain`."""

    kind: str
    key: str
    variant: str
    requires: dict[str, str | int | tuple[str, ...]]
    digest: str
    size: int
    stored_size: int
    blob: str
    canon: str
    signers: list[str]
    seq: int
    needs: list[str]
    fits: bool | None = None


class ListReport(Report, frozen=True):
    """The live entries of a workload."""

    workload: str = ""
    entries: list[EntryInfo] = []
    segments: list[str] = []
    refused: list[Problem] = []
    damaged: list[Problem] = []


class DiffReport(Report, frozen=True):
    """Two sets of entries compared by identity: only left, only right, both, and both but differing.

    Attributes:
        refused: What the policy does not accept of what was compared, so it is on no side.
        damaged: Objects whose bytes are not what was signed; likewise.
    """

    left: str = ""
    right: str = ""
    only_left: list[str] = []
    only_right: list[str] = []
    differing: list[str] = []
    same: int = 0
    refused: list[Problem] = []
    damaged: list[Problem] = []


class VerifyReport(Report, frozen=True):
    """What a verification found.

    Attributes:
        checked: Objects, or with `--local` installed files' entries, that were read in full, and whatever
            the policy refuses: `good`, `unsigned`, `damaged`, `missing` and `refused` together.
        good: Those that are what was signed.
        unsigned: With `--local`: entries compiled here, or signed by nobody this policy trusts.
        damaged: Not what was signed.
        missing: Recorded, but not there, or not to be had.
        refused: Not accepted by the policy.
    """

    checked: int = 0
    good: int = 0
    unsigned: int = 0
    damaged: list[Problem] = []
    missing: list[Problem] = []
    refused: list[Problem] = []
    checked_bytes: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """3 if something was refused, else 1 if something was damaged or missing."""
        if self.refused:
            return 3
        return 1 if self.damaged or self.missing else 0


class FacetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One facet of an entry's requirements beside this machine's."""

    facet: str
    comparison: str
    needed: str
    here: str
    fits: bool
    remedy: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why entries of the same requirements would be installed here or not."""

    entries: int
    kinds: dict[str, int]
    fits: bool
    facets: list[FacetResult]


class ExplainReport(Report, frozen=True):
    """Facet by facet, why entries fit this machine or do not; and which settings differ."""

    workload: str = ""
    environment: str = ""
    groups: list[Explanation] = []
    settings: list[tuple[str, str, str]] = []
    hints: list[str] = []


class DemoRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way to start, measured: seconds to the first result, bytes moved, what was a hit."""

    way: str
    seconds: float
    bytes: int | None = None
    hits: int = 0
    misses: int = 0


class DemoCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the demonstration claims, and whether it held."""

    claim: str
    held: bool
    detail: str = ""


class DemoReport(Report, frozen=True):
    """What `torchrelay demo` measured and proved."""

    model: str = ""
    directory: str = ""
    rows: list[DemoRow] = []
    checks: list[DemoCheck] = []
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if a claim did not hold."""
        return 0 if all(check.held for check in self.checks) else 1
