"""Documents into rows: nothing twice, nothing lost uncounted, and no two rows that would fit into one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from diloco_learner.chats import packing


def numbers(*values: int) -> packing.Numbers:
    return np.array(values, np.int64)


@given(lengths=some.lists(some.integers(1, 12), max_size=60))
def test_each_piece_is_in_one_row_and_no_two_rows_fit_into_one(lengths: list[int]) -> None:
    order, ends = packing.pack(numbers(*lengths), 12)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in row) for row in np.split(order, ends[:-1])] if lengths else []
    assert all(size <= 12 for size in filled)
    smallest = sorted(filled)[:2]
    assert len(smallest) < 2 or sum(smallest) > 12


def test_a_document_goes_where_it_leaves_least_room() -> None:
    order, ends = packing.pack(numbers(3, 7, 2, 8, 5), 10)  # 8 with 2, 7 with 3, 5
    assert [sorted(row.tolist()) for row in np.split(order, ends[:-1])] == [[2, 3], [0, 1], [4]]


def test_a_piece_that_is_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="a piece of 11 tokens does not fit into rows of 10"):
        packing.pack(numbers(11), 10)


def test_what_is_cut_divided_left_out_and_lost_is_counted() -> None:
    documents = [
        [0, 1, 1],  # fits
        [0, 1, 0, 0, 1, 1],  # is cut: two of its three learned tokens are in its end
        [0, 0, 0, 0, 1],  # nothing of its first four tokens is learned
        [1, 1, 1, 1, 1, 1, 1, 1, 1],  # a text in pieces of 4, 4 and 1, of which the last predicts nothing
    ]
    learned = np.concatenate(documents).astype(np.bool_)
    found = packing.pieces(numbers(3, 9, 14, 23), learned, np.array([False, False, False, True]), 4)
    assert found.begins.tolist() == [0, 3, 14, 18]
    assert found.lengths.tolist() == [3, 4, 4, 4]
    assert (found.cut, found.divided, found.dropped) == (1, 1, 1)
    assert found.lost == 2 + 5 + 1
    assert found.trained == 2 + 1 + 3 + 3  # a piece's first token is not learned


@given(
    lengths=some.lists(some.integers(1, 9), min_size=1, max_size=20),
    seed=some.integers(0, 99),
    divides=some.booleans(),
)
def test_tokens_in_rows_and_lost_are_all(lengths: list[int], seed: int, divides: bool) -> None:
    learned = np.random.default_rng(seed).random(sum(lengths)) < 0.5
    found = packing.pieces(np.cumsum(lengths), learned, np.full(len(lengths), divides), 4)
    assert found.lengths.sum() + found.lost == sum(lengths)
    inner = [learned[begin + 1 : begin + size].sum() for begin, size in zip(found.begins, found.lengths, strict=True)]
    assert found.trained == sum(inner)
    assert all(inner)
