"""Read the offers of the fragments that a syncer owns: from every region, each by a collector of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from diloco.core.syncer.ownership import Ownership
from diloco_syncer.context import Context, clock_s
from diloco_syncer.offers.aggregator import RegionalAggregator
from diloco_syncer.offers.collector import Collector, Taker
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.regions import Regions


class Intake:
    """The collectors of all regions that can be reached; ``held`` is called with the fragment of each offer to be merged."""

    def __init__(self, context: Context, aggregator: RegionalAggregator | None, held: Callable[[int], None]) -> None:
        self.context, self.aggregator, self._on_held = context, aggregator, held
        home = Collector(context, context.transport, self._held)
        self.collectors = {context.region: home}  # by region

    async def reach(self, regions: Regions, reached: Callable[[], None]) -> None:
        """Add a collector of each other region as soon as the region can be reached, and call ``reached`` then."""

        async def reach(region: str) -> None:
            transport = (await regions.log(region)).transport
            self.collectors[region] = Collector(self.context, transport, self._held, region)
            reached()

        async with asyncio.TaskGroup() as group:
            for region in regions.names:
                if region != regions.own:
                    group.create_task(reach(region))

    async def read(self, owned: Mapping[int, FragmentOwner], ownership: Ownership, group: asyncio.TaskGroup) -> None:
        """Read the offers of the owned fragments, and from the own region those that are combined here."""
        now_s = clock_s()
        takers: dict[int, Taker] = {**owned}
        if self.aggregator is not None:
            others = set(range(len(self.context.map.fragments))) - owned.keys()
            self.aggregator.serve([index for index in sorted(others) if ownership.keeps(index, now_s)])
            takers |= self.aggregator.fragments
        # where no syncer lives, none combines: its learners' own offers are read
        inhabited = ownership.inhabited(now_s) if self.aggregator is not None else set()
        for region, collector in list(self.collectors.items()):
            if region == self.context.region:
                await collector.serve(takers, group)
            else:
                await collector.serve(owned, group, regional=region in inhabited)

    def read_again(self) -> None:
        """Have all offers read again from the beginning: some that were refused may be wanted by now."""
        for collector in self.collectors.values():
            collector.again()

    def replace(self, owner: FragmentOwner) -> None:
        """Give what comes next of a fragment to its new owner, which begins without the offers read so far."""
        for collector in self.collectors.values():
            collector.replace(owner)

    async def stop(self) -> None:
        """Read no more."""
        for collector in self.collectors.values():
            await collector.stop()

    def _held(self, fragment: int) -> None:
        self._on_held(fragment)
        if self.aggregator is not None:
            self.aggregator.news.set()
