"""An invented framework, installed as any distribution is: a module, and the folder of its metadata, on Python's path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

THIRD = '''
from diloco_learner.jax_framework import JaxFramework

class Third(JaxFramework):
    """Tasks with begin(), which JAX computes in truth."""

    wants, module, one_process = "begin()", "third_learner", True

    def claims(self, task): return hasattr(task, "begin")

    def load(self, task, settings, data, cache_dir):
        kind = type(task)
        return super().load(type(kind.__name__, (kind,), {"init": kind.begin})(), settings, data, cache_dir)

    def devices(self): return ["abacus"]
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = THIRD) -> None:
    """Put a distribution ``third`` whose module ``third_framework`` has this code into a folder, and onto the path."""
    (folder / "third_framework.py").write_text(code)
    about = folder / "third-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[diloco.frameworks]\nthird = third_framework:Third\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_framework", raising=False)
