"""Readers of a run's log: a learner that joins over a long link, an export, and a look at norms that stand out.

python bench/log_readers.py joining                       # 1 Gbit/s and 200 Mbit/s, 80 ms there and back; a minute
python bench/log_readers.py joining --parameters 2000000 --rates 200 --samples 1 --json
python bench/log_readers.py export                        # 1.1G parameters in 24 fragments; needs 25 GB of disk
python bench/log_readers.py export --layers 1 --width 256 --formats safetensors --json
python bench/log_readers.py outliers runs/mixed           # a run of yours
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from harness.console import Bench, Result, Script, folder
from harness.host import MB, held_bytes, machine, peak_rss_bytes
from harness.wan_relay import Relay
from numpy.typing import NDArray

from diloco.control import creation, genesis
from diloco.core.syncer import excess, merging
from diloco.core.syncer.outliers import Norms
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.log.entries import fold
from diloco.log.follower import LogFollower
from diloco.log.log import Log
from diloco.log.stream import LogEntry, pass_over
from diloco.member.peer import Borrower, InMemory, Layout, Lender
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.settings.run import QuarantineSettings, RunSettings
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.offers import Offer
from diloco_ops.audit.refold import refold
from diloco_ops.broker.server import Server
from diloco_ops.reading.run_reader import opened

BITS: Final = 4
NOTHING = Body(0, bytes(32), 0, bytes(8))
DEADLINE_S = 120.0


async def open_link(url: str, name: str) -> NatsTransport:
    return await NatsTransport.open(url, url, name, get_logger(), DEADLINE_S)


async def noise(chance: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Return noise, float32 [size]; in a thread, since a connection that is not read for seconds is lost."""
    return await asyncio.to_thread(chance.standard_normal, size, np.float32)


async def add_version(
    log: Log, settings: RunSettings, replica: Any, version: int, delta: NDArray[np.float32], *, keyframe: bool
) -> Record:
    """Append an entry that merges ``delta``, float32 [size], and a keyframe after it if one is wanted."""
    index, residual = replica.chain.fragment, np.zeros(delta.size, np.float32)
    offer = Offer(index, "ann", 1, version, (0, 0), version, version - 1, bytes(32), BITS, 1, 1, 0, [], NOTHING)
    merge = Merge(version, (RoundOffer(offer, delta.view(np.uint8)),), False, 0.0, 0.0)
    made = partial(merging.make_version, bits=BITS, syncer="s", attempt=os.urandom(8), now_s=0.0)
    record, inline, parts = await asyncio.to_thread(made, replica, residual, delta, merge, settings)
    sequence = await log.writer.append_record(record, inline, parts, await log.reader.head_sequence(index))
    replica.chain.advance(record, framing.hash_of(record, log.run), sequence)
    if keyframe:
        await log.writer.append_keyframe(replica, residual, None)
    return record


# ---- joining

RUN, PEER = "bench", "peer"
SHARE_TARGET, READ_TARGET = 0.85, 1.1


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
        """Return the state of AdamW, noise: float32 [parameters] for each moment; the second has no negative values."""
        chance = np.random.default_rng(seed)
        mu, nu = (chance.standard_normal(self.parameters, np.float32) for _ in range(2))
        return {"mu": mu, "nu": np.square(nu)}


async def fill(url: str, model: Model) -> int:
    """Store keyframes of version 1 and entries of version 2; return the bytes of both."""
    link, settings = await open_link(url, "writer"), run_settings()
    log = model.log(link)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    chance = np.random.default_rng(0)
    sizes = [fragment.size for fragment in log.map.fragments]

    async def thetas() -> AsyncIterator[NDArray[np.float32]]:
        for size in sizes:
            yield await noise(chance, size)

    await log.writer.found("ann", settings.digest(), thetas())
    founded, stored_bytes = await log.reader.genesis(), 0
    assert founded is not None
    for index, size in enumerate(sizes):
        replica = (await log.reader.load(index, *founded)).replica
        for version in (1, 2):
            record = await add_version(log, settings, replica, version, await noise(chance, size), keyframe=version == 1)
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
    founded = await log.reader.genesis()
    assert founded is not None
    chunks = [chunk for whole in layout.wholes() for chunk in whole.cut()]
    borrower = Borrower(link, log.run, log.subjects, "learner", layout, chunks, lambda chunk, values: None, get_logger())
    before_bytes, began_s = link.bytes_in, clock()
    follower = LogFollower(log, founded, pass_over, get_logger(), in_place=False)
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


