"""Runs over three regions: what crosses their borders and what a cut costs, merging by region, and a region that comes back.

python bench/regions.py wan                    # all of it, about fourteen minutes
python bench/regions.py wan faults parallel    # only these parts
python bench/regions.py merge alone merged cosines          # six minutes; or only some of these parts
python bench/regions.py back                   # 40 s away, the default model; five minutes
python bench/regions.py back --away 10 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
from harness.console import Bench, Keep, Result, Script, folder
from harness.host import machine
from harness.live_run import DILOCO, Up, Watch, asked, asleep, up, watching
from numpy.typing import NDArray

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.syncer import merging
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import Fragment
from diloco.log.log import Log
from diloco.process import logs
from diloco.process.observe import get_logger
from diloco.settings.run import RunSettings
from diloco.wire.entries import Record
from diloco.wire.offers import Answer, Offer, RegionalOffer
from diloco_ops.chaos.refused_messages import RefusalCount
from diloco_ops.up.embedded import RATE_BITS_PER_S
from diloco_ops.wan import control

REGIONS = ("us", "eu", "ap")
CUT = "eu"
MODEL = {"task.layers": 24, "task.width": 256, "fragments.count": 24}
LARGE_MODEL = {"task.layers": 12, "task.width": 728, "fragments.count": 12}  # 529,984 values a fragment
PARALLEL = {"fragments.count": 12}
PARAMETERS_A_BIT = 1.2  # 12B parameters / (2 Gbit/s x 5 s)
FASTER_TARGET, RING_TARGET, STEPS_TARGET, LOST_TARGET, BACK_TARGET_S, MOVED_TARGET_S = 20.0, 1.15, 0.95, 0.01, 5.0, 15.0
DEADLINE_S = 240.0
SETTLE_S = 10.0
PARALLEL_STEPS = 320  # so many steps' time: data-parallel takes a dozen on thin links

Grouping = Callable[[int], int]  # the group of a learner, by its index
BETWEEN = "between two learners' offers"

LOST = "eu"  # the region that loses its disk, which has neither the run's coordinator nor its founder
CURRENT_TARGET_S = 60.0
RETURN_DEADLINE_S = 900.0
LEAD_VERSIONS = 5  # of every fragment, before the region is lost


class RegionsWatch:
    """A run's messages, its versions as the first region's readers learn of them, and the relay of its links."""

    def __init__(self, running: Up, heard: Watch, run: KnownRun, log: Log, links: Mapping[str, Any]) -> None:
        self.running, self.heard, self.run, self.log, self.links = running, heard, run, log, links
        self.parameters, self.fragments = log.map.parameters, len(log.map.fragments)
        self.versions: list[tuple[float, Record]] = []

    async def follow(self) -> None:
        """Read the log's heads, for ever."""
        async for head in self.log.entries.heads(lambda refusal: None):
            if head.record.entry == "version":
                self.versions.append((time.time(), head.record))

    def owned(self, syncer: str) -> list[int]:
        """Return the fragments that a syncer last said it owns."""
        heard = self.heard.syncers.get(syncer)
        return heard[-1][1].fragments if heard else []

    async def wan(self, request: control.Request) -> dict[str, Any]:
        """Command the relay."""
        return await command(self.heard, request)

    async def crossed(self) -> dict[str, dict[str, int]]:
        """Return the traffic of every link, by kind: payload by class, and estimated TCP/IP headers."""
        kinds = ("control_bytes", "bulk_bytes", "header_bytes_estimated")
        status = await self.wan(control.Status([]))
        return {name: {kind: int(link[kind]) for kind in kinds} for name, link in status["links"].items()}

    async def measure(self, duration_s: float, learners: Sequence[str]) -> dict[str, Any]:
        """Measure steps a second of each of ``learners``, cycles of the model, and bytes at each border, over a while."""
        crossed, versions, began_s = await self.crossed(), len(self.versions), time.time()
        await asyncio.sleep(duration_s)
        ended_s, after = time.time(), await self.crossed()
        cycles = (len(self.versions) - versions) / self.fragments
        moved = {link: {kind: after[link][kind] - crossed[link][kind] for kind in after[link]} for link in after}
        bits = self.run.created.codec.offer_bits
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
            "steps_per_s": {name: self.heard.pace(name, began_s) for name in learners},
            "cycles": cycles,
            "border": border,
        }

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
        await self.running.reach(lambda: self._oldest() >= versions, f"every fragment has {versions} versions")

    def _oldest(self) -> int:
        newest = {record.fragment: record.version for _, record in self.versions}
        return min(newest.values()) if len(newest) == self.fragments else 0


