"""``diloco-learner``: one island as a process, or (role ``evaluator``) one that only watches the global model.

Two threads: JAX steps in the main one, everything that talks to NATS in the other, which runs the asyncio loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from jax.sharding import Mesh

from diloco.process import observe
from diloco.service import skeleton as service
from diloco.settings.service import LearnerSettings
from diloco_learner import replay
from diloco_learner.jax import agreement, programs, together
from diloco_learner.jax.beginning import Beginning, room_for_steps
from diloco_learner.jax.mesh import make_mesh
from diloco_learner.run import alone
from diloco_learner.run.process import LearnerProcess, begun, until_asked


def _work_alone(process: LearnerProcess, mesh: Mesh | None) -> None:
    """Train, or evaluate, as the only process of a learner."""
    settings, learns = process.settings, process.settings.role == "learner"
    beginning = Beginning(process, lambda name: programs.compiled_once(settings.cache_dir, name, process.stopping))
    task = beginning.task
    island, fragments = beginning.make_island(mesh, copies=learns)
    member = alone.make_member(process, fragments)
    if learns:
        member.admission.check_batch(task.tokens_per_batch)
        with room_for_steps(1, 1):
            beginning.compile_step(island.trace(beginning.first))
            island.rehearse(beginning.first)
    beginning.over()
    about = [replay.machine()] if mesh is None else [replay.machine(), replay.mesh_event(mesh)]
    alone.work(process, island, member, task, task.tokens_per_batch, about)


def work(settings: LearnerSettings, stopping: Callable[[], bool]) -> None:
    """Join the run and train, or evaluate, until it is over or this process is asked to end."""
    programs.keep(settings.cache_dir)
    alone_ = settings.processes.count == 1
    if not alone_:
        agreement.check(settings)
    mesh = make_mesh(settings.mesh) if alone_ else None
    with begun(settings, stopping) as process:
        if alone_:
            _work_alone(process, mesh)
        else:
            together.work(process)


def _main() -> int:
    settings = service.parse_settings(LearnerSettings, "diloco-learner")
    return until_asked(lambda stopping: work(settings, stopping))


def main() -> None:
    """Console script."""
    code = observe.run_main(_main, "diloco-learner")
    together.exit_from_jax(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
