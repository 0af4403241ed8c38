"""The cost of TLS in bulk: records appended as fenced batches and read back, with identities and without, in turn.

    python bench/tls.py                                       # records of 8 MB, 15 samples each way
    python bench/tls.py --record-mb 1 --sample-mb 4 --samples 2 --json

As ``bench/transport.py``, which see: one client process and nats-server with ``sync_interval: always`` over loopback, so that
all that encryption costs either of them is paid by one machine. The clients take turns sample by sample, in another order each
time: a machine that is busy meanwhile is so for all. ``tls`` is a syncer under an identity, in the account of the streams;
``member`` a learner, whose messages pass from account to account besides. Records are fenced; offers take the place of those
before. ``ratio`` is the median of the ratios to ``plain`` of the same turn; target 0.9.

Loopback has no limit but the processors. Over a link of a given rate, here 1 Gbit/s, as root:

    ip netns add link && ip netns exec link ip link set lo up
    ip netns exec link tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms
    ip netns exec link python bench/tls.py; ip netns del link
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import script
from transport import MB, TIMEOUT_S, Client, spread, versions

from diloco.control.creation import make_streams
from diloco.nats import identity, streams
from diloco.nats.append import append
from diloco.nats.connection import malloc_environment
from diloco.nats.pull import Puller
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.transport import Fence
from diloco.wire.body import PART_BYTES
from diloco.wire.subjects import Subjects, log_part, offer_part
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.keys.roster import IdentityEntry

NAMES = Subjects("bench")
HEAD, OFFER = NAMES.record(0), NAMES.offer(0, "member")
ATTEMPT = bytes(8)
TARGET = 0.9

Samples = dict[str, dict[str, list[dict[str, float]]]]  # by what was done and by client
CLIENTS = {"append records": ("plain", "tls"), "append offers": ("plain", "member"), "read": ("plain", "tls", "member")}


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


def run_client(*arguments: Any) -> Samples:
    """Run the client process."""
    return asyncio.run(compare(*arguments))


def measure(record_mb: float, sample_mb: float, samples: int) -> dict[str, Any]:
    """Start a server with identities and one without, and a client process, and measure."""
    os.environ.update(malloc_environment())  # for the client: glibc reads it when a process starts
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, ExitStack() as started:
        keys = make_keys(Path(folder) / "keys")
        servers = [Server(Path(folder) / "plain"), Server(Path(folder) / "tls", keys=keys.server_folder("nats"))]
        for server in servers:
            server.start()
            started.callback(server.kill)
        places = [(server.url, server.pid) for server in servers]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            taken = pool.submit(run_client, *places, keys.path, record_mb, sample_mb, samples).result()
    rows = [
        {
            "what": what,
            "client": name,
            "mb_s": spread([sample["mb_s"] for sample in by_client[name]]),
            "ratio": spread(
                [mine["mb_s"] / theirs["mb_s"] for mine, theirs in zip(by_client[name], by_client["plain"], strict=True)]
            ),
            "client_cpu_s_per_gb": statistics.median(sample["client_cpu_s_per_gb"] for sample in by_client[name]),
            "server_cpu_s_per_gb": statistics.median(sample["server_cpu_s_per_gb"] for sample in by_client[name]),
        }
        for what, by_client in taken.items()
        for name in by_client
    ]
    about = {"record_mb": record_mb, "sample_mb": sample_mb, "samples": samples, "target": TARGET}
    return {"machine": script.machine() | versions(), **about, "rows": rows}


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    about = result["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['system']}; Python {about['python']}, "
        f"nats-server {about['nats-server']}, nats-py {about['nats-py']}; medians of {result['samples']} turns, "
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


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--record-mb", type=float, default=8)
    parser.add_argument("--sample-mb", type=float, default=64, help="a sample is as many records as this holds, at least one")
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    script.print_result(measure(arguments.record_mb, arguments.sample_mb, arguments.samples), arguments, show)


if __name__ == "__main__":
    main()
