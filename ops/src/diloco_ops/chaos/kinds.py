"""The kinds of failures that chaos brings about, and what of a run each can meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from diloco_ops.failures import Failure, FailureKind, Spread
from diloco_ops.up.embedded import CONTROL_REGION, server_name

NATS = "nats"  # the only server, or in a run with regions the control store
LINK = "link"
SERVICES = ("learner", "syncer", "coordinator", "evaluator")
MESSAGES = ("heartbeats", "rounds", "offers")
RECORDS = "records"
STREAMS = ("log", "offers")
AT_ONCE = Spread()


@dataclass(frozen=True)
class Kind:
    """A kind of failure: what it can meet, and how it is drawn."""

    targets: Sequence[str]  # groups of services, or names
    weight: float = 1.0
    duration_s: Spread = AT_ONCE
    values: tuple[tuple[str, Spread], ...] = ()
    embedded: bool = False  # only where the server is the run's own
    links: bool = False  # only where links between regions are emulated


KINDS: dict[str, Kind] = {
    "kill": Kind(SERVICES, 3.0),
    "freeze": Kind(SERVICES, 2.0, Spread(1.0, 6.0)),
    "slow": Kind(SERVICES, 1.0, Spread(2.0, 6.0), (("factor", Spread(2.0, 6.0)),)),
    "clock": Kind(SERVICES, 1.0, Spread(2.0, 6.0), (("offset_s", Spread(-7200.0, 7200.0)),)),
    "cut": Kind(SERVICES, 1.0, Spread(0.0, 4.0), embedded=True),
    "nats_restart": Kind([NATS], 0.5, embedded=True),
    "nats_kill": Kind([NATS], 0.5, embedded=True),
    "nats_freeze": Kind([NATS], 0.5, Spread(0.5, 4.0), embedded=True),
    "link_cut": Kind([LINK], 1.0, Spread(1.0, 15.0), embedded=True, links=True),
    "corrupt": Kind(MESSAGES, 1.0, Spread(0.5, 2.0), (("messages", Spread(5.0, 40.0)),)),
    "duplicate": Kind([*MESSAGES, RECORDS], 1.0, Spread(0.5, 2.0), (("messages", Spread(5.0, 40.0)),)),
    "full": Kind(STREAMS, 0.5, Spread(1.0, 4.0)),
}


@dataclass(frozen=True)
class Present:
    """The parts of a run that can be broken: its processes, as in ``services/*.pid``, and its regions, if it has any."""

    names: Sequence[str]
    regions: Sequence[str] = ()

    @property
    def embedded(self) -> bool:
        """Whether its servers are processes of its own."""
        return NATS in self.names

    def is_possible(self, kind: Kind) -> bool:
        """Whether anything here can meet this kind."""
        return (self.embedded or not kind.embedded) and (bool(self.regions) or not kind.links)

    def targets(self, kind: Kind) -> list[str]:
        """Return the names of all that a kind can meet; links by the region that they lead to and from."""
        if kind.targets == SERVICES:
            return [name for name in self.names if name.partition("-")[0] in SERVICES]
        if list(kind.targets) == [NATS]:
            return [NATS, *map(server_name, self.regions)]
        if kind.links:
            return [f"{LINK}/{region}" for region in self.regions]
        if kind.targets == STREAMS and self.regions:
            return [f"{stream}/{region}" for stream in STREAMS for region in self.regions]
        return list(kind.targets)

    def meant(self, failure: Failure) -> list[str]:
        """Return what a failure means here; also one link, in one direction."""
        kind = KINDS[failure.kind]
        places = [*self.regions, CONTROL_REGION] if kind.links else []
        return failure.targets([*self.targets(kind), *(f"{LINK}/{a}-{b}" for a, b in permutations(places, 2))])

    def region_of(self, target: str) -> str | None:
        """Return the region whose server, stream or links a target is; None for anything else."""
        thing, _, region = target.partition("/") if "/" in target else target.partition("-")
        return region if thing in (NATS, LINK, *STREAMS) and region in self.regions else None


def sources(kinds: Sequence[str], present: Present) -> list[FailureKind]:
    """Return the sources from which a tape of these kinds is drawn."""
    return [
        FailureKind(name, present.targets(kind), kind.weight, kind.duration_s, dict(kind.values))
        for name, kind in ((name, KINDS[name]) for name in kinds)
    ]
