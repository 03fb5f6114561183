# SPDX-License-Identifier: Apache-2.0
"""The one choke point: bytes and a policy in, a verdict out. No file, no socket, no clock.

``docs/explanation/threat-model.md`` says what is promised. Bytes that are not what was signed raise
:class:`~torchrelay.errors.DamagedError`; a signature, name, binding or policy that does not hold is
a :class:`Refusal`, or a :class:`~torchrelay.errors.TrustError` where one entry is asked for.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Literal, NoReturn, final

from torchrelay import frame, manifest
from torchrelay.batch import (
    BATCH_TYPE,
    CHECKPOINT_TYPE,
    Batch,
    BatchHeader,
    CheckpointHeader,
    Segment,
    Signature,
    Signed,
    encode_checkpoint_header,
    encode_header,
    pae,
    parse_segment,
)
from torchrelay.digest import EMPTY_DIGEST, Digest, digest_of
from torchrelay.errors import DamagedError, KeyFileError, TrustError
from torchrelay.signing.keys import Signer, decode_base64
from torchrelay.signing.policy import MAINTAINER, WRITER, Policy, TrustedKey
from torchrelay.statement import Identity, Record, Statement

UNSIGNED = Signature(algorithm="none", key_id=EMPTY_DIGEST, signature="")
"""Stands where a signature must; accepted only by a policy with ``accept_unsigned``."""

NOBODY = UNSIGNED.key_id
"""Whom all unsigned batches are laid to, so that many of them never look like many signers."""

Rule = Literal[
    "wrong-place",
    "unsigned",
    "revoked",
    "unknown-key",
    "algorithm",
    "bad-signature",
    "workload",
    "expired",
    "role",
    "threshold",
    "divergent",
    "rollback",
]
"""Which rule refused; in this order they are tried."""

_SEAL = object()


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was refused, by which rule, and whose it claims to be.

    Attributes:
        subject: ``batch <digest>``, ``checkpoint <segment>``, or an entry's kind and key.
        rule: The first rule that did not hold.
        key_id: The key named by the signature, empty where no single key is meant; it proves nothing
            unless the rule is one that is tried after ``bad-signature``.
        detail: A sentence for people.
    """

    subject: str
    rule: Rule
    key_id: Digest | Literal[""]
    detail: str

    def error(self) -> TrustError:
        """The refusal as an error."""
        return TrustError(f"{self.subject} is refused ({self.rule}): {self.detail}", subject=self.subject)


@dataclass(frozen=True, slots=True)
class Admission:
    """A segment that was read, and what of it counts.

    Attributes:
        segment: As read; what it holds beside ``accepted`` must not be used.
        accepted: Batches that the policy accepts.
        refused: The others, and the checkpoint's header if it is refused.
        checkpoint_accepted: The segment is a checkpoint and a maintainer's key signed its header:
            generation, ``supersedes`` and packs count. Its batches count by their own signatures.
    """

    segment: Segment
    accepted: tuple[manifest.Accepted, ...]
    refused: tuple[Refusal, ...]
    checkpoint_accepted: bool = False


