"""Who is alive, as syncers tell it and a learner goes by it: times by hand, with a lease of 16 s."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.heartbeats import shard_heartbeat

from diloco.core.run import leases
from diloco.core.run.leases import LeaseWatch, ShareClaim, Shares
from diloco.core.run.summaries_heard import SummariesHeard
from diloco.core.syncer.ownership import Ownership
from diloco.core.syncer.presence_teller import PresenceTeller, turn_s
from diloco.settings.run import LivenessSettings
from diloco.wire.control import PresenceSummary
from diloco.wire.fields import MAX_MEMBERS, MAX_SYNCERS

LIVENESS = LivenessSettings(heartbeat_s=2.0, dead_s=5.0, lease_s=16.0, takeover_s=1.5)
Named = list[tuple[str, float]]


class Telling:
    """A syncer that has listened since 0 s, hears what a test says, and speaks unless it is told not to."""

    def __init__(self) -> None:
        self.teller = PresenceTeller("syncer-0", 7)
        self.number = 0

    def hear(self, now_s: float, *learners: str) -> None:
        for learner in learners:
            self.teller.hear(learner, LIVENESS.dead_s, now_s)

    def due(
        self, now_s: float, *, hearing_s: float | None = None, waits: bool = False, speaks: bool = True
    ) -> tuple[bool, Named] | None:
        hearing_s = now_s if hearing_s is None else hearing_s
        said = self.teller.due(LIVENESS, now_s, hearing_s=hearing_s, waits=waits, speaks=speaks)
        if said is None:
            return None
        self.number += 1
        assert (said.syncer, said.incarnation, said.number) == ("syncer-0", 7, self.number)
        return said.whole, said.learners


# ---- the syncer


def test_a_syncer_says_nothing_before_it_has_listened_through_a_lease() -> None:
    syncer = Telling()
    syncer.hear(1.0, "ann")
    syncer.hear(15.0, "bob")
    assert syncer.due(15.9) is None
    assert syncer.due(16.0) == (True, [("ann", 15.0), ("bob", 1.0)])
    # deaf for a moment: it listens through another lease
    assert syncer.due(20.0, hearing_s=0.0) is None
    assert syncer.due(35.9, hearing_s=15.9) is None
    assert syncer.due(36.0, hearing_s=16.0) == (True, [])


def test_a_syncer_says_nothing_before_all_that_wait_at_its_gate_were_let_in_once() -> None:
    syncer = Telling()
    assert syncer.due(16.0, waits=True) is None
    assert syncer.due(17.0) == (True, [])
    assert syncer.due(21.0, waits=True) == (True, [])  # one that comes later holds nothing up


def test_whole_summaries_come_four_times_a_lease_and_name_all_heard_within_it() -> None:
    syncer = Telling()
    syncer.hear(10.0, "ann", "bob")
    said = {}
    for tick in range(16, 37):
        syncer.hear(float(tick), "ann")
        said[tick] = syncer.due(float(tick))
    assert {tick: summary for tick, summary in said.items() if summary is not None} == {
        16: (True, [("ann", 0.0), ("bob", 6.0)]),
        20: (True, [("ann", 0.0), ("bob", 10.0)]),
        24: (True, [("ann", 0.0), ("bob", 14.0)]),
        28: (True, [("ann", 0.0)]),  # bob was last heard 18 s ago
        32: (True, [("ann", 0.0)]),
        36: (True, [("ann", 0.0)]),
    }


def test_who_comes_or_comes_back_is_named_at_once_and_only_once() -> None:
    syncer = Telling()
    syncer.hear(15.0, "ann", "bob")
    assert syncer.due(16.0) == (True, [("ann", 1.0), ("bob", 1.0)])
    syncer.hear(16.25, "cat")
    assert syncer.due(16.5) == (False, [("cat", 0.25)])
    assert syncer.due(17.0) is None
    syncer.hear(19.5, "ann")  # silent for 4.5 s: not dead
    assert syncer.due(19.75) is None
    assert syncer.due(20.0) == (True, [("ann", 0.5), ("bob", 5.0), ("cat", 3.75)])
    syncer.hear(20.5, "bob")  # silent for 5.5 s
    assert syncer.due(20.75) == (False, [("bob", 0.25)])
    # whole ones name those that came, too
    syncer.hear(24.0, "dan")
    assert syncer.due(24.0) == (True, [("ann", 4.5), ("bob", 3.5), ("cat", 7.75), ("dan", 0.0)])
    assert syncer.due(24.5) is None


def test_the_next_speaker_begins_with_a_whole_summary() -> None:
    syncer = Telling()
    syncer.hear(17.0, "ann")
    for now_s in (16.0, 20.0, 24.0):
        assert syncer.due(now_s, speaks=False) is None
    assert syncer.due(25.0) == (True, [("ann", 8.0)])


def test_a_syncer_looks_often_enough_whatever_the_lease() -> None:
    assert turn_s(LivenessSettings(lease_s=30.0)) == 0.5
    assert turn_s(LivenessSettings(lease_s=2.0, dead_s=2.0)) == 0.125


def test_a_syncer_keeps_so_many_names_at_most() -> None:
    syncer = Telling()
    syncer.hear(1.0, "the-oldest")
    syncer.hear(2.0, *(f"l{number}" for number in range(MAX_MEMBERS)))
    said = syncer.due(16.0)
    assert said is not None
    assert len(said[1]) == MAX_MEMBERS
    assert "the-oldest" not in dict(said[1])


# ---- which syncer speaks


def ownership(name: str, incarnation: int, region: str = "") -> Ownership:
    made = Ownership(name=name, incarnation=incarnation, sizes=[1], shards=1, takeover_s=1.5, region=region)
    for tenth in range(100):  # it hears itself all the time
        made.hear(shard_heartbeat(name, tenth, incarnation=incarnation, region=region), tenth / 10)
    return made


def test_the_syncer_that_began_first_speaks_and_the_next_one_when_it_is_silent() -> None:
    syncer = ownership("syncer-1", 5)
    assert syncer.speaks(9.9)
    syncer.hear(shard_heartbeat("syncer-2", incarnation=9), 8.5)  # began later
    assert syncer.speaks(9.9)
    syncer.hear(shard_heartbeat("syncer-0", incarnation=4), 8.5)
    assert not syncer.speaks(9.9)
    assert syncer.speaks(10.0)  # syncer-0 was last heard 1.5 s ago
    syncer.hear(shard_heartbeat("syncer-0", 2, incarnation=4), 10.0)
    assert not syncer.speaks(10.1)
    syncer.hear(shard_heartbeat("syncer-0", 1, incarnation=11), 10.1)  # started again
    assert syncer.speaks(10.2)


@pytest.mark.parametrize("state", ["leaving", "unable"])
def test_a_syncer_that_leaves_or_can_commit_nothing_does_not_speak(state: str) -> None:
    syncer = ownership("syncer-1", 5)
    syncer.hear(shard_heartbeat("syncer-0", incarnation=4, state=state), 9.8)
    assert syncer.speaks(9.9)
    syncer.leaving = True
    assert not syncer.speaks(9.9)


def test_each_region_has_a_syncer_that_speaks() -> None:
    syncer = ownership("syncer-1", 5, "us")
    syncer.hear(shard_heartbeat("syncer-0", incarnation=4, region="eu"), 9.8)
    assert syncer.speaks(9.9)


# ---- the learner


def summary(number: int, *learners: tuple[str, float], whole: bool = True, **changes: Any) -> PresenceSummary:
    values: dict[str, Any] = {"syncer": "syncer-0", "incarnation": 7} | changes
    return PresenceSummary(number=number, whole=whole, learners=list(learners), **values)


def test_a_learner_does_without_heartbeats_while_whole_summaries_come() -> None:
    heard = SummariesHeard("ann")
    assert not heard.suffice(LIVENESS, 0.0)
    heard.hear(summary(1, ("ann", 1.0)), LIVENESS, 10.0)
    assert not heard.suffice(LIVENESS, 13.9)
    assert heard.suffice(LIVENESS, 14.0)  # a quarter of the lease
    heard.hear(summary(2, ("ann", 1.0)), LIVENESS, 14.5)
    heard.hear(summary(3, ("bob", 0.0), whole=False), LIVENESS, 20.0)
    assert heard.suffice(LIVENESS, 22.4)
    assert not heard.suffice(LIVENESS, 22.5)  # none that is whole for half of the lease
    heard.hear(summary(4, ("ann", 1.0)), LIVENESS, 30.0)
    assert not heard.suffice(LIVENESS, 33.9)
    assert heard.suffice(LIVENESS, 34.0)


def test_a_summary_that_does_not_name_the_learner_itself_is_no_reason_to_hear_no_heartbeats() -> None:
    heard = SummariesHeard("ann")
    for number, at_s in enumerate((0.0, 4.0, 8.0), 1):
        assert heard.hear(summary(number, ("bob", 1.0)), LIVENESS, at_s) == [("bob", at_s - 1.0)]
    assert not heard.suffice(LIVENESS, 8.0)


def test_where_heartbeats_are_rare_beside_the_lease_they_are_heard() -> None:
    heard = SummariesHeard("ann")
    rare = LivenessSettings(heartbeat_s=2.5, dead_s=5.0, lease_s=16.0)
    for number, at_s in enumerate((0.0, 4.0, 8.0), 1):
        heard.hear(summary(number, ("ann", 1.0)), rare, at_s)
    assert heard.suffice(LIVENESS, 8.0)
    assert not heard.suffice(rare, 8.0)


def test_a_late_or_repeated_summary_says_nothing_unless_its_syncer_began_again() -> None:
    heard = SummariesHeard("ann")
    assert heard.hear(summary(2, ("bob", 1.0)), LIVENESS, 5.0) == [("bob", 4.0)]
    assert not heard.hear(summary(2, ("bob", 0.0)), LIVENESS, 6.0)
    assert not heard.hear(summary(1, ("bob", 0.0)), LIVENESS, 6.0)
    assert heard.hear(summary(1, ("bob", 1.0), incarnation=8), LIVENESS, 7.0) == [("bob", 6.0)]
    # of another syncer, and of this one with its clock set back, a lease later
    assert heard.hear(summary(1, ("bob", 1.0), syncer="syncer-1"), LIVENESS, 7.5) == [("bob", 6.5)]
    assert not heard.hear(summary(1, ("bob", 1.0), incarnation=6), LIVENESS, 22.9)
    assert heard.hear(summary(1, ("bob", 1.0), incarnation=6), LIVENESS, 23.0) == [("bob", 22.0)]


def test_a_learner_knows_so_many_syncers_at_most_and_forgets_silent_ones() -> None:
    heard = SummariesHeard("ann")
    for number in range(MAX_SYNCERS):
        assert heard.hear(summary(1, ("bob", 1.0), syncer=f"s{number}"), LIVENESS, 5.0)
    assert not heard.hear(summary(1, ("bob", 1.0), syncer="one-more"), LIVENESS, 20.9)
    assert heard.hear(summary(1, ("bob", 1.0), syncer="one-more"), LIVENESS, 21.0)


class Watching:
    """Learner ann of a run of two shares, who hears summaries alone and looks every 1.6 s; bob has the other share."""

    def __init__(self) -> None:
        self.table: Shares = leases.fold(
            {
                "ann": ShareClaim("ann", 1, [leases.ClaimedShare(0, True, 0, 1, 0)]),
                "bob": ShareClaim("bob", 1, [leases.ClaimedShare(1, True, 0, 2, 0)]),
            },
            2,
        )
        self.watch, self.summaries = LeaseWatch("ann", LIVENESS.lease_s), SummariesHeard("ann")
        self.number = 0

    def hear(self, now_s: float, *learners: tuple[str, float], whole: bool = True) -> None:
        self.number += 1
        said = summary(self.number, *learners, whole=whole)
        for name, heard_s in self.summaries.hear(said, LIVENESS, now_s):
            self.watch.hear(name, heard_s)

    def due(self, now_s: float) -> list[int]:
        return self.watch.due(self.table, now_s)

    def looks(self, first: int, last: int) -> list[int]:
        """Look every second and return what is due at last: nothing before."""
        due: list[int] = []
        for now_s in range(first, last + 1):
            assert due == []
            due = self.due(float(now_s))
        return due


def test_a_learner_that_crashed_is_gone_a_lease_after_its_syncer_last_heard_it() -> None:
    ann = Watching()
    assert ann.due(0.0) == []
    ann.hear(0.5, ("ann", 0.5), ("bob", 0.5))
    # bob's last heartbeat came to the syncer at 3 s
    for at_s in (4, 8, 12, 16):
        assert ann.looks(at_s - 3, at_s) == []
        ann.hear(at_s + 0.5, ("ann", 0.5), ("bob", at_s - 2.5))
    assert ann.looks(17, 18) == []
    assert ann.due(18.9) == []
    assert ann.due(19.0) == [1]
    assert ann.watch.gone == {"bob"}


def test_a_learner_that_comes_back_in_time_keeps_its_share() -> None:
    ann = Watching()
    assert ann.due(0.0) == []
    for at_s in (4, 8, 12, 16):
        assert ann.looks(at_s - 3, at_s) == []
        ann.hear(at_s + 0.5, ("ann", 0.5), ("bob", at_s - 2.5))
    ann.hear(17.5, ("bob", 0.5), whole=False)
    assert ann.looks(17, 20) == []
    ann.hear(20.5, ("ann", 0.5), ("bob", 3.5))
    assert ann.looks(21, 24) == []
    # an older time, as of another region's syncer, changes nothing
    ann.hear(24.5, ("ann", 0.5), ("bob", 15.0))
    assert ann.looks(25, 28) == []
    assert ann.watch.gone == frozenset()


def test_a_learner_that_only_hears_of_its_own_return_takes_nothing() -> None:
    ann = Watching()
    assert ann.due(0.0) == []
    ann.hear(0.5, ("ann", 0.5), ("bob", 0.5))
    # no summary for a lease and more, and then one of those that came back
    assert ann.looks(1, 17) == []
    ann.hear(17.5, ("ann", 0.0), whole=False)
    assert ann.looks(18, 20) == []
    ann.hear(20.5, ("ann", 0.5), ("bob", 0.5))
    assert ann.looks(21, 24) == []
    assert ann.watch.gone == frozenset()
