"""Keys for a test's run, and servers that accept no process without them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import nats.errors
from tests.pace import DEADLINE_S
from tests.services.cluster import Events

from diloco.nats import identity
from diloco.nats.client import Client
from diloco.nats.identity import Role
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.keys.roster import IdentityEntry

HOST = "127.0.0.1"
AN_HOUR = timedelta(hours=1)
ANSWER_S = 5  # then the server is asked again: its answer is lost where the connection is made again meanwhile


def make_keys(
    path: Path, run: str, who: Iterable[Who], *, regions: Sequence[str] = (), servers: Mapping[str, list[str]] | None = None
) -> Folder:
    """A folder as ``diloco keys`` makes it; ``servers`` by name: what each serves."""
    folder = Folder.make(path, run, regions)
    for name, serves in (servers or {"nats": []}).items():
        folder.put_server(name, [HOST], serves, datetime.now(UTC) + AN_HOUR)
    for one in who:
        put(folder, one)
    return folder


@contextlib.contextmanager
def serving(keys: Folder, path: Path, name: str = "nats") -> Iterator[Server]:
    """One of the folder's servers, for as long as a fixture or a test lasts."""
    server = Server(path, keys=keys.server_folder(name))
    server.start()
    try:
        yield server
    finally:
        server.kill()


def put(folder: Folder, who: Who, left: timedelta = AN_HOUR) -> Path:
    """Make an identity that is good for so long; its file."""
    entry = IdentityEntry(
        name=who.name,
        role=who.role,
        region=who.region,
        founder=who.founder,
        processes=who.processes,
        public_key="U" + "A" * 55,
        serial="0",
        expires=datetime.now(UTC) + left,
    )
    folder.put_identity(entry)
    return folder.identity_file(who.name)


def members(learners: int, syncers: int, place: Sequence[str | None] = (None,)) -> list[Who]:
    """Whom a run of toys has, the first learner to found it, the coordinator to create it; ``test`` observes."""

    def all_of(count: int, prefix: str, role: Role) -> list[Who]:
        return [Who(f"{prefix}-{i}", role, place[i % len(place)], role == "learner" and i == 0) for i in range(count)]

    others = [Who("coordinator", "coordinator", place[0], True), Who("operator", "operator"), Who("test", "observer")]
    return [*all_of(learners, "toy", "learner"), *all_of(syncers, "syncer", "syncer"), *others]


class Guest:
    """A connection under an identity, and what the server says to it."""

    def __init__(self, link: NatsTransport, events: Events) -> None:
        self.link, self.events = link, events

    @property
    def told(self) -> str:
        """All that the server has refused."""
        return " ".join(
            str(values.get("reason")) for _, event, values in self.events.entries if event == "permission_denied"
        ).lower()

    def count(self, event: str) -> int:
        return [name for _, name, _ in self.events.entries].count(event)

    async def refused(self, *subjects: str) -> list[str]:
        """Wait until the server has refused every one of these; those that it has not.

        Where a connection was made again, what was published may not have arrived, or its refusal may be lost: it is published
        once more. The client repeats subscriptions by itself.
        """
        settled, client = 0, self.link.bulk
        while True:
            await self.flush()
            missing = [subject for subject in subjects if f'"{subject.lower()}"' not in self.told]
            made = self._made_again
            if not missing or made == settled:
                return missing
            settled = made
            for subject in missing:
                await client.publish(subject, b"x")

    async def flush(self) -> None:
        """Wait until the server has taken all that was sent, and its answers are here."""
        async with asyncio.timeout(DEADLINE_S):
            for client in (self.link.bulk, self.link.control):
                while not await _flushed(client):
                    await asyncio.sleep(0.1)

    @property
    def _made_again(self) -> int:
        return sum(int(client.stats["reconnects"]) for client in (self.link.bulk, self.link.control))


async def _flushed(client: Client) -> bool:
    """Ask the server for a sign; False if the connection was lost before it came."""
    made, there = client.stats["reconnects"], client.is_connected
    try:
        for _ in range(2):  # nats-py writes a ping at once, ahead of what waits to be written
            await client.flush(ANSWER_S)
    except (nats.errors.Error, OSError):
        if client.is_closed:
            raise
        return False
    return bool(there and client.is_connected and client.stats["reconnects"] == made)


@contextlib.asynccontextmanager
async def guest(server: Server, keys: Folder, name: str, bulk: Server | None = None) -> AsyncIterator[Guest]:
    """Connect as an identity; ``bulk``: the server of the streams, where that is another one."""
    events, own = Events(), identity.load(keys.identity_file(name))
    link = await NatsTransport.open(server.url, (bulk or server).url, name, cast(Logger, events), DEADLINE_S, identity=own)
    try:
        yield Guest(link, events)
    finally:
        await link.close()
