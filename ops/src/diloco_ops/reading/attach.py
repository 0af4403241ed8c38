"""``diloco attach``: a run's directory for a run whose services others have started, so that it can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco.control import creation
from diloco.errors import BrokerError, RunError
from diloco.nats.opening import checked, shown
from diloco.nats.transport import NatsTransport
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.wire.subjects import Subjects
from diloco_ops.reading import region_logs, run_reader


def attach(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for run.json, which is created or replaced.")],
    run: Annotated[str, typer.Option(envvar="DILOCO_RUN", help="The run's name.")] = "run",
    nats_url: Annotated[
        str,
        typer.Option(
            "--nats", envvar="DILOCO_NATS_URL", help="The run's NATS server; in a run with regions, its control store."
        ),
    ] = "nats://127.0.0.1:4222",
    bulk: Annotated[
        list[str] | None,
        typer.Option(
            "--bulk",
            metavar="[REGION=]URL",
            envvar="DILOCO_NATS_BULK_URL",
            help="With regions: one region's server, or each region's as REGION=URL (repeatable). Checkpoints need all.",
        ),
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(envvar="DILOCO_IDENTITY", help="File that `diloco keys` made: an operator's or observer's.")
    ] = None,
) -> None:
    """Make a directory for an existing run, for commands such as status, verify and replay."""
    if (directory / "report.json").exists():
        raise RunError(f"{directory}: holds a finished run; choose another directory")
    file = None if identity is None else str(identity.resolve())
    asyncio.run(attached(directory, run, nats_url, bulk or (), file))
    print(f"run {run} at {nats_url}: diloco status {directory}")


async def attached(directory: Path, run: str, nats_url: str, bulk: Sequence[str] = (), identity: str | None = None) -> None:
    """Write ``run.json`` of a run that is at a server. ``bulk``: one region's server, or each region's as ``REGION=URL``.

    Raises:
        SettingsError: regions' servers are given, but not one for each.
        RunError: the server does not have it; or it has regions, and the server of none is given.
        BrokerError: the server does not answer.
    """
    named = len(bulk) > 1 or any("=" in each for each in bulk)
    first_url = bulk[0].rpartition("=")[2] if bulk else None
    seen = RunDirectory(directory, run, nats_url, None, RunSettings(), nats_bulk_url=first_url, identity=identity)
    transport = await run_reader.connect(seen, "attach", run_reader.ANSWER_TIMEOUT_S)
    try:
        settings = await stored_settings(transport, seen)
    finally:
        await transport.close()
    if settings.regions.names and not bulk:
        raise RunError(f"run {run!r} has the regions {', '.join(settings.regions.names)}: give the server of one with --bulk")
    urls = region_logs.urls_of(bulk, settings.regions.names) if named else None
    replace(seen, settings=settings, region_urls=urls).save()


async def stored_settings(transport: NatsTransport, seen: RunDirectory) -> RunSettings:
    """Return the settings of a run, as its server has them.

    Raises:
        RunError: the server does not have the run.
        SettingsError: they are no settings of this version.
    """
    run = seen.name
    try:
        settings = await creation.stored_settings(await transport.bucket(Subjects(run).bucket, create=False), run)
    except BrokerError as error:
        raise RunError(f"run {run!r}: not at {shown(checked(seen.nats_url))}: {error}") from None
    if settings is None:
        raise RunError(
            f"run {run!r}: {shown(checked(seen.nats_url))} does not have its settings: no coordinator has created it yet"
        )
    return settings