@final
class VerifiedEntry:
    """Bytes that the policy lets in, with the record that vouches for them.

    Only :meth:`Verifier.open` makes one; code that installs takes nothing else. It can be neither
    made, changed, subclassed, copied nor unpickled anywhere else, so holding one is the proof. That
    is a guard against mistakes: code that already runs in this process can do as it likes.
    """

    __slots__ = ("__plain", "__record", "__seal", "__signers")

    __plain: bytes
    __record: Record
    __seal: object
    __signers: frozenset[Digest]

    def __init__(self, record: Record, plain: bytes, signers: frozenset[Digest], *, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a VerifiedEntry is only made by Verifier.open")
        for name, value in (("plain", plain), ("record", record), ("signers", signers), ("seal", seal)):
            object.__setattr__(self, f"_VerifiedEntry__{name}", value)

    def __check(self) -> None:
        if getattr(self, "_VerifiedEntry__seal", None) is not _SEAL:
            raise TypeError("this VerifiedEntry did not come from Verifier.open")

    @property
    def record(self) -> Record:
        """The record whose blob these bytes are."""
        self.__check()
        return self.__record

    @property
    def statement(self) -> Statement:
        """What is claimed of the entry, by every signer."""
        return self.record.statement

    @property
    def plain(self) -> bytes:
        """The canonical bytes: of the signed size and digest."""
        self.__check()
        return self.__plain

    @property
    def signers(self) -> frozenset[Digest]:
        """Ids of the distinct keys that vouch for the statement."""
        self.__check()
        return self.__signers

    def __repr__(self) -> str:
        statement = self.statement
        return f"<VerifiedEntry {statement.kind} {statement.key} {statement.size} bytes>"

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("VerifiedEntry has no subclasses")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("a VerifiedEntry does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise TypeError("a VerifiedEntry does not change")

    def __copy__(self) -> NoReturn:
        raise TypeError("a VerifiedEntry is not copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a VerifiedEntry is not copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a VerifiedEntry is not pickled")

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a VerifiedEntry is not unpickled")


class Verifier:
    """Decides under one policy on one day; a changed policy needs a new one, so nothing is kept.

    It may be used by several threads. What it accepted it remembers by the bytes' digest, and
    :meth:`open` goes by that memory alone, never by what it is handed.
    """

    def __init__(self, policy: Policy, *, today: date) -> None:
        """``today`` is the date in UTC; only ``not_after`` is held against it."""
        if isinstance(today, datetime):
            raise TypeError("today is a date, not a time")
        self.policy = policy
        self._today = today
        self._lock = threading.Lock()
        self._admitted: dict[Digest, tuple[Record, frozenset[Digest]]] = {}

    def admit(self, stored: bytes, *, name: Digest, workload: str, environment: Digest) -> Admission:
        """Read the segment ``manifests/<workload>/<environment>/<name>`` and judge its batches.

        Args:
            stored: The object's bytes.
            name: Its name, the digest that the bytes must have.
            workload: The folder that it lies in.
            environment: Likewise.

        Raises:
            DamagedError: The bytes are not those that the name promises, or not a segment.
            FormatError: They break a rule of the format, or are of a newer one.
        """
        segment = parse_segment(stored, name=name)
        place = (workload, environment)
        accepted: list[manifest.Accepted] = []
        refused: list[Refusal] = []
        checkpoint = segment.checkpoint is not None and self._admit_checkpoint(segment, place, refused)
        for batch in segment.batches:
            verdict = self._judge_batch(batch, place)
            if isinstance(verdict, Refusal):
                refused.append(verdict)
            else:
                key_id, maintainer = verdict
                accepted.append(manifest.Accepted(batch, name, key_id, maintainer))
        self._remember(accepted)
        return Admission(segment, tuple(accepted), tuple(refused), checkpoint)

    def open(self, live: manifest.Live, stored: bytes | memoryview) -> VerifiedEntry:
        """The entry whose blob is ``stored``, checked to the last byte.

        Args:
            live: The entry wanted, from :func:`torchrelay.manifest.union` over what :meth:`admit`
                of this verifier accepted.
            stored: The blob as it came from the store. Any of the records that vouch for the entry
                may be the one that it belongs to.

        Raises:
            TrustError: This verifier accepted no record of it, or too few keys vouch for it.
            DamagedError: The bytes are not those that were signed.
        """
        records, signers = self._vouching(live)
        record = _fitting(records, stored, live.statement)
        statement = record.statement
        label = f"blob {record.stored.name}"
        plain = frame.decompress(stored, size=statement.size, name=label)
        if digest_of(plain) != statement.digest:
            raise DamagedError(f"{label} does not hold the bytes that were signed", subject=label)
        return VerifiedEntry(record, plain, signers, seal=_SEAL)

    def objection(self, key_id: Digest, workload: str) -> tuple[Rule, str] | None:
        """The rule by which entries that this key signs for ``workload`` are refused, and why.

        The very rule that :meth:`admit` applies, so that a push can ask before it uploads.
        """
        if key_id in self.policy.revoked:
            return "revoked", f"key {key_id} is revoked"
        key = self.policy.key(key_id)
        if key is None:
            unknown: tuple[Rule, str] = "unknown-key", f"key {key_id} is not in the trust policy"
            return None if self.policy.accept_unsigned else unknown
        return self._policy_rule(key, workload, WRITER)

    def requires_threshold(self, workload: str) -> int:
        """How many distinct keys must vouch for a statement of ``workload``."""
        return self.policy.threshold(workload)

    def union(
        self, admissions: Iterable[Admission], *, workload: str
    ) -> tuple[manifest.Union, tuple[Refusal, ...]]:
        """What ``workload`` holds for this policy, and the entries that it refuses.

        As :func:`torchrelay.manifest.union` with the policy's threshold; where the policy refuses
        divergent entries they are not live.
        """
        accepted = [item for admission in admissions for item in admission.accepted]
        view = manifest.union(accepted, threshold=self.requires_threshold(workload))
        needed = f"fewer than {self.requires_threshold(workload)} trusted keys vouch for the same bytes"
        refused = [Refusal(_entry(identity), "threshold", "", needed) for identity in view.outvoted]
        if self.policy.divergent == "refuse":
            gone = {item.identity for item in view.divergent}.difference(view.outvoted)
            view = replace(view, live={key: live for key, live in view.live.items() if key not in gone})
            detail = "trusted keys vouch for different bytes under one identity"
            refused += [Refusal(_entry(identity), "divergent", "", detail) for identity in sorted(gone)]
        return view, tuple(refused)

    def _admit_checkpoint(self, segment: Segment, place: tuple[str, str], refused: list[Refusal]) -> bool:
        header, signed = segment.checkpoint, segment.checkpoint_signed
        if header is None or signed is None:
            return False
        subject = f"checkpoint {segment.name}"
        found = (header.workload, header.environment)
        verdict = self._judge(signed, subject, CHECKPOINT_TYPE, place=place, found=found, role=MAINTAINER)
        if isinstance(verdict, Refusal):
            refused.append(verdict)
        return not isinstance(verdict, Refusal)

    def _judge_batch(self, batch: Batch, place: tuple[str, str]) -> tuple[Digest, bool] | Refusal:
        """Whose batch it is and whether that key is a maintainer's."""
        header = batch.header
        subject = f"batch {batch.digest}"
        found = (header.workload, header.environment)
        # Entries need a writer; withdrawing one's own needs no role beyond being trusted.
        role = WRITER if header.records else None
        return self._judge(batch.signed, subject, BATCH_TYPE, place=place, found=found, role=role)

    def _judge(
        self,
        signed: Signed,
        subject: str,
        payload_type: str,
        *,
        place: tuple[str, str],
        found: tuple[str, str],
        role: str | None,
    ) -> tuple[Digest, bool] | Refusal:
        def refuse(rule: Rule, detail: str) -> Refusal:
            return Refusal(subject, rule, _claimed(signed.signature), detail)

        if found != place:
            return refuse("wrong-place", f"it was signed for {found[0]}/{found[1]}, not for where it lies")
        key = self._key(signed.signature, refuse)
        if isinstance(key, Refusal):
            return key
        if key is None:
            return (NOBODY, False) if role != MAINTAINER else refuse("unsigned", "a maintainer must sign it")
        if not _holds(signed, payload_type, key):
            return refuse("bad-signature", f"the signature is not one of key {_named(key)} over these bytes")
        rule = self._policy_rule(key, place[0], role)
        return refuse(*rule) if rule else (key.key_id, MAINTAINER in key.roles)

    def _key(
        self, signature: Signature, refuse: Callable[[Rule, str], Refusal]
    ) -> TrustedKey | Refusal | None:
        """The key to check with; None where the policy wants no signature."""
        if signature.key_id in self.policy.revoked:
            return refuse("revoked", f"key {signature.key_id} is revoked")
        key = self.policy.key(signature.key_id)
        if signature.algorithm == UNSIGNED.algorithm or key is None:
            if self.policy.accept_unsigned:
                return None
            if signature.algorithm == UNSIGNED.algorithm:
                return refuse("unsigned", "it is not signed")
            return refuse("unknown-key", f"key {signature.key_id} is not in the trust policy")
        if signature.algorithm != key.public_key.algorithm:
            return refuse("algorithm", f"it names another algorithm than key {_named(key)} has")
        return key

    def _policy_rule(self, key: TrustedKey, workload: str, role: str | None) -> tuple[Rule, str] | None:
        if not key.covers(workload):
            return "workload", f"key {_named(key)} may not sign {workload}"
        if key.expired(self._today):
            return "expired", f"key {_named(key)} was valid up to {key.not_after}"
        if role is not None and role not in key.roles:
            return "role", f"key {_named(key)} is no {role}"
        return None

    def _remember(self, accepted: Iterable[manifest.Accepted]) -> None:
        with self._lock:
            for item in accepted:
                signer = frozenset({item.key_id})
                for digest, record in item.batch.records:
                    known = self._admitted.get(digest)
                    self._admitted[digest] = (known[0], known[1] | signer) if known else (record, signer)

    def _vouching(self, live: manifest.Live) -> tuple[list[Record], frozenset[Digest]]:
        """The accepted records of the statement and their keys; the threshold must be met."""
        records: list[Record] = []
        signers: set[Digest] = set()
        for vouched in live.vouched:
            record, keys = self._admitted.get(vouched.digest, (None, frozenset()))
            # By pair: a key that has withdrawn its word on these bytes is not among the vouching.
            if record is not None and record.statement == live.statement and vouched.key_id in keys:
                records.append(record)
                signers.add(vouched.key_id)
        subject = _entry(live.statement.identity)
        if not records:
            raise TrustError(f"no record of {subject} was accepted by the trust policy", subject=subject)
        needed = self.requires_threshold(live.statement.workload)
        # Nobody in particular is no further signer.
        if needed > 1 and len(signers - {NOBODY}) < needed:
            raise TrustError(
                f"{subject} is vouched for by {len(signers - {NOBODY})} keys where {needed} are needed",
                remedy="Let another trusted builder push the same entry, or lower the threshold.",
                subject=subject,
            )
        return records, frozenset(signers)


def _holds(signed: Signed, payload_type: str, key: TrustedKey) -> bool:
    try:
        raw = decode_base64(signed.signature.signature)
    except KeyFileError:
        return False
    # The type is the one that this place asks for, never one that the bytes name.
    return key.public_key.verify(raw, pae(payload_type, signed.body))


def _fitting(records: list[Record], stored: bytes | memoryview, statement: Statement) -> Record:
    """The record whose blob ``stored`` is: by size first, so that rubbish is not even hashed."""
    sized = [record for record in records if record.stored.size == len(stored)]
    label = f"blob {records[0].stored.name}"
    if not sized:
        raise DamagedError(
            f"{label} has {len(stored)} bytes where {records[0].stored.size} were signed", subject=label
        )
    digest = digest_of(stored)
    for record in sized:
        if record.stored.digest == digest:
            return record
    label = f"blob {sized[0].stored.name}"
    raise DamagedError(
        f"{label} does not have the digest that was signed for {_entry(statement.identity)}", subject=label
    )


def _claimed(signature: Signature) -> Digest | Literal[""]:
    """Whose signature it says that it is; where there is none the digest only fills the place."""
    return "" if signature.algorithm == UNSIGNED.algorithm else signature.key_id


def named_signers(live: manifest.Live) -> list[Digest]:
    """Ids of the keys that vouch for an entry, sorted; nobody is not one of them."""
    return sorted(live.signers - {NOBODY})


def _entry(identity: Identity) -> str:
    return f"{identity.kind} {identity.key}"


def _named(key: TrustedKey) -> str:
    return f"{key.key_id[:16]} ({key.name})" if key.name else key.key_id[:16]


def sign_batch(signer: Signer, header: BatchHeader) -> tuple[bytes, Signature]:
    """The header's bytes and one signature over them, which covers every record it lists.

    Raises:
        FormatError: The header breaks a rule of the format.
        TrustError: The signer's answer does not hold under its own public key.
    """
    body = encode_header(header)
    return body, _sign(signer, BATCH_TYPE, body)


def sign_checkpoint(signer: Signer, header: CheckpointHeader) -> tuple[bytes, Signature]:
    """The checkpoint header's bytes, as :func:`~torchrelay.batch.encode_checkpoint` writes them,
    and the signature over them.

    Raises:
        FormatError: The header breaks a rule of the format.
        TrustError: As :func:`sign_batch`.
    """
    body = encode_checkpoint_header(header)
    return body, _sign(signer, CHECKPOINT_TYPE, body)


def _sign(signer: Signer, payload_type: str, body: bytes) -> Signature:
    key = signer.public_key
    message = pae(payload_type, body)
    raw = signer.sign(message)
    # A key service that answers with another key's signature is noticed here, not by every reader.
    if not key.verify(raw, message):
        raise TrustError(
            f"the signer's answer does not hold under its own key {key.key_id}",
            remedy="Check that --key and the key service's public key belong together.",
            subject=key.key_id,
        )
    return Signature(
        algorithm=key.algorithm, key_id=key.key_id, signature=base64.b64encode(raw).decode("ascii")
    )


__all__ = [
    "NOBODY",
    "UNSIGNED",
    "Admission",
    "Refusal",
    "Rule",
    "VerifiedEntry",
    "Verifier",
    "named_signers",
    "sign_batch",
    "sign_checkpoint",
]
