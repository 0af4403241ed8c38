"""A rolling restart: every service of the run of ``docker-compose.yml`` is restarted, one after another, while it goes on.

    python bench/rolling.py
    python bench/rolling.py --json

It starts the three regions with their relay as a compose project of its own, waits until every learner's work is merged, and
then restarts each container with SIGTERM, as an upgrade does: first the coordinator and the evaluator, the servers of the
control store, those of the regions, the syncers, the learners. The next one is restarted when this one is ready again.
Meanwhile it hears the run's heartbeats at the control store of `us`, and its entries at the server there, and counts:

* rounds that had as many answers as their quorum, and of these the ones of which no version came, by any syncer;
* tokens that learners booked as lost, and of how many that they processed, as steps are: all steps have as many.

The run keeps the steps that are taken while an answer is on its way (`carry.overlap`), so that nothing is lost but by restarts
and by what comes too late for its round. The model is small and its steps mostly asleep, a quarter of a second or more each,
so that many processes fit a few cores. Needs a docker daemon and the base images.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import script

from diloco.control import creation
from diloco.errors import DilocoError, MessageError
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import free_ports

ROOT = Path(__file__).parents[1]
REGIONS = ("us", "eu", "ap")
LEARNERS = tuple(f"learner-{region}-0" for region in REGIONS)
ORDER = (
    "coordinator",
    "evaluator",
    *(f"control-{region}" for region in REGIONS),
    *(f"nats-{region}" for region in REGIONS),
    *(f"syncer-{region}" for region in REGIONS),
    *(f"learner-{region}" for region in REGIONS),
)
GRACE_S = {"learner": 40, "syncer": 20}  # as docker-compose.yml has them
DEADLINE_S = 600.0
AFTERWARDS_S = 30.0  # the last rounds end
MOST_LOST = 0.01  # of all steps

RUN = """
[settings]
tokens = 100_000_000_000
learners = 3
shards = 3
fragments = { count = 12 }
regions = { names = ["us", "eu", "ap"], control_replicas = 3 }
task = { layers = 1, width = 32, heads = 2, context = 64, batch = 4 }
"""
SLOW = 25  # times that a step takes as long as it takes
READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=5)"


@dataclass
class Watch:
    """Counts of a run, from its messages."""

    run: str
    identity: bytes = b""
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    announced: dict[tuple[str, int], int] = field(default_factory=dict)  # version of the newest round, by owner and fragment
    quorate: dict[tuple[int, int], str] = field(default_factory=dict)  # fragment and version of rounds with a quorum: whose
    made_by: dict[tuple[int, int], str] = field(default_factory=dict)  # of versions that were heard
    newest: dict[int, int] = field(default_factory=dict)  # version by fragment

    async def open(self, control: str, bulk: str) -> NatsTransport:
        """Connect, when the run is there."""
        link = await NatsTransport.open(control, bulk, "rolling", get_logger(), give_up_after_s=DEADLINE_S)
        self.identity = (await creation.find(link, self.run, get_logger())).identity
        names = Subjects(self.run)
        await link.subscribe(names.heartbeat(), self._hear_heartbeat)
        await link.subscribe(names.shard(), self._hear_shard)
        await link.subscribe(names.round(), self._hear_round)
        await link.serve(names.record("*"), self._hear_record)  # over the connection to the region's server
        return link

    async def _hear_heartbeat(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, Heartbeat, self.identity)[0]
            self.heartbeats[heartbeat.learner] = heartbeat

    async def _hear_round(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            round_ = framing.unpack(message.data, Announcement, self.identity)[0]
            self.announced[round_.syncer, round_.fragment] = round_.version

    async def _hear_shard(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, ShardHeartbeat, self.identity)[0]
            for fragment, answers, quorum, _ in heartbeat.open:
                version = self.announced.get((heartbeat.syncer, fragment))
                if version is not None and answers >= quorum:
                    self.quorate.setdefault((fragment, version), heartbeat.syncer)

    async def _hear_record(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            record = framing.unpack(message.data, Record, self.identity)[0]
            if record.entry == "version":
                self.made_by[record.fragment, record.version] = record.syncer
                self.newest[record.fragment] = max(record.version, self.newest.get(record.fragment, 0))

    def lost_tokens(self) -> float:
        """By all learners so far: of each the mean over its fragments."""
        return sum(sum(heartbeat.lost_tokens) / len(heartbeat.lost_tokens) for heartbeat in self.learners())

    def tokens(self) -> int:
        """Return the tokens processed by all learners so far."""
        return sum(heartbeat.tokens for heartbeat in self.learners())

    def learners(self) -> list[Heartbeat]:
        return [heartbeat for name, heartbeat in self.heartbeats.items() if name in LEARNERS]

    def merged_all(self) -> bool:
        """Whether every learner trains, and has applied versions of every fragment."""
        found = self.learners()
        return len(found) == len(LEARNERS) and all(
            heartbeat.state == "stepping" and min(heartbeat.versions) > 0 for heartbeat in found
        )


class Project:
    """The run of ``docker-compose.yml`` as a compose project of its own; ``folder`` holds what is different."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(RUN)
        slow = {f"learner-{region}": {"environment": {"DILOCO_SLOW": str(SLOW)}} for region in REGIONS}
        changes = {"configs": {"run": {"file": str(folder / "run.toml")}}, "services": slow}
        self.changes = folder / "override.json"  # which is YAML too
        self.changes.write_text(json.dumps(changes))
        self.name = f"diloco-rolling-{uuid.uuid4().hex[:8]}"
        ports = dict(zip(("CONTROL_PORT", "NATS_PORT", "WAN_PORT", "PAGE_PORT"), map(str, free_ports(4)), strict=True))
        self.environment = ports
        self.control, self.bulk = (f"nats://127.0.0.1:{ports[name]}" for name in ("CONTROL_PORT", "NATS_PORT"))

    def compose(self, *arguments: str) -> str:
        return _docker("compose", "-p", self.name, *self._files(), *arguments, **self.environment)

    def _files(self) -> list[str]:
        return ["-f", str(ROOT / "docker-compose.yml"), "-f", str(self.changes)]

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--format", "{{.Name}}", service).split()

    async def restart(self, container: str, service: str) -> float:
        """End a container in order, start it, and wait until it is ready; how long that took."""
        kind = service.split("-")[0]
        began_s = time.monotonic()
        await asyncio.to_thread(_docker, "restart", "--time", str(GRACE_S.get(kind, 10)), container)
        server = kind in ("control", "nats")
        asked = ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8222/healthz"] if server else ["python", "-c", READY]
        while not await asyncio.to_thread(_works, "exec", container, *asked):
            if time.monotonic() - began_s > DEADLINE_S:
                raise SystemExit(f"bench/rolling.py: {container} is not ready after {DEADLINE_S:g} s")
            await asyncio.sleep(0.5)
        return time.monotonic() - began_s


