"""Links: how accurate emulated ones are, what the way through NATS costs, and what TLS adds to it.

python bench/links.py relay                                       # two and a half minutes
python bench/links.py relay --seconds 2 --rates 5 50 --json
python bench/links.py transport                                   # records of 1, 8 and 64 MB, and of 1 KB
python bench/links.py transport --record-mb 1 --sample-mb 4 --samples 3 --small 50
python bench/links.py tls                                         # records of 8 MB, 15 samples each way
python bench/links.py tls --record-mb 1 --sample-mb 4 --samples 2
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import statistics
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from harness.console import Bench, Result, Script, folder
from harness.host import MB, cpu_s, machine
from harness.intervals import spread
from harness.wan_relay import Conditions, Relay

from diloco.control.creation import make_streams
from diloco.errors import BrokerError
from diloco.nats import identity, streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink, malloc_environment
from diloco.nats.pull import Puller
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.transport import Fence
from diloco.wire.body import PART_BYTES
from diloco.wire.subjects import Subjects, log_part, offer_part
from diloco_ops.broker.server import Server, find_binary
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.keys.roster import IdentityEntry

RATES_MBIT_S = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
DELAYS = ((0.0, 0.0), (0.030, 0.0), (0.070, 0.0), (0.030, 0.005), (0.070, 0.005))  # delay, jitter
SATURATED_MBIT_S = (5, 10)
MESSAGES_PER_S = 50
WARM_UP_S = 1.0
SHARES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}
STAMP = struct.Struct("d")

STREAM = "BENCH"
STREAM_HEAD = f"{STREAM}.head"
TIMEOUT_S = 30.0
SMALL_BYTES = 1000
WRITERS = (1, 8, 64)
READ_TARGET_MB_S = 200.0
REFERENCE_MB_S = {"append": 412.0, "read": 779.0}
REFERENCE_SMALL_S = 0.00029

NAMES = Subjects("bench")
HEAD, OFFER = NAMES.record(0), NAMES.offer(0, "member")
ATTEMPT = bytes(8)
TLS_TARGET = 0.9
Samples = dict[str, dict[str, list[dict[str, float]]]]  # by what was done and by client
CLIENTS = {"append records": ("plain", "tls"), "append offers": ("plain", "member"), "read": ("plain", "tls", "member")}
OfSample = Annotated[float, "a sample is as many records as this holds, at least one"]


class Ends:
    """Both ends of a relay's links: connections through it, and the target to which they all lead."""

    def __init__(self, folder: Path, links: list[Conditions]) -> None:
        self._target = socket.create_server(("127.0.0.1", 0))
        port = self._target.getsockname()[1]
        routes = [(f"from{i}", "to", traffic, 0, port) for i in range(len(links)) for traffic in ("bulk", "control")]
        self.relay = Relay(folder, routes, {(f"from{i}", "to"): conditions for i, conditions in enumerate(links)})

    def port(self, link: int, traffic: str) -> int:
        """Return the port of a route's listener."""
        return self.relay.port(f"from{link}", "to", traffic)

    def accept(self) -> socket.socket:
        """Return the next connection at the target."""
        return self._target.accept()[0]

    def pair(self, link: int, traffic: str) -> tuple[socket.socket, socket.socket]:
        """Open a connection; return the client's end and the target's."""
        near = socket.create_connection(("127.0.0.1", self.port(link, traffic)))
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, self.accept()

    def close(self) -> None:
        """End the relay."""
        self.relay.close()
        self._target.close()


def flood(sock: socket.socket) -> None:
    """Send until the connection ends."""
    block = bytes(1 << 18)
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(block)


