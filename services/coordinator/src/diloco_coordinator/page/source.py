"""The report of a run as one coordinator has it: from its own monitor while it leads, else as the leading one stored it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from diloco.control.creation import KnownRun
from diloco.control.history import Past
from diloco.errors import DilocoError
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.transport import Bucket
from diloco_coordinator import overview
from diloco_coordinator.history import RunHistory
from diloco_coordinator.origin import preliminary_at_s

if TYPE_CHECKING:
    from diloco_coordinator.service import Coordinator

READ_EVERY_S = 5.0  # of the stored history, by a coordinator that stands by; the leader writes it every ten or more
ANSWER_S = 2.0  # for the bucket's answer: without it the page shows the history that was read before


class StoredHistory:
    """The history that the leading coordinator stored, as a page reads it: again when it is no longer new."""

    def __init__(self, registry: Bucket, log: Logger, beside: Callable[[], Awaitable[object]] | None = None) -> None:
        """``beside``: is read together with it."""
        self.past: Past | None = None
        self._history, self._beside = RunHistory(registry), beside
        self._read_s: float | None = None
        self._complaint = Complaint(log)

    async def read(self) -> Past | None:
        """Return the history, or None if none was found yet; where it cannot be read, the one that was read before."""
        now_s = asyncio.get_running_loop().time()
        if self._read_s is None or now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.past = await self._history.read() or self.past
                    if self._beside is not None:
                        await self._beside()
            except (DilocoError, TimeoutError) as error:
                self._complaint.warn("history_unreadable", reason=str(error) or "no answer")
            else:
                self._complaint.over()
        return self.past


def waiting(run: KnownRun) -> Mapping[str, Any]:
    """Return the report of a run of which nothing is known yet."""
    return {"run": run.name, "preset": run.created.preset, "now": {"state": "waiting"}}


class CoordinatorSource:
    """A coordinator, as its page sees it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._stored = StoredHistory(coordinator.run.registry, coordinator.log)

    @property
    def over(self) -> bool:
        return self._coordinator.finished

    async def report(self) -> Mapping[str, Any]:
        """Return the run's report as of now, without its series."""
        coordinator = self._coordinator
        seen = coordinator.picture()
        if seen is not None:
            report = overview.report(seen, coordinator.run.created, None)
            return overview.ended(report, preliminary_at_s(coordinator)) if self.over else report
        past = await self._stored.read()
        if past is None:
            return waiting(coordinator.run)
        age_s = max(0.0, coordinator.transport.wall_s() - past.at_s)
        return overview.report(past.picture, coordinator.run.created, age_s)

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        """Return a function that makes the report's ``series``."""
        coordinator, past = self._coordinator, self._stored.past
        if coordinator.monitor is not None:
            curves: Mapping[str, Any] = coordinator.monitor.curves(coordinator.now_s())
            return lambda: overview.series(overview.thinned(curves))
        return lambda: {} if past is None else overview.series(past.curves)
