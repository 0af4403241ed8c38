"""Measure a NATS server. Nothing of it stays there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from diloco.control.hearing import check_subject
from diloco.errors import BrokerError, FormatError, MessageError
from diloco.nats import streams
from diloco.nats.clock import ClockOffset, offset
from diloco.nats.streams import OTHER_CONFIGURATION
from diloco.wire import framing
from diloco.wire.control import CoordinatorHeartbeat, Heartbeat, ShardHeartbeat
from diloco.wire.subjects import Subjects
from diloco_ops.broker.probe import LOOK_S, NotAllowedError, Probe
from diloco_ops.doctor.access import RequiredAccess
from diloco_ops.doctor.verdicts import Members, Speed, Storage

PINGS = 5
APPENDS, APPENDS_S = 30, 1.0  # at most so many, and begun within so long
SCRATCH_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
FIRST_BURST_BYTES = 1 << 16
MOST_BURST_BYTES = 1 << 22
BURSTS_S = 3.0  # of one direction
BURST_TIMEOUT_S = 10.0  # of a burst; 64 KiB in so long is no link for a run
ECHOES = 4  # the bytes that come back are so many times those that go there, so that the way back is the one measured


@dataclass(frozen=True)
class ServerPlace:
    """A server, or several of a cluster: its URLs, and the access that the service needs there."""

    name: str
    urls: tuple[str, ...]
    access: RequiredAccess
    control: bool = False  # the bucket is here
    bulk: bool = False  # streams are here
    far: bool = False  # of another region
    shortened: str = ""  # stream whose old entries the service drops here


def number(values: Any, *names: str) -> int:
    """Return the number that nested objects hold under these names; 0 if it is none."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, int) else 0


async def storage(probe: Probe, run: str) -> Storage:
    """Return the account's use of a server's disk, and the part of the run's streams.

    Raises:
        BrokerError: JetStream does not answer.
    """
    account = await probe.api("INFO")
    subjects = Subjects(run)
    names = {"log": subjects.log_stream, "offers": subjects.offer_stream, "archive": subjects.archive_stream}
    stored = {}
    for name, stream in names.items():
        with contextlib.suppress(BrokerError):  # not allowed to look: taken as not there
            stored[name] = number(await probe.api(f"STREAM.INFO.{stream}"), "state", "bytes")
    limit = number(account, "limits", "max_storage")
    return Storage(number(account, "storage"), limit if limit > 0 else None, stored)


async def wider_limits(probe: Probe, run: str) -> dict[str, list[str]]:
    """Return by stream of a run, as far as this identity may look, the limits that are wider than the run sets them.

    Raises:
        BrokerError: JetStream does not answer.
    """
    subjects, found = Subjects(run), dict[str, list[str]]()
    for stream in (subjects.log_stream, subjects.offer_stream, subjects.archive_stream, f"KV_{subjects.bucket}"):
        with contextlib.suppress(NotAllowedError):
            config = (await probe.api(f"STREAM.INFO.{stream}")).get("config")
            if isinstance(config, dict):
                found[stream] = streams.wider_limits(config)
    return found


async def clock(probe: Probe, stream: str) -> ClockOffset | None:
    """Return how far this machine's clock is ahead of a server's.

    None: there is no such stream, whose description tells the server's time.

    Raises:
        BrokerError: JetStream does not answer.
    """
    began_s, sent_s = time.perf_counter(), time.time()
    answer = await probe.api(f"STREAM.INFO.{stream}")
    return offset(answer, sent_s, time.perf_counter() - began_s)


async def round_trip_s(probe: Probe) -> float:
    """Return the least of a few round trips.

    Raises:
        BrokerError: no answer.
    """
    return min([await probe.round_trip_s() for _ in range(PINGS)])


async def speed(probe: Probe) -> Speed:
    """Measure the round trip, and the rates there and back, by messages to oneself.

    Bursts grow from 64 KiB until the next one would take too long, to 4 MiB, and the last one is what counts: no more is asked
    of an unknown link than it carries in about ``BURSTS_S`` each way.

    Raises:
        BrokerError: no answer.
    """
    rtt_s = await round_trip_s(probe)
    there = await _Bursts(probe, probe.new_subject(), probe.new_subject(), 0).rate(rtt_s)
    subject = probe.new_subject()
    back = await _Bursts(probe, subject, subject, ECHOES).rate(rtt_s)
    return Speed(rtt_s, there, back)