def flood_port(port: int) -> None:
    """Send to a port until the connection ends."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        flood(sock)


def received(sock: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes and the seconds they took, from one arrival to another about so much later, after a warm-up."""
    buffer, began_s, count = bytearray(1 << 20), time.perf_counter(), 0
    while time.perf_counter() < began_s + min(WARM_UP_S, seconds):
        sock.recv_into(buffer)
    first_s = now_s = time.perf_counter()
    while now_s < first_s + seconds:
        count += sock.recv_into(buffer)
        now_s = time.perf_counter()
    return count, now_s - first_s


def drain(sock: socket.socket) -> None:
    """Receive until the connection ends."""
    buffer = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while sock.recv_into(buffer):
            pass


def measure_saturated(ends: Ends, far: socket.socket, seconds: float) -> tuple[int, float, float]:
    """Return the bytes that come out of a saturated link, the seconds they took, and the relay's processor time in these."""
    before_s, began_s = ends.relay.cpu_s(), time.perf_counter()
    count, took_s = received(far, seconds)
    return count, took_s, (ends.relay.cpu_s() - before_s) / (time.perf_counter() - began_s) * took_s


def measure_rate(ends: Ends, link: int, rate_mbit_s: float, seconds: float) -> dict[str, float]:
    """Measure a saturated link."""
    near, far = ends.pair(link, "bulk")
    with near, far:
        threading.Thread(target=flood, args=(near,), daemon=True).start()
        count, took_s, used_s = measure_saturated(ends, far, seconds)
    achieved = count * 8 / took_s / 1e6
    found = {"rate_mbit_s": rate_mbit_s, "achieved_mbit_s": achieved, "error": achieved / rate_mbit_s - 1}
    return found | {"relay_cpu": used_s / took_s}


def measure_unlimited(ends: Ends, link: int, seconds: float) -> dict[str, float]:
    """Measure as much as goes."""
    sender = multiprocessing.get_context("spawn").Process(target=flood_port, args=(ends.port(link, "bulk"),))
    sender.start()
    with ends.accept() as far:
        count, took_s, used_s = measure_saturated(ends, far, seconds)
    sender.join()
    return {"mb_s": count / MB / took_s, "relay_cpu_s_per_gb": used_s / (count / 1e9)}


def one_way(near: socket.socket, far: socket.socket, size: int, seconds: float) -> list[float]:
    """Seconds that messages take, one after another."""
    count = max(5, int(seconds * MESSAGES_PER_S))

    def send() -> None:
        for _ in range(count):
            near.sendall(STAMP.pack(time.perf_counter()) + bytes(size - STAMP.size))
            time.sleep(1 / MESSAGES_PER_S)

    sender = threading.Thread(target=send)
    sender.start()
    took_s = []
    for _ in range(count):
        message = b""
        while len(message) < size:
            message += far.recv(size - len(message))
        took_s.append(time.perf_counter() - STAMP.unpack_from(message)[0])
    sender.join()
    return took_s


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the least, the percentiles of :data:`SHARES`, and the most."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in SHARES.items()}
    return {"least": ordered[0]} | at | {"most": ordered[-1]}