def joining(
    *,
    parameters: int = 24_000_000,
    fragments: int = 4,
    rates: Annotated[Sequence[float], "of the link, in Mbit/s"] = (1000.0, 200.0),
    delay: Annotated[float, "there and back, in seconds"] = 0.08,
    samples: int = 3,
) -> Result:
    """Join over a long fast link: keyframes, the entries behind them and a peer's optimizer state, against the link itself.

    A ``nats-server`` that holds a run's log: of each fragment a keyframe of version 1 and the entry of version 2. A learner's
    follower loads them all, and borrows the state of AdamW, 8 bytes a parameter. It reaches the server through a relay
    (``diloco wan serve``) with the rate and half of the delay in each direction. Learner, lender, relay and server are
    processes of their own.

    *raw* is a single TCP stream through the same link in the same minute, from its first byte to its last: where the machine's
    processors carry less than the rate, that is what there is. *share* is the rate at which the learner reads, against raw;
    target 0.85: the median of the turns and the best one, which tells more where the processors are busy with other work. It
    counts all from the first request to the last fold. *read* is all that it reads, against the keyframes, the entries behind
    them and the loan; target at most 1.1.
    """
    model, spawn = Model(parameters, fragments), multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as started, folder() as place:
        server = Server(place / "nats")
        server.start()
        started.callback(server.kill)
        stored_bytes = asyncio.run(fill(server.url, model))
        source = started.enter_context(socket.create_server(("127.0.0.1", 0)))
        ready = spawn.Event()
        for target, arguments in ((lend, (server.url, model, ready)), (flood, (source, stored_bytes))):
            process = spawn.Process(target=target, args=arguments, daemon=True)
            process.start()
            started.callback(process.terminate)
        ready.wait(DEADLINE_S)
        rows = []
        routes = [("nats", "far", "bulk", 0, server.port), ("raw", "far", "bulk", 0, source.getsockname()[1])]
        with ProcessPoolExecutor(1, spawn) as pool:
            for rate in rates:
                conditions = {"rate_bits_per_s": rate * 1e6, "delay_s": delay / 2}
                with contextlib.closing(Relay(place, routes, defaults=conditions)) as relay:
                    raws, joins = [], []
                    for _ in range(samples):
                        raws.append(raw_mb_s(relay.port("raw", "far")))
                        url = f"nats://127.0.0.1:{relay.port('nats', 'far')}"
                        joins.append(pool.submit(joined, url, model).result())
                rows.append(row(rate, stored_bytes, raws, joins))
    about = {"parameters": parameters, "fragments": fragments, "delay": delay, "samples": samples}
    return {"machine": machine(), **about, "stored_bytes": stored_bytes, "rows": rows}


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


def show_joining(result: Result) -> None:
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


# ---- export

FORMATS = ("safetensors", "hf", "orbax")

EXPORT_TARGET = 2.0


def llama(width: int, layers: int, fragments: int) -> FragmentMap:
    """Return the tensors of a Llama with the proportions of 1.1G parameters at a width of 2048, in fragments."""
    vocabulary, hidden, shared = width * 32000 // 2048, width * 5632 // 2048, width // 8
    tensors = [TensorSpec("embed", (vocabulary, width), embedding=True), TensorSpec("head", (vocabulary, width))]
    for layer in range(layers):
        rows = {"q": width, "k": shared, "v": shared, "o": width, "gate": hidden, "up": hidden}
        tensors += [TensorSpec(f"layers/{layer}/{name}", (count, width)) for name, count in rows.items()]
        tensors += [TensorSpec(f"layers/{layer}/down", (width, hidden)), TensorSpec(f"layers/{layer}/norm", (width,))]
    return build_map(tensors, fragments)


