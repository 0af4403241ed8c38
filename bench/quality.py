"""References for the decoupled run's loss, at equal tokens. Prints nats per byte on the same held-out text.

    python bench/quality.py --seeds 0 1 2                       # data-parallel, one learner alone, and the n-gram models
    python bench/quality.py --seeds 0 1 2 --report run-0 run-1  # with the real runs of `diloco up --run-dir run-0` beside it
    python bench/quality.py --runs lockstep --set outer.learning_rate=0.2   # search settings without the network

* data-parallel: one model, every step on the batches that the learners' shares would have given together (same tokens, same
  global batch, same inner settings);
* alone: one learner on its own share for as many steps as each of the learners takes;
* lockstep: the decoupled algorithm with the project's own kernels in one process. All learners take their steps at the same
  time and every round merges all of them, ``overlap_steps`` after it was opened: no stragglers, no network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import script
from numpy.typing import NDArray

from diloco.core import outer, quantise
from diloco.core.fragments import Fragment, TensorSpec, build_map
from diloco.core.merge import Accumulator
from diloco.core.merging import outer_rates
from diloco.core.schedule import Moment
from diloco.core.weights import weight
from diloco.errors import DilocoError
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_lab.experiment.methods import one_model, steps_of_each
from diloco_learner.inner import learning_rate
from diloco_learner.island import Island
from diloco_learner.ngram import ngram_losses
from diloco_learner.task import GptTask, load_task

Vector = NDArray[np.float32]


def data_parallel(settings: RunSettings, task: GptTask) -> Island:
    """One model on the batches of all shares."""
    return one_model(settings, task, range(settings.learners))


def alone(settings: RunSettings, task: GptTask) -> Island:
    """One learner on its share, by the run's learning rate schedule."""
    return one_model(settings, task, [0])


class GlobalFragment:
    """The global value of a fragment, and the displacements of all learners that become its next version."""

    def __init__(self, fragment: Fragment, theta: Vector, settings: RunSettings) -> None:
        self.fragment, self.theta, self.settings = fragment, theta, settings
        self.optimizer = outer.optimizer(settings, fragment)
        self.momentum, self.residual = np.zeros(self.optimizer.moments * theta.size, np.float32), np.zeros_like(theta)
        self.errors = [np.zeros_like(theta) for _ in range(settings.learners)]
        self.version = 0

    def merge(self, snapshots: list[Vector], steps: int, tokens_per_step: int, tokens_done: int) -> None:
        """Take the outer step from the learners' snapshots after ``steps`` inner steps since the version they began from.

        All learners had done ``tokens_done`` by then.
        """
        codec, choice = self.settings.codec, self.settings.merge
        accumulator = Accumulator.of(self.fragment, choice)
        for value, error in zip(snapshots, self.errors, strict=True):
            gradient = value if self.settings.outer.optimizer == "adamw" else self.theta - value
            body = self._quantised(gradient, error, codec.offer_bits)
            accumulator.add(body, codec.offer_bits, weight(steps * tokens_per_step, steps, choice.weights))
        body = self._quantised(accumulator.result(), self.residual, codec.record_bits)
        self.version += 1
        step = self.optimizer.at(self.version, *outer_rates(self.settings, tokens_done))
        outer.fold(self.theta, self.momentum, body, codec.record_bits, step)

    def _quantised(self, values: Vector, error: Vector, bits: int) -> NDArray[np.uint8]:
        if not self.settings.codec.error_feedback:
            return quantise.quantise(values, bits)
        values += error
        return quantise.quantise(values, bits, error=error)


