"""Steps a second of a task in ``examples/`` as a learner's island takes them, beside the loop that one would write without.

The two take turns, so that what else the machine does hits both: ``python bench/examples.py flax_nnx --turns 9 --steps 30``.
AdamW is the optimizer of both, without clipping, unless the task has its own. The island waits for each step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from diloco.settings.presets import run_settings
from diloco_learner.island import Island
from diloco_learner.task import load_task, named

RATE = 1e-3
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def bare(task: Any) -> Callable[[Any], float]:
    """Return a step of a plain loop: it takes a batch, and returns its loss."""
    key, wanted = jax.random.key(0), named(task, "loss")
    fixed = {"constants": jax.device_put(task.constants())} if "constants" in wanted else {}
    transformation = task.optimizer(lambda count: RATE) if hasattr(task, "optimizer") else optax.adamw(RATE)
    others = {"train": True} if "train" in wanted else {}

    def loss_of(params: Any, batch: Any, index: Any, fixed: Any) -> Any:
        drawn = {"key": jax.random.fold_in(key, index)} if "key" in wanted else {}
        returned = task.loss(params, batch, **drawn, **others, **fixed)
        return returned[0] if isinstance(returned, tuple) else returned

    def step(params: Any, state: Any, batch: Any, index: Any, fixed: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, index, fixed)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(lambda leaf: jax.numpy.array(leaf), task.init(key))
    values = [params, transformation.init(params), 0]

    def take(batch: Any) -> float:
        values[0], values[1], loss = compiled(values[0], values[1], batch, np.uint32(values[2]), fixed)
        values[2] += 1
        return float(loss)

    return take


def island_of(name: str, task: Any) -> Callable[[Any], float]:
    """Return a step of the task's island."""
    inner = {"inner.optimizer": "adamw", "inner.clip_norm": 1e9, "fragments.count": 8, "task.name": f"{name}:make"}
    island, count = Island(task, run_settings(overrides=inner)), [0]

    def take(batch: Any) -> float:
        count[0] += 1
        return island.step(batch, RATE, (0, count[0])).wait()

    return take


def main() -> None:
    """Console."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run, for example task.width=64")
    asked = parser.parse_args()
    given = dict(each.split("=", 1) for each in asked.set)
    values = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    settings = run_settings(overrides={"task.name": f"{asked.name}:make", "fragments.count": 8} | values)
    task: Any = load_task(settings.task, None)
    batches: Iterator[Any] = task.batches(0, 1, 0, 0)
    kept = [next(batches) for _ in range(8)]
    loops = {"bare": bare(task), "island": island_of(asked.name, task)}
    for take in loops.values():
        take(kept[0])
    took: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(asked.turns):
        for name in sorted(loops, reverse=turn % 2 == 1):
            began_s = time.perf_counter()
            for index in range(asked.steps):
                loops[name](kept[index % len(kept)])
            took[name].append((time.perf_counter() - began_s) / asked.steps)
    medians = {name: statistics.median(times) for name, times in took.items()}
    pairs = [one / other for one, other in zip(took["bare"], took["island"], strict=True)]
    print(
        f"{asked.name}: bare {1000 * medians['bare']:.2f} ms, island {1000 * medians['island']:.2f} ms a step; "
        f"{100 * statistics.median(pairs):.1f} % of the bare loop's steps a second (median of {asked.turns} pairs, "
        f"{100 * min(pairs):.0f} to {100 * max(pairs):.0f})"
    )


if __name__ == "__main__":
    main()
