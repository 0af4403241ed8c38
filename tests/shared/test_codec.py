"""zstd frames of bodies: what is refused, and that threads do not disturb one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.tensors import codec
from diloco.errors import FormatError, MessageError, NonFiniteError


@given(st.binary(max_size=5000), st.sampled_from([-5, -1, 1, 3]))
def test_round_trip(data: bytes, level: int) -> None:
    body = np.frombuffer(data, np.uint8)
    packed = codec.pack(body, level)
    assert zstandard.ZstdDecompressor().decompress(packed) == data
    assert len(packed) <= codec.packed_limit(len(data))
    assert codec.unpack([packed], len(data)).tobytes() == data


def test_what_does_not_compress_stays_within_the_limit() -> None:
    body = np.random.default_rng(0).integers(0, 256, 1_000_000).astype(np.uint8)
    assert len(codec.pack(body, -1)) <= codec.packed_limit(body.size)


@pytest.mark.parametrize("expected", [0, 99, 101, 1 << 40])
def test_a_frame_of_another_size_is_refused(expected: int) -> None:
    packed = codec.pack(np.zeros(100, np.uint8), 1)
    with pytest.raises(FormatError, match="states 100 bytes"):
        codec.unpack([packed], expected)


def test_a_frame_without_a_size_is_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 100)
    with pytest.raises(FormatError):
        codec.unpack([packed], 100)


def test_a_frame_that_states_less_than_it_holds_is_refused() -> None:
    """100 in the header (one byte, after magic and descriptor), 200 inside."""
    honest = bytearray(codec.pack(np.arange(200, dtype=np.uint8), 1))
    assert honest[5] == 200
    honest[5] = 100
    with pytest.raises(FormatError):
        codec.unpack([bytes(honest)], 100)


@pytest.mark.parametrize("tail", [b"x", b"\0" * 20])
def test_bytes_after_the_frame_are_refused(tail: bytes) -> None:
    body = np.arange(100, dtype=np.uint8)
    with pytest.raises(FormatError):
        codec.unpack([codec.pack(body, 1) + tail], 100)


def test_a_second_frame_is_refused() -> None:
    packed = codec.pack(np.arange(100, dtype=np.uint8), 1)
    with pytest.raises(FormatError):
        codec.unpack([packed + packed], 100)


@pytest.mark.parametrize(
    "behind",
    [
        "28b52ffd 20 00 010000",  # a frame of nothing
        "28b52ffd 00 88 010000",  # one that wants a window of 128 MiB
        "502a4d18 04000000 61626364",  # one to be skipped
        "502a4d18 ffffffff",  # 4 GiB to be skipped, which are not there
    ],
)
def test_a_frame_without_content_behind_it_is_refused(behind: str) -> None:
    packed = codec.pack(np.arange(100, dtype=np.uint8), 1)
    with pytest.raises(FormatError, match="other data follows it"):
        codec.unpack([packed + bytes.fromhex(behind)], 100)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("size", [0, 100, 300_000])  # of several blocks
@pytest.mark.parametrize("content", ["zeros", "random"])
def test_frames_of_other_encoders_are_taken(content: str, size: int, checksum: bool) -> None:
    body = np.zeros(size, np.uint8) if content == "zeros" else np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    packed = zstandard.ZstdCompressor(level=19, write_checksum=checksum).compress(body.data)
    assert (codec.unpack([packed], size) == body).all()
    with pytest.raises(FormatError):
        codec.unpack([packed + b"\0"], size)


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 131_072, 400_000])
@pytest.mark.parametrize("content", ["zeros", "random"])
def test_a_frame_may_lie_in_pieces_of_any_size(content: str, step: int) -> None:
    body = np.zeros(9000, np.uint8) if content == "zeros" else np.random.default_rng(0).integers(0, 256, 9000).astype(np.uint8)
    body = np.tile(body, 1 if step < 1000 else 40)
    packed = codec.pack(body, -1)
    pieces = [packed[at : at + step] for at in range(0, len(packed), step)]
    assert (codec.unpack(pieces, body.size) == body).all()
    assert (codec.unpack([b"", *pieces, b""], body.size) == body).all()
    for damaged in (pieces[:-1], [*pieces, b"x"], [*pieces[:-1], pieces[-1][:-1]], [*pieces, *pieces]):
        with pytest.raises(FormatError):
            codec.unpack(damaged, body.size)


def test_truncated_frames_are_refused() -> None:
    packed = codec.pack(np.arange(200, dtype=np.uint8), 1)
    for length in range(len(packed)):
        with pytest.raises(FormatError):
            codec.unpack([packed[:length]], 200)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_or_give_what_was_asked_for(data: bytes, expected: int) -> None:
    with contextlib.suppress(FormatError):
        assert codec.unpack([data], expected).size == expected


def test_threads_do_not_share_contexts() -> None:
    bodies = [np.random.default_rng(i).integers(0, 9, 20_000).astype(np.uint8) for i in range(32)]

    def turn(body: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
        return codec.unpack([codec.pack(body, 1)], body.size).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(turn, bodies)) == [body.tobytes() for body in bodies]


def test_the_hash_is_over_the_uncompressed_bytes() -> None:
    body = np.arange(100, dtype=np.uint8)
    assert codec.content_hash(body) == blake3(bytes(range(100))).digest()


def test_the_beginning_of_a_frame_holds_the_beginning_of_its_content() -> None:
    body = np.random.default_rng(0).integers(0, 200, 1_000_000).astype(np.uint8)
    packed = codec.pack(body, -1)
    pieces = [packed[at : at + 100_000] for at in range(0, len(packed), 100_000)]
    beginning, complete = codec.ContentStart(body.size, [np.empty(450_000, np.uint8), np.empty(150_000, np.uint8)]), []
    for piece in pieces:
        beginning.feed([piece])
        complete.append(beginning.complete)
    # of content that compresses alike, six of ten pieces hold six tenths; zstd gives what it has block by block
    assert complete in ([False] * 5 + [True] * (len(pieces) - 5), [False] * 6 + [True] * (len(pieces) - 6))
    assert b"".join(array.tobytes() for array in beginning.arrays) == body[:600_000].tobytes()
    whole = codec.ContentStart(body.size, [np.empty_like(body)])
    whole.feed(pieces)
    assert whole.arrays[0].tobytes() == body.tobytes()
    with pytest.raises(FormatError, match="states 1000000 bytes"):
        codec.ContentStart(body.size + 1, [np.empty(600_000, np.uint8)]).feed(pieces)
    with pytest.raises(FormatError, match="zstd frame is damaged"):
        codec.ContentStart(body.size, [np.empty(600_000, np.uint8)]).feed([b"no frame"])


# ---- content that is hashed, and not kept


def float_body() -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], bytes]:
    """A body of 3000 values, and its frame."""
    body = np.random.default_rng(0).normal(size=3000).astype("<f4").view(np.uint8)
    return body, codec.pack(body, 1)


def digested(pieces: list[bytes], sections: list[int]) -> tuple[bytes, list[bytes]]:
    digests = codec.ContentDigests(sections)
    digests.feed(pieces)
    return digests.digests()


@pytest.mark.parametrize("step", [19, 1000, 4000, 100_000])
def test_content_in_pieces_has_the_hashes_of_the_whole(step: int) -> None:
    body, packed = float_body()
    pieces = [packed[at : at + step] for at in range(0, len(packed), step)]
    whole, sections = digested(pieces, [4001, 3999, 4000])
    assert whole == codec.content_hash(body)
    assert sections == [
        blake3(body[start:stop].tobytes()).digest() for start, stop in ((0, 4001), (4001, 8000), (8000, 12_000))
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-1],
        lambda packed: packed + b"x",
        lambda packed: packed + packed,
        lambda packed: packed + bytes.fromhex("28b52ffd 20 00 010000"),  # a frame of nothing
        lambda packed: packed + bytes.fromhex("502a4d18 04000000 61626364"),  # one to be skipped
        lambda packed: b"no frame of zstd, of no compressor",
        lambda packed: zstandard.ZstdCompressor().compress(bytes(11_996)),
        lambda packed: packed[:200] + b"\xff" * 8 + packed[208:],
    ],
)
def test_what_is_not_taken_as_a_whole_is_not_taken_in_pieces(damage: Callable[[bytes], bytes]) -> None:
    body, packed = float_body()
    damaged = damage(packed)
    for step in (19, 1000, 100_000):
        pieces = [damaged[at : at + step] for at in range(0, len(damaged), step)]
        try:
            found = digested(pieces, [8000, 4000])[0]
        except MessageError:
            continue
        assert found != codec.content_hash(body)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [2000, 2999])
def test_the_last_section_holds_finite_values(value: float, at: int) -> None:
    body, _ = float_body()
    body.view("<f4")[at] = value
    packed = codec.pack(body, 1)
    for step in (19, 1001, 100_000):
        with pytest.raises(NonFiniteError):
            digested([packed[start : start + step] for start in range(0, len(packed), step)], [4000, 4000, 4000])
