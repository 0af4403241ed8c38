"""Held offers, a fragment and a replica for merges by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.core import outer, quantise
from diloco.core.chain import Chain
from diloco.core.fold import Replica
from diloco.core.fragments import Fragment, TensorSpec, build_map
from diloco.core.round import Held
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.body import Body
from diloco.wire.fields import Bits
from diloco.wire.offers import Offer

Vector = NDArray[np.float32]
BODY = Body(size_bytes=0, content_hash=b"c" * 32, parts=0, attempt=b"attempt.")


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def merge_settings(**changes: Any) -> RunSettings:
    defaults = {
        "shards": 1,
        "fragments.count": 1,
        "outer.learning_rate": 0.5,
        "outer.momentum": 0.0,
        "codec.record_bits": 32,
        "merge.weights": "tokens",
    }
    return run_settings("decoupled", defaults | changes)


def fragment_of(*shape: int, embedding: bool = False) -> Fragment:
    """One fragment of one tensor, beside a tensor of the other kind where it is an embedding."""
    model = [TensorSpec("t", shape, embedding)]
    return build_map([*model, TensorSpec("u", (1,))] if embedding else model, 2 if embedding else 1).fragments[0]


def held(learner: str, values: Vector, *, tokens: int, steps: int = 1, bits: Bits = 32, **changes: Any) -> Held:
    fields: dict[str, Any] = {
        "fragment": 0,
        "learner": learner,
        "incarnation": 7,
        "number": 2,
        "after": (0, 0),
        "round": 4,
        "base_version": 3,
        "base_hash": b"b" * 32,
        "bits": bits,
        "steps": steps,
        "tokens": tokens,
        "lost_tokens": 0,
        "data": [(2, 8, steps)],
        "body": BODY,
    }
    return Held(Offer(**(fields | changes)), quantise.quantise(values.copy(), bits))


def replica_of(theta: Vector) -> Replica:
    momentum = np.zeros_like(theta)
    chain = Chain(0, 3, 2, b"h" * 32, 9, outer.state_hash(theta, momentum), tokens_merged=1000)
    return Replica(chain, theta.copy(), momentum)
