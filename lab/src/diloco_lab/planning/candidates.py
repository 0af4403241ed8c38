"""The candidates of a plan: learners by site, with the settings that links have room for, their time and their cost.

Candidates are all sites, all but one, and each alone; in each of these one learner a site, then always one more where learners
are largest, up to ``plan.most_learners``. Of each:

* **settings** that every link has room for (:func:`diloco_lab.planning.link_settings.settle`), and the compute utilisation that
  :mod:`diloco_lab.bandwidth` gives for them;
* **goodput** from simulated learners without rounds (:mod:`diloco_lab.simulator.simulation`): none holds another one up;
* time = tokens / (tokens a second of all chips x goodput x utilisation). The utilisation is that of learners that would wait
  for a late version. Decoupled learners apply it later, so the time is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from diloco_lab import bandwidth
from diloco_lab.bandwidth import ModelJob, schedules
from diloco_lab.planning.link_settings import ChosenSettings, LinkWay, settle
from diloco_lab.planning.sites import Between, Sites
from diloco_lab.published.published import repair_of
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import MAX_DURATION_S, ClusterLearner, Costs
from diloco_lab.simulator.goodput import interval
from diloco_lab.simulator.outcome import Outcome, Scenario

SEEDS = range(5)
FAILURES = 200  # simulated of each seed
REPAIRS = 20  # in a simulated time at least
DAY_S, HOURS_A_DAY = 86400.0, 24


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds, and its 95 % interval."""

    mean: float
    low: float
    high: float


