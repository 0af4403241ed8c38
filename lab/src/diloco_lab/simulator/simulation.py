"""Simulate a scenario: the lifetimes of its learners, and the rounds that they take part in."""

from __future__ import annotations

from diloco_lab.simulator import rounds
from diloco_lab.simulator.lifetime_history import AHEAD_US, LifetimeTotals
from diloco_lab.simulator.outcome import Outcome, Scenario, Uptime


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario; one without rounds is made of its learners' lifetimes alone."""
    if scenario.rounds is not None:
        return rounds.simulate(scenario, scenario.rounds)
    uptime = Uptime(len(scenario.learners), scenario.duration_us)
    histories = [LifetimeTotals(scenario, index, learner, uptime) for index, learner in enumerate(scenario.learners)]
    # together, so that uptime can be settled and forgotten
    for until_us in range(0, scenario.duration_us + AHEAD_US, AHEAD_US):
        for history in histories:
            history.extend(until_us)
    uptime.settle()
    return Outcome(scenario.duration_us, uptime.stepping_us, [history.outcome() for history in histories])
