"""Quantised bodies against an encoder in plain NumPy that follows the documented layout, and against values by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made.quantised_reference import TINY, Raw, Vector, any_vectors, bfloat16, blocks_of, quantised_reference

from diloco.core.tensors import quantise
from diloco.errors import FormatError, NonFiniteError

ALL_BITS = [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("bits", "n", "expected"),
    [
        (1, 0, 0),
        (1, 1, 10),
        (1, 64, 10),
        (1, 65, 20),
        (2, 0, 0),
        (2, 1, 18),
        (2, 64, 18),
        (2, 65, 36),
        (4, 0, 0),
        (4, 1, 34),
        (4, 64, 34),
        (4, 65, 68),
        (8, 1, 68),
        (8, 128, 136),
        (16, 3, 6),
        (32, 3, 12),
    ],
)
def test_sizes_of_bodies(bits: int, n: int, expected: int) -> None:
    assert quantise.body_bytes(n, bits) == expected
    assert quantise.quantise(np.ones(n, np.float32), bits).size == expected


def test_int4_by_hand() -> None:
    values = np.zeros(66, np.float32)
    values[:3] = [7.0, -3.0, 0.5]  # absmax 7: the scale is 1; 0.5 rounds to the even 0
    values[32:34] = [1.5, -7.0]  # 1.5 rounds to the even 2
    values[64:] = [-14.0, 5.0]  # absmax 14: the scale is 2; 2.5 rounds to the even 2
    body = quantise.quantise(values, 4)
    assert body[:4].view(np.uint16).tolist() == [0x3F80, 0x4000]
    assert body[4:7].tolist() == [(8 + 2) << 4 | (8 + 7), (8 - 7) << 4 | (8 - 3), 0x88]
    assert (body[7:36] == 0x88).all()
    assert body[36:38].tolist() == [0x80 | 1, 0x80 | 10]
    assert (body[38:] == 0x88).all()
    expected = values.copy()
    expected[[2, 32, 65]] = [0.0, 2.0, 4.0]
    np.testing.assert_array_equal(quantise.dequantise(body, 66, 4), expected)


def test_1_bit_by_hand() -> None:
    values = np.zeros(74, np.float32)
    values[[0, 1, 8, 9, 63]] = [16.0, -16.0, -16.0, 8.0, -8.0]  # 64 magnitudes of a mean of 1
    values[64:] = [-2.0, 4.0] * 5  # of a mean of 3
    body = quantise.quantise(values, 1)
    assert body[:4].view(np.uint16).tolist() == [0x3F80, 0x4040]
    # elements j, j + 8, ..., j + 56 of a block in byte j, from its lowest bit on; 1 stands for the zeros beyond the end
    assert body[4:12].tolist() == [0xFD, 0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F]
    assert body[12:].tolist() == [0xFC, 0xFF, 0xFE, 0xFF, 0xFE, 0xFF, 0xFE, 0xFF]
    expected = np.ones(74)
    expected[[1, 8, 63]] = -1
    expected[64:] = [-3.0, 3.0] * 5
    assert quantise.dequantise(body, 74, 1).tolist() == expected.tolist()


@given(any_vectors())
def test_the_error_of_1_bit_is_orthogonal_to_what_is_sent(values: Vector) -> None:
    """A mean has the least squared error: what is left has no part along what was sent, but for the scale's rounding."""
    values = values.clip(-1e30, 1e30)
    error = np.empty_like(values)
    sent = quantise.dequantise(quantise.quantise(values, 1, error=error), values.size, 1)
    along, length = (
        (blocks_of(sent).astype(np.float64) * blocks_of(other).astype(np.float64)).sum(1) for other in (error, sent)
    )
    assert (np.abs(along) <= 2**-7 * length).all()


def test_2_bits_by_hand() -> None:
    # squares 196, magnitudes 34: the split is 0.7875 * 196 / 34 = 4.5, the scale (2 * 3 + 7 * 31) / (3 * 4 + 5 * 49) = 0.868
    values = np.array([7.0, -1.0, 1.0, -1.0, -6.0, 6.0, 6.0, -6.0], np.float32)
    body = quantise.quantise(values, 2)
    assert body[:2].view(np.uint16).tolist() == [0x3F5E]  # 0.8671875, the nearest bfloat16 of 0.8677
    # elements 0, 16, 32 and 48 of the block in the first byte, from its lowest bits on; 2 stands for the zeros beyond the end
    assert body[2:].tolist() == [0xA8 | code for code in (3, 1, 2, 1, 0, 3, 3, 0)] + [0xAA] * 8
    large, small = 7 * 0.8671875, 2 * 0.8671875
    expected = [large, -small, small, -small, -large, large, large, -large]
    assert quantise.dequantise(body, 8, 2).tolist() == expected


@pytest.mark.parametrize(("bits", "codes"), [(1, [0xFF] * 16), (2, [0xAA] * 32)])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40])
def test_a_block_too_small_for_a_scale_in_few_bits(value: float, bits: int, codes: list[int]) -> None:
    values = np.full(70, value, np.float32)
    error = np.empty_like(values)
    body = quantise.quantise(values, bits, error=error)
    assert body.tolist() == [0] * 4 + codes
    np.testing.assert_array_equal(error, values)
    assert not quantise.dequantise(body, 70, bits).any()


