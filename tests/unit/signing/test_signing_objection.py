# SPDX-License-Identifier: Apache-2.0
"""What a push asks before it uploads is what a reader decides afterwards."""

from __future__ import annotations

from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.signing import Ed25519Signer, Policy, TrustedKey, Verifier
from torchrelay.testing.entries import ENVIRONMENT, TODAY, WORKLOAD, make_record, make_segment

SIGNER = Ed25519Signer.generate()
SEGMENT = make_segment(SIGNER, [make_record(b"entry")[0]])

days = st.one_of(st.none(), st.integers(-400, 400).map(lambda n: TODAY + timedelta(days=n)))
keys = st.builds(
    TrustedKey,
    st.just(SIGNER.public_key),
    roles=st.sampled_from([("writer",), ("maintainer",), ("writer", "maintainer")]),
    workloads=st.sampled_from([("**",), ("acme/*",), ("acme/demo",), ("other/**",), ("acme/demo/*",)]),
    not_after=days,
)
policies = st.builds(
    Policy,
    keys=st.one_of(st.just(()), keys.map(lambda key: (key,))),
    revoked=st.sampled_from([frozenset(), frozenset({SIGNER.public_key.key_id})]),
    accept_unsigned=st.booleans(),
)


@given(policies)
def test_there_is_an_objection_exactly_if_readers_refuse_and_it_names_their_rule(policy: Policy) -> None:
    verifier = Verifier(policy, today=TODAY)
    objection = verifier.objection(SIGNER.public_key.key_id, WORKLOAD)
    admission = verifier.admit(SEGMENT.stored, name=SEGMENT.name, workload=WORKLOAD, environment=ENVIRONMENT)
    assert bool(admission.accepted) == (objection is None)
    assert [refusal.rule for refusal in admission.refused] == ([objection[0]] if objection else [])


def test_the_last_day_counts() -> None:
    policy = Policy((TrustedKey(SIGNER.public_key, not_after=TODAY),))
    key_id = SIGNER.public_key.key_id
    assert Verifier(policy, today=TODAY).objection(key_id, WORKLOAD) is None
    late = Verifier(policy, today=TODAY + timedelta(days=1)).objection(key_id, WORKLOAD)
    assert late is not None and late[0] == "expired" and str(date(2026, 6, 15)) in late[1]
