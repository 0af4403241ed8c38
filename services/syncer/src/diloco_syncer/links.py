"""Watch the links to the other regions: whether versions can be committed over them, and for how many bytes they have room."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from diloco.core.syncer.bandwidth import Bandwidth, LevelChange, WayState
from diloco.core.syncer.ownership import Ownership
from diloco.process.observe import Logger
from diloco.settings.run import RunSettings
from diloco_syncer.context import Context, clock_s
from diloco_syncer.offers.collector import Collector
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.regions import Regions
from diloco_syncer.replication import Replication

LOOK_S = 1.0  # from one look at the links to the next; the rule of core.bandwidth is made for about that


def replications(owned: Mapping[int, FragmentOwner]) -> list[Replication]:
    """Return those of the owned fragments; empty in a run without regions."""
    return [owner.replication for owner in owned.values() if owner.replication is not None]


class LinkWatch:
    """One syncer's links. ``bandwidth`` has precision and pace of its rounds: the settings' own where nothing adapts."""

    def __init__(
        self,
        context: Context,
        owned: Mapping[int, FragmentOwner],
        collectors: Mapping[str, Collector],
        ownership: Ownership,
        changed: Callable[[], None],
    ) -> None:
        """Call ``changed`` when versions can no longer be committed from here, or can again."""
        self.context, self.owned, self.collectors = context, owned, collectors
        self.ownership, self.changed = ownership, changed
        self.unable = False  # nothing can be committed from here
        self._begin(context.run.created)

    def _begin(self, settings: RunSettings) -> None:
        created = self.context.run.created
        others = [name for name in created.regions.names if name != self.context.region] if created.adapts else []
        self.bandwidth = Bandwidth(settings, others)

    def change(self, before: RunSettings) -> None:
        """Go by the settings in force. If rounds or regions have others than ``before``, all is found out again."""
        settings = self.context.run.in_force
        if (settings.round, settings.regions) != (before.round, before.regions):
            self._begin(settings)

    def look_around(self) -> None:
        """Find out whether anything can be committed from here, and say when that changes."""
        regions = self.context.regions
        if regions is None:
            return
        now_s, before = clock_s(), self.unable
        self.ownership.reach(regions.commits, now_s)
        self.unable = self.ownership.unable(now_s)
        if self.unable and not before:
            reason = (
                "no majority of regions can be reached"
                if regions.stores
                else "the server of this syncer's region stores nothing"
            )
            self.context.log.warning("commits_nothing", reason=reason)
        elif before and not self.unable:
            self.context.log.info("commits_again")
        if before != self.unable:
            self.changed()

    async def fit(self, regions: Regions) -> None:
        """Have precision and pace follow the room that the links have, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(regions, clock_s())

    def look(self, regions: Regions, now_s: float) -> None:
        """Look at all links once."""
        roster = self.context.roster
        live = {seen.heartbeat.learner for seen in roster.live(now_s)}
        if not live or not self.owned:
            return
        seen: dict[str, tuple[WayState, WayState]] = {}
        for region, collector in self.collectors.items():
            if region == regions.own:
                continue
            if collector.transport.connected:
                seen[region] = self.see(regions, region, live, now_s)
                continue
            regions.appends[region].broken(now_s)
            for replication in replications(self.owned):
                replication.away(region)
        cycle_s = self.context.run.in_force.round.steps * roster.step_s(now_s)
        for change in self.bandwidth.look(now_s, cycle_s, seen):
            _tell(self.context.log, change)

    def see(self, regions: Regions, region: str, live: set[str], now_s: float) -> tuple[WayState, WayState]:
        """Return the ways of the offers of ``live`` learners, and of the entries, between here and another region."""
        collector = self.collectors[region]
        values = sum(owner.fragment.size for owner in self.owned.values())
        age_s = max((replication.waits_s(region, now_s) for replication in replications(self.owned)), default=0.0)
        crossing = len(collector.learners & live)
        if collector.regional:
            crossing = min(1, crossing)
        # a learner's newer offer replaces its older one: the queue does not grow, and its age says little
        offers = WayState(collector.transport.incoming, crossing * values, 0.0)
        return offers, WayState(regions.appends[region].moved, values, age_s)


def _tell(log: Logger, change: LevelChange) -> None:
    log.info(
        "bandwidth_changed",
        other_region=change.region,
        way=change.way,
        bits=change.level.bits,
        pace=change.level.pace,
        reason=change.reason,
        load=round(change.load, 3),
        bytes_per_s=round(change.bytes_per_s) if math.isfinite(change.bytes_per_s) else None,
        queue_age_s=round(change.age_s, 3),
    )
