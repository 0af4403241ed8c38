"""The learners that one fragment's rounds wait for, by the patience that each of them has left."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diloco.core.learner.slots import SeenHeartbeat
from diloco.core.syncer.roster import Roster
from diloco.wire.offers import RegionalOffer


@dataclass(frozen=True)
class WaitInVain:
    """A learner that a fragment's round does not wait for any more."""

    learner: str
    waited_s: float
    left_s: float  # of its patience


@dataclass
class _Wait:
    """The wait of one round for one learner: ``total_s`` seconds by the time ``at_s``."""

    total_s: float = 0.0
    at_s: float = -math.inf


def left_to_regions(roster: Roster, live: Iterable[SeenHeartbeat], offers: Iterable[RegionalOffer], version: int) -> set[str]:
    """Return the live learners whose region's offer to the round of ``version`` does not have their answer.

    For a round of the quorum ``all``: a region's syncer then waits for its learners itself. Those that its offer is without it
    has waited for in vain, or has left out, as outliers; the owner is told no reason, and must not wait for them once more.
    """
    answered = {answer.learner for offer in offers for answer in offer.members if answer.round == version}
    regions = {roster.learners[name].heartbeat.region for name in answered if name in roster.learners}
    return {seen.heartbeat.learner for seen in live if seen.heartbeat.region in regions} - answered


class RoundWaits:
    """The learners that one fragment's rounds wait for, and those that were waited for in vain."""

    def __init__(self) -> None:
        self.since_s: float | None = None  # since when learners are waited for that others wait for
        self.in_vain: set[str] = set()  # learners that were waited for in vain, and have delivered nothing since
        self._news: list[WaitInVain] = []
        self._waits: dict[str, _Wait] = {}  # of the present round, also before it opened
        self._answered: set[str] = set()  # the present round

    def take_news(self) -> list[WaitInVain]:
        """Return the learners given up since this was last asked."""
        news, self._news = self._news, []
        return news

    def blame(
        self, roster: Roster, missing: Iterable[SeenHeartbeat], now_s: float, *, needed: bool, closing: bool = False
    ) -> bool:
        """Note that others wait for ``missing``, and give up those that have had their time; return whether there are any.

        ``needed``: the round cannot close without each of them. In a closing round work would be lost, so that every learner
        has its whole patience there.
        """
        if self.since_s is None:
            self.since_s = now_s
        gone = False
        for seen in missing:
            name, begun_s = seen.heartbeat.learner, max(self.since_s, seen.first_s)
            wait = self._waits.setdefault(name, _Wait())
            before_s, more_s = wait.total_s, now_s - max(wait.at_s, begun_s)
            wait.total_s, wait.at_s = before_s + max(0.0, more_s), now_s
            whole_s, patience = roster.patience_s(seen, closing=closing), roster.patience_of(name)
            over = now_s - begun_s >= whole_s
            if needed and not closing:
                patience.debit(wait.total_s, before_s, now_s, whole_s)
                least_s = patience.least_s(seen.step_times.get())
                over = over or (patience.left_s(whole_s) <= 0 and wait.total_s >= least_s)
            if over:
                self.in_vain.add(name)
                patience.fail()
                self._news.append(WaitInVain(name, wait.total_s, patience.left_s(whole_s)))
                del self._waits[name]
                gone = True
        return gone

    def answer(self, roster: Roster, learners: Iterable[str], now_s: float) -> None:
        """Take in that ``learners`` have answered the open round; each counts once."""
        for name in learners:
            seen = roster.learners.get(name)
            if name not in self._answered and seen is not None:
                self._answered.add(name)
                wait = self._waits.pop(name, _Wait())
                roster.patience_of(name).answer(wait.total_s, now_s, roster.patience_s(seen))

    def deliver(self, learners: Iterable[str]) -> None:
        """Wait again for learners that have delivered an offer."""
        self.in_vain.difference_update(learners)

    def end_round(self, known: Iterable[str]) -> None:
        """Forget the round that has ended, and learners that are not ``known`` any more."""
        self.since_s = None
        self.in_vain.intersection_update(known)
        self._waits.clear()
        self._answered.clear()