def measure_direct(seconds: float) -> dict[str, float]:
    """Measure the same messages without a relay."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = server.accept()[0]
        with near, far:
            return percentiles(one_way(near, far, 64, seconds))


def measure_delay(ends: Ends, link: int, delay_s: float, jitter_s: float, seconds: float) -> dict[str, Any]:
    """Measure an idle link."""
    near, far = ends.pair(link, "bulk")
    with near, far:
        off_s = [took_s - delay_s for took_s in one_way(near, far, 64, seconds)]
    return {"delay_s": delay_s, "jitter_s": jitter_s, "off_s": percentiles(off_s)}


def measure_control(ends: Ends, link: int, rate_mbit_s: float, seconds: float) -> list[dict[str, Any]]:
    """Messages of both classes beside bulk that saturates the link."""
    rows = []
    bulk, sink = ends.pair(link, "bulk")
    with bulk, sink:
        threading.Thread(target=flood, args=(bulk,), daemon=True).start()
        threading.Thread(target=drain, args=(sink,), daemon=True).start()
        time.sleep(min(WARM_UP_S, seconds))
        for traffic in ("control", "bulk"):
            near, far = ends.pair(link, traffic)
            with near, far:
                took_s = one_way(near, far, 200, seconds)
            rows.append({"rate_mbit_s": rate_mbit_s, "sent_as": traffic, "took_s": percentiles(took_s)})
    return rows


def relay(*, seconds: Annotated[float, "of each measurement"] = 8.0, rates: Sequence[float] = RATES_MBIT_S) -> Result:
    """Measure how accurate emulated links are: rates, delays, jitter, the precedence of control, and how much a relay carries.

    A relay (``diloco wan serve``) on loopback, as a process of its own; sender and receiver are this process, with one clock,
    and for ``unlimited`` the sender is another process. *rate*: bytes that come out of a saturated link, against what it is set
    to, in Mbit/s. *delay*: messages of 64 bytes, 50 a second, on an idle link; the time from send to receive, less the link's
    delay. *control*: messages of 200 bytes, 50 a second, on a link without delay that bulk saturates; beside them the same as
    bulk. *direct*: the same messages without a relay. CPU seconds are the relay's.
    """
    limited: list[Conditions] = [{"rate_bits_per_s": rate * 1e6} for rate in (*rates, *SATURATED_MBIT_S)]
    links = [*limited, *({"delay_s": delay_s, "jitter_s": jitter_s} for delay_s, jitter_s in DELAYS), {}]
    numbers = iter(range(len(links)))
    load = os.getloadavg()[0]
    with folder() as place, contextlib.closing(Ends(place, links)) as ends:
        return {
            "machine": machine() | {"load_before": load},
            "seconds": seconds,
            "rates": [measure_rate(ends, next(numbers), rate, seconds) for rate in rates],
            "control": [row for rate in SATURATED_MBIT_S for row in measure_control(ends, next(numbers), rate, seconds)],
            "direct_s": measure_direct(seconds),
            "delays": [measure_delay(ends, next(numbers), *conditions, seconds) for conditions in DELAYS],
            "unlimited": measure_unlimited(ends, next(numbers), seconds),
        }


def show_relay(result: dict[str, Any]) -> None:
    about = result["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, load {about['load_before']:.1f}, Python {about['python']}; "
        f"{result['seconds']:g} s each"
    )
    print(f"{'rate Mbit/s':>16}{'achieved':>10}{'error':>10}{'relay CPU':>11}")
    for row in result["rates"]:
        print(f"{row['rate_mbit_s']:16g}{row['achieved_mbit_s']:10.3f}{row['error']:10.2%}{row['relay_cpu']:11.1%}")
    print(f"{'ms':26}{'least':>9}" + "".join(f"{name:>9}" for name in SHARES) + f"{'most':>9}")
    print(_times("direct", result["direct_s"]))
    for row in result["delays"]:
        print(_times(f"beyond {row['delay_s'] * 1e3:g} ± {row['jitter_s'] * 1e3:g} ms", row["off_s"]))
    for row in result["control"]:
        print(_times(f"{row['sent_as']} at {row['rate_mbit_s']:g} Mbit/s", row["took_s"]))
    unlimited = result["unlimited"]
    print(f"unlimited: {unlimited['mb_s']:.0f} MB/s, {unlimited['relay_cpu_s_per_gb']:.2f} CPU-s/GB of the relay")


def _times(name: str, took_s: dict[str, float]) -> str:
    return f"{name:26}" + "".join(f"{value * 1e3:9.2f}" for value in took_s.values())


def versions() -> dict[str, str]:
    """Of the system, the server and its client."""
    server = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "system": platform.platform(),
        "nats-server": server.split()[-1].lstrip("v"),
        "nats-py": importlib.metadata.version("nats-py"),
    }


class Client:
    """The measuring process: its connections, and the process id of the server."""

    def __init__(self, link: NatsLink, server_pid: int) -> None:
        self.link, self._server_pid = link, server_pid
        self._head = 0

    async def timed(self, work: Callable[[], Awaitable[Any]], of_bytes: int) -> dict[str, float]:
        """Run ``work``, which moves ``of_bytes``."""
        before_cpu_s, before_server_s, began_s = time.process_time(), cpu_s(self._server_pid), time.perf_counter()
        await work()
        ended_s, gigabytes = time.perf_counter(), of_bytes / 1e9
        return {
            "wall_s": ended_s - began_s,
            "mb_s": of_bytes / MB / (ended_s - began_s),
            "client_cpu_s_per_gb": (time.process_time() - before_cpu_s) / gigabytes,
            "server_cpu_s_per_gb": (cpu_s(self._server_pid) - before_server_s) / gigabytes,
        }

    async def append(self, body: memoryview) -> None:
        """Store a body as parts and a head."""
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        self._head = await append(
            self.link,
            STREAM_HEAD,
            b"head",
            parts=parts,
            part_subject=lambda index: f"{STREAM}.part.{index}",
            message_id=uuid.uuid4().hex,
            fence=Fence(STREAM_HEAD, self._head),
            timeout_s=TIMEOUT_S,
        )

    async def read(self, start_sequence: int, of_bytes: int) -> None:
        """Read all that is stored."""
        async for message in Puller(self.link, STREAM, [f"{STREAM}.>"], start_sequence):
            of_bytes -= 0 if message.subject == STREAM_HEAD else len(message.data)
            if message.pending == 0:
                break
        if of_bytes:
            raise BrokerError(f"stream {STREAM}: {of_bytes} bytes fewer than were stored")

    async def append_small(self, count: int, writers: int, took_s: list[float]) -> None:
        """Store ``count`` small messages, so many of them at a time."""
        body, left = os.urandom(SMALL_BYTES), iter(range(count))

        async def write(writer: int) -> None:
            for _ in left:
                began_s = time.perf_counter()
                await append(
                    self.link,
                    f"{STREAM}.small.{writer}",
                    body,
                    message_id=uuid.uuid4().hex,
                    fence=None,
                    timeout_s=TIMEOUT_S,
                )
                took_s.append(time.perf_counter() - began_s)

        await asyncio.gather(*map(write, range(writers)))

    async def records(self, record_mb: float, sample_mb: float, samples: int) -> list[dict[str, Any]]:
        """Append and read records of one size."""
        record = memoryview(os.urandom(int(record_mb * MB)))
        count = max(1, int(sample_mb / record_mb))
        of_bytes = len(record) * count

        async def append_all() -> None:
            for _ in range(count):
                await self.append(record)

        appended, read = [], []
        await self.append(record)  # buffers and files are there before anything is measured
        for _ in range(samples):
            first = self._head + 1
            appended.append(await self.timed(append_all, of_bytes))
            read.append(await self.timed(partial(self.read, first, of_bytes), of_bytes))
            await streams.purge(self.link, STREAM, f"{STREAM}.part.>", self._head)
        about = {"record_mb": record_mb, "records": count}
        return [{"what": "append"} | about | summary(appended), {"what": "read"} | about | summary(read)]

    async def small(self, count: int, writers: int, samples: int) -> dict[str, Any]:
        """Append small messages."""
        rates, took_s = [], list[float]()
        for _ in range(samples):
            began_s = time.perf_counter()
            await self.append_small(count, writers, took_s)
            rates.append(count / (time.perf_counter() - began_s))
        ordered = sorted(took_s)
        return {
            "writers": writers,
            "appends": count,
            "per_s": spread(rates),
            "p50_s": ordered[len(ordered) // 2],
            "p99_s": ordered[len(ordered) * 99 // 100],
        }


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Median and spread of each thing measured."""
    return {name: spread([sample[name] for sample in samples]) for name in samples[0]}


