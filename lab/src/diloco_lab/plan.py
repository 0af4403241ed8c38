"""What to run on one's own sites: how many learners where, which settings, how long it takes, and what it costs.

Candidates are all sites, all but one, and each alone; and in each of these one learner a site, and then always one more where
learners are largest, up to ``plan.most_learners``. Of each:

* **goodput** and uptime from the learners' lives (:mod:`diloco_lab.fast`), which hold each other up in nothing;
* **settings** that every link has room for (:func:`settle`), and the compute utilisation that :mod:`diloco_lab.bandwidth` gives
  for them;
* time = tokens / (tokens a second of all chips x goodput x utilisation). The utilisation is that of learners that would wait
  for a version that is late. Decoupled ones do not, they apply it later; so the time is the longer of what may be.

Syncers' processor time and memory are reckoned from what was measured (docs/performance.md), storage from the log's settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from diloco.core.fold import keyframe_bytes
from diloco.core.quantise import body_bytes
from diloco.core.retention import keyframes_kept
from diloco.settings import run_settings
from diloco_lab import bandwidth, fast
from diloco_lab.bandwidth import Job, schedules
from diloco_lab.cluster import MAX_DURATION_S, Costs, Learner
from diloco_lab.goodput import interval
from diloco_lab.links import PRECISIONS, PRESET, Choice, Way, needed_bits_per_s, settle
from diloco_lab.outcome import Outcome, Scenario
from diloco_lab.published import repair_of
from diloco_lab.sites import Between, Default, Sites

PUBLISHED_STEPS = 100  # the longest H of a published figure

SEEDS = range(5)
FAILURES = 200  # simulated of each seed
REPAIRS = 20  # in a simulated time at least
ALIKE = 0.01  # times that differ by less do not count as different: the one with fewer learners is taken
LITTLE = 0.05  # a share of the time that is no bottleneck
DAY_S, HOURS_A_DAY = 86400.0, 24

# docs/performance.md: a syncer's part of "the whole way" with one learner's offers; the merge of 4; reading; peaks of memory
SYNCER_S_PER_VALUE = 0.41 / 100e6
MERGE_S_PER_VALUE = 1 / 3.1e9
READ_S_PER_BYTE = 0.32 / 1e9
OWNED_BYTES, OWNED_LEARNERS = 16, 2  # a parameter, with so many learners' offers
# docs/operations.md
FOLLOWED_BYTES = 8
SERVER_S_PER_BYTE = 4.5 / 1e9
LEARNER_HOST_BYTES = 17


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its 95 % interval."""

    mean: float
    low: float
    high: float


