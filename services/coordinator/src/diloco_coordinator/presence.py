"""When which region was not heard: from signs of life, given the time.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_ABSENCES = 1000  # the oldest are forgotten


@dataclass(frozen=True)
class Absence:
    """A region from which nothing was heard, from the last sign of life to the next one (None: not yet)."""

    region: str
    from_s: float
    to_s: float | None


class Presence:
    """Regions, as their members are heard.

    A region is away once others have been heard for more than ``away_s`` since anybody of it was. While nobody is heard at
    all, it is the listener who is cut off, or was frozen: that is nobody's absence.
    """

    def __init__(self, regions: Sequence[str], away_s: float) -> None:
        self.regions, self.away_s = list(regions), away_s
        self._seen_s: dict[str, float] = {}  # by region: its last sign of life
        self._heard_s: float | None = None  # the last one of all
        self._ended: list[Absence] = []

    def hear(self, region: str, now_s: float) -> None:
        """A member of a region gave a sign of life; regions that the run does not have are ignored."""
        if region not in self.regions:
            return
        if self._heard_s is not None and now_s - self._heard_s > self.away_s:
            away = self.away()
            self._seen_s.update({name: now_s for name in self._seen_s if name not in away})
        self._heard_s = now_s
        if region in self.away():
            self._ended.append(Absence(region, self._seen_s[region], now_s))
            del self._ended[:-MAX_ABSENCES]
        self._seen_s[region] = now_s

    def away(self) -> dict[str, float]:
        """The regions that are away, and since when."""
        if self._heard_s is None:
            return {}
        return {name: at_s for name, at_s in self._seen_s.items() if self._heard_s - at_s > self.away_s}

    def absences(self) -> list[Absence]:
        """All that are known, in the order in which they ended; those that last come last."""
        return [*self._ended, *(Absence(name, at_s, None) for name, at_s in self.away().items())]

    def resume(self, absences: Iterable[Absence], now_s: float) -> None:
        """Go on from what an earlier process knew at ``now_s``; who was away then, is until it is heard."""
        known = list(absences)
        self._ended = [absence for absence in known if absence.to_s is not None]
        self._seen_s = {absence.region: absence.from_s for absence in known if absence.to_s is None}
        self._heard_s = now_s
