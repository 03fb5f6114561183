# SPDX-License-Identifier: Apache-2.0
"""Entries that are signed properly, by a key that the reader trusts, and are hostile.

A signature says who, not what. So what a trusted signer sends still cannot leave the cache directory,
take unbounded memory, or leave a file there that no kind of cache writes.
"""

from __future__ import annotations

import base64
import dataclasses
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attack_world import ENVIRONMENT, SYSTEM, WORKLOAD, Machine, key, names_of, objects

import cache_samples
import canonical_entries
from torchrelay import canonjson, frame
from torchrelay.batch import BATCH_TYPE, BatchHeader, Signature, encode_requires, encode_segment, pae
from torchrelay.caches.bundle import FILES
from torchrelay.caches.triton import GROUP
from torchrelay.digest import digest_of
from torchrelay.reports import EntryInfo
from torchrelay.signing import Ed25519Signer, trust
from torchrelay.statement import File, Record, Statement, Stored, blob_name, statement_bytes
from torchrelay.testing.entries import make_record, make_segment

EVERYTHING = dict(ENVIRONMENT.facets)
VARIANT = digest_of(b"a variant")
KERNEL = cache_samples.KERNEL


@dataclasses.dataclass(frozen=True)
class Hostile:
    """An entry as Mallory signs it.

    Attributes:
        requires: The facets that it says it needs; stated by :func:`header_of` if they are all.
        kind, key, canon, variant, files: As in the statement; nothing of ours has looked at them.
        plain: What it is said to hold.
        blob: The stored bytes; by default one frame of ``plain``.
        said: Where a report must name it, and a word that must stand there.
    """

    kind: str = "inductor"
    key: str = key("f", 666)
    plain: bytes = b"\x80\x04N."
    canon: str = "raw"
    variant: str = VARIANT
    files: tuple[tuple[str, int], ...] = ()
    blob: bytes | None = None
    size: int | None = None
    times: tuple[int, ...] = ()
    where: str = "damaged"
    said: str = ""
    requires: dict[str, Any] = dataclasses.field(default_factory=lambda: EVERYTHING)

    def record(self) -> tuple[Record, bytes]:
        blob = frame.compress(self.plain) if self.blob is None else self.blob
        statement = Statement(
            format=1,
            canon=self.canon,
            workload=WORKLOAD,
            kind=self.kind,
            key=self.key,
            variant=self.variant,
            requires=encode_requires(self.requires)[0],
            needs=(),
            digest=digest_of(self.plain),
            size=len(self.plain) if self.size is None else self.size,
            files=tuple(File(name=name, size=size) for name, size in self.files),
        )
        stored = Stored(digest=digest_of(blob), size=len(blob), codec="zstd", copy=0)
        record = Record(
            format=1,
            statement=statement,
            stored=stored,
            times=self.times,
            seq=9,
            producer=ENVIRONMENT.digest,
            provenance={},
        )
        return record, blob


def signed(signer: Ed25519Signer, header: bytes) -> Signature:
    """A good signature over whatever it is."""
    raw = signer.sign(pae(BATCH_TYPE, header))
    text = base64.b64encode(raw).decode()
    return Signature(algorithm="ed25519", key_id=signer.public_key.key_id, signature=text)


def header_of(lines: list[bytes], **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "format": 1,
        "type": "batch",
        "workload": WORKLOAD,
        "environment": ENVIRONMENT.digest,
        "records": tuple(map(digest_of, lines)),
        "requires": {encode_requires(EVERYTHING)[0]: EVERYTHING},
        "withdrawn": (),
        "readmit": (),
        "supersedes": (),
    }
    return canonjson.encode(BatchHeader(**{**fields, **changes}))


def publish(store: Path, signer: Ed25519Signer, *entries: Hostile, **header: Any) -> str:
    """Put blobs and one segment behind torchrelay's back; the segment's name."""
    lines = []
    for entry in entries:
        record, blob = entry.record()
        lines.append(canonjson.encode(record))
        cache_samples.write(store / blob_name(record.stored.digest), blob)
    body = header_of(lines, **header)
    return put_segment(store, encode_segment(body, signed(signer, body), lines))


