"""A syncer as a process of :mod:`diloco.testing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.control import creation
from diloco.process.observe import get_logger
from diloco.settings.service import SyncerSettings
from diloco_syncer.shard import Shard

if TYPE_CHECKING:
    from diloco.testing.world import VirtualProcess


async def serve(process: VirtualProcess, run_name: str) -> None:
    """Wait for the run and its fragment map, and serve it to its end."""
    log = get_logger()
    run = await creation.find(process.transport, run_name, log)
    settings = SyncerSettings(name=process.name, run=run_name)
    await Shard(process.transport, run, await creation.find_map(run), settings, log).serve()