async def command(heard: Watch, request: control.Request) -> dict[str, Any]:
    """Command the relay of a run."""
    assert heard.run.wan_control is not None
    [answer] = await asyncio.to_thread(lambda at: list(control.asked(at, request)), heard.run.wan_control)
    return answer


@asynccontextmanager
async def training(
    directory: Path, step_s: float, model: Mapping[str, Any] | None, sets: Sequence[str], preset: str, learners: int = 1
) -> AsyncIterator[RegionsWatch]:
    """Begin a run of a model whose steps sleep; None: of the built-in one."""
    os.environ.pop("DILOCO_RUN", None)
    options = ["--preset", preset, "--learners", str(learners * len(REGIONS)), "--shards", str(len(REGIONS))]
    task = {"task.name": "harness.asleep:make"} | dict(model) if model is not None else {}
    items = [f"regions.names={json.dumps(REGIONS)}", *(f"{name}={value}" for name, value in task.items()), *sets]
    directory.parent.mkdir(exist_ok=True)
    async with AsyncExitStack() as stack:
        running = stack.enter_context(up(directory, *options, sets=items, environment=asleep(step_s), patience_s=DEADLINE_S))
        heard = await watching(running)
        stack.push_async_callback(heard.link.close)
        run = await creation.find(heard.link, heard.run.name, get_logger())  # its coordinator may be making it still
        log = Log(heard.link, run.name, run.identity, await creation.find_map(run), run.created)
        watch = RegionsWatch(running, heard, run, log, (await command(heard, control.Status([])))["links"])
        following = asyncio.create_task(watch.follow())
        stack.callback(following.cancel)
        yield watch


def names_of(learners: int) -> list[str]:
    """Return the names of a run's learners, so many in each region."""
    return [f"learner-{index}" for index in range(learners * len(REGIONS))]


async def faults(
    directory: Path, step_s: float, sets: Sequence[str], seconds: float, turns: int, cut_s: float, *, gpt: bool
) -> Result:
    """Measure with unlimited links and with thin ones, cut a region off, heal it, and lose it."""
    syncer, lost = (f"{kind}-{REGIONS.index(CUT)}" for kind in ("syncer", "learner"))
    async with training(directory, step_s, None if gpt else MODEL, sets, "decoupled") as watch:
        await watch.fast()
        await watch.begun(2)
        found: Result = {"parameters": watch.parameters, "unlimited": [], "thin": []}
        for _ in range(turns):
            await watch.fast()
            await asyncio.sleep(SETTLE_S)
            found["unlimited"].append(await watch.measure(seconds, names_of(1)))
            if gpt:
                step_s = 1 / float(np.mean(list(found["unlimited"][0]["steps_per_s"].values())))
            found["rate_bits_per_s"] = await watch.thin(step_s)
            await asyncio.sleep(SETTLE_S)
            found["thin"].append(await watch.measure(seconds, names_of(1)))
        await watch.wan(control.Cut([CUT]))
        found["cut"] = await watch.measure(cut_s, [name for name in names_of(1) if name != lost])
        await watch.wan(control.Heal([]))
        since, reach = len(watch.versions), watch.running.reach
        found["back_s"] = await reach(
            lambda: any(member.learner == lost for _, record in watch.versions[since:] for member in record.members),
            f"a version merges {lost} again",
        )
        await reach(lambda: watch.owned(syncer), f"{syncer} owns its share again")
        await asyncio.sleep(2 * SETTLE_S)
        owned = set(watch.owned(syncer))
        watch.running.signal(signal.SIGSTOP, syncer, lost, f"nats-{CUT}")  # `diloco up` would start killed ones again
        since = len(watch.versions)
        found["moved_fragments"] = len(owned)
        found["moved_s"] = await reach(
            lambda: owned <= {record.fragment for _, record in watch.versions[since:] if record.syncer != syncer},
            f"others make versions of what {syncer} owned",
        )
        found["refused"] = RefusalCount.read(logs.merge(directory)).honest
        found["holds"] = (await asyncio.to_thread(asked, "verify", str(directory)))["holds"]
    return found


