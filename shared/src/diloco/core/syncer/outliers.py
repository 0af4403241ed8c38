"""Which offers are outliers by norm: the rule behind ``quarantine.factor``.

An offer is one if its norm is above ``factor`` times the median over the other live learners of the largest norm among their
recent offers of the same fragment, and as many times more as it holds more steps than the median of their largest: n times the
steps move at most n times as far, so the steps of a long round are no outlier by themselves. An offer that holds
fewer steps gets no less room. At least two others are asked: of two learners neither is the measure of the other. While the
learning rate rises, an offer of before counts as many times more as the rate has risen since: a slow learner's is older.

So in a run whose learners move by between r and R a step, each straight on or to and fro, nothing is an outlier as long as
``factor`` is at least R / r.

An outlier is not merged. It *counts* towards a quarantine (:mod:`diloco.core.run.quarantine`) unless a sound learner may have
made it: rows of an embedding that only one learner's data has, or an expert that only its tokens reach, move a hundred times
as far as with the others. So it does not count in a fragment with an embedding-like tensor, nor where the others' offers are
nearly zero beside Theta. There it is cut instead (:mod:`diloco.core.syncer.cutting`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from diloco.core.log.chain import Chain
from diloco.core.run import budget
from diloco.core.syncer.offer_fit import identity
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors.fragments import Fragment
from diloco.settings.run import QuarantineSettings, RunSettings
from diloco.wire.offers import Offer

Recent: TypeAlias = tuple[float, int, float]  # an offer's norm and steps, and the share of the warm-up that was done

RECENT = 4  # offers of each learner that the others are measured by
OTHERS = 2
NEARLY_STILL = 1e-4  # of a fragment's norm: if the others move it no further, they say nothing of how far one may


@dataclass(frozen=True)
class JudgedOffer:
    """An offer, its norm, and the largest that is no outlier.

    ``counts``: it is the last of as many outliers in a row as ``quarantine.offers`` says, and no sound learner makes such ones.
    """

    learner: str
    incarnation: int
    norm: float
    threshold: float
    counts: bool

    @property
    def is_outlier(self) -> bool:
        """Whether it is left out of merges, or cut."""
        return self.norm > self.threshold


def is_cut(fragment: Fragment) -> bool:
    """Whether outliers among a fragment's offers are always cut: one of its tensors is embedding-like."""
    return any(piece.embedding for piece in fragment.pieces)


def counting(fragments: Collection[Fragment]) -> int:
    """Return the number of fragments whose outliers count towards a quarantine."""
    return sum(not fragment.state and not is_cut(fragment) for fragment in fragments)


def warmed_up(settings: RunSettings, chain: Chain, held: Iterable[RoundOffer]) -> float:
    """Return the share of the learning rate's warm-up that is done, above 0 and at most 1, once offers are merged."""
    tokens = budget.accounted(chain) + sum(member.tokens for item in held for member in item.offer.members)
    last = settings.inner.warmup_fraction * settings.tokens
    return min(1.0, max(1, tokens) / last) if last else 1.0


def median_of_others(norms_and_steps: Collection[tuple[float, int]]) -> tuple[float, int]:
    """Return the norm and the steps that an offer is measured by, where the others have these; of an even number the higher."""
    norms, steps = zip(*norms_and_steps, strict=True)
    return statistics.median_high(norms), statistics.median_high(steps)


@dataclass
class Norms:
    """One fragment's recent offers."""

    _recent: dict[str, deque[Recent]] = field(default_factory=dict)  # by learner
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict)  # by learner: the offer that was noted last
    # by learner: the offer that was judged last, and how many outliers in a row it ends
    _strikes: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def judge(
        self,
        offers: Iterable[tuple[Offer, float]],
        live: Collection[str],
        settings: QuarantineSettings,
        *,
        still_norm: Callable[[], float] = float,
        is_cut: bool = False,
        warmed_up: float = 1.0,
    ) -> list[JudgedOffer]:
        """Judge offers, given with their norms, by the ``live`` learners'; those that too few others offer beside are left out.

        ``still_norm`` returns the norm that the others' must exceed for an outlier to count, by default 0; ``is_cut``: none
        counts here. ``warmed_up``: the share of the warm-up that is done (:func:`warmed_up`). An offer that is judged again,
        in a merge that is made again, enters the history once.
        """
        offers = [(offer, norm) for offer, norm in offers if offer.steps]
        for offer, norm in offers:
            if self._newest.get(offer.learner) != identity(offer):
                self._newest[offer.learner] = identity(offer)
                self._recent.setdefault(offer.learner, deque(maxlen=RECENT)).append((norm, offer.steps, warmed_up))
        judged = []
        for offer, norm in offers:
            others = self._others(offer.learner, live, warmed_up)
            if others is None:
                continue
            usual, steps = others
            threshold = settings.factor * usual * max(1.0, offer.steps / steps)
            may_count = norm > threshold and not is_cut and usual > still_norm()
            counted, strikes = self._strikes.get(offer.learner, ((0, 0), 0))
            if counted != identity(offer):
                strikes = strikes + 1 if may_count else 0
                self._strikes[offer.learner] = identity(offer), strikes
            counts = may_count and strikes >= settings.offers
            judged.append(JudgedOffer(offer.learner, offer.incarnation, norm, threshold, counts))
        return judged

    def _others(self, learner: str, live: Collection[str], warmed_up: float) -> tuple[float, int] | None:
        """Return the norm and steps that a learner's offers are measured by; None where too few others are known."""
        others = [recent for name, recent in self._recent.items() if name in live and name != learner]
        if len(others) < OTHERS:
            return None
        largest = [max(norm * max(1.0, warmed_up / then) for norm, _, then in recent) for recent in others]
        longest = [max(steps for _, steps, _ in recent) for recent in others]
        usual, steps = median_of_others(list(zip(largest, longest, strict=True)))
        return (usual, steps) if usual else None
