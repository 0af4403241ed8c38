"""The report of a run as an operator's machine has it: the history that a coordinator stored, and its answers beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.control.changes import read_changes
from diloco.control.quarantines import read_outliers
from diloco.errors import RunError
from diloco.nats import connection
from diloco.process.observe import Logger
from diloco.wire.plain import json_object
from diloco.wire.subjects import Subjects
from diloco_coordinator import overview
from diloco_coordinator.page.source import ANSWER_S, StoredHistory, waiting
from diloco_ops.reading.local_runs import standing_of
from diloco_ops.reading.run_reader import LiveRun

Facts = Mapping[str, Any]


class OperatorSource:
    """A run, as a page on an operator's machine sees it: without a coordinator's process of its own."""

    def __init__(self, live: LiveRun, log: Logger) -> None:
        self.live = live
        self._stored = StoredHistory(live.run.registry, log, self._adopt_changes)
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    async def report(self) -> Mapping[str, Any]:
        """Return the run's report as of now, without its series."""
        run = self.live.run
        facts, past = await asyncio.gather(self._answer(), self._stored.read())
        if past is None:
            return waiting(run)
        age_s = max(0.0, self.live.transport.wall_s() - past.at_s)
        report = overview.report(_newest(past.picture, facts), run.created, age_s if facts is None else None)
        self._over = report["now"]["state"] == "finished"
        if facts is None and not self._over:
            report["now"]["silent"] = True
        if not self._over:
            return report
        follows = standing_of(self.live.directory) == "running"  # diloco up has yet to write the final report
        return overview.ended(report, self.live.transport.wall_s() if follows else None)

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        """Return a function that makes the report's ``series``."""
        past = self._stored.past
        return lambda: {} if past is None else overview.series(past.curves)

    async def _answer(self) -> Facts | None:
        """Return the status that the leading coordinator answers; None, if none does."""
        transport = self.live.transport
        raw = await connection.ask(transport.control, transport.name, Subjects(self.live.run.name).status, b"", ANSWER_S)
        if raw is None:
            return None
        answered = json_object(raw)
        return answered if answered is not None and "fragments" in answered else None

    async def _adopt_changes(self) -> None:
        self.live.run.adopt((await read_changes(self.live.run)).records)
        await read_outliers(self.live.run)


class ReportSource:
    """A run that is finished, as its report has it.

    Raises:
        RunError: the report is damaged.
    """

    over = True

    def __init__(self, directory: Path) -> None:
        file = directory / "report.json"
        try:
            found = json_object(file.read_bytes())
        except OSError as error:
            raise RunError(f"{file}: cannot be read: {error.strerror}") from None
        if found is None:
            raise RunError(f"{file}: damaged: it is not a JSON object; diloco verify {directory} checks the run itself")
        self._report = found

    async def report(self) -> Mapping[str, Any]:
        """Return the report without its series."""
        return {key: value for key, value in self._report.items() if key != "series"}

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        """Return a function that returns the report's ``series``."""
        return lambda: self._report.get("series") or {}


def _newest(picture: Mapping[str, Any], answered: Facts | None) -> dict[str, Any]:
    """Return a stored picture with the facts of an answer in it, which are newer."""
    if answered is None:
        return dict(picture)
    stored = picture["facts"]
    rows = {row["fragment"]: row for row in stored["fragments"]}
    facts = {key: answered.get(key, value) for key, value in stored.items()}
    facts["fragments"] = [rows.get(row["fragment"], {}) | row for row in answered["fragments"]]
    gone = {name: learner for name, learner in stored["learners"].items() if learner["state"] == "gone"}
    facts["learners"] = gone | dict(answered["learners"])
    rates = [learner["tokens_per_s"] or 0.0 for learner in facts["learners"].values() if learner["state"] != "gone"]
    loss = answered["validation"][-1][2] if answered.get("validation") else picture["val_loss"]
    return {**picture, "facts": facts, "val_loss": loss, "tokens_per_s": sum(rates)}
