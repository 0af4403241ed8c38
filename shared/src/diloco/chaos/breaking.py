"""Bringing failures about in a live run that ``diloco up`` began, each put right again when its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.aio.client
import nats.errors

from diloco import files
from diloco.chaos import undo
from diloco.chaos.undo import Journal
from diloco.core.failures import Failure, Source, Spread
from diloco.errors import BrokerError
from diloco.nats.transport import NatsTransport
from diloco.observe import Logger
from diloco.transport import Heard
from diloco.wire.subjects import Subjects

SLOW_PERIOD_S = 0.2
CUT_AGAIN_S = 0.2
HEARD = 256  # messages of different subjects that are kept to be damaged or said again
NATS = "nats"
SERVICES = ("learner", "syncer", "coordinator", "evaluator")
MESSAGES = ("pulses", "rounds", "offers")
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
    "duplicate": Kind([*MESSAGES, "records"], 1.0, Spread(0.5, 2.0), (("messages", Spread(5.0, 40.0)),)),
    "full": Kind(STREAMS, 0.5, Spread(1.0, 4.0)),
}


def sources(kinds: Sequence[str], services: Sequence[str]) -> list[Source]:
    """What a tape of these kinds is drawn from, in a run of these services."""
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
        self.journal = Journal(directory)
        self._transport, self._chance = transport, random.Random(seed)
        self._heard: OrderedDict[str, bytes] = OrderedDict()

    async def listen(self) -> None:
        """Begin to keep what is said, so that it can be damaged and said again."""
        for subject in (self.subjects.pulse(), self.subjects.round()):
            await self._transport.subscribe(subject, self._hear)

    async def _hear(self, message: Heard) -> None:
        self._heard[message.subject] = message.data
        self._heard.move_to_end(message.subject)
        if len(self._heard) > HEARD:
            self._heard.popitem(last=False)

    def meant(self, failure: Failure) -> list[str]:
        """What a failure meets here."""
        kind = KINDS[failure.kind]
        return failure.targets(self.names if kind.targets == SERVICES else kind.targets)

    async def break_(self, failure: Failure, target: str) -> None:
        """Bring a failure about at one target, and put it right: returns when its time is over.

        What is already away (a service that is being restarted) is left alone.

        Raises:
            BrokerError, nats.errors.Error, TimeoutError: the server was away; what was done is put right as soon as it is back.
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
        """A service's pid and when it began; None if it is away."""
        try:
            pid = int((self.directory / "services" / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None
        return (pid, undo.began(pid))

    def _signal_once(self, number: signal.Signals) -> Callable[[Failure, str], Awaitable[None]]:
        async def send(failure: Failure, target: str) -> None:
            process = self._process(target)
            if process is not None:
                undo.send(*process, number)

        return send

    @asynccontextmanager
    async def _undone(self, **entry: Any) -> AsyncIterator[None]:
        """Put something right at the end, whatever happens."""
        number = self.journal.add(**entry)
        try:
            yield
        finally:
            await undo.put_right(entry, self._transport)
            self.journal.drop(number)

    async def _freeze(self, failure: Failure, target: str) -> None:
        process = self._process(target)
        if process is not None:
            async with self._undone(what="frozen", pid=process[0], began=process[1]):
                undo.send(*process, signal.SIGSTOP)
                await asyncio.sleep(failure.duration_s)

    async def _slow(self, failure: Failure, target: str) -> None:
        """Let a process run only one ``factor``-th of the time."""
        process, running_s = self._process(target), SLOW_PERIOD_S / max(1.0, failure.number("factor", 2.0))
        if process is None:
            return
        clock = asyncio.get_running_loop().time
        ends_s = clock() + failure.duration_s
        async with self._undone(what="frozen", pid=process[0], began=process[1]):
            while clock() < ends_s and undo.send(*process, signal.SIGSTOP):
                await asyncio.sleep(SLOW_PERIOD_S - running_s)
                undo.send(*process, signal.SIGCONT)
                await asyncio.sleep(running_s)

    async def _clock(self, failure: Failure, target: str) -> None:
        file, offset_s = self.directory / "services" / f"{target}.clock", failure.number("offset_s", 3600.0)

        def write(draft: Path) -> None:
            draft.write_text(f"{offset_s}\n")

        async with self._undone(what="clock", file=str(file)):
            files.replace(file, write)
            await asyncio.sleep(failure.duration_s)

    # ---- connections

    async def _cut(self, failure: Failure, target: str) -> None:
        """Have the server cut a service's connections, again and again while the failure lasts."""
        try:
            url = (self.directory / "nats" / "admin.url").read_text().strip()
            admin = await nats.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=_quiet)
        except (OSError, nats.errors.Error, TimeoutError):
            return  # the server itself is away: everybody is cut off
        clock = asyncio.get_running_loop().time
        ends_s = clock() + failure.duration_s
        try:
            while True:
                await _kick(admin, {f"{target}-control", f"{target}-bulk"})
                if clock() >= ends_s:
                    return
                await asyncio.sleep(CUT_AGAIN_S)
        except (nats.errors.Error, TimeoutError):
            return
        finally:
            await admin.close()

    # ---- messages

    async def _corrupt(self, failure: Failure, target: str) -> None:
        await self._say_again(failure, target, damaged=True)

    async def _duplicate(self, failure: Failure, target: str) -> None:
        await self._say_again(failure, target, damaged=False)

    async def _say_again(self, failure: Failure, target: str, *, damaged: bool) -> None:
        """Say what was said once more on its own subject, spread over the failure's duration."""
        count = max(1, round(failure.number("messages", 10.0)))
        for _ in range(count):
            with contextlib.suppress(BrokerError, nats.errors.Error, TimeoutError):
                subject, data = await self._some_message(target)
                if data:
                    await self._transport.publish(subject, self._damage(data) if damaged else data)
            await asyncio.sleep(failure.duration_s / count)

    async def _some_message(self, target: str) -> tuple[str, bytes]:
        """A message of a group, as it was said or stored last; empty if there is none."""
        marks = {"pulses": ".pulse.", "rounds": ".round."}
        if target in marks:
            said = [(subject, data) for subject, data in self._heard.items() if marks[target] in subject]
            return self._chance.choice(said) if said else ("", b"")
        api = self._transport.control.jetstream(timeout=2)
        stream, every = (
            (self.subjects.log_stream, self.subjects.record("*"))
            if target == "records"
            else (self.subjects.offer_stream, self.subjects.offer("*"))
        )
        state = (await api.stream_info(stream, subjects_filter=every)).state
        if not state.subjects:
            return "", b""
        subject = self._chance.choice(sorted(state.subjects))
        stored = await self._transport.last(stream, subject)
        return (subject, stored.data) if stored else ("", b"")

    def _damage(self, data: bytes) -> bytes:
        """Some bits flipped, or the end cut off."""
        if self._chance.random() < 0.25:
            return data[: int(len(data) * self._chance.random())]
        damaged = bytearray(data)
        for _ in range(1 + int(8 * self._chance.random())):
            damaged[int(len(damaged) * self._chance.random())] ^= 1 << int(8 * self._chance.random())
        return bytes(damaged)

    async def _full(self, failure: Failure, target: str) -> None:
        """Lower a stream's limit to what it holds."""
        stream = self.subjects.log_stream if target == "log" else self.subjects.offer_stream
        info = await self._transport.control.jetstream(timeout=5).stream_info(stream)
        async with self._undone(what="limit", stream=stream, max_bytes=int(info.config.max_bytes or -1)):
            await undo.set_limit(self._transport, stream, lambda held_bytes: max(1, held_bytes))
            await asyncio.sleep(failure.duration_s)


async def _kick(admin: nats.aio.client.Client, names: set[str]) -> None:
    """Have the server close the connections of these names."""
    answer = await admin.request("$SYS.REQ.SERVER.PING.CONNZ", json.dumps({"limit": 4096}).encode(), timeout=2)
    seen = json.loads(answer.data)
    for connection in seen["data"]["connections"]:
        if connection.get("name") in names:
            subject = f"$SYS.REQ.SERVER.{seen['server']['id']}.KICK"
            await admin.request(subject, json.dumps({"cid": connection["cid"]}).encode(), timeout=2)


async def _quiet(error: Exception) -> None:
    """The server may be killed in the middle of it."""
