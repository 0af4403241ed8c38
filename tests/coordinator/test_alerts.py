"""Conditions that need attention: each begins and ends, and is told once."""

from __future__ import annotations

from msgspec.structs import replace
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.monitors import entry_record, monitor

from diloco.core.run.changes import Effective
from diloco.core.run.quarantine import Outlying, OutlyingLearner
from diloco.transport import Room
from diloco.wire.quarantines import SeenOutlier
from diloco_coordinator.alerts import MAX_EVENTS, Alerts, conditions
from diloco_coordinator.monitor import MAX_FAILURES, Monitor


def stepping(made: Monitor, until_s: int, loss: float = 2.0) -> None:
    for at_s in range(1, until_s):
        made.hear(learner_heartbeat("ann", at_s, loss=loss), float(at_s))


def test_nothing_is_wrong_with_a_run_that_goes_well() -> None:
    made = monitor()
    stepping(made, 30)
    for version in range(1, 9):
        for fragment in (0, 1):
            made.entry(entry_record(fragment, version, "s", "ann"), 3.0 * version)
    assert list(conditions(made, 29.0)) == []


def test_a_restarted_learner_is_an_event() -> None:
    made, alerts = monitor(), Alerts()
    for incarnation in (1, 1, 2):
        made.hear(learner_heartbeat("ann", 1, incarnation=incarnation), 5.0)
        alerts.note(made, 5.0)
        alerts.note(made, 6.0)
    assert alerts.events == [(5.0, "ann: was restarted; its new process is heard")]


def test_a_learner_that_is_not_heard_and_one_that_comes_back() -> None:
    made, alerts = monitor(), Alerts()
    stepping(made, 10)
    alerts.note(made, 9.0)
    assert alerts.dump(9.0) == {"alerts": [], "events": []}
    gone_s = 10.0 + made.gone_s
    alerts.note(made, gone_s)
    alerts.note(made, gone_s + 1)
    assert alerts.dump(gone_s + 1)["alerts"] == [{"text": "ann: not heard", "since_s": 1}]
    made.hear(learner_heartbeat("ann", 20), gone_s + 2)
    alerts.note(made, gone_s + 2)
    assert [text for _, text in alerts.events] == ["ann: not heard", "ann: heard again, after 2 s"]
    assert alerts.holding == {}


def test_a_learner_that_is_in_no_merge() -> None:
    made = monitor()
    stepping(made, 20)
    for version in range(1, 7):
        for fragment in (0, 1):
            made.entry(entry_record(fragment, version, "s", "bob"), 1.0 * version)
    assert list(conditions(made, 19.0)) == ["ann: takes steps, but none of its work is merged"]
    made.entry(entry_record(0, 7, "s", "ann"), 19.0)
    assert list(conditions(made, 19.0)) == []


def test_an_evaluator_whose_task_fails_and_is_well_again() -> None:
    made = monitor()
    said = learner_heartbeat("evaluator", 0, role="evaluator", failure="OSError: gone (mine.py, line 7)")
    made.hear_evaluator(said, 1.0)
    assert made.status(1.0)["failures"] == {"evaluator": "OSError: gone (mine.py, line 7)"}
    assert list(conditions(made, 1.0)) == ["evaluator: OSError: gone (mine.py, line 7)"]
    for number in range(100):  # any identity may say that it is one
        made.hear_evaluator(replace(said, learner=f"mallory-{number}"), 2.0)
    assert len(made.failures) == MAX_FAILURES
    made.hear_evaluator(replace(said, failure=None), 3.0)
    assert "evaluator" not in made.failures


def test_a_learner_whose_steps_change_nothing() -> None:
    made = monitor()
    said = learner_heartbeat("ann", 12, failure="no loss of its newest 10 steps is finite")
    made.hear(said, 1.0)
    assert made.status(1.0)["failures"] == {"ann": "no loss of its newest 10 steps is finite"}
    assert list(conditions(made, 1.0)) == ["ann: no loss of its newest 10 steps is finite"]
    made.hear(replace(said, step=11, failure=None), 2.0)  # an earlier heartbeat, which came late
    assert "ann" in made.failures
    made.hear(replace(said, step=13, failure=None), 3.0)
    assert not made.failures


