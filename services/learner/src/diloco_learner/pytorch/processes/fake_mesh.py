"""Examine a torch task as the first of several processes, without the others (torch's backend ``fake``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed

from diloco.settings.run import RunSettings
from diloco.settings.service import MeshSettings
from diloco_learner.api.examination import ProcessFacts
from diloco_learner.pytorch.holding import OPTIMIZER
from diloco_learner.pytorch.island import TorchIsland
from diloco_learner.pytorch.processes.batches import rows_of
from diloco_learner.pytorch.processes.process_mesh import ProcessMesh, axis_sizes
from diloco_learner.pytorch.task import TorchTask

PARAMETERS = "params/"  # begins the names of parameters in a state


def examine_processes(task: TorchTask, settings: RunSettings, mesh: MeshSettings, count: int, batch: Any) -> ProcessFacts:
    """Spread a task's module over a mesh of so many processes, and take steps on a batch as the first of them.

    Raises:
        SettingsError: the mesh, the batch or the task's ``parallelize`` does not fit them.
    """
    sizes = axis_sizes(mesh, count)
    with _first_of(count):
        processes = ProcessMesh(sizes, 0)
        island = TorchIsland(task, settings, processes)
        island.fragments()
        island.check(batch)
        island.rehearse(batch)
        chunks = island.wanted()
        return ProcessFacts(
            count=count,
            mesh=sizes,
            rows=len(processes.range_of(task, batch)),
            batch_rows=rows_of(task, batch),
            parameters_bytes=sum(chunk.size_bytes for chunk in chunks if chunk.name.startswith(PARAMETERS)),
            optimizer_bytes=sum(chunk.size_bytes for chunk in chunks if chunk.name.startswith(OPTIMIZER)),
            whole=island.whole_tensors(),
        )


@contextmanager
def _first_of(count: int) -> Iterator[None]:
    """Be the first rank of a process group of so many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()
