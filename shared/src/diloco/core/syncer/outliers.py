"""Which learners' outer gradients are outliers by norm: the rule behind ``quarantine.*``.

An offer is one if its norm is above ``factor`` times the median over the other live learners of the largest norm among their
recent offers of the same fragment, and as many times more as it holds more steps than the median of their largest: n times the
steps move at most n times as far, so the steps of a long round are no outlier by themselves. An offer that holds
fewer steps gets no less room. At least two others are asked: of two learners neither is the measure of the other.

So in a run whose learners move by between r and R a step, each straight on or to and fro, nothing is an outlier as long as
``factor`` is at least R / r. A quarantine is in the run's changes, and stays there until an operator readmits the learner.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diloco.core.syncer.round import identity
from diloco.settings.run import QuarantineSettings
from diloco.wire.offers import Offer

RECENT = 4  # offers of each learner that the others are measured by
OTHERS = 2


@dataclass(frozen=True)
class Outlier:
    """A learner that is to be quarantined: the norm of its last offer, and the threshold that it is above."""

    learner: str
    norm: float
    threshold: float


@dataclass
class Norms:
    """One fragment's recent offers."""

    _recent: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)  # by learner: norm and steps
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict)  # by learner: the offer that was judged last
    _strikes: dict[str, int] = field(default_factory=dict)  # by learner: outliers in a row

    def judge(
        self, offers: Iterable[tuple[Offer, float]], live: Collection[str], settings: QuarantineSettings
    ) -> list[Outlier]:
        """Return the learners whose offers, given with their norms, are one outlier too many. Each offer is judged once."""
        fresh = [(offer, norm) for offer, norm in offers if offer.steps and self._newest.get(offer.learner) != identity(offer)]
        for offer, norm in fresh:
            self._newest[offer.learner] = identity(offer)
            self._recent.setdefault(offer.learner, deque(maxlen=RECENT)).append((norm, offer.steps))
        found = []
        for offer, norm in fresh:
            threshold = self._threshold(offer, live, settings.factor)
            strikes = self._strikes.get(offer.learner, 0) + 1 if threshold is not None and norm > threshold else 0
            self._strikes[offer.learner] = strikes
            if threshold is not None and strikes >= settings.offers:
                found.append(Outlier(offer.learner, norm, threshold))
                self._strikes[offer.learner] = 0
                del self._newest[offer.learner]  # should it be offered again once its learner is readmitted
        return found

    def _threshold(self, offer: Offer, live: Collection[str], factor: float) -> float | None:
        """Return the largest norm that an offer may have; None where too few others are known."""
        others = [recent for name, recent in self._recent.items() if name in live and name != offer.learner]
        if len(others) < OTHERS:
            return None
        norm = statistics.median_high(max(norm for norm, _ in recent) for recent in others)
        steps = statistics.median_high(max(steps for _, steps in recent) for recent in others)
        return factor * norm * max(1.0, offer.steps / steps) if norm else None
