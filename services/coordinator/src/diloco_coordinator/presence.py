"""Absences of regions, from the heartbeats of their members.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_ABSENCES = 1000  # the oldest are forgotten
STARTING_S = 60.0  # a region's first processes send some heartbeats, and may then be silent while they compile


@dataclass(frozen=True)
class Absence:
    """Silence of a region, from its last heartbeat to the next one (None: it lasts)."""

    region: str
    from_s: float
    to_s: float | None


class RegionPresence:
    """Presence of a run's regions.

    A region is away when others have been heard for more than ``away_s`` since its last heartbeat. While no process is heard at
    all, the listener itself is cut off, or was frozen: no region is away.
    """

    def __init__(self, regions: Sequence[str], away_s: float) -> None:
        self.regions, self.away_s = list(regions), away_s
        self._first_s: dict[str, float] = {}  # by region: time of its first heartbeat
        self._seen_s: dict[str, float] = {}  # by region: time of its last heartbeat
        self._heard_s: float | None = None  # time of the last one of all
        self._ended: list[Absence] = []

    def hear(self, region: str, now_s: float) -> None:
        """Note a heartbeat from a region; regions that the run does not have are ignored."""
        if region not in self.regions:
            return
        if self._heard_s is not None and now_s - self._heard_s > self.away_s:
            away = self.away()
            self._seen_s.update({name: now_s for name in self._seen_s if name not in away})
        self._heard_s = now_s
        if region in self.away():
            self._ended.append(Absence(region, self._seen_s[region], now_s))
            del self._ended[:-MAX_ABSENCES]
        self._first_s.setdefault(region, now_s)
        self._seen_s[region] = now_s

    def away(self) -> dict[str, float]:
        """Return the regions that are away, and since when."""
        if self._heard_s is None:
            return {}
        return {name: at_s for name, at_s in self._seen_s.items() if self._heard_s - at_s > self.away_s}

    def lost(self) -> dict[str, float]:
        """Return the regions that are away, without those that may only be starting, and since when."""
        now_s = self._heard_s or 0.0
        return {
            name: at_s
            for name, at_s in self.away().items()
            if at_s - self._first_s.get(name, -math.inf) >= self.away_s or now_s - at_s >= STARTING_S
        }

    def absences(self) -> list[Absence]:
        """Return all known absences, in the order of their ends, and then the lasting ones."""
        return [*self._ended, *(Absence(name, at_s, None) for name, at_s in self.away().items())]

    def resume(self, absences: Iterable[Absence], now_s: float) -> None:
        """Continue the absences that an earlier process knew at ``now_s``; a lasting one lasts until the region is heard."""
        known = list(absences)
        self._ended = [absence for absence in known if absence.to_s is not None]
        self._seen_s = {absence.region: absence.from_s for absence in known if absence.to_s is None}
        self._heard_s = now_s
