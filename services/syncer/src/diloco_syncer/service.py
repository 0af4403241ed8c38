"""``diloco-syncer``: one syncer as a process. CPU only."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from diloco import membership, observe, service
from diloco.patience import patiently
from diloco.settings import SyncerSettings
from diloco.tape import TapeFile
from diloco.tasks import end
from diloco_syncer.shard import Shard

LEAVE_S = 5.0


async def serve(settings: SyncerSettings) -> None:
    """Find the run, and serve until it is over. Cancelled, hand the fragments over first, for at most ``LEAVE_S``."""
    log = observe.get_logger()
    transport = await service.connect(settings, log)
    try:
        run = await membership.find(transport, settings.run, log)
        tape = TapeFile.begin(settings, run.identity, transport.wall_s(), log)
        shard = Shard(transport, run, await patiently(partial(membership.find_map, run), log), settings, log, tape)
        serving = asyncio.ensure_future(shard.serve())
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            await shard.leave()
            if shard.owned:
                await asyncio.wait([serving], timeout=LEAVE_S)
            raise
        finally:
            await end(serving)
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
