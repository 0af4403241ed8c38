"""A run over three regions with thin links: what crosses them, and what happens when a region is cut off, and when it is lost.

    python bench/wan.py                         # about six minutes
    python bench/wan.py --seconds 20 --cut 20   # shorter, and rougher

It begins a run of the default model with ``diloco up``, a learner and a syncer in each region. It measures, one after another:

* with links that are as fast as they can be, and with the default ones: the learners' steps a second, and the bytes that cross
  each region's border (all that the relay carries, signs of life included) a fragment cycle, against what a ring all-reduce of
  the model in four bits would send, ``2 (D-1)/D`` of it in each direction;
* one region cut off: the others' steps a second, and how long after healing a version merges a learner of the region again;
* that region lost for good (server, syncer and learner frozen): how long until each fragment that it owned has a next version.

At the end ``diloco verify`` checks the log and the accounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import script

from diloco import membership, observe, rundir
from diloco.errors import MessageError
from diloco.log import heads
from diloco.membership import Run
from diloco.nats.transport import NatsTransport
from diloco.rundir import RunDirectory
from diloco.wire import messages
from diloco.wire.messages import Pulse, Record, ShardPulse
from diloco.wire.subjects import Subjects

REGIONS = ("us", "eu", "ap")
CUT = "eu"
BITS = 4
RING_TARGET, STEPS_TARGET, LOST_TARGET, BACK_TARGET_S, MOVED_TARGET_S = 1.15, 0.95, 0.01, 5.0, 15.0
DEADLINE_S = 180.0
SETTLE_S = 10.0


class Watch:
    """What passes: learners' pulses, syncers' pulses, and versions as the first region's readers learn of them."""

    def __init__(self, run: RunDirectory, link: NatsTransport, parameters: int, fragments: int) -> None:
        self.run, self.link, self.subjects = run, link, Subjects(run.name)
        self.parameters, self.fragments = parameters, fragments
        self.identity = messages.run_id(run.name, run.settings.digest())
        self.steps: dict[str, int] = {}
        self.owned: dict[str, list[int]] = {}
        self.versions: list[tuple[float, Record]] = []

    async def follow(self) -> None:
        """Read the log's heads, for ever."""
        registry = await self.link.bucket(self.subjects.bucket, create=False)
        run = Run(self.run.name, self.run.settings, registry)
        async for record in heads(self.link, run, self.fragments, lambda subject, error: None):
            if record.entry == "version":
                self.versions.append((time.monotonic(), record))

    async def hear(self, message: Any) -> None:
        with contextlib.suppress(MessageError):
            if ".pulse." in message.subject:
                pulse, _, _ = messages.unpack(message.data, Pulse, self.identity)
                self.steps[pulse.learner] = pulse.step
            else:
                shard, _, _ = messages.unpack(message.data, ShardPulse, self.identity)
                self.owned[shard.syncer] = shard.fragments

    def wan(self, *arguments: str) -> dict[str, Any]:
        """Command the relay."""
        assert self.run.wan_control is not None
        command = [sys.executable, "-c", "from diloco.cli import main; main()", "wan", *arguments]
        done = subprocess.run([*command, "--at", self.run.wan_control, "--json"], capture_output=True, text=True, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def crossed(self) -> dict[str, int]:
        """Payload bytes that every link has carried, and its TCP/IP headers as estimated."""
        links = self.wan("status")["links"]
        return {
            name: link["control_bytes"] + link["bulk_bytes"] + link["header_bytes_estimated"] for name, link in links.items()
        }

    async def measure(self, duration_s: float, learners: list[str]) -> dict[str, Any]:
        """Steps a second of each of ``learners``, cycles of the model, and bytes of each region, over a while."""
        before, crossed, versions = dict(self.steps), self.crossed(), len(self.versions)
        began_s = time.monotonic()
        await asyncio.sleep(duration_s)
        lasted_s = time.monotonic() - began_s
        after, steps = self.crossed(), dict(self.steps)
        cycles = (len(self.versions) - versions) / self.fragments
        moved = {name: after[name] - crossed[name] for name in after}
        border = {
            region: {
                "out_bytes": sum(size for name, size in moved.items() if name.split("-")[0] == region),
                "in_bytes": sum(size for name, size in moved.items() if name.split("-")[1] == region),
            }
            for region in REGIONS
        }
        ring_bytes = 2 * (len(REGIONS) - 1) / len(REGIONS) * self.parameters * BITS / 8
        return {
            "seconds": lasted_s,
            "steps_per_s": {name: (steps[name] - before[name]) / lasted_s for name in learners},
            "cycles": cycles,
            "border": border,
            "of_ring": {
                region: {way: size / (cycles * ring_bytes) if cycles else None for way, size in sizes.items()}
                for region, sizes in border.items()
            },
        }

    async def until(self, predicate: Callable[[], bool], what: str) -> float:
        """Seconds until something is so."""
        began_s = time.monotonic()
        while not predicate():
            if time.monotonic() - began_s > DEADLINE_S:
                raise SystemExit(f"bench/wan.py: not within {DEADLINE_S:g} s: {what}; see {self.run.path}")
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s


@contextlib.asynccontextmanager
async def training(folder: Path, arguments: Any) -> AsyncIterator[Watch]:
    """A run that trains, with versions of every fragment."""
    directory = folder / "run"
    command = ["up", "--plain", "--run-dir", str(directory), "--tokens", str(10**9), "--preset", arguments.preset]
    learners = arguments.each * len(REGIONS)
    command += ["--learners", str(learners), "--shards", str(len(REGIONS)), "--set", f"regions.names={json.dumps(REGIONS)}"]
    command += [f"--slow=learner-{index}={arguments.slow}" for index in range(learners)]
    command += [f"--set={item}" for item in arguments.set]
    with (folder / "up.txt").open("wb") as output:
        up = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from diloco.cli import main; main()", *command, stdout=output, stderr=output
        )
    async with contextlib.AsyncExitStack() as stack:

        async def stop() -> None:
            with contextlib.suppress(ProcessLookupError):
                up.send_signal(signal.SIGINT)
            await up.wait()

        stack.push_async_callback(stop)
        while not (directory / "run.json").exists() or not rundir.load(directory).nats_bulk_url:
            if up.returncode is not None:
                raise SystemExit(f"bench/wan.py: `diloco up` ended: {(folder / 'up.txt').read_text()}")
            await asyncio.sleep(0.1)
        run = rundir.load(directory)
        log = observe.get_logger()
        link = await NatsTransport.open(run.nats_url, run.nats_bulk_url or "", "bench", log, DEADLINE_S)
        stack.push_async_callback(link.close)
        found = await membership.find_map(await membership.find(link, run.name, log))
        watch = Watch(run, link, found.parameters, len(found.fragments))
        await link.control.subscribe(watch.subjects.pulse(), cb=watch.hear)
        await link.control.subscribe(watch.subjects.shard(), cb=watch.hear)
        following = asyncio.create_task(watch.follow())
        stack.callback(following.cancel)
        await watch.until(lambda: _begun(watch), "every fragment has two versions")
        yield watch


