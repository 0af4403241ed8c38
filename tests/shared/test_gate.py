"""The gate under a clock of the test's own: whose heartbeats are heard, what is held back, and what is kept of strangers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.heartbeats import learner_heartbeat

from diloco.core.run.gate import AGAIN_S, MAX_HELD, MAX_STRANGERS, READS, Gate, HeartbeatVerdict
from diloco.errors import FormatError
from diloco.wire.fields import MAX_MEMBERS

BUDGET = 10**6


def hear(gate: Gate, name: str, now_s: float = 0.0, **changes: Any) -> HeartbeatVerdict:
    """Have a heartbeat come on a name's subject."""
    return gate.glance(name, now_s) or gate.hear(learner_heartbeat(name, **changes), BUDGET, now_s)


def admitted(*names: str) -> Gate:
    """A gate that has heard these, in incarnation 1."""
    gate = Gate()
    for name in names:
        assert hear(gate, name) is HeartbeatVerdict.HELD
        assert gate.admit(name, 1, 0.0) is not None
        assert hear(gate, name) is HeartbeatVerdict.HEARD
    return gate


def test_a_heartbeat_is_held_until_its_admission_was_read_and_the_newest_one_comes_in() -> None:
    gate = Gate()
    assert hear(gate, "ann", step=1) is HeartbeatVerdict.HELD
    assert hear(gate, "ann", step=2) is HeartbeatVerdict.HELD
    assert gate.wanted(0.0) == ["ann"]
    held = gate.admit("ann", 1, 0.1)
    assert held is not None
    assert held.step == 2
    assert not gate.waits
    assert hear(gate, "ann", 0.2, step=3) is HeartbeatVerdict.HEARD


def test_a_learner_that_is_not_admitted_is_dropped_undecoded_and_looked_up_now_and_then() -> None:
    gate = Gate()
    hear(gate, "eve")
    assert gate.admit("eve", None, 0.0) is None
    assert gate.is_stranger("eve")
    assert gate.glance("eve", AGAIN_S - 0.01) is HeartbeatVerdict.DROPPED
    assert hear(gate, "eve", AGAIN_S) is HeartbeatVerdict.HELD, "it may have been admitted since"
    assert gate.admit("eve", 1, AGAIN_S) is not None
    assert not gate.is_stranger("eve")


def test_another_incarnation_than_the_admitted_one_says_nothing_of_the_learner() -> None:
    """A liar cannot go beyond what it is admitted in, and a younger process takes its name over when it is admitted."""
    gate = admitted("ann")
    for incarnation in (0, 2, 2**62):
        assert hear(gate, "ann", 1.0, incarnation=incarnation, state="left") is HeartbeatVerdict.DROPPED, "read a moment ago"
    assert hear(gate, "ann", AGAIN_S, incarnation=2**62, state="left") is HeartbeatVerdict.HELD
    assert gate.admit("ann", 1, AGAIN_S) is None, "it is not that one which is admitted"
    assert hear(gate, "ann", AGAIN_S, step=9) is HeartbeatVerdict.HEARD
    assert hear(gate, "ann", 2 * AGAIN_S, incarnation=2) is HeartbeatVerdict.HELD
    assert gate.admit("ann", 2, 2 * AGAIN_S) is not None
    assert hear(gate, "ann", 2 * AGAIN_S) is HeartbeatVerdict.DROPPED, "the process before"


def test_an_admission_that_a_server_lost_and_has_again_lets_an_older_incarnation_in() -> None:
    gate = admitted("ann")
    hear(gate, "ann", AGAIN_S, incarnation=0)
    assert gate.admit("ann", 0, AGAIN_S) is not None
    assert hear(gate, "ann", AGAIN_S, incarnation=0) is HeartbeatVerdict.HEARD