def _docker(*arguments: str, **environment: str) -> str:
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, env=os.environ | environment)
    if ended.returncode:
        raise SystemExit(f"bench/rolling.py: docker {' '.join(arguments)}: {ended.stderr[-2000:]}")
    return ended.stdout


def _works(*arguments: str) -> bool:
    return subprocess.run(["docker", *arguments], capture_output=True, check=False).returncode == 0


async def measure() -> dict[str, Any]:
    """Start the run, restart everything, and count."""
    with tempfile.TemporaryDirectory() as folder:
        return await _measure(Project(Path(folder)))


async def _measure(project: Project) -> dict[str, Any]:
    project.compose("build")
    project.compose("up", "-d")
    try:
        watch = Watch("run")
        link = await watch.open(project.control, project.bulk)
        end_s = time.monotonic() + DEADLINE_S
        while not watch.merged_all():
            if time.monotonic() > end_s:
                raise SystemExit(f"bench/rolling.py: not every learner is merged within {DEADLINE_S:g} s")
            await asyncio.sleep(0.5)
        began_s, tokens, lost, versions = time.monotonic(), watch.tokens(), watch.lost_tokens(), sum(watch.newest.values())
        watch.quorate.clear()
        took_s, lost_by = {}, {}
        for service in ORDER:
            for container in project.containers(service):
                name, before = container.removeprefix(f"{project.name}-"), watch.lost_tokens()
                took_s[name] = await project.restart(container, service)
                lost_by[name] = watch.lost_tokens() - before
                print(f"{name}: ready after {took_s[name]:.1f} s, lost {lost_by[name]:.0f} tokens", file=sys.stderr)
        wall_s = time.monotonic() - began_s
        quorate = dict(watch.quorate)
        end_s = time.monotonic() + DEADLINE_S
        while not (watch.merged_all() and time.monotonic() > began_s + wall_s + AFTERWARDS_S):
            if time.monotonic() > end_s:
                raise SystemExit(f"bench/rolling.py: not every learner trains again within {DEADLINE_S:g} s")
            await asyncio.sleep(0.5)
        # a version further on has all before it: the chain has no gaps
        gone = [round_ for round_ in quorate if watch.newest.get(round_[0], 0) < round_[1]]
        elsewhere = sum(watch.made_by.get(round_, owner) != owner for round_, owner in quorate.items())
        processed = watch.tokens() - tokens
        await link.close()
    finally:
        with contextlib.suppress(SystemExit, DilocoError):
            project.compose("down", "--volumes", "--timeout", "5")
    return {
        "restarts": len(took_s),
        "wall_s": wall_s,
        "took_s": took_s,
        "lost_by": lost_by,
        "versions": sum(watch.newest.values()) - versions,
        "rounds_with_quorum": len(quorate),
        "rounds_made_by_another_owner": elsewhere,
        "rounds_lost": len(gone),
        "tokens_processed": processed,
        "tokens_lost": watch.lost_tokens() - lost,
        "steps_lost": (watch.lost_tokens() - lost) / processed if processed else 0.0,
        **script.machine(),
    }


def show(result: dict[str, Any]) -> None:
    slowest = max(result["took_s"].items(), key=lambda item: item[1])
    print(
        f"{result['restarts']} restarts in {result['wall_s']:.0f} s; the longest {slowest[0]}, ready after {slowest[1]:.0f} s\n"
        f"{result['versions']} versions; rounds with a quorum {result['rounds_with_quorum']}, of these lost "
        f"{result['rounds_lost']} (target: 0), made by another owner {result['rounds_made_by_another_owner']}\n"
        f"steps lost {100 * result['steps_lost']:.3f} % (target: at most {100 * MOST_LOST:g} %): "
        f"{result['tokens_lost']:.0f} of {result['tokens_processed']} tokens"
    )


def main() -> int:
    arguments: argparse.Namespace = script.parser(__doc__).parse_args()
    observe.configure("rolling", "", level="error")  # that its own connections are lost is what it is for
    result = asyncio.run(measure())
    script.print_result(result, arguments, show)
    return int(result["rounds_lost"] > 0 or result["steps_lost"] > MOST_LOST)


if __name__ == "__main__":
    sys.exit(main())
