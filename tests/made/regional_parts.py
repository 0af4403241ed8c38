"""A run in three regions on real servers, and the contexts of syncers in them: for tests of how their logs come together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from tests.made.fixtures import MakeServer
from tests.made.fragment_vectors import each
from tests.made.syncer_parts import SETTINGS, SIZE, merge, offer
from tests.pace import DEADLINE_S

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.control.genesis import decision
from diloco.core.syncer.roster import Roster
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Counted, get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import SyncerSettings
from diloco.wire.entries import Claim, CommitNotice, Genesis
from diloco_ops.broker.server import Server
from diloco_syncer.context import Context
from diloco_syncer.offers.refusing import RefusalReporter
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.owning.takeover import Takeover
from diloco_syncer.regions import Regions

NAMES = ("ap", "eu", "us")


class Member:
    """One region's syncer, as far as it owns fragments."""

    def __init__(self, context: Context, regions: Regions, genesis: tuple[Genesis, bytes]) -> None:
        self.context, self.regions = context, regions
        self.copies = Copies(context.store, genesis, lambda *_: None, context.log)

    async def take(self, group: asyncio.TaskGroup, index: int = 0) -> FragmentOwner:
        """Take a fragment over."""
        owner = await Takeover(self.context, self.copies, lambda _: True).take(index, group)
        assert owner is not None
        return owner


class Apart:
    """The servers, and the run. ``us`` is where it was founded, and has the control store."""

    def __init__(self, make_server: MakeServer, **overrides: Any) -> None:
        self.servers: dict[str, Server] = {region: make_server() for region in NAMES}
        changes = {"regions.names": list(NAMES), "shards": 2} | overrides
        self.settings: RunSettings = run_settings("decoupled", SETTINGS | changes)
        self.map: FragmentMap = build_map([TensorSpec(f"w{i}", (SIZE,)) for i in range(2)], 2)
        self.run: KnownRun
        self.genesis: tuple[Genesis, bytes]
        self._stack = contextlib.AsyncExitStack()

    async def begin(self) -> None:
        """Found the run in ``us``."""
        link = await self.open("us")
        self.run = await creation.create(link, "run", self.settings)
        log = self.log(link)
        vectors = each([np.zeros(SIZE, np.float32)] * 2)
        await log.writer.found("ann", self.settings.digest(), vectors, decision(self.run))
        genesis = await log.reader.genesis()
        assert genesis is not None
        self.genesis = genesis

    async def open(self, region: str) -> NatsTransport:
        """Connect to a region's server."""
        us, url = self.servers["us"].url, self.servers[region].url
        opened = await NatsTransport.open(us, url, f"member-{region}", get_logger(), give_up_after_s=DEADLINE_S)
        self._stack.push_async_callback(opened.close)
        return opened

    def log(self, link: NatsTransport) -> Log:
        return Log(link, "run", self.run.identity, self.map, self.settings)

    async def close(self) -> None:
        await self._stack.aclose()

    async def member(self, region: str, group: asyncio.TaskGroup, unreached: Collection[str] = ()) -> Member:
        """Begin a region's syncer, which never gets to the regions that are ``unreached``."""
        link = await self.open(region)
        run = await creation.open_run(link, "run", self.settings)
        store, logger = self.log(link), get_logger()

        async def connect(other: str) -> NatsTransport:
            if other in unreached:
                await asyncio.Event().wait()
            return await self.open(other)

        others = {name: partial(connect, name) for name in NAMES if name != region}
        regions = Regions(region, store, run, self.map, others, f"syncer-{region}")
        own = SyncerSettings(name=f"syncer-{region}", run="run", region=region)
        roster, refused, refusals = Roster(self.settings), Counted(logger), RefusalReporter(run, logger)
        context = Context(link, run, self.map, own, logger, store, regions, roster, refused, refusals)
        await creation.make_streams(link, "run", self.settings)
        regions.begin(group)
        await regions.bring_genesis(logger)
        return Member(context, regions, self.genesis)


@contextlib.asynccontextmanager
async def begun_apart(make_server: MakeServer, **overrides: Any) -> AsyncIterator[Apart]:
    """Give a run that was founded in ``us``, which no syncer serves yet."""
    apart = Apart(make_server, **overrides)
    try:
        await apart.begin()
        yield apart
    finally:
        await apart.close()


async def make_versions(owner: FragmentOwner, count: int) -> None:
    """Have an owner merge that many offers of one learner, each into a version."""
    for _ in range(count):
        number = owner.chain.version + 1
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, number)), 32)


async def entries_between_notices(log: Log, fragment: int) -> Sequence[int]:
    """Return how many entries stand between one notice of a fragment and the next."""
    counts, names = [0], log.subjects
    stop = await log.reader.end_sequence(fragment)
    async for stored in log.stream.pull([names.heads_and_notices(fragment)], 1, stop):
        message = log.stream.decode(stored)
        if isinstance(message, CommitNotice):
            counts.append(0)
        elif not isinstance(message, Claim):
            counts[-1] += 1
    return counts
