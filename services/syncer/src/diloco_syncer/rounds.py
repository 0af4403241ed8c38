"""Open, announce and close the rounds of all owned fragments, by the decisions of :mod:`diloco.core.syncer.round`.

One loop looks at all rounds whenever an offer or a heartbeat came in or something is due. Merges of different fragments
overlap, each in a thread.
"""

from __future__ import annotations

import asyncio
import math

from diloco.core.syncer.round import Merge
from diloco.errors import FenceError, FormatError, NonFiniteError, RewoundError, UnmergeableError
from diloco_syncer.context import Context, clock_s, wait
from diloco_syncer.links import LinkWatch
from diloco_syncer.offers.quarantine import Suspects
from diloco_syncer.owning.governor import Governor
from diloco_syncer.owning.owner import FragmentOwner

ANNOUNCE_EVERY_S = 0.25  # an open round: an announcement may be lost, and a learner may come late


class RoundLoop:
    """One syncer's rounds, until ``governor`` says that there is nothing left to do."""

    def __init__(self, context: Context, governor: Governor, links: LinkWatch, suspects: Suspects, news: asyncio.Event) -> None:
        """``news`` is set when a round may have to be looked at."""
        self.context, self.governor, self.links, self.suspects, self.news = context, governor, links, suspects, news
        self._too_short: set[int] = set()  # steps between two rounds that were found to be less than a round takes

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Hold rounds until everything is over."""
        while not self.governor.over:
            self.news.clear()
            self.context.roster.ending = self.governor.ending
            wait_s = ANNOUNCE_EVERY_S
            for owner in list(self.governor.owned.values()):
                if not owner.busy:
                    wait_s = min(wait_s, await self._look(owner, clock_s(), group))
            await wait(self.news, max(wait_s, 0.001))

    async def _look(self, owner: FragmentOwner, now_s: float, group: asyncio.TaskGroup) -> float:
        """Do everything that is due for one fragment. Return the seconds until the next look."""
        round_, bandwidth = owner.round, self.links.bandwidth
        order = owner.order()
        if order is not None:
            owner.busy = True
            group.create_task(self._roll_back(owner, *order))
            return math.inf
        if round_.due(now_s, bandwidth.steps):
            round_.open(now_s)
            self.context.counts.rounds += 1
            owner.announced_at_s = -math.inf
        if round_.opened_at_s is None:
            return round_.next_look_s(now_s, bandwidth.steps)
        merge = round_.poll(now_s)
        if merge is not None:
            owner.busy = True
            group.create_task(self._commit(owner, merge, group))
            return math.inf
        if now_s - owner.announced_at_s >= ANNOUNCE_EVERY_S:
            await owner.announce(now_s, bandwidth.steps, bandwidth.offer_bits)
        wait_s = owner.announced_at_s + ANNOUNCE_EVERY_S - now_s
        if round_.quorum_at_s is not None and not round_.closing:
            wait_s = min(wait_s, round_.remaining_s(now_s))  # the end of its grace window
        return wait_s

    async def _commit(self, owner: FragmentOwner, merge: Merge, group: asyncio.TaskGroup) -> None:
        try:
            outliers = await owner.outliers(merge)
            if outliers:
                owner.round.without({outlier.learner for outlier in outliers})
                self.suspects.exclude(outliers)
                group.create_task(self.suspects.record(owner.index, outliers))
                return
            await owner.commit(merge, self.links.bandwidth.record_bits)
            self._tell_long_round(owner)
        except UnmergeableError as error:
            self._leave_out(owner, merge, error)
        except (NonFiniteError, FormatError) as error:
            # the offers and their sum are sound, and what became of them is not: begin again without them
            learners = [member.learner for held in merge.held for member in held.offer.members]
            values = {"fragment": owner.index, "version": merge.version, "learners": learners}
            event = "merge_not_finite" if isinstance(error, NonFiniteError) else "merge_unreadable"
            self.context.log.error(event, **values, reason=str(error))
            await self.governor.take_again(owner, group)
        except (FenceError, RewoundError) as error:
            # another process has appended, or entries are lost: what was folded here is not the log's
            self.context.log.warning("version_fenced", fragment=owner.index, version=merge.version, reason=str(error))
            await self.governor.lose(owner)
        finally:
            owner.busy = False
            self.news.set()

    def _tell_long_round(self, owner: FragmentOwner) -> None:
        """Say once, for each interval, that rounds last longer than it."""
        steps, found = self.links.bandwidth.steps, owner.round.long_rounds.found
        if found is None or steps in self._too_short:
            return
        self._too_short.add(steps)
        round_s, interval_s = found
        reason = (
            f"a round of fragment {owner.index} lasts {round_s:.3g} s, but {steps} steps last {interval_s:.3g} s, so the "
            f"fragment's next round comes a multiple of {steps} steps later: set round.steps to "
            f"{math.ceil(steps * round_s / interval_s)} or more"
        )
        values = {"fragment": owner.index, "round_s": round(round_s, 3), "interval_s": round(interval_s, 3), "steps": steps}
        self.context.log.warning("interval_below_round_trip", **values, reason=reason)

    def _leave_out(self, owner: FragmentOwner, merge: Merge, error: UnmergeableError) -> None:
        """Have the version made without the offers that cannot be in it.

        If these are all that are held, a fresh owner waits until it has heard of every learner: others may offer what is usual,
        and if no other learner takes part, what all offer is the usual.
        """
        values = {"fragment": owner.index, "version": merge.version, "learners": list(error.learners)}
        wait_s = owner.acquainted_at_s - clock_s()
        if wait_s > 0 and {member.learner for held in merge.held for member in held.offer.members} <= set(error.learners):
            self.context.log.warning("merge_put_off", **values, wait_s=round(wait_s, 3), reason=str(error))
            owner.round.put_off(owner.acquainted_at_s)
            return
        self.context.log.error(error.event, **values, reason=str(error))
        offers = {member.learner: member for held in merge.held for member in held.offer.members}
        for learner in error.learners:
            self.context.refuse_offer(learner, owner.index, offers.get(learner), error)
        owner.round.without(error.learners)

    async def _roll_back(self, owner: FragmentOwner, change: int, version: int, repairs: int | None) -> None:
        try:
            await owner.roll_back(change, version, repairs)
        except (FenceError, RewoundError, FormatError) as error:
            self.context.log.warning("version_fenced", fragment=owner.index, version=owner.round.version, reason=str(error))
            await self.governor.lose(owner)
        finally:
            owner.busy = False
            self.news.set()
