"""Reading a run from its directory: through its own server, or through another one over a copy of its files."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from diloco.control import creation
from diloco.control.changes import read_changes
from diloco.control.creation import KnownRun
from diloco.control.quarantines import read_outliers
from diloco.core.log.chain import Chain
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError, DilocoError, RunError
from diloco.log.log import Log
from diloco.log.reader import LoadedState
from diloco.log.stream import EntryHead, pass_over
from diloco.nats.identity import of_command
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings import folders
from diloco.wire.entries import Genesis
from diloco.wire.subjects import Subjects
from diloco_ops.audit.lineage import newest_line
from diloco_ops.broker.server import Server
from diloco_ops.reading import local_runs, region_logs
from diloco_ops.reading.local_runs import standing_of
from diloco_ops.up.embedded import CONTROL, server_name

ANSWER_TIMEOUT_S = 5.0  # a person waits at a terminal; a server across the world answers within a second


@dataclass(frozen=True)
class RunReader:
    """A run that is being read; nothing in it is changed."""

    directory: RunDirectory
    transport: NatsTransport
    run: KnownRun
    map: FragmentMap
    log: Log
    genesis: Genesis
    genesis_check: bytes
    live: bool  # read from the run's own server
    regions: Mapping[str, Log]  # the log of each region that is reached; none in a run without regions
    transports: Mapping[str, NatsTransport]  # to the servers that have these logs, by region; or the only one, of no name

    async def state(self) -> str:
        """Return "over", "going on" or "stopped".

        The log shows that a run is over when its report is on another machine.
        """
        if self.directory.finished or await self.log.reader.closed():
            return "over"
        return "going on" if self.live else "stopped"

    async def load_first(self, fragment: int) -> LoadedState:
        """Load version 0, as :meth:`diloco.log.reader.Reader.load_first` does and raises."""
        return await self.log.reader.load_first(fragment, self.genesis, self.genesis_check)


async def connect(directory: RunDirectory, name: str, give_up_after_s: float, log: Logger | None = None) -> NatsTransport:
    """Connect to a run's servers as a command of this ``name``; ``log`` hears of lost connections, by default the process's.

    Raises:
        RunError: the run was stopped, and its server with it; with the command that goes on with it.
        SettingsError: the identity that the directory names cannot be used.
        BrokerError: a server does not answer in time, or turns us away.
    """
    if (stopped := await stopped_text(directory)) is not None:
        raise RunError(stopped)
    identity = None if directory.identity is None else of_command(Path(directory.identity), directory.name)
    url, bulk_url = directory.nats_url, directory.nats_bulk_url or directory.nats_url
    return await NatsTransport.open(url, bulk_url, name, log or observe.get_logger(), give_up_after_s, identity)


async def stopped_text(directory: RunDirectory) -> str | None:
    """Return how far a stopped run came and how it goes on; None: it is not stopped, or its server answers all the same."""
    if standing_of(directory) != "stopped" or await _is_listened_at(directory.nats_url):
        return None
    return local_runs.stopped_text(directory)


@dataclass(frozen=True)
class LiveRun:
    """A run on its own server, to be asked or changed; ``run.now`` is up to date."""

    directory: RunDirectory
    transport: NatsTransport
    run: KnownRun


@asynccontextmanager
async def reached(path: Path) -> AsyncIterator[LiveRun]:
    """Reach the run of a directory on its own server.

    Raises:
        RunError: there is no run, it was not started yet, or is stopped or finished.
        BrokerError: its server does not answer.
        FormatError, ChainError, SettingsError: the run's changes make no sense.
    """
    directory = rundir.load(path)
    if directory.finished:
        raise RunError(f"{path}: run {directory.name!r} is finished; its report is {directory.report}")
    if not directory.nats_url:
        raise RunError(f"{path}: run {directory.name!r} has not been started yet")
    transports = list((await _live(directory)).values())
    if not transports:
        if standing_of(directory) == "stopped":
            raise RunError(local_runs.stopped_text(directory))
        raise BrokerError(
            f"{path}: the server of run {directory.name!r}, {directory.nats_url}, does not answer; start it again"
        )
    try:
        run = await creation.open_run(transports[0], directory.name, directory.settings)
        run.adopt((await read_changes(run)).records)
        await read_outliers(run)
        yield LiveRun(directory, transports[0], run)
    finally:
        for transport in transports:
            await transport.close()


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[RunReader]:
    """Open a run's directory for reading. Nothing in it, or on its server, is changed.

    Where the run's own server does not answer, one is started over a copy of its files, made in the folder for temporary
    files: they may belong to a server that is frozen. In a run with regions the log is read where most is known to be
    committed; of copies, which are not written to, a majority is needed, and what they hold together is read.

    Raises:
        RunError: there is no run, it has not begun yet, or its files are those of too few regions.
        BrokerError: its server does not answer, and its files are not here.
    """
    directory = rundir.load(path)
    async with _transports(directory) as (transports, live):
        run = await creation.open_run(next(iter(transports.values())), directory.name, directory.settings)
        stored_map = await run.registry.get("map")
        if stored_map is None:
            raise RunError(f"{path}: run {run.name!r} has no fragment map yet: none of its learners has joined")
        fragment_map = await creation.find_map(run)
        logs = {
            region: Log(transport, run.name, run.identity, fragment_map, run.created)
            for region, transport in transports.items()
        }
        if run.regions:
            home, logs, genesis = await _in_regions(path, run, logs, live=live)
        else:
            [(home, log)] = logs.items()
            genesis = await log.reader.genesis()
        if genesis is None:
            raise RunError(f"{path}: run {run.name!r} has no genesis record yet: none of its learners has founded it")
        regions = logs if run.regions else {}
        reached_ones = {region: transports[region] for region in logs}
        record, check = genesis
        yield RunReader(
            directory=directory,
            transport=transports[home],
            run=run,
            map=fragment_map,
            log=logs[home],
            genesis=record,
            genesis_check=check,
            live=live,
            regions=regions,
            transports=reached_ones,
        )


async def _in_regions(
    path: Path, run: KnownRun, logs: dict[str, Log], *, live: bool
) -> tuple[str, dict[str, Log], tuple[Genesis, bytes] | None]:
    """Return the region whose log is to be read, the logs of all that hold the run, and its genesis; None: it has none yet.

    Raises:
        RunError: too few regions hold the run to know what is committed.
    """
    found = await region_logs.begun(logs)
    if not found.logs and await run.registry.get("genesis") is None:
        return next(iter(logs)), logs, None
    if not live or not found.logs:
        found.demand_majority(path, run.created.regions.names)
    assert found.genesis is not None
    home = await region_logs.furthest(found.logs)
    if not live:
        await region_logs.settle(found.logs, home, found.genesis[1])
    return home, found.logs, found.genesis


async def read_chains(log: Log) -> list[Chain]:
    """Read every fragment's checked head, from the log alone; nothing before genesis.

    No entry is folded, so a wrong one counts until another owner has taken the fragment over.

    Raises:
        RunError: the log misses a keyframe.
    """
    genesis = await log.reader.genesis()
    if genesis is None:
        return []
    return [await _read_chain(log, fragment.index, *genesis) for fragment in log.map.fragments]


async def read_end(path: Path) -> list[Chain] | None:
    """Read every fragment's closed head of a finished run from its own server.

    None: the run is not over, or its server does not answer, or cannot be read.
    """
    try:
        reachable = await _live(rundir.load(path))
        for transport in reachable.values():
            await transport.close()
        if not reachable:
            return None
        async with opened(path) as seen:
            chains = await read_chains(seen.log)
    except (DilocoError, OSError):
        return None
    return chains if chains and all(chain.closed for chain in chains) else None


async def _read_chain(log: Log, fragment: int, genesis: Genesis, genesis_check: bytes) -> Chain:
    first: Chain | None = None
    before: int | None = None
    while True:
        chain = (await log.reader.load(fragment, genesis, genesis_check, before)).replica.chain
        if first is not None and chain.sequence >= (before or 0):
            return first  # there is no older keyframe
        begins, stop = chain.sequence, await log.reader.end_sequence(fragment)
        heads = list[EntryHead]()
        if stop > begins:
            heads = [head async for head in log.entries.heads(pass_over, begins + 1, stop, fragment=fragment)]
        chain, _ = newest_line(chain, heads)
        # a takeover that does not follow: its writer knows that the keyframe stands after a wrong entry
        if not any(chain.contradicted_by(head.record) for head in heads):
            return chain
        first, before = first or chain, begins
        if not begins:
            return first


@asynccontextmanager
async def _transports(directory: RunDirectory) -> AsyncIterator[tuple[dict[str, NatsTransport], bool]]:
    """Connect to the run's servers, or to others over copies of their files; one connection for each region's log."""
    async with contextlib.AsyncExitStack() as stack:
        live = await _live(directory)
        for transport in live.values():
            stack.push_async_callback(transport.close)
        if live:
            yield live, True
            return
        regions = directory.settings.regions.names
        names = {CONTROL, *map(server_name, regions)}
        here = {name for name in names if (directory.path / name / "jetstream").is_dir()}
        if CONTROL not in here or (regions and len(here) == 1):
            missing = ", ".join(str(directory.path / name) for name in sorted(names - here))
            raise BrokerError(
                f"{directory.path}: no server at {directory.nats_url or '(none yet)'} has this run, and its files are not "
                f"in {missing}; restart the server, or restore its folder"
            )
        folder = Path(stack.enter_context(folders.temporary()))
        servers: dict[str, Server] = {}
        for name in sorted(here):
            shutil.copytree(directory.path / name, folder / name)
            servers[name] = Server(folder / name)
            servers[name].start()
            stack.callback(servers[name].stop)
        copies = {region: servers[server_name(region)] for region in regions if server_name(region) in here}
        made: dict[str, NatsTransport] = {}
        for region, server in (copies or {"": servers[CONTROL]}).items():
            copied = replace(directory, nats_url=servers[CONTROL].url, nats_bulk_url=server.url, identity=None)
            made[region] = await connect(copied, "outside", ANSWER_TIMEOUT_S)
            stack.push_async_callback(made[region].close)
        await _check_settings(next(iter(made.values())), directory)
        yield made, False


async def _live(directory: RunDirectory) -> dict[str, NatsTransport]:
    """Connect to the run's own servers, as far as they answer and hold this run: another run's may listen there by now.

    Return a connection for the log of each region that is known here; one, of no name, where only one server is.
    """
    if not await _is_listened_at(directory.nats_url):
        return {}
    urls: Mapping[str, str | None] = directory.region_urls or {"": directory.nats_bulk_url}
    connecting = (connect(replace(directory, nats_bulk_url=url), "outside", ANSWER_TIMEOUT_S) for url in urls.values())
    connected = dict(zip(urls, await asyncio.gather(*connecting, return_exceptions=True), strict=True))
    for failure in connected.values():
        if isinstance(failure, BaseException) and not isinstance(failure, BrokerError):
            raise failure
    found = {region: each for region, each in connected.items() if isinstance(each, NatsTransport)}
    if not found:
        return {}
    try:
        await _check_settings(next(iter(found.values())), directory)
    except (BrokerError, RunError):
        for transport in found.values():
            await transport.close()
        if (directory.path / CONTROL).is_dir():
            return {}
        raise
    return found


async def _is_listened_at(urls: str) -> bool:
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
    theirs = creation.settings_of(directory.name, stored[0])
    difference = creation.difference_from(directory.settings, theirs)
    if difference:
        raise RunError(f"{directory.path}: its run.json differs from the settings on its server: {difference}")
