"""Rounds as they were recorded: the same chip time, rounds, members and totals, version by version.

``rounds.json`` has, by case: the outcome, and of the versions, in order of fragment and version, when each was opened and
committed, and the SHA-256 of all members. ``python -m tests.lab.test_rounds`` records all cases again. What a record must hold
by the rules alone is tested here too: where in the cycle rounds open, and when their versions are applied.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import YEAR_S, Cluster, Costs, LearnerLink, RoundTerms, Slowdowns
from diloco_lab.simulator.outcome import MergedVersion, Outcome, Scenario
from diloco_lab.simulator.repair import RepairTime
from diloco_lab.traces import tapes
from diloco_ops.failures import Failure, FailureTape

TOLERANCE_US = 5  # the syncer counts in float seconds, and wakes a microsecond after the end of a grace window
RECORDS = Path(__file__).with_name("rounds.json")
LINK = LearnerLink(1e9, 0.02)


@dataclass
class Case:
    """A small scenario; what is not said is regular."""

    preset: str = "decoupled"
    learners: int = 4
    chips: int = 400_000  # of each learner, which at 256 a slice fails every minute or two
    duration_s: float = 900.0
    step_s: float = 5.0
    link: LearnerLink = LINK
    settings: dict[str, Any] | None = None
    elastic: bool = True
    answer_s: float = 0.05
    commit_s: float = 0.02
    speeds: tuple[float, ...] = ()
    spread: float = 0.0
    slowdowns: Slowdowns | None = None
    present: tuple[tuple[float, float], ...] = ()  # of the last learner
    tape: tuple[Failure, ...] = ()
    seed: int = 1
    first_link: LearnerLink | None = None  # of the first learner

    def scenario(self) -> Scenario:
        cluster = Cluster(
            self.chips * self.learners,
            self.learners,
            256,
            self.step_s,
            YEAR_S,
            RepairTime(1.0, 1.0, 1200.0),
            Costs(self.elastic, 20.0, 16.0, 60.0, 82.0),
            self.slowdowns,
            self.link,
            100,
            self.spread,
            self.speeds,
        )
        run = run_settings(self.preset, {"learners": self.learners, **(self.settings or {})})
        rounds = RoundTerms(run, [10_000_000 + 1_000_000 * p for p in range(run.fragments.count)], self.answer_s, self.commit_s)
        learners = list(cluster.split(self.seed))
        learners[-1] = replace(learners[-1], present=self.present)
        learners[0] = replace(learners[0], link=self.first_link or self.link)
        tape = tapes.played(FailureTape(self.duration_s, self.tape), learners)
        return Scenario(learners, self.duration_s, self.seed, rounds, tape.faults, tape.cuts)


def assert_lives_equal(one: Outcome, other: Outcome) -> None:
    assert [learner.chip_time for learner in one.learners] == [learner.chip_time for learner in other.learners]
    assert one.stepping_us == other.stepping_us
    for mine, theirs in zip(one.learners, other.learners, strict=True):
        for name in ("name", "steps", "tokens", "failures"):
            assert getattr(mine, name) == getattr(theirs, name)


def played(scenario: Scenario) -> tuple[Outcome, list[MergedVersion]]:
    versions: list[MergedVersion] = []
    outcome = simulation.simulate(replace(scenario, on_version=versions.append))
    return outcome, sorted(versions, key=lambda version: (version.fragment, version.version))


def members_digest(versions: list[MergedVersion]) -> str:
    stated = [[version.fragment, version.version, version.members] for version in versions]
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()


def record(scenario: Scenario) -> dict[str, Any]:
    outcome, versions = played(scenario)
    return {
        "versions": outcome.versions,
        "members": outcome.members,
        "stepping_us": outcome.stepping_us,
        "learners": [asdict(learner) for learner in outcome.learners],
        "members_sha256": members_digest(versions),
        "opened_us": [version.opened_us for version in versions],
        "committed_us": [version.committed_us for version in versions],
    }


SMALL: dict[str, Any] = {"fragments.count": 4, "round.steps": 6}
QUIET: dict[str, Any] = {"chips": 10_000, "settings": SMALL}
CASES = {
    "decoupled": Case(settings={"fragments.count": 12, "round.steps": 12}),
    "published": Case(preset="published", learners=3, settings={"fragments.count": 6, "round.steps": 12}),
    "streaming": Case(preset="streaming", settings=SMALL),
    "diloco": Case(preset="diloco", learners=3, duration_s=4000.0, settings={"round.steps": 24}),
    "one learner": Case(learners=1, settings=SMALL),
    "quorum of two, no grace": Case(settings={**SMALL, "round.quorum": 2, "round.grace_factor": 0.0}),
    "quorum of all": Case(settings={**SMALL, "round.quorum": "all"}, speeds=(1.0, 0.7, 1.31, 1.0)),
    "late learners": Case(settings=SMALL, speeds=(1.0, 0.4, 1.31, 1.0)),
    "nothing kept": Case(settings={**SMALL, "carry.overlap": False}),
    "unlimited links at once": Case(link=LearnerLink(), answer_s=0.0, commit_s=0.0, settings=SMALL),
    "thin links": Case(link=LearnerLink(3e7, 0.2), settings=SMALL),
    "very thin links": Case(link=LearnerLink(6e6, 0.2), settings=SMALL, duration_s=1500.0),
    "not elastic": Case(elastic=False, settings=SMALL),
    "chips of unequal speed": Case(spread=0.05, settings={**SMALL, "round.overlap_steps": 6.0}),
    "steps that differ": Case("published", settings={**SMALL, "round.quorum": 2}, speeds=(0.7, 1.0, 1.31, 1.31), chips=20_000),
    "only a scavenged learner": Case(learners=1, present=((50.0, 200.0), (300.0, 500.0)), settings=SMALL, chips=20_000),
    "killed before the first version": Case(learners=1, settings=SMALL, chips=20_000, tape=(Failure(19.0, "kill", "*"),)),
    "a scavenged learner": Case(present=((100.0, 400.0), (500.0, 800.0)), settings=SMALL, chips=20_000),
    "slowdowns": Case(slowdowns=Slowdowns(300.0, 30.0, 2.0), **QUIET),
    "all but the dead": Case(
        tape=(Failure(150.0, "kill", "learner-1"), Failure(180.0, "kill", "learner-2")),
        chips=10_000,
        settings={**SMALL, "round.quorum": "all"},
    ),
    "versions outrun a link": Case(settings=SMALL, duration_s=2000.0, first_link=LearnerLink(2e6, 0.02)),
}


def drawn(seed: int) -> Case:
    chance = random.Random(seed)
    learners, preset = chance.choice((1, 2, 3, 5)), chance.choice(("decoupled", "streaming", "diloco", "published"))
    settings: dict[str, Any] = {"round.steps": chance.choice((3, 6, 12))}
    if preset != "diloco":
        settings["round.quorum"] = chance.choice((1, max(1, learners // 2), "all"))
        settings["fragments.count"] = chance.choice((2, 4, 6))
    if chance.random() < 0.4:
        settings["carry.overlap"] = chance.choice((False, True))
    if chance.random() < 0.3:
        settings["round.grace_factor"] = 0.0
    if chance.random() < 0.3:
        settings["round.overlap_steps"] = chance.choice((1.0, 2.5))
    return Case(
        preset,
        learners,
        chance.choice((20_000, 200_000, 600_000)),
        600.0,
        chance.choice((2.0, 5.0, 20.0)),
        LearnerLink(chance.choice((math.inf, 1e9, 1e8, 2e7)), chance.choice((0.013, 0.2))),
        settings,
        chance.random() < 0.8,
        chance.choice((0.0, 0.07)),
        chance.choice((0.0, 0.03)),
        tuple(chance.choice((1.0, 0.7, 1.31)) for _ in range(learners)) if chance.random() < 0.5 else (),
        seed=seed,
    )


FREEZE = Failure(200.0, "freeze", "learner-1", 40.0)
FAULTS = {
    "chip_loss": (Failure(100.0, "chip_loss", "learner-0/slice-3", 300.0), Failure(101.0, "chip_loss", "*/slice-1", 50.0)),
    "kill": (Failure(150.0, "kill", "learner-1"), Failure(403.0, "kill", "learner-0")),
    "kill all": (Failure(300.0, "kill", "learner-*"),),
    "freeze": (FREEZE,),
    "slow": (Failure(100.0, "slow", "learner-2", 200.0, {"factor": 3.0}),),
    "cut": (Failure(150.0, "cut", "learner-1", 60.0),),
    "everything": (
        Failure(100.0, "chip_loss", "learner-0/slice-3", 300.0),
        Failure(120.0, "slow", "learner-2", 200.0, {"factor": 2.0}),
        Failure(150.0, "kill", "learner-1"),
        FREEZE,
        Failure(400.0, "cut", "learner-0", 30.0),
        Failure(500.0, "freeze", "learner-*", 15.0),
    ),
}
CASES |= {f"drawn {seed}": drawn(seed) for seed in range(12)}
CASES |= {
    f"{name}, {preset}": Case(preset, tape=tape, **QUIET)
    for preset in ("decoupled", "streaming")
    for name, tape in FAULTS.items()
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_as_recorded(name: str) -> None:
    made, recorded = record(CASES[name].scenario()), json.loads(RECORDS.read_text())[name]
    assert made["versions"] >= 3, "nothing to compare"
    for learner, was in zip(made["learners"], recorded["learners"], strict=True):
        for quantity in ("merged_tokens", "lost_tokens"):  # means over the parameters
            assert learner.pop(quantity) == pytest.approx(was.pop(quantity), rel=1e-9, abs=1e-9 * learner["tokens"])
    for times in ("opened_us", "committed_us"):
        assert made.pop(times) == pytest.approx(recorded.pop(times), rel=0, abs=TOLERANCE_US)
    assert made == recorded


def test_lives_without_rounds_are_those_with_rounds_that_do_not_wait() -> None:
    scenario = CASES["decoupled"].scenario()
    assert_lives_equal(simulation.simulate(scenario), simulation.simulate(replace(scenario, rounds=None)))


def test_more_tokens_than_can_be_counted_are_refused() -> None:
    scenario = Case().scenario()
    learners = [replace(learner, tokens=1 << 50) for learner in scenario.learners]
    with pytest.raises(SettingsError, match=r"learner-0: tokens = 1125899906842624"):
        simulation.simulate(replace(scenario, learners=learners, duration_s=7 * 86400.0))


def test_a_model_has_fewer_fragments_than_the_settings_say_only_if_it_is_cut_by_layers() -> None:
    by_layers = run_settings(overrides={"fragments.strategy": "layers", "fragments.count": 24})
    assert len(RoundTerms(by_layers, [10] * 4).sizes) == 4
    with pytest.raises(SettingsError, match=r"25 sizes, and fragments.count = 24; expected at most as many"):
        RoundTerms(by_layers, [10] * 25)
    with pytest.raises(SettingsError, match=r"4 sizes, and fragments.count = 24; expected as many"):
        RoundTerms(run_settings(overrides={"fragments.count": 24}), [10] * 4)


def test_fragments_have_their_slots_and_a_round_every_h_steps() -> None:
    """H = 6, P = 4: offsets floor(6 p / 4) are 0, 1, 3, 4. A step takes 5 s, and word of it 0.02 s."""
    _, versions = played(Case(chips=256, learners=1, duration_s=400.0, settings=SMALL).scenario())
    for fragment, first_step in enumerate((6, 1, 3, 4)):
        opened_s = [version.opened_us / 1e6 for version in versions if version.fragment == fragment]
        assert opened_s[:12] == pytest.approx([5.0 * (first_step + 6 * n) + 0.02 for n in range(12)], abs=1e-4)


def rounds_of_one(tau: float, link: LearnerLink) -> tuple[list[float], list[int]]:
    """One learner's rounds of the whole model, with steps of 5 s and H = 24: seconds after the first one, and steps in them."""
    settings = {"fragments.count": 1, "shards": 1, "round.steps": 24, "round.overlap_steps": tau, "apply.at": "overlap"}
    case = Case("streaming", learners=1, chips=256, duration_s=1000.0, link=link, settings=settings)
    _, versions = played(case.scenario())
    first, *others = (version.opened_us / 1e6 for version in versions)
    assert first == pytest.approx(24 * 5.0 + link.delay_s, abs=1e-4)
    assert len(others) >= 5
    return [opened_s - first for opened_s in others], [steps for version in versions for _, steps, _ in version.members]