@pytest.mark.parametrize(
    ("name", "most"),
    [("normal", 0.115), ("laplace", 0.175), ("standard_t", 0.29)],  # absmax scales: 0.26, 0.60, 1.5
)
def test_the_error_of_2_bits_for_values_as_gradients_have_them(name: str, most: float) -> None:
    random = np.random.default_rng(1)
    draw = getattr(random, name)
    values = (draw(3, size=64_000) if name == "standard_t" else draw(size=64_000)).astype(np.float32)
    error = np.empty_like(values)
    quantise.quantise(values, 2, error=error)
    assert np.square(error).sum() < most * np.square(values).sum()


@given(any_vectors(), st.sampled_from([1.0, 3.0, 30.0]))
def test_no_block_of_2_bits_is_off_by_more_than_a_spike_is(values: Vector, power: float) -> None:
    """One value among 63 zeros leaves most: 49 of 301 parts of its square go (codes 7, 63 times 2). Errors stay bounded."""
    with np.errstate(all="ignore"):  # what gets too large is cut, what gets too small is zero
        values = (np.sign(values) * np.abs(values).astype(np.float64) ** power).clip(-1e37, 1e37).astype(np.float32)
    error = np.empty_like(values)
    quantise.quantise(values, 2, error=error)
    before, after = (np.square(blocks_of(v).astype(np.float64)).sum(1) for v in (values, error))
    counts = np.abs(blocks_of(values)).max(1) > 64 * TINY
    assert (after[counts] <= (1 - 49 / 301 + 2**-7) * before[counts]).all()


def test_int8_by_hand() -> None:
    values = np.array([254.0, -3.0, 5.0, 0.9], np.float32)  # absmax 254: the scale is 2; halves round to even
    body = quantise.quantise(values, 8)
    assert body[:4].view(np.float32).tolist() == [2.0]
    assert body[4:].view(np.int8).tolist() == [127, -2, 2, 0] + [0] * 60
    assert quantise.dequantise(body, 4, 8).tolist() == [254.0, -4.0, 4.0, 0.0]


def test_bfloat16_by_hand() -> None:
    # 1 + 2**-8 lies in the middle and goes to the even 1; 1 + 3 * 2**-8 to the even 1 + 2**-6; the largest stays finite
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -3.0, np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    body = quantise.quantise(values, 16)
    assert body.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0xC040, 0x7F7F, 0xFF7F]
    assert quantise.dequantise(body, 5, 16)[:3].tolist() == [1.0, 1.015625, -3.0]


@given(any_vectors(), st.sampled_from([4, 8]))
def test_blocks_are_the_documented_ones(values: Vector, bits: int) -> None:
    body, decoded = quantised_reference(values, bits)
    actual = quantise.quantise(values, bits)
    assert actual.tobytes() == body.tobytes()
    np.testing.assert_array_equal(quantise.dequantise(actual, values.size, bits), decoded)


@given(any_vectors())
def test_bfloat16_is_the_nearest(values: Vector) -> None:
    np.testing.assert_array_equal(quantise.quantise(values, 16).view(np.uint16), bfloat16(values))


@given(any_vectors())
def test_float32_is_exact(values: Vector) -> None:
    error = np.ones_like(values)
    body = quantise.quantise(values, 32, error=error)
    assert quantise.dequantise(body, values.size, 32).tobytes() == values.tobytes()
    assert not error.any()


@given(any_vectors(), st.sampled_from(ALL_BITS))
def test_what_is_encoded_is_valid(values: Vector, bits: int) -> None:
    quantise.validate(quantise.quantise(values, bits), values.size, bits)


@given(any_vectors(), st.sampled_from(ALL_BITS))
def test_error_is_what_was_left_over(values: Vector, bits: int) -> None:
    error = np.full_like(values, 9)
    body = quantise.quantise(values, bits, error=error)
    np.testing.assert_array_equal(body, quantise.quantise(values, bits))
    np.testing.assert_array_equal(error, values - quantise.dequantise(body, values.size, bits))
    in_place = values.copy()
    np.testing.assert_array_equal(quantise.quantise(in_place, bits, error=in_place), body)
    np.testing.assert_array_equal(in_place, error)


