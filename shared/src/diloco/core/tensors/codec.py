"""Compression of bodies: one zstd frame each, sizes bounded before anything is allocated."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import IO, cast

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors.compiled import kernels
from diloco.errors import FormatError, NonFiniteError

Raw = NDArray[np.uint8]
MAX_WINDOW_BYTES = 1 << 27  # of zstd frames that are read
MAX_HEADER_BYTES = 18  # of a zstd frame (RFC 8878, 3.1.1)
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


def unpack(pieces: Sequence[bytes], expected_bytes: int) -> Raw:
    """Return the content of a zstd frame that lies in pieces, uint8 [expected_bytes]; they are never joined.

    Raises:
        FormatError: it states or holds another size, is damaged, or is followed by further bytes.
    """
    try:
        header, size_bytes = _header(pieces), sum(map(len, pieces))
        scan = _FrameScan(header, expected_bytes)
        for piece in pieces:
            scan.take(piece)
        scan.check_end(size_bytes)
        content = np.empty(expected_bytes, np.uint8)
        with _decompressor().stream_reader(cast(IO[bytes], _Source(pieces))) as reader:
            if reader.readinto(content) != expected_bytes or reader.read(1):
                raise FormatError(f"zstd frame does not hold exactly {expected_bytes} bytes")
    except zstandard.ZstdError as error:
        raise FormatError(f"zstd frame is damaged: {error}") from None
    return content


class ContentStart:
    """The first bytes of the content of a zstd frame that comes in pieces, so that only the content is in memory as a whole.

    They are written into ``arrays``, uint8 [any], one after another.
    """

    def __init__(self, expected_bytes: int, arrays: Sequence[Raw]) -> None:
        self.expected_bytes, self.arrays = expected_bytes, arrays
        self._content = _Content(expected_bytes, self.arrays)  # no cycle: arrays are large, and are freed at once
        self._writer: zstandard.ZstdDecompressionWriter | None = None

    @property
    def complete(self) -> bool:
        """Whether all that is wanted is there."""
        return self._content.written_bytes >= sum(array.size for array in self.arrays)

    def feed(self, pieces: Sequence[bytes]) -> None:
        """Take the frame's next pieces; the first of all has its header.

        Raises:
            FormatError: it states other than the expected bytes of content, or holds more, or is damaged.
        """
        try:
            for piece in pieces:
                if self._writer is None:
                    _check_size(piece, self.expected_bytes)
                    own = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
                    self._writer = own.stream_writer(cast(IO[bytes], self._content))
                if not self.complete:
                    self._writer.write(piece)
        except zstandard.ZstdError as error:
            raise FormatError(f"zstd frame is damaged: {error}") from None


class ContentDigests:
    """Hashes of the content of a zstd frame that comes in pieces, none of which is kept.

    ``sections``: sizes in bytes of what the content consists of. The values of the last section are float32.
    """

    def __init__(self, sections: Sequence[int]) -> None:
        self._content = _DigestedContent(sections)
        self._expected_bytes, self._size_bytes = sum(sections), 0
        self._scan: _FrameScan | None = None
        self._writer: zstandard.ZstdDecompressionWriter | None = None

    def feed(self, pieces: Sequence[bytes]) -> None:
        """Take the frame's next pieces; the first of all has its header.

        Raises:
            FormatError: it states other than the expected bytes of content, or holds more, or is damaged.
            NonFiniteError: a value of the last section is NaN or infinite.
        """
        try:
            for piece in pieces:
                if self._scan is None or self._writer is None:
                    self._scan = _FrameScan(piece[:MAX_HEADER_BYTES], self._expected_bytes)
                    own = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
                    self._writer = own.stream_writer(cast(IO[bytes], self._content))
                self._scan.take(piece)
                self._size_bytes += len(piece)
                self._writer.write(piece)
        except zstandard.ZstdError as error:
            raise FormatError(f"zstd frame is damaged: {error}") from None

    def digests(self) -> tuple[bytes, list[bytes]]:
        """Return the hash of all the content, and that of each section.

        Raises:
            FormatError: the frame was cut short, or other data followed it.
        """
        if self._scan is None or self._content.written_bytes != self._expected_bytes:
            raise FormatError(f"zstd frame does not hold exactly {self._expected_bytes} bytes")
        self._scan.check_end(self._size_bytes)
        return self._content.whole.digest(), [hasher.digest() for hasher in self._content.hashers]


class _DigestedContent:
    """Where zstd writes content that is hashed, as a whole and by section."""

    def __init__(self, sections: Sequence[int]) -> None:
        self.written_bytes, self._ends = 0, list(accumulate(sections))
        self.whole, self.hashers = blake3(), [blake3() for _ in sections]
        self._section, self._carried = 0, b""

    def write(self, data: bytes) -> int:
        if self.written_bytes + len(data) > self._ends[-1]:
            raise FormatError(f"zstd frame holds more than {self._ends[-1]} bytes")
        self.whole.update(data)
        taken = 0
        while taken < len(data):
            while self.written_bytes == self._ends[self._section]:
                self._section += 1
            part = data[taken : taken + self._ends[self._section] - self.written_bytes]
            self.hashers[self._section].update(part)
            if self._section == len(self._ends) - 1:
                self._check_finite(part)
            taken, self.written_bytes = taken + len(part), self.written_bytes + len(part)
        return len(data)

    def _check_finite(self, part: bytes) -> None:
        data = self._carried + part
        values = np.frombuffer(data, "<f4", len(data) // 4)
        if not np.isfinite(values).all():
            raise NonFiniteError("a value is NaN or infinite")
        self._carried = data[4 * values.size :]


class _Content:
    """Where zstd writes content: into arrays, one after another; what they do not take is dropped."""

    def __init__(self, expected_bytes: int, arrays: Sequence[Raw]) -> None:
        self.written_bytes, self._expected_bytes, self._arrays = 0, expected_bytes, arrays

    def write(self, data: bytes) -> int:
        if self.written_bytes + len(data) > self._expected_bytes:
            raise FormatError(f"zstd frame holds more than {self._expected_bytes} bytes")
        taken, at = 0, self.written_bytes
        for array in self._arrays:
            part = data[taken : taken + max(0, array.size - at)]
            array[at : at + len(part)] = np.frombuffer(part, np.uint8)
            taken, at = taken + len(part), max(0, at - array.size)
        self.written_bytes += len(data)
        return len(data)


class _Source:
    """Pieces as zstd reads them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces, self._at = iter(pieces), 0
        self._piece = b""

    def read(self, size: int) -> bytes:
        while self._at == len(self._piece):
            following = next(self._pieces, None)
            if following is None:
                return b""
            self._piece, self._at = following, 0
        data = self._piece[self._at : self._at + size]
        self._at += len(data)
        return data


