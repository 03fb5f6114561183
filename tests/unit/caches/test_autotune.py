# SPDX-License-Identifier: Apache-2.0
"""Launch settings: ``.best_config`` files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.caches.autotune import SEARCHED, AutotuneKind, outranks
from torchrelay.caches.base import Entry, Excluded, Found, Reason, Roots, Skipped
from torchrelay.caches.cpp import CppKind
from torchrelay.errors import DamagedError, FormatError
from torchrelay.statement import File, Need
from torchrelay.testing.entries import make_record, verified

KIND = AutotuneKind()
KEY = "ab/" + "0" * 64 + ".best_config"
CHOICE = {
    "XBLOCK": 128,
    "num_warps": 4,
    "num_stages": 1,
    "configs_hash": "c" * 52,
    "found_by_coordesc": False,
    "time_taken_ms": 17,
    "triton_cache_hash": "T" * 52,
}
LISTED = json.dumps(CHOICE).encode()
SEARCHED_CHOICE = json.dumps({**CHOICE, "XBLOCK": 256, "found_by_coordesc": True}).encode()


def put(root: Path, data: bytes, key: str = KEY) -> Path:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def only(root: Path) -> Entry:
    (found,) = KIND.scan(Roots(root))
    assert isinstance(found, Found)
    (entry,) = KIND.read(found)
    return entry


def fields(entry: Entry, **changes: Any) -> dict[str, Any]:
    names = ("kind", "key", "variant", "canon", "times")
    return {**{name: getattr(entry, name) for name in names}, **changes}


def install(entry: Entry, root: Path, **changes: Any) -> tuple[str, tuple[str, ...]]:
    return KIND.install(verified(entry.plain, **fields(entry, **changes)), Roots(root))


def test_out_and_in_again(tmp_path: Path) -> None:
    put(tmp_path / "a", LISTED)
    entry = only(tmp_path / "a")
    assert (entry.variant, entry.canon, entry.times, entry.needs) == ("", "json-1", (17,), ())
    assert entry.plain.startswith(b'{"XBLOCK":128,"configs_hash":')
    record, _ = make_record(entry.plain, **fields(entry))
    KIND.check(record.statement)
    assert install(entry, tmp_path / "b") == ("inductor", (KEY,))
    assert json.loads((tmp_path / "b" / KEY).read_bytes()) == CHOICE
    assert only(tmp_path / "b") == entry


def test_only_the_time_differs_between_two_runs(tmp_path: Path) -> None:
    put(tmp_path / "a", LISTED)
    put(
        tmp_path / "b", json.dumps(dict(reversed({**CHOICE, "time_taken_ms": 99}.items())), indent=2).encode()
    )
    one, two = only(tmp_path / "a"), only(tmp_path / "b")
    assert one.plain == two.plain
    assert (one.times, two.times) == ((17,), (99,))


@pytest.mark.parametrize("time", [None, 1.5, "17", 2**60, -(2**60)])
def test_a_time_that_is_no_plain_integer_stays(tmp_path: Path, time: object) -> None:
    put(tmp_path / "a", json.dumps({**CHOICE, "time_taken_ms": time}).encode())
    entry = only(tmp_path / "a")
    assert entry.times == ()
    install(entry, tmp_path / "b")
    assert json.loads((tmp_path / "b" / KEY).read_bytes())["time_taken_ms"] == time


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.integers(), max_size=5))
def test_every_number_survives(extra: dict[str, Any]) -> None:
    value = {"configs_hash": "c", "extra_options": extra}
    entry = KIND.entry_from_bytes(KEY, json.dumps(value).encode())
    assert json.loads(entry.plain) == value
    assert KIND.entry_from_bytes(KEY, entry.plain) == entry


@pytest.mark.parametrize("there", [None, LISTED, SEARCHED_CHOICE, b'{"torn', b""])
@pytest.mark.parametrize("coming", [LISTED, SEARCHED_CHOICE])
def test_a_searched_result_is_never_replaced_by_a_listed_one(
    tmp_path: Path, there: bytes | None, coming: bytes
) -> None:
    put(tmp_path / "a", coming)
    entry = only(tmp_path / "a")
    if there is not None:
        put(tmp_path / "b", there)
    names = install(entry, tmp_path / "b")[1]
    stays = there == SEARCHED_CHOICE and coming == LISTED
    assert names == (() if stays else (KEY,))
    expected = json.loads(SEARCHED_CHOICE if stays else coming)
    assert json.loads((tmp_path / "b" / KEY).read_bytes()) == expected


def test_which_of_two_results_counts() -> None:
    listed = KIND.entry_from_bytes(KEY, LISTED)
    searched = KIND.entry_from_bytes(KEY, SEARCHED_CHOICE)
    assert (listed.variant, searched.variant) == ("", SEARCHED)
    assert outranks(searched.variant, listed.variant)
    assert not outranks(listed.variant, searched.variant)
    assert not outranks(searched.variant, searched.variant)


@pytest.mark.parametrize(
    "data",
    [
        LISTED[:-5],
        b"[]",
        b"{}",
        b'{"configs_hash":3}',
        b"[" * 100_000,
        b'{"configs_hash":"a","configs_hash":"b"}',
        b"\xff",
    ],
)
def test_what_is_no_choice(tmp_path: Path, data: bytes) -> None:
    put(tmp_path, data)
    with pytest.raises(Excluded) as caught:
        only(tmp_path)
    assert caught.value.reason is Reason.UNPARSEABLE


def test_too_large(tmp_path: Path) -> None:
    put(tmp_path, json.dumps({**CHOICE, "pad": "x" * 2**20}).encode())
    with pytest.raises(Excluded) as caught:
        only(tmp_path)
    assert caught.value.reason is Reason.TOO_LARGE


def test_a_secret(tmp_path: Path) -> None:
    put(tmp_path, json.dumps({**CHOICE, "extra_options": ["redis://u:hunter2hunter2@h/0"]}).encode())
    with pytest.raises(Excluded) as caught:
        only(tmp_path)
    assert caught.value.reason is Reason.SECRET
    assert "hunter2" not in caught.value.detail


def test_names(tmp_path: Path) -> None:
    put(tmp_path, LISTED, "ab/short.best_config")
    put(tmp_path, LISTED, "abc/" + "0" * 64 + ".best_config")
    put(tmp_path, LISTED, "ab/kernel.so")
    put(tmp_path, b"", "ab/" + "1" * 64 + ".best_config")
    (tmp_path / "ab" / ("2" * 64 + ".best_config")).symlink_to(tmp_path / "ab" / "kernel.so")
    assert list(KIND.scan(Roots(tmp_path))) == [Skipped("ab/short.best_config", Reason.BAD_NAME)]
    assert list(KIND.scan(Roots(tmp_path / "none"))) == []


def test_rubbish_in_the_shared_folders_is_told_once(tmp_path: Path) -> None:
    put(tmp_path, LISTED)
    put(tmp_path, b"", "ab/" + "1" * 64 + ".best_config")
    put(tmp_path, LISTED[:9], "ab/.77.88.tmp")
    told = [
        item for kind in (KIND, CppKind()) for item in kind.scan(Roots(tmp_path)) if isinstance(item, Skipped)
    ]
    assert sorted((item.path, item.reason) for item in told) == [
        ("ab/.77.88.tmp", Reason.TEMPORARY),
        ("ab/" + "1" * 64 + ".best_config", Reason.EMPTY),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../../" + "0" * 64 + ".best_config"},
        {"key": "/a/" + "0" * 64 + ".best_config"},
        {"key": "../" + "0" * 64 + ".best_config"},
        {"key": "ab/" + "0" * 64},
        {"key": "ab/" + "0" * 64 + ".best_config/x"},
        {"variant": "e" * 64},
        {"canon": "raw"},
        {"files": (File(name="x", size=len(LISTED)),)},
        {"needs": (Need(kind="inductor", key="f", variant=""),)},
        {"plain": b""},
        {"plain": b"x" * (2**20 + 1)},
    ],
)
def test_statements_that_are_refused(change: dict[str, Any]) -> None:
    values = {"kind": "autotune", "key": KEY, "canon": "json-1", **change}
    record, _ = make_record(values.pop("plain", LISTED), **values)
    with pytest.raises(FormatError):
        KIND.check(record.statement)


MASKED = KIND.entry_from_bytes(KEY, LISTED).plain


@pytest.mark.parametrize(
    ("plain", "change"),
    [
        (LISTED, {"times": (17,)}),
        (MASKED, {"times": (1, 2)}),
        (MASKED, {"times": ()}),
        (MASKED, {"times": (17,), "variant": SEARCHED}),
        (KIND.entry_from_bytes(KEY, SEARCHED_CHOICE).plain, {"times": (17,)}),
        (MASKED.replace(b':0,"tri', b':5,"tri'), {"times": (17,)}),
        (MASKED[:-4], {"times": (17,)}),
        (b"[]", {}),
    ],
)
def test_signed_bytes_that_are_no_choice(tmp_path: Path, plain: bytes, change: dict[str, Any]) -> None:
    entry = verified(plain, **{"kind": "autotune", "key": KEY, "canon": "json-1", **change})
    put(tmp_path, SEARCHED_CHOICE)
    with pytest.raises(DamagedError):
        KIND.install(entry, Roots(tmp_path))
    assert (tmp_path / KEY).read_bytes() == SEARCHED_CHOICE
    assert [path.name for path in tmp_path.iterdir()] == ["ab"]