def lockstep(settings: RunSettings, task: GptTask) -> Island:
    """Run the decoupled algorithm, all learners in step; return the global model after a closing round of everything."""
    islands = [Island(task, settings) for _ in range(settings.learners)]
    specs = [TensorSpec(*tensor) for tensor in islands[0].tensors()]
    fragments = build_map(specs, settings.fragments.count, settings.fragments.strategy).fragments
    state = [GlobalFragment(fragment, islands[0].read(fragment).to_host(), settings) for fragment in fragments]
    interval = settings.round.steps
    overlap = 0 if settings.round.learners_wait else round(settings.round.overlap_steps)
    if overlap >= interval:
        raise SystemExit("lockstep: round.overlap_steps must be less than round.steps")
    shares = [task.batches(share, settings.learners, settings.seed, 0) for share in range(settings.learners)]
    tokens = settings.learners * task.tokens_per_batch
    since = [0] * len(fragments)  # inner steps since the version
    read: dict[int, tuple[int, list[Vector]]] = {}  # what was offered, and after how many steps
    count = steps_of_each(settings, task)
    for step in range(1, count + 1):
        rate = learning_rate(settings, Moment((step - 1) * tokens, settings.tokens))
        outputs = [island.step(next(share), rate) for island, share in zip(islands, shares, strict=True)]
        for output in outputs:
            output.wait()
        for index, fragment in enumerate(fragments):
            since[index] += 1
            phase = (step - interval * index // len(fragments) - 1) % interval
            if step == count or (phase == 0 and (step > 1 or interval == 1)):
                read[index] = since[index], [island.snapshot(fragment).to_host() for island in islands]
            if index in read and (step == count or phase == overlap):
                state[index].merge(read[index][1], read.pop(index)[0], task.tokens_per_batch, (step - 1) * tokens)
                since[index] = 0
                for island in islands:
                    island.write(fragment, state[index].theta.copy())
    return islands[0]


RUNS: dict[str, Callable[[RunSettings, GptTask], Island]] = {
    "data-parallel": data_parallel,
    "alone": alone,
    "lockstep": lockstep,
}


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, help="token budget; default: the settings'")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=["data-parallel", "alone"])
    parser.add_argument("--report", type=Path, nargs="*", default=[], help="run directories of real runs")
    parser.add_argument("--preset", default="decoupled")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data")
    parser.add_argument("--sample", type=int, default=0, help="print so many characters drawn from each model")
    arguments = parser.parse_args()
    try:
        rows = measure(arguments)
    except DilocoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if arguments.json:
        print(json.dumps(rows, indent=2))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows asked for, printed as they come unless JSON is wanted."""
    rows: list[dict[str, Any]] = []

    def row(name: str, seed: int | None, val_loss: float, **more: Any) -> None:
        rows.append({"run": name, "seed": seed, "val_loss": val_loss} | more)
        if not arguments.json:
            extra = "  ".join(f"{key} {value}" for key, value in more.items())
            print(f"{name:28} {'-' if seed is None else seed:>4}  {val_loss:.4f}  {extra}", flush=True)

    overrides = parse_assignments(arguments.set)
    if arguments.tokens:
        overrides["tokens"] = arguments.tokens
    settings = run_settings(arguments.preset, overrides)
    task = load_task(settings.task, arguments.data)
    if not isinstance(task, GptTask):
        raise SystemExit("quality: only the built-in task has the shares this compares")
    if not arguments.json:
        print(f"{'run':28} seed  nats/byte")
    for order, loss in ngram_losses(task.data.corpus.training_text(), task.data.corpus.to_evaluate.text).items():
        row(f"{order}-gram", None, loss)
    for directory in arguments.report:
        report = json.loads((directory / "report.json").read_text())
        row(f"real: {directory.name}", report["settings"].get("seed"), report["val_loss"], wall_s=report["wall_s"])
    for seed in arguments.seeds:
        for name in arguments.runs:
            began_s = time.perf_counter()
            island = RUNS[name](settings.model_copy(update={"seed": seed}), task)
            row(name, seed, island.evaluate(), wall_s=round(time.perf_counter() - began_s))
            if arguments.sample:
                print(island.sample(seed, arguments.sample))
    return rows


if __name__ == "__main__":
    script.with_allocator()
    with tempfile.TemporaryDirectory() as cache:
        # the learners of a lockstep run share one compilation
        jax.config.update("jax_compilation_cache_dir", cache)  # type: ignore[no-untyped-call]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
        main()
