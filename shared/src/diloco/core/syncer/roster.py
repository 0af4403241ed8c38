"""The learners as one syncer hears them, and which of them a round waits for.

A heartbeat is a claim. The roster takes those that the gate (:mod:`diloco.core.run.gate`) has let in, and measures by its own
clock how long a learner's steps take. A learner whose steps stand still, or that does not answer, is waited for no longer than
a multiple of its own usual time: a slow learner has a long one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from diloco.core.learner.slots import ReferenceClock, SeenHeartbeat
from diloco.core.log.chain import Chain
from diloco.core.run import budget
from diloco.core.syncer import claims
from diloco.core.syncer.claims import OWN_TASK, StepBounds
from diloco.core.syncer.patience import Patience
from diloco.settings.run import RunSettings
from diloco.wire.control import Heartbeat
from diloco.wire.fields import MAX_COUNT, MAX_MEMBERS
from diloco.wire.grants import Grant
from diloco.wire.offers import Answer, Offer, RegionalOffer

DEFAULT_STEP_S = 1.0  # of an inner step, before any learner has said how long one takes
STEPPING = ("stepping", "waiting")
ACTIVE = (*STEPPING, "closing", "leaving")
BEGINNING = ("starting", "recovering")
PATIENCE = 6.0  # a learner may be so many times slower than usual, and is waited for
FIRST_STEP_S = 60.0  # for a learner whose step time is not known yet: frameworks compile their first step
GROWTH = 2.0  # a step time counts as at most so many times the usual one: one long pause must not make the next one usual
HELD_UP = 0.5  # a heartbeat was held up if it comes after so small a part of the time that its learner says it has worked since
ANSWER_DEAD_S = 4.0  # a learner has at least so many times `liveness.dead_s` to answer: an offer may have to cross a thin link
CLOSING_DEAD_S = 12.0  # and so many in a closing round: work that is not in it is in no version


class Roster:
    """The learners as one syncer hears them, by its own clock.

    It has the settings in force for all fragments' rounds, and the learners that are ``excluded``; :meth:`change` sets them.
    ``bounds``: of the run's steps. ``ending``: the log of some fragment is closed, so that all others are to be.
    """

    def __init__(self, settings: RunSettings, bounds: StepBounds = OWN_TASK, grants: dict[str, Grant] | None = None) -> None:
        self.settings, self.bounds = settings, bounds
        self.grants = {} if grants is None else grants  # by learner, in a run with identities; one for all rosters of a syncer
        self.excluded: frozenset[str] = frozenset()  # learners that are not listened to
        self.on_trial: frozenset[str] = frozenset()  # of these: their offers are judged, and not merged
        self.learners: dict[str, SeenHeartbeat] = {}
        self.ending = False
        self._patience: dict[str, Patience] = {}
        self._clock = ReferenceClock()
        self._clock_of: list[SeenHeartbeat] | None = (
            None  # the live learners that it was last read of: every fragment asks, as of these
        )
        self._began_s: float | None = None  # when a step of any learner was first heard to end
        self._first_s: float | None = None  # when any learner was first heard
        self._live: tuple[float, list[SeenHeartbeat]] | None = (
            None  # at one moment, about which every fragment asks several times
        )

    def hear(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """Take in a heartbeat of an admitted learner; return whether a round may go by it.

        None goes by one of an excluded learner, or older than the newest, nor by one that says again what was known.
        """
        known = self.learners.get(heartbeat.learner)
        if heartbeat.learner in self.excluded or (known and _age(heartbeat) < _age(known.heartbeat)):
            return False
        is_news = (
            known is None or now_s - known.at_s >= self.settings.liveness.dead_s or _said(heartbeat) != _said(known.heartbeat)
        )
        if self._first_s is None:
            self._first_s = now_s
        if known is None:
            if len(self.learners) >= MAX_MEMBERS:
                oldest = min(self.learners, key=lambda name: self.learners[name].at_s)
                del self.learners[oldest]
                self._patience.pop(oldest, None)
            seen = self.learners[heartbeat.learner] = SeenHeartbeat(heartbeat, now_s, now_s, now_s)
        elif known.heartbeat.incarnation != heartbeat.incarnation:
            seen = self.learners[heartbeat.learner] = SeenHeartbeat(heartbeat, now_s, known.first_s, now_s)
        else:
            seen = known
            self._note_step(seen, heartbeat, now_s)
        seen.heartbeat, seen.at_s, self._live = heartbeat, now_s, None
        for fragment, version in enumerate(heartbeat.versions):
            if seen.since.get(fragment, (-1, 0))[0] != version:
                seen.since[fragment] = (version, heartbeat.step)
        return is_news

    def _note_step(self, seen: SeenHeartbeat, heartbeat: Heartbeat, now_s: float) -> None:
        taken = heartbeat.step - seen.heartbeat.step
        if not taken:
            return
        if self._began_s is None:
            self._began_s = now_s
        # heartbeats that a link has held up come all at once, and say nothing of how long steps take
        held_up = now_s - seen.stepped_s < HELD_UP * (heartbeat.busy_s - seen.heartbeat.busy_s)
        if seen.steps and not held_up:
            step_s, usual_s = (now_s - seen.stepped_s) / taken, seen.step_times.value
            seen.step_times.add(step_s if usual_s is None else min(step_s, GROWTH * usual_s))
            seen.recent_steps.add(step_s)
        seen.steps, seen.stepped_s = True, now_s

    def change(self, settings: RunSettings, excluded: frozenset[str], on_trial: frozenset[str] = frozenset()) -> None:
        """Go by these settings and without these learners from now on; those ``on_trial`` are judged all the same."""
        self.settings, self.excluded, self.on_trial, self._live = settings, excluded, on_trial, None

    def tries(self, offer: Offer | RegionalOffer) -> bool:
        """Whether an offer is judged, and not merged: a quarantined learner's own."""
        return isinstance(offer, Offer) and offer.learner in self.on_trial

    def judge(self, offers: Iterable[Offer | Answer], chain: Chain | None, elapsed_s: float) -> None:
        """Refuse offers of which one claims what cannot be; ``elapsed_s``: from genesis until their server stored them.

        Raises:
            ClaimError: as :func:`diloco.core.syncer.claims.judge`.
        """
        for offer in offers:
            claims.judge(offer, chain, self.settings, self.bounds, self.grants.get(offer.learner), elapsed_s)

    def live(self, now_s: float) -> list[SeenHeartbeat]:
        """Return the learners that take part, by name.

        They were heard within ``liveness.dead_s``, and do not stand still while they say that they step.
        """
        if self._live is None or self._live[0] != now_s:
            dead_s, heard = self.settings.liveness.dead_s, sorted(self.learners.items())
            taking_part = [seen for name, seen in heard if name not in self.excluded and seen.heartbeat.state in ACTIVE]
            recent = [seen for seen in taking_part if now_s - seen.at_s < dead_s]
            steps = ("stepping",) if self.settings.round.learners_wait else STEPPING
            self._live = now_s, [s for s in recent if s.heartbeat.state not in steps or not self.stands_still(s, now_s)]
        return self._live[1]

    def clock(self, now_s: float) -> ReferenceClock:
        """Return the clock of the rounds, as it is now.

        It goes by learners that take steps. One that only states how long its steps take is not believed beside others of which
        steps were heard: it may take none, and no slot would come. One that has not ended its first step is not waited for.
        """
        live = self.live(now_s)
        if self._clock_of is not live:
            stepping = [seen for seen in live if seen.heartbeat.state in STEPPING]
            heard = [seen for seen in stepping if seen.step_times.value is not None]
            stated = [seen for seen in stepping if seen.step_s is not None]
            counted = heard or stated or stepping
            self._clock.look(counted, self.settings.quorum(len(counted)), self.settings.liveness.heartbeat_s, now_s)
            self._clock_of = live
        return self._clock

    def expected(self, chain: Chain, now_s: float) -> int:
        """Return how many more learners may be about to take part: those of the log or, before any merge, of the settings.

        A syncer that has just begun has heard some learners a moment before the others. For ``liveness.dead_s`` it expects
        those that it has not heard, or not with a step to come.
        """
        if self._first_s is None or now_s - self._first_s >= self.settings.liveness.dead_s:
            return 0
        here = {name for name, seen in self.learners.items() if seen.heartbeat.state not in BEGINNING}
        if not chain.cursors:
            return max(0, self.settings.learners - len(here))
        return len(chain.cursors.keys() - here - self.excluded)

    def stands_still(self, seen: SeenHeartbeat, now_s: float) -> bool:
        """Whether a learner has taken no step for longer than it ever needs, while others step."""
        since_s, usual_s = seen.stepped_s, seen.step_times.value
        if usual_s is None:
            if self._began_s is None:
                return False
            return now_s - max(since_s, self._began_s) >= max(self.settings.liveness.dead_s, FIRST_STEP_S)
        return now_s - since_s >= max(self.settings.liveness.dead_s, PATIENCE * usual_s)

    def patience_s(self, seen: SeenHeartbeat, *, closing: bool = False) -> float:
        """Return for how long others wait for a learner: a multiple of the time that its steps between two rounds take it."""
        floor_s = (CLOSING_DEAD_S if closing else ANSWER_DEAD_S) * self.settings.liveness.dead_s
        return max(floor_s, PATIENCE * self.settings.round.steps * seen.step_times.get())

    def patience_of(self, learner: str) -> Patience:
        """Return the account of a learner's patience: one for all its incarnations, and for all fragments of the syncer."""
        return self._patience.setdefault(learner, Patience())

    def has_applied(self, fragment: int, version: int) -> bool:
        """Whether any learner has said that it has applied this version of a fragment, or a later one."""
        return any(seen.heartbeat.versions[fragment] >= version for seen in self.learners.values())

    def have_applied(self, fragment: int, version: int, now_s: float) -> bool:
        """Whether half of the live learners have applied this version of a fragment, or a later one: they fold to its state."""
        live = self.live(now_s)
        applied = sum(seen.heartbeat.versions[fragment] >= version for seen in live)
        return applied > 0 and 2 * applied >= len(live)

    def step_s(self, now_s: float) -> float:
        """Return the median of the live learners' step times.

        A learner's own word counts up to ``GROWTH`` times what was heard of its steps, and alone where nothing was yet.
        """
        stated = [(seen.heartbeat.step_s, seen.step_times.value) for seen in self.live(now_s) if seen.heartbeat.step_s > 0]
        heard = [min(step_s, GROWTH * usual_s) for step_s, usual_s in stated if usual_s]
        times = heard or [step_s for step_s, _ in stated]
        return statistics.median(times) if times else DEFAULT_STEP_S

    def long_step_s(self, now_s: float) -> float:
        """Return xi_step of :func:`diloco.core.run.pace.grace_s`: the median of the live learners' long steps.

        It is that of the reference where that is shorter: its steps are those of the cycle, in which the next round comes.
        """
        usual_s, reference = self.step_s(now_s), self.clock(now_s).reference
        known_s = [long_s for seen in self.live(now_s) if (long_s := seen.long_step_s) is not None]
        if reference is None or reference.long_step_s is None:
            return usual_s
        return min(max(statistics.median(known_s), usual_s), reference.long_step_s)

    def processed(self, chain: Chain, now_s: float) -> int:
        """Return the tokens that all learners have processed: those of a fragment's log, and those not merged yet.

        Of a learner's word of the latter no more counts than :func:`diloco.core.run.budget.unmerged` tokens, and nothing before
        its first: no learner can end a run by a claim.
        """
        unmerged = 0
        for seen in self.live(now_s):
            cursor = chain.cursors.get(seen.heartbeat.learner)
            if cursor is not None:
                claimed = seen.heartbeat.tokens - cursor.tokens - cursor.lost_tokens
                unmerged += max(0, min(claimed, budget.unmerged(cursor)))
        return min(budget.accounted(chain) + unmerged, MAX_COUNT)  # an announcement has to hold it

    def used_up(self, chain: Chain, now_s: float, *, near: bool) -> bool:
        """Whether the token budget is used up by what a fragment's log holds, or the log can come to hold no more.

        Tokens that a learner processed between its last offer and a crash are counted no more. That can bring the count below
        the budget when all have stopped for good, and no learner would take the steps that are missing. So where the log is
        near to its budget (:meth:`in_reach`), it is enough that every live learner has stopped; where it is not, they must be
        all that it knows.
        """
        if self.ending:
            return True
        if self.stopped(now_s) and (
            near or budget.stated_in_reach(chain, self.settings.tokens) or self._nothing_comes(chain, now_s)
        ):
            return True
        return near and self.processed(chain, now_s) >= self.settings.tokens

    def in_reach(self, chain: Chain) -> bool:
        """Whether the log's tokens and those that may be on their way make up the budget."""
        return budget.in_reach(chain, self.settings.tokens)

    def _nothing_comes(self, chain: Chain, now_s: float) -> bool:
        """Whether learners that have stopped hold nothing of a fragment, and are all that its log knows or the run has."""
        live = self.live(now_s)
        names = {seen.heartbeat.learner for seen in live}
        everybody = chain.cursors.keys() <= names if chain.cursors else len(names) >= self.settings.learners
        return everybody and not any(seen.heartbeat.steps[chain.fragment] for seen in live)

    def stopped(self, now_s: float) -> bool:
        """Whether every live learner has stopped: none takes a step any more."""
        live = self.live(now_s)
        return bool(live) and all(seen.heartbeat.state == "closing" for seen in live)


def _said(heartbeat: Heartbeat) -> tuple[Any, ...]:
    """Return what rounds go by."""
    return heartbeat.incarnation, heartbeat.state, heartbeat.step, heartbeat.tokens, heartbeat.versions, heartbeat.steps


def _age(heartbeat: Heartbeat) -> tuple[int, int, int]:
    return heartbeat.incarnation, heartbeat.step, heartbeat.tokens
