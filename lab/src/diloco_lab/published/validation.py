"""The simulator against a real run: what was seen of one, the same in the simulator, and both side by side.

What a simulation needs to know of the machine is measured while nothing has failed yet (:func:`calibrate`): the pace and the
phase of each learner's steps, how long an answer and a commit take, and how well bodies compress. All that follows is
predicted: nothing that is seen after the tape began goes into the simulation.

Pure: an observer notes what it sees with the time of its own clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from diloco.core.tensors.quantise import body_bytes
from diloco.errors import DataError
from diloco.nats.opening import RETRY_S
from diloco.settings.run import RunSettings
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import ClusterLearner, RoundTerms
from diloco_lab.simulator.outcome import Outcome, Scenario
from diloco_lab.traces import tapes
from diloco_ops.chaos.breaking import CUT_AGAIN_S
from diloco_ops.failures import Failure, FailureTape


@dataclass(frozen=True)
class SeenOffer:
    """An offer that was stored. ``bytes`` is all of it, ``body_bytes`` its body's part of that."""

    at_s: float
    fragment: int
    bytes: int
    body_bytes: int


@dataclass(frozen=True)
class SeenVersion:
    """A version that was committed: the tokens of each of its members, and how long its syncer says that its round took."""

    at_s: float
    fragment: int
    version: int
    tokens: Sequence[int]
    bytes: int
    round_s: float


@dataclass
class RunObservations:
    """Observations of a run, in the order of time. ``sizes``: parameters of each fragment.

    ``steps``: by learner, when which step was first said to be done. ``announced``: when a fragment's version was first.
    """

    settings: RunSettings
    sizes: Sequence[int]
    tokens_per_step: int
    steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    announced: dict[tuple[int, int], float] = field(default_factory=dict)
    offers: list[SeenOffer] = field(default_factory=list)
    versions: list[SeenVersion] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """The simulation's parameters of the machine. The first learner began ``lead_in_s`` before the tape."""

    learners: Sequence[ClusterLearner]
    rounds: RoundTerms
    lead_in_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all learners, undisturbed."""
        return sum(learner.tokens / learner.step_s for learner in self.learners)


@dataclass(frozen=True)
class ValidationRow:
    """A quantity of both; ``difference`` is the simulated one's from the live one, relative to that."""

    quantity: str
    live: float
    simulated: float

    @property
    def difference(self) -> float:
        return self.simulated / self.live - 1 if self.live else float("inf")


def calibrate(seen: RunObservations, begin_s: float, end_s: float) -> Calibration:
    """Measure a machine between two times without failures; the later one is the tape's beginning.

    Raises:
        DataError: too little happened in between.
    """
    paces = {name: _pace(name, steps, begin_s, end_s) for name, steps in sorted(seen.steps.items())}
    origin_s = min(first_s for _, first_s in paces.values())
    learners = [
        ClusterLearner(name, 1, 1, step_s, seen.tokens_per_step, present=((first_s - origin_s, math.inf),))
        for name, (step_s, first_s) in paces.items()
    ]
    # a round that all learners answer takes as long as the slowest answer
    full_rounds = [
        (version, seen.announced[version.fragment, version.version])
        for version in seen.versions
        if begin_s <= seen.announced.get((version.fragment, version.version), end_s)
        and version.at_s < end_s
        and len(version.tokens) == len(learners)
    ]
    if not full_rounds:
        raise DataError(f"no round that all {len(learners)} learners answered seen in {end_s - begin_s:g} s, expected some")
    sent = [offer for offer in seen.offers if begin_s <= offer.at_s < end_s]
    plain = sum(body_bytes(seen.sizes[offer.fragment], seen.settings.codec.offer_bits) for offer in sent)
    rounds = RoundTerms(
        seen.settings,
        seen.sizes,
        answer_s=median(version.round_s for version, _ in full_rounds),
        commit_s=max(0.0, median(version.at_s - announced_s - version.round_s for version, announced_s in full_rounds)),
        compression=sum(offer.body_bytes for offer in sent) / plain,
    )
    return Calibration(learners, rounds, end_s - origin_s)


