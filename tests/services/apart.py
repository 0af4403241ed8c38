"""A run in three regions, each with a server of its own that is linked to no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import Cluster, Events, Folded, Service, fold_fragments, small
from tests.services.forking import Nursery
from tests.services.toy import Toy

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger, get_logger
from diloco.process.retry import until_available
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.wire.entries import Record
from diloco_ops.broker.server import Server
from diloco_ops.up.embedded import Embedded, server_name
from diloco_ops.wan.line import WanLine
from diloco_ops.wan.relay import Relay

REGIONS = ("ap", "eu", "us")


def apart(**overrides: Any) -> RunSettings:
    """Settings of a small run in three regions."""
    values: dict[str, Any] = {"shards": 3, "regions__names": list(REGIONS), "regions__away_s": scaled_s(3.0)}
    return small(**(values | overrides))


class Region(Cluster):
    """A cluster with a server a region, and a control store; service ``n`` is in region ``n % 3``, links lead to others.

    ``clocks``: by region, the seconds that its services' clocks are wrong by.
    """

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        name: str,
        settings: RunSettings,
        embedded: Embedded,
        relay: Relay,
        clocks: Mapping[str, float],
    ) -> None:
        super().__init__(nursery, directory, embedded.url, name, settings)
        self.embedded, self.relay, self.clocks = embedded, relay, dict(clocks)
        self.of_syncers: dict[str, Any] = {}  # further settings of theirs

    def save(self) -> None:
        """Write what a command wants to know of the run, as ``diloco up`` does."""
        urls = self.embedded.region_urls
        RunDirectory(
            self.directory, self.name, self.url, None, self.settings, nats_bulk_url=urls["us"], region_urls=urls
        ).save()

    def server(self, region: str) -> Server:
        return self.embedded.servers[server_name(region)]

    def lines(self, region: str) -> list[WanLine]:
        """All links from and to a region."""
        return [line for name, line in self.relay.lines.items() if region in name.split("-")]

    def place(self, number: int, *, reaches_others: bool = False) -> dict[str, Any]:
        """Settings of a service in a region."""
        values = self.embedded.place(number, reaches_others=reaches_others)
        region = values["region"]
        if region in self.clocks:
            clock_file = self.directory / f"{region}.clock"
            clock_file.write_text(str(self.clocks[region]))
            values["clock_file"] = str(clock_file)
        return values

    def coordinator(self) -> Service:
        return self.start(
            "coordinator", "diloco_coordinator", settings=self.settings.model_dump(), **self.place(2, reaches_others=True)
        )

    def syncer(self, index: int) -> Service:
        return self.start(f"syncer-{index}", "diloco_syncer", **self.place(index, reaches_others=True), **self.of_syncers)

    def toy(self, share: int, **behaviour: Any) -> Toy:
        settings = LearnerSettings(
            name=f"toy-{share}",
            run=self.name,
            state_dir=self.directory,
            share=share,
            checkpoint_s=0.0,
            **self.place(share),
        )
        toy = Toy(settings, cast(Logger, Events()), **{"before_step": self.gate} | behaviour)
        self.toys.append(toy)
        toy.start()
        return toy

    async def read(self, region: str, *, closed: bool = True) -> list[Folded]:
        """One region's log, folded by the reference."""
        link = await NatsTransport.open(self.url, self.server(region).url, "reader", get_logger(), DEADLINE_S)

        async def fold() -> list[Folded]:
            run = KnownRun(self.name, self.settings, await link.bucket(self.subjects.bucket, create=False))
            log = Log(link, self.name, run.identity, await creation.find_map(run), self.settings)
            return await fold_fragments(log, self.settings, closed_by_now=closed)

        try:
            return await until_available(fold, get_logger())
        finally:
            await link.close()


def demand_one_log(*read: list[Folded]) -> None:
    """What several regions hold does not differ; each may begin at another keyframe, and end before the others."""
    for fragments in zip(*read, strict=True):
        entries: dict[tuple[int, int, str], Record] = {}
        for log in fragments:
            for record in log.entries:
                assert entries.setdefault((record.epoch, record.version, record.entry), record) == record