async def found(directory: RunDirectory, fragment_map: FragmentMap) -> None:
    """Write a run's settings, its map, version 0 of every fragment, genesis, and a version 1 that merges noise."""
    link = await open_link(directory.nats_url, "bench")
    run = await creation.create(link, directory.name, directory.settings)
    await run.registry.create("map", fragment_map.pack())
    log, chance = Log(link, run.name, run.identity, fragment_map, run.created), np.random.default_rng(0)
    fragments = fragment_map.fragments
    hashes = [await log.writer.append_first(each.index, await noise(chance, each.size)) for each in fragments]
    await log.writer.conclude("bench", run.created.digest(), hashes, genesis.decision(run))
    founded = await log.reader.genesis()
    assert founded is not None
    for each in fragments:
        replica = (await log.reader.load(each.index, *founded)).replica
        await add_version(log, run.created, replica, 1, await noise(chance, each.size), keyframe=True)
    await link.close()


def export_peaks(directory: Path, format_: str, folder: Path) -> tuple[int, int, float, int]:
    """Export a run; return the peak of memory held, and with files, the seconds, and the bytes written."""
    config, out = folder / "config.json", folder / "out"
    config.write_text("{}")
    command = [sys.executable, "-m", "diloco_ops.cli", "export", str(directory), str(out), "--format", format_]
    if format_ == "hf":
        command += ["--config", str(config), "--names", str(config)]
    began_s = time.monotonic()
    process, held, peak = subprocess.Popen(command), 0, 0
    while process.poll() is None:  # ru_maxrss would count this process, which was there before the command's program
        held = max(held, held_bytes(process.pid))
        peak = max(peak, peak_rss_bytes(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    files = [out] if out.is_file() else [each for each in out.rglob("*") if each.is_file()]
    written = sum(each.stat().st_size for each in files)
    for each in files:
        each.unlink()
    return held, peak, time.monotonic() - began_s, written


def exported(fragment_map: FragmentMap, formats: Sequence[str]) -> dict[str, tuple[int, int, float, int]]:
    """Found a run of a model, and export it in each format."""
    with folder() as place, contextlib.ExitStack() as started:
        server = Server(place / "nats")
        server.start()
        started.callback(server.stop)
        settings = run_settings(overrides={"fragments.count": len(fragment_map.fragments), "log.archive": False})
        directory = RunDirectory(place / "run", "run", server.url, None, settings)
        directory.save()
        asyncio.run(found(directory, fragment_map))
        results = {}
        for format_ in formats:
            with folder(place / format_) as own:
                results[format_] = export_peaks(directory.path, format_, own)
        return results


def export(
    *,
    width: int = 2048,
    layers: int = 22,
    fragments: int = 24,
    formats: Annotated[Sequence[str], FORMATS, "all by default"] = FORMATS,
) -> Result:
    """Measure the peak of memory of ``diloco export``, in fragments of the model, by format.

    No run is trained: a ``nats-server`` gets the log of one, in the shapes of a Llama of 22 layers: of every fragment version
    0, an entry, and a keyframe after it, all of them noise. Then ``diloco export`` reads it in a process of its own, whose
    memory is looked at a hundred times a second: that which the system cannot take back. *base* is that of the same command
    over a model of 171 thousand parameters: Python, NumPy, and for ``orbax`` JAX. *fragments* is what the large model takes
    above it, by the size of its largest fragment; target: 2. *with files* counts resident pages of files, too: the momentum's.
    """
    fragment_map, base = llama(width, layers, fragments), exported(llama(64, 1, fragments), formats)
    fragment_bytes = 4 * max(fragment.size for fragment in fragment_map.fragments)
    rows = [
        {
            "format": format_,
            "peak_mb": held / MB,
            "base_mb": base[format_][0] / MB,
            "in_fragments": (held - base[format_][0]) / fragment_bytes,
            "with_files": (peak - base[format_][1]) / fragment_bytes,
            "written_mb": written / MB,
            "seconds": seconds,
        }
        for format_, (held, peak, seconds, written) in exported(fragment_map, formats).items()
    ]
    about = {"parameters": fragment_map.parameters, "fragments": len(fragment_map.fragments)}
    return machine() | about | {"fragment_mb": fragment_bytes / MB, "rows": rows}


def show_export(result: Result) -> None:
    print(
        f"{result['parameters'] / 1e6:.0f}M parameters in {result['fragments']} fragments "
        f"of at most {result['fragment_mb']:.0f} MB"
    )
    for row in result["rows"]:
        print(
            f"  {row['format']:<12} peak {row['peak_mb']:6.0f} MB, base {row['base_mb']:4.0f} MB: {row['in_fragments']:.2f} "
            f"fragments (target {EXPORT_TARGET:g}), {row['with_files']:.2f} with files; {row['written_mb']:.0f} MB "
            f"in {row['seconds']:.0f} s"
        )


# ---- outliers


async def ratios(path: Path) -> dict[str, float]:
    """Return the largest ratio of each learner."""
    largest: dict[str, float] = defaultdict(float)
    async with opened(path) as outside:
        for fragment in outside.map.fragments if outside.run.created.log.archive else ():
            entries: list[LogEntry] = []
            await refold(outside, fragment.index, entries.append)
            norms, heard = Norms(), set[str]()
            for entry in entries:
                offers = []
                for member in entry.record.members:
                    archived = await outside.log.archive.offer(entry.record, member)
                    if archived is not None:
                        offer, body = archived
                        offers.append((offer, quantise.norm_of(body, fragment.size, offer.bits)))
                        heard.add(member.learner)
                for found in norms.judge(offers, heard, QuarantineSettings(factor=1.0)):
                    if found.is_outlier:
                        largest[found.learner] = max(largest[found.learner], found.norm / found.threshold)
    return dict(largest)


async def moves(path: Path) -> list[tuple[float, int, int]]:
    """Return for each version the ratio of its norm to the usual, with its fragment and number."""
    found: list[tuple[float, int, int]] = []
    async with opened(path) as outside:
        genesis, settings = await outside.log.reader.genesis(), outside.run.created
        assert genesis is not None
        for fragment in outside.map.fragments:
            entries: list[LogEntry] = []
            await refold(outside, fragment.index, entries.append)
            replica = await outside.log.reader.state_at(fragment.index, 0, *genesis)
            for entry in entries:
                record, usual = entry.record, excess.usual(replica)
                if entry.body is not None and record.entry == "version" and usual:
                    moved = quantise.norm_of(entry.body, fragment.size, record.bits)
                    steps = max(member.steps for member in record.members)
                    ratio = moved / usual / max(1.0, steps / settings.round.steps)
                    found.append((ratio, fragment.index, record.version))
                fold(replica, entry)
    return sorted(found, reverse=True)


async def outliers(directory: Path) -> None:
    """Print how far norms of outer gradients and of merges stand out: which ``quarantine.*`` would tolerate them.

        diloco up --run-dir runs/mixed --set log.archive=true --slow learner-3=5
        python bench/log_readers.py outliers runs/mixed

    The largest ratio of a merged offer's norm to what the rule compares it with (``core/syncer/outliers.py``), by learner,
    where above 1. And the largest ratios of a merge's norm to the usual one (``core/syncer/excess.py``), over all versions of
    all fragments. That needs no archive, but all of the log (``--set log.keep_keyframes=1000000``).
    """
    for learner, ratio in sorted((await ratios(directory)).items()):
        print(f"{learner}: {ratio:.2f}")
    merges = await moves(directory)
    for ratio, fragment, version in merges[:8]:
        print(f"fragment {fragment}, version {version}: {ratio:.2f}")
    print(f"{len(merges)} merges")


SCRIPT = Script(__doc__, Bench(joining, show_joining), Bench(export, show_export), Bench(outliers))

if __name__ == "__main__":
    SCRIPT.run()