def put_segment(store: Path, plain: bytes, workload: str = WORKLOAD) -> str:
    stored = frame.compress(plain)
    name = f"manifests/{workload}/{ENVIRONMENT.digest}/{digest_of(stored)}"
    cache_samples.write(store / name, stored)
    return name


@pytest.fixture
def attack(world, tmp_path):
    """A store, a consumer who trusts producer and Mallory, and Mallory's key."""
    producer, store = world.copy(tmp_path / "w")
    mallory = Machine.make(tmp_path / "mallory", store).signer
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    trust.add_key(consumer.policy, mallory.public_key.text)
    return store, consumer, mallory


# -- blobs ----------------------------------------------------------------------------------------

PLAIN = b"\x80\x04N."
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"


def raw_frame(data: bytes, *, window_log: int, stated: int) -> bytes:
    """A frame with a window of 2^window_log bytes: one block of ``data`` as it is."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0x80, (window_log - 10) << 3]) + struct.pack("<I", stated)
    return head + struct.pack("<I", len(data) << 3 | 1)[:3] + data


def run_frame(count: int, *, stated: int) -> bytes:
    """A frame of 1,600 blocks at most, each a byte repeated 128 KiB times: 4 bytes for 131,072."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0x80, (23 - 10) << 3]) + struct.pack("<I", stated)
    blocks = [
        struct.pack("<I", (131072 << 3) | 2 | (number == count - 1))[:3] + b"\0" for number in range(count)
    ]
    return head + b"".join(blocks)


BLOBS: dict[str, Hostile] = {
    "bomb-that-states-its-size": Hostile(blob=frame.compress(bytes(200 << 20)), said="states"),
    "bomb-that-lies": Hostile(blob=run_frame(1600, stated=len(PLAIN)), said="decompressed"),
    "size-not-stated": Hostile(
        blob=b"\x28\xb5\x2f\xfd\x00\x58" + struct.pack("<I", 4 << 3 | 1)[:3] + PLAIN, said="size"
    ),
    "two-frames": Hostile(blob=frame.compress(PLAIN[:2]) + frame.compress(PLAIN[2:]), said="states"),
    "frame-and-another": Hostile(blob=frame.compress(PLAIN) + frame.compress(b""), said="one zstd frame"),
    "frame-and-rubbish": Hostile(blob=frame.compress(PLAIN) + b"x", said="one zstd frame"),
    "skippable-first": Hostile(blob=SKIPPABLE + frame.compress(PLAIN), said="zstd frame"),
    "skippable-last": Hostile(blob=frame.compress(PLAIN) + SKIPPABLE, said="one zstd frame"),
    "window-of-128-MiB": Hostile(blob=raw_frame(PLAIN, window_log=27, stated=4), said="window"),
    "other-bytes": Hostile(blob=frame.compress(b"\x80\x04K."), said="signed"),
    "not-compressed": Hostile(blob=PLAIN, said="zstd frame"),
    "empty": Hostile(blob=b"", said="zstd frame"),
    "dictionary": Hostile(
        blob=b"\x28\xb5\x2f\xfd\x21\x07\x04" + struct.pack("<I", 4 << 3 | 1)[:3] + PLAIN, said="dictionary"
    ),
}


def test_the_frames_made_by_hand_are_frames_but_for_what_is_wrong_with_them():
    assert frame.decompress(raw_frame(PLAIN, window_log=23, stated=4), size=4, name="x") == PLAIN
    assert frame.decompress(run_frame(3, stated=3 << 17), size=3 << 17, name="x") == bytes(3 << 17)


# -- names ----------------------------------------------------------------------------------------


def tree(*names: str) -> dict[str, Any]:
    return {
        "kind": "tree",
        "key": "vllm/rank_1",
        "canon": FILES,
        "variant": "",
        "plain": b"x" * len(names),
        "files": tuple((name, 1) for name in names),
    }


