"""Parameters in bfloat16 beside float32: bytes a parameter on a device, and what becomes of small updates.

    python bench/bfloat16.py

Bytes are XLA's `memory_analysis()` of the built-in model's step: its arguments are all that an island keeps between steps, the
temporaries are the rest. Of the small batch of one sequence these are mostly gradients and rounded parameters.

Updates are drawn with a trend of a third of their deviation, and added to parameters of 0.02, round by round, in two forms:
masters in float32, as an island has them; and bfloat16 alone, where parameters are rounded after each step and a displacement
is measured from the version rounded. Each round's displacement goes into the log as it is. `arrives` is the share of the
updates' sum that a displacement holds (a regression), `error` the root mean square of the rest, relative to the sum's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diloco.settings.presets import run_settings
from diloco_learner.jax.island import Island
from diloco_learner.task import load_task
from diloco_learner.task_api import first_batch

Vector = NDArray[np.float32]
ROUNDS, STEPS, VALUES = 50, 20, 20_000


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    asked = parser.parse_args()
    for form, made in {"masters in float32": masters, "bfloat16 alone": alone}.items():
        for size in (1e-4, 1e-5):
            arrives, error = displaced(made, size)
            print(f"{form:18} updates of {size:.0e}: arrives {arrives:6.3f}, error {error:6.3f}")
    for dtype in ("float32", "bfloat16"):
        tell_memory(dtype, asked.layers, asked.width)


def displaced(form: Callable[[Vector, Vector], tuple[Vector, Vector]], size: float) -> tuple[float, float]:
    """Return how much of the updates' sum displacements hold, and the size of the rest."""
    rng = np.random.default_rng(0)
    log = rng.normal(0, 0.02, VALUES).astype(np.float32)
    found, wanted = [], []
    for _ in range(ROUNDS):
        updates = rng.normal(size / 3, size, (STEPS, VALUES)).astype(np.float32)
        base, value = form(log, updates)
        found.append(value - base)
        wanted.append(updates.sum(0))
        log = log + found[-1]
    had, sums = np.array(found, np.float64), np.array(wanted, np.float64)
    arrives = np.sum(had * sums) / np.sum(sums**2)
    return float(arrives), float(np.sqrt(np.mean((had - arrives * sums) ** 2) / np.mean(sums**2)))


def rounded(values: Vector) -> Vector:
    """Return the nearest bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def masters(log: Vector, updates: Vector) -> tuple[Vector, Vector]:
    """Return what a displacement is measured from, and to: floats of 32 bits."""
    value = log.copy()
    for update in updates:
        value += update
    return log, value


def alone(log: Vector, updates: Vector) -> tuple[Vector, Vector]:
    """Return the same of parameters that are rounded after each step, and had begun as the version rounded."""
    value = rounded(log)
    for update in updates:
        value = rounded(value + update)
    return rounded(log), value


def tell_memory(dtype: str, layers: int, width: int) -> None:
    """Print the bytes a parameter that a step keeps and needs."""
    values: dict[str, Any] = {
        "task.dtype": dtype,
        "task.layers": layers,
        "task.width": width,
        "task.batch": 1,
        "task.context": 8,
    }
    settings = run_settings(overrides=values | {"inner.optimizer": "adamw"})
    task = load_task(settings.task, None)
    island = Island(task, settings)
    count = sum(leaf.size for leaf in jax.tree.leaves(island.params()))
    memory = island.trace(first_batch(task, settings))[0].compile().memory_analysis()
    assert memory is not None
    kept, needed = memory.argument_size_in_bytes / count, memory.temp_size_in_bytes / count
    print(f"{dtype:8} {count / 1e6:.1f}M parameters: {kept:.1f} bytes a parameter kept, {needed:.1f} more in a step")


if __name__ == "__main__":
    main()
