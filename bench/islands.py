"""An island on a mesh of CPU devices: its pace beside the same step in a bare JAX loop, and the memory of a device.

    python bench/islands.py --devices 4 --step-s 0.05

The task is that of ``bench/island.py``, whose step takes a set time and hardly any processor. The bare loop is optax and
``jax.jit`` on arrays of the same shardings. The island also writes a fragment and reads one at every step, as a learner does
that has as many fragments as steps in a round. Both have a step queued while one is in flight. They take turns, a block of
steps each; the ratio of their times is one sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

BLOCK_STEPS = 20
RATE = 1e-3


def main() -> None:
    """Print pace and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--data", type=int, default=1, help="replicas among them")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--fragments", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=15)
    asked = parser.parse_args()
    os.environ |= {"JAX_NUM_CPU_DEVICES": str(asked.devices), "BENCH_STEP_S": str(asked.step_s)}

    from diloco.core.tensors.fragments import build_map
    from diloco.settings.presets import run_settings
    from diloco.settings.service import MeshSettings
    from diloco_learner.jax.island import Island
    from diloco_learner.jax.mesh import make_mesh
    from diloco_learner.task import load_task
    from diloco_learner.task_api import first_batch

    values = {"task.name": "island:make", "task.layers": asked.tensors, "task.width": asked.width, "inner.optimizer": "adamw"}
    settings = run_settings(overrides=values)
    task, mesh = load_task(settings.task, None), make_mesh(MeshSettings(data=asked.data))
    island, batch = Island(task, settings, mesh), first_batch(task, settings)
    fragments = build_map(island.tensors(), asked.fragments).fragments
    thetas = [island.read(fragment).to_host() for fragment in fragments]
    bare = bare_step(task, settings, island, batch)

    with ThreadPoolExecutor(1) as host:
        with_fragments = step_with_fragments(island, fragments, thetas, batch, host)
        block_s(bare), block_s(with_fragments)
        pairs = [(block_s(bare), block_s(with_fragments)) for _ in range(asked.blocks)]
    paces = sorted(bare_s / island_s for bare_s, island_s in pairs)
    tenth = len(paces) // 10
    print(f"mesh {dict(mesh.shape) if mesh else 'of one device'}, {sum(theta.size for theta in thetas) / 1e6:.2f}M parameters")
    print(f"bare step {1e3 * statistics.median(bare_s for bare_s, _ in pairs):.1f} ms")
    print(f"pace {statistics.median(paces):.3f} of it ({paces[tenth]:.3f} to {paces[-1 - tenth]:.3f}, {len(paces)} pairs)")
    tell_memory(island, asked.devices)


def step_with_fragments(
    model: Any, fragments: Sequence[Any], thetas: Sequence[Any], batch: Any, host: Executor
) -> Callable[[int], Callable[[], object]]:
    """Return a step that writes a fragment and reads another one, which ``host`` copies to the host.

    So does a learner's step where a round has as many steps as there are fragments.
    """

    def step(number: int) -> Callable[[], object]:
        model.finish_step()
        at = number % len(fragments)
        model.write(fragments[at], thetas[at], thetas[at])
        reading = model.read(fragments[at - len(fragments) // 2])
        output = model.begin_step(batch, RATE)
        host.submit(reading.to_host)
        if model.apart:
            output.wait()
        wait: Callable[[], object] = output.wait
        return wait

    return step


def block_s(step: Callable[[int], Callable[[], object]]) -> float:
    """Return the seconds a step takes of a block of them; ``step`` begins one, and returns how to wait for it."""
    began_s = time.perf_counter()
    wait: Callable[[], object] = int
    for number in range(BLOCK_STEPS):
        following = step(number)
        wait()
        wait = following
    wait()
    return (time.perf_counter() - began_s) / BLOCK_STEPS


def bare_step(task: Any, settings: Any, island: Any, batch: Any) -> Callable[[int], Callable[[], object]]:
    """Return a plain sharded step of the island's task and optimizer, on copies of its parameters."""
    import jax
    import jax.numpy as jnp

    from diloco_learner.jax.inner import optimizer

    inner = optimizer(settings, [])
    state = {"params": jax.tree.map(jnp.copy, island.params())}
    state["optimizer"] = inner.init(jax.tree.leaves(state["params"]))

    def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(task.loss)(params, batch)
        leaves, structure = jax.tree.flatten(params)
        updates, optimizer_state = inner.update(jax.tree.leaves(gradients), optimizer_state, leaves)
        moved = [leaf - RATE * update for leaf, update in zip(leaves, updates, strict=True)]
        return jax.tree.unflatten(structure, moved), optimizer_state, loss

    shardings = jax.tree.map(lambda array: array.sharding, state["params"])
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings, None, None))

    def begin(number: int) -> Callable[[], object]:
        state["params"], state["optimizer"], loss = jitted(state["params"], state["optimizer"], batch)
        return lambda: float(loss)

    return begin


def tell_memory(island: Any, devices: int) -> None:
    """Print the bytes of all that an island keeps, and the most that a device has of them."""
    arrays = island.arrays().values()
    held: dict[Any, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    whole, most = sum(array.nbytes for array in arrays), max(held.values())
    share = most * devices / whole
    print(f"parameters and optimizer state {whole / 1e6:.2f} MB, a device {most / 1e6:.2f} MB: {share:.3f} of its share")


if __name__ == "__main__":
    main()
