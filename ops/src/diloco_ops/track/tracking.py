"""A run's statuses on their way to its trackers, which may be slow: nothing waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco_ops.track.trackers import Tracker
from diloco_ops.track.values import Statuses, Value, at_end

FOLDER = "tracking"  # below a run's directory: one folder for each tracker


class Tracking:
    """Writes the newest status while it is entered, and once more when it is left.

    Trackers that are slower than statuses come miss those in between; one that fails misses that one.
    """

    def __init__(self, trackers: Sequence[Tracker], log: Logger) -> None:
        self._trackers, self._complaint = trackers, Complaint(log)
        self._statuses, self._newest, self._began_s = Statuses(), dict[str, Any](), time.time()
        self._noted, self._over, self._last = asyncio.Event(), False, list[Value]()

    def note(self, status: Mapping[str, Any]) -> None:
        """Take a status."""
        self._newest = dict(status)
        self._noted.set()

    def conclude(self, report: Mapping[str, Any]) -> None:
        """Take the report, at the run's end."""
        self._last = at_end(report)

    async def __aenter__(self) -> Tracking:
        self._work = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._noted.set()
        await self._work
        await asyncio.to_thread(self._write, self._statuses.new(self._last))
        await asyncio.to_thread(self._with_each, lambda tracker: tracker.close())

    async def _write_all(self) -> None:
        while True:
            await self._noted.wait()
            self._noted.clear()
            over = self._over
            if self._newest:
                await self._write_newest()
            if over:
                return

    async def _write_newest(self) -> None:
        try:
            values, self._began_s = self._statuses.read(self._newest), time.time() - float(self._newest["wall_s"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # something else answers in a coordinator's place
            self._complaint.warn("status_damaged", reason=repr(error))
        else:
            await asyncio.to_thread(self._write, values)

    def _write(self, values: Sequence[Value]) -> None:
        self._with_each(lambda tracker: tracker.write(values, self._began_s))

    def _with_each(self, work: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                work(tracker)
            except OSError as error:  # the disk is full, which is no reason to end a run
                self._complaint.warn("not_tracked", reason=str(error))
            else:
                self._complaint.over()
