"""Connections between the processes of one learner, each with each: messages in order, authenticated once.

Both ends prove that they know the secret of their generation before anything else is read. A bad frame, a silent process or a
connection that ends without a farewell is the end of the generation: :class:`Links` tells ``lost`` once, and says nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Sequence

from blake3 import blake3

from diloco.errors import FormatError, HashError, IslandError, MessageError
from diloco.process.observe import Logger
from diloco.process.tasks import Tasks
from diloco.processes.stream import EMPTY, Stream
from diloco.wire.framing import Message
from diloco.wire.process_messages import MESSAGES, Address, Bye, Greeting, Ping, Proof

Handle = Callable[[int, Message, memoryview], None]  # of a process: its message, and its content while it is handled

PING_S = 0.5  # several within the least `processes.silent_s`
GREETING_S = 5.0  # four small messages, on a busy machine
MAX_STRANGERS = 64  # connections that have not proved anything
BYE_LOOK_S = 0.02  # the end of a learner waits for it


class Links:
    """One process's connections to all others. Construct it in the loop's thread, and call it there.

    ``handle`` is told each message, in the loop; ``lost`` the first error. Processes are called by their ``place`` in this
    generation, 0 being the leader's. Errors name them by their ``index``, which people know.
    """

    def __init__(self, run: bytes, log: Logger, handle: Handle, lost: Callable[[IslandError], None]) -> None:
        self.run, self.log = run, log
        self.place, self.members = 0, [0]  # until it is connected
        self._handle, self._lost = handle, lost
        self._loop = asyncio.get_running_loop()  # its clock may be read in any thread
        self._streams: dict[int, Stream] = {}
        self._heard_s: dict[int, float] = {}
        self._said_s: float | None = None  # when the others were given the last sign of life
        self._pause_s = 0.0  # the longest time between two
        self._gone: set[int] = set()  # that said farewell
        self._closed: set[int] = set()  # whose connections have ended
        self._server: asyncio.Server | None = None
        self._tasks = Tasks(lambda error: self.fail(IslandError(f"{self.name(self.place)}: its links failed: {error!r}")))
        self._strangers = 0
        self._known, self._complete = asyncio.Event(), asyncio.Event()  # generation and secret are; all are connected
        self._expected = 0
        self._generation = 1
        self._secret = b""
        self._failed = self._ending = False

    async def listen(self, host: str | None) -> int:
        """Listen for other processes; return the port. ``host`` None: at all addresses."""

        def make() -> Stream:
            return Stream(self.run, self._connected)

        if host is not None:
            self._server = await self._loop.create_server(make, host, 0)
        elif socket.has_dualstack_ipv6():
            both = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            self._server = await self._loop.create_server(make, sock=both)
        else:
            self._server = await self._loop.create_server(make, "0.0.0.0", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def connect(
        self, place: int, members: Sequence[int], addresses: Sequence[Address], generation: int, secret: bytes, within_s: float
    ) -> None:
        """Connect to all processes of smaller places, and wait until all others have connected.

        This process has ``place``; ``members`` are all processes' indexes, by place, and ``addresses`` likewise.

        Raises:
            IslandError: some are not there in time.
        """
        self.place, self.members = place, list(members)
        self._generation, self._secret, self._expected = generation, secret, len(addresses) - 1
        self._known.set()
        if not self._expected:
            self._complete.set()
        try:
            async with asyncio.timeout(within_s):
                for other in range(place):
                    await self._connect(other, addresses[other])
                await self._complete.wait()
        except (TimeoutError, OSError, EOFError, MessageError) as error:
            missing = [self.name(other) for other in range(len(addresses)) if other not in self._streams and other != place]
            raise IslandError(
                f"{self.name(place)}: no connection to {missing[0] if missing else 'process ?'} ({type(error).__name__}: "
                f"{error}): let the processes of a learner reach each other on all ports"
            ) from None
        self._tasks.spawn(self._ping())

    def name(self, place: int) -> str:
        """Return how people know the process of a place."""
        return f"process {self.members[place]}" if place < len(self.members) else f"a process of place {place}"

    async def _connect(self, place: int, address: Address) -> None:
        stream = await Stream.connect(*address, self.run)
        try:
            own = Greeting(self.place, self._generation, os.urandom(32))
            await stream.send(own)
            theirs = await stream.receive_one(Greeting)
            await stream.send(Proof(self._mac(own, theirs)))
            self._check(theirs, own, await stream.receive_one(Proof), place)
        except BaseException:
            stream.abort()
            raise
        self._add(place, stream)

    def _connected(self, stream: Stream) -> None:
        if self._strangers >= MAX_STRANGERS:
            stream.abort()
            return
        self._strangers += 1
        self._tasks.spawn(self._admit(stream))

    async def _admit(self, stream: Stream) -> None:
        """Let a process in that knows the secret; drop all others."""
        try:
            async with asyncio.timeout(GREETING_S):
                await self._known.wait()
                theirs = await stream.receive_one(Greeting)
                own = Greeting(self.place, self._generation, os.urandom(32))
                if theirs.place in self._streams or not self.place < theirs.place <= self._expected:
                    raise FormatError(f"{self.name(theirs.place)} is not expected here")
                await stream.send(own)
                self._check(theirs, own, await stream.receive_one(Proof), theirs.place)
                await stream.send(Proof(self._mac(own, theirs)))
        except (OSError, EOFError, MessageError, TimeoutError) as error:
            self.log.warning("connection_refused", reason=f"{type(error).__name__}: {error}")
            stream.abort()
            return
        finally:
            self._strangers -= 1
        self._add(theirs.place, stream)

    def _mac(self, sender: Greeting, other: Greeting) -> bytes:
        said = f"{sender.generation} {sender.place} {other.place} ".encode() + sender.nonce + other.nonce
        return blake3(said, key=self._secret).digest()

    def _check(self, theirs: Greeting, own: Greeting, proof: Proof, place: int) -> None:
        if (theirs.place, theirs.generation) != (place, self._generation):
            raise FormatError(
                f"{self.name(theirs.place)} of generation {theirs.generation}, expected {self.name(place)} of "
                f"{self._generation}"
            )
        if not self._secret or not hmac.compare_digest(proof.mac, self._mac(theirs, own)):
            raise HashError(f"{self.name(theirs.place)} does not know the secret of this generation")

    def _add(self, place: int, stream: Stream) -> None:
        stream.trust()
        self._streams[place], self._heard_s[place] = stream, self._loop.time()
        self._tasks.spawn(self._receive(place, stream))
        if len(self._streams) == self._expected:
            self._complete.set()

    async def _receive(self, place: int, stream: Stream) -> None:
        try:
            while True:
                message, content = await stream.receive(MESSAGES)
                self._heard_s[place] = self._loop.time()
                if isinstance(message, Bye):
                    self._gone.add(place)
                self._handle(place, message, content)
        except IslandError as error:
            self.fail(error)
        except MessageError as error:
            self.fail(IslandError(f"{self.name(place)} sends damaged messages: {error}"))
        except (OSError, EOFError):
            if place not in self._gone:
                self._gone.add(place)
                self.fail(IslandError(f"{self.name(place)} is gone: its connection has ended"))
        finally:
            self._closed.add(place)

    async def _ping(self) -> None:
        while True:
            self._pause_s, self._said_s = self.longest_pause_s, self._loop.time()
            for place in self._streams:
                self.write(place, self.sign_of_life())
            await asyncio.sleep(PING_S)

    sign_of_life: Callable[[], Ping] = staticmethod(lambda: Ping(0, 0, 0))  # replaced by one that counts

    def silent(self, most_s: float) -> int | None:
        """Return a process that was not heard for ``most_s``. Callable from any thread."""
        now_s = self._loop.time()
        for place, heard_s in list(self._heard_s.items()):
            if place not in self._gone and now_s - heard_s > most_s:
                return place
        return None

    def has_ended(self, place: int, most_s: float) -> bool:
        """Whether nothing more comes of a process, be it that it took leave: it was not heard for ``most_s``, or has ended."""
        return place in self._closed or self._loop.time() - self._heard_s[place] > most_s

    @property
    def longest_pause_s(self) -> float:
        """For how long the others had no sign of life of this process, at most. Callable from any thread."""
        return self._pause_s if self._said_s is None else max(self._pause_s, self._loop.time() - self._said_s)

    def fail(self, error: IslandError) -> None:
        """Tell of the first error."""
        if not self._failed and not self._ending:
            self._failed = True
            self._lost(error)

    # ---- sending

    @property
    def others(self) -> list[int]:
        """The other processes."""
        return sorted(self._streams)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes sent to other processes, and received."""
        streams = self._streams.values()
        return sum(stream.bytes_up for stream in streams), sum(stream.bytes_down for stream in streams)

    def write(self, place: int, message: Message) -> None:
        """Send a small message; to this process itself it is handed at once."""
        if place == self.place:
            self._handle(place, message, EMPTY)
        elif place in self._streams:
            self._streams[place].write(message)

    def write_all(self, message: Message) -> None:
        """Send a small message to all, and to this process itself last."""
        self.write_others(message)
        self.write(self.place, message)

    def write_others(self, message: Message) -> None:
        """Send a small message to all others."""
        for place in self.others:
            self.write(place, message)

    async def send(self, place: int, message: Message, content: memoryview) -> None:
        """Send a message with content, which must not change any more, and wait while too much is on its way.

        One that is lost ends the generation by itself.
        """
        with contextlib.suppress(OSError):
            await self._streams[place].send(message, content)

    async def farewell(self, silent_s: float) -> None:
        """Say that nothing more is wanted of the others, and answer them until all have said so, or are silent for so long."""
        self._ending = True
        for place in self.others:
            self._streams[place].write(Bye(self._generation))
        while len(self._gone) < len(self._streams) and self.silent(silent_s) is None:
            await asyncio.sleep(BYE_LOOK_S)

    async def close(self) -> None:
        """Close all connections."""
        self._ending = True
        if self._server is not None:
            self._server.close()
        await self._tasks.end()
        for stream in self._streams.values():
            stream.abort()
