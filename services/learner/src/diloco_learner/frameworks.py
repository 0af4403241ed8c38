"""A run's task and its model, of whichever framework the task is; the other one is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from diloco.core.tensors.built_in import BUILT_IN
from diloco.settings.run import RunSettings, TaskSettings
from diloco.settings.service import MeshSettings
from diloco_learner.api.model import Model
from diloco_learner.task_api import is_torch, made

Task: TypeAlias = Any  # of one of them


@dataclass(frozen=True)
class LoadedTask:
    """A task that has its members, and whether it is one of PyTorch."""

    task: Task
    torch: bool


def load(settings: TaskSettings, data: str | None, cache_dir: Path) -> LoadedTask:
    """Return a run's task; ``cache_dir`` is where the built-in one keeps the tokens of a mix.

    Raises:
        SettingsError: no such task, it cannot be imported, or it lacks something that a task has.
        DataError: its data is missing, unreadable or too short.
    """
    found = None if settings.name == BUILT_IN else made(settings, data)
    if is_torch(found):
        from diloco_learner.pytorch.task import checked as checked_torch

        return LoadedTask(checked_torch(found, settings), True)
    from diloco_learner.task import checked, load_task

    return LoadedTask(load_task(settings, data, cache_dir) if found is None else checked(found, settings), False)


def make_model(loaded: LoadedTask, settings: RunSettings, mesh: MeshSettings | None) -> Model:
    """Return a task's model; ``mesh`` is that of JAX's devices.

    Raises:
        SettingsError: it is no model that can be trained.
    """
    if loaded.torch:
        from diloco_learner.pytorch.island import TorchIsland

        return TorchIsland(loaded.task, settings)
    from diloco_learner.jax.island import Island
    from diloco_learner.jax.mesh import make_mesh

    return Island(loaded.task, settings, None if mesh is None else make_mesh(mesh))