def _header(pieces: Sequence[bytes]) -> bytes:
    """Return the first bytes of a frame, its header among them."""
    header = b""
    for piece in pieces:
        header += piece[:MAX_HEADER_BYTES]
        if len(header) >= MAX_HEADER_BYTES:
            break
    return header


class _FrameScan:
    """Finds where a zstd frame ends that comes in pieces.

    Raises:
        FormatError: its ``header`` states other than the expected bytes of content.
        zstandard.ZstdError: the header is damaged.
    """

    def __init__(self, header: bytes, expected_bytes: int) -> None:
        self._checksum_bytes = 4 if _check_size(header, expected_bytes).has_checksum else 0
        self._at = zstandard.frame_header_size(header)  # where the next block begins
        self._end: int | None = None  # of the blocks
        self._kept, self._begin = b"", 0  # bytes that are read with the next piece: of a block's header; where they begin

    def take(self, piece: bytes) -> None:
        """Look at the next piece."""
        if self._end is not None:
            return
        data = self._kept + piece if self._kept else piece
        found = int(kernels.zstd_blocks_end(np.frombuffer(data, np.uint8), self._at - self._begin))
        if found < 0:
            self._end = self._begin - 1 - found
            return
        self._at, self._kept = self._begin + found, data[found:]
        self._begin += len(data) - len(self._kept)

    def check_end(self, size_bytes: int) -> None:
        """Find out whether the frame ends where its pieces do.

        Raises:
            FormatError: it does not.
        """
        if self._end is None or self._end + self._checksum_bytes != size_bytes:
            raise FormatError(f"zstd frame of {size_bytes} bytes: it is cut short, or other data follows it")


def _check_size(data: bytes, expected_bytes: int) -> zstandard.FrameParameters:
    parameters = zstandard.get_frame_parameters(data)
    if parameters.content_size != expected_bytes or parameters.dict_id:
        raise FormatError(f"zstd frame states {parameters.content_size} bytes of content, expected {expected_bytes}")
    return parameters


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = _local.__dict__.get("decompressor")
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    return decompressor


def content_hash(body: Raw) -> bytes:
    """Return BLAKE3 (32 bytes) over the uncompressed bytes, uint8 [bytes]."""
    return blake3(body.data).digest()
