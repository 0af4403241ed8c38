"""Runs over three regions: what crosses their borders, how fast learners step on thin links, what a cut and a loss cost.

    python bench/wan.py                    # all of it, about fourteen minutes
    python bench/wan.py faults parallel    # only these parts

Each part begins runs with ``diloco up``: a server and a syncer in each region, emulated links between, and learners
whose steps take ``--step`` seconds and hardly any processor (bench/island.py; ``--gpt`` trains the built-in model
instead).

* ``faults``: with unlimited links and with thin ones in turn, the learners' steps a second. Then one region is cut off:
  the others' steps a second, and how long after healing a version merges a learner of the region. Then it is lost for
  good (server, syncer and learner frozen): how long until each fragment that it owned has a next version. ``diloco
  verify`` checks log and accounts; no message may have been refused.
* ``parallel``: the same model and links with the preset data-parallel: its steps a second, and its bytes.
* ``bytes``: fragments of 265 kB in four bits and fast links, with 1, 2 and 4 learners a region.

Thin links carry as much of the model in a step's time as 2 Gbit/s carry of 12B parameters in 5 s: parameters / (1.2 x
step time) bit/s. That is what a region has towards all others together, evenly shared between its links, as in the
published formula for the bandwidth that a step needs (algorithm: 2 (D-1)/D x bits / rate). ``parallel`` is measured with
links that have as much each, too. The bytes at a region's border are all that the relay carries over it, heartbeats,
acknowledgements and estimated TCP/IP headers included, a cycle (one version of each fragment); beside them stands what
a ring all-reduce of the model would send in each direction, ``2 (D-1)/D`` of it in the run's bits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import script

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.errors import MessageError
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process import logs, observe
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.wire import framing
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects
from diloco_ops.chaos.refused_messages import RefusalCount
from diloco_ops.wan import control

REGIONS = ("us", "eu", "ap")
CUT = "eu"
PARTS = ("faults", "parallel", "bytes")
MODEL = {"task.layers": 24, "task.width": 256, "fragments.count": 24}
LARGE_MODEL = {"task.layers": 12, "task.width": 728, "fragments.count": 12}  # 529,984 values a fragment
PARALLEL = {"fragments.count": 12}
PARAMETERS_A_BIT = 1.2  # 12B parameters / (2 Gbit/s x 5 s)
FASTER_TARGET, RING_TARGET, STEPS_TARGET, LOST_TARGET, BACK_TARGET_S, MOVED_TARGET_S = 20.0, 1.15, 0.95, 0.01, 5.0, 15.0
DEADLINE_S = 240.0
SETTLE_S = 10.0
PARALLEL_STEPS = 320  # so many steps' time: data-parallel takes a dozen on thin links


class Watch:
    """Messages of a run: heartbeats of learners and syncers, and versions as the first region's readers learn of them."""

    def __init__(self, run: RunDirectory, link: NatsTransport, parameters: int, fragments: int) -> None:
        self.run, self.link, self.subjects = run, link, Subjects(run.name)
        self.parameters, self.fragments = parameters, fragments
        self.identity = framing.run_id(run.name, run.settings.digest())
        self.steps: dict[str, list[tuple[float, int]]] = {}
        self.owned: dict[str, list[int]] = {}
        self.versions: list[tuple[float, Record]] = []

    async def follow(self) -> None:
        """Read the log's heads, for ever."""
        registry = await self.link.bucket(self.subjects.bucket, create=False)
        run = KnownRun(self.run.name, self.run.settings, registry)
        log = Log(self.link, run.name, run.identity, await creation.find_map(run), run.created)
        async for head in log.entries.heads(lambda refusal: None):
            if head.record.entry == "version":
                self.versions.append((time.monotonic(), head.record))

    async def hear(self, message: Any) -> None:
        with contextlib.suppress(MessageError):
            if ".heartbeat." in message.subject:
                heartbeat, _, _ = framing.unpack(message.data, Heartbeat, self.identity)
                seen = self.steps.setdefault(heartbeat.learner, [])
                if heartbeat.role == "learner" and (not seen or heartbeat.step > seen[-1][1]):
                    seen.append((time.monotonic(), heartbeat.step))
            else:
                shard, _, _ = framing.unpack(message.data, ShardHeartbeat, self.identity)
                self.owned[shard.syncer] = shard.fragments

    async def wan(self, request: control.Request) -> dict[str, Any]:
        """Command the relay."""
        assert self.run.wan_control is not None
        [answer] = await asyncio.to_thread(lambda at: list(control.asked(at, request)), self.run.wan_control)
        return answer

    async def crossed(self) -> dict[str, dict[str, int]]:
        """Return the traffic of every link, by kind: payload by class, and estimated TCP/IP headers."""
        kinds = ("control_bytes", "bulk_bytes", "header_bytes_estimated")
        status = await self.wan(control.Status([]))
        return {name: {kind: int(link[kind]) for kind in kinds} for name, link in status["links"].items()}

    async def measure(self, duration_s: float, learners: Sequence[str]) -> dict[str, Any]:
        """Measure steps a second of each of ``learners``, cycles of the model, and bytes at each border, over a while."""
        crossed, versions, began_s = await self.crossed(), len(self.versions), time.monotonic()
        await asyncio.sleep(duration_s)
        ended_s, after = time.monotonic(), await self.crossed()
        cycles = (len(self.versions) - versions) / self.fragments
        moved = {link: {kind: after[link][kind] - crossed[link][kind] for kind in after[link]} for link in after}
        bits = self.run.settings.codec.offer_bits
        ring_bytes = 2 * (len(REGIONS) - 1) / len(REGIONS) * self.parameters * bits / 8
        border: dict[str, Any] = {}
        for region in REGIONS:
            for way, end in (("out", 0), ("in", 1)):
                kinds = [sizes for link, sizes in moved.items() if link.split("-")[end] == region]
                sums = {kind: sum(sizes[kind] for sizes in kinds) for kind in kinds[0]}
                total = sum(sums.values())
                border.setdefault(region, {})[way] = sums | {"of_ring": total / (cycles * ring_bytes) if cycles else None}
        return {
            "seconds": ended_s - began_s,
            "steps_per_s": {name: self._pace(name, began_s, ended_s) for name in learners},
            "cycles": cycles,
            "border": border,
        }

    def _pace(self, learner: str, began_s: float, ended_s: float) -> float:
        """Return steps a second between the first and the last step that ended in a stretch of time."""
        seen = [item for item in self.steps.get(learner, []) if began_s <= item[0] <= ended_s]
        if len(seen) < 2:
            return len(seen) / (ended_s - began_s)
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return (last - first) / (last_s - first_s)

    async def until(self, predicate: Callable[[], bool], what: str) -> float:
        """Seconds until something is so."""
        began_s = time.monotonic()
        while not predicate():
            if time.monotonic() - began_s > DEADLINE_S:
                raise SystemExit(f"bench/wan.py: not within {DEADLINE_S:g} s: {what}; see {self.run.path}")
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s

    async def fast(self) -> None:
        """Let the links be as fast as the relay is."""
        await self.wan(control.SetConditions(["*"], rate_bits_per_s="unlimited", delay_s=0.0, jitter_s=0.0))

    async def thin(self, step_s: float, times: float = 1.0) -> float:
        """Give the links their delays and ``times`` the rate that is thin for this model and step time; the rate in bit/s."""
        rate_bits_per_s = times * self.parameters / (PARAMETERS_A_BIT * step_s) / (len(REGIONS) - 1)
        for name, link in self.links.items():
            delays = {"delay_s": link["delay_s"], "jitter_s": link["jitter_s"]}
            await self.wan(control.SetConditions([name], rate_bits_per_s=rate_bits_per_s, **delays))
        return rate_bits_per_s

    async def begun(self, versions: int) -> None:
        """Wait until every fragment has so many versions."""
        await self.until(lambda: self._oldest() >= versions, f"every fragment has {versions} versions")

    def _oldest(self) -> int:
        newest = {record.fragment: record.version for _, record in self.versions}
        return min(newest.values()) if len(newest) == self.fragments else 0

    async def attach(self) -> None:
        """Begin to watch."""
        await self.link.control.subscribe(self.subjects.heartbeat(), cb=self.hear)
        await self.link.control.subscribe(self.subjects.shard(), cb=self.hear)
        self.links: dict[str, Any] = (await self.wan(control.Status([])))["links"]


