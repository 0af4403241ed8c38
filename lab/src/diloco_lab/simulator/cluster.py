"""A simulated cluster: learners made of slices of chips, their interruptions, the costs of these, and the links.

Simulated time is counted in whole microseconds (``_us``), and chip-time in chips times microseconds, so that sums are exact.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist

from diloco.errors import SettingsError
from diloco.settings.run import BY_LAYERS, RunSettings
from diloco_lab.simulator.repair import RepairTime

MICROS = 1_000_000
NEVER_US = 1 << 62
YEAR_S = 365.25 * 86400  # a Julian year
MAX_LEARNERS = 4096
MAX_SLICES = 1 << 24
MAX_DURATION_S = 10 * YEAR_S  # longer than any run, and far below the largest whole number of microseconds


def micros(seconds: float) -> int:
    """Seconds as whole microseconds; never, if infinite."""
    return NEVER_US if seconds == math.inf else round(seconds * MICROS)


def _check(where: str, name: str, value: float, low: float, high: float, what: str, *, above: bool = False) -> None:
    fits = (low < value if above else low <= value) and value <= high
    if isinstance(value, bool) or not fits:  # a NaN fits nowhere
        raise SettingsError(f"{where}{name} = {value!r}, expected {what}")


@dataclass(frozen=True)
class Costs:
    """The costs of a change of a learner's slices. :mod:`diloco_lab.published.published` has fitted times: none is published.

    An elastic learner goes on without the slices that failed, after ``downscale_s``. Slices that are back join at the
    learner's next reconfiguration, or at one of their own of ``upscale_s`` once the first has waited ``gather_s``. Whatever
    fails or comes back during a reconfiguration is in it. A learner that is not elastic begins again, on spare slices, after
    ``restart_s``, from its last checkpoint: the steps since then are taken once more.
    """

    elastic: bool = True
    downscale_s: float = 20.0
    upscale_s: float = 20.0
    gather_s: float = 0.0
    restart_s: float = 80.0
    checkpoint_s: float = 0.0  # between two checkpoints; 0: after every step

    def __post_init__(self) -> None:
        for name in ("downscale_s", "upscale_s", "gather_s", "restart_s", "checkpoint_s"):
            _check("costs.", name, getattr(self, name), 0.0, YEAR_S, "seconds, 0 or more")


@dataclass(frozen=True)
class Slowdowns:
    """A learner's steps take ``factor`` times as long for a while, every now and then; both times are exponential means."""

    between_s: float
    lasting_s: float
    factor: float

    def __post_init__(self) -> None:
        _check("slowdowns.", "between_s", self.between_s, 0.0, math.inf, "seconds, above 0", above=True)
        _check("slowdowns.", "lasting_s", self.lasting_s, 0.0, YEAR_S, "seconds, above 0", above=True)
        _check("slowdowns.", "factor", self.factor, 1.0, 1e6, "1 or more")


@dataclass(frozen=True)
class LearnerLink:
    """A learner's way to the syncers and back: each direction sends its queue at ``bits_per_s`` and takes ``delay_s``."""

    bits_per_s: float = math.inf
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        _check("link.", "bits_per_s", self.bits_per_s, 0.0, math.inf, "bits a second, above 0", above=True)
        _check("link.", "delay_s", self.delay_s, 0.0, 3600.0, "seconds, 0 or more")

    def sending_us(self, size_bytes: int) -> int:
        """Return how long so many bytes occupy a direction."""
        return round(size_bytes * 8 / self.bits_per_s * MICROS)


