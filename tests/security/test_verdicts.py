# SPDX-License-Identifier: Apache-2.0
"""The verifier as tables: what lies in the store, and what the policy says, to the verdict."""

from __future__ import annotations

import base64
import builtins
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchrelay import frame, manifest
from torchrelay.batch import (
    CHECKPOINT_TYPE,
    CheckpointHeader,
    Readmission,
    Signature,
    Withdrawal,
    encode_checkpoint,
    encode_header,
    encode_segment,
    pae,
)
from torchrelay.digest import Digest, digest_of
from torchrelay.errors import DamagedError, FormatError, TrustError
from torchrelay.signing import (
    NOBODY,
    UNSIGNED,
    Admission,
    Ed25519Signer,
    Policy,
    TrustedKey,
    Verifier,
    named_signers,
    sign_batch,
    sign_checkpoint,
)
from torchrelay.statement import Record, encode_record
from torchrelay.testing.entries import (
    ENVIRONMENT,
    TODAY,
    WORKLOAD,
    SegmentObject,
    make_header,
    make_record,
    make_segment,
    trusting,
)

ALICE, BOB, EVE = (Ed25519Signer.generate() for _ in range(3))
PLAIN = b"the canonical bytes of an entry " * 40
RECORD, BLOB = make_record(PLAIN)
OTHER_RECORD, OTHER_BLOB = make_record(b"other bytes " * 40, key="f" + "b" * 51)
BODY, SIGNATURE = sign_batch(ALICE, make_header([RECORD]))
LINES = [encode_record(RECORD)]


def segment(body: bytes, signature: Signature, lines: Sequence[bytes]) -> SegmentObject:
    stored = frame.compress(encode_segment(body, signature, lines))
    return SegmentObject(digest_of(stored), stored)


def admit(
    verifier: Verifier, found: SegmentObject, *, workload: str = WORKLOAD, environment: Digest = ENVIRONMENT
) -> Admission:
    return verifier.admit(found.stored, name=found.name, workload=workload, environment=environment)


def verdict(policy: Policy, found: SegmentObject, *, today: date = TODAY, **place: Any) -> str:
    """``accepted``, or the rule that refused the one batch."""
    admission = admit(Verifier(policy, today=today), found, **place)
    assert len(admission.accepted) + len(admission.refused) == 1
    if admission.accepted:
        return "accepted"
    (refusal,) = admission.refused
    assert refusal.detail and refusal.error().remedy
    return refusal.rule


def by(original: Signature, **changes: Any) -> Signature:
    return msgspec.structs.replace(original, **changes)


def flip(text: str) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[7] ^= 4
    return base64.b64encode(raw).decode()


@dataclass(frozen=True)
class Case:
    expected: str
    policy: Policy
    signature: Signature = SIGNATURE
    body: bytes = BODY
    place: str = WORKLOAD
    environment: Digest = ENVIRONMENT
    today: date = TODAY


