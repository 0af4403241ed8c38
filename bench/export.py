"""Export: the peak of memory of ``diloco export``, in fragments of the model, by format.

    python bench/export.py                         # 1.1G parameters in 24 fragments; needs 25 GB of disk
    python bench/export.py --layers 1 --width 256 --formats safetensors --json

No run is trained: a ``nats-server`` gets the log of one, in the shapes of a Llama of 22 layers: of every fragment version 0,
an entry, and a keyframe after it, all of them noise. Then ``diloco export`` reads it in a process of its own, whose memory is
looked at a hundred times a second: that which the system cannot take back. *base* is that of the same command over a model of
171 thousand parameters: Python, NumPy, and for ``orbax`` JAX. *fragments* is what the large model takes above it, by the size
of its largest fragment; target: 2. *with files* counts resident pages of files, too: the momentum's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import script
from numpy.typing import NDArray

from diloco.control import creation, genesis
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.offers import Offer
from diloco_ops.broker.server import CONNECT_TIMEOUT_S, Server

FORMATS = ("safetensors", "hf", "orbax")
TARGET = 2.0
MB = 10**6


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
    """Write a run's settings, its map, version 0 of every fragment, and genesis."""
    link = await NatsTransport.open(directory.nats_url, directory.nats_url, "bench", get_logger(), CONNECT_TIMEOUT_S)
    run = await creation.create(link, directory.name, directory.settings)
    await run.registry.create("map", fragment_map.pack())
    log, chance = Log(link, run.name, run.identity, fragment_map, run.created), np.random.default_rng(0)
    hashes = [
        await log.writer.append_first(fragment.index, await noise(chance, fragment.size)) for fragment in fragment_map.fragments
    ]
    await log.writer.conclude("bench", run.created.digest(), hashes, genesis.decision(run))
    for fragment in fragment_map.fragments:
        await add_version(log, directory.settings, fragment.index, chance)
    await link.close()


async def noise(chance: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Return noise, float32 [size]; in a thread, since a connection that is not read for seconds is lost."""
    return await asyncio.to_thread(chance.standard_normal, size, np.float32)


async def add_version(log: Log, settings: RunSettings, fragment: int, chance: np.random.Generator) -> None:
    """Write an entry of version 1, which merges noise, and a keyframe after it."""
    founded = await log.reader.genesis()
    assert founded is not None
    replica = (await log.reader.load(fragment, *founded)).replica
    delta, residual = await noise(chance, replica.theta.size), np.zeros(replica.theta.size, np.float32)
    nothing = Body(0, bytes(32), 0, bytes(8))
    offer = Offer(fragment, "ann", 1, 1, (0, 0), 1, 0, bytes(32), 4, 1, 1, 0, [], nothing)
    merge = Merge(1, (RoundOffer(offer, delta.view(np.uint8)),), False, 0.0, 0.0)
    made = partial(merging.make_version, bits=4, syncer="s", attempt=os.urandom(8), now_s=0.0)
    record, inline, parts = await asyncio.to_thread(made, replica, residual, delta, merge, settings)
    sequence = await log.writer.append_record(record, inline, parts, await log.reader.head_sequence(fragment))
    replica.chain.advance(record, framing.hash_of(record, log.run), sequence)
    await log.writer.append_keyframe(replica, residual, None)


def peak_bytes(directory: Path, format_: str, folder: Path) -> tuple[int, int, float, int]:
    """Export a run; return the peak of memory held, and with files, the seconds, and the bytes written."""
    config, out = folder / "config.json", folder / "out"
    config.write_text("{}")
    command = [sys.executable, "-m", "diloco_ops.cli", "export", str(directory), str(out), "--format", format_]
    if format_ == "hf":
        command += ["--config", str(config), "--names", str(config)]
    began_s = time.monotonic()
    process, held, peak = subprocess.Popen(command), 0, 0
    while process.poll() is None:  # ru_maxrss would count this process, which was there before the command's program
        held = max(held, script.held_bytes(process.pid))
        peak = max(peak, script.peak_rss_bytes(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    files = [out] if out.is_file() else [each for each in out.rglob("*") if each.is_file()]
    written = sum(each.stat().st_size for each in files)
    for each in files:
        each.unlink()
    return held, peak, time.monotonic() - began_s, written


def measure(fragment_map: FragmentMap, formats: list[str]) -> dict[str, tuple[int, int, float, int]]:
    """Found a run of a model, and export it in each format."""
    with tempfile.TemporaryDirectory(prefix="diloco-export-") as name:
        server = Server(Path(name) / "nats")
        server.start()
        try:
            settings = run_settings(overrides={"fragments.count": len(fragment_map.fragments), "log.archive": False})
            directory = RunDirectory(Path(name) / "run", "run", server.url, None, settings)
            directory.save()
            asyncio.run(found(directory, fragment_map))
            results = {}
            for format_ in formats:
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    results[format_] = peak_bytes(directory.path, format_, Path(folder))
            return results
        finally:
            server.stop()


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['parameters'] / 1e6:.0f}M parameters in {result['fragments']} fragments "
        f"of at most {result['fragment_mb']:.0f} MB"
    )
    for row in result["rows"]:
        print(
            f"  {row['format']:<12} peak {row['peak_mb']:6.0f} MB, base {row['base_mb']:4.0f} MB: {row['in_fragments']:.2f} "
            f"fragments (target {TARGET:g}), {row['with_files']:.2f} with files; {row['written_mb']:.0f} MB "
            f"in {row['seconds']:.0f} s"
        )


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    arguments: argparse.Namespace = parser.parse_args()
    fragment_map = llama(arguments.width, arguments.layers, arguments.fragments)
    base = measure(llama(64, 1, arguments.fragments), arguments.formats)
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
        for format_, (held, peak, seconds, written) in measure(fragment_map, arguments.formats).items()
    ]
    about = {"parameters": fragment_map.parameters, "fragments": len(fragment_map.fragments)}
    result = script.machine() | about | {"fragment_mb": fragment_bytes / MB, "rows": rows}
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
