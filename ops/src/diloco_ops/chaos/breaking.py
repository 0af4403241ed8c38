"""Failures in a live run of ``diloco up``, each reverted after its duration."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diloco.errors import BrokerError
from diloco.nats import streams
from diloco.nats.connection import NatsLink
from diloco.nats.transport import NatsTransport
from diloco.process import files
from diloco.process.observe import Logger
from diloco.transport import Heard
from diloco.wire.subjects import Subjects, sender_of
from diloco_ops.broker.admin import SERVER_AWAY, administrator, limit_bytes, set_limit
from diloco_ops.chaos import revert
from diloco_ops.chaos.kinds import NATS, RECORDS
from diloco_ops.chaos.revert import FaultJournal
from diloco_ops.failures import Failure
from diloco_ops.wan import control

SLOW_PERIOD_S = 0.2  # shorter than a step, so that a process is slow rather than frozen
STORED_WITHIN_S = 5.0  # a server that is there takes milliseconds
CUT_AGAIN_S = 0.2  # shorter than the pause before a client connects again
HEARD = 256  # messages of different subjects that are kept to be damaged or said again


class Breaker:
    """Breaks a run's services, its servers, the links between them, and its messages.

    Args:
        directory: of the run.
        transports: to each region's server, by region; in a run without regions one, of no name.
        wan_control: where the links between regions are commanded, if they are emulated.
        seed: of what damaged messages look like.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        transports: Mapping[str, NatsTransport],
        wan_control: str | None,
        seed: int,
        log: Logger,
    ) -> None:
        self.directory, self.log = directory, log
        self.subjects = Subjects(run)
        self.journal = FaultJournal(directory)
        self._transports, self._wan_control, self._chance = dict(transports), wan_control, random.Random(seed)
        self._heard: OrderedDict[str, bytes] = OrderedDict()
        self.damaged: set[str] = set()  # senders of offers that were damaged, and subjects of other messages
        self.repeated: set[int] = set()  # sequences in the log's stream of entries that were stored once more

    async def listen(self) -> None:
        """Begin to keep messages, to be damaged and said again."""
        transport = next(iter(self._transports.values()))
        for subject in (self.subjects.heartbeat(), self.subjects.round()):
            await transport.subscribe(subject, self._hear)

    async def _hear(self, message: Heard) -> None:
        self._heard[message.subject] = message.data
        self._heard.move_to_end(message.subject)
        if len(self._heard) > HEARD:
            self._heard.popitem(last=False)

    async def break_(self, failure: Failure, target: str) -> None:
        """Cause a failure at one target, and revert it after its duration.

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
            "link_cut": self._cut_links,
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
    async def _reverted(self, link: NatsLink | None = None, **entry: Any) -> AsyncIterator[None]:
        """Note a fault, and revert it at the end, whatever happens; ``link``: to the server that it takes, if any."""
        number = self.journal.add(**entry)
        try:
            yield
        finally:
            await revert.revert(entry, link)
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
        async with asyncio.TaskGroup() as group:
            for url in [file.read_text().strip() for file in self.directory.glob(f"{NATS}*/admin.url")]:
                group.create_task(self._cut_at(url, {f"{target}-control", f"{target}-bulk"}, ends_s))

    async def _cut_at(self, admin_url: str, names: Collection[str], ends_s: float) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(BrokerError, OSError):  # the server itself is away: everybody is cut off
            async with administrator(admin_url) as admin:
                while True:
                    await admin.cut(names)
                    if clock() >= ends_s:
                        return
                    await asyncio.sleep(CUT_AGAIN_S)

    async def _cut_links(self, failure: Failure, target: str) -> None:
        """Cut a region's links, or one in one direction, and heal them."""
        assert self._wan_control is not None
        links = [target.partition("/")[2]]
        async with self._reverted(what="links", at=self._wan_control, links=links):
            await asyncio.to_thread(revert.command, self._wan_control, control.Cut(links))
            await asyncio.sleep(failure.duration_s)

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
                transport = self._chance.choice(sorted(self._transports.items()))[1]
                subject, data = await self._some_message(transport, target)
                if data and damaged:
                    self.damaged.add(sender_of(subject) or subject)
                    data = self._damage(data)
                if data and target == RECORDS:
                    stored = transport.append(subject, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=STORED_WITHIN_S)
                    self.repeated.add(await stored)
                elif data and target == "offers":  # which the streams' server stores
                    await transport.bulk.publish(subject, data)
                elif data:
                    await transport.publish(subject, data)
            await asyncio.sleep(failure.duration_s / count)

    async def _some_message(self, transport: NatsTransport, target: str) -> tuple[str, bytes]:
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
        there = await streams.subjects(transport, stream, every)
        if not there:
            return "", b""
        subject = self._chance.choice(sorted(there))
        stored = await transport.last(stream, subject)
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
        kept, _, region = target.partition("/")
        stream, transport = self.subjects.log_stream if kept == "log" else self.subjects.offer_stream, self._transports[region]
        before = await limit_bytes(transport, stream)
        async with self._reverted(transport, what="limit", stream=stream, max_bytes=before, region=region):
            await set_limit(transport, stream, lambda held_bytes: max(1, held_bytes))
            await asyncio.sleep(failure.duration_s)
