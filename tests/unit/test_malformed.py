# SPDX-License-Identifier: Apache-2.0
"""``tests/corpus/malformed``: objects that break one rule each. Each is refused by that rule, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.batch import parse_doomed, parse_segment
from torchrelay.digest import digest_of
from torchrelay.errors import DamagedError, FormatError
from torchrelay.signing import Policy, Verifier
from torchrelay.storage import ObservedBackend
from torchrelay.store.doomed import read_doomed
from torchrelay.store.session import Session
from torchrelay.store.state import ClientState
from torchrelay.store.view import load_view
from torchrelay.testing.entries import ENVIRONMENT, TODAY
from torchrelay_memory import MemoryBackend
from torchrelay_memory.backend import forget

FOLDER = Path(__file__).parent.parent / "corpus" / "malformed"

# What the message must say; a FormatError unless it stands among the frames.
CASES = {
    "checkpoint-negative-generation": "holds the number -1, out of bounds",
    "checkpoint-overlapping-pack": "has a pack whose blobs overlap or leave it",
    "checkpoint-unsigned": "line 2 is not valid",
    "doomed-manifest": "holds 'manifests/acme/2d711642b726b04",
    "doomed-newer-format": "is of format 2",
    "doomed-outside": "holds '../outside', which is no blob",
    "doomed-twice": "is not sorted and distinct",
    "header-digest-as-workload": "line 2: '2d711642b726b04401627ca9fbac32",
    "header-dot-dot-workload": "line 2: 'acme/../other' is not a workload name",
    "header-duplicate-member": "line 2 is not canonical JSON",
    "header-false-requires": "line 2 has a table of requirements under a wrong digest",
    "header-unknown-member": "line 2 is not valid",
    "record-blob-outside": "line 4 holds '../11642b726b04401627ca9fbac32",
    "record-file-300-characters": "line 4: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "record-file-absolute": "line 4: '/etc/passwd' is not allowed as a file name",
    "record-file-backslash": "line 4: '..\\\\x' is not allowed as a file name",
    "record-file-dot-dot": "line 4: '../../.ssh/authorized_keys' is not allowed as a file name",
    "record-file-is-a-folder": "line 4 has a file that is another one's folder",
    "record-file-nul": "line 4: 'a\\x00b' is not allowed as a file name",
    "record-file-right-to-left": "line 4: 'a\\u202eb' is not allowed as a file name",
    "record-file-twice": "line 4 names a file twice",
    "record-float": "line 4 is not valid",
    "record-key-with-line-feed": "line 4 names no possible entry: 'inductor', 'a\\nb'",
    "record-lone-surrogate": "line 4 is not valid",
    "record-number-beyond-2-53": "line 4 holds the number 9007199254740992, out of bounds",
    "record-other-codec": "line 4 uses the unknown codec 'none'",
    "record-sizes-do-not-add-up": "line 4 has files whose sizes do not add up to the entry's",
    "segment-bomb": "inflates to 1073741824 bytes, more than the 67108864 allowed",
    "segment-bomb-that-lies": "cannot be decompressed",
    "segment-byte-order-mark": "is not valid",
    "segment-crlf": "is not canonical JSON",
    "segment-cut": "is not exactly one zstd frame of 1866 bytes",
    "segment-empty": "is not a zstd frame",
    "segment-hundred-million-records": "claims 100000000 records",
    "segment-line-feed-after": "is not exactly one zstd frame of 1866 bytes",
    "segment-million-levels": "is not valid",
    "segment-newer-format": "is of format 2",
    "segment-not-compressed": "is not a zstd frame",
    "segment-record-not-listed": "line 2 does not list the records that follow it",
    "segment-record-twice": "line 2 does not list the records that follow it",
    "segment-skippable-frame-after": "is not exactly one zstd frame of 1866 bytes",
    "segment-skippable-frame-before": "is not a zstd frame",
    "segment-smuggled-line": "goes on after its last record",
    "segment-states-a-byte-less": "cannot be decompressed",
    "segment-states-a-byte-more": "cannot be decompressed",
    "segment-two-frames": "is not exactly one zstd frame of 1866 bytes",
    "segment-window-128-mib": "asks for a zstd window of 134217728 bytes",
    "segment-without-last-line-feed": "does not end with a line feed",
}
FRAMES = {
    "segment-bomb",
    "segment-bomb-that-lies",
    "segment-cut",
    "segment-empty",
    "segment-line-feed-after",
    "segment-not-compressed",
    "segment-skippable-frame-after",
    "segment-skippable-frame-before",
    "segment-states-a-byte-less",
    "segment-states-a-byte-more",
    "segment-two-frames",
    "segment-window-128-mib",
}


def test_every_file_has_its_case() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CASES.keys() and CASES.keys() >= FRAMES


@pytest.mark.parametrize("name", CASES)
def test_malformed(name: str) -> None:
    stored = (FOLDER / name).read_bytes()
    digest = digest_of(stored)
    parse = parse_doomed if name.startswith("doomed") else parse_segment
    with pytest.raises(DamagedError) as caught:
        parse(stored, name=digest)
    error = caught.value
    assert type(error) is (DamagedError if name in FRAMES else FormatError)
    assert digest in error.message and digest in error.subject and error.remedy
    assert CASES[name] in error.message


@pytest.fixture
def session() -> Session:
    forget("malformed")
    policy = Policy(accept_unsigned=True)
    backend = ObservedBackend(MemoryBackend("malformed"))
    return Session(backend, policy, Verifier(policy, today=TODAY), "acme/demo", ClientState(None))


def test_in_a_store_each_is_reported_and_none_counts(session: Session) -> None:
    """Under a policy that would take any signature: only their form keeps them out."""
    names = set()
    for path in FOLDER.iterdir():
        if not path.name.startswith("doomed"):
            stored = path.read_bytes()
            name = f"manifests/acme/demo/{ENVIRONMENT}/{digest_of(stored)}"
            session.backend.put(name, stored)
            names.add(name)
    view = load_view(session)
    assert not view.union.live and not view.packed and not view.environments and not view.refused
    assert {problem.subject for problem in view.damaged} == names
    assert {problem.reason for problem in view.damaged} == {"damaged"}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("doomed")])
def test_a_push_stops_at_a_doomed_list_that_it_cannot_read(session: Session, name: str) -> None:
    stored = (FOLDER / name).read_bytes()
    session.backend.put(f"gc/{digest_of(stored)}", stored)
    with pytest.raises(DamagedError, match=digest_of(stored)):
        read_doomed(session.backend)