@dataclass(frozen=True)
class ClusterLearner:
    """One learner: ``slices`` of ``chips`` each, which take a step together in ``step_s``.

    ``tokens`` are those of a slice's part of a step. ``present`` are the stretches of time in which it takes part, in order;
    empty: always (a *scavenged* learner comes and goes).
    """

    name: str
    slices: int
    chips: int
    step_s: float
    tokens: int = 1
    between_s: float = math.inf  # mean time between interruptions of a chip
    repair: RepairTime = field(default_factory=lambda: RepairTime(1.0, 1.0, 1.0))
    costs: Costs = field(default_factory=Costs)
    slowdowns: Slowdowns | None = None
    link: LearnerLink = field(default_factory=LearnerLink)
    present: tuple[tuple[float, float], ...] = ()
    step_spread: float = 0.0  # standard deviation of a step's time, relative: each step is drawn

    def __post_init__(self) -> None:
        where = f"learner {self.name}: "
        _check(where, "step_spread", self.step_spread, 0.0, 1.0, "a share from 0 to 1")
        for name, most in (("slices", MAX_SLICES), ("chips", MAX_SLICES), ("tokens", 1 << 50)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise SettingsError(f"{where}{name} = {value!r}, expected a whole number from 1 to {most}")
        _check(where, "step_s", self.step_s, 1e-3, 1e6, "seconds, from 0.001 on")
        _check(where, "between_s", self.between_s, 0.0, math.inf, "seconds, above 0", above=True)
        times = [time for stretch in self.present for time in stretch]
        if not all(0 <= a < b for a, b in pairwise(times)):
            raise SettingsError(f"{where}present = {list(self.present)}, expected stretches [from, until] in order, in seconds")


@dataclass(frozen=True)
class Cluster:
    """Chips of one kind, evenly split over learners; what makes no whole slice for each learner is left out."""

    chips: int
    learners: int = 1
    chips_per_slice: int = 256
    step_s: float = 1.0
    between_s: float = YEAR_S
    repair: RepairTime = field(default_factory=lambda: RepairTime(1.0, 1.0, 1200.0))
    costs: Costs = field(default_factory=Costs)
    slowdowns: Slowdowns | None = None
    link: LearnerLink = field(default_factory=LearnerLink)
    tokens_per_chip: int = 1  # of a step
    speed_spread: float = 0.0  # standard deviation of a chip's step time, relative; the slowest chip sets a learner's pace
    speeds: tuple[float, ...] = ()  # by learner, its speed relative to step_s; empty: all 1
    step_spread: float = 0.0  # of a learner's steps, as Learner has it

    def __post_init__(self) -> None:
        for name in ("chips", "learners", "chips_per_slice", "tokens_per_chip"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingsError(f"{name} = {value!r}, expected a whole number, 1 or more")
        if self.learners > MAX_LEARNERS:
            raise SettingsError(f"learners = {self.learners}, expected at most {MAX_LEARNERS}")
        if self.chips_per_slice > self.chips:
            raise SettingsError(f"chips_per_slice = {self.chips_per_slice} is more than all chips = {self.chips}")
        if self.learners > self.chips // self.chips_per_slice:
            raise SettingsError(
                f"learners = {self.learners} is more than the slices: {self.chips} chips are "
                f"{self.chips // self.chips_per_slice} slices of {self.chips_per_slice}, and each learner needs one"
            )
        _check("", "speed_spread", self.speed_spread, 0.0, 1.0, "a share from 0 to 1")
        if self.speeds and len(self.speeds) != self.learners:
            raise SettingsError(
                f"speeds = {list(self.speeds)}: {len(self.speeds)} of them, expected one for each of {self.learners}"
            )
        for index, speed in enumerate(self.speeds):
            _check("", f"speeds[{index}]", speed, 0.0, 1e6, "a number above 0", above=True)

    @property
    def slices(self) -> int:
        """Of one learner."""
        return self.chips // self.learners // self.chips_per_slice

    def split(self, seed: int) -> tuple[ClusterLearner, ...]:
        """Return the learners. The seed draws how slow each one's slowest chip is."""
        chance = random.Random(f"{seed}/speeds")
        learner = ClusterLearner(
            name="learner-0",
            slices=self.slices,
            chips=self.chips_per_slice,
            step_s=self.step_s,
            tokens=self.tokens_per_chip * self.chips_per_slice,
            between_s=self.between_s,
            repair=self.repair,
            costs=self.costs,
            slowdowns=self.slowdowns,
            link=self.link,
            step_spread=self.step_spread,
        )
        speeds = self.speeds or (1.0,) * self.learners
        paces = [self._slowest(chance) / speed for speed in speeds]
        return tuple(replace(learner, name=f"learner-{index}", step_s=self.step_s * pace) for index, pace in enumerate(paces))

    def _slowest(self, chance: random.Random) -> float:
        """Draw the largest of as many normal numbers as a learner has chips, from its distribution."""
        if not self.speed_spread:
            return 1.0
        share = chance.random() ** (1.0 / (self.slices * self.chips_per_slice))
        return 1.0 + self.speed_spread * max(0.0, NormalDist().inv_cdf(min(share, 1.0 - 1e-16)))


@dataclass(frozen=True)
class RoundTerms:
    """The run's settings, and how many parameters each fragment has.

    ``answer_s`` passes between an announcement's arrival and an offer that is ready to be sent, ``commit_s`` between the end of
    a round and a version that is ready to be sent. ``compression`` is a body's size on the wire relative to what its bits say.
    ``by_reports``: rounds are counted as Algorithm 2 of the paper counts them (:mod:`diloco_lab.simulator.reports`).
    """

    settings: RunSettings
    sizes: Sequence[int]
    answer_s: float = 0.0
    commit_s: float = 0.0
    compression: float = 1.0
    by_reports: bool = False

    @property
    def learners_may_wait(self) -> bool:
        """Whether a learner may have to wait for a version."""
        return self.settings.round.learners_wait or self.settings.apply.at == "overlap"

    def __post_init__(self) -> None:
        if self.by_reports and self.learners_may_wait:
            raise SettingsError(
                "rounds by reports, with round.learners_wait or apply.at = overlap: in Algorithm 2 no learner waits; set "
                "round.learners_wait = false and apply.at = arrival, or by_reports = False"
            )
        _check("", "answer_s", self.answer_s, 0.0, 3600.0, "seconds, 0 or more")
        _check("", "commit_s", self.commit_s, 0.0, 3600.0, "seconds, 0 or more")
        _check("", "compression", self.compression, 0.0, 100.0, "a factor above 0", above=True)
        cut, fewer = self.settings.fragments, self.settings.fragments.strategy in BY_LAYERS
        if len(self.sizes) > cut.count or (len(self.sizes) < cut.count and not fewer):
            raise SettingsError(
                f"fragments: {len(self.sizes)} sizes, and fragments.count = {cut.count}; expected {'at most ' * fewer}as many"
            )
