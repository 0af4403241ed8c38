"""A world in virtual time: its scheduler, servers and network, and the processes that come and go in it.

Nothing goes wrong here, and a message takes a millisecond. Who wants faults, overrides the methods that say so: the tests'
simulation does.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from diloco.testing.loop import ProcessLoop, Scheduler
from diloco.testing.server import VirtualServer, VirtualStream, matches
from diloco.testing.virtual_transport import CONTROL, Subscription, VirtualMessage, VirtualTransport, Wires, deliver
from diloco.wire.grants import SignedGrant

DELAY_S = 0.001  # to or from a server


class VirtualProcess:
    """One service's process, which may come back after its end. ``serve`` is all that it does."""

    def __init__(self, world: World, name: str, region: str, serve: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self.world, self.name, self.region, self._serve = world, name, region, serve
        self.generation = 0
        self.clock_s = 0.0  # the wall clock at the beginning of time
        self.alive = self.ended = False  # ended: by itself, and for good

    def start(self) -> None:
        """Begin a new process of this name."""
        if self.alive or self.ended:
            return
        self.generation += 1
        self.alive = True
        self.rng = random.Random(self.world.rng.getrandbits(64))
        self.loop = self.world.new_loop(self.rng)
        self.transport = VirtualTransport(self, self.region)
        self.at_start()
        self.loop.call_soon(self._begin)

    def at_start(self) -> None:
        """Set what each process of this name begins with."""

    def at_end(self, error: BaseException | None) -> None:
        """Go on from the end of the process: an error ends the world."""
        if error is not None:
            self.world.failed(error)
        self.ended = True
        self.world.look_for_end()

    def forget(self) -> None:
        """Cut it off: it neither hears nor is heard."""
        self.alive = False
        self.world.subscriptions = [s for s in self.world.subscriptions if s.transport is not self.transport]

    def reaches(self, server: str) -> bool:
        """Whether it and a server can talk: its region's, another one's, or the control store's."""
        return True

    @property
    def hears(self) -> bool:
        """Whether it can talk to others, at least to those in its region."""
        return True

    def crash(self, why: str) -> None:
        """Kill it at once."""
        if self.alive:
            self.loop.dead = True
            self.forget()

    def as_writer(self) -> Any:
        """Return the process that writes to the server now, for those who watch."""
        return self.name

    def wall_s(self) -> float:
        """Return Unix time by its own clock."""
        return self.clock_s + self.world.now_s

    def _begin(self) -> None:
        self.task = self.loop.create_task(self._serve(self))
        self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self.forget()
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        self.at_end(error)


class World:
    """Servers by region, and all who talk to them. ``processes`` is filled by its maker."""

    def __init__(self, seed: int, regions: Sequence[str] = ()) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler()
        self.stats: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.servers = {name: VirtualServer(partial(self._stored, name)) for name in dict.fromkeys((CONTROL, *regions))}
        self.control = self.servers[CONTROL]
        self.authority: str | None = None  # of grants
        self.grants: dict[str, SignedGrant] = {}  # by the learner's process
        self.wires = Wires()
        self.rewinds = 0
        self.subscriptions: list[Subscription] = []
        self.processes: list[Any] = []
        self.writer: Any = None  # of what is being stored
        self._waiting: list[tuple[ProcessLoop, asyncio.Future[Any], VirtualStream, Sequence[str]]] = []
        self.loops: list[ProcessLoop] = []
        self.loop = self.new_loop(self.rng)

    # ---- time and chance

    def new_loop(self, rng: random.Random) -> ProcessLoop:
        """Return the loop of a new process."""
        loop = ProcessLoop(self.scheduler, rng, self.failed)  # type: ignore[abstract]  # files and sockets are not simulated
        self.loops.append(loop)
        return loop

    @property
    def now_s(self) -> float:
        """The time."""
        return self.scheduler.now_s

    def later(self, delay_s: float, action: Callable[..., object], *args: Any) -> None:
        """Have something happen."""
        self.loop.call_later(delay_s, action, *args)

    def delay_s(self) -> float:
        """Return how long a message takes to or from the server."""
        return DELAY_S

    def append_s(self, process: Any, subject: str) -> float:
        """Return how much longer than a message an append takes to the server."""
        return 0.0

    def deliveries_s(self) -> list[float]:
        """Return when a message comes to a subscriber without an acknowledgement: perhaps never, or twice."""
        return [2 * DELAY_S]

    def fate(self, process: Any, what: str) -> str:
        """Return the fate of a durable action."""
        return "plain"

    def breaks_batch(self) -> float | None:
        """Return the share of a batch that is stored before it breaks off, if it does."""
        return None

    # ---- messages

    def answer(self, loop: ProcessLoop, settle: Callable[..., None], *args: Any) -> None:
        """Bring the server's answer to a process."""
        loop.call_later(self.delay_s(), settle, *args)

    def parts_ways(self, one: str, other: str) -> bool:
        """Whether messages between two regions are lost."""
        return False

    def publish(self, message: VirtualMessage, region: str, *, at_home: bool = False) -> None:
        """Bring a message to all who hear it where it comes from; ``at_home``: over that region's own server."""
        for subscription in self.subscriptions:
            there = subscription.transport.process.region
            near = there == region or not (at_home or self.parts_ways(there, region))
            if near and matches(subscription.pattern, message.subject):
                for delay_s in self.deliveries_s():
                    subscription.transport.loop.call_later(delay_s, deliver, subscription, message)

    # ---- the servers

    def stored(self, region: str, stream: str, subject: str, data: bytes, sequence: int) -> None:
        """Hear of a message that a region's server has stored for :attr:`writer`."""

    def key_written(self, process: Any, generation: int, key: str, before: bytes | None, value: bytes, revision: int) -> None:
        """Hear of a key that was set."""

    def purged(self, stream: VirtualStream, pattern: str) -> None:
        """Hear of messages that were dropped."""

    async def news(self, loop: ProcessLoop, stream: VirtualStream, patterns: Sequence[str]) -> None:
        """Wait until something new may be there for a reader."""
        future = loop.create_future()
        self._waiting.append((loop, future, stream, patterns))
        await future

    def wake_all(self) -> None:
        """Have every reader look again."""
        for loop, future, _, _ in self._waiting:
            loop.call_later(self.delay_s(), _wake, future)
        self._waiting = []

    def _stored(self, region: str, stream: str, subject: str, data: bytes, sequence: int) -> None:
        self.stored(region, stream, subject, data, sequence)
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            loop, future, held, patterns = entry
            if held.name == stream and held.region == region and any(matches(pattern, subject) for pattern in patterns):
                loop.call_later(self.delay_s(), _wake, future)
            else:
                self._waiting.append(entry)

    # ---- the end

    def failed(self, error: BaseException | str) -> None:
        """Something is wrong: the world ends."""
        if self.error is None:
            self.error = RuntimeError(error) if isinstance(error, str) else error
        self.scheduler.stopped = True

    def look_for_end(self) -> None:
        """End when all processes have."""
        if all(process.ended for process in self.processes):
            self.scheduler.stopped = True

    def dispose(self) -> None:
        """Close what processes left behind."""
        for loop in self.loops:
            loop.dispose()


def _wake(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)
