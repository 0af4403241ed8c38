"""Joining over a long fast link: keyframes, the entries behind them and a peer's optimizer state, against the link itself.

    python bench/joining.py                                   # 1 Gbit/s and 200 Mbit/s, 80 ms there and back; a minute
    python bench/joining.py --parameters 2000000 --rates 200 --samples 1 --json

A ``nats-server`` that holds a run's log: of each fragment a keyframe of version 1 and the entry of version 2. A learner's
follower loads them all, and borrows the state of AdamW, 8 bytes a parameter. It reaches the server through a relay (``diloco
wan serve``) with the rate and half of the delay in each direction. Learner, lender, relay and server are processes of their
own.

*raw* is a single TCP stream through the same link in the same minute, from its first byte to its last: where the machine's
processors carry less than the rate, that is what there is. *share* is the rate at which the learner reads, against raw; target
0.85: the median of the turns and the best one, which tells more where the processors are busy with other work. It counts all
from the first request to the last fold. *read* is all that it reads, against the keyframes, the entries
behind them and the loan; target at most 1.1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import numpy as np
import script
from numpy.typing import NDArray

from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.log.follower import LogFollower
from diloco.log.log import Log
from diloco.log.stream import pass_over
from diloco.member.peer import Borrower, InMemory, Layout, Lender
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.offers import Offer
from diloco_ops.broker.server import Server

RUN, PEER = "bench", "peer"
BITS: Final = 4
NOTHING = Body(0, bytes(32), 0, bytes(8))
SHARE_TARGET, READ_TARGET = 0.85, 1.1
MB = 10**6
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Model:
    """A model by its sizes: parameters in all, in so many fragments."""

    parameters: int
    fragments: int

    def log(self, link: NatsTransport) -> Log:
        """Return the run's log as a process reaches it."""
        tensors = [TensorSpec(f"w{index}", (self.parameters // self.fragments,)) for index in range(self.fragments)]
        settings = run_settings()
        return Log(link, RUN, framing.run_id(RUN, settings.digest()), build_map(tensors, self.fragments), settings)

    def state(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return the state of AdamW, noise: float32 [parameters] for each moment."""
        chance = np.random.default_rng(seed)
        return {name: chance.standard_normal(self.parameters, np.float32) for name in ("mu", "nu")}


async def open_link(url: str, name: str) -> NatsTransport:
    return await NatsTransport.open(url, url, name, get_logger(), DEADLINE_S)


async def fill(url: str, model: Model) -> int:
    """Store keyframes of version 1 and entries of version 2; return the bytes of both."""
    link, settings = await open_link(url, "writer"), run_settings()
    log = model.log(link)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    chance = np.random.default_rng(0)
    sizes = [fragment.size for fragment in log.map.fragments]

    async def thetas() -> AsyncIterator[NDArray[np.float32]]:
        for size in sizes:
            yield chance.standard_normal(size, np.float32)

    await log.writer.found("ann", settings.digest(), thetas())
    genesis, stored_bytes = await log.reader.genesis(), 0
    assert genesis is not None
    for index, size in enumerate(sizes):
        replica, residual = (await log.reader.load(index, *genesis)).replica, np.zeros(size, np.float32)
        for version in (1, 2):
            delta = chance.standard_normal(size, np.float32)
            offer = Offer(index, "ann", 1, version, (0, 0), version, version - 1, bytes(32), BITS, 1, 1, 0, [], NOTHING)
            merge = Merge(version, (RoundOffer(offer, delta.view(np.uint8)),), False, 0.0, 0.0)
            record, inline, parts = merging.make_version(
                replica, residual, delta, merge, settings, bits=BITS, syncer="s", attempt=os.urandom(8), now_s=0.0
            )
            fence = await log.reader.head_sequence(index)
            sequence = await log.writer.append_record(record, inline, parts, fence)
            replica.chain.advance(record, framing.hash_of(record, log.run), sequence)
            if version == 1:
                await log.writer.append_keyframe(replica, residual, None)
        newest = await log.reader.newest_keyframe(index)
        assert newest is not None
        assert record.body is not None
        stored_bytes += newest[0].body.size_bytes + record.body.size_bytes
    await link.close()
    return stored_bytes


def lend(url: str, model: Model, ready: Event) -> None:
    """Be a peer, until ended."""

    async def serve() -> None:
        state = model.state(1)
        link = await open_link(url, PEER)
        log = model.log(link)
        lender = Lender(link, log.run, log.subjects, PEER, lambda: True, get_logger())
        await lender.serve()
        ready.set()
        while True:
            if lender.wanted:
                await asyncio.to_thread(lender.give, 1, [2] * model.fragments, InMemory(state))
            await asyncio.sleep(0.02)

    asyncio.run(serve())


async def join(url: str, model: Model) -> dict[str, float]:
    """Join as a learner does; return seconds and bytes."""
    layout = Layout.of(model.state(1))
    link = await open_link(url, "learner")
    log, clock = model.log(link), time.perf_counter
    genesis = await log.reader.genesis()
    assert genesis is not None
    chunks = [chunk for whole in layout.wholes() for chunk in whole.cut()]
    borrower = Borrower(link, log.run, log.subjects, "learner", layout, chunks, lambda chunk, values: None, get_logger())
    before_bytes, began_s = link.bytes_in, clock()
    follower = LogFollower(log, genesis, pass_over, get_logger(), in_place=False)
    assert [copy.replica.chain.version for copy in await follower.load_all()] == [2] * model.fragments
    loaded_s, loaded_bytes = clock() - began_s, link.bytes_in - before_bytes
    before_bytes, began_s = link.bytes_in, clock()
    assert await borrower.borrow([PEER]) is not None
    borrowed_s, borrowed_bytes = clock() - began_s, link.bytes_in - before_bytes
    await link.close()
    return {
        "loaded_s": loaded_s,
        "loaded_bytes": loaded_bytes,
        "borrowed_s": borrowed_s,
        "borrowed_bytes": borrowed_bytes,
        "lent_bytes": layout.size_bytes,
    }


def joined(url: str, model: Model) -> dict[str, float]:
    """Join, in a process of its own."""
    return asyncio.run(join(url, model))


def flood(server: socket.socket, size_bytes: int) -> None:
    """Send so much to each that connects."""
    block = bytes(1 << 18)
    while True:
        with server.accept()[0] as sock, contextlib.suppress(OSError):
            for _ in range(size_bytes // len(block)):
                sock.sendall(block)


def raw_mb_s(port: int) -> float:
    """Return the rate of one TCP stream, from its first byte to its last."""
    buffer, count = bytearray(1 << 20), 0
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.recv_into(buffer, 1)
        began_s = time.perf_counter()
        while got := sock.recv_into(buffer):
            count += got
    return count / MB / (time.perf_counter() - began_s)


@contextlib.contextmanager
def relay(folder: Path, rate_mbit_s: float, delay_s: float, targets: dict[str, int]) -> Iterator[dict[str, int]]:
    """Run a relay to servers on these ports, by name; yield the ports that lead to them."""
    lines = ['control = "127.0.0.1:0"', "[defaults]", f"rate_bits_per_s = {rate_mbit_s * 1e6}", f"delay_s = {delay_s / 2}"]
    for name, port in targets.items():
        lines += ["[[routes]]", f'from = "near{name}"', 'to = "far"', 'traffic = "bulk"']
        lines += ['listen = "127.0.0.1:0"', f'target = "127.0.0.1:{port}"']
    config = folder / "wan.toml"
    config.write_text("\n".join(lines))
    command = [sys.executable, "-m", "diloco_ops.cli", "wan", "serve", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        ports: dict[str, int] = {}
        assert process.stderr is not None
        for line in process.stderr:
            event = json.loads(line)
            if event["event"] == "wan_started":
                break
            ports[event["link"].removeprefix("near").removesuffix("-far")] = int(event["listen"].rpartition(":")[2])
        yield ports
        process.terminate()
        process.communicate()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fill a log, and join at each rate."""
    model, spawn = Model(arguments.parameters, arguments.fragments), multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as started, tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        server = Server(folder / "nats")
        server.start()
        started.callback(server.kill)
        stored_bytes = asyncio.run(fill(server.url, model))
        source = started.enter_context(socket.create_server(("127.0.0.1", 0)))
        ready = spawn.Event()
        for target, parameters in ((lend, (server.url, model, ready)), (flood, (source, stored_bytes))):
            process = spawn.Process(target=target, args=parameters, daemon=True)
            process.start()
            started.callback(process.terminate)
        ready.wait(DEADLINE_S)
        rows = []
        with ProcessPoolExecutor(1, spawn) as pool:
            targets = {"nats": server.port, "raw": source.getsockname()[1]}
            for rate_mbit_s in arguments.rates:
                with relay(folder, rate_mbit_s, arguments.delay, targets) as ports:
                    raws, joins = [], []
                    for _ in range(arguments.samples):
                        raws.append(raw_mb_s(ports["raw"]))
                        joins.append(pool.submit(joined, f"nats://127.0.0.1:{ports['nats']}", model).result())
                rows.append(row(rate_mbit_s, stored_bytes, raws, joins))
    about = {name: getattr(arguments, name) for name in ("parameters", "fragments", "delay", "samples")}
    return {"machine": script.machine(), **about, "stored_bytes": stored_bytes, "rows": rows}


def row(rate_mbit_s: float, stored_bytes: int, raws: list[float], joins: list[dict[str, float]]) -> dict[str, Any]:
    """Return one link's turns."""
    lent_bytes = joins[0]["lent_bytes"]
    read_bytes = max(sample["loaded_bytes"] + sample["borrowed_bytes"] for sample in joins)
    found: dict[str, Any] = {"rate_mbit_s": rate_mbit_s, "raw_mb_s": statistics.median(raws)}
    for name, done in (("log", "loaded"), ("loan", "borrowed")):
        rates = [sample[f"{done}_bytes"] / MB / sample[f"{done}_s"] for sample in joins]
        shares = [rate / raw for rate, raw in zip(rates, raws, strict=True)]
        found[name] = {"mb_s": statistics.median(rates), "share": statistics.median(shares), "best_share": max(shares)}
    found["join_s"] = statistics.median(sample["loaded_s"] + sample["borrowed_s"] for sample in joins)
    return found | {"read": read_bytes / (stored_bytes + lent_bytes)}


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    print(
        f"{result['parameters']:,} parameters in {result['fragments']} fragments, {result['delay'] * 1e3:g} ms, medians of "
        f"{result['samples']}; keyframes and entries {result['stored_bytes'] / MB:.0f} MB; share: target {SHARE_TARGET}; "
        f"read: target {READ_TARGET}"
    )
    columns = "".join(f"{name + ' MB/s':>11}{'share':>7}{'best':>6}" for name in ("log", "loan"))
    print(f"{'Mbit/s':>8}{'raw MB/s':>10}{columns}{'read':>6}{'joins in s':>12}")
    for row in result["rows"]:
        parts = [row["log"], row["loan"]]
        columns = "".join(f"{part['mb_s']:11.1f}{part['share']:7.2f}{part['best_share']:6.2f}" for part in parts)
        print(f"{row['rate_mbit_s']:8g}{row['raw_mb_s']:10.1f}{columns}{row['read']:6.2f}{row['join_s']:12.1f}")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=24_000_000)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 200], metavar="MBIT_S")
    parser.add_argument("--delay", type=float, default=0.08, help="there and back, in seconds")
    parser.add_argument("--samples", type=int, default=3)
    arguments = parser.parse_args()
    script.print_result(measure(arguments), arguments, show)


if __name__ == "__main__":
    main()
