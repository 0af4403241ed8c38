"""Compression of bodies: one zstd frame each, sizes bounded before anything is allocated."""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core import kernels
from diloco.errors import FormatError

Raw = NDArray[np.uint8]
_local = threading.local()  # zstd contexts must not be shared between threads


def pack(body: Raw, level: int) -> bytes:
    """Return ``body``, uint8 [bytes], as one zstd frame with its content's size in the header."""
    compressors: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressors[level].compress(body.data)


def packed_limit(raw_bytes: int) -> int:
    """Return the largest size of a zstd frame of ``raw_bytes`` (ZSTD_COMPRESSBOUND, rounded up)."""
    return raw_bytes + (raw_bytes >> 8) + 1024


def unpack(data: bytes | memoryview, expected_bytes: int) -> Raw:
    """Return the content of a zstd frame, uint8 [expected_bytes].

    Raises:
        FormatError: it states or holds another size, is damaged, or is followed by further bytes.
    """
    try:
        parameters = _check_size(data, expected_bytes)
        end = kernels.zstd_blocks_end(np.frombuffer(data, np.uint8), zstandard.frame_header_size(data))
        end += 4 if parameters.has_checksum else 0
        if end != len(data):
            raise FormatError(f"zstd frame of {len(data)} bytes: it is torn, or something follows it")
        content = np.empty(expected_bytes, np.uint8)
        with _decompressor().stream_reader(data) as reader:
            if reader.readinto(content) != expected_bytes or reader.read(1):
                raise FormatError(f"zstd frame does not hold exactly {expected_bytes} bytes")
    except zstandard.ZstdError as error:
        raise FormatError(f"zstd frame is damaged: {error}") from None
    return content


def unpack_beginning(data: bytes | memoryview, expected_bytes: int, wanted_bytes: int) -> Raw | None:
    """Return the first bytes of a zstd frame's content, uint8 [wanted_bytes]; None if ``data``, its beginning, holds fewer.

    Raises:
        FormatError: it states other than ``expected_bytes`` of content, or is damaged.
    """
    content = np.empty(wanted_bytes, np.uint8)
    try:
        _check_size(data, expected_bytes)
        with _decompressor().stream_reader(data) as reader:
            return content if reader.readinto(content) == wanted_bytes else None
    except zstandard.ZstdError as error:
        raise FormatError(f"zstd frame is damaged: {error}") from None


def _check_size(data: bytes | memoryview, expected_bytes: int) -> zstandard.FrameParameters:
    parameters = zstandard.get_frame_parameters(data)
    if parameters.content_size != expected_bytes or parameters.dict_id:
        raise FormatError(f"zstd frame states {parameters.content_size} bytes of content, expected {expected_bytes}")
    return parameters


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = _local.__dict__.get("decompressor")
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    return decompressor


def content_hash(body: Raw) -> bytes:
    """Return BLAKE3 (32 bytes) over the uncompressed bytes, uint8 [bytes]."""
    return blake3(body.data).digest()
