# SPDX-License-Identifier: Apache-2.0
"""A Mega-Cache blob as the source of a push: whatever is wrong with the file, the file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.caches.mega import MegaItem, encode_mega
from torchrelay.environment import FORMAT, Environment
from torchrelay.errors import FormatError
from torchrelay.store.mega import MegaSource

HERE = Environment(FORMAT, {"torch": "2.13.0+cpu"}, {})
GOOD = encode_mega([MegaItem("pgo", "job", b"x")])
BAD = {
    "checksum": GOOD[:-1] + b"y",
    "cut": GOOD[:-1],
    "empty": b"",
    "another format": b"PK\x03\x04" * 8,
    "an old blob that is cut": (1).to_bytes(8, "big") + b"\0" * 9,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_a_damaged_blob_is_named_with_what_to_do(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "blob.bin"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        MegaSource(path, HERE)
    assert caught.value.message.startswith(f"{path}: the Mega-Cache blob has ")
    assert caught.value.subject == str(path)
    assert "save_cache_artifacts" in caught.value.remedy