async def parallel(directory: Path, step_s: float, sets: Sequence[str], *, gpt: bool) -> Result:
    """Measure the preset data-parallel on thin links, and on links that have as much each."""
    async with training(directory, step_s, None if gpt else MODEL | PARALLEL, sets, "data-parallel") as watch:
        await watch.fast()
        await watch.begun(2)
        found: Result = {"parameters": watch.parameters, "phases": []}
        for times in (1.0, len(REGIONS) - 1.0):
            rate_bits_per_s = await watch.thin(step_s, times)
            await asyncio.sleep(SETTLE_S)
            measured = await watch.measure(PARALLEL_STEPS * step_s, names_of(1))
            found["phases"].append({"rate_bits_per_s": rate_bits_per_s} | measured)
        return found


async def volume(directory: Path, step_s: float, sets: Sequence[str], seconds: float, learners: int, *, gpt: bool) -> Result:
    """Measure the bytes of so many learners a region on fast links."""
    async with training(directory, step_s, None if gpt else LARGE_MODEL, sets, "decoupled", learners) as watch:
        await watch.fast()
        await watch.begun(2)
        await asyncio.sleep(SETTLE_S)
        found = await watch.measure(seconds, names_of(learners))
        return {"parameters": watch.parameters, "learners_a_region": learners, "fast": found}


