"""The rate that a link between datacenters needs for a compute utilisation, and the utilisation that a given link allows.

Compute utilisation is ``T / (T + exposed)``: ``T`` a step's own time, ``exposed`` the time a step that the learner stands still
because something has not come over the link yet (arXiv 2604.21428, algorithm.md section 6; the bandwidth simulator behind the
published figures is Douillard's). One mechanism serves all strategies. In a *cycle* of H steps each of P fragments is released
onto a link that carries one after the other, ``bits * 2 (1 - 1/D) * parameters / P`` each; later it is needed, and the learner
stands still until it is there. Strategies differ in when fragments are released and needed, and in nothing else:

* data-parallel: a cycle is a step; 64 gradient buckets are released evenly over the backward pass, the last two thirds of the
  step, and needed at its end. Or, as the preset does it: the gradients are released when the step is over.
* DiLoCo: one fragment, the whole model, is needed at once.
* Streaming and Decoupled DiLoCo: fragments are released in the product's slots, each needed ``tau`` steps after its release.

A Decoupled learner does not stand still for a version that is late, it applies it later: what is given for it is the rate at
which versions come in time.

Not in the model: delay, headers, lost packets, several learners in a datacenter, the scales of quantised blocks, compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from diloco.core.learner.slots import first_slot
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.validation import nearest
from diloco_lab.published import published
from diloco_lab.published.published import UTILISATIONS

ScheduleName = Literal["table", "training"]

PRECISIONS = (16, 8, 4)
CURVE_GBIT = tuple(10 ** (part / 40) for part in range(-80, 161))
BITS_PER_GBIT = 1e9

HEAD = ("strategy", "schedule", "bits", "H", "P", "tau")  # of the cells that name a schedule
MOST_STEPS = 100_000  # of round.steps
MOST_FRAGMENTS = 4096  # of fragments.count


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        _refuse(name, value, "a number above 0")


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        _refuse(name, value, "a share above 0 and below 1")


def _whole(name: str, value: float, most: int | None = None) -> None:
    if not (math.isfinite(value) and value == int(value) and 1 <= value <= (most or value)):
        _refuse(name, value, "a whole number of at least 1" + (f" and at most {most}" if most else ""))


def _refuse(name: str, value: float, expected: str) -> None:
    raise SettingsError(f"{name} = {value!r}, expected {expected}")


@dataclass(frozen=True)
class ModelJob:
    """A model, the time of its step, and the number of datacenters. The defaults are those of the published cells."""

    parameters: float = 5e9
    step_s: float = 1.0
    datacenters: int = 8

    def __post_init__(self) -> None:
        _whole("parameters", self.parameters)
        _positive("step_s", self.step_s)
        _whole("datacenters", self.datacenters)


@dataclass(frozen=True)
class Schedule:
    """When what is sent: each of ``fragments`` once every ``steps``, needed ``overlap_steps`` after its release.

    ``bits`` of a value are the mean of both ways. ``in_backward``: released evenly over the one step's backward pass.
    """

    bits: int
    steps: int
    fragments: int
    overlap_steps: float
    in_backward: bool = False

    def __post_init__(self) -> None:
        _whole("bits", self.bits, 32)
        _whole("steps", self.steps, MOST_STEPS)
        _whole("fragments", self.fragments, MOST_FRAGMENTS)
        if not 0 <= self.overlap_steps <= self.steps:
            _refuse("overlap_steps", self.overlap_steps, f"0 to steps = {self.steps}, after which the fragment is sent again")
        if self.in_backward and (self.steps, self.overlap_steps) != (1, 0):
            raise SettingsError(f"in_backward with steps = {self.steps}, overlap_steps = {self.overlap_steps}: must be 1 and 0")


# A cycle of 100 steps, of which 36 go on while something is sent: the 40 published cells have 99.5 and 36.0 by least squares.
# How many fragments share the 36 does not matter as long as one is needed before the next is released; 24 is as published.
_TABLE_OVERLAPPED = Schedule(bits=4, steps=100, fragments=24, overlap_steps=36 / 24)
_TABLE = {
    "data-parallel": Schedule(bits=16, steps=1, fragments=64, overlap_steps=0, in_backward=True),
    "diloco": Schedule(bits=16, steps=100, fragments=1, overlap_steps=0),
    "streaming": _TABLE_OVERLAPPED,
    "decoupled": _TABLE_OVERLAPPED,
}

# what may be set otherwise, by strategy; the rest is what makes it that strategy
CHANGEABLE: dict[str, tuple[str, ...]] = {
    "data-parallel": ("bits",),
    "diloco": ("bits", "steps"),
    "streaming": ("bits", "steps", "fragments", "overlap_steps"),
    "decoupled": ("bits", "steps", "fragments", "overlap_steps"),
}
STRATEGIES = tuple(CHANGEABLE)


@dataclass(frozen=True)
class BandwidthRow:
    """A utilisation and the rate that goes with it."""

    strategy: str
    bits: int
    parameters: int
    step_s: float
    datacenters: int
    utilisation: float
    gbit_per_s: float
    schedule: ScheduleName

    @property
    def published_gbit(self) -> float | None:
        """Return the rate that Table 13 of arXiv 2604.21428 has for this row; None: it has no such cell."""
        if self.schedule != "table" or self.parameters != published.LINK_PARAMETERS:
            return None
        return published.link_gbit(self.step_s, self.datacenters, self.strategy, self.bits, self.utilisation)


@dataclass(frozen=True)
class Curve:
    """For a picture: utilisation at each rate in Gbit/s, and what is published of it."""

    strategy: str
    schedule: ScheduleName
    points: Sequence[tuple[float, float]]
    published: Sequence[tuple[float, float]] = ()


Named = tuple[str, ScheduleName, Schedule]


def row(
    job: ModelJob, strategy: str, name: ScheduleName, schedule: Schedule, share: float, rate_bits_per_s: float
) -> BandwidthRow:
    """Return the row for a schedule, a utilisation of ``share`` and the rate that goes with it."""
    gbit = rate_bits_per_s / BITS_PER_GBIT
    return BandwidthRow(
        strategy=strategy,
        bits=schedule.bits,
        parameters=int(job.parameters),
        step_s=job.step_s,
        datacenters=job.datacenters,
        utilisation=share,
        gbit_per_s=gbit,
        schedule=name,
    )


def schedules(strategy: str, changes: Mapping[str, Any] | None = None) -> dict[ScheduleName, Schedule]:
    """Return a strategy's schedules: ``table`` as in the published figures, ``training`` as in the preset of that name.

    ``changes`` are other values for fields of :class:`Schedule`; ``bits`` hold for both, the others for ``training``.

    Raises:
        SettingsError: no such strategy, a change that would make it another one, or a value out of range.
    """
    if strategy not in STRATEGIES:
        known = f"the strategies are {', '.join(STRATEGIES)}"
        raise SettingsError(f"strategy = {strategy!r}: no such strategy{nearest(strategy, STRATEGIES)}; {known}")
    changes = dict(changes or {})
    for name, value in changes.items():
        if name not in CHANGEABLE[strategy]:
            raise SettingsError(
                f"{name} = {value}: {strategy} has a fixed value, only {', '.join(CHANGEABLE[strategy])} may change"
            )
    settings = run_settings(strategy)
    training = Schedule(
        bits=(settings.codec.offer_bits + settings.codec.record_bits) // 2,
        steps=settings.round.steps,
        fragments=settings.fragments.count,
        overlap_steps=0 if settings.round.learners_wait else settings.round.overlap_steps,
    )
    table = _TABLE[strategy]
    return {"table": replace(table, bits=changes.get("bits", table.bits)), "training": replace(training, **changes)}


def cycle_bits(job: ModelJob, schedule: Schedule) -> float:
    """Return the bits that a datacenter sends in a cycle, and receives: of all values but its own share."""
    return job.parameters * schedule.bits * 2 * (1 - 1 / job.datacenters)


def utilisation(job: ModelJob, schedule: Schedule, rate_bits_per_s: float) -> float:
    """Return the share of its time that a learner computes, where a datacenter's link carries this much each way.

    Raises:
        SettingsError: the rate is not above 0, or there are more fragments than parameters.
    """
    _positive("rate_bits_per_s", rate_bits_per_s)
    if schedule.fragments > job.parameters:
        _refuse("fragments", schedule.fragments, f"at most parameters = {job.parameters}")
    took = cycle_bits(job, schedule) / (rate_bits_per_s * job.step_s * schedule.fragments)
    return 1 / _stretch(schedule, took)


def needed_bits_per_s(job: ModelJob, schedule: Schedule, wanted: float) -> float:
    """Return the least rate of a datacenter's link at which the utilisation is ``wanted``; 0 for a single datacenter.

    Bisected to the last digits. The published procedure stops as soon as it is within half a point of what is wanted.

    Raises:
        SettingsError: ``wanted`` is not between 0 and 1, or there are more fragments than parameters.
    """
    _share("utilisation", wanted)
    # a link that never rests carries low; at high all would come in time if nothing were overlapped
    low = cycle_bits(job, schedule) * wanted / (schedule.steps * job.step_s)
    high = low / (1 - wanted)
    while low < (middle := (low + high) / 2) < high:
        if utilisation(job, schedule, middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def least_settings(
    job: ModelJob, schedule: Schedule, rate_bits_per_s: float, wanted: float, bits: Sequence[int] = PRECISIONS
) -> list[Schedule]:
    """Return for each of ``bits`` the schedule with the smallest H, at least ``schedule.steps``, that keeps ``wanted``.

    The least disturbing first: the smallest H, and of an equal H the most bits, as the product gives way to a slow link. Bits
    for which no H will do are left out.

    Raises:
        SettingsError: as :func:`utilisation` and :func:`needed_bits_per_s`.
    """
    _share("wanted", wanted)
    found: list[Schedule] = []
    for each in bits:
        enough = _smallest_steps(job, replace(schedule, bits=each), rate_bits_per_s, wanted)
        if enough is not None:
            found.append(enough)
    return sorted(found, key=lambda one: (one.steps, -one.bits))


def _smallest_steps(job: ModelJob, schedule: Schedule, rate_bits_per_s: float, wanted: float) -> Schedule | None:
    def enough(steps: int) -> bool:
        return utilisation(job, replace(schedule, steps=steps), rate_bits_per_s) >= wanted

    if enough(schedule.steps):
        return schedule
    if not enough(MOST_STEPS):
        return None
    low, high = schedule.steps, MOST_STEPS  # where one H is enough, longer ones are too
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return replace(schedule, steps=high)


def curve(job: ModelJob, schedule: Schedule, rates_gbit: Iterable[float] = CURVE_GBIT) -> list[tuple[float, float]]:
    """``(gbit_per_s, utilisation)`` at each rate, for a picture."""
    return [(gbit, utilisation(job, schedule, gbit * BITS_PER_GBIT)) for gbit in rates_gbit]


def curves(job: ModelJob, named: Iterable[Named]) -> list[Curve]:
    """Return the curves of schedules, each with the published cells on it."""
    found = []
    for strategy, name, schedule in named:
        rows = (row(job, strategy, name, schedule, share, 1.0) for share in UTILISATIONS)
        known = [(each.published_gbit, each.utilisation) for each in rows if each.published_gbit is not None]
        found.append(Curve(strategy, name, curve(job, schedule), known))
    return found


def needed(job: ModelJob, named: Iterable[Named], utilisations: Iterable[float]) -> list[list[BandwidthRow]]:
    """Return for each of the schedules a row for each utilisation."""
    shares = list(utilisations)
    return [[row(job, *one, share, needed_bits_per_s(job, one[2], share)) for share in shares] for one in named]


def table(named: Sequence[Named], rates: Sequence[Sequence[BandwidthRow]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table of :func:`needed`'s rates: a row a schedule, a column a utilisation."""
    rows = [[*cells(one), *map(rate_text, each)] for one, each in zip(named, rates, strict=True)]
    return [*HEAD, *(percent(each.utilisation) for each in rates[0])], rows


