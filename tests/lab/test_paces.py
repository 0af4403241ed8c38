"""Paces: recorded from a live run's tapes and log, checked, and played; learners that come and go."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.tiny_trials import STEP_TOKENS
from tests.made.tiny_trials import play_tiny as played

from diloco.core.run.lives import Life
from diloco.core.run.tape import Start
from diloco.errors import DataError, SettingsError
from diloco_lab.experiment import spec
from diloco_lab.paces import recorder, recording, stalls
from diloco_lab.paces.recording import RecordedLearner, Recording
from diloco_lab.paces.spec import PaceSpec
from diloco_lab.paces.times import Paces, VirtualPace

GOOD = """
about = "a run beside nothing"
commits_ms = [2, 4]

[[learners]]
name = "learner-0"
versions = 1.0
begins_ms = 0
steps_ms = [100, 300]
offers_ms = [10]

[[learners]]
name = "learner-1"
versions = 0.5
begins_ms = 500
away_ms = [[1000, 3000]]
steps_ms = [200]
offers_ms = [20, 40]
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_a_recording_is_played_as_it_was_or_at_another_mean_step(good: Path) -> None:
    said = PaceSpec(recorded=str(good)).paces(2)
    first, second = VirtualPace((0.1, 0.3), (0.01,)), VirtualPace((0.2,), (0.02, 0.04), 0.5, ((1.0, 3.0),))
    assert said == Paces([first, second], commits=(0.002, 0.004))
    # the mean of 100, 300 and 200 ms is 0.2 s: at 0.1 s everything is half as long
    halved = PaceSpec(recorded=str(good), step_s=0.1).paces(2)
    assert halved.learners[1] == VirtualPace((0.1,), (0.01, 0.02), 0.25, ((0.5, 1.5),))
    assert halved.commits == (0.001, 0.002)


def test_a_trial_plays_the_recording_that_its_result_is_named_by(good: Path) -> None:
    pace = PaceSpec(recorded=str(good))
    first = pace.paces(2)
    good.write_text(GOOD.replace("[100, 300]", "[500]"))
    assert pace.paces(2) == pickle.loads(pickle.dumps(pace)).paces(2) == first  # in a trial's process, too
    assert pace.said()["recorded"]["learners"][0]["steps_ms"] == [100, 300]


def test_a_recording_is_written_as_it_is_read(good: Path, tmp_path: Path) -> None:
    first = recording.load(str(good))
    again = tmp_path / "again.toml"
    again.write_text(first.encode())
    assert recording.load(str(again)) == first


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("commits_ms", "commit_ms", r"good.toml: .*no setting 'commit_ms' \(did you mean 'commits_ms'"),
        ("steps_ms = [200]", "steps_ms = []", r"good.toml: learners.1.steps_ms = \[\]"),
        ("steps_ms = [200]", "steps_ms = [-5]", r"learners.1.steps_ms.0 = -5: .*greater than or equal to 0"),
        ("steps_ms = [200]", "steps_ms = [0]", "learner-1: steps_ms has no step that takes time"),
        ("[[1000, 3000]]", "[[3000, 1000]]", r"learner-1: away from 3 s to 1 s.*expected \[from, until\]"),
        ("versions = 0.5", "versions = 1.5", "learners.1.versions = 1.5"),
        ("offers_ms = [10]", "", "learners.0.offers_ms"),
    ],
)
def test_a_wrong_recording_is_refused_by_file_learner_and_expectation(good: Path, old: str, new: str, said: str) -> None:
    good.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SettingsError, match=said):
        recording.load(str(good))


