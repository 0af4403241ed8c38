"""Learners of JAX and of PyTorch in one run: the loss that the run ends at, by the frameworks of its two learners.

Trials in virtual time (docs/lab.md): the services' own code, equal steps, and no learner begins later than the other, which
moves the loss of a run this short by more than its seed does. All three begin with the same values.

    python bench/frameworks.py --tokens 200000 --seeds 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diloco.process import observe
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_lab.paces.times import Paces, steady
from diloco_lab.trial import Trial
from diloco_learner.jax.island import Island
from diloco_learner.pytorch.island import TorchIsland, TorchStepOutput
from diloco_learner.pytorch.task import load_task as load_torch
from diloco_learner.task import load_task
from diloco_learner.task_api import first_batch

TASK = "torch_gpt:make"
MIXES = (("jax", "jax"), ("jax", "torch"), ("torch", "torch"))
STEP_S = 0.1  # of virtual time


class OfTorch(TorchIsland):
    """An island of PyTorch with the calls that a trial makes."""

    def step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> TorchStepOutput:
        return self.begin_step(batch, learning_rate, at)


def play(settings: RunSettings, mix: tuple[str, str]) -> tuple[float, list[float]]:
    """Return the validation loss at the end, and by learner the share of versions that it is in."""
    frameworks: Iterator[str] = iter(mix)
    own = settings.model_copy(update={"task": settings.task.model_copy(update={"name": TASK})})

    class Mixed(Island):
        """Its twins are of the frameworks, in turn."""

        def twin(self) -> Any:
            if next(frameworks) == "jax":
                return super().twin()
            other = OfTorch(load_torch(own.task, None), own)
            other.rehearse(first_batch(self.task, settings))
            for fragment in self.fragments().fragments:
                other.write(fragment, self.read(fragment).to_host())
            return other

    paces = Paces([steady(STEP_S) for _ in mix])
    played = Trial(settings, load_task(settings.task, None), paces, island=Mixed).play()
    return played.loss, played.shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    observe.configure("bench", "frameworks", level="error")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    for mix in MIXES:
        losses = []
        for seed in range(asked.seeds):
            settings = run_settings(overrides={"learners": 2, "seed": seed, "tokens": asked.tokens})
            loss, shares = play(settings, mix)
            losses.append(loss)
            print(f"{' and '.join(mix)}, seed {seed}: loss {loss:.4f}; versions with each: {shares}", flush=True)
        print(f"{' and '.join(mix)}: mean {np.mean(losses):.4f}, from {min(losses):.4f} to {max(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
