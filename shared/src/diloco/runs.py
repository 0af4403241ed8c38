"""``diloco runs``: the runs that servers hold, and removing one that nobody needs any more.

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
from rich.table import Table

from diloco import membership, observe, outside
from diloco.core.changes import in_force
from diloco.core.fragments import unpack_map
from diloco.errors import BrokerError, MessageError, RunError, SettingsError
from diloco.identity import Identity, load, of_command
from diloco.membership import Run
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.report import units
from diloco.settings import RunSettings, parse
from diloco.transport import Heard
from diloco.wire import messages
from diloco.wire.messages import Record
from diloco.wire.subjects import Subjects

HEAR_S = 1.0  # or two pulses, where the settings say that members pulse less often
SIGNS = ("pulse", "shard", "coordinator")
_STREAM = re.compile(r"DILOCO_([a-z0-9][a-z0-9_-]{0,47})_(LOG|OFFERS|ARCHIVE)|KV_DILOCO_([a-z0-9][a-z0-9_-]{0,47})")

runs = typer.Typer(no_args_is_help=True, help="The runs that NATS servers hold.")

Nats = Annotated[str, typer.Option("--nats", envvar="DILOCO_NATS_URL", help="NATS server; with regions, the control store.")]
Bulk = Annotated[
    list[str] | None,
    typer.Option("--bulk", envvar="DILOCO_NATS_BULK_URL", help="With regions: each region's server; repeatable."),
]
As = Annotated[
    Path | None, typer.Option("--identity", envvar="DILOCO_IDENTITY", help="An operator's, whose run alone is looked at.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
LOCAL = "nats://127.0.0.1:4222"


@dataclass(frozen=True)
class Part:
    """A stream of a run, its bucket's included."""

    server: str
    run: str
    stream: str
    messages: int
    bytes: int
    created_s: float  # Unix time, as the other
    last_s: float  # of its last message; that of its making where there is none


@dataclass
class Found:
    """What servers hold of a run, and who is heard of it."""

    name: str
    parts: list[Part] = field(default_factory=list)
    state: str = "unknown"
    members: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    pulse_s: float = 0.0  # of its learners

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


@runs.command("list")
def list_(nats_url: Nats = LOCAL, bulk: Bulk = None, identity: As = None, json_: Json = False) -> None:
    """All runs of which servers hold something."""
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
    """What servers hold of a run."""
    [found] = asyncio.run(_found(nats_url, bulk or [], None if identity is None else of_command(identity, run), run))
    if json_:
        print(json.dumps(_plain(found)))
        return
    print(f"run {found.name}: {found.state}")
    for name, value in found.facts.items():
        print(f"{name}: {value}")
    print(f"members heard: {', '.join(found.members) or 'nobody'}")
    table = Table("stream", "server", "messages", "size", "made", "last written", box=None, pad_edge=False)
    for part in found.parts:
        size, made, last = units.size(part.bytes), units.moment(part.created_s), units.moment(part.last_s)
        table.add_row(part.stream, part.server, str(part.messages), size, made, last)
    Console().print(table)


@runs.command()
def remove(
    run: Name,
    nats_url: Nats = LOCAL,
    bulk: Bulk = None,
    identity: As = None,
    force: Annotated[bool, typer.Option("--force", help="Also while members of it are heard.")] = False,
) -> None:
    """Delete all that servers hold of a run, for good. Its directories stay."""
    asyncio.run(_remove(run, nats_url, bulk or [], None if identity is None else of_command(identity, run), force=force))


async def _found(url: str, bulk: Sequence[str], identity: Identity | None, name: str | None) -> list[Found]:
    async with _links(url, bulk, identity) as links:
        return await _look(links, name)


async def _remove(name: str, url: str, bulk: Sequence[str], identity: Identity | None, *, force: bool) -> None:
    async with _links(url, bulk, identity) as links:
        [found] = await _look(links, name)
        if found.members and not force:
            raise RunError(f"run {name!r} is going on: {', '.join(found.members)} heard; stop it first, or give --force")
        missing = [region for region in found.facts.get("regions", []) if not bulk]
        if missing:
            raise RunError(f"run {name!r} has the regions {', '.join(missing)}: give the server of each with --bulk")
        # the bucket last: as long as it is there, what is left can be told to be a run's
        for part in sorted(found.parts, key=lambda part: part.stream.startswith("KV_")):
            await streams.delete(links[part.server], part.stream)
            print(f"deleted {part.stream} at {part.server}: {part.messages} messages, {units.size(part.bytes)}")


