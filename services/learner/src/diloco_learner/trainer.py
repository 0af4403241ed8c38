"""A learner's main loop: inner steps, and at each boundary what the member says. Nothing in it waits but for the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco.member import Boundary, Member, StepDone
from diloco.observe import Logger
from diloco.settings import RunSettings
from diloco_learner.inner import learning_rate
from diloco_learner.island import Island

IDLE_S = 0.5
LOG_EVERY_S = 10.0


class Trainer:
    """Trains an island in step with a member. ``stopping`` says whether this process was asked to end."""

    def __init__(
        self,
        island: Island,
        member: Member,
        batches: Iterator[Any],
        settings: RunSettings,
        log: Logger,
        *,
        tokens_per_batch: int,
        slow: float,
        stopping: Callable[[], bool],
    ) -> None:
        self.island, self.member, self.batches, self.settings, self.log = island, member, batches, settings, log
        self.tokens_per_batch, self.slow, self.stopping = tokens_per_batch, slow, stopping

    def run(self) -> bool:
        """Step until the run is over (True) or this process is asked to end (False)."""
        done: StepDone | None = None
        batch = next(self.batches)
        ended_s = logged_s = time.perf_counter()
        while not self.stopping():
            boundary = self.member.boundary(done)
            self.write(boundary)
            done = None
            if boundary.finished:
                return True
            if boundary.stop or boundary.wait:
                self.member.wait(IDLE_S)
                if boundary.stop:
                    ended_s = time.perf_counter()  # what comes after the budget is nobody's blocked time
                continue
            rate = learning_rate(self.settings.inner, self.member.schedule_tokens(), self.settings.tokens)
            began_s = time.perf_counter()
            output = self.island.step(batch, rate)
            batch = next(self.batches)  # the next batch is made while the step runs
            loss = output.wait()
            busy_s = time.perf_counter() - began_s
            if self.slow > 1:
                time.sleep(busy_s * (self.slow - 1))
            now_s = time.perf_counter()
            if not math.isfinite(loss):
                self.log.warning("step_not_finite", step=self.member.step, loss=str(loss))
                loss = 0.0 if self.member.loss is None else self.member.loss
            done = StepDone(self.tokens_per_batch, loss, now_s - began_s, began_s - ended_s)
            ended_s = now_s
            if now_s - logged_s >= LOG_EVERY_S:
                logged_s = now_s
                self.log.info("stepping", step=self.member.step, loss=round(loss, 4), learning_rate=round(rate, 6))
        return False

    def write(self, boundary: Boundary) -> None:
        """Write the versions of a boundary into the island, and hand readers to the member."""
        for fragment, applied in boundary.applies:
            keep = None if applied.reference is None else (applied.reference, applied.factor)
            self.island.write(self.member.map.fragments[fragment], applied.theta, keep, self.settings.apply.alpha)
        for fragment in boundary.reads:
            self.member.submit(fragment, self.island.read(self.member.map.fragments[fragment]).to_host)
