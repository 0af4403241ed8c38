"""The viewers of a page: each is sent the parts that changed since it was sent some, and none is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from diloco.process.tasks import end
from diloco_coordinator.page.drawing import FRAME_S, Drawing

QUIET_S = 15.0  # without a frame a viewer is sent an empty one: it looks for another connection after three times as long
LAST_FRAME_S = 5.0  # for viewers to take the end of a run and its report: as long as they need who read at all


class Viewers:
    """Viewers of one drawing, which is drawn again and again while there are any.

    ``frames``: drawn while there was a viewer. ``dropped``: of these, those that a viewer did not take before the next one was
    drawn, or before it was cut off.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.count: int = 0
        self.dropped: int = 0
        self.frames = 0
        self._drawn = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def watch(self, state: str) -> AsyncGenerator[tuple[str, dict[str, str]], None]:
        """Yield states, each with the parts that changed on the way there, until the run is over; at times without any."""
        self.count += 1
        if self._task is None:
            self._task = asyncio.create_task(self._draw())
        taken = self.frames
        try:
            while True:
                over = self.drawing.source.over
                if over or not self.drawing.number:
                    await self.drawing.draw()
                drawn, now = self._drawn, self.drawing.state
                self.dropped += max(0, self.frames - taken - 1)
                taken = self.frames
                parts = self.drawing.since(state)
                state = now
                yield state, parts
                if over:
                    return
                try:
                    async with asyncio.timeout(QUIET_S):
                        await drawn.wait()
                except TimeoutError:
                    continue
        finally:
            self.count -= 1
            self.dropped += self.frames - taken

    async def _draw(self) -> None:
        while self.count:
            number = self.drawing.number
            await self.drawing.draw()
            if self.drawing.number != number or self.drawing.source.over:
                self.frames += 1
                self._drawn.set()
                self._drawn = asyncio.Event()
            await asyncio.sleep(FRAME_S)
        self._task = None

    async def close(self) -> None:
        """End the drawing; of a run that is over viewers are shown the end."""
        if self._task is not None:
            if self.drawing.source.over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_FRAME_S):
                        await self._task
            await end(self._task)
