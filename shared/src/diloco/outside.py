"""A run from outside: its log, read through its own server, or through a server of one's own over a copy of its files."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from diloco import membership, observe, rundir
from diloco.core.changes import in_force
from diloco.core.fragments import FragmentMap, unpack_map
from diloco.embedded import CONTROL, server_name
from diloco.errors import BrokerError, RunError
from diloco.identity import of_command
from diloco.log import Log
from diloco.membership import Run
from diloco.nats.server import Server
from diloco.nats.transport import NatsTransport
from diloco.rundir import RunDirectory
from diloco.wire.messages import Genesis
from diloco.wire.subjects import Subjects

ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Outside:
    """A run that is being looked at."""

    directory: RunDirectory
    transport: NatsTransport
    run: Run
    map: FragmentMap
    log: Log
    genesis: Genesis
    genesis_check: bytes
    live: bool  # read from the run's own server


async def connect(directory: RunDirectory, name: str, give_up_after_s: float) -> NatsTransport:
    """Connect to a run's servers as a command of this ``name``.

    Raises:
        SettingsError: the identity that the directory names cannot be used.
        BrokerError: a server does not answer in time, or turns us away.
    """
    identity = None if directory.identity is None else of_command(Path(directory.identity), directory.name)
    url, bulk_url = directory.nats_url, directory.nats_bulk_url or directory.nats_url
    return await NatsTransport.open(url, bulk_url, name, observe.get_logger(), give_up_after_s, identity)


@dataclass(frozen=True)
class Reached:
    """A run on its own server."""

    directory: RunDirectory
    transport: NatsTransport
    run: Run


@asynccontextmanager
async def reached(path: Path) -> AsyncIterator[Reached]:
    """The run of a directory on its own server, to be asked or changed. ``run.now`` is what is in force.

    Raises:
        RunError: there is no run, it was not started yet, or is finished.
        BrokerError: its server does not answer.
    """
    directory = rundir.load(path)
    if directory.finished:
        raise RunError(f"{path}: run {directory.name!r} is finished; its report is {directory.report}")
    if not directory.nats_url:
        raise RunError(f"{path}: run {directory.name!r} has not been started yet")
    transport = await _live(directory)
    if transport is None:
        raise BrokerError(
            f"{path}: the server of run {directory.name!r}, {directory.nats_url}, does not answer; start it again"
        )
    try:
        yield Reached(directory, transport, await _run(transport, directory))
    finally:
        await transport.close()


async def _run(transport: NatsTransport, directory: RunDirectory) -> Run:
    """Raises FormatError, ChainError, SettingsError where the run's changes make no sense."""
    registry = await transport.bucket(Subjects(directory.name).bucket, create=False)
    run = Run(directory.name, directory.settings, registry)
    run.now = in_force(run.settings, (await membership.changes(run))[0].records)
    return run


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Outside]:
    """Open a run's directory for reading. Nothing in it, or on its server, is changed.

    Where the run's own server does not answer, one is started over a copy of its files, made in the folder for temporary
    files: they may belong to a server that is frozen.

    Raises:
        RunError: there is no run, or it has not begun yet.
        BrokerError: its server does not answer, and its files are not here.
    """
    directory = rundir.load(path)
    async with _transport(directory) as (transport, live):
        registry = await transport.bucket(Subjects(directory.name).bucket, create=False)
        run = Run(directory.name, directory.settings, registry)
        stored_map = await registry.get("map")
        if stored_map is None:
            raise RunError(f"{path}: run {run.name!r} has no fragment map yet: none of its learners has joined")
        fragment_map = unpack_map(stored_map[0])
        log = Log(transport, run.name, run.identity, fragment_map, run.settings)
        genesis = await log.genesis()
        if genesis is None:
            raise RunError(f"{path}: run {run.name!r} has no genesis record yet: none of its learners has founded it")
        yield Outside(directory, transport, run, fragment_map, log, *genesis, live)


@asynccontextmanager
async def _transport(directory: RunDirectory) -> AsyncIterator[tuple[NatsTransport, bool]]:
    transport = await _live(directory)
    if transport is not None:
        try:
            yield transport, True
        finally:
            await transport.close()
        return
    names = [CONTROL, *map(server_name, directory.settings.regions.names[:1])]
    if not all((directory.path / name / "jetstream").is_dir() for name in names):
        raise BrokerError(f"{directory.path}: no server at {directory.nats_url or '(none yet)'} has this run; start it again")
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder, contextlib.ExitStack() as started:
        servers = []
        for name in names:
            shutil.copytree(directory.path / name, Path(folder) / name)
            servers.append(Server(Path(folder) / name))
            servers[-1].start()
            started.callback(servers[-1].stop)
        copied = replace(directory, nats_url=servers[0].url, nats_bulk_url=servers[-1].url, identity=None)
        transport = await connect(copied, "outside", ANSWER_TIMEOUT_S)
        try:
            await _check_settings(transport, directory)
            yield transport, False
        finally:
            await transport.close()


async def _live(directory: RunDirectory) -> NatsTransport | None:
    """The run's own server, if it answers and holds this run: another run's may listen at the same address by now."""
    if not await _anybody_listens(directory.nats_url):
        return None
    try:
        transport = await connect(directory, "outside", ANSWER_TIMEOUT_S)
    except BrokerError:
        return None
    try:
        await _check_settings(transport, directory)
    except (BrokerError, RunError):
        await transport.close()
        if (directory.path / CONTROL).is_dir():
            return None
        raise
    return transport


async def _anybody_listens(urls: str) -> bool:
    for url in filter(None, urls.split(",")):
        address = urlsplit(url)
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, address.port), ANSWER_TIMEOUT_S)
            writer.close()
            return True
    return False


async def _check_settings(transport: NatsTransport, directory: RunDirectory) -> None:
    registry = await transport.bucket(Subjects(directory.name).bucket, create=False)
    stored = await registry.get("run")
    if stored is None:
        raise RunError(f"{directory.path}: its server has no settings of run {directory.name!r}")
    theirs = membership.settings_of(directory.name, stored[0])
    difference = membership.first_difference(directory.settings.model_dump(), theirs)
    if difference:
        raise RunError(f"{directory.path}: its run.json differs from the settings on its server: {difference}")