def all_schedules() -> list[Named]:
    """Return the schedules of every strategy."""
    return [(strategy, name, schedule) for strategy in STRATEGIES for name, schedule in schedules(strategy).items()]


def cells(one: Named) -> list[str]:
    """Return a schedule's part of a table: strategy, schedule, bits, H, P, tau."""
    strategy, name, schedule = one
    return [strategy, name, str(schedule.bits), str(schedule.steps), str(schedule.fragments), f"{schedule.overlap_steps:g}"]


def of(job: ModelJob) -> str:
    """Describe a job, for a heading."""
    what = f"{job.parameters:g} parameters, {job.step_s:g} s a step, "
    return what + (f"{job.datacenters} datacenters" if job.datacenters > 1 else "one datacenter, which needs no link")


def rate_text(each: BandwidthRow) -> str:
    """Return a rate, and in brackets the published one, if there is one."""
    known = each.published_gbit
    return gbit_text(each.gbit_per_s) + ("" if known is None else f" ({known:g})")


def percent(share: float) -> str:
    """Three digits of it."""
    return f"{100 * share:.3g} %"


def gbit_text(value: float) -> str:
    """Three digits of a rate, or all that are before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _moments(schedule: Schedule) -> list[tuple[float, float]]:
    """Return when each fragment of a cycle is released and needed, in a learner's own steps since the cycle began."""
    if schedule.in_backward:
        return [(1 / 3 + 2 / 3 * (n + 1) / schedule.fragments, 1.0) for n in range(schedule.fragments)]
    slots = (first_slot(schedule.steps, n, schedule.fragments) for n in range(schedule.fragments))
    return [(step, step + schedule.overlap_steps) for step in slots]


def _stretch(schedule: Schedule, took: float) -> float:
    """Return how many times its own time a step takes in the long run; a fragment keeps the link busy for ``took`` steps.

    Two cycles, begun with an empty link, say it exactly. What waits at the link is all that one cycle leaves behind for the
    next, more of it never makes for less later, and there is least of it in the first cycle. So a fragment that finds the link
    idle in the second one did so in the first, and what lies between repeats for ever. If none does, none ever will, and the
    link, which never rests, sets the pace.
    """
    moments = [(c * schedule.steps + r, c * schedule.steps + n) for c in range(2) for r, n in _moments(schedule)]
    # what is released when something else is needed does not wait for that
    order = sorted((at, needed, i) for i, pair in enumerate(moments) for needed, at in enumerate(pair))
    free = waited = 0.0
    arrivals: dict[int, float] = {}
    idle_at: dict[int, float] = {}
    for own, needed, i in order:
        now = own + waited
        if needed:
            waited += max(0.0, arrivals[i] - now)
            continue
        if free <= now:
            idle_at[i] = now
            before = idle_at.get(i - schedule.fragments)
            if before is not None:
                return (now - before) / schedule.steps
        free = arrivals[i] = max(free, now) + took
    return took * schedule.fragments / schedule.steps