def disk(folder: Path, sample_mb: float, samples: int) -> dict[str, float]:
    """Rate of writing parts to a file, each followed by fsync, in MB/s."""
    part, count, rates = os.urandom(PART_BYTES), max(1, int(sample_mb * MB) // PART_BYTES), []
    for _ in range(samples):
        with (folder / "disk").open("wb", buffering=0) as file:
            began_s = time.perf_counter()
            for _ in range(count):
                file.write(part)
                os.fsync(file.fileno())
            rates.append(count * len(part) / MB / (time.perf_counter() - began_s))
    (folder / "disk").unlink()
    return spread(rates)


def run_client(
    url: str, server_pid: int, sizes_mb: Sequence[float], sample_mb: float, samples: int, small: int
) -> dict[str, Any]:
    """Run the client process."""

    async def main() -> dict[str, Any]:
        link = await NatsLink.open(url, url, "bench", observe.get_logger(), give_up_after_s=10)
        try:
            await streams.ensure(link, STREAM, [f"{STREAM}.>"])
            client = Client(link, server_pid)
            records = [row for size_mb in sizes_mb for row in await client.records(size_mb, sample_mb, samples)]
            return {"records": records, "small": [await client.small(small, writers, samples) for writers in WRITERS]}
        finally:
            await link.close()

    return asyncio.run(main())


def transport(
    *,
    record_mb: Sequence[float] = (1.0, 8.0, 64.0),
    sample_mb: OfSample = 64.0,
    samples: int = 5,
    small: Annotated[int, "small messages of a sample"] = 2000,
) -> Result:
    """Measure the way through NATS: records appended as fenced batches, read back, and small messages one by one.

    One client process talks to a nats-server with ``sync_interval: always`` over loopback, as every service does: parts of
    512 KiB, every message fenced on the head, then the head. What is read comes from the page cache. Bodies are random, as
    zstd frames are. MB are 10^6 bytes. ``disk`` is what bounds the appends: the same parts written to a file, each followed by
    fsync.

    ``reference`` is what bare functions reached on a 2-core machine when this protocol was chosen: pipelined publishes of 1 MB
    with ``sync_interval: always``, a windowed pull of 512 KiB, single publishes of 200 bytes with the default
    ``sync_interval``.
    """
    os.environ.update(malloc_environment())  # for the client: glibc reads it when a process starts
    with folder() as place, ExitStack() as started:
        server = Server(place)
        server.start()
        started.callback(server.kill)
        disk_mb_s = disk(place, sample_mb, samples)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(run_client, server.url, server.pid, record_mb, sample_mb, samples, small).result()
    about = {"machine": machine() | versions(), "samples": samples, "read_target_mb_s": READ_TARGET_MB_S}
    return about | {"disk_mb_s": disk_mb_s} | result


def heading(result: Result) -> str:
    """Return the machine and the software of a result."""
    about = result["machine"]
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['system']}; Python {about['python']}, "
        f"nats-server {about['nats-server']}, nats-py {about['nats-py']}"
    )


