# SPDX-License-Identifier: Apache-2.0
"""What to do about each reason that a report gives."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.canonical.secrets import ENVIRONMENT_DUMP
from torchrelay.reports import Problem

_TRUST = {
    "unknown-key": "Run `torchrelay trust add` with the signer's public key, if you trust it.",
    "revoked": "Nothing to do: the key is revoked. Let a trusted key push the entries anew.",
    "unsigned": "Let its producer push it signed.",
    "bad-signature": "Somebody changed it, or it was damaged: find out who can write to the store.",
    "wrong-place": "Somebody moved it: find out who can write to the store.",
    "algorithm": "Somebody changed it, or it was damaged: find out who can write to the store.",
    "workload": "Allow it, if the key should sign this: `torchrelay trust add KEY --for PATTERN`.",
    "expired": "Extend the key: `torchrelay trust add KEY --not-after DATE`, or push with another.",
    "role": "Give the key the role: `torchrelay trust add KEY --role maintainer`, if it should have it.",
    "threshold": "Let another trusted builder push the same entries, or lower the threshold in the policy.",
    "divergent": "Withdraw the wrong one, or push the right one with --replace.",
    "requires": "Let its producer push it anew: it must say which torch and machine it was made for.",
    "rollback": "The store shows an older state than it did: find out who restored or replaced it.",
}
_DAMAGED = {
    "damaged": "Nothing of it was installed. The next push from a machine that has the entry heals it.",
}
_MISSING = {
    "deadline": "The deadline came first: pull again, what is installed is not fetched twice.",
    "needs": "It is of no use without what it needs. The next push from a machine that has that heals it.",
    "unreadable": "Check that the store is reachable and lets you read, then run the command again.",
    "absent": "The next push from a machine that has the entry heals it.",
}
_FAILED = {
    "upload": "Run the push again: what has arrived is not sent twice.",
}
_EXCLUDED = {
    "secret": "Keep the secret out of the compiled code or its environment, then compile again.",
    "unparseable": "Delete the file; it is compiled again when it is needed.",
    "too-large": "Nothing to do: the entry stays local.",
    "foreign-owner": "Use a cache directory of your own.",
    "unstable-key": "Set a job id of your own (TORCH_COMPILE_JOB_ID) to share profiles.",
    "other-vectors": "It was compiled under another ATEN_CPU_CAPABILITY; use a cache directory for each.",
    "growing": "Push again when the compile is done.",
    "locked": "Push again when the compile is done.",
}
_DUMP = (
    "PyTorch wrote environment variables into the file, and they can be masked only where an entry's layout "
    "is known. Of a tree, give the folder above `fxgraph` as --cache-dir in a push of its own; another file: "
    "delete it."
)
_FOUND_DAMAGED = (
    "In a store, the next push from a machine that has the entry heals it; in a cache directory, delete "
    "the file and pull again."
)
_TABLES = {
    "refused": (_TRUST, "Run `torchrelay trust list`; add the signer's key if you trust it."),
    "damaged": (_DAMAGED, _DAMAGED["damaged"]),
    "found damaged": ({}, _FOUND_DAMAGED),
    "missing": (_MISSING, _MISSING["absent"]),
    "failed": (_FAILED, _FAILED["upload"]),
    "excluded": (_EXCLUDED, ""),
}


def remedies(section: str, problems: Iterable[Problem]) -> list[str]:
    """What to do about ``problems``, each remedy once, in the order of their first cause."""
    table, otherwise = _TABLES[section]
    found = dict.fromkeys(_of_dump(problem) or table.get(problem.reason, otherwise) for problem in problems)
    return [remedy for remedy in found if remedy]


def _of_dump(problem: Problem) -> str:
    found = problem.reason == "secret" and problem.detail.startswith(ENVIRONMENT_DUMP)
    return _DUMP if found else ""