@given(any_vectors(), st.sampled_from([(4, 0.532), (8, 0.5001)]))
def test_error_is_at_most_half_a_step(values: Vector, case: tuple[int, float]) -> None:
    """Half a step; for int4 rounding the scale can cut up to 7 * 2**-8 of a step more off a block's largest value."""
    bits, steps = case
    error = np.empty_like(values)
    quantise.quantise(values, bits, error=error)
    scales = np.abs(blocks_of(values)).max(1).astype(np.float64) / (7 if bits == 4 else 127)
    step = np.where(scales < 1.01 * TINY, 2 * 127 * TINY, scales)  # a block too small for a scale is zero
    assert (np.abs(blocks_of(error)) <= steps * (1 + 2**-8) * step[:, None]).all()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_error_feedback_loses_nothing_over_time(bits: int) -> None:
    """What a stream of bodies adds up to differs from what went in by the last error alone."""
    random = np.random.default_rng(5)
    error, sent, put_in = np.zeros(1000, np.float32), np.zeros(1000), np.zeros(1000)
    for _ in range(50):
        values = random.standard_normal(1000).astype(np.float32)
        put_in += values
        sent += quantise.dequantise(quantise.quantise(values + error, bits, error=error), 1000, bits)
    np.testing.assert_allclose(sent + error, put_in, atol=1e-4)
    assert np.abs(error).max() < {1: 4, 2: 3, 4: 1}[bits]


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 199])
def test_not_finite_is_refused_and_changes_nothing(bits: int, bad: float, at: int) -> None:
    values = np.arange(200, dtype=np.float32)
    values[at] = bad
    error = np.full(200, 3, np.float32)
    before = values.copy()
    for rest in (None, error, values):
        with pytest.raises(NonFiniteError):
            quantise.quantise(values, bits, error=rest)
    assert (error == 3).all()
    assert values.tobytes() == before.tobytes()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_decoding_from_a_block_on(bits: int) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    body = quantise.quantise(values, bits)
    whole = quantise.dequantise(body, 1000, bits)
    for start, stop in [(0, 64), (128, 512), (960, 1000), (64, 1000), (0, 10)]:
        out = np.full(stop - start, 7, np.float32)
        assert quantise.dequantise(body, 1000, bits, out, start=start) is out
        np.testing.assert_array_equal(out, whole[start:stop])


def _set_scale(body: Raw, bits: int, value: float) -> None:
    if bits <= 4:
        body[:2].view(np.uint16)[0] = np.array([value], np.float32).view(np.uint32)[0] >> 16
    else:
        body[:4].view(np.float32)[0] = value


def _set_byte(at: int, value: int) -> Callable[[Raw], None]:
    def change(body: Raw) -> None:
        body[at] = value

    return change


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_largest_values_decode_to_finite_ones(bits: int) -> None:
    largest = np.finfo(np.float32).max
    body = quantise.quantise(np.full(100, largest, np.float32), bits)
    quantise.validate(body, 100, bits)
    # in 1 bit a value is a scale, and scales are at most 0x7e12 as bfloat16, of which 7 times is finite
    expected = largest if bits > 1 else np.uint32(0x7E120000).view(np.float32)
    np.testing.assert_allclose(quantise.dequantise(body, 100, bits), expected, rtol=0.005)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e38])  # 7 and 127 times the last is infinite
def test_scales_that_no_encoder_writes_are_refused(bits: int, scale: float) -> None:
    body = quantise.quantise(np.ones(100, np.float32), bits)
    _set_scale(body, bits, scale)
    with pytest.raises((FormatError, NonFiniteError), match="scale"):
        quantise.validate(body, 100, bits)


@pytest.mark.parametrize(
    ("bits", "change"),
    [
        pytest.param(4, _set_byte(4, 0x80), id="low nibble 0"),
        pytest.param(4, _set_byte(67, 0x08), id="high nibble 0, last byte"),
        pytest.param(4, _set_byte(0, 0x01), id="subnormal scale"),
        pytest.param(2, _set_byte(0, 0x01), id="subnormal scale of 2 bits"),
        pytest.param(1, _set_byte(0, 0x01), id="subnormal scale of 1 bit"),
        pytest.param(8, _set_byte(8 + 127, 0x80), id="-128"),
    ],
)
def test_codes_that_no_encoder_writes_are_refused(bits: int, change: Callable[[Raw], None]) -> None:
    body = quantise.quantise(np.zeros(100, np.float32), bits)
    change(body)
    with pytest.raises(FormatError):
        quantise.validate(body, 100, bits)


@pytest.mark.parametrize("bits", [16, 32])
def test_values_that_are_not_finite_are_refused(bits: int) -> None:
    body = quantise.quantise(np.ones(100, np.float32), bits)
    body[-1], body[-2] = 0xFF, 0x80
    with pytest.raises(NonFiniteError):
        quantise.validate(body, 100, bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_bodies_of_another_size_are_refused(bits: int) -> None:
    body = quantise.quantise(np.ones(100, np.float32), bits)
    with pytest.raises(FormatError, match="bytes"):
        quantise.validate(body[:-1], 100, bits)
    with pytest.raises(FormatError, match="bytes"):
        quantise.validate(body, 200, bits)


@settings(max_examples=200)
@given(st.binary(min_size=68, max_size=68), st.sampled_from([(2, 192), (4, 100), (8, 64), (16, 34), (32, 17)]))
def test_any_bytes_are_refused_or_decode_to_finite_values(data: bytes, case: tuple[int, int]) -> None:
    bits, n = case
    body = np.frombuffer(data, np.uint8)[: quantise.body_bytes(n, bits)].copy()
    try:
        quantise.validate(body, n, bits)
    except (FormatError, NonFiniteError):
        return
    with np.errstate(all="ignore"):
        decoded = quantise.dequantise(body, n, bits)
    assert not np.isnan(decoded).any()
