"""An invented framework, installed as any distribution is: its modules, and the folder of its metadata, on Python's path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

THIRD = '''
from diloco_learner.jax_framework import JaxFramework

class Weight:
    """A third framework's parameters: one array that it holds itself."""

    def __init__(self, array): self.array = array

class Third(JaxFramework):
    """Tasks with begin(), which JAX computes in truth."""

    wants, module, one_process = "begin()", "third_learner", True

    def claims(self, task): return hasattr(task, "begin")

    def load(self, task, settings, data, cache_dir):
        kind = type(task)
        return super().load(type(kind.__name__, (kind,), {"init": kind.begin})(), settings, data, cache_dir)

    def devices(self): return ["abacus"]

    def parameters(self, params):
        from diloco_learner.api.trees import Tree

        return Tree({"weight": params.array}) if isinstance(params, Weight) else None
'''
LEARNER = """
from diloco_learner import frameworks

def load(settings, data, cache_dir=None):
    return frameworks.load(settings, data, cache_dir).task

if __name__ == "__main__":
    from diloco_learner import service
    from diloco_learner.jax import beginning

    beginning.load_task = load
    service.main()
"""
TASK = """
import itertools
import numpy as np

class Mine:
    tokens_per_batch = 4
    def begin(self, key): return {"weight": np.ones((2, 3), np.float32)}
    def loss(self, params, batch): return ((params["weight"] - batch) ** 2).mean()
    def batches(self, share, shares, seed, start): return itertools.repeat(np.float32(2))
    def validation(self): return [np.float32(2)]

def make(settings, data): return Mine()
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = THIRD) -> None:
    """Put a distribution ``third`` whose module ``third_framework`` has this code into a folder, and onto the path.

    Processes that are started find it, too, its learner, and a task ``of_third:make``.
    """
    for name, text in (("third_framework", code), ("third_learner", LEARNER), ("of_third", TASK)):
        (folder / f"{name}.py").write_text(text)
    about = folder / "third-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[diloco.frameworks]\nthird = third_framework:Third\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_framework", raising=False)
