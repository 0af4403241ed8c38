"""Passages of the held-out text that the training text has too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco_learner.data.repeats import BLOCK_BYTES, CHUNK_BYTES, SPAN_BYTES, repeated, without_repeats

Bytes = NDArray[np.uint8]


def as_bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8).tobytes()


def reference(training: bytes, held_out: bytes) -> list[bool]:
    """Return which held-out bytes lie in a span of the set of all spans of the training text."""
    spans = {training[i : i + SPAN_BYTES] for i in range(len(training) - SPAN_BYTES + 1)}
    covered = [False] * len(held_out)
    for i in range(len(held_out) - SPAN_BYTES + 1):
        if held_out[i : i + SPAN_BYTES] in spans:
            covered[i : i + SPAN_BYTES] = [True] * SPAN_BYTES
    return covered


# pieces of few texts, repeated and cut anywhere: spans that are alike but for one byte, at their beginning, middle or end
pieces = st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(0, 150))
texts = st.lists(pieces, max_size=8).map(
    lambda cuts: b"".join(noise(300, seed)[start : start + size] for seed, start, size in cuts)
)
few_letters = st.text("ab", max_size=300).map(str.encode)


@given(st.one_of(texts, few_letters), st.one_of(texts, few_letters))
def test_equals_a_set_of_all_spans(training: bytes, held_out: bytes) -> None:
    np.testing.assert_array_equal(repeated(as_bytes(training), as_bytes(held_out)), reference(training, held_out))


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - SPAN_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 3 - SPAN_BYTES])
def test_a_span_is_found_wherever_blocks_of_training_text_begin(at: int) -> None:
    training = bytearray(noise(2 * BLOCK_BYTES + 3))
    span = noise(SPAN_BYTES, 1)
    training[at : at + SPAN_BYTES] = span
    found = repeated(as_bytes(bytes(training)), as_bytes(b"." * 10 + span + b"." * 10))
    assert list(np.flatnonzero(found)) == list(range(10, 10 + SPAN_BYTES))


def test_spans_are_of_64_bytes() -> None:
    training = noise(1000)
    assert repeated(as_bytes(training), as_bytes(training[100:164])).all()
    assert not repeated(as_bytes(training), as_bytes(training[100:163])).any()
    assert not repeated(as_bytes(training), as_bytes(training[100:163] + b"\0" + training[164:220])).any()
    assert not repeated(as_bytes(training[:63]), as_bytes(training[:63] * 2)).any()


@pytest.mark.parametrize(("copied", "left_out"), [(CHUNK_BYTES // 2, False), (CHUNK_BYTES // 2 + 1, True)])
def test_a_chunk_goes_if_more_than_half_of_it_is_repeated(copied: int, left_out: bool) -> None:
    training = noise(4096)
    own = noise(2 * CHUNK_BYTES + 100, 1)
    middle = training[:copied] + noise(CHUNK_BYTES - copied, 2)
    # what differs at the copy's end must not be a longer copy by chance
    assert middle[copied : copied + 1] != training[copied : copied + 1]
    held_out = own[:CHUNK_BYTES] + middle + own[CHUNK_BYTES:]
    result = without_repeats(as_bytes(training), as_bytes(held_out))
    assert result.text.tobytes() == (own if left_out else held_out)
    assert result.repeated_bytes == (CHUNK_BYTES if left_out else 0)
    assert not result.all_kept


def test_the_last_chunk_counts_by_its_own_length() -> None:
    training, own = noise(4096), noise(2 * CHUNK_BYTES, 1)
    result = without_repeats(as_bytes(training), as_bytes(own + training[:70]))
    assert (result.text.tobytes(), result.repeated_bytes) == (own, 70)


def test_repetitions_of_one_text_are_kept_whole() -> None:
    text = as_bytes(b"for i in range(10):\n    print(i)\n" * 1000)
    result = without_repeats(text[:30000], text[30000:])
    np.testing.assert_array_equal(result.text, text[30000:])
    assert (result.repeated_bytes, result.all_kept) == (text.size - 30000, True)


def test_a_tenth_is_enough_to_evaluate_on() -> None:
    training, own = noise(9 * CHUNK_BYTES), noise(CHUNK_BYTES, 1)
    assert without_repeats(as_bytes(training), as_bytes(training + own)).text.tobytes() == own
    more = as_bytes(training + training[:CHUNK_BYTES] + own)
    assert without_repeats(as_bytes(training), more).all_kept


def test_no_text() -> None:
    result = without_repeats(as_bytes(b"text"), as_bytes(b""))
    assert (result.text.size, result.repeated_bytes, result.all_kept) == (0, 0, False)
    assert without_repeats(as_bytes(b""), as_bytes(b"text")).text.tobytes() == b"text"
