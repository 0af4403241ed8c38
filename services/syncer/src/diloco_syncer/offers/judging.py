"""Judge the offers of one fragment before they are merged: which are outliers, and which of these are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.chain import Chain
from diloco.core.syncer import cutting
from diloco.core.syncer.outliers import NEARLY_STILL, JudgedOffer, Norms, is_cut, warmed_up
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors.fragments import Fragment
from diloco.errors import UnmergeableError
from diloco.process.tasks import computed
from diloco.wire.offers import Offer
from diloco_syncer.context import Context

Vector = NDArray[np.float32]
UNKNOWN_THETA = np.empty(0, np.float32)


class OfferJudge:
    """One fragment's. ``own_norm`` returns the norm of the newest version; inf: it is not known, and no outlier counts."""

    def __init__(self, context: Context, fragment: Fragment, own_norm: Callable[[], float]) -> None:
        self.context, self.fragment, self.own_norm = context, fragment, own_norm
        self._norms = Norms()

    async def judge(
        self, chain: Chain, held: Sequence[RoundOffer], on_trial: Collection[RoundOffer], live: Collection[str]
    ) -> list[JudgedOffer]:
        """Judge the offers of single learners: those to be merged into ``chain``, and of quarantined learners.

        They are judged by those of the ``live`` learners.
        """
        settings, size = self.context.run.in_force.quarantine, self.fragment.size
        if not settings.factor or self.fragment.state:  # of state, offers are values and no displacements
            return []
        single = [(item, item.offer) for item in (*held, *on_trial) if isinstance(item.offer, Offer)]

        share = warmed_up(self.context.run.in_force, chain, held)

        def look() -> list[JudgedOffer]:
            return self._norms.judge(
                [(offer, item.norm(size)) for item, offer in single],
                live,
                settings,
                still_norm=lambda: NEARLY_STILL * self.own_norm(),
                is_cut=is_cut(self.fragment),
                warmed_up=share,
            )

        return await computed(len(single) * size, look)

    async def left_out(
        self, version: int, held: Sequence[RoundOffer], judged: Sequence[JudgedOffer], theta: Vector
    ) -> UnmergeableError | None:
        """Return which learners' offers the merge into ``version`` is to be made without; None: none.

        Outliers are left out, but not those that the merge cuts. ``theta``, float32 [size]: the newest version, or
        nothing where it is not known.
        """
        outliers = {each.learner: each for each in judged if each.is_outlier}
        found = [item for item in held if isinstance(item.offer, Offer) and item.offer.learner in outliers]
        if not found:
            return None
        settings = self.context.run.in_force.quarantine
        cut = await computed(len(held) * self.fragment.size, partial(cutting.cut_rows, self.fragment, settings, held, theta))
        kept = {id(held[place]) for place in cut}
        if kept:
            learners = sorted(held[place].offer.members[0].learner for place in cut)
            self.context.log.debug("offers_cut", fragment=self.fragment.index, version=version, learners=learners)
        names = sorted(item.offer.members[0].learner for item in found if id(item) not in kept)
        if not names:
            return None
        norms = ", ".join(f"{name} {outliers[name].norm:.4g} (above {outliers[name].threshold:.4g})" for name in names[:8])
        text = f"fragment {self.fragment.index}, version {version}: outliers by norm are left out: {norms}"
        return UnmergeableError("offer_outlier", tuple(names), text)