def show_transport(result: dict[str, Any]) -> None:
    print(f"{heading(result)}; medians of {result['samples']} samples")
    print(f"{'':22}{'MB/s':>8}{'least':>8}{'most':>8}{'reference':>11}{'target':>8}{'client CPU-s/GB':>17}{'server':>8}")
    rate = result["disk_mb_s"]
    print(f"{'disk':22}{rate['median']:8.0f}{rate['least']:8.0f}{rate['most']:8.0f}")
    for row in result["records"]:
        rate = row["mb_s"]
        target = f"{READ_TARGET_MB_S:8.0f}" if row["what"] == "read" else f"{'':8}"
        print(
            f"{row['what']:7}{row['records']:4} x {row['record_mb']:4g} MB"
            f"{rate['median']:8.0f}{rate['least']:8.0f}{rate['most']:8.0f}{REFERENCE_MB_S[row['what']]:11.0f}{target}"
            f"{row['client_cpu_s_per_gb']['median']:17.2f}{row['server_cpu_s_per_gb']['median']:8.2f}"
        )
    print(f"{'':22}{'1/s':>8}{'least':>8}{'most':>8}{'reference':>11}{'p50 ms':>8}{'p99 ms':>8}")
    for row in result["small"]:
        rate = row["per_s"]
        reference = f"{1 / REFERENCE_SMALL_S:11.0f}" if row["writers"] == 1 else f"{'':11}"
        print(
            f"append 1 KB, {row['writers']:3} at once{rate['median']:7.0f}{rate['least']:8.0f}{rate['most']:8.0f}{reference}"
            f"{row['p50_s'] * 1e3:8.2f}{row['p99_s'] * 1e3:8.2f}"
        )


