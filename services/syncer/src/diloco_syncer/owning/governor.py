"""Govern which fragments a syncer owns: have it own those that the table gives it, and no others.

The decisions are :mod:`diloco.core.syncer.ownership`'s. One loop reads and sets the table, hands fragments over and takes
others over; a second one looks whether the logs of owned fragments still end where they are known to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from diloco.core.syncer.ownership import Ownership
from diloco.errors import AppendUncertainError, RunError
from diloco.process.retry import until_available
from diloco.process.tape import Recorder
from diloco.process.tasks import end
from diloco_syncer.context import Context, clock_s, wait
from diloco_syncer.offers.intake import Intake
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.owner import SLOW_ROUND_S, FragmentOwner
from diloco_syncer.owning.standby import Standby
from diloco_syncer.owning.table import OwnersRegistry
from diloco_syncer.owning.takeover import Takeover

SLOW_TAKEOVER_S = 10.0  # a fragment of the largest size is read sooner over any link that a run is made for
TAKEOVERS_AT_ONCE = 8  # loads of fragments that overlap: enough to hide round trips, few enough for memory


class Governor:
    """The fragments that are ``owned``, and those that are being taken over. :meth:`govern` begins with :meth:`begin`."""

    def __init__(
        self,
        context: Context,
        ownership: Ownership,
        intake: Intake,
        tape: Recorder,
        changed: Callable[[], None],
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        """Call ``changed`` when a fragment was taken over or let go of, ``announce`` to send a heartbeat at once."""
        self.context, self.ownership, self.intake, self.changed = context, ownership, intake, changed
        self.owned: dict[int, FragmentOwner] = {}
        self.taking: set[int] = set()
        self.begun = False
        self.news = asyncio.Event()  # ownership may be another one, by what was heard or done
        self._unsure = asyncio.Event()  # the owned fragments may have been another syncer's meanwhile
        self._wrong_since_s: dict[int, float] = {}  # by fragment: when its log was first seen to end with a wrong entry
        self._announce = announce
        self._registry = OwnersRegistry(context, ownership, tape, self._distrust_heads, announce)
        self._standby: Standby
        self._takeover: Takeover

    def begin(self, copies: Copies) -> None:
        """Take fragments over, and follow others, as ``copies`` of their logs."""
        self._standby = Standby(self.context, copies, self.ownership, self.intake.aggregator, self.news.set)
        self._takeover = Takeover(self.context, copies, self._is_mine)
        self.begun = True

    async def stop(self) -> None:
        """Follow the fragments of others no more."""
        await self._standby.stop()

    @property
    def closed(self) -> set[int]:
        """The owned fragments whose log is closed."""
        return {index for index, owner in self.owned.items() if owner.chain.closed}

    @property
    def ending(self) -> bool:
        """Whether the log of any fragment is closed, as far as is known."""
        return bool(self.closed or self.ownership.closed_elsewhere)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do: all logs are closed, or this syncer leaves and has handed everything over."""
        if len(self.closed | self.ownership.closed_elsewhere) == len(self.context.map.fragments):
            return True
        return self.ownership.leaving and not self.owned and not self.taking

    async def stays_over(self) -> bool:
        """Whether the owned logs are closed for all, now that this process is about to end. Let go of those that are not."""
        stays = True
        for index, owner in list(self.owned.items()):
            event = "log_rewound"
            holds = await until_available(partial(self.context.store.reader.holds, owner.chain), self.context.log)
            if holds and not await owner.confirmed(self.context.run.in_force.liveness.dead_s):
                event = await self._judge(owner) or ""
                holds = not event
            if not holds:
                self.context.log.warning(event, fragment=index, version=owner.chain.version)
                stays = False
                if self.owned.get(index) is owner and not owner.busy:
                    await self.let_go(owner)
        return stays and self.over

    async def govern(self, group: asyncio.TaskGroup) -> None:
        """Keep the owned fragments those of the table, for ever.

        Raises:
            RunError: a younger process goes by this one's name.
        """
        while True:
            self.news.clear()
            if self.ownership.replaced:
                raise RunError(
                    f"run {self.context.run.name!r}: a newer process has joined as {self.context.settings.name!r}, so this "
                    "one ends: give every syncer its own name"
                )
            self._look_for_wrong_entries()
            await self._registry.settle()
            self._reconcile(group)
            if not self.taking:  # reading begins again when fragments come or go: not for each of many
                await self.intake.read(self.owned, self.ownership, group)
            await wait(self.news, self.ownership.heartbeat_s)

    async def check_heads(self) -> None:
        """Let go of fragments whose log has another end than is known here, without having met a fence; for ever.

        Learners ignore an owner that has been replaced, and one whose server lost its last writes has learners that went back:
        no learner answers, so nothing is appended.
        """
        while True:
            self._unsure.clear()
            for owner in list(self.owned.values()):
                if not owner.must_check(clock_s()):
                    continue
                try:
                    event = await owner.lost()
                except AppendUncertainError:
                    break  # the server is away
                if event is None and owner.is_unfollowed(clock_s()):
                    event = await self._judge(owner)
                if event is not None and not owner.busy and owner is self.owned.get(owner.index):
                    self.context.log.warning(event, fragment=owner.index, version=owner.chain.version)
                    await self.lose(owner)
            await wait(self._unsure, SLOW_ROUND_S / 2)

    async def _judge(self, owner: FragmentOwner) -> str | None:
        """Compare a fragment's state here with what its log folds to; return the log event that says that they differ.

        Learners pass over entries that state another state than they fold to, and go on waiting for others.
        """
        version, head = owner.chain.version, owner.chain.head
        stored = await self._standby.copies.as_stored(owner.index)
        owner.judged_version = version
        same = stored.replica.chain.head == head or owner.chain.head != head
        return None if same else "state_differs"

    def _look_for_wrong_entries(self) -> None:
        """Have the owners replaced that have written wrong entries.

        Learners get the time to apply the version in question. If they do, it is this syncer that folds to other bits.
        """
        now_s, dead_s = clock_s(), self.context.run.in_force.liveness.dead_s
        found = self._standby.copies.wrong()
        for index, record in found.items():
            if index not in self._wrong_since_s:
                self.context.log.error("entry_wrong", fragment=index, version=record.version, syncer=record.syncer)
        self._wrong_since_s = {index: self._wrong_since_s.get(index, now_s) for index in found}
        self.ownership.wrong = {
            index: record.syncer
            for index, record in found.items()
            if now_s - self._wrong_since_s[index] >= dead_s
            and not self.context.roster.have_applied(index, record.version, now_s)
        }

    def _distrust_heads(self) -> None:
        """Have all heads checked soon: the owned fragments may have been another syncer's meanwhile."""
        for owner in self.owned.values():
            owner.distrust()
        self._unsure.set()

    # ---- fragments come and go

    async def lose(self, owner: FragmentOwner) -> None:
        """Let go of a fragment that another process has appended to, and read the table before taking any over again."""
        self.ownership.distrust()
        await self.let_go(owner)

    async def let_go(self, owner: FragmentOwner) -> None:
        """Own a fragment no more."""
        del self.owned[owner.index]
        await owner.stop()
        if self.context.regions is not None:  # this one is followed from now on, too
            await self._standby.stop()
        self.news.set()
        self.changed()

    async def take_again(self, owner: FragmentOwner, group: asyncio.TaskGroup) -> None:
        """Own a fragment as its log has it: what this process has of it is invalid."""
        await owner.stop()
        again = await self._takeover.take(owner.index, group)
        if again is None:
            await self.let_go(owner)
        else:
            self.owned[owner.index] = again
            self.intake.replace(again)

    def _is_mine(self, index: int) -> bool:
        return index in self.ownership.mine(clock_s())

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        """Begin to hand over the fragments that should not be owned here, and to take over those that should be and may."""
        now_s = clock_s()
        mine = self.ownership.mine(now_s)
        for index, owner in self.owned.items():
            if index not in mine and not owner.busy:
                owner.busy = True
                group.create_task(self._hand_over(owner))
        missing = mine - self.owned.keys() - self.taking
        free = sorted(index for index in missing if self.ownership.may_take(index, now_s))
        if free:
            self.taking.update(free)
            group.create_task(self._take_over(free, group))
        elif not self.taking:
            self._stand_by(mine, missing, group)

    def _stand_by(self, mine: set[int], missing: set[int], group: asyncio.TaskGroup) -> None:
        """Follow the fragments of others if this syncer is there for that; with nothing to take over, forget their copies."""
        if self._standby.follows:
            return
        ownership, fragments = self.ownership, range(len(self.context.map.fragments))
        idle = not mine and not self.owned and ownership.table is not None and not ownership.leaving
        keeps = self.context.regions is not None and len(self.owned) < len(fragments) and not missing
        if idle or keeps:
            self._standby.follow([index for index in fragments if index not in self.owned], group)
        elif not missing:
            self._standby.copies.clear()

    async def _take_over(self, indices: list[int], group: asyncio.TaskGroup) -> None:
        """Take several fragments over: the copies of those that were followed are brought up to date, others are loaded."""
        await self._standby.stop()
        limit = asyncio.Semaphore(TAKEOVERS_AT_ONCE)

        async def take_over(index: int) -> None:
            async with limit:
                try:
                    owner = await self._takeover.take(index, group)
                finally:
                    self.taking.discard(index)
            if owner is not None:
                self.owned[index] = owner
                self.news.set()
                self.changed()

        slow = asyncio.create_task(self._complain_of_slowness(indices))
        try:
            async with asyncio.TaskGroup() as taking:
                for index in indices:
                    taking.create_task(take_over(index))
        finally:
            await end(slow)
        parameters = sum(owner.fragment.size for owner in self.owned.values())
        self.context.log.info("serving", fragments=len(self.owned), parameters=parameters, taken=len(indices))
        self.news.set()

    async def _complain_of_slowness(self, indices: list[int]) -> None:
        """Log that fragments are still being taken over, ever more rarely: nothing of theirs is merged until then."""
        began_s, pause_s = clock_s(), SLOW_TAKEOVER_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s *= 2
            left = sorted(self.taking.intersection(indices))
            self.context.log.warning("takeover_slow", fragments=left, waited_s=round(clock_s() - began_s, 1))

    async def _hand_over(self, owner: FragmentOwner) -> None:
        """Let go of a fragment; its residual, which no other process knows, stays in a keyframe."""
        if not owner.chain.closed and not owner.has_keyframe:
            await owner.store_keyframe()
        await self.let_go(owner)
        self.context.log.info("handed_over", fragment=owner.index, version=owner.chain.version)
        await self._announce()
