"""The log of a run as its founder writes it, of a model that a test has, with the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pace import DEADLINE_S

from diloco.control import creation, genesis
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco_ops.broker.server import Server


async def found_run(server: Server, path: Path, settings: RunSettings, data: str, island: Any) -> None:
    """Write the log of a run whose version 0 is the model of an ``island``, of JAX or PyTorch, and the run's directory."""
    directory = RunDirectory(path, "run", server.url, data, settings)
    directory.save()
    link = await NatsTransport.open(server.url, server.url, "test", get_logger(), DEADLINE_S)
    run = await creation.create(link, directory.name, settings)
    fragments = island.fragments()
    await run.registry.create("map", fragments.pack())
    log = Log(link, run.name, run.identity, fragments, run.created)
    hashes = [await log.writer.append_first(one.index, island.read(one).to_host()) for one in fragments.fragments]
    await log.writer.conclude("test", run.created.digest(), hashes, genesis.decision(run))
    await link.close()
