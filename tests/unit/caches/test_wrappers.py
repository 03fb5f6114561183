# SPDX-License-Identifier: Apache-2.0
"""PyTorch runs a wrapper source that lies in the directory, so one that was exchanged must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.caches.wrappers import exchanged_sources, named_sources, source_key

SOURCE = b"\n# AOT ID: ['0_forward']\nprint('good')\n"


def lay(root: Path, text: bytes, key: str) -> Path:
    path = root / key[1:3] / f"{key}.py"
    path.parent.mkdir()
    path.write_bytes(text)
    return path


def test_the_key_is_the_one_that_pytorch_makes() -> None:
    """The text is stripped, as in ``codecache.write``."""
    assert source_key(b"x = 1") == source_key(b"\n x = 1\n\n")
    assert source_key(b"x = 1") == "cr72dnxxriujikwm2dmnnocaaje5y3sx54kis4grygrldgbkojqt"


def test_an_entry_names_its_sources() -> None:
    key = source_key(SOURCE)
    assert named_sources(b"..cache_key..." + key.encode() + b"\x00") == {key}
    assert named_sources(b"nothing of the kind") == frozenset()


def test_a_source_that_is_not_there_or_whole_is_fine(tmp_path: Path) -> None:
    key = source_key(SOURCE)
    assert exchanged_sources(tmp_path, [key]) == []
    lay(tmp_path, SOURCE, key)
    assert exchanged_sources(tmp_path, [key]) == []


@pytest.mark.parametrize("text", [b"import os; os.system('true')", b"", SOURCE[:-3]])
def test_an_exchanged_source_is_named(tmp_path: Path, text: bytes) -> None:
    key = source_key(SOURCE)
    lay(tmp_path, text, key)
    assert exchanged_sources(tmp_path, [key]) == [f"{key[1:3]}/{key}.py"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    key = source_key(SOURCE)
    path = lay(tmp_path, b"", key)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(SOURCE)
    path.symlink_to(tmp_path / "elsewhere")
    assert exchanged_sources(tmp_path, [key]) == [f"{key[1:3]}/{key}.py"]
