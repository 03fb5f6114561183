# SPDX-License-Identifier: Apache-2.0
"""Frames, many of them written byte by byte: one plain zstd frame goes in, nothing else."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay import frame
from torchrelay.errors import DamagedError
from torchrelay.limits import MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PLAIN = b"the plain bytes " * 8
STORED = frame.compress(PLAIN)
MAGIC = b"\x28\xb5\x2f\xfd"


def block(content: bytes, *, last: bool = True) -> bytes:
    """A raw block."""
    return struct.pack("<I", len(content) << 3 | last)[:3] + content


def by_hand(content: bytes = PLAIN, *, window: int = 80, stated: int | None = None, flags: int = 0) -> bytes:
    """A frame of one raw block; ``window`` is the descriptor's byte (RFC 8878, 3.1.1.1.2)."""
    size = len(content) if stated is None else stated
    return MAGIC + bytes([0x80 | flags, window]) + struct.pack("<I", size) + block(content)


def one_segment(content: bytes, *, stated: int | None = None) -> bytes:
    """A frame that is its own window."""
    size = len(content) if stated is None else stated
    blocks = [content[at : at + 131072] for at in range(0, len(content), 131072)] or [b""]
    body = b"".join(block(part, last=at == len(blocks) - 1) for at, part in enumerate(blocks))
    return MAGIC + b"\xa0" + struct.pack("<I", size) + body


def skippable(content: bytes = b"hidden") -> bytes:
    return b"\x50\x2a\x4d\x18" + struct.pack("<I", len(content)) + content


def with_options(**options: int) -> bytes:
    return zstd.compress(
        PLAIN, options={getattr(zstd.CompressionParameter, name): value for name, value in options.items()}
    )


def with_dictionary() -> bytes:
    samples = [b"the plain bytes %d of an entry %d" % (n, n * n) for n in range(300)]
    dictionary = zstd.train_dict(samples, 1024)
    return zstd.compress(PLAIN, zstd_dict=dictionary)


GOOD = {
    "ours": STORED,
    "by-hand": by_hand(),
    "window-of-8-mib": by_hand(window=(23 - 10) << 3),
    "checksum": with_options(checksum_flag=1),
    "level-19": with_options(compression_level=19),
    "one-segment": one_segment(PLAIN),
    "empty-last-block": MAGIC + b"\x80\x50" + struct.pack("<I", 128) + block(PLAIN, last=False) + block(b""),
}
BAD = {
    "nothing": b"",
    "magic-alone": MAGIC,
    "not-compressed": PLAIN,
    "gzip": b"\x1f\x8b\x08\x00" + PLAIN,
    "two-frames": STORED + STORED,
    "two-halves": frame.compress(PLAIN[:64]) + frame.compress(PLAIN[64:]),
    "empty-frame-after": STORED + frame.compress(b""),
    "skippable-before": skippable() + STORED,
    "skippable-after": STORED + skippable(),
    "skippable-alone": skippable(PLAIN),
    "skippable-between-blocks": (
        MAGIC
        + b"\x80\x50"
        + struct.pack("<I", 128)
        + block(PLAIN[:64], last=False)
        + skippable()
        + block(PLAIN[64:])
    ),
    "byte-after": STORED + b"\0",
    "line-feed-after": STORED + b"\n",
    "byte-before": b"\0" + STORED,
    "no-content-size": with_options(content_size_flag=0),
    "states-one-less": by_hand(stated=len(PLAIN) - 1),
    "states-one-more": by_hand(stated=len(PLAIN) + 1),
    "states-4-gib": by_hand(stated=2**32 - 1),
    "holds-less": by_hand(PLAIN[:-1], stated=len(PLAIN)),
    "holds-more": by_hand(PLAIN + b"x", stated=len(PLAIN)),
    "window-just-over-8-mib": by_hand(window=(23 - 10) << 3 | 1),
    "window-of-16-mib": by_hand(window=(24 - 10) << 3),
    "window-of-128-mib": by_hand(window=(27 - 10) << 3),
    "window-of-3-tib": by_hand(window=0xFF),
    "dictionary": with_dictionary(),
    "dictionary-id-by-hand": MAGIC + b"\x81\x50\x07" + struct.pack("<I", 128) + block(PLAIN),
    "reserved-bit": by_hand(flags=0x08),
    "reserved-block": MAGIC
    + b"\x80\x50"
    + struct.pack("<I", 128)
    + struct.pack("<I", 128 << 3 | 7)[:3]
    + PLAIN,
    "checksum-missing": by_hand(flags=0x04),
    "checksum-wrong": with_options(checksum_flag=1)[:-1] + bytes([with_options(checksum_flag=1)[-1] ^ 1]),
    "old-format": b"\x27\xb5\x2f\xfd" + STORED[4:],
}