GOOD = trusting(ALICE)
UNSIGNED_OK = {"accept_unsigned": True}
CASES = {
    "good": Case("accepted", GOOD),
    "no-policy-trusts-nobody": Case("unknown-key", Policy()),
    "only-another-key-trusted": Case("unknown-key", trusting(BOB)),
    # the place
    "other-workload-folder": Case("wrong-place", GOOD, place="acme/other"),
    "parent-workload-folder": Case("wrong-place", GOOD, place="acme"),
    "other-environment-folder": Case("wrong-place", GOOD, environment=digest_of(b"other")),
    "place-before-key": Case("wrong-place", Policy(), place="acme/other"),
    # the signature
    "bit-flipped": Case("bad-signature", GOOD, by(SIGNATURE, signature=flip(SIGNATURE.signature))),
    "empty-signature": Case("bad-signature", GOOD, by(SIGNATURE, signature="")),
    "half-a-signature": Case("bad-signature", GOOD, by(SIGNATURE, signature=SIGNATURE.signature[:44])),
    "not-base64": Case("bad-signature", GOOD, by(SIGNATURE, signature="?" * 88)),
    "line-end-in-base64": Case("bad-signature", GOOD, by(SIGNATURE, signature=SIGNATURE.signature + "\n")),
    "not-ascii": Case("bad-signature", GOOD, by(SIGNATURE, signature="é" * 88)),
    "of-another-batch": Case("bad-signature", GOOD, sign_batch(ALICE, make_header([OTHER_RECORD]))[1]),
    "of-the-same-records-elsewhere": Case(
        "bad-signature", GOOD, sign_batch(ALICE, make_header([RECORD], environment=digest_of(b"x")))[1]
    ),
    "under-another-trusted-name": Case(
        "bad-signature", trusting(ALICE, BOB), by(SIGNATURE, key_id=BOB.public_key.key_id)
    ),
    "under-an-unknown-name": Case("unknown-key", GOOD, by(SIGNATURE, key_id=EVE.public_key.key_id)),
    "eve-signs-as-alice": Case(
        "bad-signature",
        GOOD,
        by(sign_batch(EVE, make_header([RECORD]))[1], key_id=ALICE.public_key.key_id),
    ),
    "without-pae": Case(
        "bad-signature", GOOD, by(SIGNATURE, signature=base64.b64encode(ALICE.sign(BODY)).decode())
    ),
    "as-a-checkpoint": Case(
        "bad-signature",
        GOOD,
        by(SIGNATURE, signature=base64.b64encode(ALICE.sign(pae(CHECKPOINT_TYPE, BODY))).decode()),
    ),
    # the algorithm
    "other-algorithm": Case("algorithm", GOOD, by(SIGNATURE, algorithm="ecdsa-p256")),
    "algorithm-in-capitals": Case("algorithm", GOOD, by(SIGNATURE, algorithm="ED25519")),
    "algorithm-empty": Case("algorithm", GOOD, by(SIGNATURE, algorithm="")),
    "algorithm-none": Case("unsigned", GOOD, by(SIGNATURE, algorithm="none")),
    # unsigned
    "unsigned": Case("unsigned", GOOD, UNSIGNED),
    "unsigned-accepted": Case("accepted", trusting(ALICE, settings=UNSIGNED_OK), UNSIGNED),
    "unsigned-elsewhere": Case("wrong-place", trusting(settings=UNSIGNED_OK), UNSIGNED, place="acme/other"),
    "unknown-key-accepted-as-unsigned": Case("accepted", trusting(BOB, settings=UNSIGNED_OK)),
    "known-key-must-hold-all-the-same": Case(
        "bad-signature",
        trusting(ALICE, settings=UNSIGNED_OK),
        by(SIGNATURE, signature=flip(SIGNATURE.signature)),
    ),
    "revoked-is-not-unsigned": Case(
        "revoked", trusting(settings=UNSIGNED_OK).revoke(ALICE.public_key.key_id)
    ),
    # the key
    "revoked": Case("revoked", GOOD.revoke(ALICE.public_key.key_id)),
    "revoked-and-not-listed": Case("revoked", trusting(BOB).revoke(ALICE.public_key.key_id)),
    "another-revoked": Case("accepted", GOOD.revoke(BOB.public_key.key_id)),
    "last-day": Case("accepted", trusting(ALICE, not_after=TODAY)),
    "day-after": Case("expired", trusting(ALICE, not_after=TODAY - timedelta(1))),
    "expired-and-bad": Case(
        "bad-signature",
        trusting(ALICE, not_after=TODAY - timedelta(1)),
        by(SIGNATURE, signature=flip(SIGNATURE.signature)),
    ),
    # the workload
    "workload-exact": Case("accepted", trusting(ALICE, workloads=(WORKLOAD,))),
    "workload-star": Case("accepted", trusting(ALICE, workloads=("acme/*",))),
    "workload-second-pattern": Case("accepted", trusting(ALICE, workloads=("x", "acme/**"))),
    "workload-not-covered": Case("workload", trusting(ALICE, workloads=("acme/other", "demo"))),
    "workload-prefix-only": Case("workload", trusting(ALICE, workloads=("acme",))),
    # the role
    "writer-and-maintainer": Case("accepted", trusting(ALICE, roles=("writer", "maintainer"))),
    "maintainer-only-writes": Case("role", trusting(ALICE, roles=("maintainer",))),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_batch(case: Case) -> None:
    found = segment(case.body, case.signature, LINES)
    rule = verdict(case.policy, found, today=case.today, workload=case.place, environment=case.environment)
    assert rule == case.expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_refused_cannot_be_opened(case: Case) -> None:
    """Even by a caller who folds the refused batch himself."""
    verifier = Verifier(case.policy, today=case.today)
    found = segment(case.body, case.signature, LINES)
    admission = admit(verifier, found, workload=case.place, environment=case.environment)
    forced = [
        manifest.Accepted(batch, found.name, ALICE.public_key.key_id, maintainer=True)
        for batch in admission.segment.batches
    ]
    (live,) = manifest.union(forced).live.values()
    if case.expected == "accepted" and admission.accepted[0].key_id != NOBODY:
        assert verifier.open(live, BLOB).plain == PLAIN
    else:
        with pytest.raises(TrustError, match="no record of inductor"):
            verifier.open(live, BLOB)


def test_a_header_that_is_changed_after_signing_is_refused() -> None:
    header = make_header([OTHER_RECORD])
    found = segment(encode_header(header), SIGNATURE, [encode_record(OTHER_RECORD)])
    assert verdict(GOOD, found) == "bad-signature"


def test_one_bad_batch_does_not_take_the_others_with_it() -> None:
    header = checkpoint_header(batches=(1, 1))
    bad = (encode_header(make_header([OTHER_RECORD])), SIGNATURE, [encode_record(OTHER_RECORD)])
    found = checkpoint(ALICE, header, [bad, (BODY, SIGNATURE, LINES)])
    admission = admit(Verifier(trusting(ALICE, roles=("writer", "maintainer")), today=TODAY), found)
    assert [item.batch.header for item in admission.accepted] == [make_header([RECORD])]
    assert [refusal.rule for refusal in admission.refused] == ["bad-signature"]
    assert admission.checkpoint_accepted


@pytest.mark.parametrize("lines", [[], LINES * 2, [encode_record(OTHER_RECORD)], [LINES[0] + b" "]])
def test_records_that_the_header_does_not_list_are_damage(lines: list[bytes]) -> None:
    with pytest.raises(FormatError):
        verdict(GOOD, segment(BODY, SIGNATURE, lines))


@pytest.mark.parametrize("place", [WORKLOAD, "acme/elsewhere"])
def test_what_nobody_signed_names_no_signer(place: str) -> None:
    (refusal,) = admit(Verifier(GOOD, today=TODAY), segment(BODY, UNSIGNED, LINES), workload=place).refused
    assert (refusal.rule, refusal.key_id) == ("unsigned" if place == WORKLOAD else "wrong-place", "")


def test_another_name_is_damage() -> None:
    found = segment(BODY, SIGNATURE, LINES)
    with pytest.raises(DamagedError, match="digest that names it"):
        admit(Verifier(GOOD, today=TODAY), replace(found, name=digest_of(b"x")))


def test_a_refusal_names_subject_key_and_reason() -> None:
    found = segment(BODY, SIGNATURE, LINES)
    (refusal,) = admit(Verifier(Policy(), today=TODAY), found).refused
    assert refusal.subject == f"batch {digest_of(BODY)}"
    assert refusal.key_id == ALICE.public_key.key_id
    error = refusal.error()
    assert refusal.key_id in error.message and refusal.subject in error.message
    assert error.subject == refusal.subject


def test_nothing_is_remembered_across_policies() -> None:
    found = segment(BODY, SIGNATURE, LINES)
    for policy, expected in [(Policy(), "unknown-key"), (GOOD, "accepted"), (Policy(), "unknown-key")]:
        assert verdict(policy, found) == expected


def test_what_one_verifier_accepted_another_does_not_open() -> None:
    live = live_of(Verifier(GOOD, today=TODAY), [make_segment(ALICE, [RECORD])])
    for policy in (GOOD, Policy(), trusting(ALICE, settings=UNSIGNED_OK)):
        with pytest.raises(TrustError, match="no record"):
            Verifier(policy, today=TODAY).open(live, BLOB)


def test_today_is_a_date() -> None:
    with pytest.raises(TypeError):
        Verifier(GOOD, today=datetime(2026, 1, 1))


# --- checkpoints


def checkpoint_header(**changes: Any) -> CheckpointHeader:
    fields: dict[str, Any] = {
        "format": 1,
        "type": "checkpoint",
        "batches": (1,),
        "workload": WORKLOAD,
        "environment": ENVIRONMENT,
        "generation": 7,
        "supersedes": (),
        "packs": (),
    }
    return CheckpointHeader(**{**fields, **changes})


def checkpoint(
    signer: Ed25519Signer | Signature, header: CheckpointHeader, batches: Sequence[Any]
) -> SegmentObject:
    signature = signer if isinstance(signer, Signature) else sign_checkpoint(signer, header)[1]
    stored = frame.compress(encode_checkpoint(header, signature, batches))
    return SegmentObject(digest_of(stored), stored)


MAINTAINERS = Policy(
    (
        TrustedKey(ALICE.public_key, "alice"),
        TrustedKey(BOB.public_key, "bob", ("maintainer",)),
    )
)
HEADER = checkpoint_header()
CHECKPOINTS = {
    "by-a-maintainer": (BOB, HEADER, MAINTAINERS, ""),
    "by-a-writer": (ALICE, HEADER, MAINTAINERS, "role"),
    "by-a-stranger": (EVE, HEADER, MAINTAINERS, "unknown-key"),
    "unsigned": (UNSIGNED, HEADER, MAINTAINERS, "unsigned"),
    "unsigned-where-accepted": (UNSIGNED, HEADER, replace(MAINTAINERS, accept_unsigned=True), "unsigned"),
    "revoked": (BOB, HEADER, MAINTAINERS.revoke(BOB.public_key.key_id), "revoked"),
    "other-workload": (BOB, checkpoint_header(workload="acme/x"), MAINTAINERS, "wrong-place"),
    "other-environment": (BOB, checkpoint_header(environment=digest_of(b"x")), MAINTAINERS, "wrong-place"),
    "signature-of-another-generation": (
        sign_checkpoint(BOB, checkpoint_header(generation=6))[1],
        HEADER,
        MAINTAINERS,
        "bad-signature",
    ),
    "signature-of-a-batch": (
        Signature(
            algorithm="ed25519",
            key_id=BOB.public_key.key_id,
            signature=base64.b64encode(
                BOB.sign(
                    pae("application/vnd.torchrelay.batch.v1", msgspec.json.encode(HEADER, order="sorted"))
                )
            ).decode(),
        ),
        HEADER,
        MAINTAINERS,
        "bad-signature",
    ),
}


@pytest.mark.parametrize(("signer", "header", "policy", "rule"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoint(signer: Any, header: CheckpointHeader, policy: Policy, rule: str) -> None:
    found = checkpoint(signer, header, [(BODY, SIGNATURE, LINES)])
    admission = admit(Verifier(policy, today=TODAY), found)
    assert admission.checkpoint_accepted is (rule == "")
    assert [refusal.rule for refusal in admission.refused] == ([rule] if rule else [])
    # Its batches stand or fall by signatures of their own.
    assert [item.key_id for item in admission.accepted] == [ALICE.public_key.key_id]


def test_a_checkpoint_forges_no_entry() -> None:
    forged = (BODY.replace(b"acme/demo", b"acme/demp"), SIGNATURE, [])
    mine = (*sign_batch(EVE, make_header([OTHER_RECORD])), [encode_record(OTHER_RECORD)])
    found = checkpoint(BOB, checkpoint_header(batches=(0, 1)), [forged, mine])
    admission = admit(Verifier(MAINTAINERS, today=TODAY), found)
    assert admission.checkpoint_accepted and not admission.accepted
    assert [refusal.rule for refusal in admission.refused] == ["wrong-place", "unknown-key"]


def test_dead_records_may_be_left_out_of_a_checkpoint() -> None:
    body, signature = sign_batch(ALICE, make_header([RECORD, OTHER_RECORD]))
    found = checkpoint(BOB, HEADER, [(body, signature, [encode_record(OTHER_RECORD)])])
    verifier = Verifier(MAINTAINERS, today=TODAY)
    (live,) = verifier.union([admit(verifier, found)], workload=WORKLOAD)[0].live.values()
    assert verifier.open(live, OTHER_BLOB).record == OTHER_RECORD


# --- thresholds, authority and divergence, with the union


def live_of(verifier: Verifier, found: Sequence[SegmentObject]) -> manifest.Live:
    accepted = [item for one in found for item in admit(verifier, one).accepted]
    (live,) = manifest.union(accepted).live.values()
    return live


def two_keys(**settings: Any) -> Policy:
    return trusting(ALICE, BOB, settings={"thresholds": (("**", 2),), **settings})


CLAIMS = [msgspec.structs.replace(RECORD, seq=n) for n in range(1, 4)]
THRESHOLDS = {
    "one-key": ([(ALICE, [RECORD])], False),
    "one-key-two-segments": ([(ALICE, [CLAIMS[0]]), (ALICE, [CLAIMS[1]])], False),
    "one-key-two-records-in-a-batch": ([(ALICE, CLAIMS)], False),
    "two-keys": ([(ALICE, [CLAIMS[0]]), (BOB, [CLAIMS[1]])], True),
    "second-key-not-trusted": ([(ALICE, [CLAIMS[0]]), (EVE, [CLAIMS[1]])], False),
    "second-is-unsigned": ([(ALICE, [CLAIMS[0]]), (None, [CLAIMS[1]])], False),
}


@pytest.mark.parametrize(("pushes", "met"), THRESHOLDS.values(), ids=THRESHOLDS)
@pytest.mark.parametrize("unsigned", [False, True])
def test_threshold(pushes: Sequence[tuple[Any, list[Record]]], met: bool, unsigned: bool) -> None:
    verifier = Verifier(two_keys(accept_unsigned=unsigned), today=TODAY)
    found = []
    for signer, records in pushes:
        if signer is None:
            body, lines = encode_header(make_header(records)), [encode_record(record) for record in records]
            found.append(segment(body, UNSIGNED, lines))
        else:
            found.append(make_segment(signer, records))
    live = live_of(verifier, found)
    if met:
        assert verifier.open(live, BLOB).signers == {ALICE.public_key.key_id, BOB.public_key.key_id}
    else:
        with pytest.raises(TrustError, match="where 2 are needed"):
            verifier.open(live, BLOB)


def test_many_unsigned_pushes_are_one_nobody() -> None:
    verifier = Verifier(trusting(settings={"accept_unsigned": True}), today=TODAY)
    found = [make_segment(signer, [CLAIMS[n]]) for n, signer in enumerate((ALICE, BOB, EVE))]
    accepted = [item for one in found for item in admit(verifier, one).accepted]
    assert {item.key_id for item in accepted} == {NOBODY}
    assert not any(item.maintainer for item in accepted)
    (live,) = manifest.union(accepted).live.values()
    assert live.signers == {NOBODY}
    assert named_signers(live) == []
    assert verifier.open(live, BLOB).signers == {NOBODY}


def test_keys_over_different_bytes_do_not_add_up() -> None:
    evil, _ = make_record(b"evil" * 100)
    verifier = Verifier(two_keys(), today=TODAY)
    admissions = [admit(verifier, make_segment(ALICE, [RECORD])), admit(verifier, make_segment(BOB, [evil]))]
    view, refused = verifier.union(admissions, workload=WORKLOAD)
    assert not view.live
    assert [(refusal.rule, refusal.key_id) for refusal in refused] == [("threshold", "")]


def test_a_key_that_withdrew_its_word_is_not_among_the_vouching() -> None:
    gone = withdrawal(RECORD)
    verifier = Verifier(two_keys(), today=TODAY)
    found = [make_segment(ALICE, [RECORD]), make_segment(BOB, [RECORD], supersedes=(digest_of(b"x"),))]
    assert verifier.open(live_of(verifier, found), BLOB).plain == PLAIN
    live = live_of(verifier, [*found, make_segment(BOB, [], withdrawn=(gone,))])
    with pytest.raises(TrustError, match="by 1 keys where 2"):
        verifier.open(live, BLOB)


def withdrawal(record: Record, digest: str = "*") -> Withdrawal:
    kind, key, variant, requires = record.statement.identity
    return Withdrawal(kind=kind, key=key, variant=variant, requires=Digest(requires), digest=digest)


WITHDRAWALS = {
    "own": (ALICE, ("writer",), "*", False),
    "own-by-digest": (ALICE, ("writer",), RECORD.statement.digest, False),
    "own-other-digest": (ALICE, ("writer",), digest_of(b"other"), True),
    "another-writers": (BOB, ("writer",), "*", True),
    "by-a-maintainer": (BOB, ("maintainer",), "*", False),
    "by-a-maintainer-and-writer": (BOB, ("writer", "maintainer"), "*", False),
    "by-a-stranger": (EVE, (), "*", True),
}


@pytest.mark.parametrize(("signer", "roles", "digest", "lives"), WITHDRAWALS.values(), ids=WITHDRAWALS)
def test_withdrawal(signer: Ed25519Signer, roles: tuple[str, ...], digest: str, lives: bool) -> None:
    keys = [TrustedKey(ALICE.public_key)]
    if signer is BOB:
        keys.append(TrustedKey(BOB.public_key, roles=roles))
    verifier = Verifier(Policy(tuple(keys)), today=TODAY)
    found = [make_segment(ALICE, [RECORD]), make_segment(signer, [], withdrawn=(withdrawal(RECORD, digest),))]
    view, _ = verifier.union([admit(verifier, one) for one in found], workload=WORKLOAD)
    assert bool(view.live) is lives


def test_a_writer_cannot_lift_what_a_maintainer_withdrew() -> None:
    verifier = Verifier(MAINTAINERS, today=TODAY)
    gone = withdrawal(RECORD)
    header = make_header([], withdrawn=(gone,))
    lift = Readmission(**msgspec.structs.asdict(gone), lifts=digest_of(encode_header(header)))
    withdrawn = [make_segment(ALICE, [RECORD]), make_segment(BOB, [], withdrawn=(gone,))]
    for signer, lives in ((ALICE, False), (BOB, True)):
        found = [*withdrawn, make_segment(signer, [], readmit=(lift,))]
        view, _ = verifier.union([admit(verifier, one) for one in found], workload=WORKLOAD)
        assert bool(view.live) is lives


def test_an_entry_is_refused_once_where_it_is_both_outvoted_and_divergent() -> None:
    settings = {"divergent": "refuse", "thresholds": ((WORKLOAD, 2),)}
    other, _ = make_record(b"other code" * 50)
    verifier = Verifier(trusting(ALICE, BOB, settings=settings), today=TODAY)
    admissions = [admit(verifier, make_segment(ALICE, [RECORD])), admit(verifier, make_segment(BOB, [other]))]
    view, refused = verifier.union(admissions, workload=WORKLOAD)
    assert len(view.divergent) == len(view.outvoted) == 1 and not view.live
    assert [(refusal.rule, refusal.key_id) for refusal in refused] == [("threshold", "")]


@pytest.mark.parametrize("divergent", ["report", "refuse"])
def test_divergence(divergent: str) -> None:
    other, _ = make_record(b"other code" * 50)
    verifier = Verifier(trusting(ALICE, BOB, settings={"divergent": divergent}), today=TODAY)
    admissions = [admit(verifier, make_segment(ALICE, [RECORD])), admit(verifier, make_segment(BOB, [other]))]
    view, refused = verifier.union(admissions, workload=WORKLOAD)
    assert len(view.divergent) == 1
    assert bool(view.live) is (divergent == "report")
    expected = [("divergent", "")] if divergent == "refuse" else []
    assert [(refusal.rule, refusal.key_id) for refusal in refused] == expected


# --- a signer that fails


def test_a_signer_whose_answer_does_not_hold_publishes_nothing() -> None:
    class Confused:
        public_key = ALICE.public_key

        def sign(self, message: bytes) -> bytes:
            return BOB.sign(message)

    with pytest.raises(TrustError, match="does not hold under its own key"):
        sign_batch(Confused(), make_header([RECORD]))
    with pytest.raises(TrustError, match="does not hold under its own key"):
        sign_checkpoint(Confused(), HEADER)


def test_one_signature_for_any_number_of_entries() -> None:
    calls = []

    class Counting:
        public_key = ALICE.public_key

        def sign(self, message: bytes) -> bytes:
            calls.append(message)
            return ALICE.sign(message)

    records = [make_record(b"%d" % n, key=f"f{n:051d}")[0] for n in range(50)]
    sign_batch(Counting(), make_header(records))
    assert len(calls) == 1


# --- no file, no socket, no clock


def test_the_verdict_needs_no_file_socket_or_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(trusting(ALICE), today=TODAY)
    found = segment(BODY, SIGNATURE, LINES)
    live_of(Verifier(GOOD, today=TODAY), [found])  # what is imported late is imported now

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("I/O in the verifier")

    with monkeypatch.context() as patch:
        for module, name in [
            (builtins, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (socket, "socket"),
            (time, "time"), (time, "time_ns"), (Path, "open"), (os, "getenv"),
        ]:  # fmt: skip
            patch.setattr(module, name, forbidden)
        entry = verifier.open(live_of(verifier, [found]), BLOB)
        refused = admit(Verifier(Policy(), today=TODAY), found).refused
    assert entry.plain == PLAIN
    assert [refusal.rule for refusal in refused] == ["unknown-key"]


@pytest.mark.parametrize("module", ["keys", "policy", "verifier"])
def test_pure_modules_import_nothing_that_does_io(module: str) -> None:
    import ast

    import torchrelay.signing.verifier

    source = (Path(torchrelay.signing.verifier.__file__).parent / f"{module}.py").read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
            names |= {(node.module or "")} if (node.module or "").startswith("torchrelay") else set()
    assert not names & {"os", "io", "socket", "time", "pathlib", "subprocess", "pickle", "shutil", "tempfile"}
    assert not {name for name in names if name.startswith(("torchrelay.storage", "torchrelay.caches"))}
    assert not names & {"torchrelay.signing.files", "torchrelay.signing.keyfiles", "torchrelay.signing.trust"}
    assert "date.today" not in source and "datetime.now" not in source


def test_threads_may_share_a_verifier() -> None:
    verifier = Verifier(trusting(ALICE, BOB, settings={"thresholds": (("**", 2),)}), today=TODAY)
    found = [
        make_segment(signer, [RECORD], supersedes=(digest_of(b"%d" % n),))
        for n in range(8)
        for signer in (ALICE, BOB)
    ]
    results: list[Admission] = []
    threads = [threading.Thread(target=lambda one=one: results.append(admit(verifier, one))) for one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    accepted = [item for admission in results for item in admission.accepted]
    assert len(accepted) == len(found)
    # Batches of two keys with equal headers have one digest; see one key's alone too.
    first = next(item for item in accepted if item.key_id == ALICE.public_key.key_id)
    live = manifest.union([first]).live
    with pytest.raises(TrustError):
        verifier.open(next(iter(live.values())), BLOB)


# --- one header, two signers: its digest names the header, not who signed it


@pytest.mark.parametrize("order", [1, -1])
def test_a_writer_who_signs_a_maintainers_header_takes_nothing_from_it(order: int) -> None:
    verifier = Verifier(
        Policy((*MAINTAINERS.keys, TrustedKey(EVE.public_key, roles=("writer",)))), today=TODAY
    )
    gone = (withdrawal(RECORD),)
    copies = [make_segment(BOB, [], withdrawn=gone), make_segment(EVE, [], withdrawn=gone)]
    found = [make_segment(ALICE, [RECORD]), *copies[::order]]
    view, _ = verifier.union([admit(verifier, one) for one in found], workload=WORKLOAD)
    assert not view.live


def test_two_keys_over_one_header_are_two_signers() -> None:
    verifier = Verifier(two_keys(), today=TODAY)
    found = [make_segment(ALICE, [RECORD]), make_segment(BOB, [RECORD])]
    view, refused = verifier.union([admit(verifier, one) for one in found], workload=WORKLOAD)
    assert not refused
    (live,) = view.live.values()
    assert verifier.open(live, BLOB).signers == {ALICE.public_key.key_id, BOB.public_key.key_id}


@pytest.mark.parametrize("order", [1, -1])
def test_a_checkpoint_that_leaves_a_record_out_hides_none_that_a_segment_has(order: int) -> None:
    body, signature = sign_batch(ALICE, make_header([RECORD, OTHER_RECORD]))
    lines = [encode_record(RECORD), encode_record(OTHER_RECORD)]
    found = [segment(body, signature, lines), checkpoint(BOB, HEADER, [(body, signature, lines[:1])])]
    verifier = Verifier(MAINTAINERS, today=TODAY)
    view, _ = verifier.union([admit(verifier, one) for one in found[::order]], workload=WORKLOAD)
    assert len(view.live) == 2