FILE_NAMES = {
    "parent": "../x",
    "parents": "../../../../../../../tmp/x",
    "absolute": "/tmp/abs",
    "NUL": "a\0b",
    "300-characters": "n" * 300,
    "backslash": "a\\b",
    "empty": "",
    "dot": ".",
    "line-feed": "a\nb",
    "nine-deep": "/".join("abcdefghi"),
    "surrogate": "a\udc80",
    "right-to-left": "a\u202eb",
}
"""No statement can name these: the segment breaks the format."""

REFUSED = {
    "hidden-file": Hostile(**tree(".bashrc")),
    "folder-in-a-name": Hostile(**tree("a/b")),
    "lock": Hostile(**tree("x.lock")),
    "temporary": Hostile(**tree("tmp.pid_1_x")),
    "tree-key-parent": Hostile(**{**tree("x"), "key": "vllm/../.."}),
    "tree-key-absolute": Hostile(**{**tree("x"), "key": "vllm//tmp"}),
    "tree-key-own-folder": Hostile(**{**tree("x"), "key": "vllm/.torchrelay"}),
    "tree-key-eight-deep": Hostile(**{**tree("x"), "key": "vllm/" + "/".join("abcdefgh")}),
    "inductor-parent": Hostile(key="../../../x"),
    "inductor-upper-case": Hostile(key="F" + "A" * 51),
    "inductor-short": Hostile(key="f" + "a" * 50),
    "inductor-with-files": Hostile(files=(("x", 4),)),
    "inductor-without-variant": Hostile(variant=""),
    "inductor-unknown-form": Hostile(canon="pickle-9/torch-9.9"),
    "aot-parent": Hostile(kind="aot_autograd", key="a/../../x"),
    "aot-other-file": Hostile(kind="aot_autograd", key=key("a", 666), files=(("evil", 4),)),
    "autotune-parent": Hostile(
        kind="autotune", key="../" + "a" * 64 + ".best_config", canon="json-1", variant=""
    ),
    "gemm-parent": Hostile(kind="gemm", key="../x", canon="json-1", variant=""),
    "pgo-slash": Hostile(kind="pgo", key="job/../../x_0_main", variant=""),
    "precompile-parent": Hostile(kind="precompile", key="../entry", variant=digest_of(PLAIN)),
    "precompile-other-variant": Hostile(kind="precompile", key="a" * 64),
    "cpp-parent": Hostile(kind="cpp", key="../c" + "a" * 51, canon=FILES, variant="", files=(("x.so", 4),)),
    "cpp-other-file": Hostile(kind="cpp", key=key("c", 1), canon=FILES, variant="", files=(("evil.so", 4),)),
    "cpp-other-kernels-file": Hostile(
        kind="cpp", key=key("c", 1), canon=FILES, variant="", files=((f"{key('c', 2)}.so", 4),)
    ),
    "triton-parent": Hostile(kind="triton", key="..", canon=FILES, variant="", files=(("x.so", 4),)),
    "triton-two-groups": Hostile(
        kind="triton",
        key=f"{cache_samples.HASH}/{KERNEL}",
        canon=GROUP,
        variant="",
        files=((f"{KERNEL}.json", 2), ("other.json", 1), (f"__grp__{KERNEL}.json", 1)),
    ),
    "triton-group-file-first": Hostile(
        kind="triton",
        key=f"{cache_samples.HASH}/{KERNEL}",
        canon=GROUP,
        variant="",
        files=((f"__grp__{KERNEL}.json", 2), (f"{KERNEL}.json", 2)),
    ),
}
"""The format allows them, their kind does not: refused before a byte is fetched."""


# -- contents -------------------------------------------------------------------------------------


def files(kind: str, key: str, canon: str, contents: dict[str, bytes], said: str) -> Hostile:
    return Hostile(
        kind=kind,
        key=key,
        canon=canon,
        variant="",
        plain=b"".join(contents.values()),
        files=tuple((name, len(data)) for name, data in contents.items()),
        said=said,
    )