class _Bursts:
    """Messages to a server, of which the last one comes back; or, with ``echoes``, all of them so many times."""

    def __init__(self, probe: Probe, subject: str, heard: str, echoes: int) -> None:
        self._probe, self._subject, self._heard, self._echoes = probe, subject, heard, echoes
        self._wanted = self._came = 0
        self._news = asyncio.Event()

    async def rate(self, rtt_s: float) -> float | None:
        """Return the bytes a second that go to the server, or with echoes that come from it; None: nothing comes back."""
        async with self._probe.listening([self._heard] * max(1, self._echoes), self._count):
            return await self._grow(rtt_s)

    async def _grow(self, rtt_s: float) -> float | None:
        times, rate, began_s = max(1, self._echoes), None, time.perf_counter()
        moved_bytes = FIRST_BURST_BYTES
        while moved_bytes <= MOST_BURST_BYTES:
            sent_s = time.perf_counter()
            try:
                if not await self._burst(moved_bytes // times):
                    return None
            except (BrokerError, TimeoutError):
                return rate
            now_s = time.perf_counter()
            rate = moved_bytes / max(now_s - sent_s - rtt_s, 1e-6)
            if now_s - began_s + 2 * (now_s - sent_s) > BURSTS_S:
                break
            moved_bytes *= 2
        return rate

    async def _burst(self, size_bytes: int) -> bool:
        """Send so many bytes, and wait for all that comes back. Return whether that is allowed."""
        self._came, self._wanted = 0, size_bytes * self._echoes or 1
        self._news.clear()
        for at in range(0, size_bytes, CHUNK_BYTES):
            await self._probe.publish(self._subject, b"\0" * min(CHUNK_BYTES, size_bytes - at))
        if not self._echoes:
            await self._probe.publish(self._heard, b"\0")
        async with asyncio.timeout(BURST_TIMEOUT_S):
            while self._came < self._wanted:
                if self._probe.forbids(self._subject) or self._probe.forbids(self._heard):
                    return False
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_S)
                self._news.clear()
        return True

    async def _count(self, message: Any) -> None:
        self._came += len(message.data)
        if self._came >= self._wanted:
            self._news.set()


@asynccontextmanager
async def scratch(probe: Probe, name: str, kind: Literal["file", "memory"], max_bytes: int) -> AsyncIterator[str]:
    """Make a stream for as long as it is needed, and yield the subject that it takes.

    Raises:
        NotAllowedError: this identity may make none.
        BrokerError: the server would not make it.
    """
    stream, subject = f"DILOCO_DOCTOR_{name}_{kind}", f"diloco-doctor.{name}.{kind}"
    config = {"name": stream, "subjects": [subject], "storage": kind, "max_bytes": max_bytes, "num_replicas": 1}
    answer = await probe.api(f"STREAM.CREATE.{stream}", config)
    if number(answer, "error", "err_code") == OTHER_CONFIGURATION:  # that of an examination that was killed
        await probe.api(f"STREAM.DELETE.{stream}")
        answer = await probe.api(f"STREAM.CREATE.{stream}", config)
    error = answer.get("error")
    if isinstance(error, dict):
        raise BrokerError(f"{error.get('description')} (code {error.get('err_code')})")
    try:
        yield subject
    finally:
        with contextlib.suppress(BrokerError):
            await probe.api(f"STREAM.DELETE.{stream}")


async def append_s(probe: Probe, subjects: Iterable[str]) -> list[float]:
    """Return the least time of an append to each stream, by its subject.

    They take turns, so that other load meets all alike.

    Raises:
        BrokerError: one was not acknowledged.
    """
    least, first_s = dict.fromkeys(subjects, math.inf), time.perf_counter()
    for _ in range(APPENDS):
        if time.perf_counter() - first_s > APPENDS_S:
            break
        for subject, before in least.items():
            began_s = time.perf_counter()
            await probe.ask(subject, b"\0" * 256)
            least[subject] = min(before, time.perf_counter() - began_s)
    return list(least.values())


async def forbidden(probe: Probe, access: RequiredAccess) -> list[str]:
    """Return the parts of the required access that a server denies.

    A message for a stream is sent as if for a stream that there is not, so that none takes it; a request is empty.
    """
    async with probe.listening(access.listens, _ignore):
        pass
    await asyncio.gather(*(_try_to_store(probe, subject) for subject in access.stores))
    await _send(probe, access.sends)
    return [f"to listen to {subject}" for subject in access.listens if probe.forbids(subject)] + [
        f"to write to {subject}" for subject in (*access.stores, *access.sends) if probe.forbids(subject)
    ]


