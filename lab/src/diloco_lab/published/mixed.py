"""Mixed hardware (arXiv 2604.21428, Table 5): goodput and cadence by the quorum, the window, and what rounds are counted by.

Eight learners that do not fail, of two kinds: the steps of four take 18 % longer, and the time of each step varies by 10 %. The
paper does not say how; here the 10 % are the standard deviation of a normal distribution. Rounds themselves take no time.

With K = 8 the paper speaks of learners that block, and elsewhere of learners that never wait: both are here, by name.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from diloco.settings.presets import run_settings
from diloco_lab.simulator import goodput, simulation
from diloco_lab.simulator.cluster import MICROS, Cluster, RoundTerms
from diloco_lab.simulator.outcome import Scenario

LEARNERS = 8
SLOWER = 1.18  # times the step of the faster half
STEP_SPREAD = 0.1
DURATION_S = 240.0  # ten cycles of H = 24 steps
TITLE = "mixed hardware, 8 learners that do not fail"
HEAD = ("way", "K", "window", "goodput, %", "a fragment's version every", "by learners", "merged, %")


@dataclass(frozen=True)
class RoundMode:
    """A way to hold rounds: settings over those of the preset ``published``, and what is published of it.

    ``by_reports``: as Algorithm 2 counts (:mod:`diloco_lab.simulator.reports`); otherwise in the product's slots.
    """

    name: str
    settings: Mapping[str, Any]
    by_reports: bool = False
    published_goodput: float | None = None

    def rounds(self) -> RoundTerms:
        """Return the rounds."""
        settings = run_settings("published", {"learners": LEARNERS, **self.settings})
        return RoundTerms(settings, [1] * settings.fragments.count, by_reports=self.by_reports)


_NO_WINDOW = {"round.grace_factor": 0.0}
_ALL = {"round.quorum": "all", **_NO_WINDOW}
WAYS = (
    RoundMode("learners wait for all", _ALL | {"round.learners_wait": True}, published_goodput=0.84),
    RoundMode("rounds wait for all, learners do not", _ALL),
    RoundMode("one, in slots", _NO_WINDOW),
    RoundMode("one, in slots", {}),
    RoundMode("one, by reports", _NO_WINDOW, by_reports=True, published_goodput=1.0),
    RoundMode("one, by reports", {}, by_reports=True, published_goodput=1.0),
)


@dataclass(frozen=True)
class MixedOutcome:
    """One simulation: goodput, seconds between two versions of a fragment, learners a version, and what was merged.

    ``merged`` is a share of the tokens that were merged or lost. Learners hold the others when the simulation ends.
    """

    goodput: float
    every_s: float
    members: float
    merged: float


def play(way: RoundMode, seed: int, duration_s: float = DURATION_S) -> MixedOutcome:
    """Simulate one seed."""
    cluster = Cluster(
        chips=LEARNERS,
        learners=LEARNERS,
        chips_per_slice=1,
        step_s=1.0,
        between_s=math.inf,
        speeds=(1.0,) * (LEARNERS // 2) + (1 / SLOWER,) * (LEARNERS // 2),
        step_spread=STEP_SPREAD,
    )
    rounds = way.rounds()
    outcome = simulation.simulate(Scenario(cluster.split(seed), duration_s, seed, rounds))
    every_s = outcome.duration_us / MICROS * len(rounds.sizes) / outcome.versions
    merged, lost = outcome.merged_tokens, sum(learner.lost_tokens for learner in outcome.learners)
    return MixedOutcome(outcome.goodput, every_s, outcome.members / outcome.versions, merged / (merged + lost))


Found = tuple[RoundMode, list[MixedOutcome]]  # a way, and what was played of it, by seed


def sweep(seeds: Sequence[int], jobs: int) -> list[Found]:
    """Simulate all ways with all seeds, ``jobs`` at once."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [(way, [pool.submit(play, way, seed) for seed in seeds]) for way in WAYS]
        return [(way, [each.result() for each in of_seeds]) for way, of_seeds in running]


def table(found: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table, with what is published in brackets."""
    return list(HEAD), [_cells(way, played) for way, played in found]


def _cells(way: RoundMode, played: Sequence[MixedOutcome]) -> list[str]:
    share, low, _ = goodput.interval([each.goodput for each in played])
    round_, known = way.rounds().settings.round, way.published_goodput
    width = f" ±{100 * (share - low):.1f}" if low < share else ""
    every_s, members, merged = (
        sum(getattr(each, name) for each in played) / len(played) for name in ("every_s", "members", "merged")
    )
    return [
        way.name,
        str(LEARNERS if round_.quorum == "all" else round_.quorum),
        "on" if round_.grace_factor else "off",
        f"{100 * share:.1f}{width}" + ("" if known is None else f" ({100 * known:.0f})"),
        f"{every_s:.1f} s",
        f"{members:.2f}",
        f"{100 * merged:.1f}",
    ]
