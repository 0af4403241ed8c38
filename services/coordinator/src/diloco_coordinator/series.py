"""The file of a run's series, for the coordinator's next process and for the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.service.rundir import write_text
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor

UNWATCHED_S = 60.0  # between two coordinators: a longer time is a pause of the run, or two clocks that differ


@dataclass(frozen=True)
class Resumed:
    """The seconds of a run that the series cover with which a coordinator goes on.

    ``at_s``: Unix time at which they ended. None: the run was about to pause, or an older version wrote them.
    """

    covered_s: float
    at_s: float | None

    def run_s(self, at_s: float) -> float:
        """Return the seconds of the run by a Unix time: it goes on between a coordinator that was killed and the next one."""
        unwatched_s = 0.0 if self.at_s is None else at_s - self.at_s
        return self.covered_s + (unwatched_s if 0.0 < unwatched_s <= UNWATCHED_S else 0.0)


class SeriesFile:
    """The series in the state directory. A file that cannot be read or written is logged, and no reason to end."""

    def __init__(self, directory: Path, log: Logger) -> None:
        self.path, self.log = directory / "series.json", log
        self._complaint = Complaint(log)

    def resume(self, monitor: Monitor, stored: Mapping[str, Any] | None = None) -> Resumed | None:
        """Let a monitor continue the series of the file, or those that another coordinator stored, if these cover more.

        Return what they cover, or None without usable series.
        """
        covered = None if stored is None else self._resume(monitor, lambda: stored, 0.0)
        read = self._resume(monitor, lambda: json.loads(self.path.read_text()), 0.0 if covered is None else covered.covered_s)
        return read or covered

    def _resume(self, monitor: Monitor, read: Callable[[], Any], beyond_s: float) -> Resumed | None:
        try:
            series = read()
            covered = Resumed(float(series["wall_s"]), _ended_at_s(series))
            if covered.covered_s < beyond_s:
                return None
            monitor.resume(series)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.log.warning("series_unreadable", file=str(self.path), reason=str(error))
            return None
        return covered

    def save(self, series: str) -> None:
        """Write series that :func:`as_text` returned. Callable from any thread."""
        try:
            write_text(self.path, series)
        except OSError as error:  # the disk is full
            self._complaint.warn("series_not_saved", file=str(self.path), reason=str(error))
        else:
            self._complaint.over()


def _ended_at_s(series: Mapping[str, Any]) -> float | None:
    at_s = None if series.get("paused") else series.get("at_s")
    return None if at_s is None else float(at_s)


def as_text(monitor: Monitor, alerts: Alerts, now_s: float, at_s: float, *, paused: bool) -> str:
    """Return a monitor's series, and the events, as of ``now_s`` as JSON; ``at_s``: Unix time; ``paused``: the process ends.

    Call it in the thread that the monitor hears in: they change.
    """
    return json.dumps(monitor.series(now_s) | {"events": alerts.dump(now_s)["events"], "at_s": at_s, "paused": paused})
