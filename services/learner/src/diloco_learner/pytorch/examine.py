"""The findings of ``diloco check`` on a PyTorch task: those of :mod:`diloco_learner.examine`, without compiled programs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from diloco.settings.run import RunSettings
from diloco_learner.api import examination, members
from diloco_learner.api.examination import StateFacts, TaskExamination
from diloco_learner.api.model import parameters_digest
from diloco_learner.pytorch.inner import matrices_of
from diloco_learner.pytorch.island import TorchIsland
from diloco_learner.pytorch.processes.batches import as_bytes
from diloco_learner.pytorch.task import TorchTask
from diloco_learner.task_api import STATE


def examine(
    settings: RunSettings, task: TorchTask, checked: TorchIsland, batches: Sequence[Any], units: str | None
) -> TaskExamination:
    """Take the first step of a checked task twice. ``batches``: the first two batches of its first share.

    ``checked``: the checked model, whose values change.

    Raises:
        SettingsError: batches of another share end.
    """
    with members.users_errors(settings.task):
        first = batches[0]
        warnings = list(examination.unsteady_data(task, settings, batches, as_bytes))
        where = members.place(task.loss)
        warnings += [examination.without_gradient(path, where) for path in checked.without_gradient(first)]
        warnings += examination.fails_to_draw(task, settings, checked)
        island, other = TorchIsland(task, settings), TorchIsland(task, settings)
        loss = island.begin_step(first, settings.inner.learning_rate).wait()
        began_s = time.monotonic()
        again = other.begin_step(first, settings.inner.learning_rate).wait()
        step_s = time.monotonic() - began_s
        fragments = island.fragments()
        lies = examination.lies(fragments)
        differing = [] if parameters_digest(island, fragments) == parameters_digest(other, fragments) else ["a parameter"]
        return TaskExamination(
            task=settings.task.name,
            parameters=fragments.parameters,
            tensors=examination.tensor_facts(
                settings, fragments, set(island.rounded_tensors()), partial(matrices_of, task, tables=island.tables)
            ),
            state=[
                StateFacts(tensor.path.removeprefix(STATE), list(tensor.shape), "float32", lies[tensor.path], "average")
                for tensor in fragments.tensors
                if tensor.state
            ],
            fragments=examination.fragment_facts(fragments, settings),
            strategies=examination.strategy_facts(island.specs(), settings),
            memory={},
            constants=[],
            step_s=step_s,
            loss=loss,
            units=units,
            warnings=warnings + examination.two_results((loss, again), differing),
        )
