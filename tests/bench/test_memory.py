"""The benchmark of memory runs, and says what it should, at a size at which its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

MEMORY = Path(__file__).parents[2] / "bench" / "memory.py"


@pytest.mark.slow  # `make bench` runs it, too
def test_json_output() -> None:
    sizes = ["--parameters", "200000", "--fragments", "3", "--learners", "1", "--cycles", "1"]
    done = subprocess.run(
        [sys.executable, str(MEMORY), *sizes, "--json"], capture_output=True, text=True, timeout=4 * DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["parameters"], result["fragments"], result["learners"], result["cycles"]) == (200_000, 3, 1, 1)
    assert result["target_bytes"] == 16
    assert result["syncer_base_bytes"] > 10 << 20  # an interpreter with NumPy
    assert list(result["stages"]) == ["joining", "rounds in turn", "rounds at once"]
    for stage in result["stages"].values():
        assert stage.keys() == {"syncer", "learner"}
    # a learner that has joined holds more than it did before: at least base and momentum
    assert result["stages"]["rounds in turn"]["learner"] >= 8
