"""A search in turn: each setting is searched at the best values of those before, over seeds that judge no arm."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_lab.experiment import spec, tuning
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results

IN_TURN = """
question = "Which rate and momentum?"
seeds = 1
tuning_seeds = 1

[settings]
learners = 2
"task.layers" = 1

[arms.mine]
settings = { "inner.learning_rate" = 0.02, "outer.momentum" = 0.5, "inner.beta2" = 0.95 }
tuned = { "inner.learning_rate" = [0.01, 0.02, 0.04], "outer.momentum" = [0.3, 0.5, 0.7], "inner.beta2" = [0.9, 0.95, 0.99] }
in_turn = true
"""
RATE, MOMENTUM, BETA2 = "inner.learning_rate", "outer.momentum", "inner.beta2"


@pytest.fixture
def in_turn(tmp_path: Path) -> Path:
    path = tmp_path / "in_turn.toml"
    path.write_text(IN_TURN)
    return path


def play(search: spec.Experiment) -> Results:
    """Let a lower rate of 0.01, a higher momentum and the middle beta2 be best: a sum of three terms that are easy to add."""

    def loss(settings: dict[str, float]) -> float:
        return 1 + 10 * abs(settings[RATE] - 0.01) + abs(settings[MOMENTUM] - 0.7) + abs(settings[BETA2] - 0.95)

    losses = {
        (name, seed): Measured(loss(arm.settings), 1, 1.0) for name, arm in search.arms.items() for seed in search.seed_range
    }
    return Results(losses, {})


def test_each_setting_is_searched_at_the_best_values_of_those_before(in_turn: Path) -> None:
    experiment = spec.load(str(in_turn))
    found: list[tuning.Tried] = []
    stages: list[list[tuple[float, float, float]]] = []
    while (search := tuning.search(experiment, found)) is not None:
        stages.append([(arm.settings[RATE], arm.settings[MOMENTUM], arm.settings[BETA2]) for arm in search.arms.values()])
        found += tuning.tried(experiment, play(search), found)
    assert stages == [
        [(0.01, 0.5, 0.95), (0.02, 0.5, 0.95), (0.04, 0.5, 0.95)],
        [(0.01, 0.3, 0.95), (0.01, 0.7, 0.95)],
        [(0.01, 0.7, 0.9), (0.01, 0.7, 0.99)],
    ]
    assert tuning.trials_of(experiment) == 7
    [choice] = tuning.choose(experiment, found)
    assert (choice.values, choice.trials) == ({RATE: 0.01, MOMENTUM: 0.7, BETA2: 0.95}, 7)
    assert choice.edges == [RATE, MOMENTUM]
    settled = tuning.settled(experiment, [choice])
    assert settled.settings_of("mine", 0).outer.momentum == 0.7
    assert tuning.search(settled) is None


def test_a_search_in_turn_goes_on_from_values_whose_trials_end(in_turn: Path) -> None:
    experiment = spec.load(str(in_turn))
    search = tuning.search(experiment)
    assert search is not None
    played = play(search)
    [best] = [key for key in played.measured if "learning_rate 0.01" in key[0]]
    played.measured[best] = Measured(None, 1, 1.0)  # the best one has diverged now
    following = tuning.search(experiment, tuning.tried(experiment, played))
    assert following is not None
    assert {arm.settings[RATE] for arm in following.arms.values()} == {0.02}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"outer.momentum" = 0.5, ', "", "set outer.momentum in settings to the value that the search starts from"),
        ('"outer.momentum" = 0.5, ', '"outer.momentum" = 0.4, ', r"one of \[0.3, 0.5, 0.7\]"),
        ("tuned = ", "# tuned = ", "no tuned settings to search"),
    ],
)
def test_a_search_in_turn_starts_from_one_of_its_values(in_turn: Path, old: str, new: str, said: str) -> None:
    assert old in IN_TURN
    in_turn.write_text(IN_TURN.replace(old, new, 1))
    with pytest.raises(SettingsError, match=said):
        spec.load(str(in_turn))


def test_arms_that_are_searched_in_turn_get_as_many_trials_as_others(in_turn: Path) -> None:
    in_turn.write_text(f"{IN_TURN}\n[arms.other]\ntuned = {{ 'inner.learning_rate' = [0.01, 0.02, 0.04] }}\n")
    with pytest.raises(SettingsError, match="equal numbers of trials, these do not: mine 7, other 3"):
        spec.load(str(in_turn))