def make_keys(path: Path) -> Folder:
    """Keys of one server and of the clients."""
    folder, expires = Folder.make(path, NAMES.run, []), datetime.now(UTC) + timedelta(days=1)
    folder.put_server("nats", ["127.0.0.1"], [], expires)
    for who in (Who("tls", "syncer"), Who("member", "learner"), Who("maker", "coordinator")):
        entry = IdentityEntry(name=who.name, role=who.role, public_key="U" + "A" * 55, serial="0", expires=expires)
        folder.put_identity(entry)
    return folder


class Bulk:
    """One client."""

    def __init__(self, link: NatsTransport, server_pid: int) -> None:
        self.link, self.client = link, Client(link, server_pid)
        self.fence = 0

    async def append(self, body: memoryview, count: int, *, offers: bool) -> None:
        """Store so many records with this body, or offers."""
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        for _ in range(count):
            sequence = await append(
                self.link,
                OFFER if offers else HEAD,
                b"head",
                parts=parts,
                part_subject=partial(offer_part, OFFER) if offers else partial(log_part, HEAD, ATTEMPT),
                message_id=uuid.uuid4().hex,
                fence=None if offers else Fence(HEAD, self.fence),
                timeout_s=TIMEOUT_S,
            )
            self.fence = self.fence if offers else sequence

    async def read(self, of_bytes: int) -> None:
        """Read so much of the log."""
        async for message in Puller(self.link, NAMES.log_stream, [NAMES.record_tree("*")], 1):
            of_bytes -= len(message.data)
            if of_bytes <= 0:
                return


async def compare(
    plain: tuple[str, int], tls: tuple[str, int], keys: Path, record_mb: float, sample_mb: float, samples: int
) -> Samples:
    """Let the clients take turns; samples of appending and of reading by client, in the order of turns."""
    log, record, count = observe.get_logger(), memoryview(os.urandom(int(record_mb * MB))), max(1, int(sample_mb / record_mb))
    clients: dict[str, Bulk] = {}

    async def connect(name: str, server: tuple[str, int]) -> NatsTransport:
        own = None if name == "plain" else identity.load(keys / "identities" / f"{name}.identity")
        return await NatsTransport.open(server[0], server[0], name, log, 10, own)

    for name, server in (("plain", plain), ("maker", tls)):
        maker = await connect(name, server)
        await make_streams(maker, NAMES.run, RunSettings())
        await maker.close()
    for name in CLIENTS["read"]:
        server = plain if name == "plain" else tls
        clients[name] = Bulk(await connect(name, server), server[1])
    of_bytes = len(record) * count
    work: dict[str, Callable[[Bulk], Awaitable[None]]] = {
        "append records": lambda client: client.append(record, count, offers=False),
        "append offers": lambda client: client.append(record, count, offers=True),
        "read": lambda client: client.read(of_bytes),
    }
    taken: Samples = {what: {name: [] for name in names} for what, names in CLIENTS.items()}
    for turn in range(-1, samples):  # in the first one nothing is measured: buffers and files are made
        for what, names in CLIENTS.items():
            for name in [names[(turn + place) % len(names)] for place in range(len(names))]:
                sample = await clients[name].client.timed(partial(work[what], clients[name]), of_bytes)
                if turn >= 0:
                    taken[what][name].append(sample)
        for name in CLIENTS["append records"]:
            await streams.purge(clients[name].link, NAMES.log_stream, NAMES.record_tree(0), clients[name].fence)
    for client in clients.values():
        await client.link.close()
    return taken


