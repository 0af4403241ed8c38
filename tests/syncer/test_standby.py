"""Fragments of others are followed on a real log; in a run with regions, one syncer of each region stores their keyframes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from tests.made.syncer_parts import Begun, begin, merge, offer
from tests.pace import DEADLINE_S

from diloco.core.log.chain import Chain
from diloco.core.syncer.ownership import Ownership
from diloco.nats.transport import NatsTransport
from diloco.wire.entries import Record
from diloco_syncer.offers.aggregator import RegionalAggregator
from diloco_syncer.owning.standby import Standby
from diloco_syncer.regions import Regions

pytestmark = pytest.mark.services


@dataclass
class Home:
    """The regions as one of them has them; notes where entries were stored."""

    own: str = "us"
    stored: list[str] = field(default_factory=list)

    def tried(self, region: str, *, stored: bool) -> None:
        self.stored += [region] * stored


@dataclass
class Keeps:
    """Whether it is this syncer that stores keyframes in its region."""

    here: bool

    def keeps(self, fragment: int, now_s: float) -> bool:
        return self.here


@dataclass
class Combines:
    """An aggregator that notes the entries it is told of."""

    heard: asyncio.Queue[tuple[int, int]] = field(default_factory=asyncio.Queue)

    def follow(self, chain: Chain, record: Record | None, usual: float, own_norm: Callable[[], float]) -> None:
        self.heard.put_nowait((chain.fragment, chain.version))


@asynccontextmanager
async def following(begun: Begun, home: Home | None, *, keeps: bool) -> AsyncIterator[Combines]:
    """Follow both fragments, and wait until they are loaded."""
    context, combines = replace(begun.context, regions=cast(Regions | None, home)), Combines()
    ownership, aggregator = cast(Ownership, Keeps(keeps)), cast(RegionalAggregator, combines)
    standby = Standby(context, begun.copies, ownership, aggregator, lambda: None)
    assert not standby.follows
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        standby.follow([0, 1], group)
        assert [await combines.heard.get() for _ in range(2)] == [(0, 0), (1, 0)]
        yield combines
        await standby.stop()


@pytest.mark.parametrize("keeps", [True, False])
async def test_in_a_run_with_regions_one_syncer_of_each_stores_keyframes(link: NatsTransport, keeps: bool) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 1e-3})
    reader, home = begun.context.store.reader, Home()
    owner = await begun.taken_over(context=begun.another("syncer-1"))
    async with following(begun, home, keeps=keeps) as combines:
        owner.keyframes.copy = replace(owner.copy, log_bytes=0)  # the owner, in another region, stores none here
        await owner.commit(merge(owner, offer(owner, "ann", 1.0)), 32)
        assert await combines.heard.get() == (0, 1)
        while keeps and len(await reader.keyframe_sequences(0)) < 2:
            await asyncio.sleep(0.01)
        await owner.commit(merge(owner, offer(owner, "ann", 2.0, 2)), 32)
        assert await combines.heard.get() == (0, 2)  # the first entry is done with
    assert (len(await reader.keyframe_sequences(0)) > 1) == keeps
    assert set(home.stored) == {"us"}


async def test_in_a_run_without_regions_it_stores_none(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 1e-3})
    owner = await begun.taken_over(context=begun.another("syncer-1"))
    async with following(begun, None, keeps=True) as combines:
        await owner.append(owner.marker("close"), b"", [])
        assert await combines.heard.get() == (0, 0)
    assert len(await begun.context.store.reader.keyframe_sequences(0)) == 1
