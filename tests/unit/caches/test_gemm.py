# SPDX-License-Identifier: Apache-2.0
"""Measured GEMM choices: one local file that several write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchrelay.caches import files
from torchrelay.caches.base import Entry, Excluded, FileStat, Found, Reason, Roots, Skipped
from torchrelay.caches.gemm import GemmKind
from torchrelay.errors import DamagedError, FormatError, PermanentError, TransientError
from torchrelay.statement import File
from torchrelay.testing.entries import make_record, verified

KIND = GemmKind()
HASH = "5" * 64
NAME = f"cache/{HASH}"
SYSTEM = {"device": {"name": "NVIDIA H200"}, "version": {"cuda": "13.0", "triton": "3.9.0"}, "hash": HASH}
INPUTS = "[('cuda', 'torch.float16', 64, 64)]"
GROUP = {"highest": {"choice-a": 0.012345678901234567, "choice-b": float("inf")}}
CACHE = {"mm": {INPUTS: GROUP, INPUTS + "_8": {"high": {"choice-a": 1}}}, "bmm": {INPUTS: GROUP}}


def put(root: Path, cache: Any, system: Any = SYSTEM) -> Path:
    """As ``CacheBase.update_local_cache`` writes it."""
    path = root / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"system": system, "cache": cache}, indent=4))
    return path


def local(root: Path) -> Any:
    """As ``CacheBase.get_local_cache`` reads it."""
    return json.loads((root / NAME).read_text())["cache"]


def entries(root: Path) -> list[Entry]:
    (found,) = KIND.scan(Roots(root))
    assert isinstance(found, Found)
    return list(KIND.read(found))


def given(entry: Entry, **changes: Any) -> Any:
    return verified(entry.plain, **{"kind": "gemm", "key": entry.key, "canon": "json-1", **changes})


def made(tmp_path: Path, cache: Any = CACHE) -> list[Entry]:
    put(tmp_path / "made", cache)
    return entries(tmp_path / "made")


def test_one_entry_a_group(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert len({entry.key for entry in found}) == len(found) == 3
    for entry in found:
        assert entry.key.startswith(HASH + "/")
        assert (entry.variant, entry.times, entry.needs, entry.canon) == ("", (), (), "json-1")
        record, _ = make_record(entry.plain, kind="gemm", key=entry.key, canon="json-1")
        KIND.check(record.statement)
    assert b"0.012345678901234567" in found[0].plain
    assert b"Infinity" in found[0].plain


def test_into_an_empty_directory(tmp_path: Path) -> None:
    for entry in made(tmp_path):
        assert KIND.install(given(entry), Roots(tmp_path / "b")) == ("inductor", ())
    assert local(tmp_path / "b") == CACHE
    assert json.loads((tmp_path / "b" / NAME).read_text())["system"] == SYSTEM
    assert {entry.plain for entry in entries(tmp_path / "b")} == {entry.plain for entry in made(tmp_path)}


def test_many_at_once_are_one_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    install = files.install_files

    def counting(root: Path, contents: list[tuple[str, bytes]]) -> tuple[str, ...]:
        writes.extend(name for name, _ in contents)
        return install(root, contents)

    monkeypatch.setattr(files, "install_files", counting)
    entry_list = [given(entry) for entry in made(tmp_path)]
    assert KIND.install_many(entry_list, Roots(tmp_path / "b")) == ("inductor", ())
    assert KIND.install_many(entry_list, Roots(tmp_path / "b")) == ("inductor", ())
    assert writes == [NAME]
    assert local(tmp_path / "b") == CACHE


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    mine = {
        "mm": {INPUTS: {"highest": {"mine": 7.0}, "medium": {"m": 1.0}}, "other": {}},
        "own": {"a": [1, None]},
    }
    put(tmp_path / "b", mine)
    for entry in made(tmp_path):
        KIND.install(given(entry), Roots(tmp_path / "b"))
    after = local(tmp_path / "b")
    assert after["mm"][INPUTS] == {"highest": {"mine": 7.0}, "medium": {"m": 1.0}}
    assert after["own"] == {"a": [1, None]}
    assert after["mm"]["other"] == {}
    assert after["mm"][INPUTS + "_8"] == {"high": {"choice-a": 1}}
    assert after["bmm"] == {INPUTS: GROUP}


def test_numbers_keep_their_text(tmp_path: Path) -> None:
    path = put(tmp_path / "b", {})
    text = '{"system":{"hash":"HASH"},"cache":{"mm":{"i":{"p":{"c":1.50,"d":1E-9}}}}}'
    path.write_text(text.replace("HASH", HASH))
    KIND.install(given(made(tmp_path)[0]), Roots(tmp_path / "b"))
    assert '{"c":1.50,"d":1E-9}' in path.read_text()


def test_what_is_no_group_is_left_alone(tmp_path: Path) -> None:
    cache = {
        "mm": {"i": {"p": {}}, "j": {"p": {"c": "text"}}, "k": {"p": [1]}, "l": 5, "m": {"p": {"c": 1.0}}},
        "flat": 1,
        "prescreen": {"x": {"y": {"z": {"deeper": 1}}}},
    }
    assert [json.loads(entry.plain)["inputs"] for entry in made(tmp_path, cache)] == ["m"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"cache":{}}',
        '{"system":{},"cache":[]}',
        '{"system":{"hash":"OTHER"},"cache":{}}',
        '{"system":{"hash":HASH},"cache":{}}',
        "[" * 200_000,
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    """Left out going out; coming in nothing is lost: the file stays and the user is told."""
    (entry, *_) = made(tmp_path)
    path = put(tmp_path / "b", {})
    text = text.replace("HASH", HASH).replace("OTHER", "6" * 64)
    path.write_text(text)
    if text:
        with pytest.raises(Excluded) as caught:
            entries(tmp_path / "b")
        assert caught.value.reason is Reason.UNPARSEABLE
    with pytest.raises(PermanentError) as error:
        KIND.install(given(entry), Roots(tmp_path / "b"))
    assert "move the file away" in error.value.remedy
    assert path.read_text() == text


def test_something_in_the_way_inside_the_file(tmp_path: Path) -> None:
    path = put(tmp_path / "b", {"mm": 5})
    before = path.read_bytes()
    with pytest.raises(PermanentError):
        KIND.install(given(made(tmp_path)[0]), Roots(tmp_path / "b"))
    assert path.read_bytes() == before


def test_a_linked_file_is_not_merged_into(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = put(tmp_path / "b", {})
    path.unlink()
    path.symlink_to(victim)
    assert list(KIND.scan(Roots(tmp_path / "b"))) == [Skipped(NAME, Reason.NOT_A_FILE)]
    with pytest.raises(PermanentError):
        KIND.install(given(made(tmp_path)[0]), Roots(tmp_path / "b"))
    assert victim.read_text() == "precious"


def test_names(tmp_path: Path) -> None:
    for name in ("cache/short", "cache/should_pad/x", "cache/.1.2.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert {item.path: item.reason for item in KIND.scan(Roots(tmp_path)) if isinstance(item, Skipped)} == {
        "cache/.1.2.tmp": Reason.TEMPORARY,
        "cache/should_pad": Reason.BAD_NAME,
        "cache/short": Reason.BAD_NAME,
    }


def test_a_secret_leaves_out_all_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(Excluded) as caught:
        made(tmp_path, {**CACHE, "z": {"redis://u:hunter2hunter2@h/0": {"p": {"c": 1.0}}}})
    assert caught.value.reason is Reason.SECRET
    assert "hunter2" not in caught.value.detail


def test_a_group_too_large_to_publish(tmp_path: Path) -> None:
    with pytest.raises(Excluded) as caught:
        made(tmp_path, {"mm": {"i": {"p": {"c" * 1000 + str(n): 1.0 for n in range(1100)}}}})
    assert caught.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../" + HASH},
        {"key": HASH},
        {"key": HASH + "/../x"},
        {"variant": "e" * 64},
        {"canon": "raw"},
        {"files": (File(name="x", size=1),)},
        {"plain": b"x" * (2**20 + 1)},
    ],
)
def test_statements_that_are_refused(change: dict[str, Any]) -> None:
    values = {"kind": "gemm", "key": f"{HASH}/{HASH}", "canon": "json-1", **change}
    record, _ = make_record(values.pop("plain", b"x"), **values)
    with pytest.raises(FormatError):
        KIND.check(record.statement)


def _changed(plain: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(plain), **members}, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"operator": "other"},
        {"choices": {}},
        {"choices": {"a": "text"}},
        {"choices": 5},
        {"operator": 5},
        {"extra": 1},
        {"system": {}},
        {"system": {"hash": "6" * 64}},
        {"system": {"hash": int(HASH)}},
    ],
)
def test_signed_bytes_that_are_not_the_group_that_the_key_names(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    good, entry = made(tmp_path)[1:]
    bad = verified(_changed(entry.plain, **change), kind="gemm", key=entry.key, canon="json-1")
    with pytest.raises(DamagedError):
        KIND.install_many([given(good), bad], Roots(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_times_have_no_place(tmp_path: Path) -> None:
    with pytest.raises(DamagedError):
        KIND.install(given(made(tmp_path)[0], times=(1,)), Roots(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_pytorch_writes_while_we_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "b", {"mm": {"first": {"p": {"c": 1.0}}}})
    look, count = files.stat_file, [0]

    def interrupted(root: Path, name: str) -> FileStat | Skipped | None:
        count[0] += 1
        if count[0] == 2:  # after the read, before the rename
            put(root, {"mm": {"first": {"p": {"c": 1.0}}, "second": {"p": {"c": 2.0}}}})
        return look(root, name)

    monkeypatch.setattr(files, "stat_file", interrupted)
    entry = made(tmp_path)[-1]
    KIND.install(given(entry), Roots(tmp_path / "b"))
    assert count[0] == 4
    assert local(tmp_path / "b")["mm"].keys() == {"first", "second"}
    assert local(tmp_path / "b")["bmm"] == {INPUTS: GROUP}


def test_pytorch_never_stops_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "b", {})
    look, count = files.stat_file, [0]

    def interrupted(root: Path, name: str) -> FileStat | Skipped | None:
        count[0] += 1
        put(root, {"mm": {str(count[0]): {"p": {"c": 1.0}}}})
        return look(root, name)

    monkeypatch.setattr(files, "stat_file", interrupted)
    with pytest.raises(TransientError):
        KIND.install(given(made(tmp_path)[0]), Roots(tmp_path / "b"))
    assert local(tmp_path / "b") == {"mm": {str(count[0]): {"p": {"c": 1.0}}}}


MERGING = """
import sys
from pathlib import Path
from torchrelay.caches.base import Roots
from torchrelay.caches.gemm import GemmKind
from torchrelay.testing.entries import verified
kind, root, made = GemmKind(), Path(sys.argv[1]), Path(sys.argv[2])
(found,) = kind.scan(Roots(made))
for entry in kind.read(found):
    kind.install(verified(entry.plain, kind="gemm", key=entry.key, canon="json-1"), Roots(root))
"""


def test_eight_processes_merge_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    processes = []
    for number in range(8):
        cache = {"mm": {f"inputs-{number}-{i}": {"p": {"c": number + i / 7}} for i in range(5)}}
        put(tmp_path / str(number), cache)
        command = [sys.executable, "-c", MERGING, str(tmp_path / "b"), str(tmp_path / str(number))]
        processes.append(subprocess.Popen(command))
    assert [process.wait() for process in processes] == [0] * 8
    assert local(tmp_path / "b")["mm"] == {
        f"inputs-{number}-{i}": {"p": {"c": number + i / 7}} for number in range(8) for i in range(5)
    }
