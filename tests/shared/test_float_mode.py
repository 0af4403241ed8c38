"""Whatever the floating-point mode of a thread is, all that the log depends on has the same bits, and the mode stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.float_modes import MODES, float_mode
from tests.made.held_offers import fragment_of, held, replica_of
from tests.made.learner_delta import Delta

from diloco.core.learner.delta import Baseline, Offered
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge
from diloco.core.tensors import float_mode as modes
from diloco.core.tensors import outer, quantise
from diloco.core.tensors.merge import Accumulator
from diloco.errors import MachineError
from diloco.settings.presets import run_settings
from diloco_ops.weights import weights_file

Vector = NDArray[np.float32]
N = 1000
SEGMENTS = np.array([0, 100, 640, N], np.int64)


def values_of(seed: int) -> Vector:
    """Values of ordinary sizes, and some that are subnormal, or come to be when they are multiplied by less than 1."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(10.0 ** rng.choice([-40.0, -38.0, -37.5, -3.0, 0.0], N // 20), 20)
    values: Vector = (rng.standard_normal(N) * sizes).astype(np.float32)
    return values


# made before any mode is changed: NumPy, too, computes in the mode of its thread
A, B, C = (values_of(seed) for seed in range(3))
BODIES = {bits: quantise.quantise(A, bits) for bits in (1, 2, 4, 8, 16, 32)}
ERROR, REST = quantise.quantise(B, 8), quantise.quantise(C, 8)
HELD = [held("ann", A, tokens=300, steps=7, bits=8), held("bob", B, tokens=100, steps=3, bits=4)]
REPLICA = replica_of(C)
FRAGMENT = fragment_of(50, 20)
ADAMW = outer.AdamW(0.95, ((300, 0.1), (N, 0.0)))


def encode(bits: int) -> list[Any]:
    error = A.copy()
    return [quantise.quantise(error, bits, error=error), error]


def decode(bits: int) -> list[Any]:
    return [quantise.dequantise(BODIES[bits], N, bits)]


def add_up(method: Any) -> list[Any]:
    merge, other = Accumulator(N, SEGMENTS, method), Accumulator(N, SEGMENTS, method)
    for bits, weight in ((2, 0.3), (4, 1.7), (8, 0.1), (32, 2.9)):
        merge.add(BODIES[bits], bits, weight)
    other.add_values(B, 0.7)
    merge.combine(other)
    return [merge.result()]


def fold(optimizer: outer.OuterOptimizer, bits: int) -> list[Any]:
    theta, momentum = C.copy(), np.concatenate([B] * optimizer.moments)
    np.abs(momentum[(optimizer.moments - 1) * N :], out=momentum[(optimizer.moments - 1) * N :])
    body = BODIES[bits]
    expected = outer.folded_hash(theta, momentum, body, bits, optimizer.at(3, 0.5, 0.1))
    return [outer.fold(theta, momentum, body, bits, optimizer.at(3, 0.5, 0.1)), expected, theta, momentum]


def offer() -> list[Any]:
    delta = Delta("ann", 1, True, True, B, 3, bytes(32))
    delta.values.error = ERROR
    encoded = delta.values.encode(C.copy(), 4)
    return [encoded.body, encoded.rest]


def progress() -> list[Any]:
    reference = Baseline(C, Offered(quantised(), 4, ERROR, 8))
    return [reference[:], reference[70:900]]


def quantised() -> Any:
    return type("Encoded", (), {"body": BODIES[4], "rest": REST})()


def version(against: str, optimizer: str) -> list[Any]:
    settings = run_settings(
        "decoupled", {"merge.against": against, "merge.granularity": "tensor", "codec.record_bits": 4, "outer.momentum": 0.1}
    )
    replica, residual = REPLICA.copy(), B.copy()
    replica.optimizer = ADAMW if optimizer == "adamw" else outer.NESTEROV
    replica.momentum = np.concatenate([np.abs(A)] * replica.optimizer.moments)
    delta = merging.merged(FRAGMENT, settings, HELD, {3: B}, replica.theta)
    merge = Merge(4, tuple(HELD), False, 0.0, 0.0)
    record, _, _ = merging.make_version(
        replica, residual, delta.copy(), merge, settings, bits=4, syncer="s", attempt=bytes(8), now_s=0.0
    )
    return [delta, record.state_hash, replica.theta, replica.momentum, residual]


def files() -> list[Any]:
    return [weights_file.converted(A, "float16", "t"), weights_file.converted(A, "bfloat16", "t")]


WORK: Mapping[str, Callable[[], list[Any]]] = {
    **{f"encode {bits}": lambda bits=bits: encode(bits) for bits in BODIES},  # type: ignore[misc]
    **{f"decode {bits}": lambda bits=bits: decode(bits) for bits in BODIES},  # type: ignore[misc]
    "merge by rda": lambda: add_up("rda"),
    "merge by average": lambda: add_up("average"),
    **{f"fold {bits}": lambda bits=bits: fold(outer.NESTEROV, bits) for bits in BODIES},  # type: ignore[misc]
    "fold adamw": lambda: fold(ADAMW, 8),
    "offer": offer,
    "progress": progress,
    "version": lambda: version("base", "nesterov"),
    "version against the newest": lambda: version("current", "nesterov"),
    "version of adamw": lambda: version("base", "adamw"),
    "files": files,
}


def bits_of(results: list[Any]) -> list[bytes]:
    return [result if isinstance(result, bytes) else result.tobytes() for result in results]


def by_numpy() -> bytes:
    """What a library computes in this thread."""
    return (A * np.float32(0.1) + B).tobytes() + (C * np.float32(0.5)).tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORK)
def test_the_same_bits_in_a_thread_of_any_mode_which_keeps_it(name: str, mode: str) -> None:
    expected, others = bits_of(WORK[name]()), by_numpy()
    with float_mode(mode):
        before = by_numpy()
        found = bits_of(WORK[name]())
        after = by_numpy()
    assert found == expected
    assert before == after != others, "a learner's own steps are computed as it chose"
    assert by_numpy() == others


def test_the_same_bits_in_a_thread_that_inherits_the_mode() -> None:
    expected, found = bits_of(version("base", "nesterov")), list[list[bytes]]()
    with float_mode("flush"):
        thread = threading.Thread(target=lambda: found.append(bits_of(version("base", "nesterov"))))
        thread.start()
        thread.join()
    assert found == [expected]


def test_the_mode_comes_back_after_an_error() -> None:
    with float_mode("flush"):
        assert not modes.is_standard()
        with pytest.raises(ValueError, match="broadcast"):
            Accumulator(N, SEGMENTS, "average").combine(Accumulator(5, SEGMENTS, "average"))
        assert not modes.is_standard()


def test_a_mode_that_cannot_be_changed_is_named_instead_of_computing_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    body, theta, momentum = BODIES[4], C.copy(), B.copy()
    step = outer.NESTEROV.at(1, 0.5, 0.1)
    monkeypatch.setattr(modes, "_library", lambda: (None, None))
    with float_mode("flush"), pytest.raises(MachineError, match=r"flush-to-zero.*-ffast-math") as raised:
        outer.fold(theta, momentum, body, 4, step)
    assert "memory" not in str(raised.value)
    outer.fold(theta, momentum, body, 4, step)  # a sound thread asks for no library