def group(said: str, **changes: bytes) -> Hostile:
    """A Triton group; ``changes`` by the ending of a member, or ``group``."""
    described = f'{{"hash":"{cache_samples.HASH_HEX}"}}'.encode()
    members = {"cubin": cache_samples.elf(b"sass", machine=190, type_=2), "json": described, "ttir": b"ttir"}
    contents = {f"{KERNEL}.{end}": changes.get(end, data) for end, data in members.items()}
    body = canonjson.encode({"child_paths": {name: name for name in contents}})
    contents[f"__grp__{KERNEL}.json"] = changes.get("group", body)
    return files("triton", f"{cache_samples.HASH}/{KERNEL}", GROUP, contents, said)


def kernel(data: bytes) -> Hostile:
    name = key("c", 666)
    return files("cpp", name, FILES, {f"{name}.main.cpp": b"int x;", f"{name}.main.so": data}, "main.so")


ELF = cache_samples.elf(b"code" * 64)
PATHS = canonjson.encode({"child_paths": {f"{KERNEL}.json": "/etc/passwd"}})
DEEP = b"[" * 1_000_000
FORM = "pickle-1/torch-2.13"

CONTENTS: dict[str, Hostile] = {
    "so-truncated": kernel(ELF[:-40]),
    "so-cut-in-half": kernel(ELF[: len(ELF) // 2]),
    "so-empty": kernel(b""),
    "so-of-another-machine": kernel(cache_samples.elf(b"code", machine=8)),
    "so-that-is-a-script": kernel(b"#!/bin/sh\ntrue\n"),
    "so-that-is-an-object": kernel(cache_samples.elf(b"code", type_=1)),
    "so-of-windows": kernel(b"MZ" + bytes(200)),
    "tree-so-truncated": files("tree", "vllm/rank_9", FILES, {"k.so": ELF[:100]}, "k.so"),
    "triton-so-truncated": files(
        "triton", cache_samples.HASH, FILES, {"cuda_utils.so": ELF[:100]}, "cuda_utils.so"
    ),
    "triton-paths-elsewhere": group("group", group=PATHS),
    "triton-group-deep": group("", group=DEEP),
    "triton-cubin-truncated": group("cubin", cubin=cache_samples.elf(b"sass", machine=190, type_=2)[:-9]),
    "triton-of-another-folder": group("another kernel", json=b'{"hash":"' + b"bb" * 32 + b'"}'),
    "triton-description-deep": group("", json=DEEP),
    "triton-member-empty": group("", ttir=b""),
    "inductor-no-pickle": Hostile(plain=b"no pickle", canon=FORM),
    "inductor-too-few-times": Hostile(plain=canonical_entries.dumps(canonical_entries.graph()), canon=FORM),
    "inductor-too-many-times": Hostile(times=(1, 2, 3), said="time"),
    "autotune-deep": Hostile(
        kind="autotune", key=f"ab/{'a' * 64}.best_config", canon="json-1", variant="", plain=DEEP
    ),
    "autotune-other-json": Hostile(
        kind="autotune", key=f"ab/{'a' * 64}.best_config", canon="json-1", variant="", plain=b"[]"
    ),
    "gemm-deep": Hostile(kind="gemm", key=f"{SYSTEM}/{'a' * 64}", canon="json-1", variant="", plain=DEEP),
    "gemm-of-another-key": Hostile(
        kind="gemm", key=f"{SYSTEM}/{'a' * 64}", canon="json-1", variant="", plain=b"{}"
    ),
    "pgo-with-times": Hostile(kind="pgo", key="training_1_main", variant="", times=(5,)),
}


# -- the tests ------------------------------------------------------------------------------------

CONTENTS["variant-of-nothing"] = Hostile(said="variant")
CONTENTS["variant-of-another-graph"] = Hostile(
    plain=canonical_entries.dumps(canonical_entries.graph(guards_expr="a", runnable_graph_str="")),
    said="variant",
)

CASES: dict[str, Hostile] = {
    **{f"blob-{name}": case for name, case in BLOBS.items()},
    **{f"name-{name}": dataclasses.replace(case, where="refused") for name, case in REFUSED.items()},
    **{f"content-{name}": case for name, case in CONTENTS.items()},
}


def outside(tmp_path: Path) -> dict[str, bytes]:
    """All files but those that the consumer may write."""
    allowed = ("consumer/cache/", "consumer/tree/", "consumer/state/")
    return {name: data for name, data in objects(tmp_path).items() if not name.startswith(allowed)}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_entry_of_a_trusted_signer_is_named_and_not_installed(world, attack, tmp_path, name):
    store, consumer, mallory = attack
    case = CASES[name]
    publish(store, mallory, case)
    # Where there is an honest entry of that name, two sign the bad one, so that it is tried first.
    behind = case.where == "damaged" and any((e.kind, e.key) == (case.kind, case.key) for e in world.entries)
    if behind:
        accomplice = Machine.make(tmp_path / "accomplice", store).signer
        trust.add_key(consumer.policy, accomplice.public_key.text)
        publish(store, accomplice, case)
    before = outside(tmp_path)

    report = consumer.pull()
    problems = report.refused if case.where == "refused" else report.damaged
    assert len(problems) == 1 == len(report.refused) + len(report.damaged), report
    assert report.exit_code == (3 if case.where == "refused" else 1)
    text = names_of(problems)
    assert case.said in text
    assert f"{case.kind} {case.key}"[:60] in text or case.record()[0].stored.name in text
    assert consumer.installed() == world.good
    assert outside(tmp_path) == before
    assert not list((consumer.cache / ".torchrelay").rglob("tmp/*"))
    assert report.installed == len(world.entries)

    again = consumer.pull()  # which has the honest one, and does not try the bad one any more
    assert again.exit_code == (0 if behind else report.exit_code) and again.installed == 0
    assert consumer.installed() == world.good


@pytest.mark.parametrize("wins", [True, False])
@pytest.mark.parametrize("canon", ["files-1", "kernel-command-1"])
def test_a_malformed_statement_neither_hides_an_honest_one_nor_stands_in_for_it(world, attack, canon, wins):
    """Same identity, so that one of them wins by its digest; the honest one's bytes are lost in turn."""
    store, consumer, mallory = attack
    (honest,) = [entry for entry in world.entries if entry.kind == "cpp"]
    publish_as(store, mallory, honest, canon, wins=wins)
    if not wins:
        (store / honest.blob).unlink()
    report = consumer.pull()
    (refused,) = report.refused
    assert (refused.reason, refused.key_id) == ("name", mallory.public_key.key_id)
    assert report.damaged == [] and [p.reason for p in report.missing] == ([] if wins else ["absent"])
    assert consumer.installed() == (world.good if wins else world.without({f"cpp {honest.key}"}))


def publish_as(store: Path, signer: Ed25519Signer, honest: EntryInfo, canon: str, *, wins: bool) -> None:
    """A cpp entry whose files are none of its kind, under an honest one's identity."""
    suffix = ".main.so" if canon == "kernel-command-1" else "evil.cpp"
    for number in range(20_000):
        plain = cache_samples.elf(b"evil%d" % number)
        files = (File(name=f"{honest.key}{suffix}", size=len(plain)),)
        fields: dict[str, Any] = {
            "kind": "cpp",
            "key": honest.key,
            "canon": canon,
            "requires": honest.requires,
        }
        record, blob = make_record(plain, workload=WORKLOAD, files=files, seq=9, **fields)
        honest_digest = digest_of(statement_bytes(_statement(record.statement, honest)))
        if (digest_of(statement_bytes(record.statement)) < honest_digest) is wins:
            break
    else:
        raise AssertionError("no such digest")
    segment = make_segment(
        signer, [record], workload=WORKLOAD, environment=ENVIRONMENT.digest, requires=[honest.requires]
    )
    cache_samples.write(store / blob_name(record.stored.digest), blob)
    folder = store / "manifests" / WORKLOAD / ENVIRONMENT.digest
    cache_samples.write(folder / segment.name, segment.stored)


def _statement(like: Statement, honest: EntryInfo) -> Statement:
    """The statement of the honest entry, a kernel as :func:`cache_samples.cpp_kernel` makes it."""
    files = (
        File(name=f"{honest.key}.main.cpp", size=9),
        File(name=f"{honest.key}.main.so", size=honest.size - 9),
    )
    changes = {"canon": honest.canon, "digest": honest.digest, "size": honest.size, "files": files}
    return msgspec.structs.replace(like, **changes)


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_file_name_that_could_lead_elsewhere_breaks_the_format(world, attack, tmp_path, name):
    store, consumer, mallory = attack
    hostile = Hostile(**tree("good"))
    record, blob = hostile.record()
    text = canonjson.encode(record).replace(b'"good"', _json(FILE_NAMES[name]))
    cache_samples.write(store / record.stored.name, blob)
    body = header_of([text])
    segment = put_segment(store, encode_segment(body, signed(mallory, body), [text]))
    before = outside(tmp_path)
    report = consumer.pull()
    assert [problem.subject for problem in report.damaged] == [segment]
    assert report.exit_code == 1
    assert consumer.installed() == world.good and outside(tmp_path) == before


def _json(text: str) -> bytes:
    """As canonical JSON would spell it, where it can."""
    try:
        return msgspec.json.encode(text)
    except UnicodeEncodeError:
        return b'"a\\udc80"'


def test_a_kind_that_nobody_knows_is_left_out_and_counted(world, attack):
    store, consumer, mallory = attack
    publish(store, mallory, Hostile(kind="rootkit", key="../../x", variant=""))
    report = consumer.pull()
    assert report.exit_code == 0 and report.incompatible == {"unknown-kind": 1}
    assert consumer.installed() == world.good


def test_a_tree_that_is_not_declared_here_is_left_out_and_counted(world, attack):
    store, consumer, mallory = attack
    publish(store, mallory, Hostile(**{**tree("x"), "key": "sglang/rank_0"}))
    report = consumer.pull()
    assert report.exit_code == 0 and report.incompatible == {"undeclared-tree": 1}
    assert report.installed == len(world.entries) and consumer.installed() == world.good


NESTED: dict[str, Callable[[Ed25519Signer], bytes]] = {
    "first-line": lambda signer: DEEP + b"\n",
    "first-line-objects": lambda signer: b'{"format":' * 1_000_000 + b"\n",
    "header": lambda signer: b"\n".join(
        [b'{"batches":[0],"format":1,"type":"segment"}', DEEP, canonjson.encode(signed(signer, DEEP)), b""]
    ),
    "signature": lambda signer: b"\n".join(
        [b'{"batches":[0],"format":1,"type":"segment"}', header_of([]), DEEP, b""]
    ),
    "record": lambda signer: _with_line(signer, DEEP),
    "deep-in-a-record": lambda signer: _with_line(
        signer, canonjson.encode(Hostile().record()[0]).replace(b'"times":[]', b'"times":' + DEEP[:900_000])
    ),
    "requires": lambda signer: _with_header(
        signer, header_of([]).replace(b'"requires":{', b'"requires":{"' + b"a" * 64 + b'":' + DEEP + b",")
    ),
    "number-of-a-million-digits": lambda signer: _with_line(
        signer, canonjson.encode(Hostile().record()[0]).replace(b'"seq":9', b'"seq":' + b"9" * 900_000)
    ),
}


def _with_line(signer: Ed25519Signer, line: bytes) -> bytes:
    body = header_of([line])
    return encode_segment(body, signed(signer, body), [line])


def _with_header(signer: Ed25519Signer, body: bytes) -> bytes:
    return encode_segment(body, signed(signer, body), [])


@pytest.mark.parametrize("place", NESTED)
def test_json_nested_a_million_deep_is_damage(world, attack, place):
    store, consumer, mallory = attack
    segment = put_segment(store, NESTED[place](mallory))
    report = consumer.pull()
    assert report.exit_code == 1 and [problem.subject for problem in report.damaged] == [segment]
    assert consumer.installed() == world.good
    assert segment in names_of(consumer.verify().damaged)


def test_json_nested_a_million_deep_in_an_environment_decides_nothing(world, attack):
    store, consumer, mallory = attack
    name = digest_of(DEEP)
    publish(store, mallory, Hostile(plain=PLAIN, key=key("f", 7), variant=digest_of(PLAIN)))
    record, _ = Hostile(key=key("f", 8), variant=digest_of(PLAIN)).record()
    line = canonjson.encode(record).replace(ENVIRONMENT.digest.encode(), name.encode())
    put_segment(store, _with_line(mallory, line))
    cache_samples.write(store / "environments" / name, DEEP)
    explained = consumer.relay().explain(None, ENVIRONMENT)
    assert sum(group.entries for group in explained.groups) == len(world.entries) + 2
    assert consumer.pull().installed == len(world.entries) + 2


def test_an_entry_that_does_not_say_what_it_needs_fits_nothing(attack, world):
    store, consumer, mallory = attack
    python = {"python": ENVIRONMENT.facets["python"]}
    table = {encode_requires(python)[0]: python}
    publish(store, mallory, Hostile(plain=PLAIN, requires=python), requires=table)
    report = consumer.pull()
    (problem,) = report.refused
    assert (problem.reason, problem.key_id) == ("requires", mallory.public_key.key_id)
    assert "torch" in problem.detail and consumer.installed() == world.good


# -- without a trusted key ------------------------------------------------------------------------


def test_an_attacker_without_a_key_gets_nothing_in(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    nobody = Ed25519Signer.generate()
    publish(store, nobody, Hostile())
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert (report.exit_code, [p.reason for p in report.refused]) == (3, ["unknown-key"])
    assert report.refused[0].key_id == nobody.public_key.key_id
    assert consumer.installed() == world.good


def test_a_segment_moved_to_another_workload_is_refused(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    shutil.copytree(store / "manifests" / WORKLOAD, store / "manifests" / "acme" / "prod")
    consumer = dataclasses.replace(
        Machine.make(tmp_path / "consumer", store, trusting=producer), workload="acme/prod"
    )
    report = consumer.pull()
    assert report.exit_code == 3 and {p.reason for p in report.refused} == {"wrong-place"}
    assert consumer.installed() == {}


def test_a_segment_moved_to_another_environment_is_refused(world, tmp_path):
    producer, store = world.copy(tmp_path / "w")
    folder = store / "manifests" / WORKLOAD
    (folder / ENVIRONMENT.digest).rename(folder / digest_of(b"another machine"))
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert report.exit_code == 3 and {p.reason for p in report.refused} == {"wrong-place"}
    assert consumer.installed() == {}


@pytest.mark.parametrize("change", ["no-signature", "other-key", "record"])
def test_a_segment_that_is_rewritten_without_the_key_is_not_accepted(world, tmp_path, change):
    producer, store = world.copy(tmp_path / "w")
    nobody = Ed25519Signer.generate()
    for path in [path for path in (store / "manifests").rglob("*") if path.is_file()]:
        lines = frame.decompress_bounded(path.read_bytes(), limit=1 << 26, name="x").splitlines()
        if change == "no-signature":
            lines[2] = canonjson.encode(Signature(algorithm="none", key_id=digest_of(b""), signature=""))
        elif change == "other-key":
            lines[2] = canonjson.encode(signed(nobody, lines[1]))
        else:
            lines[3] = lines[3].replace(b'"seq":', b'"seq":7')
        path.unlink()
        put_segment(store, b"\n".join(lines) + b"\n")
    consumer = Machine.make(tmp_path / "consumer", store, trusting=producer)
    report = consumer.pull()
    assert report.exit_code == (1 if change == "record" else 3)
    assert len(report.damaged) + len(report.refused) == 2
    assert report.installed == 0 and consumer.installed() == {}
