"""Follow the fragments that other syncers own.

A syncer without fragments does, so that a takeover begins near the end of their logs. In a run with regions every syncer
does: one of each region combines offers of these fragments, and stores their keyframes in the region's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from diloco.core.syncer import excess
from diloco.core.syncer.ownership import Ownership
from diloco.core.tensors.outer import norm
from diloco.errors import FenceError, FormatError, StorageFullError
from diloco.log.follower import FollowedEntry, LogCopy
from diloco.process.tasks import end
from diloco_syncer.context import Context, clock_s
from diloco_syncer.offers.aggregator import RegionalAggregator
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.keyframes import Keyframes
from diloco_syncer.syncer_tracing import tell_of_copy


def _own_norm(copy: LogCopy) -> float:
    """Return the norm of a fragment, which another thread may be folding: it is nearly the same before and after."""
    return norm(copy.replica.theta)


class Standby:
    """Keeps the copies of fragments up to date, from :meth:`follow` to :meth:`stop`."""

    def __init__(
        self,
        context: Context,
        copies: Copies,
        ownership: Ownership,
        aggregator: RegionalAggregator | None,
        doubted: Callable[[], None],
    ) -> None:
        """Call ``doubted`` when an owner has written a wrong entry."""
        self.context, self.copies, self.ownership, self.aggregator = context, copies, ownership, aggregator
        self._doubted = doubted
        self._following: asyncio.Task[None] | None = None

    @property
    def follows(self) -> bool:
        """Whether copies are kept up to date."""
        return self._following is not None

    def follow(self, fragments: Sequence[int], group: asyncio.TaskGroup) -> None:
        """Keep copies of these fragments up to date from now on."""
        self._following = group.create_task(self.copies.follow(fragments, self._ready, self._folded, self._doubted))

    async def stop(self) -> None:
        """Follow no more. The copies stay; several callers may wait, and the first to go on may begin another task."""
        following = self._following
        await end(following)
        if self._following is following:
            self._following = None

    def _ready(self) -> None:
        known = self.copies.known()
        if self.aggregator is not None:
            for copy in known:
                # what is usual is known with the next entry: now are many
                self.aggregator.follow(copy.replica.chain, None, 0.0, partial(_own_norm, copy))
        self.context.log.info("standing_by", fragments=len(known))

    async def _folded(self, copy: LogCopy, event: FollowedEntry | None) -> None:
        """Take in that a fragment has a new entry, or (None) was loaded again."""
        context, chain = self.context, copy.replica.chain
        record = None if event is None else event.entry.record
        if event is not None:
            tell_of_copy(context, event)
        if self.aggregator is not None:
            usual = await asyncio.to_thread(excess.usual, copy.replica)
            self.aggregator.follow(chain, record, usual, partial(_own_norm, copy))
        if context.regions is None:
            return
        context.regions.tried(context.regions.own, stored=True)  # an entry of some process was
        if not self.ownership.keeps(chain.fragment, clock_s()):
            return
        copy.fence = chain.sequence
        try:
            await Keyframes(context, copy).keep()
        except (FenceError, StorageFullError, FormatError) as error:
            context.log.debug("keyframe_not_stored", fragment=chain.fragment, version=chain.version, reason=str(error))
