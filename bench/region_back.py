"""How soon a region that lost its server's disk trains on current versions, and is whole again.

    python bench/region_back.py                         # 40 s away, the default model; five minutes
    python bench/region_back.py --away 10 --json

The bench begins a run with ``diloco up`` in three regions (its defaults otherwise). Once every fragment has versions, it
freezes all processes of one region for ``--away`` seconds. The other regions train on. Then the region's server loses its
files, and all processes of the region are killed at once. ``up`` starts them again.

Seconds count from the moment at which the server answers again. *brought* is the first heartbeat in which the region's syncer
says that the log is back, and *read* are the bytes that it has received from the other regions' servers until then.
*current* is the first heartbeat of the region's learner that steps, and has applied what the run had when the server was back.
*holds* is the end of the first ``diloco verify`` through the region that holds; the first begins 60 s after *current*.
*refused* is the sum of what all processes refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import script

from diloco.errors import MessageError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.subjects import Subjects
from diloco_ops.up.embedded import RATE_BITS_PER_S

REGIONS = ("ap", "eu", "us")
LOST = 1  # the region that loses its disk, which has neither the run's coordinator nor its founder
TARGET_S = 60.0
DEADLINE_S = 900.0
LEAD_VERSIONS = 5  # of every fragment, before the region is lost


class Watch:
    """The newest heartbeats of a run in three regions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.learners: dict[str, Heartbeat] = {}
        self.syncers: dict[str, ShardHeartbeat] = {}
        self.brought: dict[str, tuple[float, int]] = {}  # by region: when its log was back, and what was read for it

    async def open(self) -> NatsTransport:
        await script.until(self._begun, "the run's servers are up", DEADLINE_S)
        self.run = rundir.load(self.directory)
        self.urls = dict(self.run.region_urls or {})
        self.identity = framing.run_id(self.run.name, self.run.settings.digest())
        link = await NatsTransport.open(self.run.nats_url, self.run.nats_url, "bench", get_logger(), give_up_after_s=60)
        await link.subscribe(Subjects(self.run.name).heartbeat(), self._hear_learner)
        await link.subscribe(Subjects(self.run.name).shard(), self._hear_syncer)
        return link

    def _begun(self) -> bool:
        return (self.directory / "run.json").exists() and bool(rundir.load(self.directory).region_urls)

    async def _hear_learner(self, message: Heard) -> None:
        with suppress(MessageError):
            heartbeat = framing.unpack(message.data, Heartbeat, self.identity)[0]
            if heartbeat.role == "learner":
                self.learners[heartbeat.learner] = heartbeat

    async def _hear_syncer(self, message: Heard) -> None:
        with suppress(MessageError):
            heartbeat = framing.unpack(message.data, ShardHeartbeat, self.identity)[0]
            before = self.syncers.get(heartbeat.syncer)
            if before is not None and before.state == "unable" != heartbeat.state:
                received = sum(each[2] for each in heartbeat.crossing)
                self.brought[heartbeat.region] = time.monotonic(), received
            self.syncers[heartbeat.syncer] = heartbeat

    def applied(self, region: str, *, outside: bool = False) -> Any:
        """Return the newest version of each fragment that a learner in this region has applied, or one outside it."""
        chosen = [each.versions for each in self.learners.values() if (each.region == region) is not outside]
        return np.max(chosen or [[0] * self.run.settings.fragments.count], axis=0)

    def refused(self) -> int:
        """Return how many messages all processes that are heard have refused."""
        return sum(each.refused for each in self.learners.values()) + sum(each.refused for each in self.syncers.values())


@asynccontextmanager
async def training(folder: Path) -> AsyncIterator[Watch]:
    """Begin a run in three regions, and wait until each fragment has versions that all learners have applied."""
    directory = folder / "run"
    command = ["up", "--run-dir", str(directory), "--tokens", str(10**9), "--plain"]
    command += ["--set", f"regions.names={json.dumps(REGIONS)}"]
    with (folder / "up.txt").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=output, stderr=output)
    link = None
    try:
        watch = Watch(directory)
        link = await watch.open()
        await script.until(
            lambda: all(np.min(watch.applied(region)) >= LEAD_VERSIONS for region in REGIONS),
            f"every region has versions; `diloco up` said: {(folder / 'up.txt').read_text()}",
            DEADLINE_S,
        )
        yield watch
    finally:
        if link is not None:
            await link.close()
        process.send_signal(signal.SIGINT)
        await process.wait()


