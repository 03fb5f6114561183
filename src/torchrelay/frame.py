# SPDX-License-Identifier: Apache-2.0
"""One zstd frame in, one buffer out, with the bounds checked before anything is inflated.

``docs/reference/format.md`` §3. Refused: a frame that does not state its content size, a size or
window beyond the bound, a skippable frame, a dictionary, bytes after the frame.
"""

from __future__ import annotations

import sys

from torchrelay.errors import DamagedError
from torchrelay.limits import MAX_WINDOW_LOG, ZSTD_LEVEL

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAGIC = b"\x28\xb5\x2f\xfd"
_COMPRESS: dict[int, int] = {
    zstd.CompressionParameter.compression_level: ZSTD_LEVEL,
    zstd.CompressionParameter.content_size_flag: 1,
    zstd.CompressionParameter.checksum_flag: 0,
    zstd.CompressionParameter.window_log: 0,
}
_DECOMPRESS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}


def compress(plain: bytes | memoryview) -> bytes:
    """One frame that states its content size."""
    return zstd.compress(plain, options=_COMPRESS)


def decompress(stored: bytes | memoryview, *, size: int, name: str) -> bytes:
    """The content of the one frame in ``stored``.

    Args:
        stored: Exactly one zstd frame.
        size: The content size that the frame must have, in bytes.
        name: What is being read, for the error.

    Raises:
        DamagedError: Not one plain frame of exactly ``size`` bytes.
    """
    stated = content_size(stored, name=name)
    if stated != size:
        raise DamagedError(f"{name} states {stated} plain bytes where {size} were signed", subject=name)
    return _inflate(stored, size, name)


def decompress_bounded(stored: bytes | memoryview, *, limit: int, name: str) -> bytes:
    """As :func:`decompress`, for objects whose size is not known beforehand: at most ``limit``.

    Raises:
        DamagedError: As :func:`decompress`, or it states more than ``limit`` bytes.
    """
    stated = content_size(stored, name=name)
    if stated > limit:
        raise DamagedError(f"{name} inflates to {stated} bytes, more than the {limit} allowed", subject=name)
    return _inflate(stored, stated, name)


def content_size(stored: bytes | memoryview, *, name: str) -> int:
    """The content size that the frame header states; nothing is inflated.

    Raises:
        DamagedError: No zstd frame, or one that does not state its size.
    """
    if bytes(stored[:4]) != _MAGIC:
        raise DamagedError(f"{name} is not a zstd frame", subject=name)
    try:
        info = zstd.get_frame_info(stored[:64])
    except zstd.ZstdError as exc:
        raise DamagedError(f"{name} has a damaged zstd header", subject=name) from exc
    if info.decompressed_size is None:
        raise DamagedError(f"{name} does not state its plain size", subject=name)
    if info.dictionary_id:
        raise DamagedError(f"{name} needs a zstd dictionary", subject=name)
    # The decoder does not hold short frames to its bound; what readers accept must not vary by length.
    window = _window(stored, info.decompressed_size)
    if window > 1 << MAX_WINDOW_LOG:
        raise DamagedError(f"{name} asks for a zstd window of {window} bytes", subject=name)
    return int(info.decompressed_size)


def _window(stored: bytes | memoryview, size: int) -> int:
    """The window in bytes that the header states, or the content's size if the frame is one segment.

    RFC 8878, 3.1.1.1. The header was parsed before, so both bytes are there.
    """
    if stored[4] & 0x20:
        return size
    base = 1 << (10 + (stored[5] >> 3))
    return base + base // 8 * (stored[5] & 7)


def _inflate(stored: bytes | memoryview, size: int, name: str) -> bytes:
    decompressor = zstd.ZstdDecompressor(options=_DECOMPRESS)
    try:
        # One byte more than stated, so that a frame which lies about its size is seen to lie.
        plain: bytes = decompressor.decompress(stored, max_length=size + 1)
    except (zstd.ZstdError, MemoryError) as exc:
        raise DamagedError(f"{name} cannot be decompressed: {exc}", subject=name) from exc
    if not decompressor.eof or decompressor.unused_data or len(plain) != size:
        raise DamagedError(f"{name} is not exactly one zstd frame of {size} bytes", subject=name)
    return plain
