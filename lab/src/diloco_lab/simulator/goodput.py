"""Goodput and uptime by strategy, number of learners and number of chips, over several seeds."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.validation import nearest
from diloco_lab.published import published
from diloco_lab.published.published import Constants
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import Cluster, RoundTerms, Slowdowns
from diloco_lab.simulator.lifetime import Fault
from diloco_lab.simulator.outcome import Outcome, Scenario
from diloco_report.units import count

CONFIDENCE = 0.95
QUANTITIES = ("goodput", "uptime")


@dataclass(frozen=True)
class Strategy:
    """How chips train together. ``preset``: the product's settings of the learners' rounds; None: there is one learner."""

    name: str
    elastic: bool
    preset: str | None = None


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("data-parallel", elastic=False),
        Strategy("data-parallel-elastic", elastic=True),
        Strategy("diloco", elastic=True, preset="diloco"),
        Strategy("streaming", elastic=True, preset="streaming"),
        Strategy("decoupled", elastic=True, preset="decoupled"),
    )
}
PUBLISHED = ("data-parallel", "data-parallel-elastic", "decoupled")


def strategy_of(name: str) -> Strategy:
    """Return the strategy of a name.

    Raises:
        SettingsError: there is none.
    """
    if name not in STRATEGIES:
        raise SettingsError(f"strategy {name!r}: unknown{nearest(name, list(STRATEGIES))}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


@dataclass(frozen=True)
class FleetConditions:
    """The chips, but for their number. ``cluster`` overrides fields of Cluster (``between_s``, ...)."""

    constants: Constants = published.FITTED
    cluster: Mapping[str, Any] = field(default_factory=dict)

    def of(self, strategy: Strategy, chips: int, learners: int) -> Cluster:
        """Return the chips, split over learners.

        Raises:
            SettingsError: they cannot be.
        """
        if strategy.preset is None and learners != 1:
            raise SettingsError(f"learners = {learners}: strategy {strategy.name} is a single one; leave --learners out")
        plain = Cluster(chips, learners, self.cluster.get("chips_per_slice", min(published.CHIPS_PER_SLICE, chips)))
        cluster = self.constants.apply(plain, elastic=strategy.elastic)
        costs, slow, others = (
            {name: self.cluster[name] for name in names if name in self.cluster} for names in (_COSTS, _SLOW, _CLUSTER)
        )
        if slow:
            missing = [name for name in _SLOW if name not in slow]
            if missing:
                raise SettingsError(f"{next(iter(slow))} without {missing[0]}: slowdowns need {', '.join(_SLOW)}")
            others["slowdowns"] = Slowdowns(*(slow[name] for name in _SLOW))
        return replace(cluster, costs=replace(cluster.costs, **costs), **others)


_COSTS = ("checkpoint_s",)
_SLOW = ("slow_between_s", "slow_lasting_s", "slow_factor")  # of Slowdowns, in its order
_CLUSTER = ("between_s", "chips_per_slice", "speed_spread")


def conditions(values: Mapping[str, Any], source: str) -> FleetConditions:
    """Return conditions as published, with some values of one's own.

    Raises:
        SettingsError: naming ``source`` and an unknown name, or a value that is no number.
    """
    constants = [each.name for each in fields(Constants)]
    known = [*constants, *_CLUSTER, *_COSTS, *_SLOW]
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{source} {name}: unknown{nearest(name, known)}; there are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{source} {name} = {value!r}: expected a number")
        if name in constants and not (math.isfinite(value) and value >= 0):
            raise SettingsError(f"{source} {name} = {value!r}: expected a number, 0 or more")
    own = {name: float(value) for name, value in values.items() if name in constants}
    rest = {name: value for name, value in values.items() if name not in constants}
    return FleetConditions(replace(published.FITTED, **own), rest)


@dataclass(frozen=True)
class GoodputCell:
    """One cell of a table, to be simulated. ``faults`` and ``cuts``: a tape's, in the place of drawn failures."""

    strategy: str
    learners: int
    chips: int
    faults: Mapping[str, Sequence[Fault]] | None = None
    cuts: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def scenario(self, conditions: FleetConditions, seed: int, duration_s: float) -> Scenario:
        """Return the scenario of one seed: with rounds only where learners may wait; goodput depends on no others."""
        strategy = strategy_of(self.strategy)
        cluster = conditions.of(strategy, self.chips, self.learners)
        if self.faults is not None:
            cluster = replace(cluster, between_s=math.inf)
        rounds = None
        if strategy.preset is not None:
            settings = run_settings(strategy.preset, {"learners": self.learners})
            of_preset = RoundTerms(settings, [1] * settings.fragments.count)
            rounds = of_preset if of_preset.learners_may_wait else None
        return Scenario(
            learners=cluster.split(seed),
            duration_s=duration_s,
            seed=seed,
            rounds=rounds,
            faults=self.faults or {},
            cuts=self.cuts,
        )


