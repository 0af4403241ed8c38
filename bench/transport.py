"""The cost of the way through NATS: records appended as fenced batches, read back, and small messages one by one.

    python bench/transport.py                                    # records of 1, 8 and 64 MB, and of 1 KB
    python bench/transport.py --record-mb 1 --sample-mb 4 --samples 3 --small 50 --json

One client process talks to a nats-server with ``sync_interval: always`` over loopback, as every service does: parts of
512 KiB, every message fenced on the head, then the head. What is read comes from the page cache. Bodies are random, as zstd
frames are. MB are 10^6 bytes. ``disk`` is what bounds the appends: the same parts written to a file, each followed by fsync.

``reference`` is what bare functions reached on a 2-core machine when this protocol was chosen: pipelined publishes of 1 MB with
``sync_interval: always``, a windowed pull of 512 KiB, single publishes of 200 bytes with the default ``sync_interval``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import script

from diloco.errors import BrokerError
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink, malloc_environment
from diloco.nats.pull import Puller
from diloco.process import observe
from diloco.transport import Fence
from diloco.wire.body import PART_BYTES
from diloco_ops.broker.server import Server, find_binary

MB = 10**6
STREAM = "BENCH"
HEAD = f"{STREAM}.head"
TIMEOUT_S = 30.0
SMALL_BYTES = 1000
WRITERS = (1, 8, 64)
READ_TARGET_MB_S = 200.0
REFERENCE_MB_S = {"append": 412.0, "read": 779.0}
REFERENCE_SMALL_S = 0.00029


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
        self.link, self._server = link, psutil.Process(server_pid)
        self._head = 0

    async def timed(self, work: Callable[[], Awaitable[Any]], of_bytes: int) -> dict[str, float]:
        """Run ``work``, which moves ``of_bytes``."""
        before_cpu_s, before_server_s, began_s = time.process_time(), self._server_s(), time.perf_counter()
        await work()
        ended_s, gigabytes = time.perf_counter(), of_bytes / 1e9
        return {
            "wall_s": ended_s - began_s,
            "mb_s": of_bytes / MB / (ended_s - began_s),
            "client_cpu_s_per_gb": (time.process_time() - before_cpu_s) / gigabytes,
            "server_cpu_s_per_gb": (self._server_s() - before_server_s) / gigabytes,
        }

    def _server_s(self) -> float:
        times = self._server.cpu_times()
        return float(times.user + times.system)

    async def append(self, body: memoryview) -> None:
        """Store a body as parts and a head."""
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        self._head = await append(
            self.link,
            HEAD,
            b"head",
            parts=parts,
            part_subject=lambda index: f"{STREAM}.part.{index}",
            message_id=uuid.uuid4().hex,
            fence=Fence(HEAD, self._head),
            timeout_s=TIMEOUT_S,
        )

    async def read(self, start_sequence: int, of_bytes: int) -> None:
        """Read all that is stored."""
        async for message in Puller(self.link, STREAM, [f"{STREAM}.>"], start_sequence):
            of_bytes -= 0 if message.subject == HEAD else len(message.data)
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


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


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


def run_client(url: str, server_pid: int, sizes_mb: list[float], sample_mb: float, samples: int, small: int) -> dict[str, Any]:
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


def measure(sizes_mb: list[float], sample_mb: float, samples: int, small: int) -> dict[str, Any]:
    """Start a server and a client, and measure."""
    os.environ.update(malloc_environment())  # for the client: glibc reads it when a process starts
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            disk_mb_s = disk(Path(folder), sample_mb, samples)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                result = pool.submit(run_client, server.url, server.pid, sizes_mb, sample_mb, samples, small).result()
        finally:
            server.kill()
    return {
        "machine": script.machine() | versions(),
        "samples": samples,
        "read_target_mb_s": READ_TARGET_MB_S,
        "disk_mb_s": disk_mb_s,
    } | result


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    about = result["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['system']}; Python {about['python']}, "
        f"nats-server {about['nats-server']}, nats-py {about['nats-py']}; medians of {result['samples']} samples"
    )
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


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--record-mb", type=float, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sample-mb", type=float, default=64, help="a sample is as many records as this holds, at least one")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--small", type=int, default=2000, help="small messages of a sample")
    arguments = parser.parse_args()
    result = measure(arguments.record_mb, arguments.sample_mb, arguments.samples, arguments.small)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
