"""Data-parallel training in virtual time: one model, each step on the batches that all learners which are there give together.

The learners' paces are those of a trial. A step takes as long as the slowest learner's, a stall of one stops all, and who is
away gives no batch. Of learners made of slices, all slices are one machine. The time of the all-reduce is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.settings.run import OuterSettings, RunSettings
from diloco_lab.batches import RowShare, join, take_rows
from diloco_lab.loss_history import LossPoint, point
from diloco_lab.paces.step_clocks import JointClock, present_s
from diloco_lab.paces.times import Paces
from diloco_learner.api.model import Vector
from diloco_learner.jax.island import Island
from diloco_learner.task import Task, rows_of


@dataclass(frozen=True)
class OneModelResult:
    """The end of such training; all as in :class:`diloco_lab.trial.Result`."""

    model: list[Vector]
    loss: float
    tokens: int
    virtual_s: float
    goodput: float
    history: list[LossPoint]


class OneModel:
    """One model that is trained on ``shares`` of the data, to the end of the token budget.

    With all shares this is data-parallel training with the run's global batch, and with one share a learner left alone, which
    takes as many steps. ``sample_s``: time between two losses of the history; None: it has none. It begins with the
    values of a ``model``, by fragment; None: with those of the run's seed.
    """

    def __init__(
        self,
        settings: RunSettings,
        task: Task,
        shares: Sequence[int],
        paces: Paces,
        sample_s: float | None = None,
        *,
        model: Sequence[Vector] | None = None,
    ) -> None:
        self._settings = settings.model_copy(update={"outer": OuterSettings()})  # the model takes its optimizer's steps itself
        self._task, self._shares, self._sample_s = task, shares, sample_s
        whole = paces.whole if len(shares) == settings.learners else None
        self._paces = replace(paces, learners=[paces.learners[share] for share in shares], whole=whole)
        self._island = Island(task, self._settings)
        if model is not None:
            for fragment, values in zip(self._island.fragments().fragments, model, strict=True):
                self._island.write(fragment, values)
        self._streams: list[Iterator[Any]] = [task.batches(share, settings.learners, settings.seed, 0) for share in shares]
        self._rows = RowShare()
        self._now_s = self._useful_s = 0.0
        self._history: list[LossPoint] = []

    def train(self) -> OneModelResult:
        """Train it.

        Raises:
            SettingsError: several shares of a task whose batches cannot be joined.
        """
        clock, tokens, step, sampled = JointClock(self._paces), 0, 0, 0
        # a learner left alone has its part of the tokens, and goes by the schedule of all
        budget = -(-self._settings.tokens * len(self._shares) // self._settings.learners)
        while tokens < budget:
            joint = clock.step(self._now_s)
            batch, its_tokens = self._batch(step, joint.present, joint.timed.share)
            moment = Moment(tokens * self._settings.learners // len(self._shares), self._settings.tokens)
            self._island.step(batch, learning_rate(self._settings, moment), (self._shares[0], step)).wait()
            tokens, step = tokens + its_tokens, step + 1
            self._now_s += joint.timed.step_s
            self._useful_s += joint.timed.useful_s * len(joint.present)
            if self._sample_s is not None and self._now_s >= (sampled + 1) * self._sample_s:
                sampled = int(self._now_s // self._sample_s)
                self._history.append(point(self._now_s, tokens, self._island.evaluate()))
        return self._result(tokens)

    def _batch(self, step: int, present: Sequence[int], share: float) -> tuple[Any, int]:
        """Return the batch of the learners that are there, less the rows of lost slices, and its tokens."""
        batches = [next(self._streams[index]) for index in present]
        whole = len(batches) * rows_of(self._task, batches[0])
        batch, tokens = join(self._task, batches, self._settings.task.name), len(batches) * self._task.tokens_per_batch
        if share == 1:
            return batch, tokens
        rows = self._rows.rows(whole, share)
        lost = {(step + index) % whole for index in range(whole - rows)}  # each row is lost as often as any other
        return take_rows(batch, whole, [row for row in range(whole) if row not in lost]), tokens * rows // whole

    def _result(self, tokens: int) -> OneModelResult:
        loss = self._island.evaluate()
        if self._sample_s is not None:
            self._history.append(point(self._now_s, tokens, loss))
        allocated_s = sum(present_s(pace, self._now_s) for pace in self._paces.learners)
        goodput = self._useful_s / allocated_s
        model = [self._island.read(fragment).to_host() for fragment in self._island.fragments().fragments]
        return OneModelResult(model, loss, tokens, virtual_s=self._now_s, goodput=goodput, history=self._history)
