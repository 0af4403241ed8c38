"""Cut an outlier of a merge to what the other offers in it move: where it may be sound, but must not steer the merge.

That is so in fragments with an embedding-like tensor, and where the others' offers are nearly zero beside Theta: rows that
only one learner's data has, an expert that only its tokens reach. An offer whose norm is above ``quarantine.factor`` times the
median of the others' in the same merge, by the rule of :mod:`diloco.core.syncer.outliers`, is cut row by row. A row that the
others move is cut to the median of their norms. A row that they nearly leave alone, beside what they move the other rows, is
cut to ``factor`` times its own norm in Theta. So the rows that one learner alone trains go on being trained, and in all others
it weighs as one sound learner does. An offer that is longer than ``MOST`` times the others', and than ``MOST`` times Theta, is
left out all the same: nothing sound is.

The cut is a function of the offers that are merged and of Theta, so an audit that makes the merge again comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.core.syncer.excess import START
from diloco.core.syncer.outliers import NEARLY_STILL, OTHERS, is_cut, median_of_others
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.compiled import kernels
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.core.tensors.outer import norm
from diloco.settings.run import QuarantineSettings
from diloco.wire.offers import Offer

Vector = NDArray[np.float32]
MOST = 1000.0  # rows that only one learner's data has have given norms up to 118 times the others'
LEFT_ALONE = 0.1  # of what the others move the rows of a fragment, beside Theta: a row that they move no further


@exact
def cut_rows(
    fragment: Fragment, settings: QuarantineSettings, held: Sequence[RoundOffer], theta: Vector
) -> Mapping[int, Vector]:
    """Return the factors, float32 [rows], of the rows of each offer in ``held`` that is to be cut, by its place.

    ``theta``: the newest version, float32 [size]; empty where it is not known, and then nothing is cut. Learners' own offers
    are cut, and measured by each other; a region's are its members' together, and were judged there.
    """
    places = [place for place, item in enumerate(held) if isinstance(item.offer, Offer) and item.offer.steps]
    if not settings.factor or fragment.state or not theta.size or len(places) <= OTHERS:
        return {}
    norms = [held[place].norm(fragment.size) for place in places]
    steps = [sum(member.steps for member in held[place].offer.members) for place in places]
    found, rows = dict[int, Vector](), None
    for i, place in enumerate(places):
        usual, usual_steps = median_of_others([(norms[j], steps[j]) for j in range(len(places)) if j != i])
        longer = max(1.0, steps[i] / usual_steps)
        if norms[i] <= settings.factor * usual * longer:
            continue
        if not is_cut(fragment) and usual > NEARLY_STILL * norm(theta):
            continue  # no sound learner makes such an outlier: its owner leaves it out
        if rows is None:
            rows = _RowNorms(fragment, [held[place] for place in places], theta)
        if norms[i] > MOST * max(usual * longer, rows.norm):
            continue
        found[place] = rows.factors(i, longer, settings.factor)
    return found


def cut_values(item: RoundOffer, fragment: Fragment, factors: Vector) -> Vector:
    """Return the outer gradient of an offer, float32 [size], with its rows cut by ``factors``, float32 [rows]."""
    values = quantise.dequantise(item.body, fragment.size, item.offer.bits)
    kernels.scale32(values, fragment.segments("row"), factors)
    return values


class _RowNorms:
    """The norms of the rows of offers and of Theta, float64 [rows] each; of Theta at least ``START`` in every value."""

    def __init__(self, fragment: Fragment, held: Sequence[RoundOffer], theta: Vector) -> None:
        segments = fragment.segments("row")
        squares = np.empty(segments.size - 1, np.float64)
        kernels.squares32(theta, segments, squares)
        self._scale = np.maximum(np.sqrt(squares), START * np.sqrt(np.diff(segments)))  # a fragment may begin as zeros
        self.norm = float(np.sqrt(np.sum(self._scale**2)))  # of Theta
        self._offers = np.stack([np.sqrt(quantise.squares_of(item.body, segments, item.offer.bits)) for item in held])

    def factors(self, i: int, longer: float, alone_factor: float) -> Vector:
        """Return the factors of offer ``i``, float32 [rows], which holds ``longer`` times the others' steps.

        A row that the others leave alone may move by ``alone_factor`` times its norm in Theta.
        """
        others = np.sort(np.delete(self._offers, i, axis=0), axis=0)
        median = others[len(others) // 2]  # of an even number the higher, as where whole offers are judged
        moved = median / self._scale
        alone = moved <= max(LEFT_ALONE * float(np.sqrt(np.mean(moved**2))), NEARLY_STILL)
        most = np.where(alone, alone_factor * self._scale, longer * median)
        own = self._offers[i]
        factors: Vector = np.divide(most, own, out=np.ones_like(own), where=own > most).astype(np.float32)
        return factors
