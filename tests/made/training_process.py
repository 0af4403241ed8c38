"""One of a learner's processes, without a run: ``test_retraining.py`` starts all of them. It trains, and prints the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import jax

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.settings.presets import run_settings
from diloco.settings.service import MeshSettings
from diloco_learner.api.model import digest_of
from diloco_learner.jax.beginning import connect_jax
from diloco_learner.jax.island import Island
from diloco_learner.jax.mesh import make_mesh
from diloco_learner.replay import machine
from diloco_learner.task import load_task

SETTINGS = run_settings(
    overrides={
        "task.layers": 1,
        "task.width": 32,
        "task.heads": 2,
        "task.context": 16,
        "task.batch": 12,
        "fragments.count": 2,
        "inner.optimizer": "adamw",
        "inner.warmup_fraction": 0.0,
    }
)
STEPS = 6


def moments() -> Iterator[Moment]:
    yield from (Moment(step * SETTINGS.tokens // STEPS // 2, SETTINGS.tokens) for step in range(STEPS))


def main() -> None:
    address, processes, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    data, fsdp, tensor = map(int, sys.argv[4:])
    connect_jax(address, processes, place, 60.0)
    task = load_task(SETTINGS.task, None)
    island = Island(task, SETTINGS, make_mesh(MeshSettings(data=data, fsdp=fsdp, tensor=tensor)), apart=True)
    batches = list(islice(task.batches(0, SETTINGS.learners, SETTINGS.seed, 0), STEPS))
    island.check(batches[0])
    for step, (batch, at) in enumerate(zip(batches, moments(), strict=True)):
        island.step(batch, learning_rate(SETTINGS, at), (0, step)).wait()
    # all values are on the devices of this process: data = processes, and fsdp within one
    fragments = island.fragments()
    print(digest_of(fragments, lambda index: island.read(fragments.fragments[index]).to_host()).hex())
    print(machine().text)
    print(machine().flags)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
