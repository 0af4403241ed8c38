"""The cost of a step of two programs beside one of one: an island of replicas on CPU devices, as one that is elastic has it.

    python bench/apart.py --step-s 0.05 0.11

The task is that of ``bench/island.py``, whose step takes a set time and hardly any processor. At every step a fragment is
written and one is read. A step of one program is queued while the one before is in flight. Of one of two, writes, reads and the
next first program follow once the first program has ended. They take turns, a block of steps each; the ratio of their times is
one sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from islands import block_s, step_with_fragments


def measure(devices: int, step_s: float, blocks: int) -> None:
    """Print the pace of two programs in that of one."""
    os.environ |= {"JAX_NUM_CPU_DEVICES": str(devices), "BENCH_STEP_S": str(step_s)}

    from diloco.core.tensors.fragments import build_map
    from diloco.settings.presets import run_settings
    from diloco.settings.service import MeshSettings
    from diloco_learner.jax.island import Island
    from diloco_learner.jax.mesh import make_mesh
    from diloco_learner.task import load_task
    from diloco_learner.task_api import first_batch

    values = {"task.name": "island:make", "task.layers": 24, "task.width": 192, "inner.optimizer": "adamw"}
    settings = run_settings(overrides=values)
    task, mesh = load_task(settings.task, None), make_mesh(MeshSettings(data=devices))
    whole, apart = (Island(task, settings, mesh, apart=apart) for apart in (False, True))
    batch = first_batch(task, settings)
    fragments = build_map(whole.tensors(), 20).fragments
    thetas = [whole.read(fragment).to_host() for fragment in fragments]

    with ThreadPoolExecutor(1) as host:
        steps = [step_with_fragments(island, fragments, thetas, batch, host) for island in (whole, apart)]
        for step in steps:
            block_s(step)
        pairs = [(block_s(steps[0]), block_s(steps[1])) for _ in range(blocks)]
    paces = sorted(one_s / two_s for one_s, two_s in pairs)
    tenth = len(paces) // 10
    one_ms, two_ms = (1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    size = sum(theta.size for theta in thetas)
    print(f"data {devices}, {size / 1e6:.2f}M parameters: {one_ms:.1f} ms, apart {two_ms:.1f} ms")
    low, high = paces[tenth], paces[-1 - tenth]
    print(f"pace {statistics.median(paces):.3f} ({low:.3f} to {high:.3f}, {len(paces)} pairs)", flush=True)


def main() -> None:
    """Print both for each time of a step, in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.05, 0.11])
    parser.add_argument("--blocks", type=int, default=30)
    asked = parser.parse_args()
    if len(asked.step_s) == 1:
        measure(asked.devices, asked.step_s[0], asked.blocks)
        return
    for step_s in asked.step_s:
        rest = ["--devices", str(asked.devices), "--blocks", str(asked.blocks), "--step-s", str(step_s)]
        subprocess.run([sys.executable, __file__, *rest], check=True)


if __name__ == "__main__":
    main()