def test_a_pace_names_a_recording_of_as_many_learners_and_learners_that_there_are(good: Path) -> None:
    with pytest.raises(SettingsError, match=r"good.toml.*has 2 learners, the arm 4"):
        PaceSpec(recorded=str(good)).paces(4)
    with pytest.raises(SettingsError, match=r"no such recording \(did you mean 'quiet'\?\); there are .*suite"):
        PaceSpec(recorded="quit").paces(4)
    with pytest.raises(
        SettingsError, match=r"pace.away: no 'learner-2' \(did you mean 'learner-.'\?\); there are learner-0 to"
    ):
        PaceSpec(away={"learner-2": [(1.0, 2.0)]}).paces(2)
    with pytest.raises(ValueError, match="factors are of steady steps"):
        PaceSpec(recorded=str(good), factors=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"pace.away, learner-0: away from 5 s to 6 s, after 9 s"):
        PaceSpec(away={"learner-0": [(1.0, 9.0), (5.0, 6.0)]})


def test_a_result_depends_on_what_the_recording_holds(good: Path) -> None:
    pace = PaceSpec(recorded=str(good))
    before = pace.said()
    good.write_text(GOOD.replace("[100, 300]", "[100, 301]"))
    assert PaceSpec(recorded=str(good)).said() != before


@pytest.mark.parametrize("name", recording.recordings())
def test_recordings_that_come_with_the_lab_can_be_read(name: str) -> None:
    assert len(recording.load(name).learners) == 4


def test_lives_on_a_tape_become_one_learner_that_was_away_in_between() -> None:
    lives = [
        Life(Start(10_500, 1, (0,)), step_ms=[200, 300], sent_ms=[7]),
        Life(Start(14_000, 2, (3,)), step_ms=[100], sent_ms=[]),
    ]
    made = recorder.learner(Path("run"), "learner-1", lives, 10_000, 0.5)
    # it joined 0.5 s after the first, its last known step ended 0.5 s later, and it was back at 4 s
    assert made == RecordedLearner(
        name="learner-1", versions=0.5, begins_ms=500, away_ms=[(1000, 4000)], steps_ms=[200, 300, 100], offers_ms=[7]
    )
    with pytest.raises(DataError, match="tape of learner-1 has 0 lengths of steps and 1 of offers"):
        recorder.learner(Path("run"), "learner-1", [Life(Start(1, 1, (0,)), sent_ms=[7])], 0, 0.5)


def test_steps_that_vary_are_drawn_by_seed_and_learner() -> None:
    first, slow = PaceSpec(factors=[1.0, 1.18], jitter=0.1).paces(2, seed=3).learners
    assert np.mean(first.steps) == pytest.approx(0.1, rel=0.01)
    assert np.std(first.steps) == pytest.approx(0.01, rel=0.05)
    assert np.mean(slow.steps) == pytest.approx(0.118, rel=0.01)
    assert np.corrcoef(first.steps, slow.steps)[0, 1] == pytest.approx(0, abs=0.1)
    assert PaceSpec(jitter=0.1).paces(2, seed=3).learners[0] == first
    assert PaceSpec(jitter=0.1).paces(2, seed=4).learners[0] != first
    offers = PaceSpec(offers_s=0.2).paces(1).learners[0].offers
    assert 0 <= min(offers) < max(offers) <= 0.2
    assert np.mean(offers) == pytest.approx(0.1, rel=0.05)
    assert min(PaceSpec(jitter=1.0).paces(1).learners[0].steps) > 0
    with pytest.raises(ValueError, match="jitter and offers_s are of steady steps"):
        PaceSpec(jitter=0.1, recorded="quiet")


TAPE = """{"format": "diloco-failures", "version": 1, "duration_s": 60.0}
{"at_s": 10.0, "kind": "freeze", "target": "learner-1", "duration_s": 20.0}
{"at_s": 28.0, "kind": "freeze", "target": "learner-*", "duration_s": 4.0}
"""


