# SPDX-License-Identifier: Apache-2.0
"""The store of format 1 that every version must read, to the letter.

Nothing here writes: the expected names, digests and bytes stand below as they were when the store was
made (``tests/corpus/make_golden.py``). If this test fails, old stores have become unreadable; that is
what is to be mended, never the table.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from torchrelay.batch import parse_doomed, parse_segment
from torchrelay.digest import Digest, digest_of
from torchrelay.environment import parse_environment
from torchrelay.signing import Policy, Verifier
from torchrelay.signing.policy import parse_policy
from torchrelay.statement import is_blob_name
from torchrelay.storage import ObservedBackend
from torchrelay.store.doomed import read_doomed
from torchrelay.store.layout import parse_segment_name
from torchrelay.store.session import Session
from torchrelay.store.state import ClientState
from torchrelay.store.view import View, load_view
from torchrelay_memory import MemoryBackend

ROOT = Path(__file__).parent.parent / "corpus" / "golden" / "format-1"
WORKLOAD = "acme/golden"
TODAY = date(2026, 6, 15)

AVX2 = "manifests/acme/golden/34a6090a6c3046c90f4e703c8899d61d7c5ccee8a8387f8faa33faa266c1d16e"
AVX512 = "manifests/acme/golden/d3df3bcca6da51f12eb5fdae42b995ac658ddd6763ae098bb7e80c6cd03479bb"
# Folder and name apart, for the length of the lines.
_OBJECTS = [
    ("blobs/28", "28e99addcd278d0de51a13dc55ebd099d922c7e50439ebe077c3e6a13bac406a"),
    ("blobs/48", "48ca4e60bed5fea19686281b7be98012f60e00640119f72762f9e27abc45e584"),
    ("blobs/6f", "6fb8543883dafcc2ed0934866b8b3f775231f5b0933add08bf502e9e84944cbd"),
    ("blobs/74", "74f0a0f92899478ad583dfc01606459597774e487ae11ae7b271211b2caa82fe"),
    ("blobs/76", "767e3635b58ac0427646d0fcb62ef7d1d790d7f6e7b95b427dea406f129492be.2"),
    ("blobs/8c", "8c3e0393a950eba04f0c54308e30420a9bb12e0d7cd285494d31bca41e554f52"),
    ("blobs/b7", "b7380a13b9a7b768bbdfe828f0e488ff2a8e48dbb9a1d1bee8a754b36fd30bc4"),
    ("blobs/c9", "c97ae69c163ca8e015e8ade66c21f3a617660515be287cd1d868fa1d4e32b035"),
    ("blobs/dc", "dc39aea24eb6b70ca17be66bed5dae816cda297d5647eaee8612352df96e4abf"),
    ("blobs/ef", "ef6d102e0bdf6125cd7ce32004986cc662e2d17fd42bc223ef88619f9c27d6e1"),
    ("environments", "34a6090a6c3046c90f4e703c8899d61d7c5ccee8a8387f8faa33faa266c1d16e"),
    ("environments", "d3df3bcca6da51f12eb5fdae42b995ac658ddd6763ae098bb7e80c6cd03479bb"),
    ("gc", "09d82e9dcca13f501b0d856dbc36eaa108f191d13105a36a3eb3ae6437f0d012"),
    (AVX2, "496ba90c7245fba593b9c0e6ea17adbf77fc6759e9352c32e999319ba1626242"),
    (AVX512, "1a246e5c3176dc0f30edf60cb4053575e923f5d17f959a3d5bb51a34cde14fe7"),
    (AVX512, "3f5ca447edb9328dddb24bb2c9fbf57a544cb944916c727206161a99101d767d"),
    (AVX512, "73f94556be35ab0bbf6d2e6be3549fbbe8ab4c376b54fcb7f02d1567f1eed889"),
    (AVX512, "b8214e0c4a751f47458f2e3da4a096c98440b6f405bedec885541923fecc9cc7"),
    (AVX512, "c7e1a8f0774caf6ec419a548d95b3d5275a9f57ddd38624ec97066ac9adf95d9"),
    ("packs", "50d05224aa42776500efc7c6e049fb8881c0bab3d65a0bb09ee08f92a6707dac"),
]
OBJECTS = [f"{folder}/{name}" for folder, name in _OBJECTS]

PICKLE = "07be2e98b1332f8ede0bd67ca2487034b63c8823915568c20db479a69ae7cae9"
CPP = "edbc640b26203cf9d855b2e49d1b26da4f9a2ffda8e752a357135eeab97ec5b2"
GUARDS = "74a3c8269d4f06cfda871d5c16f06d9751ef8aca282f88a0be1cd896728dd84c"

# Identity: digest of the plain bytes, blob of the best record, signers, statements that it won against.
LIVE = {
    ("aot_autograd", "a" + "c" * 51, "", PICKLE): (
        "530f14693caae7798e8f9ec960da80d6bec7831857b7461837c30525da11f7e7",
        "blobs/28/28e99addcd278d0de51a13dc55ebd099d922c7e50439ebe077c3e6a13bac406a",
        {"writer"},
        0,
    ),
    ("autotune", "ab/" + "0" * 64 + ".best_config", "", PICKLE): (
        "257c1be96ae69f4b01c2c69bdb6d78605f59175819fb007d0bf245bf48444c4a",
        "blobs/48/48ca4e60bed5fea19686281b7be98012f60e00640119f72762f9e27abc45e584",
        {"second writer"},
        1,
    ),
    ("cpp", "c" + "ab2" * 17, "", CPP): (
        "7a28834b74af7dbdfd9c7be68653e89ccf53cb4895db1155244f42838b85bea9",
        "blobs/74/74f0a0f92899478ad583dfc01606459597774e487ae11ae7b271211b2caa82fe",
        {"writer"},
        0,
    ),
    ("future_kind", "any/key~", "", PICKLE): (
        "b96a929b25fe96c9c0d0774e6c1f8c8378e507fb825ace735040bf0e7523576a",
        "blobs/76/767e3635b58ac0427646d0fcb62ef7d1d790d7f6e7b95b427dea406f129492be.2",
        {"writer"},
        0,
    ),
    ("inductor", "f" + "g" * 51, GUARDS, PICKLE): (
        "c3ee697198bdcf6a6ad3857061699da646995969ae9c5368c236b21065c4b0e6",
        "blobs/ef/ef6d102e0bdf6125cd7ce32004986cc662e2d17fd42bc223ef88619f9c27d6e1",
        {"writer", "second writer"},
        0,
    ),
    ("pgo", "job_None_tag", "", PICKLE): (
        "69571bb8863251ee0930089db7b01835c68aa8cc7a9e8f63e445d2dd99e1ba5a",
        "blobs/c9/c97ae69c163ca8e015e8ade66c21f3a617660515be287cd1d868fa1d4e32b035",
        {"writer"},
        1,
    ),
    ("tree", "root/empty", "", PICKLE): (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "blobs/6f/6fb8543883dafcc2ed0934866b8b3f775231f5b0933add08bf502e9e84944cbd",
        {"writer"},
        0,
    ),
}
PLAIN = {
    "aot_autograd": b"withdrawn and readmitted",
    "autotune": b"{ }",
    "cpp": b"int main;\x7fELF1",
    "future_kind": b"of a kind that is not known",
    "inductor": b"\x80\x04canonical pickle of a graph" * 20,
    "pgo": b"shapes seen later",
    "tree": b"",
}
CHECKPOINT = Digest("73f94556be35ab0bbf6d2e6be3549fbbe8ab4c376b54fcb7f02d1567f1eed889")
WITHDRAWING = "ce3295ac"
PACK = "50d05224aa42776500efc7c6e049fb8881c0bab3d65a0bb09ee08f92a6707dac"
DOOMED = {
    "blobs/8c/8c3e0393a950eba04f0c54308e30420a9bb12e0d7cd285494d31bca41e554f52",
    "blobs/2d/2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881.1",
}


def policy() -> Policy:
    return parse_policy((ROOT / "trust.toml").read_text(encoding="utf-8"), "trust.toml")


@pytest.fixture
def session() -> Session:
    """The store's bytes behind a backend, as a client meets them."""
    backend = MemoryBackend("golden-format-1")
    for path in ROOT.rglob("*"):
        if path.is_file() and path.name != "trust.toml":
            backend.put(path.relative_to(ROOT).as_posix(), path.read_bytes())
    trusted = policy()
    verifier = Verifier(trusted, today=TODAY)
    return Session(ObservedBackend(backend), trusted, verifier, WORKLOAD, ClientState(None))


