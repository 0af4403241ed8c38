"""The syncer and the coordinator run where there is no JAX, no PyTorch and no trainer."""

from __future__ import annotations

import subprocess
import sys

from tests.pace import DEADLINE_S

FORBIDDEN = """
import importlib, pkgutil, sys

TRAINERS = ("accelerate", "lightning", "transformers")
FRAMEWORKS = ("jax", "jaxlib", "optax", "torch", "diloco_learner")
OF_A_TRAINER = {f"diloco.integrations.{name}" for name in (*TRAINERS, "torch_data")}  # each imports its own
OF_A_STORE = {"diloco.storage.cloud_store", "diloco.storage.hub_store"}  # each imports the store's library

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in TRAINERS + FRAMEWORKS:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Forbid())
count = 0
for package in ("diloco", "diloco_syncer", "diloco_coordinator"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__") and module.name not in OF_A_TRAINER | OF_A_STORE:
            importlib.import_module(module.name)
            count += 1
print(count)
"""


def test_all_but_the_learner_imports_without_a_framework() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30  # modules, so that the walk has found them