def test_a_tape_of_failures_lengthens_the_steps_that_they_meet(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(TAPE)
    # steps of 0.1 s where the tape's take 4 s: 10 s are two and a half steps
    first, second = PaceSpec(tape=str(path), tape_step_s=4.0).paces(2).learners
    assert np.array(first.stalls) == pytest.approx(np.array([(0.7, 0.1)]))
    assert np.array(second.stalls) == pytest.approx(np.array([(0.25, 0.5), (0.7, 0.1)]))
    assert stalls.lengthened(0.1, 0.1, second.stalls) == pytest.approx(0.1)
    # the second one comes while the first makes the step longer
    assert stalls.lengthened(0.1, 0.2, second.stalls) == pytest.approx(0.7)
    before = PaceSpec(tape=str(path)).said()
    path.write_text(TAPE.replace("20.0", "21.0"))
    assert PaceSpec(tape=str(path)).said() != before


@pytest.mark.parametrize(
    ("tape", "said"),
    [
        ("chips-120k", r"no such tape \(did you mean 'chips-1200k'\?\)"),
        (TAPE.replace("learner-*", "learner-7"), r"line 3: no learner is 'learner-7' .*there are learner-0 to learner-1"),
        (TAPE.replace("freeze", "chip_loss"), r"line 2: kind 'chip_loss' is not known here; known are freeze"),
        ("{}", "mine.jsonl: not a failure tape"),
    ],
)
def test_a_wrong_tape_is_refused_by_file_line_and_expectation(tmp_path: Path, tape: str, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(tape)
    with pytest.raises(SettingsError, match=said):
        PaceSpec(tape=tape if tape.startswith("chips") else str(path)).paces(2)
    with pytest.raises(ValueError, match="has the failures of its own run"):
        PaceSpec(recorded="quiet", tape="chips-1200k")


def play(text: str, paces: list[VirtualPace], steps: int, **changes: Any) -> Any:
    return played(text, steps * STEP_TOKENS, paces=Paces(paces), **changes)


@pytest.mark.slow
def test_learners_come_and_go_and_their_tokens_are_accounted_for(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    paces = [VirtualPace([0.1]), VirtualPace([0.1], begins_s=1.0), VirtualPace([0.1], away=[(1.23, 2.0)])]
    first, again = (play(text, paces, 90, learners=3) for _ in range(2))
    assert first.state_hashes == again.state_hashes
    assert first.loss == again.loss
    # who comes late and who comes back begin with a peer's optimizer state, both times
    assert capsys.readouterr().out.count("state_from_peer") == 4
    assert first.merged + first.lost + first.held == pytest.approx(1)
    # what was in no version yet when its process was killed is lost: the steps of a round and of what the round took
    assert 0 < first.lost < 8 / 90
    assert first.held == 0
    assert first.shares[0] > max(first.shares[1:])
    # where no learner is away, nothing is lost
    assert play(text, [VirtualPace([0.1])] * 3, 90, learners=3).lost == pytest.approx(0)


@pytest.mark.slow
def test_who_is_away_at_the_end_does_not_come_back(text: str) -> None:
    ended = play(text, [VirtualPace([0.1]), VirtualPace([0.1], away=[(1.0, 1e6)])], 60)
    assert ended.virtual_s < 100
    assert 60 * STEP_TOKENS <= ended.tokens <= 64 * STEP_TOKENS
    assert (ended.held, ended.lost > 0) == (0, True)  # who was killed holds nothing


@pytest.mark.slow
def test_offers_that_are_slow_miss_their_rounds(text: str) -> None:
    # a round closes within two steps of its quorum: an offer that takes three and a half is in the version after, if at all
    late = play(text, [VirtualPace([0.1]), VirtualPace([0.1], offers=[0.35])], 60)
    in_time = play(text, [VirtualPace([0.1]), VirtualPace([0.1], offers=[0.01])], 60)
    assert late.shares[0] > 0.9
    assert late.shares[1] < 0.7
    assert min(in_time.shares) > 0.9


def test_every_arm_of_an_experiment_is_checked_against_its_recording(tmp_path: Path, good: Path) -> None:
    path = tmp_path / "three.toml"
    path.write_text(f'question = "?"\nseeds = 1\n[settings]\nlearners = 3\n[arms.one]\npace = {{ recorded = "{good}" }}\n')
    with pytest.raises(SettingsError, match="has 2 learners, the arm 3"):
        spec.load(str(path))
    assert isinstance(recording.load(str(good)), Recording)
