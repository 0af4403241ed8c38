"""The ways of training that experiments compare, each as one call that trains to the end of the budget."""

from __future__ import annotations

import math
import time

import msgspec

from diloco.settings.run import RunSettings
from diloco_lab.experiment.spec import Arm, PostTraining
from diloco_lab.loss_history import LossPoint
from diloco_lab.one_model import OneModel
from diloco_lab.paces.spec import PaceSpec
from diloco_lab.trial import Trial
from diloco_learner.api.model import Vector
from diloco_learner.task import Task, load_task


class Measured(msgspec.Struct, frozen=True):
    """One trial's result.

    ``loss``: of the final model on the task's validation batches, or on those of its post-training; NaN is stored as null.
    ``virtual_s``: the run's time; ``wall_s``: this machine's. ``goodput``: share of the learners' time in which they trained.
    ``history``: losses along the way, if the arm asks for them. All others are null where nothing is merged: ``members``,
    learners a version, on average; ``bytes_up``, sent by a learner, on average; ``merged``, ``lost``, ``held``, shares of the
    processed tokens; and ``shares``, by learner, of the versions.
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
    measured, model = (_decoupled if arm.method == "decoupled" else _one_model)(arm, settings, data)
    if arm.post_training is None:
        return measured
    began_s = time.perf_counter()
    loss = _finite(_post_trained(model, arm.post_training, settings))
    return msgspec.structs.replace(measured, loss=loss, wall_s=measured.wall_s + time.perf_counter() - began_s)


def _decoupled(arm: Arm, settings: RunSettings, data: str | None) -> tuple[Measured, list[Vector]]:
    """Train with the services. Return the result and the global model."""
    changes = [(change.after, change.settings) for change in arm.changes]
    paces = arm.pace.paces(settings.learners, settings.seed)
    result = Trial(settings, load_task(settings.task, data), paces, changes, arm.sample_s).play()
    measured = Measured(
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
    return measured, result.model


def _one_model(arm: Arm, settings: RunSettings, data: str | None) -> tuple[Measured, list[Vector]]:
    """Train one model, on the data of all learners or of one. Return its result and the model."""
    began_s = time.perf_counter()
    shares = range(settings.learners) if arm.method == "data-parallel" else [0]
    paces = arm.pace.paces(settings.learners, settings.seed)
    found = OneModel(settings, load_task(settings.task, data), shares, paces, arm.sample_s).train()
    measured = Measured(
        loss=_finite(found.loss),
        tokens=found.tokens,
        wall_s=time.perf_counter() - began_s,
        virtual_s=found.virtual_s,
        goodput=found.goodput,
        history=found.history or None,
    )
    return measured, found.model


def _post_trained(model: list[Vector], training: PostTraining, settings: RunSettings) -> float:
    """Train a model, given by fragment, as one on the batch of all learners. Return its loss on the text of this training."""
    settings = training.settings_over(settings, "post_training")
    task = load_task(settings.task, str(training.folder()))
    paces = PaceSpec().paces(settings.learners)
    return OneModel(settings, task, range(settings.learners), paces, model=model).train().loss


def steps_of_each(settings: RunSettings, task: Task) -> int:
    """Return the inner steps of each learner until the token budget is used up."""
    return -(-settings.tokens // (settings.learners * task.tokens_per_batch))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
