"""Real commands on a tiny GPT, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.made.fixtures import Ended
from tests.pace import DEADLINE_S

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.core.run.changes import Tokens
from diloco.errors import BrokerError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir
from diloco_ops.checkpoints import checkpoint
from diloco_ops.checkpoints.manifest import RunCheckpoint

DILOCO = str(Path(sys.executable).parent / "diloco")
TINY_MODEL: dict[str, Any] = {
    "task.layers": 1,
    "task.width": 16,
    "task.heads": 2,
    "task.context": 16,
    "task.batch": 4,
    "fragments.count": 4,
    "round.steps": 12,
}
TINY_GPT: dict[str, Any] = TINY_MODEL | {
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

    def trains(status: dict[str, Any]) -> bool:
        at_work = [learner for learner in status["learners"].values() if learner["step"]]
        return bool(status["tokens_merged"]) and len(at_work) >= learners

    wait_for_status(up, directory, trains, "training")


def wait_for_status(up: Running, directory: Path, reached: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Wait until the status that the command writes every few seconds is so; return it."""
    deadline_s = time.monotonic() + 2 * DEADLINE_S  # several processes import JAX and compile, one after the other
    status: dict[str, Any] = {}
    while time.monotonic() < deadline_s:
        assert up.process.poll() is None, up.end()
        with contextlib.suppress(OSError, ValueError):  # not there yet, or being written
            status = json.loads((directory / "status.json").read_text())
            if reached(status):
                return status
        time.sleep(0.1)
    raise AssertionError(f"not within {2 * DEADLINE_S:g} s: {what}; the last status is {status}")


def checkpoint_of_run(directory: Path) -> RunCheckpoint:
    """Take a checkpoint of a run that goes on, with the state of every learner that is heard.

    It is taken again where a server or a learner did not answer in time, or a learner had gone beyond the cut.
    """
    deadline_s = time.monotonic() + 2 * DEADLINE_S
    problems: list[str] = []
    while time.monotonic() < deadline_s:
        try:
            taken, problems = asyncio.run(checkpoint.take(directory))
        except BrokerError as error:
            problems = [str(error)]
            continue
        learners = taken.manifest.learners.values()
        if learners and not problems and all(learner.step is not None for learner in learners):
            return taken
        shutil.rmtree(taken.path)
    raise AssertionError(f"{directory}: no whole checkpoint within {2 * DEADLINE_S:g} s: {problems}")


def set_budget(directory: Path, url: str, tokens: int) -> None:
    """Give the run of a directory another token budget, as ``diloco set`` does; ``url``: where its server is now."""

    async def change() -> None:
        known = rundir.load(directory)
        link = await NatsTransport.open(url, url, "test", get_logger(), DEADLINE_S)
        try:
            run = await creation.open_run(link, known.name, known.settings)
            await append_changes(link, run, lambda _: [Tokens(tokens)], author="test")
        finally:
            await link.close()

    asyncio.run(change())
