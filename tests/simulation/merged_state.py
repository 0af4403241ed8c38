"""The reference of state that is merged, from ``docs/protocol.md``, section 8: offers are values, and a version their average.

A step adds 1 to a value of its own. A version takes a value's place, so an offer is the version that its learner holds, but for
the steps that it has taken on that version: each is a 1 where the version has 0. Averages of such values lie between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.simulation.learner import Step

from diloco.wire.entries import Record
from diloco.wire.offers import Offer

Vector = NDArray[np.float32]
BITS = 32  # of offers and records, whatever the settings say


def wrong_offer(offer: Offer, values: Vector, base: Vector, steps: Sequence[Step]) -> str:
    """Return how an offer is not what its learner holds, or nothing; ``values`` and ``base`` are float32 [512]."""
    if offer.bits != BITS:
        return f"has {offer.bits} bits"
    own: list[int] = np.flatnonzero(values != base).tolist()
    if len(own) > offer.steps:
        return f"holds {len(own)} steps since version {offer.base_version}, states {offer.steps}"
    stated = {(share, first + index) for share, first, count in offer.data for index in range(count)}
    for index in own:
        if index >= len(steps) or (values[index], base[index]) != (1, 0):
            return f"holds {values[index]} where its version has {base[index]}"
        step = steps[index]
        if step.learner != offer.learner:
            return f"holds a step of {step.learner}"
        if step.applied[offer.fragment] != offer.base_version:
            return f"holds a step taken on version {step.applied[offer.fragment]}, its base is {offer.base_version}"
        if (step.share, step.batch) not in stated:
            return f"holds a step on batch {step.batch} of share {step.share}, which it does not state"
    return ""


def wrong_version(record: Record, theta: Vector, members: Sequence[Vector]) -> str:
    """Return how a version is not the average of its members' values, or nothing; all are float32 [512]."""
    if (record.bits, record.learning_rate, record.momentum) != (BITS, 1.0, 0.0):
        return f"has {record.bits} bits, learning rate {record.learning_rate} and momentum {record.momentum}"
    weights = [member.weight for member in record.members]
    if not np.allclose(theta, np.average(np.array(members, np.float64), axis=0, weights=weights), rtol=0, atol=1e-6):
        return "is not the average of its members' values"
    if theta.min() < 0 or theta.max() > 1:
        return f"has values from {theta.min()} to {theta.max()}"
    return ""