def test_a_loss_that_jumps() -> None:
    made = monitor()
    stepping(made, 30)
    for at_s in (30, 31, 32):  # one step, or two, may be anything
        assert list(conditions(made, float(at_s))) == []
        made.hear(learner_heartbeat("ann", at_s, loss=3.1), float(at_s))
    assert list(conditions(made, 32.0)) == ["ann: its loss has risen far above its earlier values"]


def test_a_fragment_that_makes_no_version_while_another_does() -> None:
    made = monitor()
    stepping(made, 200)
    made.entry(entry_record(0, 1, "s-0", "ann"), 10.0)
    for version in range(1, 60):
        made.entry(entry_record(1, version, "s-1", "ann"), 3.0 * version)
    made.hear_shard(shard_heartbeat("s-0", fragments=[0]), 198.0)
    made.hear_shard(shard_heartbeat("s-1", fragments=[1]), 198.0)
    assert list(conditions(made, 199.0)) == ["fragment 0: stalled, s-0 makes no version"]
    made.closed.add(1)  # the run comes to its end, which waits for fragment 0
    assert list(conditions(made, 199.0)) == ["fragment 0: stalled, s-0 makes no version"]
    made.hear_shard(shard_heartbeat("s-0", fragments=[]), 199.0)  # it has begun again, and reads the log
    assert list(conditions(made, 199.0)) == ["fragment 0: stalled, no syncer serves it yet"]


def test_events_are_bounded() -> None:
    alerts = Alerts()
    for number in range(3 * MAX_EVENTS):
        alerts.tell("x" * 10_000 + str(number), float(number))
    assert len(alerts.events) == MAX_EVENTS
    assert len(alerts.events[0][1]) == 200


def test_a_stream_that_is_nearly_full() -> None:
    made = monitor()
    made.rooms = [Room("OFFERS", 899_999_999, 10**9), Room("ARCHIVE", 900_000_000, 10**9)]
    assert list(conditions(made, 1.0)) == ["ARCHIVE: nearly full; versions wait once it reaches its limit of 1.00 GB"]


def test_rounds_that_last_longer_than_the_steps_between_them() -> None:
    made = monitor()
    steps = made.settings.round.steps
    made.hear(learner_heartbeat("ann", 3, step_s=0.1), 1.0)

    def play(round_s: float, rounds: int) -> list[str]:
        """Rounds of fragment 1, each seen when it has just begun, when it is about to end, and when it is over."""
        for _ in range(rounds):
            for opened in ([(1, 0, 1, 0.01)], [(1, 0, 1, round_s)], []):
                made.hear_shard(shard_heartbeat("syncer-0", fragments=[1], open=opened), 1.0)
        return list(conditions(made, 1.0))

    assert play(0.1 * steps, 5) == []
    assert play(0.15 * steps, 2) == [], "a learner may have been gone for so long"
    [found] = play(0.15 * steps, 1)
    assert found.startswith(f"rounds last {0.15 * steps:.3g} s, but {steps} steps last {0.1 * steps:.3g} s")
    assert play(0.2 * steps, 3) == [found], "in the same words while it lasts"
    assert play(0.1 * steps, 1) == []


def test_a_learner_with_outliers_is_named_with_who_found_them() -> None:
    made = monitor()
    stepping(made, 3)
    seen = SeenOutlier("ann", 1, 1, 8, 30.0, 5.0, 0, is_over=False)
    found = {"ann": OutlyingLearner("ann", (("syncer-0", seen), ("syncer-1", replace(seen, fragment=2))))}
    made.change(Effective(made.settings, outlying=Outlying(quarantined=found)))
    assert list(conditions(made, 3.0)) == ["ann: quarantined, its outer gradients were outliers, as syncer-0, syncer-1 found"]
    status = made.status(3.0)
    assert status["learners"]["ann"]["state"] == "quarantined"
    assert status["quarantined"] == {
        "ann": "outliers in 2 fragments, as syncer-0, syncer-1 found: in fragment 1 a norm of 30, above 5"
    }
    made.change(Effective(made.settings, outlying=Outlying(suspected=found)))
    [suspected] = conditions(made, 3.0)
    assert suspected.startswith("ann: its outer gradients are outliers in most fragments; a syncer of an earlier version")
    assert made.status(3.0)["learners"]["ann"]["state"] == "stepping"