@asynccontextmanager
async def _links(url: str, bulk: Sequence[str], identity: Identity | None) -> AsyncIterator[dict[str, NatsTransport]]:
    """A connection to each server, by its address; the control server's is the first."""
    async with AsyncExitStack() as stack:
        links: dict[str, NatsTransport] = {}
        for server in (url, *bulk):
            if _place(server) not in links:
                opening = NatsTransport.open(server, server, "runs", observe.get_logger(), outside.ANSWER_TIMEOUT_S, identity)
                links[_place(server)] = transport = await opening
                stack.push_async_callback(transport.close)
        yield links


async def _look(links: dict[str, NatsTransport], name: str | None) -> list[Found]:
    """The runs that servers hold, or the one of that name.

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
    found: dict[str, Found] = {}
    for server, link in links.items():
        for stream in await streams.listed(link):
            part = _part(server, stream)
            if part is not None and name in (None, part.run):
                found.setdefault(part.run, Found(part.run)).parts.append(part)
    if name is not None and name not in found:
        raise RunError(f"run {name!r}: nothing of it is at {', '.join(links)}; diloco runs list shows what is")
    for run in found.values():
        await _describe(control, links, run)
    hear_s = max([HEAR_S, *(2 * run.pulse_s for run in found.values())])
    await asyncio.sleep(max(0.0, began_s + hear_s - time.monotonic()))
    for run in found.values():
        run.members = sorted(heard.get(run.name, ()))
        if run.members and run.bucket:
            run.state = "going on"
        run.parts.sort(key=lambda part: (part.stream, part.server))
    return sorted(found.values(), key=lambda run: run.name)


async def _describe(control: NatsTransport, links: dict[str, NatsTransport], found: Found) -> None:
    """What the bucket and the log say, as far as they can be read."""
    if not found.bucket:
        found.state = "partial: it has no bucket"
        return
    try:
        registry = await control.bucket(Subjects(found.name).bucket, create=False)
        stored = await registry.get("run")
        if stored is None:
            found.state = "partial: its bucket has no settings"
            return
        settings = parse(RunSettings, membership.settings_of(found.name, stored[0]), f"run {found.name!r}")
        run = Run(found.name, settings, registry)
        listed, _ = await membership.changes(run)
        now = in_force(settings, listed.records)
        found.pulse_s = now.settings.liveness.pulse_s
        found.facts = {"preset": settings.preset, "tokens": now.settings.tokens, "changes": now.number}
        if settings.regions.names:
            found.facts["regions"] = settings.regions.names
        stored = await registry.get("map")
        fragments = 0 if stored is None else len(unpack_map(stored[0]).fragments)
        logs = [part for part in found.parts if part.stream.endswith("_LOG")]
        if not logs:
            found.state = "partial: it has no log" if not settings.regions.names else "its log is at its regions' servers"
            return
        found.state = await _state(links[logs[0].server], run, fragments)
    except (BrokerError, RunError, SettingsError, MessageError) as error:
        found.state = f"unreadable: {error}"


async def _state(link: NatsTransport, run: Run, fragments: int) -> str:
    names, closed, versions = Subjects(run.name), 0, 0
    for fragment in range(fragments):
        stored = await link.last(names.log_stream, names.record(fragment))
        if stored is not None:
            record, _, _ = messages.unpack(stored.data, Record, run.identity)
            closed, versions = closed + record.closing, versions + record.version
    if not versions:
        return "not begun"
    return "finished" if closed == fragments else f"stopped after {versions} versions"


def _part(server: str, stream: dict[str, Any]) -> Part | None:
    """Raises BrokerError where what the server says is not as its API has it."""
    try:
        name, state = str(stream["config"]["name"]), stream["state"]
        match = _STREAM.fullmatch(name)
        if match is None:
            return None
        created_s = _unix_s(stream["created"])
        last_s = _unix_s(state["last_ts"]) if state["messages"] else created_s
        return Part(server, match[1] or match[3], name, int(state["messages"]), int(state["bytes"]), created_s, last_s)
    except (LookupError, TypeError, ValueError) as error:
        raise BrokerError(f"{server}: what it says of a stream cannot be read: {error!r}") from None


def _unix_s(text: str) -> float:
    """Seconds of a time as the server writes it, with nine digits."""
    return datetime.fromisoformat(re.sub(r"\.(\d{1,6})\d*", r".\1", text)).timestamp()


def _place(url: str) -> str:
    """Where a server is, without what its URL may have of a password."""
    places = []
    for one in url.split(","):
        parts = urlsplit(one if "//" in one else f"//{one}")
        places.append(f"{parts.hostname}:{parts.port or 4222}")
    return ",".join(places)


def _plain(run: Found) -> dict[str, Any]:
    parts = [vars(part) for part in run.parts]
    sums = {"bytes": run.bytes, "created_s": run.created_s, "last_s": run.last_s}
    return {"run": run.name, "state": run.state, "members": run.members} | run.facts | sums | {"streams": parts}


def _ago(at_s: float) -> str:
    return f"{units.duration(max(0.0, time.time() - at_s))} ago"
