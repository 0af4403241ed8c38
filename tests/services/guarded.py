"""A run in regions under identities: servers that know each other as little as those who may use them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Folded, Service, fold_fragments
from tests.services.forking import Nursery
from tests.services.secured import make_keys, members

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.log.log import Log
from diloco.nats import identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.settings.run import RunSettings
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who

CONTROL = "nats"
REGIONS = ("eu", "us")


class Guarded(Cluster):
    """A cluster in regions, of which service ``n`` is in the ``n``-th, and so on from the first."""

    regions: Sequence[str] = REGIONS
    servers: Mapping[str, Server] = {}  # of the control store and of each region
    keys: Folder
    named_by_region = False  # syncers are called as in docs/deploy.md

    def place(self, number: int) -> dict[str, Any]:
        region = self.regions[number % len(self.regions)]
        return {"region": region, "nats_bulk_url": self.servers[region].url}

    def coordinator(self) -> Service:
        own = self.place(0)
        settings = self.settings.model_dump()
        return self.start("coordinator", "diloco_coordinator", settings=settings, region_urls=self.others(own), **own)

    def others(self, own: Mapping[str, Any]) -> dict[str, str]:
        """URLs of the other regions' servers; ``own``: the settings of a place."""
        return {region: self.servers[region].url for region in self.regions if region != own["region"]}

    def syncer(self, index: int) -> Service:
        own = self.place(index)
        name = f"syncer-{own['region']}-0" if self.named_by_region else f"syncer-{index}"
        return self.start(name, "diloco_syncer", region_urls=self.others(own), **own)

    def toy_process(self, share: int, **values: Any) -> Service:
        return super().toy_process(share, **self.place(share) | values)

    async def link(self) -> NatsTransport:
        """The test's own connection to the control store, and to the streams of the first region; it hears the heartbeats."""
        if self._link is None:
            self._link = await self.link_to(self.regions[0])
            await self._listen(self._link)
        return self._link

    async def link_to(self, region: str) -> NatsTransport:
        """A connection of the test's own to a region's streams, to be closed."""
        own = identity.load(self.keys.identity_file("test"))
        return await NatsTransport.open(self.url, self.servers[region].url, "test", get_logger(), DEADLINE_S, identity=own)

    async def log_of(self, link: NatsTransport) -> Log:
        """The log of the region that a connection leads to."""
        run = KnownRun(self.name, self.settings, await link.bucket(self.subjects.bucket, create=False))
        return Log(link, self.name, run.identity, await creation.find_map(run), self.settings)

    async def read(self, region: str, *, closed: bool = True) -> list[Folded]:
        """One region's log, folded by the reference."""
        link = await self.link_to(region)

        async def fold() -> list[Folded]:
            return await fold_fragments(await self.log_of(link), self.settings, closed_by_now=closed)

        try:
            return await until_available(fold, get_logger())
        finally:
            await link.close()


@contextlib.asynccontextmanager
async def guarded_regions(
    nursery: Nursery, path: Path, run: str, settings: RunSettings, regions: Sequence[str], more: Iterable[Who] = ()
) -> AsyncIterator[Guarded]:
    """A cluster of a run's members, and of ``more`` identities, at servers of its own."""
    keys = keys_of(path / "keys", run, settings, regions, more)
    async with in_regions(nursery, path, run, settings, regions, keys) as cluster:
        yield cluster


def keys_of(path: Path, run: str, settings: RunSettings, regions: Sequence[str], more: Iterable[Who] = ()) -> Folder:
    """The keys of a control store, of a server for each region, of a run's members and of ``more`` identities."""
    known = [*members(settings.learners, settings.shards, regions), *more]
    return make_keys(path, run, known, regions=regions, servers=places(regions))


def places(regions: Sequence[str]) -> dict[str, list[str]]:
    """The servers of a run in these regions, by name: what each serves."""
    return {CONTROL: ["control"], **{region: [region] for region in regions}}


@contextlib.asynccontextmanager
async def in_regions(
    nursery: Nursery,
    path: Path,
    run: str,
    settings: RunSettings,
    regions: Sequence[str],
    keys: Folder,
    ports: Mapping[str, int] | None = None,
    folder_of: Callable[[str], str] = str,
) -> AsyncIterator[Guarded]:
    """A cluster of a run's members in these regions, at servers whose files are in ``path``; ``keys`` as :func:`keys_of`.

    ``folder_of``: the name that the keys have for a server.
    """
    at = ports or {}
    servers = {name: Server(path / name, at.get(name), keys=keys.server_folder(folder_of(name))) for name in places(regions)}
    with contextlib.ExitStack() as started:
        for server in servers.values():
            server.start()
            started.callback(server.kill)
        async with at_servers(nursery, path / run, run, settings, regions, keys, servers) as cluster:
            yield cluster


@contextlib.asynccontextmanager
async def at_servers(
    nursery: Nursery,
    directory: Path,
    run: str,
    settings: RunSettings,
    regions: Sequence[str],
    keys: Folder,
    servers: Mapping[str, Server],
) -> AsyncIterator[Guarded]:
    """A cluster as :func:`in_regions`, at servers that are running."""
    cluster = Guarded(nursery, directory, servers[CONTROL].url, run, settings)
    cluster.regions, cluster.servers, cluster.keys = regions, servers, keys
    cluster.identity = str(keys.path / "identities" / "{name}.identity")
    try:
        yield cluster
    finally:
        await cluster.close()


def two_regions(
    nursery: Nursery, path: Path, run: str, settings: RunSettings, more: Iterable[Who] = ()
) -> AbstractAsyncContextManager[Guarded]:
    """A cluster as :func:`guarded_regions` in two regions."""
    return guarded_regions(nursery, path, run, settings, REGIONS, more)
