"""The event loop, the connection and the clock of a joined loop."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from diloco.process.observe import Logger
from diloco.service import skeleton
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco_learner.run.process import LoopThread
from diloco_learner.run.trainer import Steered

T = TypeVar("T")


class Surroundings(Protocol):
    """The event loop, the connection and the clock of a joined loop: live ones, or those of :mod:`diloco.testing`."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the event loop, and wait for it."""

    async def connect(self, settings: LearnerSettings, log: Logger, within_s: float) -> Transport:
        """Return a connection to the run's server.

        Raises:
            BrokerError: it does not answer in time.
        """

    def wait(self, steered: Steered, timeout_s: float) -> None:
        """Wait until there is something new for a boundary, at most that long."""

    def end_step(self) -> None:
        """Hear that the loop has taken a step."""

    def now_s(self) -> float:
        """Return the time, by a clock that never goes back."""

    def close(self) -> None:
        """End the event loop."""


class LiveSurroundings:
    """An event loop in a thread of its own, and NATS."""

    def __init__(self) -> None:
        self._thread = LoopThread()
        self.close = self._thread.close
        self.now_s = time.perf_counter

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work, lambda: False)

    async def connect(self, settings: LearnerSettings, log: Logger, within_s: float) -> Transport:
        return await skeleton.connect(settings, "learner", log, give_up_after_s=within_s)

    def wait(self, steered: Steered, timeout_s: float) -> None:
        steered.wait(timeout_s)

    def end_step(self) -> None:
        pass  # it has taken its time
