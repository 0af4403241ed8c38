"""Training done again from a toy's tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.made.fragment_vectors import scatter
from tests.services.toy import SAMPLES, Regression

from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.schedule import Moment
from diloco.core.run import tape as events
from diloco.core.run.lives import Life
from diloco.core.tensors.fragments import cut_model
from diloco.settings.run import RunSettings
from diloco_ops.audit import replay
from diloco_ops.audit.retraining import State


class ToyModel:
    """The toys' regression, driven by a tape."""

    machine = events.Machine("toy", "")
    tokens_per_batch = SAMPLES

    def __init__(self, settings: RunSettings, data: str | None, life: Life) -> None:
        self.task = Regression(settings)
        self.map = cut_model(self.task.specs, settings.fragments)

    def step(self, share: int, batch: int, at: Moment) -> None:
        self.task.step(share, batch)

    def write(self, fragment: int, applied: VersionWrite) -> None:
        old, new = self.snapshot(fragment), applied.theta
        if applied.reference is not None:
            new = new + (old - applied.reference[:])
        scatter(self.map.fragments[fragment], new, self.task.tensors)

    def snapshot(self, fragment: int) -> NDArray[np.float32]:
        return self.map.fragments[fragment].gather(self.task.tensors)

    def parameters_digest(self) -> bytes:
        return self.task.digest(self.map)

    def state(self) -> State:
        return {name: tensor.copy() for name, tensor in self.task.tensors.items()}

    def load_state(self, state: State) -> None:
        for name, tensor in state.items():
            self.task.tensors[name][:] = tensor

    def load_optimizer(self, state: State) -> None:
        raise AssertionError("a toy has no optimizer state")


async def redo_toys(path: Path, make: Any = ToyModel) -> list[replay.ReplayResult]:
    return replay.redo(path, await replay.fold(path, None, keep=True), make)
