"""Rows of a fragment: dealt to processes by size, and taken and put back where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.tensors.fragments import Piece
from diloco.core.tensors.rows import FragmentRows, at, carriers


def test_fragments_are_dealt_by_bytes_and_alike_everywhere() -> None:
    assert carriers([5, 1, 1, 1, 4], 2) == [0, 1, 0, 1, 1]  # 5 and 1 against 4, 1 and 1
    assert carriers([3, 3, 3, 3], 4) == [0, 1, 2, 3]
    assert carriers([7], 3) == [0]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 5))
def test_no_process_carries_more_than_another_by_more_than_one_of_its_fragments(sizes: list[int], processes: int) -> None:
    carried: list[list[int]] = [[] for _ in range(processes)]
    for size, process in zip(sizes, carriers(sizes, processes), strict=True):
        carried[process].append(size)
    least = min(map(sum, carried))
    assert all(sum(own) - min(own) <= least for own in carried if own)


def test_rows_are_taken_and_put_back_where_they_were() -> None:
    piece = Piece("w", 2, 4, (2, 3), 1, embedding=False)  # rows 2 and 3 of a tensor of three columns, behind another value
    rows = FragmentRows(((piece, (slice(0, 2), slice(1, 3))),))
    vector = np.arange(7, dtype=np.float32)
    assert rows.size == 4
    assert rows.take(vector).tolist() == [2, 3, 5, 6]
    other = np.zeros(7, np.float32)
    rows.put(rows.take(vector), other)
    assert other.tolist() == [0, 0, 2, 3, 0, 5, 6]
    with pytest.raises(ValueError, match="3 values came, expected 4"):
        rows.put(np.zeros(3, np.float32), other)


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[int, list[FragmentRows]]:
    """A fragment's size, and the rows of two processes: each tensor of it is split along one axis."""
    parts: list[list[tuple[Piece, tuple[slice, ...]]]] = [[], []]
    offset = 0
    for number in range(draw(st.integers(1, 4))):
        shape: Sequence[int] = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        piece = Piece(f"w{number}", 0, shape[0], tuple(shape), offset, embedding=False)
        offset += piece.size
        axis = draw(st.integers(0, len(shape) - 1))
        middle = draw(st.integers(0, shape[axis]))
        for own, ends in zip(parts, (slice(0, middle), slice(middle, shape[axis])), strict=True):
            own.append((piece, (*(slice(0, length) for length in shape[:axis]), ends)))
    return offset, [FragmentRows(tuple(own)) for own in parts]


@given(shared_out(), st.integers(1, 9))
def test_pieces_of_rows_are_these_rows_in_their_order(drawn: tuple[int, list[FragmentRows]], most: int) -> None:
    size, processes = drawn
    vector = np.arange(1, size + 1, dtype=np.float32)
    for rows in processes:
        pieces = list(rows.cut(4 * most))
        assert all(0 < piece.size <= most for piece in pieces)
        taken = [piece.take(vector) for piece in pieces]
        np.testing.assert_array_equal(np.concatenate([np.empty(0, np.float32), *taken]), rows.take(vector))


@pytest.mark.parametrize(
    "where", [(slice(1, 3), slice(0, 2)), (slice(0, 4, 2),), (slice(0, 4, 2), slice(1, 2)), (slice(2, 2), slice(None))]
)
def test_values_at_a_place_are_those_of_the_piece(where: tuple[slice, ...]) -> None:
    piece = Piece("w", 0, 4, (4, 3), 2, embedding=False)
    vector = np.arange(20, dtype=np.float32)
    expected = vector[2:14].reshape(4, 3)[where]
    np.testing.assert_array_equal(at(vector, piece, where), expected)
    taken = FragmentRows(((piece, where),)).take(vector)
    assert taken.flags.c_contiguous
    np.testing.assert_array_equal(taken, expected.reshape(-1))


@given(shared_out())
def test_rows_of_all_processes_make_up_the_fragment(drawn: tuple[int, list[FragmentRows]]) -> None:
    size, processes = drawn
    vector = np.arange(1, size + 1, dtype=np.float32)
    whole = np.zeros(size, np.float32)
    for rows in processes:
        taken = rows.take(vector)
        assert taken.shape == (rows.size,)
        rows.put(taken, whole)
    assert sum(rows.size for rows in processes) == size
    np.testing.assert_array_equal(whole, vector)