NO_FAILURE = Estimate(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Candidate:
    """Learners by site, the settings that the links have room for, and what comes of it."""

    learners: Mapping[str, int]
    choice: Choice
    step_s: Mapping[str, float]
    tokens_per_s: float  # at a goodput of 1
    utilisation: float
    goodput: Estimate
    days: Estimate
    cost: Estimate

    @property
    def total(self) -> int:
        """M."""
        return sum(self.learners.values())


@dataclass(frozen=True)
class DataParallel:
    """One elastic data-parallel job over some sites."""

    sites: Sequence[str]
    goodput: Estimate
    uptime: Estimate
    utilisation: float
    days: Estimate
    cost: Estimate


@dataclass(frozen=True)
class LinkLoad:
    """What a way carries, and how full it is."""

    source: str
    target: str
    bytes_per_day: float
    load: float


@dataclass(frozen=True)
class Region:
    """What a region's services need. Processor time in cores, of all its syncers; memory of each."""

    name: str
    syncers: int
    syncer_cores: float
    syncer_memory_bytes: float
    server_cores: float
    storage_bytes: float
    learner_host_bytes: float


@dataclass(frozen=True)
class Setting:
    """A setting of the run, by its dotted name."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Bottleneck:
    """What costs most, or has forced the settings. ``memory``: failures do, and there is no room for smaller learners."""

    kind: Literal["link", "memory", "failures", "chips"]
    name: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What to run, and what comes of it."""

    chosen: Candidate
    uptime: Estimate
    settings: Sequence[Setting]
    links: Sequence[LinkLoad]
    regions: Sequence[Region]
    data_parallel: Sequence[DataParallel]
    bottleneck: Bottleneck
    candidates: Sequence[Candidate]
    defaults: Sequence[Default]
    notes: Sequence[str]


def plan(sites: Sites, *, cheapest: bool = False) -> Plan:
    """The fastest plan, or the cheapest.

    Raises:
        SettingsError: no candidate has links with room for it; or steps are too short or too long to be simulated.
    """
    planner = _Planner(sites)
    measure: Callable[[Any], float] = (lambda one: one.cost.mean) if cheapest else (lambda one: one.days.mean)
    # at best: without a failure. What is worse even so need not be simulated, but for the best on each of the sites.
    at_best = sorted((found for subset in _subsets(sites) for found in planner.candidates(subset)), key=measure)
    candidates: list[Candidate] = []
    tried: set[tuple[str, ...]] = set()
    for one in at_best:
        if measure(one) <= (1 + ALIKE) * min(map(measure, candidates), default=math.inf) or tuple(one.learners) not in tried:
            candidates.append(planner.lived(one))
            tried.add(tuple(one.learners))
    best = min(map(measure, candidates))
    alike = [one for one in candidates if measure(one) <= best * (1 + ALIKE)]
    chosen = min(alike, key=lambda one: (one.total, len(one.learners), measure(one)))
    return planner.plan(chosen, sorted(candidates, key=measure), measure)


def toml(settings: Sequence[Setting]) -> str:
    """Settings as the file of a coordinator that creates the run."""
    sections: dict[str, list[str]] = {}
    for one in settings:
        *section, key = one.name.split(".")
        sections.setdefault(".".join(["settings", *section]), []).append(f"{key} = {json.dumps(one.value)}")
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"


def _subsets(sites: Sites) -> list[tuple[str, ...]]:
    """All sites, all but one, and each alone."""
    count = len(sites.sites)
    sizes = dict.fromkeys((count, max(1, count - 1), 1))
    return [subset for size in sizes for subset in combinations(sites.sites, size)]


class _Planner:
    def __init__(self, sites: Sites) -> None:
        self.sites, self.model = sites, sites.model

    # ---- learners

    def splits(self, subset: Sequence[str]) -> Iterator[dict[str, int]]:
        """Learners by site: one each, or as many as the file says; and then always one more where they are largest."""
        sites = self.sites.sites
        split = {name: sites[name].learners or 1 for name in subset}
        while sum(split.values()) <= self.sites.wanted.most_learners:
            yield dict(split)
            room = [n for n in subset if sites[n].learners is None and split[n] < sites[n].most_learners(self.model)]
            if not room:
                return
            split[max(room, key=lambda name: self.learner_pace(name, split[name]))] += 1

    def learner_pace(self, name: str, count: int) -> float:
        """Tokens a second of one of so many learners of a site, while it computes."""
        site = self.sites.sites[name]
        return site.slices // count * site.chips_per_slice * site.chip_tokens_per_s(self.model)

    def paces(self, split: Mapping[str, int]) -> dict[str, float]:
        """Tokens a second of all learners of each site, while they compute."""
        return {name: count * self.learner_pace(name, count) for name, count in split.items()}

    def learners(self, name: str, count: int, step_s: float) -> list[Learner]:
        """A site's."""
        site = self.sites.sites[name]
        return [
            Learner(
                f"{name}-{index}",
                site.slices // count,
                site.chips_per_slice,
                step_s,
                between_s=site.between_s,
                repair=repair_of(site.repair_s),
                costs=Costs(True, site.downscale_s, site.upscale_s, site.gather_s),
            )
            for index in range(count)
        ]

    def step_s(self, split: Mapping[str, int]) -> dict[str, float]:
        """Each learner takes an even part of the tokens of a step, so where learners are faster steps are shorter."""
        tokens = self.model.tokens_per_step / sum(split.values())
        return {name: tokens / self.learner_pace(name, count) for name, count in split.items()}

    # ---- candidates

    def ways(self, split: Mapping[str, int], step_s: float) -> dict[tuple[str, str], Way]:
        """Both directions of all links between these sites, by where they begin and end."""
        total, count = sum(split.values()), len(split)
        return {
            (a, b): Way(link.bits_per_s, link.delay_s, self.model.parameters, count, total, split[a], split[b], step_s)
            for link in self.links(split)
            for a, b in (link.between, reversed(link.between))
        }

    def links(self, subset: Mapping[str, Any] | Sequence[str]) -> list[Between]:
        """Between these sites."""
        return [link for link in self.sites.links if set(link.between) <= set(subset)]

    def candidates(self, subset: Sequence[str]) -> Iterator[Candidate]:
        """For each number of learners on these sites, as far as the links have room."""
        for split in self.splits(subset):
            step_s = self.step_s(split)
            ways = self.ways(split, min(step_s.values()))
            choice = settle(ways.values(), self.sites.wanted.utilisation)
            if choice is None:
                continue
            utilisation = min((way.utilisation(choice) for way in ways.values()), default=1.0)
            full = sum(self.paces(split).values()) * utilisation
            yield Candidate(split, choice, step_s, full, utilisation, NO_FAILURE, *self.price(split, full, NO_FAILURE))

    def lived(self, candidate: Candidate) -> Candidate:
        """With the goodput that failures leave."""
        paces = self.paces(candidate.learners)
        lives = {
            name: _simulated(self.learners(name, count, candidate.step_s[name])) for name, count in candidate.learners.items()
        }
        goodput = _estimate(
            [sum(paces[n] * lives[n][i].goodput for n in paces) / sum(paces.values()) for i in range(len(SEEDS))]
        )
        days, cost = self.price(candidate.learners, candidate.tokens_per_s, goodput)
        return replace(candidate, goodput=goodput, days=days, cost=cost)

    def price(self, subset: Iterable[str], tokens_per_s: float, goodput: Estimate) -> tuple[Estimate, Estimate]:
        """Days and cost of the budget at so many tokens a second and a goodput of 1."""
        least = self.model.tokens / tokens_per_s / DAY_S
        days = [least / share if share else math.inf for share in (goodput.mean, goodput.high, goodput.low)]
        hourly = sum(self.sites.sites[name].price_per_hour for name in subset)
        return Estimate(*days), Estimate(*(day * HOURS_A_DAY * hourly for day in days))

    def data_parallel(self, subset: Sequence[str]) -> DataParallel:
        """One elastic learner of all slices, as slow as its slowest chips, whose gradients are reduced over the thinnest link.

        Its slices are alike, as large as those of the sites are in the mean, and fail as often in all. Every site exchanges its
        part of the gradients with every other one at once, so that a site has as many such links as there are others.
        """
        sites = [self.sites.sites[name] for name in subset]
        slices = sum(site.slices for site in sites)
        chips = sum(site.slices * site.chips_per_slice for site in sites)
        failures_per_s = sum(site.slices * site.chips_per_slice / site.between_s for site in sites)
        away_s = [site.slices * site.chips_per_slice / site.between_s * site.repair_s for site in sites]
        repair_s = sum(away_s) / failures_per_s if failures_per_s else sites[0].repair_s
        full = chips * min(site.chip_tokens_per_s(self.model) for site in sites)
        step_s = self.model.tokens_per_step / full
        per_slice = max(1, round(chips / slices))
        costs = [max(getattr(site, name) for site in sites) for name in ("downscale_s", "upscale_s", "gather_s")]
        learner = Learner(
            "data-parallel",
            slices,
            per_slice,
            step_s,
            between_s=slices * per_slice / failures_per_s if failures_per_s else math.inf,
            repair=repair_of(repair_s),
            costs=Costs(True, *costs),
        )
        runs = _simulated([learner])
        goodput, uptime = _estimate([run.goodput for run in runs]), _estimate([run.uptime for run in runs])
        share = 1.0
        if len(subset) > 1:
            rate = (len(subset) - 1) * min(link.bits_per_s for link in self.links(subset))
            job = Job(self.model.parameters, step_s, len(subset))
            share = bandwidth.utilisation(job, schedules("data-parallel")["table"], rate)
        return DataParallel(list(subset), goodput, uptime, share, *self.price(subset, full * share, goodput))

    # ---- the plan

    def plan(self, chosen: Candidate, candidates: Sequence[Candidate], measure: Callable[[Any], float]) -> Plan:
        """All that there is to say of the chosen one."""
        names = list(chosen.learners)
        runs = _simulated([learner for n in names for learner in self.learners(n, chosen.learners[n], chosen.step_s[n])])
        ways = self.ways(chosen.learners, min(chosen.step_s.values()))
        cycle_s = chosen.choice.steps * min(chosen.step_s.values())
        loads = [
            LinkLoad(*ends, way.cycle_bytes(chosen.choice) * DAY_S / cycle_s, way.load(chosen.choice))
            for ends, way in ways.items()
        ]
        alone = min((self.data_parallel([name]) for name in self.sites.sites), key=measure)
        together = [self.data_parallel(list(self.sites.sites))] if len(self.sites.sites) > 1 else []
        regions = self.regions(chosen, cycle_s)
        settings = self.settings(chosen, sum(region.syncers for region in regions))
        return Plan(
            chosen,
            _estimate([run.uptime for run in runs]),
            settings,
            loads,
            regions,
            [*together, alone],
            self.bottleneck(chosen, ways),
            candidates,
            self.sites.defaults,
            self.notes(chosen, candidates),
        )

    def regions(self, chosen: Candidate, cycle_s: float) -> list[Region]:
        """What each site's services need: all of them own as many fragments."""
        model, choice, count = self.model, chosen.choice, len(chosen.learners)
        codec_bytes = body_bytes(model.parameters, choice.bits)
        owned = model.parameters / count
        cores = (
            owned
            / cycle_s
            * (SYNCER_S_PER_VALUE + (chosen.total - 1) * (MERGE_S_PER_VALUE + READ_S_PER_BYTE * codec_bytes / model.parameters))
        )
        # no more work for one than a core does; a run without regions shares the fragments as the preset has it
        syncers = max(math.ceil(cores), PRESET.shards if count == 1 else 1)
        memory_bytes = (
            owned / syncers * OWNED_BYTES
            + max(0, chosen.total - OWNED_LEARNERS) * codec_bytes / count / syncers
            + (model.parameters - owned) * FOLLOWED_BYTES
        )
        log = PRESET.log
        log_bytes = keyframes_kept(log, model.parameters, 1) * keyframe_bytes(model.parameters, 1) * (1 + log.keyframe_factor)
        return [
            Region(
                name,
                syncers,
                cores,
                memory_bytes,
                SERVER_S_PER_BYTE * codec_bytes * (learners + max(1, learners)) / cycle_s,
                log_bytes + learners * codec_bytes,
                model.parameters * LEARNER_HOST_BYTES,
            )
            for name, learners in chosen.learners.items()
        ]

    def settings(self, chosen: Candidate, shards: int) -> list[Setting]:
        """What the run is to be set to beside its preset, and why.

        Raises:
            SettingsError: the product would refuse them.
        """
        choice, names = chosen.choice, list(chosen.learners)
        split = ", ".join(f"{count} in {name}" for name, count in chosen.learners.items())

        def least(name: str, value: float, why: str) -> Setting:
            section, key = name.split(".")
            return Setting(name, value, "the preset's" if value == getattr(getattr(PRESET, section), key) else why)

        found = [
            Setting("learners", chosen.total, f"M: {split}; the fewest that are within {ALIKE:.0%} of the best"),
            Setting("tokens", self.model.tokens, "the budget"),
            Setting(
                "shards", shards, "syncers that share the fragments: of each region as many as it has cores' worth of work"
            ),
            Setting("round.quorum", PRESET.round.quorum, "K, the preset's: a round waits for nobody who is down"),
            Setting(
                "round.grace_factor",
                PRESET.round.grace_factor,
                "the preset's: who answers within the overlap is merged too; K = 1 without it costs quality",
            ),
            least("round.steps", choice.steps, "H: the least for which every link has room"),
            least("round.overlap_steps", choice.overlap_steps, "tau: the least that a version needs to be in time"),
            least("fragments.count", choice.fragments, "P: smaller fragments are over a link sooner"),
            *(
                least(f"codec.{which}_bits", choice.bits, "the most for which every link has room at this H")
                for which in ("offer", "record")
            ),
        ]
        if len(names) > 1:
            found.append(Setting("regions.names", names, "each site has a NATS server of its own"))
            found.append(least("regions.merge", choice.merge, "what a site sends does not grow with its learners"))
        if len(names) > 2:
            found.append(Setting("regions.control_replicas", 3, "the control store has a server in each of three regions"))
        run_settings(PRESET.preset, {one.name: one.value for one in found}, "plan")
        return found

    def bottleneck(self, chosen: Candidate, ways: Mapping[tuple[str, str], Way]) -> Bottleneck:
        """A link that made rounds rarer; else what of links and failures costs more than a twentieth; else the chips."""
        lost_links, lost_failures = 1 - chosen.utilisation, 1 - chosen.goodput.mean
        if chosen.choice.steps > PRESET.round.steps or lost_links > max(LITTLE, lost_failures):
            fullest = max(ways, key=lambda ends: (ways[ends].load(chosen.choice), ways[ends].delay_s))
            return self._full(chosen, "-".join(fullest), ways[fullest])
        if lost_failures > LITTLE:
            return self._failing(chosen)
        paces = self.paces(chosen.learners)
        name = max(paces, key=paces.__getitem__)
        why = f"the chips themselves: links cost {lost_links:.1%} of the time and failures {lost_failures:.1%}"
        return Bottleneck("chips", name, f"{why}; {name} has {paces[name] / sum(paces.values()):.0%} of the pace")

    def _full(self, chosen: Candidate, name: str, way: Way) -> Bottleneck:
        choice = Choice(merge=chosen.choice.merge)
        needed = needed_bits_per_s(way, choice, self.sites.wanted.utilisation)
        why = (
            f"{way.bits_per_s / 1e9:.3g} Gbit/s are {way.load(chosen.choice):.0%} full at H = {chosen.choice.steps}; "
            f"the preset's H = {choice.steps} with {choice.bits} bits needs "
        )
        why += f"{needed / 1e9:.3g} Gbit/s" if needed else f"less than {way.delay_s:g} s of delay, whatever the rate"
        return Bottleneck("link", name, why)

    def _failing(self, chosen: Candidate) -> Bottleneck:
        def chips(name: str) -> int:
            site = self.sites.sites[name]
            return site.slices // chosen.learners[name] * site.chips_per_slice

        name = max(chosen.learners, key=lambda name: chips(name) / self.sites.sites[name].between_s)
        site, count = self.sites.sites[name], chosen.learners[name]
        why = (
            f"goodput is {chosen.goodput.mean:.1%}: a learner of {name} has {chips(name)} chips, so one is interrupted every "
            f"{site.between_s / chips(name):.0f} s and its slice is away for {site.repair_s:.0f} s"
        )
        if count == site.most_learners(self.model) < site.slices:
            return Bottleneck("memory", name, f"{why}; its memory has room for no more than {count} learners")
        if chosen.total >= self.sites.wanted.most_learners:
            why += f"; plan.most_learners = {self.sites.wanted.most_learners} allows no smaller ones"
        return Bottleneck("failures", name, why)

    def notes(self, chosen: Candidate, candidates: Sequence[Candidate]) -> list[str]:
        """What a figure does not say."""
        found = []
        if chosen.total > 1:
            found.append(
                f"quality: {chosen.total} learners cost some; for 8 learners and H = 30 the scaling laws have +1.1 % loss with "
                "2.4B parameters and +3.9 % with 35M; with 5B parameters 8 learners were as good as data-parallel "
                "(arXiv 2604.21428)"
            )
            found.append(f"batch: {self.model.tokens_per_step / chosen.total:.0f} tokens a step and learner")
        if chosen.choice.bits > PRECISIONS[-1]:
            found.append(
                f"bits: {chosen.choice.bits} because the links have room; {PRECISIONS[-1]} were measured to be as good "
                f"(+0.09 % loss, arXiv 2604.21428) and are {PRECISIONS[-1] / chosen.choice.bits:.0%} of the bytes"
            )
        if chosen.choice.steps > PUBLISHED_STEPS:
            found.append(
                f"H = {chosen.choice.steps} is longer than any published; whether the model learns as well is not known"
            )
        if len(chosen.learners) == 2:
            found.append(
                "two regions wait for each other when the link is cut; a third with a server and a syncer, without learners, "
                "would not let them (docs/regions.md)"
            )
        together = {name for one in candidates if len(one.learners) > 1 for name in one.learners}
        for name in self.sites.sites:
            if name not in chosen.learners:
                why = (
                    "the plan is better, or as good with fewer learners"
                    if name in together
                    else "links allow no H at all with it"
                )
                found.append(f"{name} is left out: {why}")
        found.append(
            "services: reckoned from what was measured on one machine with int4 (docs/performance.md): "
            f"{SYNCER_S_PER_VALUE * 1e9:.1f} ns a parameter and version, {OWNED_BYTES} bytes a parameter owned, "
            f"{FOLLOWED_BYTES} followed; storage before zstd"
        )
        for name, count in chosen.learners.items():
            site = self.sites.sites[name]
            if site.slices // count == site.needed_slices(self.model):
                found.append(
                    f"a learner of {name} fills its memory: without a slice it would stand still, and is taken to go on"
                )
            idle = site.chips - site.slices // count * count * site.chips_per_slice
            if idle:
                found.append(
                    f"{idle} of {site.chips} chips of {name} are in no learner: they make no whole slice for each; paid"
                )
        return found


def _simulated(learners: Sequence[Learner]) -> list[Outcome]:
    """Lives of learners with every seed, long enough for many failures and repairs."""
    failures_per_s = sum(learner.slices * learner.chips / learner.between_s for learner in learners)
    times_s = [REPAIRS * max(learner.repair.mean_s for learner in learners)]
    if failures_per_s:
        times_s.append(FAILURES / failures_per_s)
    duration_s = min(MAX_DURATION_S, max(times_s))
    return [fast.simulate(Scenario(learners, duration_s, seed)) for seed in SEEDS]


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(*interval(values))
