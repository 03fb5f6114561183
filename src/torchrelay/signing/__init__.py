# SPDX-License-Identifier: Apache-2.0
"""Keys, the trust policy, and the one place that turns stored bytes into bytes for install.

``keys``, ``policy`` and ``verifier`` do no I/O; ``keyfiles`` and ``trust`` read and write files.
"""

from torchrelay.signing.keys import Ed25519Signer, PublicKey, Signer, comment_of, parse_public_key
from torchrelay.signing.policy import Policy, TrustedKey, dump_policy, parse_policy
from torchrelay.signing.verifier import (
    NOBODY,
    UNSIGNED,
    Admission,
    Refusal,
    Rule,
    VerifiedEntry,
    Verifier,
    named_signers,
    sign_batch,
    sign_checkpoint,
)

__all__ = [
    "NOBODY",
    "UNSIGNED",
    "Admission",
    "Ed25519Signer",
    "Policy",
    "PublicKey",
    "Refusal",
    "Rule",
    "Signer",
    "TrustedKey",
    "VerifiedEntry",
    "Verifier",
    "comment_of",
    "dump_policy",
    "named_signers",
    "parse_policy",
    "parse_public_key",
    "sign_batch",
    "sign_checkpoint",
]
