"""``diloco runs``: the runs of this machine; those that servers hold, the consumers of one's streams, and the removal of both.

A run is a bucket on the control server, and streams: on the same server, or, in a run with regions, on each region's. What is
there of one is listed, whole or not: a stream whose bucket is gone can be seen and removed too.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Column, Table

from diloco.control import creation
from diloco.control.changes import read_changes
from diloco.control.creation import KnownRun
from diloco.core.tensors.fragments import unpack_map
from diloco.errors import BrokerError, MessageError, RunError, SettingsError
from diloco.log.log import Log
from diloco.nats import streams
from diloco.nats.identity import Identity, load, of_command
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.transport import Heard
from diloco.wire.subjects import Subjects, reader_of
from diloco_ops.reading import local_runs, run_reader
from diloco_ops.reading.local_runs import LocalRun
from diloco_report import units

HEAR_S = 1.0  # or two heartbeats, where the settings say that members heartbeat less often
SIGNS = ("heartbeat", "shard", "coordinator")
_STREAM = re.compile(r"DILOCO_([a-z0-9][a-z0-9_-]{0,47})_(LOG|OFFERS|ARCHIVE)|KV_DILOCO_([a-z0-9][a-z0-9_-]{0,47})")

runs = typer.Typer(help="List the runs in runs/ on this machine; with a subcommand, the runs on NATS servers.")

Nats = Annotated[str, typer.Option("--nats", envvar="DILOCO_NATS_URL", help="NATS server; with regions, the control store.")]
Bulk = Annotated[
    list[str] | None,
    typer.Option("--bulk", envvar="DILOCO_NATS_BULK_URL", help="With regions: each region's server; repeatable."),
]
As = Annotated[
    Path | None,
    typer.Option("--identity", envvar="DILOCO_IDENTITY", help="Identity file of an operator; limits the command to its run."),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
LOCAL = "nats://127.0.0.1:4222"


@dataclass(frozen=True)
class RunStream:
    """A stream of a run, its bucket's included."""

    server: str
    run: str
    stream: str
    messages: int
    bytes: int
    created_s: float  # Unix time, as the other
    last_s: float  # of its last message; that of its making where there is none


@dataclass(frozen=True)
class Consumer:
    """A consumer of a run's stream."""

    name: str
    stream: str
    server: str
    created_s: float  # Unix time
    idle_s: float | None  # until it ends unread; None: it never does


