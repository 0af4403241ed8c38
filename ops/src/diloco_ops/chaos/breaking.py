"""Bringing failures about in a live run that ``diloco up`` began, each put right again when its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import BrokerError
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process import files
from diloco.process.observe import Logger
from diloco.transport import Heard
from diloco.wire.subjects import Subjects, sender_of
from diloco_ops.broker.admin import SERVER_AWAY, administrator, limit_bytes, set_limit
from diloco_ops.chaos import revert
from diloco_ops.chaos.revert import FaultJournal
from diloco_ops.failures import Failure, Source, Spread

SLOW_PERIOD_S = 0.2  # shorter than a step, so that a process is slow rather than frozen
STORED_WITHIN_S = 5.0  # a server that is there takes milliseconds
CUT_AGAIN_S = 0.2  # shorter than the pause before a client connects again
HEARD = 256  # messages of different subjects that are kept to be damaged or said again
NATS = "nats"
SERVICES = ("learner", "syncer", "coordinator", "evaluator")
MESSAGES = ("heartbeats", "rounds", "offers")
RECORDS = "records"
STREAMS = ("log", "offers")
AT_ONCE = Spread()


@dataclass(frozen=True)
class Kind:
    """A kind of failure: what it can meet, and how it is drawn."""

    targets: Sequence[str]  # groups of services, or names
    weight: float = 1.0
    duration_s: Spread = AT_ONCE
    values: tuple[tuple[str, Spread], ...] = ()
    embedded: bool = False  # only where the server is the run's own


KINDS: dict[str, Kind] = {
    "kill": Kind(SERVICES, 3.0),
    "freeze": Kind(SERVICES, 2.0, Spread(1.0, 6.0)),
    "slow": Kind(SERVICES, 1.0, Spread(2.0, 6.0), (("factor", Spread(2.0, 6.0)),)),
    "clock": Kind(SERVICES, 1.0, Spread(2.0, 6.0), (("offset_s", Spread(-7200.0, 7200.0)),)),
    "cut": Kind(SERVICES, 1.0, Spread(0.0, 4.0), embedded=True),
    "nats_restart": Kind([NATS], 0.5, embedded=True),
    "nats_kill": Kind([NATS], 0.5, embedded=True),
    "nats_freeze": Kind([NATS], 0.5, Spread(0.5, 4.0), embedded=True),
    "corrupt": Kind(MESSAGES, 1.0, Spread(0.5, 2.0), (("messages", Spread(5.0, 40.0)),)),
    "duplicate": Kind([*MESSAGES, RECORDS], 1.0, Spread(0.5, 2.0), (("messages", Spread(5.0, 40.0)),)),
    "full": Kind(STREAMS, 0.5, Spread(1.0, 4.0)),
}


def sources(kinds: Sequence[str], services: Sequence[str]) -> list[Source]:
    """Return the sources from which a tape of these kinds is drawn, in a run of these services."""
    made = []
    for name in kinds:
        kind = KINDS[name]
        if kind.targets == SERVICES:
            targets = [service for service in services if service.partition("-")[0] in SERVICES]
        else:
            targets = list(kind.targets)
        made.append(Source(name, targets, kind.weight, kind.duration_s, dict(kind.values)))
    return made


class Breaker:
    """Breaks a run's services, its server and its messages.

    Args:
        directory: of the run.
        names: of its services, as in ``services/*.pid``.
        seed: of what damaged messages look like.
    """

    def __init__(
        self, directory: Path, run: str, transport: NatsTransport, names: Sequence[str], seed: int, log: Logger
    ) -> None:
        self.directory, self.names, self.log = directory, list(names), log
        self.subjects = Subjects(run)
        self.journal = FaultJournal(directory)
        self._transport, self._chance = transport, random.Random(seed)
        self._heard: OrderedDict[str, bytes] = OrderedDict()
        self.damaged: set[str] = set()  # senders of offers that were damaged, and subjects of other messages
        self.repeated: set[int] = set()  # sequences in the log's stream of entries that were stored once more

    async def listen(self) -> None:
        """Begin to keep messages, to be damaged and said again."""
        for subject in (self.subjects.heartbeat(), self.subjects.round()):
            await self._transport.subscribe(subject, self._hear)

    async def _hear(self, message: Heard) -> None:
        self._heard[message.subject] = message.data
        self._heard.move_to_end(message.subject)
        if len(self._heard) > HEARD:
            self._heard.popitem(last=False)

    def meant(self, failure: Failure) -> list[str]:
        """Return the targets of a failure in this run."""
        kind = KINDS[failure.kind]
        return failure.targets(self.names if kind.targets == SERVICES else kind.targets)

    async def break_(self, failure: Failure, target: str) -> None:
        """Bring a failure about at one target, and revert it: returns when its time is over.

        A target that is away (a service that is being restarted) is left alone.

        Raises:
            SERVER_AWAY: one of these, and the fault is reverted as soon as the server is back.
        """
        ways: dict[str, Callable[[Failure, str], Awaitable[None]]] = {
            "kill": self._signal_once(signal.SIGKILL),
            "nats_kill": self._signal_once(signal.SIGKILL),
            "nats_restart": self._signal_once(signal.SIGTERM),
            "freeze": self._freeze,
            "nats_freeze": self._freeze,
            "slow": self._slow,
            "clock": self._clock,
            "cut": self._cut,
            "corrupt": self._corrupt,
            "duplicate": self._duplicate,
            "full": self._full,
        }
        self.log.info("breaking", failure=failure.kind, target=target, duration_s=failure.duration_s, **failure.values)
        await ways[failure.kind](failure, target)

    # ---- processes

    def _process(self, name: str) -> tuple[int, str] | None:
        """Return a service's pid and when it began; None if it is away."""
        try:
            pid = int((self.directory / "services" / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None
        return (pid, revert.began(pid))

    def _signal_once(self, number: signal.Signals) -> Callable[[Failure, str], Awaitable[None]]:
        async def send(failure: Failure, target: str) -> None:
            process = self._process(target)
            if process is not None:
                revert.send(*process, number)

        return send

    @asynccontextmanager
    async def _reverted(self, **entry: Any) -> AsyncIterator[None]:
        """Note a fault, and revert it at the end, whatever happens."""
        number = self.journal.add(**entry)
        try:
            yield
        finally:
            await revert.revert(entry, self._transport)
            self.journal.drop(number)

    async def _freeze(self, failure: Failure, target: str) -> None:
        process = self._process(target)
        if process is not None:
            async with self._reverted(what="frozen", pid=process[0], began=process[1]):
                revert.send(*process, signal.SIGSTOP)
                await asyncio.sleep(failure.duration_s)

    async def _slow(self, failure: Failure, target: str) -> None:
        """Let a process run only one ``factor``-th of the time."""
        process, running_s = self._process(target), SLOW_PERIOD_S / max(1.0, failure.number("factor", 2.0))
        if process is None:
            return
        clock = asyncio.get_running_loop().time
        ends_s = clock() + failure.duration_s
        async with self._reverted(what="frozen", pid=process[0], began=process[1]):
            while clock() < ends_s and revert.send(*process, signal.SIGSTOP):
                await asyncio.sleep(SLOW_PERIOD_S - running_s)
                revert.send(*process, signal.SIGCONT)
                await asyncio.sleep(running_s)

    async def _clock(self, failure: Failure, target: str) -> None:
        file, offset_s = self.directory / "services" / f"{target}.clock", failure.number("offset_s", 3600.0)

        def write(draft: Path) -> None:
            draft.write_text(f"{offset_s}\n")

        async with self._reverted(what="clock", file=str(file)):
            files.replace(file, write)
            await asyncio.sleep(failure.duration_s)

    # ---- connections

    async def _cut(self, failure: Failure, target: str) -> None:
        """Have the server cut a service's connections, again and again while the failure lasts."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + failure.duration_s
        with contextlib.suppress(BrokerError, OSError):  # the server itself is away: everybody is cut off
            async with administrator((self.directory / "nats" / "admin.url").read_text().strip()) as admin:
                while True:
                    await admin.cut({f"{target}-control", f"{target}-bulk"})
                    if clock() >= ends_s:
                        return
                    await asyncio.sleep(CUT_AGAIN_S)

    # ---- messages

    async def _corrupt(self, failure: Failure, target: str) -> None:
        await self._say_again(failure, target, damaged=True)

    async def _duplicate(self, failure: Failure, target: str) -> None:
        await self._say_again(failure, target, damaged=False)

    async def _say_again(self, failure: Failure, target: str, *, damaged: bool) -> None:
        """Repeat messages on their own subjects, spread over the failure's duration."""
        count = max(1, round(failure.number("messages", 10.0)))
        for _ in range(count):
            with contextlib.suppress(*SERVER_AWAY):
                subject, data = await self._some_message(target)
                if data and damaged:
                    self.damaged.add(sender_of(subject) or subject)
                    data = self._damage(data)
                if data and target == RECORDS:
                    stored = self._transport.append(
                        subject, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=STORED_WITHIN_S
                    )
                    self.repeated.add(await stored)
                elif data:
                    await self._transport.publish(subject, data)
            await asyncio.sleep(failure.duration_s / count)

    async def _some_message(self, target: str) -> tuple[str, bytes]:
        """Return a message of a group, as it was said or stored last; empty if there is none."""
        marks = {"heartbeats": ".heartbeat.", "rounds": ".round."}
        if target in marks:
            said = [(subject, data) for subject, data in self._heard.items() if marks[target] in subject]
            return self._chance.choice(said) if said else ("", b"")
        stream, every = (
            (self.subjects.log_stream, self.subjects.record("*"))
            if target == RECORDS
            else (self.subjects.offer_stream, self.subjects.offer("*"))
        )
        there = await streams.subjects(self._transport, stream, every)
        if not there:
            return "", b""
        subject = self._chance.choice(sorted(there))
        stored = await self._transport.last(stream, subject)
        return (subject, stored.data) if stored else ("", b"")

    def _damage(self, data: bytes) -> bytes:
        """Flip some bits, or cut the end off."""
        if self._chance.random() < 0.25:
            return data[: int(len(data) * self._chance.random())]
        damaged = bytearray(data)
        for _ in range(1 + int(8 * self._chance.random())):
            damaged[int(len(damaged) * self._chance.random())] ^= 1 << int(8 * self._chance.random())
        return bytes(damaged)

    async def _full(self, failure: Failure, target: str) -> None:
        """Lower a stream's limit to the bytes that it holds."""
        stream = self.subjects.log_stream if target == "log" else self.subjects.offer_stream
        before = await limit_bytes(self._transport, stream)
        async with self._reverted(what="limit", stream=stream, max_bytes=before):
            await set_limit(self._transport, stream, lambda held_bytes: max(1, held_bytes))
            await asyncio.sleep(failure.duration_s)
