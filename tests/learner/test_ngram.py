"""N-gram models against a plain dictionary implementation, and by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco.errors import DataError
from diloco_learner.data.ngram import ngram_losses


def as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


def test_unigram_by_hand() -> None:
    # "aab": N = 3, T = 2; P(a) = (2 + 2/256) / 5, P(c) = (0 + 2/256) / 5
    losses = ngram_losses(as_bytes(b"aab"), as_bytes(b"ac"), (1,))
    assert losses[1] == pytest.approx(-(math.log((2 + 2 / 256) / 5) + math.log(2 / 256 / 5)) / 2)


def test_bigram_by_hand() -> None:
    # "abab": unigrams a 2, b 2, T = 2; after "a" always "b", N = 2, T = 1
    unigram_b = (2 + 2 / 256) / 6
    losses = ngram_losses(as_bytes(b"abab"), as_bytes(b"ab"), (2,))
    assert losses[2] == pytest.approx(-(math.log(unigram_b) + math.log((2 + unigram_b) / 3)) / 2)


def reference(training: bytes, held_out: bytes, order: int) -> float:
    followers: dict[bytes, Counter[int]] = defaultdict(Counter)
    for length in range(order):
        for i in range(len(training) - length):
            followers[training[i : i + length]][training[i + length]] += 1

    def probability(context: bytes, byte: int) -> float:
        shorter = probability(context[1:], byte) if context else 1 / 256
        counts = followers.get(context)
        if counts is None:
            return shorter
        return (counts[byte] + len(counts) * shorter) / (counts.total() + len(counts))

    bytes_ = range(len(held_out))
    return -sum(math.log(probability(held_out[max(0, i - order + 1) : i], held_out[i])) for i in bytes_) / len(held_out)


@given(st.binary(min_size=4, max_size=80), st.binary(min_size=4, max_size=30))
def test_equals_a_plain_implementation(training: bytes, held_out: bytes) -> None:
    losses = ngram_losses(as_bytes(training), as_bytes(held_out), (1, 2, 3, 4))
    assert losses == pytest.approx({order: reference(training, held_out, order) for order in (1, 2, 3, 4)})


def test_longer_context_is_better_on_regular_text() -> None:
    text = as_bytes(b"for i in range(10):\n    print(i)\n" * 20)
    losses = ngram_losses(text, text)
    assert losses[4] < losses[2] < losses[1]


def test_too_short() -> None:
    with pytest.raises(DataError, match="3 bytes of held-out text, at least 4"):
        ngram_losses(as_bytes(b"abcd"), as_bytes(b"abc"))


def test_orders_out_of_range() -> None:
    with pytest.raises(ValueError, match="expected 1 to 4"):
        ngram_losses(as_bytes(b"abcdefg"), as_bytes(b"abcdefg"), (5,))
