"""Real commands on a tiny GPT, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tests.made.fixtures import Ended
from tests.pace import DEADLINE_S

DILOCO = str(Path(sys.executable).parent / "diloco")


TINY_GPT = {
    "task.layers": 1,
    "task.width": 16,
    "task.heads": 2,
    "task.context": 16,
    "task.batch": 4,
    "fragments.count": 4,
    "round.steps": 12,
    "inner.optimizer": "adamw",  # which compiles three times as fast as Muon
    "liveness.heartbeat_s": 0.2,
    "log.keyframe_factor": 1000,
}


class Running:
    """A command in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([DILOCO, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> Ended:
        """Wait for its end."""
        try:
            out, err = self.process.communicate(timeout=2 * DEADLINE_S)
        finally:
            self.kill()
        assert "Traceback" not in out + err
        return Ended(self.process.returncode, out, err)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def some_text() -> str:
    """Sentences of a few words, so that there is something to learn."""
    rng = np.random.default_rng(5)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    return "\n".join(" ".join(words[i] for i in rng.integers(0, len(words), 12)) for _ in range(2000))


def wait_for_training(up: Running, directory: Path, learners: int = 1) -> None:
    """Wait until so many learners have taken steps, and some work is merged."""
    deadline_s = time.monotonic() + DEADLINE_S * 2
    while time.monotonic() < deadline_s:
        assert up.process.poll() is None, up.end()
        file = directory / "status.json"
        if file.exists():
            with contextlib.suppress(ValueError):  # being written
                status = json.loads(file.read_text())
                at_work = [learner for learner in status["learners"].values() if learner["step"]]
                if status["tokens_merged"] and len(at_work) >= learners:
                    return
        time.sleep(0.1)
    raise AssertionError("no training within the deadline")