def _begun(watch: Watch) -> bool:
    newest = {record.fragment: record.version for _, record in watch.versions}
    return len(newest) == watch.fragments and min(newest.values()) >= 2


async def phases(watch: Watch, arguments: Any) -> dict[str, Any]:
    everybody = [f"learner-{index}" for index in range(len(REGIONS))]
    others = [name for index, name in enumerate(everybody) if REGIONS[index] != CUT]
    lost = everybody[REGIONS.index(CUT)]
    links = watch.wan("status")["links"]
    watch.wan("set", "*", "--rate", "unlimited", "--delay", "0ms", "--jitter", "0ms")
    await asyncio.sleep(SETTLE_S)
    found: dict[str, Any] = {"parameters": watch.parameters, "unlimited": await watch.measure(arguments.seconds, everybody)}
    restore(watch, links)
    await asyncio.sleep(SETTLE_S)
    found["thin"] = await watch.measure(arguments.seconds, everybody)

    watch.wan("cut", CUT)
    found["cut"] = await watch.measure(arguments.cut, others)
    watch.wan("heal")
    since = len(watch.versions)
    found["back_s"] = await watch.until(
        lambda: any(member.learner == lost for _, record in watch.versions[since:] for member in record.members),
        f"a version merges {lost} again",
    )
    syncer = f"syncer-{REGIONS.index(CUT)}"
    await watch.until(lambda: bool(watch.owned.get(syncer)), f"{syncer} owns its share again")
    await asyncio.sleep(SETTLE_S)

    owned = list(watch.owned[syncer])
    lose(watch.run.path, syncer, lost, f"nats-{CUT}")
    since = len(watch.versions)
    found["moved_fragments"] = len(owned)
    found["moved_s"] = await watch.until(
        lambda: set(owned) <= {record.fragment for _, record in watch.versions[since:] if record.syncer != syncer},
        f"others make versions of what {syncer} owned",
    )
    return found


