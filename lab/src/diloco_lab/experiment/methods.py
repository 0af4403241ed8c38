"""The ways of training that experiments compare, each as one call that trains to the end of the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.errors import SettingsError
from diloco.settings.run import OuterSettings, RunSettings
from diloco_lab.experiment.spec import Arm
from diloco_lab.trial import Trial
from diloco_learner.jax.island import Island
from diloco_learner.task import Task, load_task


class Measured(msgspec.Struct, frozen=True):
    """One trial's result.

    ``loss``: of the final model on the task's validation batches; NaN is stored as null. ``virtual_s``: the run's time;
    ``wall_s``: this machine's. All others are null where nothing is merged: ``members``, learners a version, on average;
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


def play(arm: Arm, settings: RunSettings, data: str | None = None) -> Measured:
    """Train as an arm says.

    Raises:
        SettingsError, DataError: the task or its data cannot be had.
        RunError: the run did not come to its end.
    """
    task = load_task(settings.task, data)
    if arm.method == "decoupled":
        changes = [(change.after, change.settings) for change in arm.changes]
        result = Trial(settings, task, arm.pace.paces(settings.learners), changes).play()
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
        )
    began_s = time.perf_counter()
    shares = range(settings.learners) if arm.method == "data-parallel" else [0]
    island = one_model(settings, task, shares)
    tokens = len(shares) * steps_of_each(settings, task) * task.tokens_per_batch
    return Measured(_finite(island.evaluate()), tokens, time.perf_counter() - began_s)


def one_model(settings: RunSettings, task: Task, shares: Sequence[int]) -> Island:
    """Train one model, each step on the batches that these shares give together; the rate follows the run's tokens.

    With all shares this is data-parallel training with the run's global batch, and with one share a learner left alone.

    Raises:
        SettingsError: several shares of a task whose batches are not one array each.
    """
    settings = settings.model_copy(update={"outer": OuterSettings()})  # the model takes its optimizer's steps itself
    island = Island(task, settings)
    streams = [task.batches(share, settings.learners, settings.seed, 0) for share in shares]
    tokens = settings.learners * task.tokens_per_batch
    for step in range(steps_of_each(settings, task)):
        batches = [next(stream) for stream in streams]
        if len(batches) > 1 and not all(isinstance(batch, np.ndarray) for batch in batches):
            raise SettingsError(f"task.name = {settings.task.name!r}: only batches that are arrays can be concatenated")
        batch = batches[0] if len(batches) == 1 else np.concatenate(batches)
        island.step(batch, learning_rate(settings, Moment(step * tokens, settings.tokens)), (shares[0], step)).wait()
    return island


def steps_of_each(settings: RunSettings, task: Task) -> int:
    """Return the inner steps of each learner until the token budget is used up."""
    return -(-settings.tokens // (settings.learners * task.tokens_per_batch))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
