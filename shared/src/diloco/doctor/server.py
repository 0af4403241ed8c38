"""What is measured of a NATS server. Nothing that is done here leaves anything on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from diloco.doctor.deeds import Deeds
from diloco.doctor.verdicts import Members, Speed, Storage, Told
from diloco.errors import BrokerError, FormatError, MessageError
from diloco.nats.connection import subscribe
from diloco.nats.streams import OTHER_CONFIGURATION
from diloco.tasks import end
from diloco.wire import messages
from diloco.wire.messages import CoordinatorPulse, Pulse, ShardPulse
from diloco.wire.plain import json_object
from diloco.wire.subjects import Subjects

CONNECT_S = 5.0
ANSWER_S = 3.0
INFO_BYTES = 1 << 16
DEFAULT_PORT = 4222
PINGS = 5
APPENDS, APPENDS_S = 30, 1.0  # at most so many, and begun within so long
SCRATCH_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
FIRST_BURST_BYTES = 1 << 16
MOST_BURST_BYTES = 1 << 22
BURSTS_S = 3.0  # of one direction
BURST_TIMEOUT_S = 10.0
LOOK_S = 0.05
ECHOES = 4  # what comes back is so many times what goes there, so that the way back is the one that is measured

# error code of the JetStream API


class NotAllowedError(BrokerError):
    """The server forbids it to this identity."""


@dataclass
class Listener:
    """Stands for a log where the client tells what nobody else returns: that the server forbids something."""

    reasons: list[str] = field(default_factory=list)

    def warning(self, event: str, **values: Any) -> None:
        """Keep the reason."""
        self.reasons.append(str(values.get("reason", event)).lower())

    debug = info = error = critical = exception = warning

    def forbids(self, subject: str) -> bool:
        """Whether the server has said that something on a subject is not allowed."""
        return any(f'"{subject.lower()}"' in reason for reason in self.reasons)


@dataclass(frozen=True)
class Place:
    """A server, or several of a cluster, and what is said of it: its URLs, and what the service does there."""

    name: str
    urls: tuple[str, ...]
    deeds: Deeds
    control: bool = False  # the bucket is here
    bulk: bool = False  # streams are here
    far: bool = False  # of another region


@dataclass(frozen=True)
class Reached:
    """One server: its address and how long a TCP connection took; or why there was none."""

    url: str
    address: str = ""
    connect_s: float = 0.0
    error: str = ""


def endpoint(url: str) -> tuple[str, int]:
    """Host and port of a server's URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORT


async def reach(url: str) -> Reached:
    """Resolve a server's name and connect to it, without a word."""
    host, port = endpoint(url)
    shown = f"{host}:{port}"
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return Reached(shown, error=f"the name {host!r} is not resolved within {CONNECT_S:g} s")
    except OSError as error:
        return Reached(shown, error=f"the name {host!r} is not resolved: {error.strerror or error}")
    address = str(found[0][4][0])
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return Reached(shown, address, error=f"no answer within {CONNECT_S:g} s: a firewall, or no route")
    except OSError as error:
        return Reached(shown, address, error=os.strerror(error.errno) if error.errno else str(error))
    connect_s = time.perf_counter() - began_s
    writer.close()
    return Reached(shown, address, connect_s)


def first_word(url: str) -> Told:
    """What a server says before anybody has logged in. Blocks.

    Raises:
        BrokerError: it is no NATS server, or is gone.
    """
    with _spoken_to(url) as (_, said):
        return said


def certificate_ends(url: str, tls: ssl.SSLContext) -> datetime:
    """When a server's certificate ends, which must be good for the URL's host and of the authority of ``tls``. Blocks.

    Raises:
        BrokerError: it is not accepted, or the server offers no TLS.
    """
    with _spoken_to(url) as (plain, said):
        if not said.tls:
            raise BrokerError("the server offers no TLS, which an identity is never used without")
        with tls.wrap_socket(plain, server_hostname=endpoint(url)[0]) as secured:
            ends = (secured.getpeercert() or {}).get("notAfter")
            return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(ends)), UTC)


