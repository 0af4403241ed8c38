"""How far each region's log of one fragment is, as its owner knows it, and which of them still are what they were.

A server may lose its disk: then the region's log is another stream, and what was found there before says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diloco.errors import AppendUncertainError, RewoundError
from diloco.log.stream import Packed
from diloco_syncer.regions import COMES_BACK_S, Regions


@dataclass
class RegionProgress:
    """How far one region's log is."""

    region: str
    fence: int = 0  # sequence of the last message among the heads there
    made: str = ""  # which stream it is that holds that
    since_s: float = 0.0  # when it was asked to store the last entry, or found to hold it
    at: bytes | None = None  # name of the entry after which it goes on; None: its log has to be looked at
    version: int = 0  # of that entry
    sequence: int = 0  # of that entry, there
    older: deque[Packed] = field(default_factory=deque)  # entries that come next, and have left the memory
    stored: int = -1  # number of the last entry of those in memory that it holds
    noticed: int = -1  # number of the last entry that it was told is committed
    copied: int = 0  # entries of earlier epochs that were stored behind the last claim there
    untold: int = 0  # entries that it holds behind the last one that it was told is committed; many: not known
    refused: bool = False  # behind the fence stands what has not been looked at
    level: bool = False  # it had everything since it was last away: the entries that it misses now have waited for its link


class Places:
    """The regions' logs of one fragment, in the order of their names."""

    def __init__(self, regions: Regions, fragment: int) -> None:
        self.regions, self.fragment = regions, fragment
        self.by_region = {region: RegionProgress(region) for region in regions.names}
        self.all = list(self.by_region.values())
        self.own = self.by_region[regions.own]

    async def demand_claimed(self, claimed: Iterable[str]) -> None:
        """Find out that regions which were claimed one after another are all claimed now.

        Raises:
            AppendUncertainError: one is away, or has lost its log, and with it the claim.
        """
        answers = await asyncio.gather(*(self.regions.same(region, self.by_region[region].made) for region in claimed))
        if not all(answers):
            raise AppendUncertainError(f"fragment {self.fragment}: a region that was claimed is away, or has lost its log")

    def demand_counted(self, place: RegionProgress) -> None:
        """Refuse an answer of a region whose connection was made again meanwhile: its log may be another one."""
        if not self.regions.counts(place.region):
            raise RewoundError(f"fragment {self.fragment}: region {place.region} was away, and may have lost its log")

    async def is_held(self, number: int) -> bool:
        """Whether a majority of regions holds an entry at the same time, the own one among them.

        A region that stored it a while ago may have lost its log since, and have been brought back without it.
        """
        now_s, holders = asyncio.get_running_loop().time(), self._holders(number)
        if now_s - min(place.since_s for place in holders) > COMES_BACK_S:
            answers = await asyncio.gather(*(self.regions.same(place.region, place.made) for place in holders))
            holders = [place for place, is_same in zip(holders, answers, strict=True) if is_same]
        for place in self.all:
            self.forget(place)
        return self._are_majority([place for place in holders if place.stored >= number])

    def may_hold(self, number: int) -> bool:
        """Whether a majority of regions, with the own one, said to hold an entry."""
        return self._are_majority(self._holders(number))

    def _holders(self, number: int) -> list[RegionProgress]:
        return [place for place in self.all if place.stored >= number]

    def _are_majority(self, holders: Sequence[RegionProgress]) -> bool:
        return len(holders) >= self.regions.majority and self.own in holders

    def forget(self, place: RegionProgress) -> bool:
        """Forget what a region holds if the connection to it was made again: its log may be another one. Return whether."""
        if self.regions.counts(place.region):
            return False
        place.at, place.refused, place.stored, place.noticed = None, False, -1, -1
        return True
