"""The ways of training that experiments compare, each as one call that trains to the end of the budget."""

from __future__ import annotations

import math
import time

import msgspec

from diloco.settings.run import RunSettings
from diloco_lab.experiment.spec import Arm
from diloco_lab.loss_history import LossPoint
from diloco_lab.one_model import OneModel
from diloco_lab.trial import Trial
from diloco_learner.task import Task, load_task


class Measured(msgspec.Struct, frozen=True):
    """One trial's result.

    ``loss``: of the final model on the task's validation batches; NaN is stored as null. ``virtual_s``: the run's time;
    ``wall_s``: this machine's. ``goodput``: share of the learners' time in which they trained. ``history``: losses along the
    way, if the arm asks for them. All others are null where nothing is merged: ``members``, learners a version, on average;
    ``bytes_up``, sent by a learner, on average; ``merged``, ``lost``, ``held``, shares of the processed tokens; and
    ``shares``, by learner, of the versions.
    """

    loss: float | None
    tokens: int
    wall_s: float
    members: float | None = None
    merged: float | None = None
    bytes_up: float | None = None
    virtual_s: float | None = None
    lost: float | None = None
    held: float | None = None
    shares: list[float] | None = None
    goodput: float | None = None
    history: list[LossPoint] | None = None


def play(arm: Arm, settings: RunSettings, data: str | None = None) -> Measured:
    """Train as an arm says.

    Raises:
        SettingsError, DataError: the task or its data cannot be had.
        RunError: the run did not come to its end.
    """
    task = load_task(settings.task, data)
    if arm.method == "decoupled":
        changes = [(change.after, change.settings) for change in arm.changes]
        result = Trial(settings, task, arm.pace.paces(settings.learners, settings.seed), changes, arm.sample_s).play()
        return Measured(
            loss=_finite(result.loss),
            tokens=result.tokens,
            wall_s=result.wall_s,
            members=result.members,
            merged=result.merged,
            bytes_up=result.bytes_up,
            virtual_s=result.virtual_s,
            lost=result.lost,
            held=result.held,
            shares=result.shares,
            goodput=result.goodput,
            history=result.history or None,
        )
    began_s = time.perf_counter()
    shares = range(settings.learners) if arm.method == "data-parallel" else [0]
    found = OneModel(settings, task, shares, arm.pace.paces(settings.learners, settings.seed), arm.sample_s).train()
    return Measured(
        loss=_finite(found.loss),
        tokens=found.tokens,
        wall_s=time.perf_counter() - began_s,
        virtual_s=found.virtual_s,
        goodput=found.goodput,
        history=found.history or None,
    )


def steps_of_each(settings: RunSettings, task: Task) -> int:
    """Return the inner steps of each learner until the token budget is used up."""
    return -(-settings.tokens // (settings.learners * task.tokens_per_batch))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
