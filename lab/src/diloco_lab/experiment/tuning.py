"""The search for an arm's best settings, before it is judged: over seeds that judge no arm.

A search tries all combinations of an arm's values, or one setting after another (``in_turn``). The second needs three plus two
plus two trials for three settings of three values instead of 27, and misses a best combination that no single change leads to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Arm, Experiment

FIRST_SEED = 1000  # of the search: a choice that was made by the seeds that judge it would flatter it


class Tried(msgspec.Struct, frozen=True):
    """One combination of an arm's values, and its losses by seed; None: it diverged or failed."""

    arm: str
    values: dict[str, float]
    losses: list[float | None]

    @property
    def mean(self) -> float:
        """The mean loss; infinite where one of its trials has none."""
        known = [loss for loss in self.losses if loss is not None]
        return float(np.mean(known)) if len(known) == len(self.losses) else math.inf


class TunedArm(msgspec.Struct, frozen=True):
    """An arm's best combination; ``edges`` names its settings whose best value is the first or last that was tried."""

    arm: str
    values: dict[str, float]
    loss: float
    trials: int
    edges: list[str]

    def sentence(self) -> str:
        """Return it in words."""
        return f"{self.arm}: {self.found()}"

    def found(self) -> str:
        """Return it in words, without the arm's name."""
        said = f"{wording(self.values)} is the best of {self.trials} trials"
        return f"{said}, but not bracketed: try further values of {', '.join(self.edges)}" if self.edges else said


def wording(values: Mapping[str, Any]) -> str:
    """Return settings in words; numbers with a fraction are shortened."""
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())


def search(experiment: Experiment, found: Sequence[Tried] = ()) -> Experiment | None:
    """Return the experiment that plays the combinations to try next, each as an arm; None: nothing is left to try.

    ``found``: the combinations that were tried before, which decide what a search in turn tries next.
    """
    arms = {
        f"{name}: {wording(values)}": arm.model_copy(update={"settings": arm.settings | values, "tuned": {}, "in_turn": False})
        for name, arm in experiment.arms.items()
        if arm.tuned
        for values in untried(arm, [one for one in found if one.arm == name])
    }
    if not arms:
        return None
    changed = {"arms": arms, "bars": [], "claims": [], "seeds": experiment.tuning_seeds, "first_seed": FIRST_SEED}
    return experiment.model_copy(update=changed)


def untried(arm: Arm, found: Sequence[Tried]) -> list[dict[str, float]]:
    """Return the combinations that an arm's search tries next, given those that it has tried."""
    known = [one.values for one in found]
    if not arm.in_turn:
        return [values for values in arm.combinations() if values not in known]
    best = arm.start()
    for name, tries in arm.tuned.items():
        around = [best | {name: value} for value in tries]
        missing = [values for values in around if values not in known]
        if missing:
            return missing
        best = min((one for one in found if one.values in around), key=lambda one: one.mean).values
    return []


def trials_of(experiment: Experiment) -> int:
    """Return the number of trials of the whole search."""
    return sum(len(arm.combinations()) for arm in experiment.arms.values() if arm.tuned) * experiment.tuning_seeds


def tried(experiment: Experiment, results: Results, found: Sequence[Tried] = ()) -> list[Tried]:
    """Return the combinations that :func:`search` names after ``found``, with the losses that their trials had."""
    seeds = range(FIRST_SEED, FIRST_SEED + experiment.tuning_seeds)

    def loss(arm: str, seed: int) -> float | None:
        measured = results.measured.get((arm, seed))
        return None if measured is None else measured.loss

    return [
        Tried(name, values, [loss(f"{name}: {wording(values)}", seed) for seed in seeds])
        for name, arm in experiment.arms.items()
        if arm.tuned
        for values in untried(arm, [one for one in found if one.arm == name])
    ]


def choose(experiment: Experiment, found: list[Tried]) -> list[TunedArm]:
    """Return the best combination of each tuned arm; of equal ones the first."""
    chosen: list[TunedArm] = []
    for name, arm in experiment.arms.items():
        if not arm.tuned:
            continue
        own = [one for one in found if one.arm == name]
        best = min(own, key=lambda one: one.mean)
        edges = [setting for setting, values in arm.tuned.items() if best.values[setting] in (values[0], values[-1])]
        chosen.append(TunedArm(name, best.values, best.mean, sum(len(one.losses) for one in own), edges))
    return chosen


def settled(experiment: Experiment, choices: list[TunedArm]) -> Experiment:
    """Return the experiment with the chosen values as its arms' settings."""
    arms = dict(experiment.arms)
    for choice in choices:
        arm = arms[choice.arm]
        arms[choice.arm] = arm.model_copy(update={"settings": arm.settings | choice.values, "tuned": {}, "in_turn": False})
    return experiment.model_copy(update={"arms": arms})
