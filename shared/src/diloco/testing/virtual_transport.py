"""The network of a world in virtual time: a :class:`diloco.transport.Transport`, as unreliable as its world wants it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco.core.syncer.bandwidth import Moved
from diloco.errors import AppendUncertainError, BrokerError, RewoundError
from diloco.testing.server import Append, VirtualKeys, VirtualStream
from diloco.transport import Fence, Room, Stored
from diloco.wire.grants import SignedGrant

if TYPE_CHECKING:
    from diloco.testing.world import VirtualProcess

READ_TIMEOUT_S = 2.0  # longer than any delay, shorter than most absences of a server
BUCKET_TIMEOUT_S = 1.0  # of each of several attempts
BUCKET_ATTEMPTS = 6
CONTROL = ""  # where the control store is; in a run without regions the only server


@dataclass
class VirtualMessage:
    """A message that a subscriber hears."""

    subject: str
    data: bytes
    reply: Callable[[bytes], None]

    async def respond(self, data: bytes) -> None:
        self.reply(data)


@dataclass(eq=False)
class Subscription:
    pattern: str
    transport: VirtualTransport
    heard: Callable[[Any], Awaitable[None]]
    ended: bool = False

    async def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.transport.world.subscriptions.remove(self)


class Wires:
    """The links between regions, of which some are slow: one byte after another, each direction for itself."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}  # bytes a second from and to a region, where there is a limit
        self._free_s: dict[tuple[str, str], float] = {}

    def crossing_s(self, source: str, target: str, size: int, now_s: float) -> float:
        """Return how long it takes until bytes that set out now are over."""
        rate = min(self.rates.get(source, math.inf), self.rates.get(target, math.inf))
        if source == target or rate == math.inf:
            return 0.0
        self._free_s[source, target] = max(now_s, self._free_s.get((source, target), 0.0)) + size / rate
        return self._free_s[source, target] - now_s