@dataclass(frozen=True)
class GoodputRow:
    """One cell, simulated: means over seeds with their 95 % intervals, as shares, and what is published of it."""

    strategy: str
    learners: int
    chips: int
    goodput: float
    goodput_low: float
    goodput_high: float
    uptime: float
    uptime_low: float
    uptime_high: float
    published_goodput: float | None
    published_uptime: float | None


def points(strategies: Iterable[str], learners: Sequence[int], chips: Sequence[int]) -> list[GoodputCell]:
    """Return all cells of a table; a data-parallel job is always one learner."""
    return [
        GoodputCell(name, count, number)
        for name in strategies
        for count in ((1,) if strategy_of(name).preset is None else learners)
        for number in chips
    ]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and the 95 % interval of the mean by Student's t; shares, so within 0 and 1."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def row(point: GoodputCell, runs: Sequence[tuple[float, float]]) -> GoodputRow:
    """Return the cell of a point, from (goodput, uptime) by seed."""
    known = published.cell(point.strategy, point.learners, point.chips) if point.faults is None else published.Cell()
    goodput, goodput_low, goodput_high = interval([run[0] for run in runs])
    uptime, uptime_low, uptime_high = interval([run[1] for run in runs])
    return GoodputRow(
        strategy=point.strategy,
        learners=point.learners,
        chips=point.chips,
        goodput=goodput,
        goodput_low=goodput_low,
        goodput_high=goodput_high,
        uptime=uptime,
        uptime_low=uptime_low,
        uptime_high=uptime_high,
        published_goodput=known.goodput,
        published_uptime=known.uptime,
    )


def simulate(point: GoodputCell, conditions: FleetConditions, seed: int, duration_s: float) -> Outcome:
    """Simulate one seed of a point."""
    return simulation.simulate(point.scenario(conditions, seed, duration_s))


def _shares(point: GoodputCell, conditions: FleetConditions, seed: int, duration_s: float) -> tuple[float, float]:
    outcome = simulate(point, conditions, seed, duration_s)
    return outcome.goodput, outcome.uptime


def sweep(
    wanted: Sequence[GoodputCell],
    conditions: FleetConditions,
    seeds: Sequence[int],
    duration_s: float,
    jobs: int,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> list[GoodputRow]:
    """Simulate all points with all seeds, ``jobs`` at once. ``progress`` is told how many of how many are done.

    Raises:
        SettingsError: a point that cannot be, before anything is simulated.
    """
    for point in wanted:
        conditions.of(strategy_of(point.strategy), point.chips, point.learners)
    tasks = [(index, seed) for index in range(len(wanted)) for seed in seeds]
    tasks.sort(key=lambda task: -wanted[task[0]].chips)  # the longest first, so that all cores have something to the end
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for task, shares in _played(wanted, tasks, conditions, duration_s, jobs):
        found[task] = shares
        progress(len(found), len(tasks))
    return [row(point, [found[index, seed] for seed in seeds]) for index, point in enumerate(wanted)]


def _played(
    wanted: Sequence[GoodputCell], tasks: Sequence[tuple[int, int]], conditions: FleetConditions, duration_s: float, jobs: int
) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    if jobs == 1 or len(tasks) == 1:
        for index, seed in tasks:
            yield (index, seed), _shares(wanted[index], conditions, seed, duration_s)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_shares, wanted[index], conditions, seed, duration_s): (index, seed) for index, seed in tasks}
        for done in as_completed(running):
            yield running[done], done.result()


