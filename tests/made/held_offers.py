"""Held offers, a fragment and a replica for merges by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.made.log_entries import offer_of

from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors import outer, quantise
from diloco.core.tensors.fragments import Fragment, TensorSpec, build_map
from diloco.wire.fields import Bits

Vector = NDArray[np.float32]


def fragment_of(*shape: int, embedding: bool = False) -> Fragment:
    """One fragment of one tensor, beside a tensor of the other kind where it is an embedding."""
    model = [TensorSpec("t", shape, embedding)]
    return build_map([*model, TensorSpec("u", (1,))] if embedding else model, 2 if embedding else 1).fragments[0]


def held(learner: str, values: Vector, *, tokens: int, steps: int = 1, bits: Bits = 32, **changes: Any) -> RoundOffer:
    fields: dict[str, Any] = {
        "incarnation": 7,
        "number": 2,
        "round": 4,
        "base_version": 3,
        "base_hash": b"b" * 32,
        "bits": bits,
        "steps": steps,
        "tokens": tokens,
        "data": [(2, 8, steps)],
    }
    return RoundOffer(offer_of(learner, **(fields | changes)), quantise.quantise(values.copy(), bits))


def replica_of(theta: Vector) -> Replica:
    momentum = np.zeros_like(theta)
    chain = Chain(0, 3, 2, b"h" * 32, 9, outer.state_hash(theta, momentum), tokens_merged=1000)
    return Replica(chain, theta.copy(), momentum)