class VirtualTransport:
    """One process's way to the others, and to one region's streams."""

    def __init__(self, process: VirtualProcess, region: str) -> None:
        self.process, self.world, self.loop, self.region = process, process.world, process.loop, region
        self.bytes_in = self.bytes_out = 0
        self.incoming = Moved()

    @property
    def connected(self) -> bool:
        return self.process.reaches(CONTROL) and self.reaches

    @property
    def reaches(self) -> bool:
        """Whether it and the server that has its streams can talk."""
        return self.process.reaches(self.region)

    @property
    def connections(self) -> int:
        return self.world.servers[self.region].losses

    @property
    def founds(self) -> bool:
        return True

    @property
    def filters_many(self) -> bool:
        return True

    @property
    def authority(self) -> str | None:
        return self.world.authority

    @property
    def grant(self) -> SignedGrant | None:
        return self.world.grants.get(self.process.name)

    def wall_s(self) -> float:
        return self.process.wall_s()

    def random_bytes(self, count: int) -> bytes:
        return self.process.rng.randbytes(count)

    async def close(self) -> None:
        self.world.subscriptions = [s for s in self.world.subscriptions if s.transport is not self]

    # ---- messages

    async def publish(self, subject: str, data: bytes, *, optional: bool = False) -> None:
        self.bytes_out += len(data)
        self._send(subject, data, lambda answer: None)

    async def subscribe(self, subject: str, heard: Callable[[Any], Awaitable[None]], *, optional: bool = False) -> Subscription:
        subscription = Subscription(subject, self, heard)
        self.world.subscriptions.append(subscription)
        return subscription

    async def serve(self, subject: str, heard: Callable[[Any], Awaitable[None]]) -> None:
        await self.subscribe(subject, heard)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes | None:
        future = self.loop.create_future()

        def reply(answer: bytes) -> None:
            if self.process.hears:
                self.world.later(self.world.delay_s(), self._settle, future, answer, None)

        self._send(subject, data, reply, at_home=True)
        self.loop.call_later(timeout_s, self._settle, future, None, None)
        answer: bytes | None = await future
        return answer

    def _send(self, subject: str, data: bytes, reply: Callable[[bytes], None], *, at_home: bool = False) -> None:
        if self.process.hears:
            self.world.publish(VirtualMessage(subject, data, reply), self.process.region, at_home=at_home)

    def _settle(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    # ---- the server

    async def ask(
        self,
        action: Callable[[], Any],
        timeout_s: float,
        what: str,
        *,
        lossy: bool = False,
        where: str | None = None,
        crossing_s: float = 0.0,
    ) -> Any:
        """Have the server do something; AppendUncertainError if no answer comes in time, whether or not it was done."""
        world, process, loop = self.world, self.process, self.loop
        where = self.region if where is None else where
        future, session = loop.create_future(), self._session(where)
        fate = world.fate(process, what) if lossy else "plain"
        if fate == "crash_before":
            process.crash(what)
        if fate == "late":  # the caller gives up, and then it is done all the same
            world.later(timeout_s * (1 + world.rng.random()), self._try, action, session, where)
        elif fate != "lost":
            arrive = partial(self._arrive, action, future, fate, what, session, where)
            world.later(world.delay_s() + crossing_s, arrive)
        timer = loop.call_later(timeout_s, self._settle, future, None, AppendUncertainError(f"{what}: no answer"))
        try:
            return await future
        finally:
            timer.cancel()

    def _session(self, where: str) -> tuple[int, int]:
        """Return what a connection to a server ends with: the server has lost something."""
        return self.world.rewinds, self.world.servers[where].losses

    def _try(self, action: Callable[[], Any], session: tuple[int, int], where: str) -> None:
        if session == self._session(where):
            with contextlib.suppress(BrokerError):
                action()

    def _arrive(
        self, action: Callable[[], Any], future: asyncio.Future[Any], fate: str, what: str, session: tuple[int, int], where: str
    ) -> None:
        if not self.process.reaches(where) or session != self._session(where):
            return  # lost with the connection
        result, error = None, None
        try:
            result = action()
        except BrokerError as refusal:
            error = refusal
        if fate == "crash_after":
            self.process.crash(f"after {what}")
        elif fate != "unanswered":
            self.world.answer(self.loop, self._settle, future, result, error)

    async def made_at(self, stream: str) -> str | None:
        server = self.world.servers[self.region]
        made: str | None = await self.ask(
            lambda: str(server.losses) if stream in server.streams else None, READ_TIMEOUT_S, f"made {stream}"
        )
        return made

    async def rooms(self, names: Sequence[str]) -> list[Room]:
        return []  # nothing has a bound here

    async def ensure_stream(
        self, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
    ) -> int | None:
        streams = self.world.servers[self.region].streams
        streams.setdefault(stream, VirtualStream(stream, subjects, max_msgs_per_subject, self.region))
        return None

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        parts: Sequence[bytes | memoryview] = (),
        part_subject: Callable[[int], str] | None = None,
        message_id: str,
        fence: Fence | None,
        timeout_s: float,
    ) -> int:
        world, process, server = self.world, self.process, self.world.servers[self.region]
        named: list[tuple[str, bytes]] = []
        if parts:
            assert part_subject is not None
            named = [(part_subject(index), bytes(part)) for index, part in enumerate(parts)]
        request = Append(subject, data, named, message_id, fence)
        broken = world.breaks_batch() if parts else None
        writer = process.as_writer()  # now: by the time that it is stored another process may go by this name

        def store() -> int:
            world.writer = writer
            if broken is None:
                return server.append(request, world.now_s)
            server.append(request, world.now_s, int(broken * len(parts)))
            raise AppendUncertainError(f"{subject}: the server ended the batch early")

        size = len(data) + sum(len(part) for part in parts)
        self.bytes_out += size
        crossing_s = world.wires.crossing_s(process.region, self.region, size, world.now_s)
        crossing_s += world.append_s(process, subject)
        sequence: int = await self.ask(store, timeout_s, f"append {subject}", lossy=True, crossing_s=crossing_s)
        return sequence

    async def last(self, stream: str, subject: str) -> Stored | None:
        held = self._stream(stream)
        stored: Stored | None = await self.ask(lambda: held.last(subject), READ_TIMEOUT_S, f"last {subject}")
        return stored

    async def get(self, stream: str, sequence: int) -> Stored | None:
        held = self._stream(stream)
        stored: Stored | None = await self.ask(lambda: held.get(sequence), READ_TIMEOUT_S, f"get {sequence}")
        return stored

    async def first(self, stream: str, subject: str, start_sequence: int) -> Stored | None:
        held = self._stream(stream)
        what = f"first {subject} from {start_sequence}"
        stored: Stored | None = await self.ask(lambda: held.first(subject, start_sequence), READ_TIMEOUT_S, what)
        return stored

    async def last_sequence(self, subject: str) -> int:
        stored = await self.ask(lambda: self.world.servers[self.region].last(subject), READ_TIMEOUT_S, f"last {subject}")
        return 0 if stored is None else stored.sequence

    async def purge(self, stream: str, subject: str, below_sequence: int) -> None:
        held = self._stream(stream)
        what = f"purge {subject} below {below_sequence}"

        def drop() -> None:
            held.purge(subject, below_sequence)
            self.world.purged(held, subject)

        await self.ask(drop, READ_TIMEOUT_S, what, lossy=True)

    async def pull(
        self,
        stream: str,
        subjects: Sequence[str],
        start_sequence: int,
        read: Stored | None = None,
        *,
        headers_only: bool = False,
    ) -> AsyncIterator[Stored]:
        held, newest, position = self._stream(stream), read, max(1, start_sequence) - 1
        rewinds = held.rewinds if newest is None else -1
        while True:
            if held.rewinds != rewinds and self.reaches:
                rewinds, position = held.rewinds, newest.sequence if newest else max(1, start_sequence) - 1
                if newest is not None and not held.keeps(newest):
                    raise RewoundError(f"stream {stream}: the server lost message {newest.sequence}, which it had acknowledged")
            new = held.after(position, subjects) if self.reaches else []
            if not new:
                position = max(position, len(held.messages)) if self.reaches else position
                await self.world.news(self.loop, held, subjects)
                continue
            await asyncio.sleep(self.world.delay_s())
            for found in new:
                stored = replace(found, data=b"") if headers_only else found
                crossing_s = self.world.wires.crossing_s(self.region, self.process.region, len(stored.data), self.world.now_s)
                if crossing_s:
                    await asyncio.sleep(crossing_s)
                    self.incoming = Moved(self.incoming.bytes + len(stored.data), self.incoming.busy_s + crossing_s)
                position, newest = found.sequence, found
                self.bytes_in += len(stored.data)
                if self.region != self.process.region and stored.subject.endswith(".head"):
                    self.world.stats[f"{stored.subject.split('.')[2]} crossed"] += 1
                yield stored

    def _stream(self, name: str) -> VirtualStream:
        streams = self.world.servers[self.region].streams
        if name not in streams:
            raise BrokerError(f"stream {name}: does not exist on the server")
        return streams[name]

    async def bucket(self, name: str, *, create: bool, replicas: int = 1) -> VirtualBucket:
        buckets = self.world.control.buckets

        def find() -> None:
            if create:
                buckets.setdefault(name, VirtualKeys(name))
            if name not in buckets:
                raise BrokerError(f"bucket {name}: does not exist on the server")

        await self.ask(find, READ_TIMEOUT_S, f"bucket {name}", where=CONTROL)
        return VirtualBucket(self, name)