def test_a_flood_of_names_costs_a_bounded_number_of_reads_and_of_names() -> None:
    """20,000 names, each of which sends a heartbeat every second for a minute."""
    gate, read = admitted("ann"), 0
    for now_s in range(1, 61):
        crowded = sum(hear(gate, f"ghost-{i}", float(now_s)) is HeartbeatVerdict.CROWDED for i in range(20_000))
        assert crowded >= 20_000 - MAX_HELD - MAX_STRANGERS
        for tenth in range(10):
            for name in gate.wanted(now_s + tenth / 10):
                assert gate.admit(name, None, now_s + tenth / 10) is None
                read += 1
        assert hear(gate, "ann", float(now_s)) is HeartbeatVerdict.HEARD
    assert read <= READS + 61 * 32
    assert len(gate._held) <= MAX_HELD
    assert len(gate._strangers) <= MAX_STRANGERS


def test_a_learner_that_was_admitted_before_is_read_first_in_a_flood() -> None:
    gate = admitted("ann")
    for i in range(MAX_HELD):
        hear(gate, f"ghost-{i}", AGAIN_S)
    assert hear(gate, "ghost", AGAIN_S) is HeartbeatVerdict.CROWDED
    assert hear(gate, "ann", AGAIN_S, incarnation=2) is HeartbeatVerdict.HELD
    assert gate.wanted(AGAIN_S)[0] == "ann"


def test_of_more_members_than_a_run_can_have_the_one_is_forgotten_that_was_silent_for_longest() -> None:
    gate = Gate()
    for i in range(MAX_MEMBERS + 1):
        gate.admit(f"toy-{i}", 1, float(i))
    assert not gate.admits("toy-0")
    assert gate.admits("toy-1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # first heard with 100 steps and 1,000 tokens, in batches of 10; then 2 s pass
        ({"step": 100 + 1000 + 20_001}, "21101 steps, expected at most 21100"),
        ({"step": 2**62}, "steps, expected at most 21100"),
        ({"step": 110, "tokens": 1000 + 1010 * 10 + 1}, "11101 tokens, expected at most 11100"),
        ({"step": 110, "tokens": 2**62}, "tokens, expected at most 11100"),
        ({"step": 110, "tokens": 2**62, "batch_tokens": 2**62}, f"tokens, expected at most {2 * BUDGET + 2**27}"),
        ({"step": 110, "tokens": 2 * BUDGET + 2**27 + 1, "batch_tokens": 0}, f"expected at most {2 * BUDGET + 2**27}"),
    ],
)
def test_claims_beyond_what_can_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    gate = admitted("bob")
    gate.admit("ann", 1, 0.0)
    usual = {"tokens": 1000, "batch_tokens": 10}
    assert hear(gate, "ann", 1.0, step=100, **usual) is HeartbeatVerdict.HEARD
    with pytest.raises(FormatError, match=reason):
        hear(gate, "ann", 3.0, **(usual | changes))
    assert hear(gate, "ann", 3.0, step=102, tokens=1020, batch_tokens=10) is HeartbeatVerdict.HEARD


def test_the_steps_of_a_checkpoint_that_is_restored_after_the_first_heartbeat_are_no_claim_too_large() -> None:
    gate = admitted("ann")
    gate.admit("ann", 2, 1.0)
    usual = {"incarnation": 2, "batch_tokens": 10}
    assert hear(gate, "ann", 1.0, state="starting", step=0, tokens=0, **usual) is HeartbeatVerdict.HEARD
    assert hear(gate, "ann", 1.1, state="recovering", step=10**6, tokens=10**7, **usual) is HeartbeatVerdict.HEARD
    with pytest.raises(FormatError, match="3000000 steps"):  # from here on it counts
        hear(gate, "ann", 1.2, step=3 * 10**6, tokens=10**7, **usual)


def test_a_restart_with_a_checkpoint_or_with_other_batches_is_no_claim_too_large() -> None:
    gate = admitted("ann")
    gate.admit("ann", 2, 1.0)
    assert hear(gate, "ann", 1.0, incarnation=2, step=10**6, tokens=9 * 10**5, batch_tokens=10**5) is HeartbeatVerdict.HEARD
    assert hear(gate, "ann", 2.0, incarnation=2, step=10**6 + 1, tokens=10**6, batch_tokens=10**5) is HeartbeatVerdict.HEARD
