"""Steps a second of the tasks in ``examples/`` as a learner's island takes them, beside the loop that one would write without.

    python bench/examples.py                       # all of them, in about six minutes on two cores that do nothing else
    python bench/examples.py flax_nnx lora --pairs 32 --json

An example's own batch gives steps of a millisecond, of which a percentage says little: batches are put together until the
plain loop's step takes 50 ms. Both loops wait for each step, and both have AdamW without clipping, unless the task has its own
optimizer. They take turns of about half a second, whose order changes with each pair, so that what else the machine does hits
both. The result is the mean over pairs of the logarithm of bare time by island time, with its interval of 95 % (Student's t).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import script

from diloco.settings.presets import run_settings
from diloco_learner.frameworks import LoadedTask, load
from diloco_learner.task import named

EXAMPLES = (
    "own_model", "classifier", "flax_nnx", "equinox_mlp", "haiku_resnet", "vision_transformer", "mixture_of_experts", "lora",
    "llama", "torch_gpt",
)  # fmt: skip
TARGET, RATE = 0.98, 1e-3
STEP_S, TURN_S = 0.05, 0.5
LARGEST = 1 << 14  # batches that are put together: a loss that takes no time has to end somewhere
KEPT = 4  # batches that a loop goes over
Take = Callable[[Any], float]
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def bare(task: Any) -> Take:
    """Return a step of a plain loop in JAX: it takes a batch, and returns its loss."""
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


def bare_torch(task: Any) -> Take:
    """Return a step of a plain loop in PyTorch."""
    import torch

    module = task.module()
    optimizer = torch.optim.AdamW(module.parameters(), RATE)

    def take(batch: Any) -> float:
        optimizer.zero_grad()
        returned = task.loss(module, batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return take


def island_of(name: str, loaded: LoadedTask) -> Take:
    """Return a step of the task's island."""
    inner = {"inner.optimizer": "adamw", "inner.clip_norm": 1e9, "fragments.count": 8, "task.name": f"{name}:make"}
    island, count = loaded.framework.make_model(loaded.task, run_settings(overrides=inner), None), [0]

    def take(batch: Any) -> float:
        count[0] += 1
        output = island.begin_step(batch, RATE, (0, count[0]))
        island.finish_step()
        return output.wait()

    return take


def together(batches: Iterator[Any], count: int) -> list[Any]:
    """Return batches of so many of a task's, along the first axis."""
    return [jax.tree.map(lambda *leaves: np.concatenate(leaves), *[next(batches) for _ in range(count)]) for _ in range(KEPT)]


def seconds(take: Take, batches: list[Any], steps: int) -> float:
    """Return the seconds that a step takes, in the mean of so many."""
    began_s = time.perf_counter()
    for index in range(steps):
        take(batches[index % len(batches)])
    return (time.perf_counter() - began_s) / steps


def fitted(take: Take, batches: Iterator[Any]) -> tuple[list[Any], int, float]:
    """Return batches whose step takes :data:`STEP_S`, of how many of the task's each is, and what a step takes."""
    count = 1
    while True:
        kept = together(batches, count)
        take(kept[0])  # compiles
        step_s = min(seconds(take, kept, 4) for _ in range(2))
        if step_s >= STEP_S or count >= LARGEST:
            return kept, count, step_s
        count = min(LARGEST, max(2 * count, math.ceil(1.2 * count * STEP_S / step_s)))


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Compare the two loops of an example."""
    settings = run_settings(overrides={"task.name": f"{name}:make", "fragments.count": 8})
    loaded = load(settings.task, None, Path())
    plain = {"jax": bare, "torch": bare_torch}[loaded.framework.name]
    loops = {"bare": plain(loaded.task), "island": island_of(name, loaded)}
    kept, count, step_s = fitted(loops["bare"], loaded.task.batches(0, 1, 0, 0))
    steps = max(1, round(TURN_S / step_s))
    for take in loops.values():
        seconds(take, kept, 2)  # the island compiles
    took: dict[str, list[float]] = {each: [] for each in loops}
    for turn in range(pairs):
        for each in sorted(loops, reverse=turn % 2 == 1):
            took[each].append(seconds(loops[each], kept, steps))
    found = script.ratio(took["bare"], took["island"])
    about = {"example": name, "batches": count, "steps_a_turn": steps}
    times = {f"{each}_ms": 1000 * statistics.median(values) for each, values in took.items()}
    return about | times | found | {"reached": found["ratio"] >= TARGET}


def show(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(f"{result['cpu']}, {result['cores']} cores, {result['pairs']} pairs each; target {TARGET:.0%} of the bare loop")
    for row in result["rows"]:
        print(
            f"  {row['example']:<20} {100 * row['ratio']:6.1f} % ({100 * row['low']:.1f} to {100 * row['high']:.1f}); bare "
            f"{row['bare_ms']:.1f} ms, island {row['island_ms']:.1f} ms a step of {row['batches']} batches"
            f"{'' if row['reached'] else '; not reached'}"
        )


def main() -> None:
    """Console."""
    parser = script.parser(__doc__)
    parser.add_argument("names", nargs="*", default=EXAMPLES, metavar="NAME", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--pairs", type=int, default=16, choices=sorted(script.T95))
    asked: argparse.Namespace = parser.parse_args()
    rows = []
    for name in asked.names:
        rows.append(measure(name, asked.pairs))
        print(f"{name} measured", file=sys.stderr, flush=True)
    script.print_result(script.machine() | {"pairs": asked.pairs, "rows": rows}, asked, show)


if __name__ == "__main__":
    main()
