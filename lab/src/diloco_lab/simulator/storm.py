"""A storm of failures over eight learners, for the picture of a timeline.

Twenty simulated minutes of 1.2m chips with the failures that such a cluster has anyway, and beside them a tape: racks of two
learners fail at once, one learner's steps take twice as long for a while, one is killed, one freezes, one is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.settings.presets import run_settings
from diloco_lab.published.pictures import PicturedFault
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import MICROS, ClusterLearner, RoundTerms
from diloco_lab.simulator.goodput import FleetConditions, strategy_of
from diloco_lab.simulator.lifetime import Stretch
from diloco_lab.simulator.outcome import MergedVersion, Outcome, Scenario
from diloco_lab.traces import tapes
from diloco_ops.failures import Failure, FailureTape

STRATEGY = "decoupled"
LEARNERS = 8
CHIPS = 1_200_000
DURATION_S = 1200.0  # long enough to see each failure and its end
RACK = 128  # slices that fail at once

_RACK_S, _RACK_LASTS_S = 180.0, 480.0


def tape() -> FailureTape:
    """Return the storm's failures."""
    racks = [
        Failure(_RACK_S, "chip_loss", f"{learner}/slice-{index}", _RACK_LASTS_S)
        for learner in ("learner-1", "learner-2")
        for index in range(RACK)
    ]
    others = [
        Failure(300.0, "slow", "learner-4", 360.0, {"factor": 2.0}),
        Failure(480.0, "kill", "learner-5"),
        Failure(660.0, "freeze", "learner-6", 90.0),
        Failure(840.0, "cut", "learner-7", 120.0),
    ]
    return FailureTape(DURATION_S, [*racks, *others])


@dataclass(frozen=True)
class Storm:
    """A simulated storm, for a picture."""

    learners: Sequence[ClusterLearner]
    stretches: dict[str, list[Stretch]]
    versions: list[MergedVersion]
    events: list[PicturedFault]
    outcome: Outcome


def simulate(conditions: FleetConditions, seed: int) -> Storm:
    """Play the storm.

    Raises:
        SettingsError: the cluster cannot be.
    """
    learners = conditions.of(strategy_of(STRATEGY), CHIPS, LEARNERS).split(seed)
    settings = run_settings(STRATEGY, {"learners": LEARNERS})
    played = tapes.played(tape(), learners)
    stretches: dict[str, list[Stretch]] = {learner.name: [] for learner in learners}
    versions: list[MergedVersion] = []
    scenario = Scenario(
        learners=learners,
        duration_s=DURATION_S,
        seed=seed,
        rounds=RoundTerms(settings, [1] * settings.fragments.count),
        faults=played.faults,
        cuts=played.cuts,
        on_stretch=lambda learner, stretch: stretches[learner.name].append(stretch),
        on_version=versions.append,
    )
    outcome = simulation.simulate(scenario)
    return Storm(learners, stretches, versions, _events(tape()), outcome)


def _events(tape: FailureTape) -> list[PicturedFault]:
    """Return the tape's failures in words: slices that fail together are one event."""
    together: dict[tuple[str, float, str], list[Failure]] = {}
    for failure in tape.failures:
        together.setdefault((failure.target.partition("/")[0], failure.at_s, failure.kind), []).append(failure)
    words = {
        "chip_loss": "{number} slices fail, for {minutes:g} min",
        "slow": "steps take {factor:g} times as long, for {minutes:g} min",
        "kill": "killed",
        "freeze": "frozen for {minutes:g} min",
        "cut": "cut off for {minutes:g} min, steps on",
    }
    return [
        PicturedFault(
            round(at_s * MICROS),
            learner,
            words[kind].format(number=len(met), minutes=met[0].duration_s / 60, factor=met[0].number("factor", 1.0)),
        )
        for (learner, at_s, kind), met in together.items()
    ]
