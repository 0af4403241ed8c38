"""``diloco-syncer``: one syncer as a process. CPU only."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from diloco.control import creation
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tape import TapeFile
from diloco.process.tasks import end
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.service.other_regions import ways_to_others
from diloco.settings.service import SyncerSettings
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
        names = run.created.regions.names
        connect = ways_to_others(settings, names, transport.identity, exporter, log, needs_all=True)
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


def _main() -> int:
    settings = service.parse_settings(SyncerSettings, "diloco-syncer")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-syncer"))


if __name__ == "__main__":
    main()
