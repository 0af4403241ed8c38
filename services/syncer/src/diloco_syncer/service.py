"""``diloco-syncer``: one shard of the syncer as a process. CPU only."""

from __future__ import annotations

import asyncio
import sys

from diloco import membership, observe, service
from diloco.settings import SyncerSettings
from diloco_syncer.shard import Shard


async def serve(settings: SyncerSettings) -> None:
    """Find the run, and serve the shard until the run is over or a signal comes."""
    log = observe.get_logger()
    link = await service.connect(settings, log)
    try:
        run = await membership.find(link, settings.run, log)
        await Shard(link, run, await membership.find_map(run), settings, log).serve()
    finally:
        await link.close()


def _main() -> int:
    settings = service.parse_settings(SyncerSettings, "diloco-syncer")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-syncer"))


if __name__ == "__main__":
    main()