async def excessive(probe: Probe, access: RequiredAccess) -> list[str]:
    """Return the subjects that the identity may send to, and should not."""
    await asyncio.gather(*(_try_to_store(probe, subject) for subject in access.excess_stores))
    await _send(probe, access.excess)
    return [subject for subject in (*access.excess_stores, *access.excess) if not probe.forbids(subject)]


async def may_shorten(probe: Probe, stream: str) -> bool:
    """Whether the identity may drop entries of a stream: it asks to drop those of a subject that the stream does not have."""
    subject = f"$JS.API.STREAM.PURGE.{stream}"
    await probe.publish(subject, json.dumps({"filter": "diloco-doctor", "seq": 1}).encode())  # an empty request drops all
    await _wait_for_refusals(probe)
    return not probe.forbids(subject)


async def _send(probe: Probe, subjects: Iterable[str]) -> None:
    """Send empty messages, and wait until the server has refused those that it does."""
    for subject in subjects:
        await probe.publish(subject, b"")
    await _wait_for_refusals(probe)


async def _wait_for_refusals(probe: Probe) -> None:
    """Wait until the server has refused what it does of the messages sent."""
    for _ in range(2):  # nats-py writes a ping at once, ahead of what waits to be written
        await probe.round_trip_s()


async def _ignore(message: Any) -> None:
    """Hear nothing: only whether it is allowed counts."""


async def _try_to_store(probe: Probe, subject: str) -> None:
    with contextlib.suppress(BrokerError):
        await probe.ask(subject, b"", {"Nats-Expected-Stream": "DILOCO_DOCTOR_none"})


class HeartbeatProbe:
    """Hears a run's members for a while."""

    def __init__(self, run: bytes, name: str) -> None:
        self._run, self._name = run, name
        self._step_s: dict[str, float] = {}
        self._heard: set[str] = set()
        self._software: set[str] = set()
        self._same = self._unreadable = ""

    async def listen(self, probe: Probe, subjects: Sequence[str], listen_s: float) -> list[str]:
        """Listen. Return the subjects on which that was allowed; where none is, no time is spent."""
        async with probe.listening(subjects, self._hear):
            allowed = [subject for subject in subjects if not probe.forbids(subject)]
            if allowed:
                await asyncio.sleep(listen_s)
        return allowed

    @property
    def members(self) -> Members:
        """The members that were heard."""
        steps_s = statistics.median(self._step_s.values()) if self._step_s else None
        return Members(len(self._heard), self._same, steps_s, self._unreadable, tuple(sorted(self._software)))

    async def _hear(self, message: Any) -> None:
        data = bytes(message.data)
        kind = framing.kind_of(data)
        try:
            if kind == Heartbeat.kind:
                heartbeat = framing.unpack(data, Heartbeat, self._run)[0]
                check_subject(heartbeat, message.subject)
                state = "" if heartbeat.state == "left" else heartbeat.state
                self._note(heartbeat.learner, heartbeat.role, heartbeat.region, state, heartbeat.software)
                if heartbeat.role == "learner" and heartbeat.state == "stepping" and heartbeat.step_s > 0:
                    self._step_s[heartbeat.learner] = heartbeat.step_s
            elif kind == ShardHeartbeat.kind:
                shard = framing.unpack(data, ShardHeartbeat, self._run)[0]
                check_subject(shard, message.subject)
                self._note(shard.syncer, "syncer", shard.region, shard.state, shard.software)
            elif kind == CoordinatorHeartbeat.kind:
                coordinator = framing.unpack(data, CoordinatorHeartbeat, self._run)[0]
                self._note(coordinator.coordinator, "coordinator", "", "leading", coordinator.software)
            else:
                raise FormatError(f"{message.subject}: not a heartbeat of this protocol")
        except MessageError as error:
            self._unreadable = str(error)

    def _note(self, name: str, role: str, region: str, state: str, software: str) -> None:
        if not state:
            return
        self._heard.add(name)
        self._software |= {software} - {""}
        if name == self._name:
            self._same = f"{role}{f' in {region}' if region else ''}, {state}"