def members(watch: Watch, region: str) -> list[str]:
    """Return the names of a region's learners, syncers and server."""
    learners = [name for name, heartbeat in watch.learners.items() if heartbeat.region == region]
    syncers = [name for name, heartbeat in watch.syncers.items() if heartbeat.region == region]
    return [*learners, *syncers, f"nats-{region}"]


def signal_all(watch: Watch, names: list[str], how: signal.Signals) -> None:
    for name in names:
        os.kill(int((watch.directory / "services" / f"{name}.pid").read_text()), how)


def answers(url: str) -> bool:
    """Whether a server accepts connections and says so."""
    place = urlsplit(url)
    try:
        with socket.create_connection((str(place.hostname), int(place.port or 0)), 1.0) as made:
            made.settimeout(1.0)
            return made.recv(4) == b"INFO"
    except OSError:
        return False


async def verified(watch: Watch, folder: Path, region: str) -> tuple[bool, str]:
    """Whether ``diloco verify`` through a region's server holds, and what it said."""
    run, seen = watch.run, folder / "seen"
    shutil.rmtree(seen, ignore_errors=True)
    attach = ["attach", str(seen), "--nats", run.nats_url, "--run", run.name, "--bulk", watch.urls[region]]
    said = b""
    for command in (attach, ["verify", str(seen)]):
        process = await asyncio.create_subprocess_exec(
            *script.DILOCO, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode:
            return False, said.decode()
    return True, said.decode()


async def measure(away_s: float, folder: Path) -> dict[str, Any]:
    async with training(folder) as watch:
        lost = REGIONS[LOST]
        names, url = members(watch, lost), watch.urls[lost]
        before = watch.applied(lost)
        signal_all(watch, names, signal.SIGSTOP)
        await asyncio.sleep(away_s)
        missed = int(np.sum(watch.applied(lost, outside=True) - before))
        incarnations = {name: each.incarnation for name, each in watch.learners.items() if each.region == lost}
        shutil.rmtree(watch.directory / f"nats-{lost}" / "jetstream")
        signal_all(watch, names, signal.SIGKILL)
        await script.until(lambda: answers(url), "the server is back", DEADLINE_S)
        back_s, wanted = time.monotonic(), watch.applied(lost, outside=True)

        def steps() -> bool:
            found = [watch.learners[name] for name in incarnations]
            return all(each.incarnation > incarnations[each.learner] and each.state == "stepping" for each in found)

        await script.until(steps, "the region's learners step again", DEADLINE_S)
        first = watch.applied(lost)
        stepping_s = time.monotonic() - back_s
        await script.until(lambda: bool(np.all(watch.applied(lost) >= wanted)), "they train on current versions", DEADLINE_S)
        current_s = time.monotonic() - back_s
        brought_s, read_bytes = watch.brought[lost]
        await asyncio.sleep(TARGET_S)
        holds, said = await verified(watch, folder, lost)
        return {
            "machine": script.machine(),
            "away_s": away_s,
            "versions_missed": missed,
            "link_bits_per_s": RATE_BITS_PER_S,
            "read_bytes": read_bytes,
            "brought_s": brought_s - back_s,
            "stepping_s": stepping_s,
            "first_step_behind": int(np.max(wanted - first)),
            "current_s": current_s,
            "holds": holds,
            "holds_s": time.monotonic() - back_s,
            "verify": said.strip().splitlines()[-1:],
            "refused": watch.refused(),
            "target_s": TARGET_S,
        }


def show(result: dict[str, Any]) -> None:
    print(f"a region without its disk, away for {result['away_s']:g} s, {result['versions_missed']} versions missed")
    rate = f"links of {result['link_bits_per_s'] / 1e6:g} Mbit/s"
    print(f"  its log is back after {result['brought_s']:.1f} s: {result['read_bytes'] / 1e6:.1f} MB read over {rate}")
    print(
        f"  steps {result['stepping_s']:.1f} s after its server is back, {result['first_step_behind']} versions behind at most"
    )
    print(f"  on current versions after {result['current_s']:.1f} s (target: {result['target_s']:g} s)")
    print(f"  verify through it {'holds' if result['holds'] else 'FAILS'} at {result['holds_s']:.1f} s: {result['verify']}")
    print(f"  refused messages: {result['refused']} (target: 0)")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--away", type=float, default=40.0, help="seconds")
    parser.add_argument("--out", type=Path, help="keep the run here")
    arguments: argparse.Namespace = parser.parse_args()
    with script.folder(arguments.out) as folder:
        result = asyncio.run(measure(arguments.away, folder))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