@pytest.fixture
def view(session: Session) -> View:
    return load_view(session)


def names_of(key_ids: frozenset[Digest]) -> set[str]:
    trusted = policy()
    found = {key_id: key for key_id in key_ids if (key := trusted.key(key_id))}
    return {key.name.removeprefix("TEST ") for key in found.values()}


def test_the_objects_are_all_there_under_their_names() -> None:
    found = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file())
    assert found == [*OBJECTS, "trust.toml"]
    for name in OBJECTS:
        stated = name.rpartition("/")[2].partition(".")[0]
        assert digest_of((ROOT / name).read_bytes()) == stated, name
        assert is_blob_name(name) or not name.startswith("blobs/")


def test_exactly_these_entries_live(view: View) -> None:
    assert not view.refused and not view.damaged and not view.warnings
    found = {
        tuple(identity): (
            live.statement.digest,
            live.vouched[0].record.stored.name,
            names_of(live.signers),
            len(live.others),
        )
        for identity, live in view.union.live.items()
    }
    assert found == LIVE
    assert view.union.highest_seq == 3 and view.union.outvoted == ()
    (divergence,) = view.union.divergent
    assert divergence.identity.kind == "autotune"


def test_every_byte_of_them_is_verified(session: Session, view: View) -> None:
    assert {tuple(identity) for identity in view.union.live} == LIVE.keys()
    for identity, live in view.union.live.items():
        for vouched in live.vouched:
            entry = session.verifier.open(live, (ROOT / vouched.record.stored.name).read_bytes())
            assert entry.plain == PLAIN[identity.kind]