@pytest.mark.parametrize("tau", [1, 5, 10])
def test_a_version_is_applied_tau_steps_after_the_answer(tau: int) -> None:
    opened_s, steps = rounds_of_one(tau, LINK)
    assert opened_s == pytest.approx([24 * 5.0 * n for n in range(1, len(opened_s) + 1)], abs=1e-3)
    # a version overwrites the tau steps since the answer: the next round, 24 steps after it, has the others
    assert steps == [24] + [24 - tau] * len(opened_s)


def test_a_late_version_makes_a_learner_wait_and_not_for_longer_than_for_a_dead_member() -> None:
    # 10^7 values: up 4 bits and a 64th of a scale of 16 bits each, down 32 bits. A step, a round, an offer and a version travel
    # for 0.02 s each, an answer takes 0.05 s, and a commit 0.02 s
    bits, fixed_s = 4.25e7 + 32e7, 4 * 0.02 + 0.05 + 0.02
    late_s, very_late_s = bits / 5e7 + fixed_s, bits / 2e7 + fixed_s
    assert late_s > 5.0, "tau, one step, is over"
    opened_s, steps = rounds_of_one(1, LearnerLink(5e7, 0.02))
    assert opened_s[0] == pytest.approx(24 * 5.0 + late_s - 5.0, abs=0.01)
    assert steps[:2] == [24, 23]
    # it waits from 5 s to 10 s after its answer, and steps on: the version comes in the second step from there
    assert 15.0 < very_late_s < 20.0
    opened_s, steps = rounds_of_one(1, LearnerLink(2e7, 0.02))
    assert opened_s[0] == pytest.approx(24 * 5.0 + 5.0, abs=0.01)
    assert steps[:2] == [24, 21]


if __name__ == "__main__":
    records = {name: json.dumps(record(case.scenario()), separators=(",", ":")) for name, case in CASES.items()}
    RECORDS.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {made}" for name, made in records.items()) + "\n}\n")
