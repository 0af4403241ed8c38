"""Where members are, and the bytes that go from region to region, as syncers count them.

Before the first versions the initial model is brought to each region, and the offers of the first rounds go ahead of their
versions. Both are many times the bytes of the versions that there are by then. So bytes are compared with the versions that
they made from the end of the first cycle on (:meth:`Crossing.steady`).

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.wire.control import ShardHeartbeat

RATE_EVERY_S = 5.0  # shorter times between two marks say little: offers and records come in bursts
MAX_PROCESSES = 16  # of one syncer whose bytes by region are told apart; those of the oldest are added up


Border = tuple[str, str]  # from one region to another


@dataclass
class _Process:
    """Counts of one process of a syncer, which begin at 0: versions, and by other region bytes sent to and received from it."""

    versions: int = 0
    others: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, before: _Process) -> None:
        """Take over the counts of an earlier process."""
        self.versions += before.versions
        for region, (sent, received) in before.others.items():
            known = self.others.get(region, (0, 0))
            self.others[region] = known[0] + sent, known[1] + received


class Crossing:
    """A run's regions: who is in which, and payload bytes between them.

    Args:
        regions: names.
        fragments: of the model, as many versions as a cycle has.
    """

    def __init__(self, regions: Sequence[str], fragments: int) -> None:
        self.regions, self.fragments = frozenset(regions), fragments
        self.places: dict[str, str] = {}  # by learner and syncer: its region
        self.processes: dict[tuple[str, int], _Process] = {}  # by syncer and incarnation
        self.first_cycle: tuple[int, dict[Border, int]] | None = None  # versions and bytes at its end
        self.rates: dict[Border, float] = {}  # by border: bytes a second between the last two marks
        self._marked: tuple[float, dict[Border, int]] | None = None  # when, and the bytes by then

    def place(self, member: str, region: str) -> None:
        """Note where a member is; regions that the run does not have are ignored."""
        if region in self.regions:
            self.places[member] = region

    def hear(self, heartbeat: ShardHeartbeat) -> None:
        """Take in a syncer's counts, if it is in one of the regions."""
        if heartbeat.crossing and heartbeat.syncer in self.places:
            others = {to: (sent, received) for to, sent, received in heartbeat.crossing if to in self.regions}
            self.processes[heartbeat.syncer, heartbeat.incarnation] = _Process(heartbeat.versions, others)
            self._forget_processes(heartbeat.syncer)
            if self.first_cycle is None and self.versions() >= self.fragments:
                self.first_cycle = self.versions(), self.borders()

    def _forget_processes(self, syncer: str) -> None:
        """Add the counts of a syncer's oldest process to the next one's while there are too many: incarnations are its word."""
        own = sorted(incarnation for name, incarnation in self.processes if name == syncer)
        if len(own) > MAX_PROCESSES:
            self.processes[syncer, own[1]].add(self.processes.pop((syncer, own[0])))

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

    def versions(self) -> int:
        """Return the versions that the syncers have made, in the processes whose bytes are counted."""
        return sum(process.versions for process in self.processes.values())

    def steady(self) -> tuple[int, dict[str, int]] | None:
        """Return the versions since the first cycle, and by region the bytes sent since; None before another cycle is over."""
        if self.first_cycle is None:
            return None
        versions, before = self.first_cycle
        made = self.versions() - versions
        if made < self.fragments:
            return None
        since = {border: size - before.get(border, 0) for border, size in self.borders().items()}
        return made, {name: sum(size for (source, _), size in since.items() if source == name) for name in sorted(self.regions)}

    def borders(self) -> dict[Border, int]:
        """Return payload bytes by border, as counted by the syncers on both sides."""
        sizes: dict[Border, int] = {}
        for (syncer, _), process in self.processes.items():
            home = self.places[syncer]
            for other, (sent, received) in process.others.items():
                sizes[home, other] = sizes.get((home, other), 0) + sent
                sizes[other, home] = sizes.get((other, home), 0) + received
        return sizes

    def dump(self) -> dict[str, Any]:
        """Return all that :meth:`load` needs, as JSON has it."""
        return {
            "places": dict(self.places),
            "crossing": [
                [syncer, incarnation, to, sent, received]
                for (syncer, incarnation), process in self.processes.items()
                for to, (sent, received) in process.others.items()
            ],
            "crossing_versions": [[*name, process.versions] for name, process in self.processes.items()],
            "first_cycle": None
            if self.first_cycle is None
            else [self.first_cycle[0], [[*border, size] for border, size in self.first_cycle[1].items()]],
        }

    @classmethod
    def load(cls, regions: Sequence[str], fragments: int, series: Mapping[str, Any]) -> Crossing:
        """Continue what an earlier process counted; one of an older version counted no versions.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is damaged.
        """
        made = cls(regions, fragments)
        made.places = {str(member): str(region) for member, region in series["places"].items()}
        for syncer, incarnation, to, sent, received in series["crossing"]:
            process = made.processes.setdefault((str(syncer), int(incarnation)), _Process())
            process.others[str(to)] = int(sent), int(received)
            made.places[str(syncer)]  # a KeyError: the series are damaged
        for syncer, incarnation, versions in series.get("crossing_versions", ()):
            made.processes[str(syncer), int(incarnation)].versions = int(versions)
        if series.get("first_cycle") is not None:
            versions, sizes = series["first_cycle"]
            made.first_cycle = int(versions), {(str(source), str(to)): int(size) for source, to, size in sizes}
        return made
