"""``diloco-syncer``: one syncer as a process. CPU only."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.errors import SettingsError
from diloco.nats.identity import Identity
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tape import TapeFile
from diloco.process.tasks import end
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.settings.service import SyncerSettings
from diloco_syncer.regions import Connect
from diloco_syncer.shard import Shard
from diloco_syncer.sweeper import Sweeper
from diloco_syncer.syncer_metrics import ObservedShard

LEAVE_S = 10.0  # to hand fragments over, when the process is asked to end: keyframes of large fragments take a while


async def serve(settings: SyncerSettings) -> None:
    """Find the run, and serve until it is over. Cancelled, hand the fragments over first, for at most ``LEAVE_S``."""
    log = observe.get_logger()
    async with Exporter(settings, "syncer", log) as exporter:
        await _serve(settings, exporter, log)


async def _serve(settings: SyncerSettings, exporter: Exporter, log: Logger) -> None:
    transport = exporter.transport = await service.connect(settings, "syncer", log)
    try:
        run = await service.find_run(transport, settings, log)
        connect = _ways(settings, run, transport.identity, exporter, log)
        tape = TapeFile.begin(settings, run.identity, transport.wall_s(), log)
        exporter.starting = "the first learner, which founds the run with its model"
        fragment_map = await until_available(partial(creation.find_map, run), log)
        shard = Shard(
            transport=transport,
            run=run,
            fragment_map=fragment_map,
            settings=settings,
            log=log,
            tape=tape,
            connect=connect,
            telemetry=exporter.telemetry,
        )
        exporter.observed = ObservedShard(shard, transport, exporter.labels())
        serving = asyncio.ensure_future(shard.serve())
        sweeping = asyncio.ensure_future(Sweeper(transport, run.name, fragment_map, log).work())
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            await shard.leave()
            if shard.begun:  # what it owns at this moment does not count: a fragment may be on its way
                await asyncio.wait([serving], timeout=LEAVE_S)
            raise
        finally:
            await end(serving, sweeping)
    finally:
        await transport.close()


def _ways(
    settings: SyncerSettings, run: KnownRun, identity: Identity | None, exporter: Exporter, log: Logger
) -> dict[str, Connect]:
    """Return how to reach the other regions, by name.

    Raises:
        SettingsError: one of the others' servers is not known, or of a region that the run does not have.
    """
    names = run.created.regions.names
    others = [name for name in names if name != settings.region]
    unknown = sorted(settings.region_urls.keys() - set(names))
    missing = [name for name in others if name not in settings.region_urls]
    if unknown or missing:
        raise SettingsError(
            f"region_urls: expected the servers of {', '.join(others) or 'no region'}; "
            f"{'missing: ' + ', '.join(missing) if missing else 'no such region: ' + ', '.join(unknown)}"
        )

    def way(region: str) -> Connect:
        url, name = settings.region_urls[region], f"{settings.name}-{region}"

        async def connect() -> NatsTransport:
            exporter.far[region] = opened = await NatsTransport.open_bulk(url, name, log.bind(other_region=region), identity)
            return opened

        return connect

    return {name: way(name) for name in others}


def _main() -> int:
    settings = service.parse_settings(SyncerSettings, "diloco-syncer")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-syncer"))


if __name__ == "__main__":
    main()