def test_the_hand_made_dictionary_frame_is_one() -> None:
    assert zstd.get_frame_info(BAD["dictionary"]).dictionary_id
    assert zstd.get_frame_info(BAD["dictionary-id-by-hand"]).dictionary_id == 7


@pytest.mark.parametrize("name", ["dictionary", "dictionary-id-by-hand"])
def test_a_dictionary_is_refused_by_the_header_alone(name: str) -> None:
    with pytest.raises(DamagedError, match="needs a zstd dictionary"):
        frame.content_size(BAD[name], name="x")


@pytest.mark.parametrize("stored", GOOD.values(), ids=GOOD.keys())
def test_what_is_read(stored: bytes) -> None:
    assert frame.decompress(stored, size=len(PLAIN), name="x") == PLAIN
    assert frame.decompress(memoryview(stored), size=len(PLAIN), name="x") == PLAIN
    assert frame.decompress_bounded(stored, limit=len(PLAIN), name="x") == PLAIN


@pytest.mark.parametrize("stored", BAD.values(), ids=BAD.keys())
def test_what_is_refused_names_its_object(stored: bytes) -> None:
    with pytest.raises(DamagedError, match="the object") as caught:
        frame.decompress(stored, size=len(PLAIN), name="the object")
    assert caught.value.subject == "the object"


@pytest.mark.parametrize("stored", BAD.values(), ids=BAD.keys())
def test_bounded_by_a_limit_alone_they_are_refused_too(stored: bytes) -> None:
    with pytest.raises(DamagedError):
        frame.decompress_bounded(stored, limit=MIB, name="x")


@pytest.mark.parametrize("stored", [STORED, GOOD["checksum"], GOOD["by-hand"]])
def test_cut_at_every_byte(stored: bytes) -> None:
    for length in range(len(stored)):
        with pytest.raises(DamagedError):
            frame.decompress(stored[:length], size=len(PLAIN), name="x")


def test_the_signed_size_and_the_limit_are_exact() -> None:
    for size in (len(PLAIN) - 1, len(PLAIN) + 1, 0):
        with pytest.raises(DamagedError, match=f"states {len(PLAIN)} plain bytes where {size}"):
            frame.decompress(STORED, size=size, name="x")
    with pytest.raises(DamagedError, match="more than the 127 allowed"):
        frame.decompress_bounded(STORED, limit=len(PLAIN) - 1, name="x")


def test_one_segment_is_held_to_the_window_as_well() -> None:
    """Whatever its length: else what one reader takes another, with another buffer, refuses."""
    assert len(frame.decompress(one_segment(bytes(8 * MIB)), size=8 * MIB, name="x")) == 8 * MIB
    with pytest.raises(DamagedError, match="window"):
        frame.decompress(one_segment(bytes(8 * MIB + 1)), size=8 * MIB + 1, name="x")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65791, 65792, 131072, 131073, 9 * MIB])
def test_sizes_at_the_edges_of_the_format(size: int) -> None:
    plain = b"z" * size
    stored = frame.compress(plain)
    assert frame.content_size(stored, name="x") == size
    assert frame.decompress(stored, size=size, name="x") == plain


@given(st.binary(max_size=3000))
def test_round_trip(plain: bytes) -> None:
    stored = frame.compress(plain)
    assert frame.content_size(stored, name="x") == len(plain)
    assert frame.decompress(stored, size=len(plain), name="x") == plain
    assert not zstd.get_frame_info(stored).dictionary_id


@given(st.data())
def test_one_flipped_bit_is_refused_or_gives_a_plain_of_the_same_size(data: st.DataObject) -> None:
    changed = bytearray(STORED)
    at = data.draw(st.integers(0, len(STORED) * 8 - 1))
    changed[at // 8] ^= 1 << at % 8
    try:
        plain = frame.decompress(bytes(changed), size=len(PLAIN), name="x")
    except DamagedError:
        return
    assert len(plain) == len(PLAIN)


BOMB = """
import resource, sys
from torchrelay import frame
from torchrelay.errors import DamagedError
stored, size = open(sys.argv[1], "rb").read(), int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    frame.decompress(stored, size=size, name="bomb")
except DamagedError as exc:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("lies", [False, True])
def test_a_gigabyte_of_zeros_is_not_inflated(tmp_path: Path, lies: bool) -> None:
    """Neither where the frame states its size, nor where it states what was signed and goes on."""
    # A repeated byte takes four bytes a block (RFC 8878, 3.1.1.2.2).
    repeated = struct.pack("<I", 131072 << 3 | 2)[:3] + b"\0"
    last = struct.pack("<I", 131072 << 3 | 3)[:3] + b"\0"
    stated = MIB if lies else 1 << 30
    bomb = MAGIC + b"\x80\x50" + struct.pack("<I", stated) + repeated * 8191 + last
    path = tmp_path / "bomb"
    path.write_bytes(bomb)
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path), str(MIB)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 * 1024, "KiB"