def test_what_the_records_say(view: View) -> None:
    by_kind = {identity.kind: live for identity, live in view.union.live.items()}
    graph = by_kind["inductor"]
    assert graph.statement.canon == "pickle-1/torch-2.13"
    assert [(n.kind, n.key, n.variant) for n in graph.statement.needs] == [("cpp", "c" + "ab2" * 17, "")]
    assert [v.record.seq for v in graph.vouched] == [2, 1]
    assert graph.vouched[1].record.times == (17564153098, 0, -5)
    cpp = by_kind["cpp"]
    assert [file.size for file in cpp.statement.files] == [9, 4, 1]
    assert cpp.vouched[0].record.provenance == {"commit": "0123abc", "job": "nightly \u2713"}
    assert dict(cpp.requires) == {
        "cpu_flags": ("avx2", "avx512f"),
        "cpu_threads": 8,
        "glibc": "2.35",
        "machine": "x86_64",
    }
    assert by_kind["tree"].statement.files[0].name == "sub/\u00e9mpty"
    assert by_kind["future_kind"].vouched[0].record.stored.copy == 2


def test_the_checkpoint_and_its_pack(view: View) -> None:
    name = next(n for n in OBJECTS if n.endswith(CHECKPOINT))
    segment = parse_segment((ROOT / name).read_bytes(), name=CHECKPOINT)
    assert segment.checkpoint is not None
    assert segment.checkpoint.generation == 7
    assert [name[:8] for name in segment.checkpoint.supersedes] == ["3f5ca447", "b8214e0c"]
    assert [(b.digest[:8], len(b.records), len(b.header.records)) for b in segment.batches] == [
        ("fc63ad95", 4, 5),
        (WITHDRAWING, 0, 0),
    ]
    assert [item.digest for item in segment.batches[1].header.withdrawn] == [
        "deb28438f3b0835fc58912527dab961b6304c7458f24d474dc6943a87627c620",
        "*",
    ]
    data = (ROOT / "packs" / PACK).read_bytes()
    assert {at.name for at in view.packed.values()} == {f"packs/{PACK}"}
    for digest, at in view.packed.items():
        assert data[at.offset : at.offset + at.size] == (ROOT / "blobs" / digest[:2] / digest).read_bytes()


def test_the_checkpoint_alone_shows_its_part(session: Session) -> None:
    name = parse_segment_name(WORKLOAD, next(n for n in OBJECTS if n.endswith(CHECKPOINT)))
    assert name is not None
    admission = session.verifier.admit(
        (ROOT / str(name)).read_bytes(), name=name.digest, workload=WORKLOAD, environment=name.environment
    )
    assert admission.checkpoint_accepted and not admission.refused
    folded, _ = session.verifier.union([admission], workload=WORKLOAD)
    # The readmission stands in a later segment, the withdrawal in this one.
    assert {identity.kind for identity in folded.live} == {"cpp", "inductor", "pgo"}


def test_environments() -> None:
    found = {
        name: parse_environment((ROOT / name).read_bytes()) for name in OBJECTS if name.startswith("env")
    }
    assert [f"environments/{e.digest}" for e in found.values()] == list(found)
    assert {e.facets["cpu_isa"] for e in found.values()} == {"AVX512", "AVX2"}
    assert {"cpp_compiler": "g++ 12.2 \u00e9"} in [e.settings for e in found.values()]


def test_the_doomed_list(session: Session) -> None:
    assert read_doomed(session.backend) == DOOMED
    (name,) = (n for n in OBJECTS if n.startswith("gc/"))
    assert parse_doomed((ROOT / name).read_bytes(), name=Digest(name.removeprefix("gc/"))) == DOOMED


def test_without_its_policy_nothing_lives(session: Session) -> None:
    nobody = Session(session.backend, Policy(), Verifier(Policy(), today=TODAY), WORKLOAD, ClientState(None))
    view = load_view(nobody)
    assert not view.union.live and len(view.refused) == 8
    assert {problem.reason for problem in view.refused} == {"unknown-key"}
