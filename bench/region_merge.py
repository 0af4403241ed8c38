"""Savings of the regional merge on thin links, and distance of its result from a merge of each learner's own offer.

    python bench/region_merge.py alone merged cosines       # six minutes; or only some of these parts

Each part begins a run in three regions with ``diloco up``, several learners in each (bench/wan.py has how).

* ``alone`` and ``merged``: without ``regions.merge`` and with it, on thin links: the bytes that cross each region's border a
  fragment cycle, of what a ring all-reduce between the regions would send, and how many learners are in a version.
* ``cosines``: the built-in model is trained without, and its offers are kept. They are merged again as they were, and with
  those of each region (or of another grouping) merged and quantised first: the cosine between both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import script
import wan
from numpy.typing import NDArray

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.syncer import merging
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import Fragment
from diloco.log.log import Log
from diloco.settings.run import RunSettings
from diloco.wire.entries import Record
from diloco.wire.offers import Answer, Offer, RegionalOffer

Grouping = Callable[[int], int]  # the group of a learner, by its index
BETWEEN = "between two learners' offers"


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": script.machine(), "learners_a_region": arguments.each, "step_s": arguments.step}
    for part in ("alone", "merged"):
        if part in arguments.parts:
            result[part] = await traffic(folder, arguments, merge=part == "merged")
    if "cosines" in arguments.parts:
        own = argparse.Namespace(gpt=True, step=arguments.step, set=["log.archive=true", "round.steps=12"])
        async with wan.training(wan.made(folder / "cosines"), own, {}, "decoupled", arguments.each) as watch:
            await watch.fast()
            await watch.begun(2)
            await asyncio.sleep(arguments.seconds)
            result["cosines"] = await cosines(watch, arguments.each)
    return result


async def traffic(folder: Path, arguments: argparse.Namespace, *, merge: bool) -> dict[str, Any]:
    everybody = [f"learner-{index}" for index in range(arguments.each * len(wan.REGIONS))]
    own = argparse.Namespace(gpt=False, step=arguments.step, set=[f"regions.merge={str(merge).lower()}"])
    async with wan.training(wan.made(folder / f"merge-{merge}"), own, wan.MODEL, "decoupled", arguments.each) as watch:
        rate_bits_per_s = await watch.thin(arguments.step)
        await watch.begun(2)
        await asyncio.sleep(wan.SETTLE_S)
        before = len(watch.versions)
        found = await watch.measure(arguments.seconds, everybody)
        members = [len(record.members) for _, record in watch.versions[before:]]
        return {"merge": merge, "rate_bits_per_s": rate_bits_per_s, "members": float(np.mean(members))} | found


async def cosines(watch: wan.Watch, each: int) -> dict[str, Any]:
    """Of versions of which all offers are kept in the first region: how alike merges in one step and in two are."""
    registry = await watch.link.bucket(watch.subjects.bucket, create=False)
    run = KnownRun(watch.run.name, watch.run.settings, registry)
    log = Log(watch.link, run.name, run.identity, await creation.find_map(run), run.created)
    regions, count = len(wan.REGIONS), each * len(wan.REGIONS)
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
    found = [
        await log.archive.offer(record.fragment, member.learner, member.incarnation, member.number) for member in record.members
    ]
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


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {len(wan.REGIONS)} regions of {result['learners_a_region']} learners")
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


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=("alone", "merged", "cosines"))
    parser.add_argument("--each", type=int, default=2, help="learners a region")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each measurement")
    parser.add_argument("--step", type=float, default=0.25, help="seconds that a step takes, but of the built-in model")
    arguments = parser.parse_args()
    os.environ.pop("DILOCO_RUN", None)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        result = asyncio.run(measure(Path(folder), arguments))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
