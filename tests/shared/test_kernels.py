"""Kernels against plain NumPy, bit for bit; what their machine code must not hold; the same bits for other processors.

Run as a script, it compiles the kernels again and tells their machine code and what they compute: see :func:`main`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.codegen import get_host_cpu_features
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray
from tests.pace import DEADLINE_S

from diloco.core.learner.delta import Baseline, EncodedOffer, Offered
from diloco.core.tensors import kernels, narrow_kernels, outer, progress, quantise
from diloco.core.tensors.merge import Accumulator

ROOT = Path(__file__).parents[2]
Vector = NDArray[np.float32]
Raw = NDArray[np.uint8]
Segments = NDArray[np.int64]
SIZES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4097]
KERNELS: dict[str, Any] = {
    name: value
    for name, value in (vars(kernels) | vars(narrow_kernels) | vars(progress)).items()
    if isinstance(value, Dispatcher)
}
# fused products and sums of x86-64 and of AArch64
FUSED = re.compile(r"\bv?fn?m(?:add|sub|la|ls)\w*")
# flags that would let LLVM reorder or contract, on an operation or on a call
LOOSE = re.compile(r"\bf(?:add|sub|mul|div|neg|cmp)(?: \w+)*? (?:fast|reassoc|contract|nsz|arcp|afn|nnan|ninf)\b")


def values_of(n: int, seed: int = 0) -> Vector:
    """Blocks of very different magnitudes, some subnormal; zeros of both signs; halves, which round to even."""
    rng = np.random.default_rng(seed + n)
    values: Vector = (rng.standard_normal(n) * np.repeat(10.0 ** rng.integers(-41, 30, n // 64 + 1), 64)[:n]).astype(np.float32)
    values[rng.random(n) < 0.1] = 0.0
    values[rng.random(n) < 0.1] = -0.0
    whole = rng.random(n // 64 + 1).repeat(64)[:n] < 0.2
    values[whole] = rng.integers(-14, 15, n)[whole] * np.float32(0.5)
    return values


def segments_of(n: int) -> Segments:
    """Of one value, a few, more than a block, and what is left."""
    bounds = [bound for bound in (0, 1, 6, 64, 70, 300, 428) if bound < n]
    return np.array([*bounds, n] if n else [0], np.int64)


def factors_of(segments: Segments) -> Vector:
    return (np.arange(segments.size - 1) * 0.37 - 1).astype(np.float32)


def blocks(values: NDArray[Any]) -> NDArray[Any]:
    padded = np.zeros(-(-values.size // 64) * 64, values.dtype)
    padded[: values.size] = values
    return padded.reshape(-1, 64)


def bfloat16(values: Vector) -> NDArray[np.uint16]:
    """Nearest, ties to even, of finite values: the float64 nearest to a value's 8 significant bits."""
    exponent = np.maximum(
        np.frexp(values.astype(np.float64))[1], -125
    )  # below, bfloat16 is subnormal and its step stays the same
    step = np.ldexp(1.0, exponent - 8)
    rounded = np.rint(values.astype(np.float64) / step) * step
    with np.errstate(over="ignore"):
        halves = (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    signed: NDArray[np.uint16] = halves | np.signbit(values).astype(np.uint16) << 15
    return signed


def widened(halves: NDArray[np.uint16]) -> Vector:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def encoded(values: Vector, bits: int) -> tuple[NDArray[Any], NDArray[np.int8], Vector]:
    """Scales, codes (one a value, in blocks) and errors of int4 and int8."""
    grid, top = blocks(values), np.float32({4: 7, 8: 127}[bits])
    scales = np.abs(grid).max(1, initial=0) / top
    if bits == 4:
        halves = bfloat16(scales)
        halves[(halves < 0x80) | (halves > 0x7E80)] = 0
        scales, stored = widened(halves), halves
    else:
        scales = np.where((scales < np.float32(2.0**-126)) | (scales > np.float32(8e37)), np.float32(0), scales)
        stored = scales
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    q = np.rint(np.clip(grid * inverse[:, None], -top, top)).astype(np.int8)
    error = grid - q.astype(np.float32) * scales[:, None]
    return stored, q, error.reshape(-1)[: values.size]


def lane_sums(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row of 64: four by four to 16 lanes, then the upper half to the lower one, from 16 down to 1."""
    rows = grid.reshape(-1, 4, 16)
    lanes = ((rows[:, 0] + rows[:, 1]) + rows[:, 2]) + rows[:, 3]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: NDArray[np.float64] = lanes[:, 0]
    return sums


def two_bits(values: Vector) -> tuple[NDArray[np.uint16], Raw, Vector, NDArray[np.int8]]:
    """Scales, packed codes and errors of a body of 2 bits, and what the codes stand for."""
    grid = blocks(values)
    sizes = np.abs(grid).astype(np.float64)
    counts = np.clip(values.size - 64 * np.arange(len(grid)), 0, 64).astype(np.float64)
    total, square = lane_sums(sizes), lane_sums(sizes * sizes)
    split = np.divide(0.7875 * square, total, out=np.zeros_like(total), where=total > 0)
    far = (sizes > split[:, None]).astype(np.float64)
    halves = bfloat16(((2 * total + 5 * lane_sums(far * sizes)) / (4 * counts + 45 * lane_sums(far))).astype(np.float32))
    halves[halves < 0x80] = 0
    scales = widened(halves)[:, None]
    y = grid * np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    upper = np.where(np.abs(y) > 4.5, 3, 2)
    codes = np.where(y < 0, 3 - upper, upper).astype(np.uint8)
    meant = np.array([-7, -2, 2, 7], np.int8)[codes]
    error = grid - meant.astype(np.float32) * scales
    packed = (codes[:, :16] | codes[:, 16:32] << 2 | codes[:, 32:48] << 4 | codes[:, 48:] << 6).astype(np.uint8)
    return halves, packed.reshape(-1), error.reshape(-1)[: values.size], meant


def one_bit(values: Vector) -> tuple[NDArray[np.uint16], Raw, Vector, NDArray[np.int8]]:
    """Scales, packed codes and errors of a body of 1 bit, and what the codes stand for."""
    grid = blocks(values)
    counts = np.clip(values.size - 64 * np.arange(len(grid)), 0, 64).astype(np.float64)
    halves = bfloat16((lane_sums(np.abs(grid).astype(np.float64)) / counts).astype(np.float32))
    halves[halves < 0x80] = 0
    meant = np.where(grid >= 0, 1, -1).astype(np.int8)
    error = grid - meant.astype(np.float32) * widened(halves)[:, None]
    packed = np.packbits((meant > 0).reshape(-1, 8, 8), axis=1, bitorder="little")
    return halves, packed.reshape(-1), error.reshape(-1)[: values.size], meant


def int4(values: Vector) -> tuple[NDArray[np.uint16], Raw, Vector]:
    """Scales, packed codes and decoded values of an int4 body."""
    scales, q, _ = encoded(values, 4)
    shifted: Raw = (q + 8).astype(np.uint8)
    packed: Raw = (shifted[:, :32] | shifted[:, 32:] << 4).astype(np.uint8).reshape(-1)
    decoded: Vector = (q.astype(np.float32) * widened(scales)[:, None]).reshape(-1)[: values.size]
    return scales, packed, decoded


def test_every_kernel_is_tested_here() -> None:
    text = Path(__file__).read_text()
    here = vars(kernels) | vars(narrow_kernels)  # test_progress.py has the other
    public = [name for name in KERNELS if name in here and not name.startswith("_")]
    assert len(public) == 20
    assert [name for name in public if f"kernels.{name}(" not in text] == []


@pytest.mark.parametrize(
    ("blocks", "end"),
    [
        ("010000", -1 - 3),  # the last one, raw, of nothing
        ("0b0000 ff", -1 - 4),  # the last one, so many times the same byte
        ("190000 aabbcc", -1 - 6),  # the last one, raw, three bytes
        ("1c0000 aabbcc 020008 ff 010000", -1 - 13),  # compressed, run, raw
        ("190000 aabbcc 00", -1 - 6),  # something follows
        ("190000 aa", -1 - 6),  # ends beyond what is there
        ("180000 aabbcc", 6),  # no last one: the next begins there
        ("180000 aa", 6),  # and beyond what is there
        ("0100", 0),  # no whole head
        ("", 0),
    ],
)
def test_zstd_blocks_end(blocks: str, end: int) -> None:
    for before in (b"", b"header"):
        frame = np.frombuffer(before + bytes.fromhex(blocks), np.uint8)
        moved = len(before) if end >= 0 else -len(before)
        assert kernels.zstd_blocks_end(frame, len(before)) == end + moved


@pytest.mark.parametrize("n", SIZES)
def test_absmax(n: int) -> None:
    values = values_of(n)
    assert kernels.absmax(values) == np.abs(values).max(initial=0)
    for bad in (np.nan, np.inf, -np.inf):
        if n:
            values[n // 2] = bad
            assert kernels.absmax(values) == np.inf


@pytest.mark.parametrize("keep_error", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_encode4(n: int, keep_error: bool) -> None:
    values = values_of(n)
    expected_scales, expected_codes, _ = int4(values)
    left = encoded(values, 4)[2] if keep_error else values.copy()
    scales, codes = np.empty_like(expected_scales), np.empty_like(expected_codes)
    assert kernels.encode4(values, scales, codes, keep_error)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert values.tobytes() == left.tobytes()
    if n:
        values[-1] = np.nan
        assert not kernels.encode4(values, scales, codes, False)


NARROW = {1: one_bit, 2: two_bits}


def encode_narrow(bits: int, values: Vector, scales: NDArray[np.uint16], codes: Raw, keep_error: bool) -> bool:
    if bits == 1:
        return bool(narrow_kernels.encode1(values, scales, codes, keep_error))
    return bool(narrow_kernels.encode2(values, scales, codes, keep_error))


@pytest.mark.parametrize("bits", NARROW)
@pytest.mark.parametrize("keep_error", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_encode_in_1_and_2_bits(n: int, keep_error: bool, bits: int) -> None:
    values = values_of(n)
    expected_scales, expected_codes, error, _ = NARROW[bits](values)
    left = error if keep_error else values.copy()
    scales, codes = np.empty_like(expected_scales), np.empty_like(expected_codes)
    assert encode_narrow(bits, values, scales, codes, keep_error)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert values.tobytes() == left.tobytes()
    if n:
        values[-1] = np.nan
        assert not encode_narrow(bits, values, scales, codes, False)


@pytest.mark.parametrize("bits", NARROW)
@pytest.mark.parametrize("n", SIZES)
def test_widen_1_and_2_bits(n: int, bits: int) -> None:
    _, codes, _, meant = NARROW[bits](values_of(n))
    wide = np.empty(4 * codes.size // bits, np.uint8)
    if bits == 1:
        narrow_kernels.widen1(codes, wide)
    else:
        narrow_kernels.widen2(codes, wide)
    shifted = (meant + 8).astype(np.uint8)
    np.testing.assert_array_equal(wide.reshape(-1, 32), shifted[:, :32] | shifted[:, 32:] << 4)


@pytest.mark.parametrize("n", SIZES)
def test_decode4(n: int) -> None:
    scales, codes, decoded = int4(values_of(n))
    for first in range(0, scales.size, 5):
        out = np.empty(n - 64 * first, np.float32)
        kernels.decode4(scales, codes, out, first)
        assert out.tobytes() == decoded[64 * first :].tobytes()


def test_valid4() -> None:
    scales, codes, _ = int4(values_of(4097))
    assert kernels.valid4(scales, codes)
    for at in (0, 17, scales.size - 1):
        for bad in (0x0001, 0x007F, 0x7F80, 0x7FC0, 0x8000, 0xBF80):
            changed = scales.copy()
            changed[at] = bad
            assert not kernels.valid4(changed, codes)
    for at in (0, 1000, codes.size - 1):
        for bad in (0x08, 0x80, 0x00):
            invalid = codes.copy()
            invalid[at] = bad
            assert not kernels.valid4(scales, invalid)


@pytest.mark.parametrize("keep_error", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_encode8(n: int, keep_error: bool) -> None:
    values = values_of(n)
    expected_scales, q, error = encoded(values, 8)
    left = error if keep_error else values.copy()
    scales, codes = np.empty_like(expected_scales), np.empty(q.size, np.int8)
    kernels.encode8(values, scales, codes, keep_error)
    assert scales.tobytes() == expected_scales.tobytes()
    np.testing.assert_array_equal(codes, q.reshape(-1))
    assert values.tobytes() == left.tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_decode8(n: int) -> None:
    scales, q, _ = encoded(values_of(n), 8)
    decoded = (q.astype(np.float32) * scales[:, None]).reshape(-1)[:n]
    for first in range(0, scales.size, 5):
        out = np.empty(n - 64 * first, np.float32)
        kernels.decode8(scales, q.reshape(-1), out, first)
        assert out.tobytes() == decoded[64 * first :].tobytes()


@pytest.mark.parametrize("keep_error", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_encode16_and_decode16(n: int, keep_error: bool) -> None:
    values = values_of(n)
    values[: min(n, 2)] = [3.4028235e38, -3.4028235e38][: min(n, 2)]
    expected = bfloat16(values)
    expected[: min(n, 2)] = [0x7F7F, 0xFF7F][: min(n, 2)]  # not infinity
    left = values - widened(expected) if keep_error else values.copy()
    codes, bits = np.empty(n, np.uint16), np.empty(n, np.uint32)
    kernels.encode16(values, codes, keep_error)
    np.testing.assert_array_equal(codes, expected)
    assert values.tobytes() == left.tobytes()
    kernels.decode16(codes, bits)
    np.testing.assert_array_equal(bits, expected.astype(np.uint32) << 16)


@pytest.mark.parametrize("n", SIZES)
def test_squares4(n: int) -> None:
    scales, codes, _ = int4(values_of(n))
    q, segments = encoded(values_of(n), 4)[1].reshape(-1).astype(np.int64), segments_of(n)
    expected = []
    for start, stop in itertools.pairwise(segments.tolist()):
        total = 0.0
        for block in range(start // 64, -(-stop // 64)):
            scale = float(widened(scales)[block])
            total += scale * scale * float((q[max(start, 64 * block) : min(stop, 64 * block + 64)] ** 2).sum())
        expected.append(total)
    out = np.empty(segments.size - 1)
    kernels.squares4(scales, codes, segments, out)
    assert out.tolist() == expected


@pytest.mark.parametrize("n", SIZES)
def test_add4(n: int) -> None:
    scales, codes, _ = int4(values_of(n))
    q, segments = encoded(values_of(n), 4)[1].astype(np.float32), segments_of(n)
    factors, before = factors_of(segments), values_of(n, seed=1)
    # scale and factor are multiplied first
    product = widened(scales).repeat(64)[:n] * factors.repeat(np.diff(segments))
    out = before.copy()
    kernels.add4(scales, codes, segments, factors, out)
    assert out.tobytes() == (before + q.reshape(-1)[:n] * product).tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_squares32(n: int) -> None:
    values, segments = values_of(n), segments_of(n)
    expected = []
    for start, stop in itertools.pairwise(segments.tolist()):
        lanes = [0.0] * 16
        for i, value in enumerate(values[start:stop].tolist()):
            lanes[i % 16] += value * value
        total = 0.0
        for lane in lanes:  # `sum` would compensate
            total += lane
        expected.append(total)
    out = np.empty(segments.size - 1)
    kernels.squares32(values, segments, out)
    assert out.tolist() == expected


@pytest.mark.parametrize("n", SIZES)
def test_add32_and_scale32(n: int) -> None:
    values, before, segments = values_of(n), values_of(n, seed=1), segments_of(n)
    factors = factors_of(segments)
    spread = factors.repeat(np.diff(segments))
    out = before.copy()
    kernels.add32(values, segments, factors, out)
    assert out.tobytes() == (before + values * spread).tobytes()
    kernels.scale32(values, segments, factors)
    assert values.tobytes() == (values_of(n) * spread).tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_nesterov(n: int) -> None:
    theta, momentum, delta = (values_of(n, seed=seed) for seed in range(3))
    rate, mu = np.float32(0.3), np.float32(0.9)
    expected_momentum = mu * momentum + delta
    expected_theta = theta - rate * (delta + mu * expected_momentum)
    kernels.nesterov(theta, momentum, delta, rate, mu)
    assert theta.tobytes() == expected_theta.tobytes()
    assert momentum.tobytes() == expected_momentum.tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_adamw(n: int) -> None:
    theta, mean, gradient = (values_of(n, seed=seed).clip(-1e3, 1e3) for seed in range(3))
    square = np.square(values_of(n, seed=3).clip(-1e3, 1e3))
    rate, epsilon, decay = np.float32(0.01), np.float32(1e-8), np.float32(0.1)
    kept, taken, unbiased = (np.array(pair, np.float32) for pair in ((0.9, 0.95), (0.1, 0.05), (0.19, 0.0975)))
    expected_mean = kept[0] * mean + taken[0] * gradient
    expected_square = kept[1] * square + taken[1] * (gradient * gradient)
    update = expected_mean / unbiased[0] / (np.sqrt(expected_square / unbiased[1]) + epsilon)
    expected_theta = theta - rate * (update + decay * theta)
    kernels.adamw(theta, mean, square, gradient, rate, kept, taken, unbiased, epsilon, decay)
    assert theta.tobytes() == expected_theta.tobytes()
    assert mean.tobytes() == expected_mean.tobytes()
    assert square.tobytes() == expected_square.tobytes()


# ---- machine code, processors, threads


def everything() -> str:
    """A digest of what all kernels compute, by the functions that call them."""
    digest = hashlib.sha256()
    n = 20_001
    segments = np.append(np.arange(0, n, 333), n)
    theta, momentum = values_of(n, seed=1), np.zeros(n, np.float32)
    weights, moments = values_of(n, seed=1), np.zeros(2 * n, np.float32)
    adamw = outer.AdamW(0.95, ((n // 3, 0.1), (n, 0.0)))
    ordinary = values_of(n, seed=2).clip(-10, 10)
    for bits in (1, 2, 4, 8, 16, 32):
        for method in ("rda", "average"):
            accumulator = Accumulator(n, segments, method)
            for seed in range(3):
                error = values_of(n, seed=seed).clip(-1e6, 1e6)
                body = quantise.quantise(error, bits, error=error)
                accumulator.add(body, bits, seed + 0.5)
                digest.update(body.tobytes() + error.tobytes())
            digest.update(accumulator.result().tobytes())
        body = quantise.quantise(ordinary, bits)
        digest.update(quantise.dequantise(body, n, bits).tobytes())
        digest.update(outer.fold(theta, momentum, body, bits, outer.NESTEROV.at(1, 0.3, 0.9)))
        digest.update(outer.fold(weights, moments, body, bits, adamw.at(bits, 8e-3, 0.9)))
        error = quantise.quantise(values_of(n, seed=3).clip(-1e6, 1e6), 8)
        values = values_of(n - 70, seed=4)
        Baseline(theta, Offered(EncodedOffer(body, error), bits, error, 8)).keep_progress(values, weights, 70, 0.3)
        digest.update(values.tobytes())
    return digest.hexdigest()


def main() -> None:
    """Print, of kernels compiled in this process: machine code and LLVM's text by name, and :func:`everything`."""
    code = {name: "".join(kernel.inspect_asm().values()) for name, kernel in KERNELS.items()}
    text = {name: "".join(kernel.inspect_llvm().values()) for name, kernel in KERNELS.items()}
    print(json.dumps({"code": code, "text": text, "computed": everything()}))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What :func:`main` says for ``host``, this processor, and ``generic``, the least of its kind; of kernels not cached."""
    started = {}
    for cpu, changes in {"host": {}, "generic": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}}.items():
        environment = os.environ | changes | {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp(cpu))}
        started[cpu] = subprocess.Popen(
            [sys.executable, "-m", "tests.shared.test_kernels"], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
    said: dict[str, dict[str, Any]] = {}
    for cpu, process in started.items():
        output, _ = process.communicate(timeout=4 * DEADLINE_S)
        assert process.returncode == 0
        said[cpu] = json.loads(output)
    return said.__getitem__


@pytest.mark.services
@pytest.mark.slow  # compiles all kernels twice
def test_no_kernel_fuses_products_and_sums(compiled: Callable[[str], dict[str, Any]]) -> None:
    code = compiled("host")["code"]
    assert code.keys() == KERNELS.keys()
    for name, text in code.items():
        assert len(text) > 500, f"{name}: no machine code to look at"
        assert FUSED.findall(text) == [], name


@pytest.mark.services
@pytest.mark.slow  # compiles all kernels twice
def test_no_kernel_lets_the_compiler_reorder(compiled: Callable[[str], dict[str, Any]]) -> None:
    for name, text in compiled("host")["text"].items():
        assert "define" in text, f"{name}: no text to look at"
        assert LOOSE.findall(text) == [], name
    for name, kernel in KERNELS.items():
        assert not kernel.targetoptions.get("fastmath"), name
        assert not kernel.targetoptions.get("parallel"), name


def test_fused_operations_would_be_seen() -> None:
    loose = njit("void(float32[::1], float32[::1], float32[::1], float32, float32)", fastmath=True)(kernels.nesterov.py_func)
    assert LOOSE.search(next(iter(loose.inspect_llvm().values())))
    if "+fma" not in get_host_cpu_features().split(",") and "+neon" not in get_host_cpu_features().split(","):
        pytest.skip("this processor has no fused operations")
    assert FUSED.search(next(iter(loose.inspect_asm().values())))


@pytest.mark.services
@pytest.mark.slow  # compiles all kernels twice
def test_the_same_bits_for_other_processors(compiled: Callable[[str], dict[str, Any]]) -> None:
    assert compiled("host")["code"] != compiled("generic")["code"]
    assert compiled("host")["computed"] == compiled("generic")["computed"] == everything()


def test_the_same_bits_in_threads() -> None:
    expected, computed = everything(), []
    threads = [threading.Thread(target=lambda: computed.append(everything())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [expected] * 4


if __name__ == "__main__":
    main()
