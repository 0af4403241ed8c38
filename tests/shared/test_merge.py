"""Merges by hand, and against the formulas of the paper in float64."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.fragment_vectors import vector

from diloco.core.tensors import merge, quantise
from diloco.core.tensors.merge import Accumulator

Vector = NDArray[np.float32]
Segments = NDArray[np.int64]
Method = Literal["rda", "average"]


def merged(method: Method, segments: list[int] | Segments, *weighted: tuple[Vector, float]) -> list[float]:
    bounds = np.array(segments, np.int64)
    accumulator = Accumulator(int(bounds[-1]), bounds, method)
    for values, weight in weighted:
        accumulator.add_values(values, weight)
    result: list[float] = accumulator.result().tolist()
    return result


def reference(method: Method, segments: Segments, vectors: list[Any], weights: list[float]) -> NDArray[np.float64]:
    """``sum w v / sum w``, or ``(sum w ||v|| / sum w) * phi(sum w phi(v) / sum w)`` by segment; nothing cancels here."""
    rows, share = np.array(vectors, np.float64), np.array(weights) / np.sum(weights)
    if method == "average":
        average: NDArray[np.float64] = share @ rows
        return average
    result = np.zeros(rows.shape[1])
    for start, stop in itertools.pairwise(segments.tolist()):
        part = rows[:, start:stop]
        norms = np.linalg.norm(part, axis=1)
        directions = np.divide(part, norms[:, None], out=np.zeros_like(part), where=norms[:, None] > 0)
        mean = share @ directions
        length = np.linalg.norm(mean)
        result[start:stop] = (share @ norms) * (mean / length if length else mean)
    return result


def test_the_average_by_hand() -> None:
    # (1 * (1, 2, 3) + 3 * (5, -2, 7)) / 4
    assert merged("average", [0, 3], (vector(1, 2, 3), 1), (vector(5, -2, 7), 3)) == [4, -1, 6]


def test_radial_directional_averaging_by_hand() -> None:
    # per tensor: directions (1, 0) and (0, 1), norms 3 and 1, weights 1 and 3: radius (3 + 3) / 4, direction (1, 3) / sqrt(10)
    expected = [1.5 / 10**0.5, 4.5 / 10**0.5]
    assert merged("rda", [0, 2], (vector(3, 0), 1), (vector(0, 1), 3)) == pytest.approx(expected, rel=1e-6)
    # per row, the rows being single values here: each keeps its sign, and its mean size counting zeros
    assert merged("rda", [0, 1, 2], (vector(3, 0), 1), (vector(0, 1), 3)) == pytest.approx([0.75, 0.75], rel=1e-6)


def test_orthogonal_vectors_keep_their_length() -> None:
    # the reason for the method: a plain average of four orthogonal unit vectors has length 1/2
    units = [(np.eye(4, dtype=np.float32)[i], 1.0) for i in range(4)]
    assert merged("average", [0, 4], *units) == [0.25] * 4
    assert merged("rda", [0, 4], *units) == pytest.approx([0.5] * 4, rel=1e-6)


@pytest.mark.parametrize("method", ["rda", "average"])
@pytest.mark.parametrize("weight", [1e-6, 1.0, 12345.6, 1e15])
def test_one_learner_gets_its_own_back(method: Method, weight: float) -> None:
    values = vector(3, -4, 0, 1e-12, 5e8, -0.25)
    assert merged(method, [0, 2, 3, 6], (values, weight)) == pytest.approx(values.tolist(), rel=1e-6)


@pytest.mark.parametrize("method", ["rda", "average"])
def test_who_has_no_weight_has_no_say(method: Method) -> None:
    alone = merged(method, [0, 2], (vector(3, 4), 2))
    assert merged(method, [0, 2], (vector(-50, 1), 0), (vector(3, 4), 2), (vector(9, 9), 0)) == alone
    assert merged(method, [0, 2], (vector(3, 4), 0)) == [0, 0]
    assert merged(method, [0, 2]) == [0, 0]


@pytest.mark.parametrize("method", ["rda", "average"])
def test_opposite_directions_of_equal_weight_cancel(method: Method) -> None:
    assert merged(method, [0, 2], (vector(3, 4), 2), (vector(-3, -4), 2)) == [0, 0]


def test_of_opposite_directions_the_heavier_wins_and_keeps_the_mean_length() -> None:
    # weights 3 and 1, lengths 5 and 10: the mean direction is half of (0.6, 0.8), made a unit; the mean length is 25 / 4
    result = merged("rda", [0, 2], (vector(3, 4), 3), (vector(-6, -8), 1))
    assert result == pytest.approx([0.6 * 6.25, 0.8 * 6.25], rel=1e-6)


def test_where_directions_nearly_cancel_the_average_counts() -> None:
    # the mean direction has length (a - b) / (a + b): just above 1/1000 it is made a unit vector, just below it is not
    above, below = (1.0011, 0.9989), (1.0009, 0.9991)
    for (a, b), expected in ((above, 5.0), (below, 5 * 0.0009)):
        assert merged("rda", [0, 1], (vector(5), a), (vector(-5), b)) == pytest.approx([expected], rel=1e-3)


def test_zero_vectors_have_length_but_no_direction() -> None:
    # radius (0 + 5) / 2 along (0.6, 0.8)
    assert merged("rda", [0, 2], (vector(0, 0), 1), (vector(3, 4), 1)) == pytest.approx([1.5, 2], rel=1e-6)
    assert merged("rda", [0, 2], (vector(0, 0), 1), (vector(0, 0), 1)) == [0, 0]
    # one segment of zeros does not touch its neighbours
    assert merged("rda", [0, 1, 2], (vector(0, 2), 1), (vector(0, 2), 1)) == [0, 2]


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_vectors_too_short_for_a_unit_vector_have_no_direction(bits: int) -> None:
    # 12,800 / 7e-37 is 1.8e40, and the largest float32 3.4e38. 1e-33 is long enough
    for length, expected in ((7e-37, [0.0, 0.0]), (1e-33, [0.0, 1e-33])):
        accumulator = Accumulator(2, np.array([0, 2]), "rda")
        body = quantise.quantise(vector(0, length), bits)
        for _ in range(2):
            accumulator.add(body, bits, 12800.0)
        assert accumulator.result().tolist() == pytest.approx(expected, rel=0.01, abs=0)
    # beside a vector of ordinary length it counts as zero: radius (0 + 5) / 2 along (0.6, 0.8)
    assert merged("rda", [0, 2], (vector(0, 7e-37), 12800), (vector(3, 4), 12800)) == pytest.approx([1.5, 2], rel=1e-6)


GRANULARITIES = {
    "tensor": [0, 5000],
    "row": [*range(0, 5000, 50), 5000],
    "ragged": [0, 1, 63, 64, 700, 701, 3000, 5000],
    "values": list(range(5001)),
}


@pytest.mark.parametrize("method", ["rda", "average"])
@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_any_offers_against_the_formula(bits: int, name: str, method: Method) -> None:
    rng, segments = np.random.default_rng(1), np.array(GRANULARITIES[name])
    weights = [1.0, 300.0, 0.0, 12.5, 70.0]
    common = rng.standard_normal(5000)  # so that no sum of signs cancels: that case has tests of its own
    vectors = [(common * 3 + np.sign(common) * np.abs(rng.standard_normal(5000))).astype(np.float32) for _ in weights]
    bodies = [quantise.quantise(values, bits) for values in vectors]
    accumulator = Accumulator(5000, segments, method)
    for body, weight in zip(bodies, weights, strict=True):
        accumulator.add(body, bits, weight)
    decoded = [quantise.dequantise(body, 5000, bits) for body in bodies]
    expected = reference(method, segments, decoded, weights)
    np.testing.assert_allclose(accumulator.result(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("bits", [4, 16])
def test_groups_that_are_averaged_leave_the_others_as_they_are(bits: int, name: str) -> None:
    rng, segments = np.random.default_rng(3), np.array(GRANULARITIES[name])
    averaged = rng.integers(2, size=segments.size - 1).astype(np.bool_)
    bodies = [quantise.quantise(rng.standard_normal(5000).astype(np.float32), bits) for _ in range(3)]
    results = []
    cases: list[tuple[Method, NDArray[np.bool_] | None]] = [("rda", averaged), ("rda", None), ("average", None)]
    for method, which in cases:
        accumulator = Accumulator(5000, segments, method, which)
        for body, weight in zip(bodies, (1.0, 300.0, 12.5), strict=True):
            accumulator.add(body, bits, weight)
        results.append(accumulator.result())
    mixed, rda, average = results
    values = np.repeat(averaged, np.diff(segments))
    np.testing.assert_array_equal(mixed[~values], rda[~values])
    np.testing.assert_allclose(mixed[values], average[values], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["rda", "average"])
@pytest.mark.parametrize("name", GRANULARITIES)
def test_chunks_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, method: Method) -> None:
    rng = np.random.default_rng(2)
    bodies = [quantise.quantise(rng.standard_normal(5000).astype(np.float32), 4) for _ in range(3)]
    values = rng.standard_normal(5000).astype(np.float32)
    results = []
    for chunk in (64, 100, 999, 5000, 1 << 17):
        monkeypatch.setattr(merge, "CHUNK", chunk)
        accumulator = Accumulator(5000, np.array(GRANULARITIES[name]), method)
        for body in bodies:
            accumulator.add(body, 4, 1.5)
        accumulator.add_values(values, 0.5)
        accumulator.add(bodies[0], 4, 2.5)
        results.append(accumulator.result().tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("method", ["rda", "average"])
@pytest.mark.parametrize("bits", [4, 32])
def test_merges_add_up(bits: int, method: Method) -> None:
    rng, segments = np.random.default_rng(3), np.array([0, 100, 1000])
    bodies = [quantise.quantise(rng.standard_normal(1000).astype(np.float32), bits) for _ in range(5)]
    together, one, other, empty = (Accumulator(1000, segments, method) for _ in range(4))
    for number, body in enumerate(bodies):
        together.add(body, bits, number + 1)
        (one if number < 3 else other).add(body, bits, number + 1)
    one.combine(other)
    one.combine(empty)
    empty.combine(one)
    expected = together.result()
    np.testing.assert_allclose(one.result(), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(empty.result(), expected, rtol=1e-4, atol=1e-6)


def test_adding_leaves_offers_as_they_are() -> None:
    values = np.random.default_rng(4).standard_normal(500).astype(np.float32)
    for bits in (1, 2, 4, 8, 16, 32):
        body = quantise.quantise(values, bits)
        before = body.tobytes()
        accumulator = Accumulator(500, np.array([0, 500]), "rda")
        accumulator.add(body, bits, 2)
        accumulator.result()
        assert body.tobytes() == before
    before = values.tobytes()
    merged("rda", [0, 500], (values, 2), (values, 3))
    assert values.tobytes() == before
