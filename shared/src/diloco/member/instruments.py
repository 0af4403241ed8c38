"""Figures that a learner shows of itself besides its heartbeat: learning rate, gradients' norm, processor and memory.

The trainer notes its steps, this process's own figures are read when they are sent. Nothing goes by them: they are shown.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from diloco.wire.control import MAX_PLACE, Gauges

FIRST_GAUGES_S = 0.5  # before the first message; then twice as long each time
GAUGES_S = 5.0  # between two messages, at most
_STATM = Path("/proc/self/statm")


class Instruments:
    """The figures of one learner's process.

    Args:
        device: what it computes on, in words.
        device_bytes: memory in use on its devices; None: not known.
    """

    def __init__(self, device: str = "", device_bytes: Callable[[], int | None] = lambda: None) -> None:
        self.device, self._device_bytes = device, device_bytes
        self._learning_rate: float | None = None
        self._gradient_norm: float | None = None
        self._read_s, self._processor_s = time.monotonic(), time.process_time()

    def note_step(self, learning_rate: float, gradient_norm: float) -> None:
        """Note a step's learning rate, and the norm of its gradients. From any thread."""
        self._learning_rate = learning_rate
        self._gradient_norm = gradient_norm if math.isfinite(gradient_norm) else None

    def read(self, learner: str) -> Gauges:
        """Return the figures as of now; processor: of the time since the last reading."""
        now_s, processor_s = time.monotonic(), time.process_time()
        passed_s, used_s = now_s - self._read_s, processor_s - self._processor_s
        self._read_s, self._processor_s = now_s, processor_s
        return Gauges(
            learner=learner,
            learning_rate=self._learning_rate,
            gradient_norm=self._gradient_norm,
            cores=used_s / passed_s if passed_s > 0 else 0.0,
            memory_bytes=resident_bytes(),
            device_memory_bytes=self._device_bytes(),
            device=_fitting(self.device),
            host=_fitting(socket.gethostname()),
        )

    async def send(self, learner: str, send: Callable[[Gauges], Awaitable[None]]) -> None:
        """Send the figures again and again, at first more often: a short run has some, too."""
        pause_s = FIRST_GAUGES_S
        while True:
            await asyncio.sleep(pause_s)
            await send(self.read(learner))
            pause_s = min(2 * pause_s, GAUGES_S)


def resident_bytes() -> int:
    """Return this process's resident memory; on systems that do not say it, the most that it ever was."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _fitting(text: str) -> str:
    return text[:MAX_PLACE].encode(errors="replace").decode()