@contextmanager
def _spoken_to(url: str) -> Iterator[tuple[socket.socket, Told]]:
    host, port = endpoint(url)
    try:
        with socket.create_connection((host, port), CONNECT_S) as plain:
            yield plain, told(_first_line(plain))
    except ssl.SSLCertVerificationError as error:
        raise BrokerError(f"{host}: its certificate is not accepted: {error.verify_message.rstrip('.')}") from None
    except (OSError, ValueError) as error:
        raise BrokerError(f"{host}:{port}: {getattr(error, 'strerror', None) or error}") from None


def _first_line(connected: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n") and len(line) < INFO_BYTES:
        more = connected.recv(1)  # what comes after the line is TLS's
        if not more:
            break
        line += more
    return line


def told(line: bytes) -> Told:
    """What a server's INFO says.

    Raises:
        BrokerError: it is none.
    """
    kind, _, text = line.partition(b" ")
    try:
        info = json.loads(text) if kind == b"INFO" else None
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise BrokerError(f"no NATS server: it says {line[:40]!r}")
    version, max_payload = info.get("version"), info.get("max_payload")
    if not isinstance(version, str) or not isinstance(max_payload, int):
        raise BrokerError("a NATS server of no version")
    return Told(version[:40], max_payload, info.get("jetstream") is True, info.get("tls_required") is True)


async def api(client: Client, listener: Listener, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An answer of JetStream; with ``error`` in it where it refuses.

    Raises:
        NotAllowedError: this identity may not ask.
        BrokerError: there is no answer, or it is no JSON object.
    """
    body = b"" if request is None else json.dumps(request).encode()
    try:
        return answered(await _ask(client, listener, f"$JS.API.{subject}", body), subject)
    except nats.errors.NoRespondersError:
        raise BrokerError("JetStream is not enabled for this account") from None
    except (nats.errors.Error, TimeoutError) as error:
        raise BrokerError(f"JetStream does not answer: {str(error) or type(error).__name__}") from None


def answered(data: bytes, subject: str) -> dict[str, Any]:
    """What JetStream answers.

    Raises:
        BrokerError: it is no JSON object.
    """
    answer = json_object(data)
    if answer is None:
        raise BrokerError(f"{subject}: no JSON object came for an answer")
    return answer


async def _ask(client: Client, listener: Listener, subject: str, data: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The answer to a request; who may not ask gets none, and learns it from the server's complaint."""
    asked = asyncio.ensure_future(client.request(subject, data, timeout=ANSWER_S, headers=headers))
    try:
        while not asked.done() and not listener.forbids(subject):
            await asyncio.wait({asked}, timeout=LOOK_S)
        if not asked.done():
            raise NotAllowedError(f"{subject}: not allowed")
        return bytes(asked.result().data)
    finally:
        await end(asked)


def number(values: Any, *names: str) -> int:
    """What nested objects hold under these names; 0 if it is no number."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, int) else 0


async def storage(client: Client, listener: Listener, run: str) -> Storage:
    """The account's use of a server's disk, and what of it are streams of the run.

    Raises:
        BrokerError: JetStream does not answer.
    """
    account = await api(client, listener, "INFO")
    subjects = Subjects(run)
    streams = {"log": subjects.log_stream, "offers": subjects.offer_stream, "archive": subjects.archive_stream}
    stored = {}
    for name, stream in streams.items():
        with contextlib.suppress(BrokerError):  # not allowed to look: taken as not there
            stored[name] = number(await api(client, listener, f"STREAM.INFO.{stream}"), "state", "bytes")
    limit = number(account, "limits", "max_storage")
    return Storage(number(account, "storage"), limit if limit > 0 else None, stored)


async def clock(client: Client, listener: Listener, stream: str) -> tuple[float, float] | None:
    """How far this machine's clock is ahead of a server's, and by how much that may be wrong; None: the stream is not there.

    Raises:
        BrokerError: JetStream does not answer.
    """
    began_s, sent_s = time.perf_counter(), time.time()
    answer = await api(client, listener, f"STREAM.INFO.{stream}")
    took_s, server_s = time.perf_counter() - began_s, time_of(answer)
    return None if server_s is None else (sent_s + took_s / 2 - server_s, took_s / 2)


def time_of(answer: Mapping[str, Any]) -> float | None:
    """When a server answered, in seconds since the epoch by its clock; None: it does not say."""
    try:
        return datetime.fromisoformat(answer["ts"]).timestamp()
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


async def round_trip(client: Client) -> float:
    """The least of a few.

    Raises:
        BrokerError: no answer.
    """
    try:
        return min([float(await client.rtt(CONNECT_S)) for _ in range(PINGS)])
    except (nats.errors.Error, TimeoutError):
        raise BrokerError(f"no answer to a ping within {CONNECT_S:g} s") from None


async def speed(client: Client, listener: Listener, asked: Callable[[], str]) -> Speed:
    """Round trip, and rates there and back, by messages to oneself; ``asked`` gives subjects that nobody else listens to.

    Bursts grow from 64 KiB until the next one would take too long, to 4 MiB, and the last one is what counts: no more is asked
    of an unknown link than it carries in about ``BURSTS_S`` each way.

    Raises:
        BrokerError: no answer.
    """
    rtt_s = await round_trip(client)
    there = await _Bursts(client, listener, asked(), asked(), 0).rate(rtt_s)
    subject = asked()
    back = await _Bursts(client, listener, subject, subject, ECHOES).rate(rtt_s)
    return Speed(rtt_s, there, back)


class _Bursts:
    """Messages to a server, of which the last one comes back; or, with ``echoes``, all of them so many times."""

    def __init__(self, client: Client, listener: Listener, subject: str, heard: str, echoes: int) -> None:
        self._client, self._listener, self._subject, self._heard, self._echoes = client, listener, subject, heard, echoes
        self._wanted = self._came = 0
        self._news = asyncio.Event()

    async def rate(self, rtt_s: float) -> float | None:
        """Bytes a second that go to the server, or with echoes that come from it; None: nothing comes back."""
        heard = [await self._client.subscribe(self._heard, cb=self._count) for _ in range(max(1, self._echoes))]
        try:
            return await self._grow(rtt_s)
        finally:
            for each in heard:
                with contextlib.suppress(nats.errors.Error):
                    await each.unsubscribe()

    async def _grow(self, rtt_s: float) -> float | None:
        times, rate, began_s = max(1, self._echoes), None, time.perf_counter()
        moved_bytes = FIRST_BURST_BYTES
        while moved_bytes <= MOST_BURST_BYTES:
            sent_s = time.perf_counter()
            try:
                if not await self._burst(moved_bytes // times):
                    return None
            except (nats.errors.Error, TimeoutError):
                return rate
            now_s = time.perf_counter()
            rate = moved_bytes / max(now_s - sent_s - rtt_s, 1e-6)
            if now_s - began_s + 2 * (now_s - sent_s) > BURSTS_S:
                break
            moved_bytes *= 2
        return rate

    async def _burst(self, size_bytes: int) -> bool:
        """Send so much, and wait for what is to come back; whether that is allowed."""
        self._came, self._wanted = 0, size_bytes * self._echoes or 1
        self._news.clear()
        for at in range(0, size_bytes, CHUNK_BYTES):
            await self._client.publish(self._subject, b"\0" * min(CHUNK_BYTES, size_bytes - at))
        if not self._echoes:
            await self._client.publish(self._heard, b"\0")
        async with asyncio.timeout(BURST_TIMEOUT_S):
            while self._came < self._wanted:
                if self._listener.forbids(self._subject) or self._listener.forbids(self._heard):
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
async def scratch(
    client: Client, listener: Listener, name: str, kind: Literal["file", "memory"], max_bytes: int
) -> AsyncIterator[str]:
    """A stream for as long as it is needed; the subject that it takes.

    Raises:
        NotAllowedError: this identity may make none.
        BrokerError: the server would not make it.
    """
    stream, subject = f"DILOCO_DOCTOR_{name}_{kind}", f"diloco-doctor.{name}.{kind}"
    config = {"name": stream, "subjects": [subject], "storage": kind, "max_bytes": max_bytes, "num_replicas": 1}
    answer = await api(client, listener, f"STREAM.CREATE.{stream}", config)
    if number(answer, "error", "err_code") == OTHER_CONFIGURATION:  # that of an examination that was killed
        await api(client, listener, f"STREAM.DELETE.{stream}")
        answer = await api(client, listener, f"STREAM.CREATE.{stream}", config)
    error = answer.get("error")
    if isinstance(error, dict):
        raise BrokerError(f"{error.get('description')} (code {error.get('err_code')})")
    try:
        yield subject
    finally:
        with contextlib.suppress(BrokerError):
            await api(client, listener, f"STREAM.DELETE.{stream}")


async def append_s(client: Client, subjects: Iterable[str]) -> list[float]:
    """By stream's subject: the least time that an append takes. In turn, so that what else goes on meets all alike.

    Raises:
        BrokerError: one was not acknowledged.
    """
    least, first_s = dict.fromkeys(subjects, math.inf), time.perf_counter()
    try:
        for _ in range(APPENDS):
            if time.perf_counter() - first_s > APPENDS_S:
                break
            for subject, before in least.items():
                began_s = time.perf_counter()
                await client.request(subject, b"\0" * 256, timeout=ANSWER_S)
                least[subject] = min(before, time.perf_counter() - began_s)
    except (nats.errors.Error, TimeoutError) as error:
        raise BrokerError(f"no acknowledgement: {str(error) or type(error).__name__}") from None
    return list(least.values())


async def forbidden(client: Client, listener: Listener, deeds: Deeds) -> list[str]:
    """What of the deeds a server does not allow. What is stored is meant for a stream that there is not: none takes it."""
    heard = [await client.subscribe(subject) for subject in deeds.listens]
    with contextlib.suppress(nats.errors.Error, TimeoutError):
        for _ in range(2):
            await client.flush(int(ANSWER_S))
    for each in heard:
        with contextlib.suppress(nats.errors.Error):
            await each.unsubscribe()
    await asyncio.gather(*(_try_to_store(client, listener, subject) for subject in deeds.stores))
    return [f"to listen to {subject}" for subject in deeds.listens if listener.forbids(subject)] + [
        f"to write to {subject}" for subject in deeds.stores if listener.forbids(subject)
    ]


async def _try_to_store(client: Client, listener: Listener, subject: str) -> None:
    with contextlib.suppress(BrokerError, nats.errors.Error, TimeoutError):
        await _ask(client, listener, subject, b"", {"Nats-Expected-Stream": "DILOCO_DOCTOR_none"})


class Ear:
    """Hears a run's members for a while."""

    def __init__(self, run: bytes, name: str) -> None:
        self._run, self._name = run, name
        self._step_s: dict[str, float] = {}
        self._heard: set[str] = set()
        self._software: set[str] = set()
        self._same = self._unreadable = ""

    async def listen(self, client: Client, listener: Listener, subjects: Sequence[str], listen_s: float) -> list[str]:
        """Listen; to which of the subjects that was allowed. Where none is, no time is spent."""
        heard = [await subscribe(client, subject, self._hear) for subject in subjects]
        allowed = [subject for subject in subjects if not listener.forbids(subject)]
        if allowed:
            await asyncio.sleep(listen_s)
        for each in heard:
            with contextlib.suppress(nats.errors.Error):
                await each.unsubscribe()
        return allowed

    @property
    def members(self) -> Members:
        """What was heard."""
        steps_s = statistics.median(self._step_s.values()) if self._step_s else None
        return Members(len(self._heard), self._same, steps_s, self._unreadable, tuple(sorted(self._software)))

    async def _hear(self, message: Any) -> None:
        data = bytes(message.data)
        kind = messages.kind_of(data)
        try:
            if kind == Pulse.kind:
                pulse = messages.unpack(data, Pulse, self._run)[0]
                state = "" if pulse.state == "left" else pulse.state
                self._note(pulse.learner, pulse.role, pulse.region, state, pulse.software)
                if pulse.role == "learner" and pulse.state == "stepping" and pulse.step_s > 0:
                    self._step_s[pulse.learner] = pulse.step_s
            elif kind == ShardPulse.kind:
                shard = messages.unpack(data, ShardPulse, self._run)[0]
                self._note(shard.syncer, "syncer", shard.region, shard.state, shard.software)
            elif kind == CoordinatorPulse.kind:
                coordinator = messages.unpack(data, CoordinatorPulse, self._run)[0]
                self._note(coordinator.coordinator, "coordinator", "", "leading", coordinator.software)
            else:
                raise FormatError(f"{message.subject}: no sign of life of this protocol")
        except MessageError as error:
            self._unreadable = str(error)

    def _note(self, name: str, role: str, region: str, state: str, software: str) -> None:
        if not state:
            return
        self._heard.add(name)
        self._software |= {software} - {""}
        if name == self._name:
            self._same = f"{role}{f' in {region}' if region else ''}, {state}"
