"""The file of a run's series, for the coordinator's next process and for the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.service.rundir import write_text
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor


class SeriesFile:
    """The series in the state directory. A file that cannot be read or written is logged, and no reason to end."""

    def __init__(self, directory: Path, log: Logger) -> None:
        self.path, self.log = directory / "series.json", log
        self._complaint = Complaint(log)

    def resume(self, monitor: Monitor, stored: Mapping[str, Any] | None = None) -> float | None:
        """Let a monitor continue the series of the file, or those that another coordinator stored, if these cover more.

        Return the seconds that they cover, or None without usable series.
        """
        covered_s = None if stored is None else self._resume(monitor, lambda: stored, 0.0)
        read_s = self._resume(monitor, lambda: json.loads(self.path.read_text()), covered_s or 0.0)
        return covered_s if read_s is None else read_s

    def _resume(self, monitor: Monitor, read: Callable[[], Any], beyond_s: float) -> float | None:
        try:
            series = read()
            covered_s = float(series["wall_s"])
            if covered_s < beyond_s:
                return None
            monitor.resume(series)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.log.warning("series_unreadable", file=str(self.path), reason=str(error))
            return None
        return covered_s

    def save(self, series: str) -> None:
        """Write series that :func:`as_text` returned. Callable from any thread."""
        try:
            write_text(self.path, series)
        except OSError as error:  # the disk is full
            self._complaint.warn("series_not_saved", file=str(self.path), reason=str(error))
        else:
            self._complaint.over()


def as_text(monitor: Monitor, alerts: Alerts, now_s: float) -> str:
    """Return a monitor's series, and the events, as of ``now_s`` as JSON.

    Call it in the thread that the monitor hears in: they change.
    """
    return json.dumps(monitor.series(now_s) | {"events": alerts.dump(now_s)["events"]})