def restore(watch: Watch, links: dict[str, Any]) -> None:
    """Give the links back what they had."""
    for name, link in links.items():
        rate, delay, jitter = link["rate_bits_per_s"] / 1e6, 1000 * link["delay_s"], 1000 * link["jitter_s"]
        watch.wan("set", name, "--rate", f"{rate:g}mbit", "--delay", f"{delay:g}ms", "--jitter", f"{jitter:g}ms")


def lose(path: Path, *names: str) -> None:
    """Freeze processes for good: `diloco up` would start killed ones again."""
    for name in names:
        os.kill(int((path / "services" / f"{name}.pid").read_text()), signal.SIGSTOP)


async def measure(folder: Path, arguments: Any) -> dict[str, Any]:
    async with training(folder, arguments) as watch:
        found = await phases(watch, arguments)
    return {"machine": script.machine(), "regions": REGIONS} | found


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {len(REGIONS)} regions, {result['parameters']:,} parameters")
    for phase in ("unlimited", "thin", "cut"):
        found = result[phase]
        steps = ", ".join(f"{name} {pace:.2f}" for name, pace in found["steps_per_s"].items())
        print(f"{phase:10} {found['cycles']:5.1f} cycles in {found['seconds']:.0f} s; steps/s: {steps}")
        for region, sizes in found["border"].items():
            ratios = found["of_ring"][region]
            print(
                f"  {region}: out {sizes['out_bytes'] / 1e6:6.2f} MB ({ratio(ratios['out_bytes'])} of the ring), "
                f"in {sizes['in_bytes'] / 1e6:6.2f} MB ({ratio(ratios['in_bytes'])})"
            )
    pace = _share(result["thin"], result["unlimited"])
    print(f"learners on thin links: {pace:.1f} % of their pace without (target {100 * STEPS_TARGET:.0f} %)")
    kept = _share(result["cut"], result["thin"])
    print(f"while {CUT} was cut off: the others {kept:.1f} % of that (target {100 * (1 - LOST_TARGET):.0f} %)")
    print(f"after healing: a version merged its learner after {result['back_s']:.1f} s (target {BACK_TARGET_S:g} s)")
    moved = f"its {result['moved_fragments']} fragments had versions after {result['moved_s']:.1f} s"
    print(f"{CUT} lost: {moved} (target {MOVED_TARGET_S:g} s)")


def _share(phase: dict[str, Any], whole: dict[str, Any]) -> float:
    """The learners' steps a second, in percent of those in another phase."""
    return 100 * float(np.mean([pace / whole["steps_per_s"][name] for name, pace in phase["steps_per_s"].items()]))


def ratio(value: float | None) -> str:
    return "no cycle" if value is None else f"{value:.2f}"


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--cut", type=float, default=60.0, help="seconds that a region is cut off")
    parser.add_argument("--slow", type=float, default=1.0, help="each learner's steps take so many times as long, asleep")
    parser.add_argument("--preset", default="decoupled")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="folder to keep the run in")
    arguments = parser.parse_args()
    arguments.each = 1  # learners a region
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.pop("DILOCO_RUN", None)
        result = asyncio.run(measure(folder, arguments))
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
