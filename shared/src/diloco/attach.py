"""``diloco attach``: a run's directory for a run whose services others have started, so that it can be looked at."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from diloco import membership, observe
from diloco.errors import BrokerError, RunError
from diloco.nats.transport import NatsTransport
from diloco.rundir import RunDirectory
from diloco.settings import RunSettings, parse
from diloco.wire.subjects import Subjects

ANSWER_TIMEOUT_S = 5.0


def attach(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where run.json is to be; it is made, or replaced.")],
    run: Annotated[str, typer.Option(envvar="DILOCO_RUN", help="The run's name.")] = "run",
    nats_url: Annotated[
        str, typer.Option("--nats", envvar="DILOCO_NATS_URL", help="Its NATS server; in a run with regions, its control store.")
    ] = "nats://127.0.0.1:4222",
    bulk_url: Annotated[
        str | None, typer.Option("--bulk", envvar="DILOCO_NATS_BULK_URL", help="In a run with regions: the server of one.")
    ] = None,
) -> None:
    """Make a run's directory for a run that is there: for status, verify, replay."""
    if (directory / "report.json").exists():
        raise RunError(f"{directory}: holds a finished run; choose another directory")
    settings = asyncio.run(_settings(run, nats_url, bulk_url))
    RunDirectory(directory, run, nats_url, None, settings, nats_bulk_url=bulk_url).save()
    print(f"run {run} at {nats_url}: diloco status {directory}")


async def _settings(run: str, nats_url: str, bulk_url: str | None) -> RunSettings:
    transport = await NatsTransport.open(nats_url, bulk_url or nats_url, "attach", observe.get_logger(), ANSWER_TIMEOUT_S)
    try:
        try:
            registry = await transport.bucket(Subjects(run).bucket, create=False)
            stored = await registry.get("run")
        except BrokerError as error:
            raise RunError(f"run {run!r}: not at {nats_url}: {error}") from None
        if stored is None:
            raise RunError(f"run {run!r}: {nats_url} does not have its settings: no coordinator has created it yet")
        settings = parse(RunSettings, membership.settings_of(run, stored[0]), f"run {run!r}")
    finally:
        await transport.close()
    if settings.regions.names and bulk_url is None:
        raise RunError(f"run {run!r} has the regions {', '.join(settings.regions.names)}: give the server of one with --bulk")
    return settings
