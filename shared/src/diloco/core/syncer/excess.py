"""Merges that move a fragment too far: the rule behind ``quarantine.merge_factor``, and which offers are left out.

A merge may move a fragment by ``merge_factor`` times the usual, and as many times more as an offer in it holds more steps than
lie between two rounds: n times the steps move at most n times as far. The usual is the norm that the outer optimizer's moments
remember of the merges before; it is in the log's state, so every owner decides alike. It is never less than ``REST`` of the
fragment's own norm, since a fragment may have rested. Up to version ``FIRST`` it is that norm at least, and ``START`` in every
value: first rounds have few steps, of a learning rate that rises, and a fragment may begin as zeros. So it is of state in any
version: its offers are values, and no displacements. Before state has moved there is no usual: a running variance begins as 1,
whatever the data's is.

If a merge moves further, or is not finite, the offers with the largest norms are left out one by one until the rest is sound.
The last live learner's is left out only if it cannot be merged at all: what everybody does is the usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.fold import Replica
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.outer import Average, norm
from diloco.settings.run import RunSettings

Vector = NDArray[np.float32]
LARGEST = 2.0**60  # norm of a merge: squares of its values, and sums of those, are finite
REST = 0.01
FIRST = 4
START = 0.1

H = TypeVar("H", bound=RoundOffer)


@exact
def usual(replica: Replica) -> float:
    """Return the norm that a merge of a fragment usually has; 0: it has moved nowhere, and that says nothing."""
    moved, own = replica.optimizer.moved(replica.momentum), norm(replica.theta)
    state = isinstance(replica.optimizer, Average)
    if state and not moved:
        return 0.0
    if replica.chain.version < FIRST or state:
        return max(moved, own, START * math.sqrt(replica.theta.size))
    return max(moved, REST * own)


def room(usual: float, held: Sequence[RoundOffer], settings: RunSettings) -> float:
    """Return the largest norm that a merge of offers may have, where ``usual`` is the usual one."""
    factor = settings.quarantine.merge_factor
    if not factor or not usual:
        return LARGEST
    steps = max(member.steps for item in held for member in item.offer.members)
    return min(LARGEST, factor * usual * max(1.0, steps / settings.round.steps))


def left_out(
    merge: Callable[[Sequence[H]], Vector],
    held: Sequence[H],
    size: int,
    usual: float,
    live: Collection[str],
    settings: RunSettings,
) -> tuple[Vector | None, list[H]]:
    """Return the merge of offers of one fragment, float32 [size], and the offers that are left out of it.

    ``merge`` makes it; ``live`` are the learners that take part, those in ``held`` among them. None: all are left out.
    """
    kept, out = list(held), list[H]()
    while kept:
        delta = merge(kept)
        moves = norm(delta)
        if moves <= room(usual, kept, settings):
            return delta, out
        largest = max(kept, key=lambda item: (item.norm(size), item.offer.members[0].learner))
        gone = {member.learner for item in (*out, largest) for member in item.offer.members}
        if moves <= LARGEST and not set(live) - gone:
            return delta, out
        kept.remove(largest)
        out.append(largest)
    return None, out
