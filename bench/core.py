"""The loops over values on one core: encode, decode, merge and fold of one fragment, with what the product does around them.

    python bench/core.py                          # a fragment of 4M values; 2 bits, int4, int8, bfloat16, float32
    python bench/core.py --values 100000 --json

* **encode**: displacement to offer: quantise with error feedback, zstd, hash of the content
* **decode**: offer to float32: zstd, hash, validation, decoding
* **merge of M**: M offers to the merged outer gradient, by the default method: for each zstd, hash, validation and weight
* **fold**: outer step and state hash, in place as a syncer does it and into a new array as a learner does
* **hash only**: the BLAKE3 of parameters and momentum in it, which no fold can be faster than

Rates are 1e9 values a second; a merge's values are those of all its learners together. The peers' way is run beside it: plain
NumPy doing the same as a merge of 4 int4 offers, and a float64 mean of float32 vectors weighted by tokens, which is what
tsugi-mend 0.1.5 computes (0.17 to 0.225 measured on two cores of another machine, with its own code).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import script
from numba.core.codegen import get_host_cpu_features
from numpy.typing import NDArray
from parties import model

from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.fragments import Fragment, build_map
from diloco.core.tensors.merge import Accumulator
from diloco.core.tensors.weights import weight
from diloco.settings.presets import run_settings

Vector = NDArray[np.float32]
FRAGMENTS = 24
SETTINGS = run_settings("decoupled", {})
LEVEL = SETTINGS.codec.zstd_level
TOKENS, STEPS = 100_000, 24
TARGETS = {"encode": 0.8, "decode": 1.5, "merge of 4": 1.2, "merge of 8": 1.2, "fold in place": 0.4, "fold": 0.4}  # int4


@dataclass(frozen=True)
class Row:
    """How long one thing takes, by repeat; ``values`` are those of all learners together."""

    name: str
    bits: int
    values: int
    best_s: float
    median_s: float
    target: float | None = None

    @property
    def best(self) -> float:
        """1e9 values a second, of the best repeat."""
        return self.values / self.best_s / 1e9

    @property
    def median(self) -> float:
        """1e9 values a second, of the median repeat."""
        return self.values / self.median_s / 1e9

    @property
    def ratio(self) -> float | None:
        """Best over target."""
        return None if self.target is None else self.best / self.target


def vectors() -> str:
    """Return the widest vector instructions of this processor that are known to matter."""
    features = get_host_cpu_features()
    return next((name for name in ("avx512f", "avx2", "neon") if f"+{name}" in features.split(",")), "neither AVX2 nor NEON")


def timed(
    name: str, bits: int, values: int, repeat: int, call: Callable[[], Any], prepare: Callable[[], Any] | None = None
) -> Row:
    """Time ``call``, after ``prepare``, which does not count."""
    times_s = []
    for _ in range(repeat + 1):
        if prepare is not None:
            prepare()
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    del times_s[0]  # caches are cold, and memory comes from the kernel
    target = TARGETS.get(name) if bits == 4 else None
    return Row(name, bits, values, min(times_s), statistics.median(times_s), target)


def open_body(packed: bytes, content_hash: bytes, n: int, bits: int) -> NDArray[np.uint8]:
    """Open a body as its receiver does."""
    body = codec.unpack([packed], quantise.body_bytes(n, bits))
    if codec.content_hash(body) != content_hash:
        raise SystemExit("core: a body came back as another")
    quantise.validate(body, n, bits)
    return body


def measure_bits(fragment: Fragment, bits: int, repeat: int) -> list[Row]:
    """All rows of one width."""
    n = fragment.size
    rng = np.random.default_rng(bits)
    vectors = [rng.standard_normal(n, np.float32) * np.float32(1e-3) for _ in range(8)]
    bodies = [quantise.quantise(vector, bits) for vector in vectors]
    offers = [(codec.pack(body, LEVEL), codec.content_hash(body)) for body in bodies]
    gradient, out = np.empty_like(vectors[0]), np.empty_like(vectors[0])
    segments = fragment.segments(SETTINGS.merge.granularity)

    def encode() -> None:
        body = quantise.quantise(gradient, bits, error=gradient)
        codec.pack(body, LEVEL)
        codec.content_hash(body)

    def merge(learners: int) -> Vector:
        held = [open_body(*offer, n, bits) for offer in offers[:learners]]  # a round holds them all until it merges
        accumulator = Accumulator(n, segments, SETTINGS.merge.method)
        for body in held:
            accumulator.add(body, bits, weight(TOKENS, STEPS, SETTINGS.merge.weights))
        return accumulator.result()

    theta, momentum = vectors[0].copy(), np.zeros_like(vectors[0])
    step = outer.NESTEROV.at(1, SETTINGS.outer.learning_rate, SETTINGS.outer.momentum)
    rows = [
        timed("encode", bits, n, repeat, encode, lambda: np.copyto(gradient, vectors[0])),
        timed("decode", bits, n, repeat, lambda: quantise.dequantise(open_body(*offers[0], n, bits), n, bits, out)),
        timed("merge of 4", bits, 4 * n, repeat, lambda: merge(4)),
        timed("merge of 8", bits, 8 * n, repeat, lambda: merge(8)),
        timed("fold in place", bits, n, repeat, lambda: outer.fold(theta, momentum, bodies[0], bits, step)),
        timed(
            "fold",
            bits,
            n,
            repeat,
            lambda: outer.fold(theta, momentum, bodies[0], bits, step, theta_out=np.empty_like(theta)),
        ),
    ]
    if bits == 4:
        rows += [
            timed("hash only", bits, n, repeat, lambda: outer.state_hash(theta, momentum)),
            timed("merge of 4, plain NumPy", bits, 4 * n, min(repeat, 3), lambda: naive_merge(bodies[:4], n, segments)),
            timed("float64 mean of 4", 32, 4 * n, min(repeat, 3), lambda: naive_mean(vectors[:4])),
        ]
        np.testing.assert_allclose(merge(4), naive_merge(bodies[:4], n, segments), rtol=1e-3, atol=1e-8)
    return rows


def naive_merge(bodies: list[NDArray[np.uint8]], n: int, segments: NDArray[np.int64]) -> Vector:
    """Radial-directional averaging of int4 bodies as one would write it in NumPy; all weights are equal."""
    sizes = np.diff(segments)
    total, radii = np.zeros(n, np.float32), np.zeros(sizes.size)
    for body in bodies:
        scales, packed = quantise.as_int4(body, n, 4)
        codes = np.concatenate([packed.reshape(-1, 32) & 15, packed.reshape(-1, 32) >> 4], axis=1).astype(np.float32) - 8
        values = (codes * (scales.astype(np.uint32) << 16).view(np.float32)[:, None]).reshape(-1)[:n]
        norms = np.sqrt(np.add.reduceat(values.astype(np.float64) ** 2, segments[:-1]))
        total += values * np.repeat(np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0), sizes).astype(np.float32)
        radii += norms
    lengths = np.sqrt(np.add.reduceat(total.astype(np.float64) ** 2, segments[:-1]))
    return total * np.repeat(radii / len(bodies) / lengths, sizes).astype(np.float32)


def naive_mean(vectors: list[Vector]) -> Vector:
    """Mean of float32 vectors, weighted by tokens, added up in float64."""
    total = np.zeros(vectors[0].size)
    for vector in vectors:
        total += vector.astype(np.float64) * TOKENS
    return (total / (TOKENS * len(vectors))).astype(np.float32)


def measure(values: int, repeat: int) -> dict[str, Any]:
    """Everything, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    fragments = build_map(model(FRAGMENTS * values), FRAGMENTS).fragments
    fragment = max((f for f in fragments if not f.embedding), key=lambda f: f.size)
    rows = [row for bits in (2, 4, 8, 16, 32) for row in measure_bits(fragment, bits, repeat)]
    by_name = {row.name: row for row in rows if row.bits == 4 or row.name == "float64 mean of 4"}
    ours = by_name["merge of 4"].best
    return {
        "machine": script.machine() | {"vectors": vectors(), "numpy": np.__version__},
        "values": fragment.size,
        "repeat": repeat,
        "rows": [asdict(row) | {"best": row.best, "median": row.median, "ratio": row.ratio} for row in rows],
        "times_plain_numpy": ours / by_name["merge of 4, plain NumPy"].best,
        "times_float64_mean": ours / by_name["float64 mean of 4"].best,
    }


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    about = result["machine"]
    print(
        f"{about['cpu']}, 1 of {about['cores']} cores, {about['vectors']}; Python {about['python']}, NumPy {about['numpy']}; "
        f"a fragment of {result['values']:,} values, {result['repeat']} repeats"
    )
    print(f"{'1e9 values/s':28}{'bits':>5}{'best':>9}{'median':>9}{'target':>9}{'ratio':>8}")
    for row in result["rows"]:
        target = f"{row['target']:9.2f}{row['ratio']:8.2f}" if row["target"] else ""
        print(f"{row['name']:28}{row['bits']:5}{row['best']:9.3f}{row['median']:9.3f}{target}")
    print(
        f"merge of 4 int4 offers: {result['times_plain_numpy']:.1f} times as fast as plain NumPy doing the same, "
        f"{result['times_float64_mean']:.1f} times as fast as a float64 mean of float32 vectors"
    )


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--values", type=int, default=4_000_000)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    script.with_allocator()
    result = measure(arguments.values, arguments.repeat)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
