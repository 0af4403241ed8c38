"""A learner's checkpoints: what they cost its steps, the memory that one takes, and how fast one is written and read.

    python bench/checkpoints.py                          # 32M parameters, a step of 0.2 s, checkpoints for 120 s
    python bench/checkpoints.py --parameters 1000000 --seconds 20 --json

A real island and its keeper take steps of ``bench/island.py``, and save all that a learner saves: parameters, the state of
AdamW, and 12 bytes a parameter of accounts. Steps are taken without any checkpoint at first, for the memory that they need;
then with one every second, or as often as :mod:`diloco_learner.run.pacing` allows. Cost is how much longer steps took, in the
mean, while a checkpoint was being made than between two: what was measured a minute ago says nothing on a busy machine. Memory
is the peak of resident memory above that of steps alone, of which a step's own arrays are a part.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import script

MIB = 1 << 20


def measure(parameters: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Take steps without and with checkpoints in ``folder``, and read one of these again."""
    import jax
    import numpy as np

    from diloco.member import state
    from diloco.process.observe import get_logger
    from diloco.settings.presets import run_settings
    from diloco.settings.service import LearnerSettings
    from diloco_learner.jax.island import Island
    from diloco_learner.run.checkpoint import CheckpointKeeper
    from diloco_learner.task import load_task
    from diloco_learner.task_api import first_batch

    width = 1024 if parameters >= 1 << 22 else 128
    layers = max(1, parameters // width**2)
    values = {"task.name": "island:make_unstopped", "task.layers": layers, "task.width": width, "inner.optimizer": "adamw"}
    settings = run_settings(overrides=values)
    task = load_task(settings.task, None)
    island, batch = Island(task, settings), first_batch(task, settings)
    island.rehearse(batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(island.params()))
    accounts = {f"accounts/0/{name}": np.ones(count, np.float32) for name in ("base", "error", "offer/0/rest")}
    saved: list[bytes] = []
    member: Any = SimpleNamespace(
        step=0,
        run=SimpleNamespace(identity=bytes(8)),
        admission=SimpleNamespace(incarnation=1),
        lender=SimpleNamespace(wanted=False),
        marker_due=lambda: None,
        dump=lambda: ({"step": member.step}, accounts),
        note_saved=saved.append,
    )
    stated = LearnerSettings(name="bench", state_dir=folder, checkpoint_s=1.0)
    keeper = CheckpointKeeper(island, member, stated, get_logger())

    def step() -> None:
        island.step(batch, 1e-3).wait()
        member.step += 1

    for _ in range(5):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds / 4:
        step()
    usual_bytes = script.peak_rss_bytes(os.getpid())
    quiet_s: list[float] = []
    saving_s: list[float] = []
    began_s = time.perf_counter()
    while (step_began_s := time.perf_counter()) - began_s < seconds:
        saves = keeper.saver.is_busy()
        step()
        keeper.at_boundary()
        saves |= keeper.saver.is_busy()
        (saving_s if saves else quiet_s).append(time.perf_counter() - step_began_s)
    keeper.close()
    usual_s, steps = sum(quiet_s) / len(quiet_s), len(quiet_s) + len(saving_s)
    peak_bytes = script.peak_rss_bytes(os.getpid()) - usual_bytes
    path, _ = state.generations(folder, "bench")
    began_s = time.perf_counter()
    loaded = state.load(path, bytes(8), "bench")
    for chunk in island.wanted():
        island.put(chunk, loaded.read(chunk))
    read_s = time.perf_counter() - began_s
    return {
        "parameters": count,
        "usual_step_s": usual_s,
        "steps": steps,
        "checkpoints": len(saved),
        "cost_share": (sum(saving_s) - len(saving_s) * usual_s) / sum(quiet_s + saving_s),
        "checkpoint_bytes": path.stat().st_size,
        "peak_bytes": peak_bytes,
        "bytes_a_parameter": peak_bytes / count,
        "read_s": read_s,
        "held": island.capture().held,
    }


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    how = "steps wait while a state is read" if result["held"] else "a state is copied first"
    print(f"{result['parameters'] / 1e6:.1f}M parameters, steps of {1e3 * result['usual_step_s']:.0f} ms; {how}")
    print(f"{result['checkpoints']} checkpoints of {result['checkpoint_bytes'] / MIB:.0f} MiB in {result['steps']} steps")
    print(f"cost {100 * result['cost_share']:.1f} % of the steps' time")
    print(f"peak {result['peak_bytes'] / MIB:.0f} MiB above steps alone, {result['bytes_a_parameter']:.2f} bytes a parameter")
    print(f"checked, and its model read, in {result['read_s']:.2f} s")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=32_000_000)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    os.environ["BENCH_STEP_S"] = str(arguments.step_s)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        result = measure(arguments.parameters, arguments.seconds, Path(folder))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
