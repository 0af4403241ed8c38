"""Where members are, and the bytes that go from region to region, as syncers count them.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.wire.control import ShardHeartbeat

RATE_EVERY_S = 5.0  # shorter times between two marks say little: offers and records come in bursts
MAX_PROCESSES = 16  # of one syncer whose bytes by region are told apart; those of the oldest are added up


class Crossing:
    """A run's regions: who is in which, and payload bytes between them."""

    def __init__(self, regions: Sequence[str]) -> None:
        self.regions = frozenset(regions)
        self.places: dict[str, str] = {}  # by learner and syncer: its region
        # by syncer and incarnation, since each counts from 0: by other region, bytes sent there and received from there
        self.processes: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        self.rates: dict[tuple[str, str], float] = {}  # by border: bytes a second between the last two marks
        self._marked: tuple[float, dict[tuple[str, str], int]] | None = None  # when, and the bytes by then

    def place(self, member: str, region: str) -> None:
        """Note where a member is; regions that the run does not have are ignored."""
        if region in self.regions:
            self.places[member] = region

    def hear(self, heartbeat: ShardHeartbeat) -> None:
        """Take in a syncer's counts, if it is in one of the regions."""
        if heartbeat.crossing and heartbeat.syncer in self.places:
            others = {to: (sent, received) for to, sent, received in heartbeat.crossing if to in self.regions}
            self.processes[heartbeat.syncer, heartbeat.incarnation] = others
            self._forget_processes(heartbeat.syncer)

    def _forget_processes(self, syncer: str) -> None:
        """Add the bytes of a syncer's oldest process to the next one's while there are too many: incarnations are its word."""
        own = sorted(incarnation for name, incarnation in self.processes if name == syncer)
        if len(own) > MAX_PROCESSES:
            oldest, kept = self.processes.pop((syncer, own[0])), self.processes[syncer, own[1]]
            for region, (sent, received) in oldest.items():
                known = kept.get(region, (0, 0))
                kept[region] = known[0] + sent, known[1] + received

    def mark(self, now_s: float) -> None:
        """Take the rates again, if that is due."""
        since_s, before = self._marked or (now_s, None)
        if before is not None and now_s - since_s < RATE_EVERY_S:
            return
        sizes = self.borders()
        if before is not None:
            passed_s = now_s - since_s
            self.rates = {border: max(0, total - before.get(border, total)) / passed_s for border, total in sizes.items()}
        self._marked = now_s, sizes

    def borders(self) -> dict[tuple[str, str], int]:
        """Return payload bytes by border (from one region to another), as counted by the syncers on both sides."""
        sizes: dict[tuple[str, str], int] = {}
        for (syncer, _), others in self.processes.items():
            home = self.places[syncer]
            for other, (sent, received) in others.items():
                sizes[home, other] = sizes.get((home, other), 0) + sent
                sizes[other, home] = sizes.get((other, home), 0) + received
        return sizes

    def dump(self) -> dict[str, Any]:
        """Return all that :meth:`load` needs, as JSON has it."""
        return {
            "places": dict(self.places),
            "crossing": [
                [syncer, incarnation, to, sent, received]
                for (syncer, incarnation), regions in self.processes.items()
                for to, (sent, received) in regions.items()
            ],
        }

    @classmethod
    def load(cls, regions: Sequence[str], series: Mapping[str, Any]) -> Crossing:
        """Continue what an earlier process counted.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is damaged.
        """
        made = cls(regions)
        made.places = {str(member): str(region) for member, region in series["places"].items()}
        for syncer, incarnation, to, sent, received in series["crossing"]:
            made.processes.setdefault((str(syncer), int(incarnation)), {})[str(to)] = (int(sent), int(received))
            made.places[str(syncer)]  # a KeyError: the series are damaged
        return made