NO_FAILURE = SeedMean(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class PlanCandidate:
    """Learners by site, the settings that the links have room for, and the time and cost that follow."""

    learners: Mapping[str, int]
    choice: ChosenSettings
    step_s: Mapping[str, float]
    tokens_per_s: float  # at a goodput of 1
    utilisation: float
    goodput: SeedMean
    days: SeedMean
    cost: SeedMean

    @property
    def total(self) -> int:
        """Return M."""
        return sum(self.learners.values())


@dataclass(frozen=True)
class DataParallel:
    """One elastic data-parallel job over some sites."""

    sites: Sequence[str]
    goodput: SeedMean
    uptime: SeedMean
    utilisation: float
    days: SeedMean
    cost: SeedMean


class Candidates:
    """All candidates on a file's sites, and the reckoning that they share."""

    def __init__(self, sites: Sites) -> None:
        self.sites, self.model = sites, sites.model

    def without_failures(self) -> Iterator[PlanCandidate]:
        """Yield all candidates at a goodput of 1: on all sites, on all but one, and on each alone."""
        count = len(self.sites.sites)
        for size in dict.fromkeys((count, max(1, count - 1), 1)):
            for subset in combinations(self.sites.sites, size):
                yield from self.of(subset)

    # ---- learners

    def splits(self, subset: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield learners by site: one each, or as many as the file says; then always one more where they are largest."""
        sites = self.sites.sites
        split = {name: sites[name].learners or 1 for name in subset}
        while sum(split.values()) <= self.sites.wanted.most_learners:
            yield dict(split)
            room = [n for n in subset if sites[n].learners is None and split[n] < sites[n].most_learners(self.model)]
            if not room:
                return
            split[max(room, key=lambda name: self.learner_pace(name, split[name]))] += 1

    def learner_pace(self, name: str, count: int) -> float:
        """Return the tokens a second of one of ``count`` learners of a site, while it computes."""
        site = self.sites.sites[name]
        return site.slices // count * site.chips_per_slice * site.chip_tokens_per_s(self.model)

    def paces(self, split: Mapping[str, int]) -> dict[str, float]:
        """Return the tokens a second of all learners of each site, while they compute."""
        return {name: count * self.learner_pace(name, count) for name, count in split.items()}

    def learners(self, name: str, count: int, step_s: float) -> list[ClusterLearner]:
        """Return the learners of a site, for the simulator."""
        site = self.sites.sites[name]
        return [
            ClusterLearner(
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
        """Return the time of a step by site: each learner takes an even part of the tokens."""
        tokens = self.model.tokens_per_step / sum(split.values())
        return {name: tokens / self.learner_pace(name, count) for name, count in split.items()}

    # ---- links, time and cost

    def ways(self, split: Mapping[str, int], step_s: float) -> dict[tuple[str, str], LinkWay]:
        """Return both directions of all links between these sites, by source and target."""
        total, count = sum(split.values()), len(split)
        return {
            (a, b): LinkWay(
                bits_per_s=link.bits_per_s,
                delay_s=link.delay_s,
                parameters=self.model.parameters,
                regions=count,
                learners=total,
                from_learners=split[a],
                to_learners=split[b],
                step_s=step_s,
            )
            for link in self.links(split)
            for a, b in (link.between, reversed(link.between))
        }

    def links(self, subset: Mapping[str, Any] | Sequence[str]) -> list[Between]:
        """Return the links between these sites."""
        return [link for link in self.sites.links if set(link.between) <= set(subset)]

    def of(self, subset: Sequence[str]) -> Iterator[PlanCandidate]:
        """Yield a candidate for each number of learners on these sites, as far as the links have room."""
        for split in self.splits(subset):
            step_s = self.step_s(split)
            ways = self.ways(split, min(step_s.values()))
            choice = settle(ways.values(), self.sites.wanted.utilisation)
            if choice is None:
                continue
            utilisation = min((way.utilisation(choice) for way in ways.values()), default=1.0)
            full = sum(self.paces(split).values()) * utilisation
            days, cost = self.price(split, full, NO_FAILURE)
            yield PlanCandidate(
                learners=split,
                choice=choice,
                step_s=step_s,
                tokens_per_s=full,
                utilisation=utilisation,
                goodput=NO_FAILURE,
                days=days,
                cost=cost,
            )

    def with_failures(self, candidate: PlanCandidate) -> PlanCandidate:
        """Return the candidate with the goodput that failures leave."""
        paces = self.paces(candidate.learners)
        runs = {
            name: simulated(self.learners(name, count, candidate.step_s[name])) for name, count in candidate.learners.items()
        }
        goodput = estimate([sum(paces[n] * runs[n][i].goodput for n in paces) / sum(paces.values()) for i in range(len(SEEDS))])
        days, cost = self.price(candidate.learners, candidate.tokens_per_s, goodput)
        return replace(candidate, goodput=goodput, days=days, cost=cost)

    def price(self, subset: Iterable[str], tokens_per_s: float, goodput: SeedMean) -> tuple[SeedMean, SeedMean]:
        """Return days and cost of the token budget; ``tokens_per_s`` is the pace at a goodput of 1."""
        least = self.model.tokens / tokens_per_s / DAY_S
        days = [least / share if share else math.inf for share in (goodput.mean, goodput.high, goodput.low)]
        hourly = sum(self.sites.sites[name].price_per_hour for name in subset)
        return SeedMean(*days), SeedMean(*(day * HOURS_A_DAY * hourly for day in days))

    def data_parallel(self, subset: Sequence[str]) -> DataParallel:
        """Return a data-parallel job on these sites: one elastic learner of all slices, at the pace of the slowest chips.

        Its slices are alike: of the mean size, failing as often in total as the sites' slices do. Every site exchanges its
        part of the gradients with all others at once, each over a link as thin as the thinnest.
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
        learner = ClusterLearner(
            "data-parallel",
            slices,
            per_slice,
            step_s,
            between_s=slices * per_slice / failures_per_s if failures_per_s else math.inf,
            repair=repair_of(repair_s),
            costs=Costs(True, *costs),
        )
        runs = simulated([learner])
        goodput, uptime = estimate([run.goodput for run in runs]), estimate([run.uptime for run in runs])
        share = 1.0
        if len(subset) > 1:
            rate = (len(subset) - 1) * min(link.bits_per_s for link in self.links(subset))
            job = ModelJob(self.model.parameters, step_s, len(subset))
            share = bandwidth.utilisation(job, schedules("data-parallel")["table"], rate)
        return DataParallel(list(subset), goodput, uptime, share, *self.price(subset, full * share, goodput))


def simulated(learners: Sequence[ClusterLearner]) -> list[Outcome]:
    """Simulate learners with every seed, long enough for many failures and repairs."""
    failures_per_s = sum(learner.slices * learner.chips / learner.between_s for learner in learners)
    times_s = [REPAIRS * max(learner.repair.mean_s for learner in learners)]
    if failures_per_s:
        times_s.append(FAILURES / failures_per_s)
    duration_s = min(MAX_DURATION_S, max(times_s))
    return [simulation.simulate(Scenario(learners, duration_s, seed)) for seed in SEEDS]


def estimate(values: Sequence[float]) -> SeedMean:
    """Return the mean over seeds with its 95 % interval."""
    return SeedMean(*interval(values))