def simulated(calibration: Calibration, tape: FailureTape) -> dict[str, float]:
    """Simulate a tape after an undisturbed lead-in, and count while it is played."""
    lead_in_s = calibration.lead_in_s
    failures = [replace(f, at_s=f.at_s + lead_in_s) for failure in tape.failures for f in _as_chaos_does(failure)]
    late = FailureTape(tape.duration_s + lead_in_s, failures)
    played = tapes.played(late, calibration.learners)
    scenario = Scenario(
        learners=calibration.learners,
        duration_s=lead_in_s,
        seed=0,
        rounds=calibration.rounds,
        faults=played.faults,
        cuts=played.cuts,
    )
    before, after = simulation.simulate(scenario), simulation.simulate(replace(scenario, duration_s=late.duration_s))
    counts = {
        f"steps of {learner.name}": float(learner.steps - earlier.steps)
        for learner, earlier in zip(after.learners, before.learners, strict=True)
    }
    return counts | _quantities(
        calibration, tape.duration_s, {name: count - _counts(before)[name] for name, count in _counts(after).items()}
    )


def live(seen: RunObservations, calibration: Calibration, begin_s: float, end_s: float) -> dict[str, float]:
    """Count the observations between two times."""
    offers = [offer for offer in seen.offers if begin_s <= offer.at_s < end_s]
    versions = [version for version in seen.versions if begin_s <= version.at_s < end_s]
    steps = {name: _done(seen.steps[name], end_s) - _done(seen.steps[name], begin_s) for name in sorted(seen.steps)}
    counts = {
        "tokens": float(sum(steps.values()) * seen.tokens_per_step),
        "merged": sum(sum(v.tokens) * seen.sizes[v.fragment] for v in versions) / sum(seen.sizes),
        "versions": float(len(versions)),
        "members": float(sum(len(version.tokens) for version in versions)),
        "up": float(sum(offer.bytes for offer in offers)),
        "down": float(sum(version.bytes for version in versions) * len(steps)),
    }
    of_learners = {f"steps of {name}": float(count) for name, count in steps.items()}
    return of_learners | _quantities(calibration, end_s - begin_s, counts)


def drift(seen: RunObservations, begin_s: float, middle_s: float, end_s: float) -> dict[str, float]:
    """Return by how much each learner's usual step is longer after a time than before it: the machine's own drift.

    The usual one is the median, on which failures that touch a smaller part of the steps have no influence.
    """
    return {
        name: _usual_s(steps, middle_s, end_s) / _usual_s(steps, begin_s, middle_s) - 1
        for name, steps in sorted(seen.steps.items())
    }


def _usual_s(steps: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    times = [at_s for at_s, _ in steps if begin_s <= at_s < end_s]
    return median(after_s - before_s for before_s, after_s in pairwise(times))


def compared(live: Mapping[str, float], simulated: Mapping[str, float]) -> list[ValidationRow]:
    """Both side by side."""
    return [ValidationRow(name, value, simulated[name]) for name, value in live.items()]


def _pace(name: str, steps: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> tuple[float, float]:
    """Return how long a learner's step takes, and when its first one began if all took as long."""
    inside = [(at_s, step) for at_s, step in steps if begin_s <= at_s < end_s]
    if len(inside) < 2:
        raise DataError(f"{name}: {len(inside)} steps seen in {end_s - begin_s:g} s, expected some")
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    step_s = (last_s - first_s) / (last - first)
    return step_s, last_s - last * step_s


def _as_chaos_does(failure: Failure) -> list[Failure]:
    """Return a failure as ``diloco chaos`` makes it: a cut closes connections again and again; clients soon reconnect."""
    if failure.kind != tapes.CUT:
        return [failure]
    every_s = math.ceil(RETRY_S / CUT_AGAIN_S) * CUT_AGAIN_S  # it comes back, and is closed the next time
    times = math.floor(failure.duration_s / every_s) + 1
    return [replace(failure, at_s=failure.at_s + index * every_s, duration_s=RETRY_S) for index in range(times)]


def _done(steps: Sequence[tuple[float, int]], at_s: float) -> int:
    """Return the steps done by a time."""
    index = bisect.bisect_right(steps, (at_s, 1 << 62))
    return steps[index - 1][1] if index else 0


def _counts(outcome: Outcome) -> dict[str, float]:
    return {
        "tokens": float(outcome.tokens),
        "merged": outcome.merged_tokens,
        "versions": float(outcome.versions),
        "members": float(outcome.members),
        "up": float(sum(learner.bytes_up for learner in outcome.learners)),
        "down": float(sum(learner.bytes_down for learner in outcome.learners)),
    }


def _quantities(calibration: Calibration, duration_s: float, counts: Mapping[str, float]) -> dict[str, float]:
    return {
        "tokens processed": counts["tokens"],
        "goodput": counts["tokens"] / (calibration.tokens_per_s * duration_s),
        "versions": counts["versions"],
        "offers in a version": counts["members"] / counts["versions"],
        "tokens merged": counts["merged"],
        "bytes of offers": counts["up"],
        "bytes of versions to learners": counts["down"],
    }
