"""A toy learner: a member of a run like any other, whose model is two small regressions in NumPy.

``python -m tests.services.toy --config FILE`` runs one as a process, configured as a learner is. ``Toy`` in a thread does the
same in the test's own process, where a test can hold it between two steps.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco import membership, observe, service
from diloco.core.fragments import FragmentMap, TensorSpec, build_map
from diloco.member import Boundary, Member, StepDone
from diloco.nats.connection import Link
from diloco.observe import Logger
from diloco.settings import LearnerSettings, RunSettings, TaskSettings

Vector = NDArray[np.float32]
Tensors = dict[str, Vector]

SAMPLES = 16  # of a step; each is a token
TABLE_WIDTH = 4
STEP_S = 0.02
LEARNING_RATE = 0.1
NOISE = 0.05
IDLE_S = 0.2


class Regression:
    """Learn y = W x + b and a table, from noisy samples. The truth is the seed's, the samples are the share's.

    ``task.width`` is that of W, which stays small: a matrix product of some size would keep other threads from their cores.
    ``task.context`` is the number of the table's rows, and may be large.
    """

    def __init__(self, settings: TaskSettings, seed: int, share: int) -> None:
        width = settings.width
        truth, self.rng = np.random.default_rng(seed), np.random.default_rng((seed, share))
        self.true_weight, self.true_bias = truth.normal(size=(width, width)), truth.normal(size=width)
        self.true_table = truth.normal(size=(settings.context, TABLE_WIDTH)).astype(np.float32)
        self.tensors: Tensors = {
            "linear/weight": np.zeros((width, width), np.float32),
            "linear/bias": np.zeros(width, np.float32),
            "table": np.zeros((settings.context, TABLE_WIDTH), np.float32),
        }

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors; the table is embedding-like."""
        return [TensorSpec(path, tensor.shape, path == "table") for path, tensor in self.tensors.items()]

    def step(self) -> float:
        """One step of gradient descent; the loss of its samples."""
        width = len(self.true_bias)
        x = self.rng.normal(size=(SAMPLES, width))
        error = x @ self.tensors["linear/weight"].T + self.tensors["linear/bias"]
        error -= x @ self.true_weight.T + self.true_bias + NOISE * self.rng.normal(size=(SAMPLES, width))
        table_error = self.tensors["table"] - self.true_table
        table_error += np.float32(NOISE * self.rng.normal())
        loss = float((error**2).mean() + (table_error**2).mean())
        if not np.isfinite(loss):
            return loss  # as a learner's guarded step does: what is spoilt stays, and spoils nothing else
        self.tensors["linear/weight"] -= (LEARNING_RATE / SAMPLES * error.T @ x).astype(np.float32)
        self.tensors["linear/bias"] -= (LEARNING_RATE * error.mean(0)).astype(np.float32)
        self.tensors["table"] -= np.float32(LEARNING_RATE) * table_error
        return loss

    def distance(self, tensors: Mapping[str, NDArray[Any]]) -> float:
        """Mean squared error of ``tensors`` against the truth, relative to that of the initial zeros."""
        truth: dict[str, NDArray[Any]] = {
            "linear/weight": self.true_weight,
            "linear/bias": self.true_bias,
            "table": self.true_table,
        }
        wrong = sum(float(np.square(tensors[path] - true).sum()) for path, true in truth.items())
        return wrong / sum(float(np.square(true).sum()) for true in truth.values())


@dataclass
class Toy:
    """One toy learner. ``start()`` runs it in a thread; ``failure`` is what ended it, if it was an error."""

    settings: LearnerSettings
    log: Logger
    before_step: Callable[[Toy], None] = lambda toy: None  # in the trainer's thread; may wait, or spoil the parameters
    hands_over: Callable[[Toy], bool] = lambda toy: True  # whether snapshots are handed over at this boundary
    specs: Callable[[Regression], list[TensorSpec]] = lambda task: task.specs
    finished: bool = False
    failure: BaseException | None = None
    member: Member | None = None
    task: Regression | None = None
    thetas: dict[int, Vector] = field(default_factory=dict)  # by fragment: the version last applied
    _stopping: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _main: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Run in a thread."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it wherever it is, and wait for its thread."""
        self._stopping.set()
        if self._thread is not None and self._loop is not None and self._main is not None:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as error:
            self.failure = error

    async def serve(self) -> None:
        """Join the run, and train to its end."""
        self._loop, self._main = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
        link = await service.connect(self.settings, self.log)
        try:
            await self._take_part(link)
        finally:
            await link.close()

    async def _take_part(self, link: Link) -> None:
        run = await membership.find(link, self.settings.run, self.log)
        task = self.task = Regression(run.settings.task, run.settings.seed, self.settings.share)
        fragments = build_map(self.specs(task), run.settings.fragments.count, run.settings.fragments.strategy)
        member = self.member = Member(link, run, fragments, self.settings, self.log)
        try:
            await member.join(lambda: [fragment.gather(task.tensors) for fragment in fragments.fragments])
            await asyncio.to_thread(self._train, member, task, run.settings)
        finally:
            self._stopping.set()  # a cancelled wait does not end the thread
            await member.close()

    def _train(self, member: Member, task: Regression, settings: RunSettings) -> None:
        done: StepDone | None = None
        while not self._stopping.is_set():
            boundary = member.boundary(done)
            done = None
            self._write(boundary, member.map, task, settings.apply.alpha)
            if self.hands_over(self):
                for index in boundary.reads:
                    snapshot = member.map.fragments[index].gather(task.tensors)
                    member.submit(index, lambda snapshot=snapshot: snapshot)  # type: ignore[misc]
            if boundary.finished:
                self.finished = True
                return
            if boundary.stop or boundary.wait:
                member.wait(IDLE_S)
                continue
            self.before_step(self)
            began_s = time.perf_counter()
            loss = task.step()
            time.sleep(max(0.0, STEP_S * self.settings.slow + began_s - time.perf_counter()))
            done = StepDone(SAMPLES, loss, time.perf_counter() - began_s, 0.0)

    def _write(self, boundary: Boundary, fragments: FragmentMap, task: Regression, alpha: float) -> None:
        for index, applied in boundary.applies:
            fragment = fragments.fragments[index]
            old = fragment.gather(task.tensors)
            new = applied.theta
            if applied.reference is not None:
                new = new + np.float32(applied.factor) * (old - applied.reference)
            if alpha:
                new = np.float32(alpha) * old + np.float32(1 - alpha) * new
            fragment.scatter(new, task.tensors)
            self.thetas[index] = applied.theta

    def result(self) -> dict[str, Any]:
        """What a process of this learner leaves behind."""
        return {
            "finished": self.finished,
            "thetas": {str(index): blake3(theta.tobytes()).hexdigest() for index, theta in sorted(self.thetas.items())},
        }


def _process() -> int:
    settings = service.parse_settings(LearnerSettings, "toy")
    toy = Toy(settings, observe.get_logger())
    asyncio.run(toy.serve())
    (settings.state_dir / f"{settings.name}.json").write_text(json.dumps(toy.result()))
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_process, "toy"))