def tls(*, record_mb: float = 8.0, sample_mb: OfSample = 64.0, samples: int = 15) -> Result:
    """Measure TLS in bulk: records appended as fenced batches and read back, with identities and without, in turn.

    As ``transport``: one client process and nats-server with ``sync_interval: always`` over loopback, so that all that
    encryption costs either of them is paid by one machine. The clients take turns sample by sample, in another order each time:
    a machine that is busy meanwhile is so for all. ``tls`` is a syncer under an identity, in the account of the streams;
    ``member`` a learner, whose messages pass from account to account besides. Records are fenced; offers take the place of
    those before. ``ratio`` is the median of the ratios to ``plain`` of the same turn; target 0.9.

    Loopback has no limit but the processors. Over a link of a given rate, here 1 Gbit/s, as root:

        ip netns add link && ip netns exec link ip link set lo up
        ip netns exec link tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms
        ip netns exec link python bench/links.py tls; ip netns del link
    """
    os.environ.update(malloc_environment())  # for the client: glibc reads it when a process starts
    with folder() as place, ExitStack() as started:
        keys = make_keys(place / "keys")
        servers = [Server(place / "plain"), Server(place / "tls", keys=keys.server_folder("nats"))]
        for server in servers:
            server.start()
            started.callback(server.kill)
        places = [(server.url, server.pid) for server in servers]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            taken = pool.submit(run_bulk, *places, keys.path, record_mb, sample_mb, samples).result()
    rows = [
        {
            "what": what,
            "client": name,
            "mb_s": spread([sample["mb_s"] for sample in mine]),
            "ratio": spread([one["mb_s"] / other["mb_s"] for one, other in zip(mine, by_client["plain"], strict=True)]),
            "client_cpu_s_per_gb": statistics.median(sample["client_cpu_s_per_gb"] for sample in mine),
            "server_cpu_s_per_gb": statistics.median(sample["server_cpu_s_per_gb"] for sample in mine),
        }
        for what, by_client in taken.items()
        for name, mine in by_client.items()
    ]
    about = {"record_mb": record_mb, "sample_mb": sample_mb, "samples": samples, "target": TLS_TARGET}
    return {"machine": machine() | versions(), **about, "rows": rows}


def run_bulk(*arguments: Any) -> Samples:
    """Run the client process."""
    return asyncio.run(compare(*arguments))


def show_tls(result: dict[str, Any]) -> None:
    print(
        f"{heading(result)}; medians of {result['samples']} turns, "
        f"{result['sample_mb']:g} MB in records of {result['record_mb']:g} MB"
    )
    print(f"{'':24}{'MB/s':>8}{'least':>8}{'most':>8}{'ratio':>8}{'target':>8}{'client CPU-s/GB':>17}{'server':>8}")
    for row in result["rows"]:
        rate = row["mb_s"]
        ratio = f"{'':16}" if row["client"] == "plain" else f"{row['ratio']['median']:8.2f}{result['target']:8.2f}"
        print(
            f"{row['what']:16}{row['client']:8}{rate['median']:8.0f}{rate['least']:8.0f}{rate['most']:8.0f}{ratio}"
            f"{row['client_cpu_s_per_gb']:17.2f}{row['server_cpu_s_per_gb']:8.2f}"
        )


SCRIPT = Script(__doc__, Bench(relay, show_relay), Bench(transport, show_transport), Bench(tls, show_tls))

if __name__ == "__main__":
    SCRIPT.run()
