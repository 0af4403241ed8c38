"""Chunks of arrays: cut at a size, they make up what they were cut from, and overlap what an array's index says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.tensors.chunks import Chunk

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, count: int = 1) -> list[Chunk]:
    """Chunks of one array."""
    shape = draw(SHAPES)

    def box() -> Chunk:
        ends = [sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))) for length in shape]
        return Chunk("a", shape, "float32", tuple(first for first, _ in ends), tuple(last for _, last in ends))

    return [box() for _ in range(count)]


@given(boxes(), st.integers(1, 200))
def test_the_cut_pieces_are_contiguous_and_bounded(drawn: list[Chunk], most_bytes: int) -> None:
    [chunk] = drawn
    array = np.arange(np.prod(chunk.shape, dtype=int), dtype=np.float32).reshape(chunk.shape)
    parts = list(chunk.cut(most_bytes))
    assert all(part.size_bytes <= max(most_bytes, 4) for part in parts)
    joined = np.concatenate([array[part.where].reshape(-1) for part in parts])
    np.testing.assert_array_equal(joined, array[chunk.where].reshape(-1))
    assert len(parts) == 1 or chunk.size_bytes > most_bytes


@given(boxes(2))
def test_overlaps_are_those_of_masks(drawn: list[Chunk]) -> None:
    one, other = drawn
    masks = [np.zeros(one.shape, bool) for _ in drawn]
    for mask, chunk in zip(masks, drawn, strict=True):
        mask[chunk.where] = True
    both, common = masks[0] & masks[1], one.overlap(other)
    assert (common is None) == (not both.any())
    if common is not None:
        mask = np.zeros(one.shape, bool)
        mask[common.where] = True
        np.testing.assert_array_equal(mask, both)
        values = np.arange(both.size).reshape(both.shape)
        for chunk in drawn:
            np.testing.assert_array_equal(values[chunk.where][common.within(chunk)], values[common.where])


def test_an_array_that_is_small_or_has_no_values_is_one_chunk() -> None:
    for shape in ((), (0, 3), (7,)):
        whole = Chunk.whole("a", shape, "int32")
        assert list(whole.cut()) == [whole]
        assert whole.is_whole
    assert Chunk.whole("a", (0, 3), "int32").overlap(Chunk.whole("a", (0, 3), "int32")) is None
    assert [part.lengths for part in Chunk.whole("a", (3, 5 << 20), "float32").cut()] == [
        (1, 4 << 20),
        (1, 1 << 20),
    ] * 3  # rows of 20 MiB in chunks of 16