@dataclass
class RunOnServers:
    """The streams of a run on servers, and the members that are heard."""

    name: str
    parts: list[RunStream] = field(default_factory=list)
    state: str = "unknown"
    members: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    heartbeat_s: float = 0.0  # of its learners

    @property
    def bucket(self) -> bool:
        return any(part.stream.startswith("KV_") for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def created_s(self) -> float:
        return min(part.created_s for part in self.parts)

    @property
    def last_s(self) -> float:
        return max(part.last_s for part in self.parts)


@runs.callback(invoke_without_command=True)
def local(
    context: typer.Context, json_: Annotated[bool, typer.Option("--json", help="The local runs, as JSON.")] = False
) -> None:
    """List the runs in runs/ on this machine, newest first."""
    if context.invoked_subcommand is not None:
        return
    found = local_runs.local_runs()
    if json_:
        print(json.dumps([_plain_local(run) for run in found]))
        return
    table = Table("run", "state", "progress", "tokens", "learners", "last sign", box=None, pad_edge=False)
    for run in found:
        row = _plain_local(run)
        numbers = (units.share(row["progress"]), units.count(row["tokens"]), units.count(row["learners"]))
        table.add_row(row["directory"], row["state"], *numbers, _ago(run.at_s))
    Console().print(table if found else f"no runs in {local_runs.RUNS}/ of this folder; start one: diloco up")


def _plain_local(run: LocalRun) -> dict[str, Any]:
    tokens, learners = run.status.get("tokens_processed"), run.status.get("learners")
    return {
        "run": run.name,
        "directory": str(run.path),
        "state": run.standing,
        "progress": run.fraction,
        "tokens": tokens if units.finite(tokens) else None,
        "learners": len(learners) if isinstance(learners, dict) else None,
        "last_s": run.at_s,
    }


@runs.command("list")
def list_(nats_url: Nats = LOCAL, bulk: Bulk = None, identity: As = None, json_: Json = False) -> None:
    """List all runs that have data on the servers."""
    found = asyncio.run(_found(nats_url, bulk or [], None if identity is None else load(identity), None))
    if json_:
        print(json.dumps([_plain(run) for run in found]))
        return
    table = Table("run", "state", "members heard", "size", "made", "last written", box=None, pad_edge=False)
    for run in found:
        table.add_row(run.name, run.state, str(len(run.members)), units.size(run.bytes), _ago(run.created_s), _ago(run.last_s))
    Console().print(table if found else f"no runs at {', '.join(map(_place, (nats_url, *(bulk or []))))}")


@runs.command()
def show(run: Name, nats_url: Nats = LOCAL, bulk: Bulk = None, identity: As = None, json_: Json = False) -> None:
    """Show all data of a run on the servers."""
    [found] = asyncio.run(_found(nats_url, bulk or [], None if identity is None else of_command(identity, run), run))
    if json_:
        print(json.dumps(_plain(found)))
        return
    print(f"run {found.name}: {found.state}")
    for name, value in found.facts.items():
        print(f"{name}: {value}")
    print(f"members heard: {', '.join(found.members) or 'none'}")
    table = Table("stream", "server", "messages", "size", "made", "last written", box=None, pad_edge=False)
    for part in found.parts:
        size, made, last = units.size(part.bytes), units.moment(part.created_s), units.moment(part.last_s)
        table.add_row(part.stream, part.server, str(part.messages), size, made, last)
    Console().print(table)


@runs.command()
def consumers(
    run: Name,
    nats_url: Nats = LOCAL,
    bulk: Bulk = None,
    identity: As = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove",
            help="Remove the consumers of this process, or the consumer of this name; repeatable. A running "
            "reader creates another.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List the consumers of a run's streams: their readers, since when, and when an unread one expires."""
    own = None if identity is None else of_command(identity, run)
    found = asyncio.run(_consumers(run, nats_url, bulk or [], own, remove or []))
    if json_:
        print(json.dumps([vars(consumer) for consumer in found]))
        return
    name = Column("consumer", overflow="fold")  # --remove takes it
    table = Table(name, "of", "stream", "server", "made", "ends unread after", box=None, pad_edge=False)
    for one in found:
        ends = "never" if one.idle_s is None else units.duration(one.idle_s)
        table.add_row(one.name, reader_of(one.name), one.stream, one.server, _ago(one.created_s), ends)
    Console().print(table if found else f"run {run}: no consumers")


@runs.command()
def remove(
    run: Name,
    nats_url: Nats = LOCAL,
    bulk: Bulk = None,
    identity: As = None,
    force: Annotated[bool, typer.Option("--force", help="Remove the run even if its members are alive.")] = False,
) -> None:
    """Delete all data of a run from the servers, for good. The run's directories stay."""
    asyncio.run(_remove(run, nats_url, bulk or [], None if identity is None else of_command(identity, run), force=force))


async def _found(url: str, bulk: Sequence[str], identity: Identity | None, name: str | None) -> list[RunOnServers]:
    async with _links(url, bulk, identity) as links:
        return await _look(links, name)


async def _remove(name: str, url: str, bulk: Sequence[str], identity: Identity | None, *, force: bool) -> None:
    async with _links(url, bulk, identity) as links:
        [found] = await _look(links, name)
        if found.members and not force:
            raise RunError(f"run {name!r} is live: {', '.join(found.members)} heard; stop it first, or give --force")
        missing = [region for region in found.facts.get("regions", []) if not bulk]
        if missing:
            raise RunError(f"run {name!r} has the regions {', '.join(missing)}: give the server of each with --bulk")
        # the bucket last: as long as it is there, the rest is known to be a run's
        for part in sorted(found.parts, key=lambda part: part.stream.startswith("KV_")):
            await streams.delete(links[part.server], part.stream)
            print(f"deleted {part.stream} at {part.server}: {part.messages} messages, {units.size(part.bytes)}")


async def _consumers(
    name: str, url: str, bulk: Sequence[str], identity: Identity | None, doomed: Sequence[str]
) -> list[Consumer]:
    """Return the consumers of a run's streams that are left, once those of ``doomed`` are removed.

    Raises:
        RunError: nothing of the run is there, or ``doomed`` names no consumer.
    """
    async with _links(url, bulk, identity) as links:
        found = [
            _consumer(server, part.stream, consumer)
            for server, link in links.items()
            for part in [_part(server, stream) for stream in await streams.listed(link)]
            if part is not None and part.run == name
            for consumer in await streams.consumers(link, part.stream)
        ]
        unknown = set(doomed).difference(*({consumer.name, reader_of(consumer.name)} for consumer in found))
        if unknown:
            raise RunError(f"run {name!r}: {', '.join(sorted(unknown))} has no consumer at {', '.join(links)}")
        left = []
        for consumer in found:
            if consumer.name in doomed or reader_of(consumer.name) in doomed:
                await streams.remove_consumer(links[consumer.server], consumer.stream, consumer.name)
            else:
                left.append(consumer)
        return left


def _consumer(server: str, stream: str, consumer: dict[str, Any]) -> Consumer:
    """Return a consumer.

    Raises:
        BrokerError: the server's answer is not as its API has it.
    """
    try:
        idle_ns = consumer["config"].get("inactive_threshold")
        idle_s = None if idle_ns is None else idle_ns / 1e9
        return Consumer(str(consumer["name"]), stream, server, _unix_s(consumer["created"]), idle_s)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokerError(f"{server}: its description of a consumer cannot be read: {error!r}") from None


@asynccontextmanager
async def _links(url: str, bulk: Sequence[str], identity: Identity | None) -> AsyncIterator[dict[str, NatsTransport]]:
    """Connect to each server; connections by address, the control server's first."""
    async with AsyncExitStack() as stack:
        links: dict[str, NatsTransport] = {}
        for server in (url, *bulk):
            if _place(server) not in links:
                opening = NatsTransport.open(
                    server, server, "runs", observe.get_logger(), run_reader.ANSWER_TIMEOUT_S, identity
                )
                links[_place(server)] = transport = await opening
                stack.push_async_callback(transport.close)
        yield links


async def _look(links: dict[str, NatsTransport], name: str | None) -> list[RunOnServers]:
    """Return the runs that servers hold, or the one of that name.

    Raises:
        RunError: there is none of that name.
    """
    control = next(iter(links.values()))
    if control.identity is not None:  # which may hear and see nothing of others
        name = control.identity.run
    heard: dict[str, set[str]] = {}

    async def hear(message: Heard) -> None:
        tokens = message.subject.split(".")
        heard.setdefault(tokens[1], set()).add(tokens[3] if len(tokens) > 3 else tokens[2])

    for sign in SIGNS:
        subject = f"diloco.{name or '*'}.{sign}"
        await control.subscribe(subject if sign == "coordinator" else f"{subject}.*", hear)
    began_s = time.monotonic()
    found: dict[str, RunOnServers] = {}
    for server, link in links.items():
        for stream in await streams.listed(link):
            part = _part(server, stream)
            if part is not None and name in (None, part.run):
                found.setdefault(part.run, RunOnServers(part.run)).parts.append(part)
    if name is not None and name not in found:
        raise RunError(f"run {name!r}: not found at {', '.join(links)}; diloco runs list shows the runs there")
    for run in found.values():
        await _describe(control, links, run)
    hear_s = max([HEAR_S, *(2 * run.heartbeat_s for run in found.values())])
    await asyncio.sleep(max(0.0, began_s + hear_s - time.monotonic()))
    for run in found.values():
        run.members = sorted(heard.get(run.name, ()))
        if run.members and run.bucket:
            run.state = "going on"
        run.parts.sort(key=lambda part: (part.stream, part.server))
    return sorted(found.values(), key=lambda run: run.name)


async def _describe(control: NatsTransport, links: dict[str, NatsTransport], found: RunOnServers) -> None:
    """Add the facts that bucket and log state, as far as they can be read."""
    if not found.bucket:
        found.state = "partial: it has no bucket"
        return
    try:
        registry = await control.bucket(Subjects(found.name).bucket, create=False)
        settings = await creation.stored_settings(registry, found.name)
        if settings is None:
            found.state = "partial: its bucket has no settings"
            return
        run = KnownRun(found.name, settings, registry)
        run.adopt((await read_changes(run)).records)
        found.heartbeat_s = run.in_force.liveness.heartbeat_s
        found.facts = {"preset": settings.preset, "tokens": run.in_force.tokens, "changes": run.now.number}
        if settings.regions.names:
            found.facts["regions"] = settings.regions.names
        logs = [part for part in found.parts if part.stream.endswith("_LOG")]
        if not logs:
            found.state = "partial: it has no log" if not settings.regions.names else "its log is at its regions' servers"
            return
        found.state = await _state(links[logs[0].server], run)
    except (BrokerError, RunError, SettingsError, MessageError) as error:
        found.state = f"unreadable: {error}"


async def _state(link: NatsTransport, run: KnownRun) -> str:
    stored = await run.registry.get("map")
    if stored is None:
        return "not begun"
    log = Log(link, run.name, run.identity, unpack_map(stored[0]), run.created)
    heads = [await log.reader.newest(fragment.index) for fragment in log.map.fragments]
    versions = sum(head.record.version for head in heads if head is not None)
    if not versions:
        return "not begun"
    closed = all(head is not None and head.record.closing for head in heads)
    return "finished" if closed else f"stopped after {versions} versions"


def _part(server: str, stream: dict[str, Any]) -> RunStream | None:
    """Return a run's stream; None if it is no run's.

    Raises:
        BrokerError: the server's answer is not as its API has it.
    """
    try:
        name, state = str(stream["config"]["name"]), stream["state"]
        match = _STREAM.fullmatch(name)
        if match is None:
            return None
        created_s = _unix_s(stream["created"])
        last_s = _unix_s(state["last_ts"]) if state["messages"] else created_s
        return RunStream(
            server=server,
            run=match[1] or match[3],
            stream=name,
            messages=int(state["messages"]),
            bytes=int(state["bytes"]),
            created_s=created_s,
            last_s=last_s,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise BrokerError(f"{server}: its description of a stream cannot be read: {error!r}") from None


def _unix_s(text: str) -> float:
    """Return Unix seconds of a time as the server writes it, with nine digits."""
    return datetime.fromisoformat(re.sub(r"\.(\d{1,6})\d*", r".\1", text)).timestamp()


def _place(url: str) -> str:
    """Return a server's address, without the password that its URL may have."""
    places = []
    for one in url.split(","):
        parts = urlsplit(one if "//" in one else f"//{one}")
        places.append(f"{parts.hostname}:{parts.port or 4222}")
    return ",".join(places)


def _plain(run: RunOnServers) -> dict[str, Any]:
    parts = [vars(part) for part in run.parts]
    sums = {"bytes": run.bytes, "created_s": run.created_s, "last_s": run.last_s}
    return {"run": run.name, "state": run.state, "members": run.members} | run.facts | sums | {"streams": parts}


def _ago(at_s: float) -> str:
    return f"{units.duration(max(0.0, time.time() - at_s))} ago"