@contextlib.asynccontextmanager
async def training(
    folder: Path, arguments: argparse.Namespace, settings: Mapping[str, Any], preset: str, learners: int = 1
) -> AsyncIterator[Watch]:
    """Begin a run with a name and a folder of its own."""
    directory, everybody = folder / "run", learners * len(REGIONS)
    command = ["up", "--plain", "--run-dir", str(directory), "--tokens", str(10**9), "--preset", preset]
    command += ["--learners", str(everybody), "--shards", str(len(REGIONS)), "--set", f"regions.names={json.dumps(REGIONS)}"]
    if not arguments.gpt:
        command += ["--set=task.name=island:make"]
        command += [f"--set={name}={value}" for name, value in settings.items()]
    command += [f"--set={item}" for item in arguments.set]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"BENCH_STEP_S": str(arguments.step), "PYTHONPATH": path}
    with (folder / "up.txt").open("wb") as output:
        up = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=output, stderr=output, env=environment)
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
        found = await creation.find_map(await creation.find(link, run.name, log))
        watch = Watch(run, link, found.parameters, len(found.fragments))
        await watch.attach()
        following = asyncio.create_task(watch.follow())
        stack.callback(following.cancel)
        yield watch


async def faults(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    everybody = [f"learner-{index}" for index in range(len(REGIONS))]
    syncer, lost = (f"{kind}-{REGIONS.index(CUT)}" for kind in ("syncer", "learner"))
    others = [name for name in everybody if name != lost]
    async with training(folder, arguments, MODEL, "decoupled") as watch:
        await watch.fast()
        await watch.begun(2)
        found: dict[str, Any] = {"parameters": watch.parameters, "unlimited": [], "thin": []}
        step_s = arguments.step
        for _ in range(arguments.turns):
            await watch.fast()
            await asyncio.sleep(SETTLE_S)
            found["unlimited"].append(await watch.measure(arguments.seconds, everybody))
            if arguments.gpt:
                step_s = 1 / float(np.mean(list(found["unlimited"][0]["steps_per_s"].values())))
            found["rate_bits_per_s"] = await watch.thin(step_s)
            await asyncio.sleep(SETTLE_S)
            found["thin"].append(await watch.measure(arguments.seconds, everybody))

        await watch.wan(control.Cut([CUT]))
        found["cut"] = await watch.measure(arguments.cut, others)
        await watch.wan(control.Heal([]))
        since = len(watch.versions)
        found["back_s"] = await watch.until(
            lambda: any(member.learner == lost for _, record in watch.versions[since:] for member in record.members),
            f"a version merges {lost} again",
        )
        await watch.until(lambda: bool(watch.owned.get(syncer)), f"{syncer} owns its share again")
        await asyncio.sleep(2 * SETTLE_S)

        owned = list(watch.owned[syncer])
        lose(watch.run.path, syncer, lost, f"nats-{CUT}")
        since = len(watch.versions)
        found["moved_fragments"] = len(owned)
        found["moved_s"] = await watch.until(
            lambda: set(owned) <= {record.fragment for _, record in watch.versions[since:] if record.syncer != syncer},
            f"others make versions of what {syncer} owned",
        )
        found["refused"] = RefusalCount.read(logs.merge(watch.run.path)).honest
        found["verify"] = await verified(watch.run.path)
    return found


async def parallel(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    everybody = [f"learner-{index}" for index in range(len(REGIONS))]
    async with training(folder, arguments, MODEL | PARALLEL, "data-parallel") as watch:
        await watch.fast()
        await watch.begun(2)
        found: dict[str, Any] = {"parameters": watch.parameters, "phases": []}
        for times in (1.0, len(REGIONS) - 1.0):
            rate_bits_per_s = await watch.thin(arguments.step, times)
            await asyncio.sleep(SETTLE_S)
            measured = await watch.measure(PARALLEL_STEPS * arguments.step, everybody)
            found["phases"].append({"rate_bits_per_s": rate_bits_per_s} | measured)
        return found


async def volume(folder: Path, arguments: argparse.Namespace, learners: int) -> dict[str, Any]:
    everybody = [f"learner-{index}" for index in range(learners * len(REGIONS))]
    async with training(folder, arguments, LARGE_MODEL, "decoupled", learners) as watch:
        await watch.fast()
        await watch.begun(2)
        await asyncio.sleep(SETTLE_S)
        found = await watch.measure(arguments.seconds, everybody)
        return {"parameters": watch.parameters, "learners_a_region": learners, "fast": found}


def lose(path: Path, *names: str) -> None:
    """Freeze processes for good: `diloco up` would start killed ones again."""
    for name in names:
        os.kill(int((path / "services" / f"{name}.pid").read_text()), signal.SIGSTOP)


async def verified(path: Path) -> str:
    """Return the last line of ``diloco verify``."""
    done = await asyncio.to_thread(
        subprocess.run, [*script.DILOCO, "verify", str(path)], capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"exit {done.returncode}: {lines[-1] if lines else 'nothing said'}"


def made(folder: Path) -> Path:
    """Make a new folder."""
    folder.mkdir()
    return folder


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": script.machine(), "regions": REGIONS, "step_s": arguments.step}
    if "faults" in arguments.parts:
        result["faults"] = await faults(made(folder / "faults"), arguments)
    if "parallel" in arguments.parts:
        result["parallel"] = await parallel(made(folder / "parallel"), arguments)
    if "bytes" in arguments.parts:
        result["bytes"] = [await volume(made(folder / f"bytes-{count}"), arguments, count) for count in arguments.learners]
    return result


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {len(REGIONS)} regions, steps of {result['step_s']} s")
    faults_, parallel_ = result.get("faults"), result.get("parallel")
    if faults_:
        rate = faults_["rate_bits_per_s"] / 1e6
        print(f"\ndecoupled, {faults_['parameters']:,} parameters, thin links of {rate:.2f} Mbit/s")
        for phase in ("unlimited", "thin"):
            for found in faults_[phase]:
                _show_phase(phase, found)
        _show_phase(f"{CUT} cut", faults_["cut"])
        pace, kept = (
            100 * _pace(faults_[phase]) / _pace(faults_[whole], faults_[phase])
            for phase, whole in (("thin", "unlimited"), ("cut", "thin"))
        )
        print(f"learners on thin links: {pace:.1f} % of their pace without (target {100 * STEPS_TARGET:.0f} %)")
        print(f"while {CUT} was cut off: the others {kept:.1f} % of that (target {100 * (1 - LOST_TARGET):.0f} %)")
        print(f"after healing: a version merged its learner after {faults_['back_s']:.1f} s (target {BACK_TARGET_S:g} s)")
        moved = f"its {faults_['moved_fragments']} fragments had versions after {faults_['moved_s']:.1f} s"
        print(f"{CUT} lost: {moved} (target {MOVED_TARGET_S:g} s)\nverify: {faults_['verify']}")
        print("\n".join([f"messages refused: {len(faults_['refused'])} (target 0)", *faults_["refused"]]))
    if parallel_:
        print(f"\ndata-parallel, {parallel_['parameters']:,} parameters")
        for found in parallel_["phases"]:
            _show_phase(f"{found['rate_bits_per_s'] / 1e6:.2f} Mbit/s", found)
            if faults_:
                faster = _pace(faults_["thin"]) / _pace(found)
                print(f"decoupled on its thin links: {faster:.1f} times the steps a second (target {FASTER_TARGET:g})")
    for found in result.get("bytes", []):
        print(f"\ndecoupled, {found['parameters']:,} parameters, {found['learners_a_region']} learners a region, fast links")
        _show_phase("fast", found["fast"])
        if found["learners_a_region"] == 1:
            worst = max(sizes["of_ring"] or np.inf for ways in found["fast"]["border"].values() for sizes in ways.values())
            print(f"at most {worst:.2f} of the ring (target {RING_TARGET:g})")


def _show_phase(name: str, found: dict[str, Any]) -> None:
    steps = ", ".join(f"{learner} {pace:.2f}" for learner, pace in found["steps_per_s"].items())
    print(f"{name:11} {found['cycles']:5.1f} cycles in {found['seconds']:.0f} s; steps/s: {steps}")
    for region, ways in found["border"].items():
        print(f"  {region}: " + "; ".join(f"{way} {_bytes(sizes, found['cycles'])}" for way, sizes in ways.items()))


def _bytes(sizes: dict[str, Any], cycles: float) -> str:
    """Kilobytes a cycle by kind, and all of them against the ring."""
    if not cycles:
        return "no cycle"
    kinds = " + ".join(
        f"{sizes[f'{kind}'] / cycles / 1e3:.0f}" for kind in ("bulk_bytes", "control_bytes", "header_bytes_estimated")
    )
    return f"{kinds} kB a cycle, {sizes['of_ring']:.2f} of the ring"


def _pace(phase: dict[str, Any] | list[dict[str, Any]], like: dict[str, Any] | None = None) -> float:
    """Mean steps a second of a phase's learners, over all its measurements; or of the learners of another phase."""
    phases = phase if isinstance(phase, list) else [phase]
    names = (like if isinstance(like, dict) else phases[0])["steps_per_s"]
    return float(np.mean([found["steps_per_s"][name] for found in phases for name in names]))


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=2, help="measurements with unlimited and with thin links")
    parser.add_argument("--cut", type=float, default=60.0, help="seconds that a region is cut off")
    parser.add_argument("--step", type=float, default=0.25, help="what a step takes, in seconds")
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2, 4], help="in each region, of the part `bytes`")
    parser.add_argument("--gpt", action="store_true", help="train the built-in model, at whatever pace")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.pop("DILOCO_RUN", None)
        result = asyncio.run(measure(folder, arguments))
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
