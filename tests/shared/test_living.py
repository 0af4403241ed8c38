"""Learners of a run in virtual time hear of each other by a syncer's summaries, and by heartbeats where there are none."""

from __future__ import annotations

from typing import Any

from diloco.testing import VirtualRun

SETTINGS: dict[str, Any] = {
    "tokens": 10**7,
    "learners": 3,
    "liveness.heartbeat_s": 0.25,
    "liveness.dead_s": 2.0,
    "liveness.lease_s": 4.0,
    "liveness.takeover_s": 0.9,
}
LEARNERS = ("ann", "bob", "cat")


def begun(run: VirtualRun, *learners: str) -> None:
    for name in learners:
        run.add_toy(name, founds=name == "ann")
    run.advance(until=lambda: min(run.versions(), default=0) >= 1)


def hear_heartbeats(run: VirtualRun) -> set[str]:
    """Return the learners to whom the heartbeats of all learners come."""
    heard = (s.transport.process.name for s in run._world.subscriptions if s.pattern == "diloco.virtual.heartbeat.*")
    return set(LEARNERS).intersection(heard)


def held(run: VirtualRun, name: str) -> set[int]:
    """Return the shares of the data that a learner trains on."""
    return set(run._members[name].leased())


def test_learners_hear_heartbeats_until_summaries_come_and_while_no_syncer_is_there() -> None:
    with VirtualRun(SETTINGS, syncers=2) as run:
        begun(run, *LEARNERS)
        assert hear_heartbeats(run) == set(LEARNERS)
        run.advance(10.0, until=lambda: not hear_heartbeats(run))
        run.advance(20.0)
        assert hear_heartbeats(run) == set()
        assert sorted(share for name in LEARNERS for share in held(run, name)) == [0, 1, 2]
        # the one that speaks is gone: the other one speaks before any learner misses it
        run.kill("syncer-0")
        for _ in range(100):
            run.advance(0.1)
            assert hear_heartbeats(run) == set()
        # without a syncer a learner misses summaries after 2 s, and sees that 0.4 s later at most
        run.kill("syncer-1")
        run.advance(3.0, until=lambda: hear_heartbeats(run) == set(LEARNERS))
        run.advance(20.0)
        assert sorted(share for name in LEARNERS for share in held(run, name)) == [0, 1, 2]  # each has its own still
        # syncers that begin listen through a lease first
        run.start("syncer-0")
        run.start("syncer-1")
        run.advance(3.9)
        assert hear_heartbeats(run) == set(LEARNERS)
        run.advance(4.0, until=lambda: not hear_heartbeats(run))


def test_the_share_of_a_learner_that_died_is_taken_over_by_summaries_alone() -> None:
    with VirtualRun(SETTINGS, syncers=1) as run:
        begun(run, *LEARNERS)
        run.advance(10.0, until=lambda: not hear_heartbeats(run))
        [share] = held(run, "cat")
        run.kill("cat")
        run.advance(3.5)
        assert share not in held(run, "ann") | held(run, "bob")
        run.advance(2.0, until=lambda: share in held(run, "ann") | held(run, "bob"))
        assert hear_heartbeats(run) == set()
        # it comes back, and is given a share again
        run.start("cat")
        run.advance(30.0, until=lambda: len(held(run, "cat")) == 1 and len(held(run, "ann")) == 1)


def test_a_learner_that_was_cut_off_takes_no_share_when_it_is_back() -> None:
    with VirtualRun(SETTINGS, syncers=1) as run:
        begun(run, *LEARNERS)
        run.advance(10.0, until=lambda: not hear_heartbeats(run))
        own = held(run, "cat")
        run.cut("cat")
        run.advance(3.0)
        run.heal("cat")
        for _ in range(100):
            run.advance(0.1)
            assert held(run, "cat") == own
