"""PyTorch as a framework of learners. PyTorch itself is imported by the first method that needs it.

This module is beside the package ``pytorch``, which cannot be imported where PyTorch is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.settings.run import RunSettings, TaskSettings
from diloco.settings.service import MeshSettings
from diloco_learner.frameworks import Framework, Task

if TYPE_CHECKING:
    from diloco_learner.api.examination import ProcessFacts, TaskExamination
    from diloco_learner.api.model import JoinedParameters, Model


class TorchFramework(Framework):
    """Tasks with ``module`` that have no ``init``. A process has one device, which the module chooses."""

    wants = "module()"
    module = "diloco_learner.pytorch"

    def parameters(self, params: Any) -> JoinedParameters | None:
        torch = sys.modules.get("torch")
        values = params.values() if isinstance(params, Mapping) else ()
        if torch is None or not (isinstance(params, torch.nn.Module) or any(isinstance(each, torch.Tensor) for each in values)):
            return None
        from diloco_learner.pytorch.parameters import TorchParameters

        return TorchParameters(params)

    def claims(self, task: object) -> bool:
        return hasattr(task, "module") and not hasattr(task, "init")

    def load(self, task: object, settings: TaskSettings, data: str | None, cache_dir: Path) -> Task:
        from diloco_learner.pytorch.task import checked

        return checked(task, settings)

    def make_model(self, task: Task, settings: RunSettings, mesh: MeshSettings | None) -> Model:
        from diloco_learner.pytorch.island import TorchIsland

        return TorchIsland(task, settings)

    def devices(self) -> list[str]:
        import torch

        return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())] or ["cpu"]

    def examine(
        self, task: Task, settings: RunSettings, model: Model, batches: Sequence[Any], units: str | None
    ) -> TaskExamination:
        from diloco_learner.pytorch.examine import examine
        from diloco_learner.pytorch.island import TorchIsland

        assert isinstance(model, TorchIsland)
        return examine(settings, task, model, batches, units)

    def examine_processes(
        self, task: Task, settings: RunSettings, mesh: MeshSettings, count: int, batch: Any
    ) -> ProcessFacts | None:
        from diloco_learner.pytorch.processes.fake_mesh import examine_processes

        return examine_processes(task, settings, mesh, count, batch)