def mean_error(rows: Iterable[GoodputRow]) -> float | None:
    """Return the mean absolute error over all published cells, as a share; None: none of them is published."""
    errors = []
    for each in rows:
        for simulated, known in ((each.goodput, each.published_goodput), (each.uptime, each.published_uptime)):
            if known is not None:
                errors.append(abs(simulated - known))
    return float(np.mean(errors)) if errors else None


def thumb(rows: Iterable[GoodputRow]) -> list[tuple[GoodputRow, GoodputRow, float]]:
    """Return all pairs of M learners and one on M times fewer chips, and how far their goodput is apart."""
    decoupled = {(each.learners, each.chips): each for each in rows if each.strategy == "decoupled"}
    pairs = []
    for (learners, chips), each in decoupled.items():
        one = decoupled.get((1, chips // learners))
        if learners > 1 and one is not None:
            pairs.append((each, one, each.goodput - one.goodput))
    return pairs


def cell_text(row: GoodputRow | None, quantity: str) -> str:
    """Return a cell of a table in per cent, with half its interval and the published value; empty if it was not simulated."""
    if row is None:
        return ""
    mean, low, known = getattr(row, quantity), getattr(row, f"{quantity}_low"), getattr(row, f"published_{quantity}")
    width = f" ±{100 * (mean - low):.1f}" if low < mean else ""
    return f"{100 * mean:.1f}{width}" + ("" if known is None else f" ({100 * known:.0f})")


def table(rows: Sequence[GoodputRow], quantity: str) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table: a row for each strategy and M, a column for each number of chips."""
    numbers = sorted({each.chips for each in rows})
    found = {(each.strategy, each.learners, each.chips): each for each in rows}
    keys = dict.fromkeys((each.strategy, each.learners) for each in rows)
    made = [
        [strategy, str(learners), *(cell_text(found.get((strategy, learners, number)), quantity) for number in numbers)]
        for strategy, learners in keys
    ]
    return ["strategy", "M", *(f"{count(number)} chips" for number in numbers)], made


def constants_text(constants: Constants) -> str:
    """Return the constants' names and values."""
    return ", ".join(f"{field.name} {value:g}" for field, value in zip(fields(constants), astuple(constants), strict=True))


def notes(rows: Sequence[GoodputRow], chosen: FleetConditions, seeds: int, days: float) -> list[str]:
    """Return the notes below the tables; :mod:`diloco_lab.published.comparison` has the errors of the published cells."""
    found = [f"{days:.3g} days"]
    if seeds > 1:
        found = [f"means over {seeds} seeds of {days:.3g} days, ± 95 % interval; in brackets what is published"]
    if chosen.constants == published.FITTED:
        found.append("constants, fitted to the data-parallel rows alone: " + constants_text(chosen.constants))
    else:
        found.append("constants: " + constants_text(chosen.constants))
    pairs = thumb(rows)
    if pairs:
        many, one, apart = max(pairs, key=lambda pair: abs(pair[2]))
        found.append(
            f"M learners against one on M times fewer chips: at most {100 * abs(apart):.1f} points of goodput apart "
            f"(M = {many.learners}, {count(many.chips)} chips), in {len(pairs)} pairs; uptime {100 * many.uptime:.1f} and "
            f"{100 * one.uptime:.1f} %"
        )
    return found