async def wan(
    parts: Annotated[Sequence[str], ("faults", "parallel", "bytes"), "all by default"] = ("faults", "parallel", "bytes"),
    *,
    seconds: Annotated[float, "of each measurement"] = 30.0,
    turns: Annotated[int, "measurements with unlimited and with thin links"] = 2,
    cut: Annotated[float, "seconds that a region is cut off"] = 60.0,
    step: Annotated[float, "what a step takes, in seconds"] = 0.25,
    learners: Annotated[Sequence[int], "in each region, of the part `bytes`"] = (1, 2, 4),
    gpt: Annotated[bool, "train the built-in model, at whatever pace"] = False,
    set_: Annotated[Sequence[str], "KEY=VALUE, a setting of the runs"] = (),
    keep: Keep = None,
) -> Result:
    """Measure what crosses regions' borders, how fast learners step on thin links, what a cut and a loss cost.

    Each part begins runs with ``diloco up``: a server and a syncer in each region, emulated links between, and learners
    whose steps take ``--step`` seconds and hardly any processor (harness/asleep.py; ``--gpt`` trains the built-in model
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
    result: Result = {"machine": machine(), "regions": REGIONS, "step_s": step}
    with folder(keep) as place:
        if "faults" in parts:
            result["faults"] = await faults(place / "faults" / "run", step, set_, seconds, turns, cut, gpt=gpt)
        if "parallel" in parts:
            result["parallel"] = await parallel(place / "parallel" / "run", step, set_, gpt=gpt)
        if "bytes" in parts:
            result["bytes"] = [
                await volume(place / f"bytes-{count}" / "run", step, set_, seconds, count, gpt=gpt) for count in learners
            ]
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def show_wan(result: Result) -> None:
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
        print(f"{CUT} lost: {moved} (target {MOVED_TARGET_S:g} s)\nverify {'holds' if faults_['holds'] else 'DOES NOT HOLD'}")
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


async def merge(
    parts: Annotated[Sequence[str], ("alone", "merged", "cosines")],
    *,
    each: Annotated[int, "learners a region"] = 2,
    seconds: Annotated[float, "of each measurement"] = 45.0,
    step: Annotated[float, "seconds that a step takes, but of the built-in model"] = 0.25,
) -> Result:
    """Measure what merging by region saves on thin links, and how far its result is from a merge of each learner's own offer.

    Each part begins a run in three regions with ``diloco up``, several learners in each, as ``wan`` does.

    * ``alone`` and ``merged``: without ``regions.merge`` and with it, on thin links: the bytes that cross each region's border
      a fragment cycle, of what a ring all-reduce between the regions would send, and how many learners are in a version.
    * ``cosines``: the built-in model is trained without, and its offers are kept. They are merged again as they were, and with
      those of each region (or of another grouping) merged and quantised first: the cosine between both.
    """
    result: Result = {"machine": machine(), "learners_a_region": each, "step_s": step}
    with folder() as place:
        for part in ("alone", "merged"):
            if part in parts:
                result[part] = await traffic(place / part / "run", step, seconds, each, merge=part == "merged")
        if "cosines" in parts:
            sets = ("log.archive=true", "round.steps=12")
            async with training(place / "cosines" / "run", step, None, sets, "decoupled", each) as watch:
                await watch.fast()
                await watch.begun(2)
                await asyncio.sleep(seconds)
                result["cosines"] = await cosines(watch, each)
    return result


async def traffic(directory: Path, step_s: float, seconds: float, each: int, *, merge: bool) -> Result:
    """Measure the bytes at the borders, with merging by region or without."""
    sets = (f"regions.merge={str(merge).lower()}",)
    async with training(directory, step_s, MODEL, sets, "decoupled", each) as watch:
        rate_bits_per_s = await watch.thin(step_s)
        await watch.begun(2)
        await asyncio.sleep(SETTLE_S)
        before = len(watch.versions)
        found = await watch.measure(seconds, names_of(each))
        members = [len(record.members) for _, record in watch.versions[before:]]
        return {"merge": merge, "rate_bits_per_s": rate_bits_per_s, "members": float(np.mean(members))} | found


async def cosines(watch: RegionsWatch, each: int) -> dict[str, Any]:
    """Of versions of which all offers are kept in the first region: how alike merges in one step and in two are."""
    run, log = watch.run, watch.log
    regions, count = len(REGIONS), each * len(REGIONS)
    groupings: dict[str, Grouping] = {
        f"{regions} regions of {each}": lambda learner: learner % regions,
        f"{count - 2}, 1 and 1": lambda learner: max(0, learner - (count - 3)),
    }
    found: dict[str, list[float]] = {name: [] for name in (*groupings, BETWEEN)}
    for _, record in watch.versions:
        offers = await kept(log, record)
        if len(offers) < count:
            continue
        fragment = log.map.fragments[record.fragment]
        flat = merged(fragment, run.created, offers)
        alone = [merged(fragment, run.created, [held]) for held in offers]
        found[BETWEEN].append(float(np.mean([cosine(a, b) for a, b in combinations(alone, 2)])))
        for name, group in groupings.items():
            found[name].append(cosine(flat, merged(fragment, run.created, combined(fragment, run.created, offers, group))))
    return {
        name: {"versions": len(values), "mean": float(np.mean(values)), "least": min(values)}
        for name, values in found.items()
        if values
    }


async def kept(log: Log, record: Record) -> list[RoundOffer]:
    """Return a version's offers in this region's archive."""
    found = [await log.archive.offer(record, member) for member in record.members]
    return [RoundOffer(*stored) for stored in found if stored is not None]


def merged(fragment: Fragment, settings: RunSettings, held: Sequence[RoundOffer]) -> NDArray[np.float32]:
    return merging.accumulate(fragment, settings, held, {}, np.empty(0, np.float32)).result()


def combined(fragment: Fragment, settings: RunSettings, offers: Sequence[RoundOffer], group: Grouping) -> list[RoundOffer]:
    """Return the offers, those of one group merged and quantised."""
    groups: dict[int, list[RoundOffer]] = {}
    for held in offers:
        groups.setdefault(group(int(held.offer.members[0].learner.rsplit("-", 1)[-1])), []).append(held)
    made = []
    for members in groups.values():
        own = [held.offer for held in members if isinstance(held.offer, Offer)]
        bits = settings.codec.offer_bits
        offer = RegionalOffer(fragment.index, "bench", 0, 1, bits, [Answer.of(offer) for offer in own], own[0].body)
        made.append(RoundOffer(offer, quantise.quantise(merged(fragment, settings, members), bits)))
    return made


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def show_merge(result: Result) -> None:
    machine = result["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {len(REGIONS)} regions of {result['learners_a_region']} learners")
    for found in (result[part] for part in ("alone", "merged") if part in result):
        pace = float(np.mean(list(found["steps_per_s"].values())))
        print(
            f"regions.merge={found['merge']}, links of {found['rate_bits_per_s'] / 1e6:.2f} Mbit/s: {found['cycles']:.1f} "
            f"cycles in {found['seconds']:.0f} s, {pace:.2f} steps/s a learner, {found['members']:.2f} learners in a version"
        )
        for region, ways in found["border"].items():
            print(f"  {region}: " + ", ".join(f"{way} {sizes['of_ring']:.2f} of the ring" for way, sizes in ways.items()))
    for name, found in result.get("cosines", {}).items():
        print(f"{name}: cosine {found['mean']:.4f}, at least {found['least']:.4f}, of {found['versions']} versions")


async def back(
    *,
    away: Annotated[float, "seconds"] = 40.0,
    out: Annotated[Path | None, "keep the run here"] = None,
) -> Result:
    """Measure how soon a region that lost its server's disk trains on current versions, and is whole again.

    The bench begins a run with ``diloco up`` in three regions (its defaults otherwise). Once every fragment has versions, it
    freezes all processes of one region for ``--away`` seconds. The other regions train on. Then the region's server loses its
    files, and all processes of the region are killed at once. ``up`` starts them again.

    Seconds count from the moment at which the server answers again. *brought* is the first heartbeat in which the region's
    syncer says that the log is back, and *read* are the bytes that it has received from the other regions' servers until then.
    *current* is the first heartbeat of the region's learner that steps, and has applied what the run had when the server was
    back. *holds* is the end of the first ``diloco verify`` through the region that holds; the first begins 60 s after
    *current*. *refused* is the sum of what all processes refused.
    """
    sets = (f"regions.names={json.dumps(sorted(REGIONS))}",)
    with folder(out) as place, up(place / "run", tokens=10**9, sets=sets, patience_s=RETURN_DEADLINE_S) as running:
        watch = await watching(running)
        await running.reach(
            lambda: all(np.min(applied(watch, region)) >= LEAD_VERSIONS for region in REGIONS), "every region has versions"
        )
        found = await lose_disk(running, watch, away)
        holds, last_line = await verified(watch, place / "seen")
        await watch.link.close()
    began_s = found.pop("server_back_at_s")
    refused = sum(each.refused for each in watch.learners()) + sum(beats[-1][1].refused for beats in watch.syncers.values())
    return {"machine": machine(), "away_s": away, "link_bits_per_s": RATE_BITS_PER_S, **found} | {
        "holds": holds, "holds_s": time.time() - began_s, "verify": last_line, "refused": refused,
        "target_s": CURRENT_TARGET_S,
    }  # fmt: skip


async def lose_disk(running: Up, watch: Watch, away_s: float) -> Result:
    """Freeze a region, take its server's files, kill its processes, and wait until it trains on current versions."""
    learners = [each for each in watch.learners() if each.region == LOST]
    incarnations = {each.learner: each.incarnation for each in learners}
    syncers = [name for name, beats in watch.syncers.items() if beats[-1][1].region == LOST]
    names, before = (*incarnations, *syncers, f"nats-{LOST}"), applied(watch, LOST)
    running.signal(signal.SIGSTOP, *names)
    await asyncio.sleep(away_s)
    missed = int(np.sum(applied(watch, LOST, outside=True) - before))
    shutil.rmtree(running.directory / f"nats-{LOST}" / "jetstream")
    running.signal(signal.SIGKILL, *names)
    url = (watch.run.region_urls or {})[LOST]
    await running.reach(lambda: answers(url), "the server is back")
    back_s, wanted = time.time(), applied(watch, LOST, outside=True)

    def steps() -> bool:
        found = [watch.last(name) for name in incarnations]
        return all(each.incarnation > incarnations[each.learner] and each.state == "stepping" for each in found)

    await running.reach(steps, "the region's learners step again")
    first, stepping_s = applied(watch, LOST), time.time() - back_s
    await running.reach(lambda: bool(np.all(applied(watch, LOST) >= wanted)), "they train on current versions")
    current_s = time.time() - back_s
    brought = [
        (at_s, sum(each[2] for each in beat.crossing))
        for name in syncers
        for (_, last), (at_s, beat) in pairwise(watch.syncers[name])
        if last.state == "unable" != beat.state
    ]
    brought_s, read_bytes = brought[-1]
    await asyncio.sleep(CURRENT_TARGET_S)
    return {
        "versions_missed": missed, "read_bytes": read_bytes, "brought_s": brought_s - back_s, "stepping_s": stepping_s,
        "first_step_behind": max(0, int(np.max(wanted - first))), "current_s": current_s, "server_back_at_s": back_s,
    }  # fmt: skip


