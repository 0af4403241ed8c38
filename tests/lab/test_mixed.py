"""Mixed hardware (Table 5): learners that wait and that do not, and rounds that are counted by reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RoundSettings
from diloco_lab.published import mixed
from diloco_lab.published.mixed import MixedOutcome, RoundMode
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import Cluster, LearnerLink, RoundTerms
from diloco_lab.simulator.outcome import MergedVersion, Scenario
from diloco_lab.simulator.reports import ReportClock

NO_WINDOW = {"round.grace_factor": 0.0}
BY_WAY = {(way.name, bool(way.rounds().settings.round.grace_factor)): way for way in mixed.WAYS}


def clock(steps: int, **settings: Any) -> ReportClock:
    return ReportClock(RoundSettings(steps=steps, **settings))


def test_each_report_is_a_step_of_the_syncer_where_one_is_enough() -> None:
    """H = 4, P = 2: fragment 1 is due at steps 2, 6, ..., and fragment 0 at 4, 8, ..."""
    counted, due = clock(4, grace_factor=0.0), []
    for at_s, learner in enumerate(["a", "b", "c", "a", "b", "c"]):
        assert counted.report(learner, 1, 1.0, at_s) == 0
        asked = counted.take_step(at_s)
        due += [(fragment, counted.step, set(asked)) for fragment in (0, 1) if counted.is_due(fragment, 2)]
    assert due == [(1, 2, {"b"}), (0, 4, {"a"}), (1, 6, {"c"})]


def test_a_step_of_the_syncer_waits_for_its_quorum_and_then_for_its_window() -> None:
    counted = clock(4, grace_factor=0.5, overlap_steps=2.0)
    assert counted.report("a", 2, 1.0, 0.25) is None
    assert counted.report("a", 2, 1.0, 0.5) is None, "one learner, however often it reports"
    # 0.5 * (2 * 1 s - 1 s): the quorum took 1 s, and no fragment was synchronised yet
    assert counted.report("b", 2, 1.0, 1.0) == pytest.approx(0.5)
    assert counted.report("c", 2, 1.0, 1.25) is None, "the step is known to come"
    assert counted.take_step(1.5) == {"a", "b", "c"}
    assert (counted.step, counted.reported) == (1, set())


def versions_of(by_reports: bool, link: LearnerLink, **settings: Any) -> list[MergedVersion]:
    """The rounds of three learners with steps of 1, 1.25 and 1.6 s in 60 s; H = 4, P = 2."""
    run = run_settings("published", {"learners": 3, "fragments.count": 2, "round.steps": 4, **NO_WINDOW, **settings})
    cluster = Cluster(3, 3, 1, 1.0, math.inf, link=link, speeds=(1.0, 0.8, 0.625))
    versions: list[MergedVersion] = []
    rounds = RoundTerms(run, [1, 1], by_reports=by_reports)
    simulation.simulate(Scenario(cluster.split(1), 60.0, 1, rounds, on_version=versions.append))
    return versions


def test_rounds_by_reports_are_made_of_those_that_reported() -> None:
    """Reports: 1.0, 1.25 (t = 2: fragment 1), 1.6, 2.0 (t = 4: fragment 0), 2.5, 3.0 (t = 6: fragment 1)."""
    found = versions_of(True, LearnerLink())[:3]
    assert [(v.fragment, v.opened_us / 1e6, [name for name, _, _ in v.members]) for v in found] == [
        (1, 1.25, ["learner-1"]),
        (0, 2.0, ["learner-0"]),
        (1, 3.0, ["learner-0"]),
    ]


def test_in_slots_a_round_asks_all() -> None:
    """The steps of the fastest learner count: fragment 1 is due after 2, 6, ... of them, and fragment 0 after 4, 8, ..."""
    found = versions_of(False, LearnerLink())[:3]
    assert [(v.fragment, v.opened_us / 1e6, len(v.members)) for v in found] == [(1, 2.0, 3), (0, 4.0, 3), (1, 6.0, 3)]


def test_rounds_by_reports_take_the_time_of_their_messages() -> None:
    [first, *_] = versions_of(True, LearnerLink(delay_s=0.25))
    assert (first.opened_us, first.committed_us) == (1_500_000, 2_000_000)  # the report, and a way there and back


def test_a_round_by_reports_whose_learner_is_gone_asks_the_next_ones() -> None:
    """Reports take 0.25 s. The first learner is cut off after its first one, and counts as gone 5 s later.

    The other one has steps of 8 / 3 s. It answers, and applies its version at the end of its third step, so it holds a step
    again at the end of its fourth.
    """
    run = run_settings("published", {"learners": 2, "fragments.count": 1, "shards": 1, "round.steps": 1, **NO_WINDOW})
    versions: list[MergedVersion] = []
    cluster = Cluster(2, 2, 1, 2.0, math.inf, link=LearnerLink(delay_s=0.25), speeds=(1.0, 0.75))
    rounds = RoundTerms(run, [1], by_reports=True)
    cuts = {"learner-0": [(2_300_000, 30_000_000)]}  # after its report
    scenario = Scenario(cluster.split(1), 20.0, 1, rounds, cuts=cuts, on_version=versions.append)
    simulation.simulate(scenario)
    assert {name for version in versions for name, _, _ in version.members} == {"learner-1"}
    opened_s = [version.opened_us / 1e6 for version in versions]
    assert opened_s == pytest.approx([2.25, 4 * 8 / 3 + 0.25, 6 * 8 / 3 + 0.25], abs=1e-4)
    assert versions[0].committed_us == pytest.approx(2_000_000 + 250_000 + 5_000_000, abs=5)


@pytest.mark.parametrize("settings", [{"round.learners_wait": True}, {"apply.at": "overlap", "round.overlap_steps": 1.0}])
def test_rounds_by_reports_are_of_learners_that_do_not_wait(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="in Algorithm 2 no learner waits"):
        RoundTerms(run_settings("published", {"fragments.count": 1, "shards": 1, **settings}), [1], by_reports=True)


def test_learners_that_wait_for_all_take_the_time_of_the_slowest() -> None:
    """Each step lasts as long as the longest of eight normal ones, four with a mean of 1 s and four of 1.18 s."""
    times_s = np.linspace(0.0, 3.0, 30_001)
    none_longer = norm.cdf(times_s, 1.0, 0.1) ** 4 * norm.cdf(times_s, 1.18, 0.118) ** 4
    longest_s = float(np.sum(1 - none_longer) * (times_s[1] - times_s[0]))
    assert longest_s == pytest.approx(1.30, abs=0.01)
    played = mixed.play(BY_WAY["learners wait for all", False], 1)
    assert played.goodput == pytest.approx(1.09 / longest_s, abs=0.01)
    assert played.goodput == pytest.approx(0.84, abs=0.015), "as published"
    assert (played.members, played.merged) == (8, 1)


def test_learners_that_do_not_wait_lose_no_time() -> None:
    """H = 24 steps of the fastest kind, of 1 s each. A version overwrites the step that was begun: one of 24 is lost."""
    played = mixed.play(BY_WAY["rounds wait for all, learners do not", False], 1)
    assert (played.goodput, played.members) == (1.0, 8)
    assert played.every_s == pytest.approx(24, rel=0.02)


def test_one_by_reports_synchronises_with_each_report() -> None:
    """In a second 4 / 1 + 4 / 1.18 = 7.39 reports: 24 of them take 3.25 s, and each version is of one learner."""
    played = mixed.play(BY_WAY["one, by reports", False], 1)
    assert played.every_s == pytest.approx(24 / (4 + 4 / 1.18), rel=0.02)
    assert (played.goodput, played.members) == (1.0, 1.0)
    assert played.merged < 0.2, "the other seven are overwritten"


def test_the_table_by_hand() -> None:
    way = RoundMode("x", {"round.quorum": "all"}, published_goodput=0.84)
    [cells] = mixed.table([(way, [MixedOutcome(0.8, 24.0, 8.0, 1.0), MixedOutcome(0.8, 26.0, 7.0, 0.9)])])[1]
    assert cells == ["x", "8", "on", "80.0 (84)", "25.0 s", "7.50", "95.0"]


def test_each_step_is_drawn_and_the_steps_do_not_depend_on_how_many_are_asked_for() -> None:
    [learner] = Cluster(1, 1, 1, 1.0, math.inf, step_spread=0.1).split(1)
    one, many = (Scenario([learner], 10_000.0, 1).lifetime(learner) for _ in range(2))
    times_s = np.array([(s.end_us - s.start_us) / 1e6 for s in (one.advance(1, 10**12) for _ in range(2000))])
    assert times_s.mean() == pytest.approx(1.0, abs=0.01)
    assert times_s.std() == pytest.approx(0.1, abs=0.01)
    while many.now_us < one.now_us:
        many.advance(7, 10**12)
    assert many.now_us == one.now_us
    with pytest.raises(SettingsError, match="step_spread"):
        replace(learner, step_spread=2.0)
