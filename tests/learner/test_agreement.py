"""The meshes that a learner of several processes may come to have, looked at before it begins."""

from __future__ import annotations

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.service import LearnerSettings, MeshSettings, ProcessesSettings
from diloco_learner.jax.agreement import check, check_meshes
from diloco_learner.task import Task

RUN = run_settings()


class Rows:
    """A task of one tensor."""

    def __init__(self, partition: P | None = None) -> None:
        self._partition = partition

    def init(self, key: jax.Array) -> Any:
        return {"weight": jnp.zeros((8, 1020))}

    def partition(self, path: str, shape: tuple[int, ...]) -> P | None:
        return self._partition


def learner(count: int, least: int | None, **mesh: int) -> LearnerSettings:
    processes = ProcessesSettings(count=count, address="127.0.0.1:7600", least=least)
    return LearnerSettings(name="ann", processes=processes, mesh=MeshSettings(**mesh))


def look(settings: LearnerSettings, rows: int, partition: P | None = None) -> None:
    check_meshes(settings, cast(Task, Rows(partition)), RUN, np.zeros((rows, 4)))


def test_a_mesh_that_cannot_shrink_is_refused() -> None:
    check(learner(2, 1, data=2))
    check(learner(2, 2))
    check(learner(4, 2, data=2))
    with pytest.raises(SettingsError, match=re.escape("processes.least = 1 of 2: mesh.data = 1 cannot shrink so far")):
        check(learner(2, 1))
    with pytest.raises(SettingsError, match=re.escape("processes.least = 1 of 4: mesh.data = 2 cannot shrink so far")):
        check(learner(4, 1, data=2))


def test_a_batch_has_to_fit_what_may_be_left() -> None:
    look(learner(3, 2, data=3), 12)
    look(learner(3, None, data=3), 3)  # no process is left out
    with pytest.raises(
        SettingsError, match=r"processes.least = 2: the learner may continue with 2 of 3 processes \(mesh.data = 2\)"
    ):
        look(learner(3, 2, data=3), 3)
    with pytest.raises(SettingsError, match=r"task: a batch has 2 rows"):
        look(learner(3, 2, data=3), 2)


def test_a_tensor_has_to_fit_what_may_be_left() -> None:
    look(learner(4, 2, data=4), 12, P(None, "data"))
    with pytest.raises(SettingsError, match=r"processes.least = 2: .* 3 of 4 processes .* mesh.data = 3 does not divide"):
        look(learner(4, 2, data=4), 12, P("data"))