@dataclass(frozen=True)
class VirtualBucket:
    """Calls are tried again, as in :mod:`diloco.nats.registry`: each write has an id of its own, so that it is done once."""

    transport: VirtualTransport
    name: str

    async def get(self, key: str) -> tuple[bytes, int] | None:
        bucket = self.transport.world.control.buckets[self.name]
        found: tuple[bytes, int] | None = await self._until_answered(lambda: bucket.get(key), f"get {key}", lossy=False)
        return found

    async def after(self, keys: str, revision: int) -> tuple[str, bytes, int] | None:
        bucket, what = self.transport.world.control.buckets[self.name], f"get {keys} after {revision}"
        found: tuple[str, bytes, int] | None
        found = await self._until_answered(lambda: bucket.after(keys, revision), what, lossy=False)
        return found

    async def create(self, key: str, value: bytes) -> int:
        return await self._write(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return await self._write(key, value, revision)

    async def put(self, key: str, value: bytes) -> int:
        return await self._write(key, value, None)

    async def _write(self, key: str, value: bytes, revision: int | None) -> int:
        world, process = self.transport.world, self.transport.process
        bucket, identifier = world.control.buckets[self.name], process.rng.getrandbits(64)
        generation = process.generation

        def write() -> int:
            stored = bucket.get(key)
            if stored is not None and bucket.writers[key] == identifier:
                return stored[1]  # an attempt that was not answered
            revised = bucket.write(key, value, revision, identifier)
            world.key_written(process, generation, key, stored[0] if stored else None, value, revised)
            return revised

        written: int = await self._until_answered(write, f"write {key}", lossy=True)
        return written

    async def _until_answered(self, action: Callable[[], Any], what: str, *, lossy: bool) -> Any:
        for attempt in range(BUCKET_ATTEMPTS):
            try:
                return await self.transport.ask(action, BUCKET_TIMEOUT_S, what, lossy=lossy, where=CONTROL)
            except AppendUncertainError:
                if attempt == BUCKET_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")


def deliver(subscription: Subscription, message: VirtualMessage) -> None:
    """Have a subscriber hear a message, unless its subscription has ended while that was on its way."""
    if subscription.ended:
        return
    subscription.transport.bytes_in += len(message.data)
    heard: Any = subscription.heard(message)
    try:
        waiting = heard.send(None)  # most is done at once, and needs no task
    except StopIteration:
        return
    subscription.transport.loop.create_task(_go_on(heard, waiting))


@types.coroutine
def _go_on(heard: Any, waiting: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that waits for something."""
    while True:
        try:
            result = yield waiting
        except BaseException as error:
            step = partial(heard.throw, error)
        else:
            step = partial(heard.send, result)
        try:
            waiting = step()
        except StopIteration:
            return
