"""JAX as a framework of learners. JAX itself is imported by the first method that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.settings import folders
from diloco.settings.run import RunSettings, TaskSettings
from diloco.settings.service import MeshSettings
from diloco_learner.frameworks import Framework, Task

if TYPE_CHECKING:
    from diloco_learner.api.examination import TaskExamination
    from diloco_learner.api.model import Model


class JaxFramework(Framework):
    """Tasks with ``init``, and the built-in one. A learner may have several devices and processes, which make one mesh."""

    wants = "init()"
    module = "diloco_learner"
    one_process = False

    def claims(self, task: object) -> bool:
        return task is None or hasattr(task, "init")

    def load(self, task: object, settings: TaskSettings, data: str | None, cache_dir: Path) -> Task:
        from diloco_learner.task import checked, load_task

        return load_task(settings, data, cache_dir) if task is None else checked(task, settings)

    def make_model(self, task: Task, settings: RunSettings, mesh: MeshSettings | None) -> Model:
        from diloco_learner.jax.island import Island
        from diloco_learner.jax.mesh import make_mesh

        return Island(task, settings, None if mesh is None else make_mesh(mesh))

    def devices(self) -> list[str]:
        import jax

        return [str(device.device_kind) for device in jax.local_devices()]

    def examine(
        self, task: Task, settings: RunSettings, model: Model, batches: Sequence[Any], units: str | None
    ) -> TaskExamination:
        from diloco_learner.jax.island import Island
        from diloco_learner.jax_examine import examine

        assert isinstance(model, Island)
        return examine(settings, task, model, batches, units)

    def keep_programs(self, cache_dir: Path) -> None:
        from diloco_learner.jax import programs

        programs.keep_if_possible(cache_dir)

    def check_cache(self, cache_dir: Path) -> None:
        folders.made(cache_dir)

    def check_values(self, model: Any) -> None:
        from diloco_learner.jax import fixed

        fixed.check_finite(model.task.init, model.params())
        if merged := model.task_state.merged():
            fixed.check_finite(model.task.init_state, merged)
        if hasattr(model.task, "constants"):
            fixed.check_finite(model.task.constants, model.constants)

    def check_alike(self, task: Task, first: Any, later: Any) -> None:
        from diloco_learner.task import check_alike

        check_alike(task, first, later)

    def rehearse(self, model: Model, batch: Any) -> float:
        from diloco_learner.jax.beginning import room_for_steps

        with room_for_steps(1, 1):
            return model.rehearse(batch)

    def find_cause(self, task: Task, settings: RunSettings, model: Any, batch: Any) -> str:
        from diloco_learner.jax.traced import out_of_bounds

        return out_of_bounds(task, settings, model, batch)
