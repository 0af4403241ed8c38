"""The links to the other regions: whether anything can be committed, and for how much they have room. Pure, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from structlog.testing import capture_logs
from tests.made.heartbeats import learner_heartbeat
from tests.made.syncer_parts import change

from diloco.control.creation import KnownRun
from diloco.core.run.changes import Set
from diloco.core.syncer.bandwidth import Appends, Moved
from diloco.core.syncer.ownership import Ownership
from diloco.core.syncer.roster import Roster
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco_syncer.context import Context
from diloco_syncer.links import LinkWatch
from diloco_syncer.offers.collector import Collector
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.regions import Regions

SIZE = 1000
AWAY_S = 10.0


@dataclass
class Way:
    """The transport to one region."""

    connected: bool = True
    incoming: Moved = field(default_factory=Moved)


@dataclass
class Reads:
    """A collector."""

    transport: Way = field(default_factory=Way)
    learners: set[str] = field(default_factory=set)
    regional: bool = False


@dataclass
class Reached:
    """The regions as one of them has them."""

    own: str = "us"
    commits: bool = True
    stores: bool = True
    appends: dict[str, Appends] = field(default_factory=lambda: {name: Appends() for name in ("us", "eu")})


@dataclass
class Writes:
    """An owned fragment's replication."""

    absences: list[str] = field(default_factory=list)
    age_s: float = 0.0

    def waits_s(self, region: str, now_s: float) -> float:
        return self.age_s

    def away(self, region: str) -> None:
        self.absences.append(region)


@dataclass
class Fragment:
    size: int = SIZE


@dataclass
class Owner:
    replication: Writes = field(default_factory=Writes)
    fragment: Fragment = field(default_factory=Fragment)


class Watch:
    """A link watch in region us of two; one learner in each."""

    def __init__(self) -> None:
        overrides = {"regions.names": ["eu", "us"], "regions.away_s": AWAY_S, "regions.adaptive": True, "round.steps": 10}
        settings = run_settings("decoupled", overrides)
        self.run = KnownRun("run", settings, cast(Any, None))
        self.roster = Roster(settings)
        self.regions, self.eu, self.owner = Reached(), Reads(learners={"eva"}), Owner()
        self.ownership = Ownership("s", 1, [SIZE], 1, 1.5, "us", AWAY_S)
        self.changes = 0
        context = type("Context", (), {"run": self.run, "regions": self.regions, "region": "us", "roster": self.roster,
                                       "log": get_logger()})()  # fmt: skip
        owned = {0: cast(FragmentOwner, self.owner)}
        collectors = {name: cast(Collector, reads) for name, reads in {"us": Reads(), "eu": self.eu}.items()}
        self.links = LinkWatch(cast(Context, context), owned, collectors, self.ownership, self._changed)
        self.now_s = 0.0

    def _changed(self) -> None:
        self.changes += 1

    def look(self, looks: int, bytes_a_s: float | None = None) -> list[dict[str, Any]]:
        """Look once a second; offers come in at that rate, and keep the link busy."""
        with capture_logs() as logs:
            for _ in range(looks):
                self.now_s += 1
                if bytes_a_s is not None:
                    before = self.eu.transport.incoming
                    self.eu.transport.incoming = Moved(before.bytes + int(bytes_a_s), before.busy_s + 1)
                for learner in ("eva", "ann"):
                    self.roster.hear(
                        learner_heartbeat(learner, int(self.now_s), 0, 0, tokens=10 * int(self.now_s), step_s=0.1), self.now_s
                    )
                self.links.look(cast(Regions, self.regions), self.now_s)
        return [dict(entry) for entry in logs]


def test_a_slow_link_has_fewer_bits_asked_of_its_region_and_a_fast_one_has_not() -> None:
    watch = Watch()
    usual = watch.run.created.codec.offer_bits
    assert watch.look(5, bytes_a_s=1e6) == []
    assert watch.links.bandwidth.offer_bits == []
    slow = Watch()
    logs = slow.look(10, bytes_a_s=10.0)
    assert {(entry["event"], entry["other_region"], entry["way"]) for entry in logs} == {("bandwidth_changed", "eu", "offers")}
    assert slow.links.bandwidth.pace > 1 or dict(slow.links.bandwidth.offer_bits)["eu"] < usual


def test_learners_whose_offers_are_combined_cross_as_one() -> None:
    watch = Watch()
    watch.eu.learners = {"eva", "ann"}
    alone, _ = watch.links.see(cast(Regions, watch.regions), "eu", {"eva", "ann"}, 0.0)
    watch.eu.regional = True
    combined, _ = watch.links.see(cast(Regions, watch.regions), "eu", {"eva", "ann"}, 0.0)
    assert (alone.values, combined.values) == (2 * SIZE, SIZE)


def test_a_link_that_is_cut_says_nothing_about_its_rate_and_is_told_to_those_who_write_over_it() -> None:
    watch = Watch()
    watch.eu.transport.connected = False
    watch.look(3)
    assert watch.owner.replication.absences == ["eu"] * 3


def test_settings_that_change_rounds_make_it_begin_again() -> None:
    watch = Watch()
    watch.look(10, bytes_a_s=10.0)
    settled = watch.links.bandwidth
    watch.links.change(watch.run.created)
    assert watch.links.bandwidth is settled
    before = watch.run.created
    change(watch.run, Set("round.steps", 20))
    watch.links.change(before)
    assert (watch.links.bandwidth.offer_bits, watch.links.bandwidth.steps) == ([], 20)


async def test_that_nothing_can_be_committed_is_said_once_and_that_it_can_again() -> None:
    watch = Watch()
    watch.ownership.change(1, 1.5, 0.0)
    with capture_logs() as logs:
        watch.links.look_around()
        watch.regions.commits = False
        watch.links.look_around()
        watch.links.look_around()
        assert watch.links.unable
        watch.regions.commits = True
        watch.links.look_around()
    assert [entry["event"] for entry in logs] == ["commits_nothing", "commits_again"]
    assert watch.changes == 2
