"""Open, announce and close the rounds of all owned fragments, by the decisions of :mod:`diloco.core.syncer.round`.

One loop looks at the rounds of which something was told, and at those where something is due. Merges of different fragments
overlap, each in a thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from diloco.core.syncer.round import Merge
from diloco.errors import FenceError, FormatError, NonFiniteError, RewoundError, UnmergeableError
from diloco_syncer.context import Context, clock_s, wait
from diloco_syncer.links import LinkWatch
from diloco_syncer.offers.quarantine import OutlierRecord
from diloco_syncer.owning.governor import Governor
from diloco_syncer.owning.owner import FragmentOwner

ANNOUNCE_EVERY_S = 0.25  # an open round: an announcement may be lost, and a learner may come late
LOOK_S = 1.0  # at rounds that are not open, at least: patience ends, and learners are silent, without news
SOON_S = 0.02  # many learners' heartbeats are looked at together: far less than the time in which a round may open


class RoundNews:
    """News since the rounds were looked at last: of single fragments, or of all. Construct it in the loop's thread."""

    def __init__(self) -> None:
        self._event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._of_all, self._fragments = False, set[int]()
        self._coming: asyncio.TimerHandle | None = None
        self._taken_s = -math.inf

    def tell(self) -> None:
        """Have all rounds looked at now."""
        self._of_all = True
        self._event.set()
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    def tell_of(self, fragment: int) -> None:
        """Have a fragment's round looked at now."""
        self._fragments.add(fragment)
        self._event.set()

    def tell_soon(self) -> None:
        """Have all rounds looked at, :data:`SOON_S` after the last look at the earliest."""
        left_s = self._taken_s + SOON_S - self._loop.time()
        if left_s <= 0:
            self.tell()
        elif self._coming is None:
            self._coming = self._loop.call_later(left_s, self.tell)

    def take(self) -> Callable[[int], bool]:
        """Return whether anything was told of a fragment, as a function, and forget it."""
        of_all, fragments = self._of_all, self._fragments
        self._of_all, self._fragments = False, set()
        self._event.clear()
        self._taken_s = self._loop.time()
        return lambda fragment: of_all or fragment in fragments

    async def wait(self, timeout_s: float) -> None:
        """Wait until something is told, at most ``timeout_s``."""
        await wait(self._event, timeout_s)


class RoundLoop:
    """One syncer's rounds, until ``governor`` says that there is nothing left to do."""

    def __init__(
        self, context: Context, governor: Governor, links: LinkWatch, outliers: OutlierRecord, news: RoundNews
    ) -> None:
        """``news`` tells which rounds may have to be looked at."""
        self.context, self.governor, self.links, self.outliers, self.news = context, governor, links, outliers, news
        self._due_s: dict[int, float] = {}  # by fragment: when it is looked at without news
        self._too_short: set[int] = set()  # steps between two rounds that were found to be less than a round takes

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Hold rounds until everything is over."""
        while not self.governor.over:
            is_told = self.news.take()
            self.context.roster.ending = self.governor.ending
            # one time for all: what follows from the learners as of then is found out once
            now_s, steps = clock_s(), self.links.bandwidth.steps
            next_s = now_s + LOOK_S
            for index, owner in list(self.governor.owned.items()):
                if owner.busy:
                    continue
                if is_told(index) or now_s >= self._due_s.get(index, now_s):
                    self._due_s[index] = now_s + min(LOOK_S, await self._look(owner, now_s, steps, group))
                next_s = min(next_s, self._due_s[index])
            await self.news.wait(max(next_s - clock_s(), 0.001))

    async def _look(self, owner: FragmentOwner, now_s: float, steps: int, group: asyncio.TaskGroup) -> float:
        """Do everything that is due for one fragment; return the seconds until the next look.

        ``steps`` inner steps are to lie between two of its rounds.
        """
        round_ = owner.round
        order = owner.order()
        if order is not None:
            owner.busy = True
            group.create_task(self._roll_back(owner, *order))
            return math.inf
        if round_.due(now_s, steps):
            round_.open(now_s)
            self.context.counts.rounds += 1
            owner.announced_at_s = -math.inf
        merge = round_.poll(now_s)
        self.context.tell_in_vain(owner.index, round_.waits)
        if round_.opened_at_s is None:
            return round_.next_look_s(now_s, steps)
        if merge is not None:
            owner.busy = True
            group.create_task(self._commit(owner, merge, group))
            return math.inf
        if now_s - owner.announced_at_s >= ANNOUNCE_EVERY_S:
            await owner.announce(now_s, steps, self.links.bandwidth.offer_bits)
        wait_s = owner.announced_at_s + ANNOUNCE_EVERY_S - now_s
        if round_.quorum_at_s is not None and not round_.closing:
            wait_s = min(wait_s, round_.remaining_s(now_s))  # the end of its grace window
        return wait_s

    async def _commit(self, owner: FragmentOwner, merge: Merge, group: asyncio.TaskGroup) -> None:
        try:
            judged, outliers = await owner.judge(merge)
            self.outliers.note(owner.index, merge.version, judged)
            if outliers is not None:
                self._leave_out(owner, merge, outliers)
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
            self.news.tell_of(owner.index)

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
            self.news.tell_of(owner.index)
