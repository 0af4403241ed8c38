"""One fragment's pending delta with its arrays, as a learner has both: counts decide, arrays follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner import delta
from diloco.core.learner.delta import ERROR_BITS, ApplyOutcome, DeltaState, DeltaValues, PendingDelta, VersionWrite
from diloco.core.log.chain import Chain
from diloco.core.tensors import quantise
from diloco.wire.entries import Record
from diloco.wire.fields import Bits, Range

Vector = NDArray[np.float32]


def written(applied: VersionWrite, value: Vector) -> Vector:
    """A learner's value, float32 [size], after a version was written into it."""
    if applied.reference is None:
        return applied.theta.copy()
    return applied.theta + (value - applied.reference[:])


class Delta:
    """``state`` and ``values`` of one fragment of one learner; ``carried`` is what the newest version left."""

    def __init__(
        self,
        learner: str,
        incarnation: int,
        overlap: bool,
        error_feedback: bool,
        base: Vector,
        base_version: int,
        base_hash: bytes,
        gradients: bool = False,
        error_bits: Bits = ERROR_BITS,
        **counts: Any,
    ) -> None:
        self.state = DeltaState(learner, incarnation, overlap, base_version, base_hash, **counts)
        self.values = DeltaValues(base, error_feedback, gradients, error_bits)
        self.carried: ApplyOutcome | None = None

    def offer(
        self, snapshot: Vector, steps: int, tokens: int, data: list[Range], round_version: int, bits: Bits
    ) -> PendingDelta:
        """Answer a round with a snapshot, which is overwritten."""
        encoded = self.values.encode(snapshot, bits)
        offer = self.state.offer(steps, tokens, data, round_version, bits)
        self.values.hold(offer.identity, encoded)
        return offer

    def error(self) -> Vector | None:
        """The quantisation error that goes into the next offer."""
        values = self.values
        return None if values.error is None else quantise.dequantise(values.error, values.base.size, values.error_bits)

    def body(self, offer: PendingDelta) -> NDArray[np.uint8]:
        """An pending offer's quantised outer gradient."""
        return self.values.held[offer.identity].body

    def apply(self, record: Record, theta: Vector) -> VersionWrite:
        self.carried = self.state.apply(record)
        return self.values.apply(self.carried, self.state.pending, theta)

    def reload(self, chain: Chain, theta: Vector, *, invalid: bool = False) -> VersionWrite:
        self.carried = self.state.reload(chain, invalid=invalid)
        return self.values.apply(self.carried, self.state.pending, theta)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return delta.dump(self.state), delta.dump_arrays(self.values, self.state.pending)

    def load(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        state = delta.load(self.state, plain)
        self.state, self.values = state, delta.load_arrays(self.values, state.pending, arrays)