def applied(watch: Watch, region: str, *, outside: bool = False) -> Any:
    """Return the newest version of each fragment that a learner in this region has applied, or one outside it."""
    chosen = [each.versions for each in watch.learners() if (each.region == region) is not outside]
    return np.max(chosen or [[0] * watch.run.settings.fragments.count], axis=0)


def answers(url: str) -> bool:
    """Whether a server accepts connections and says so."""
    place = urlsplit(url)
    try:
        with socket.create_connection((str(place.hostname), int(place.port or 0)), 1.0) as made:
            made.settimeout(1.0)
            return made.recv(4) == b"INFO"
    except OSError:
        return False


async def verified(watch: Watch, seen: Path) -> tuple[bool, str]:
    """Return whether ``diloco verify`` through the lost region's server holds, and its last line."""
    run = watch.run
    shutil.rmtree(seen, ignore_errors=True)
    attach = ["attach", str(seen), "--nats", run.nats_url, "--run", run.name, "--bulk", (run.region_urls or {})[LOST]]
    said = b""
    for words in (attach, ["verify", str(seen)]):
        process = await asyncio.create_subprocess_exec(
            *DILOCO, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode:
            break
    return not process.returncode, " ".join(said.decode().strip().splitlines()[-1:])


def show_back(result: dict[str, Any]) -> None:
    print(f"a region without its disk, away for {result['away_s']:g} s, {result['versions_missed']} versions missed")
    rate = f"links of {result['link_bits_per_s'] / 1e6:g} Mbit/s"
    print(f"  its log is back after {result['brought_s']:.1f} s: {result['read_bytes'] / 1e6:.1f} MB read over {rate}")
    print(
        f"  steps {result['stepping_s']:.1f} s after its server is back, {result['first_step_behind']} versions behind at most"
    )
    print(f"  on current versions after {result['current_s']:.1f} s (target: {result['target_s']:g} s)")
    print(f"  verify through it {'holds' if result['holds'] else 'FAILS'} at {result['holds_s']:.1f} s: {result['verify']}")
    print(f"  refused messages: {result['refused']} (target: 0)")


SCRIPT = Script(__doc__, Bench(wan, show_wan), Bench(merge, show_merge), Bench(back, show_back))

if __name__ == "__main__":
    SCRIPT.run()
