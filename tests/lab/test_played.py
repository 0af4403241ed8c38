"""Three tiny experiments, played as users play them: `diloco lab run`, with its tables, files and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.made.tiny_trials import TINY_TRIAL
from tests.made.up_command import some_text
from typer.testing import CliRunner, Result

from diloco.settings.presets import run_settings
from diloco_lab.commands.experiment import lab
from diloco_lab.experiment import record
from diloco_learner.text import load_corpus
from diloco_ops.report import reference

pytestmark = pytest.mark.services

TOKENS = 60 * 4 * 16 * 2  # 60 steps of two learners
SMALL: dict[str, Any] = TINY_TRIAL | {"tokens": TOKENS}
# AdamW compiles three times as fast as Muon
SETTINGS = "[settings]\n'inner.optimizer' = 'adamw'\n" + "".join(f'"{name}" = {value}\n' for name, value in SMALL.items())

# a model that is trained is better than one that is not: the one claim holds, and the other does not
LEARNS = f"""
question = "Does it learn?"
seeds = 2
bars = ["untrained"]
{SETTINGS}
[arms.trained]
pace = {{ factors = [1.0, 3.0] }}

[arms.untrained]
method = "data-parallel"
settings = {{ "inner.learning_rate" = 1e-9 }}

[[claims]]
arm = "trained"
against = "untrained"
below = -0.1

[[claims]]
arm = "untrained"
against = "trained"
below = 0.0
"""

# weights that a decay of 1e30 multiplies by -1e27 and more at each step are infinite after two
DIVERGES = f"""
question = "Is divergence seen?"
seeds = 2
bars = ["sound"]
{SETTINGS}
[arms.sound]
method = "alone"

[arms.wild]
method = "data-parallel"
settings = {{ "inner.weight_decay" = 1e30 }}

[[claims]]
arm = "wild"
against = "sound"
below = 10
"""

# nothing is learned at 1e-9; steps of 5 are longer than any weight
TUNED = f"""
question = "Which rate?"
seeds = 2
tuning_seeds = 1
{SETTINGS}
[arms.data-parallel]
method = "data-parallel"
tuned = {{ "inner.learning_rate" = [1e-9, 0.02, 5.0] }}
"""


@dataclass
class Played:
    """The folder of results of all three, their verdicts, and the text that was trained on."""

    out: Path
    verdicts: dict[str, Any]
    text: Path
    arguments: list[str]

    def page(self, name: str) -> str:
        return (self.out / f"{name}.md").read_text()


def run(arguments: list[str]) -> Result:
    ended = CliRunner().invoke(lab, arguments)
    assert ended.exit_code == 0, ended.exception
    return ended


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("played")
    text, out = folder / "text.txt", folder / "out"
    text.write_text(some_text())
    for name, experiment in {"learns": LEARNS, "diverges": DIVERGES, "tuned": TUNED}.items():
        (folder / f"{name}.toml").write_text(experiment)
    files = [str(folder / f"{name}.toml") for name in ("learns", "diverges", "tuned")]
    arguments = ["run", *files, "--out", str(out), "--data", str(text), "--jobs", "1", "--json"]
    return Played(out, json.loads(run(arguments).stdout), text, arguments)


def test_a_claim_that_must_hold_holds_and_its_opposite_does_not(played: Played) -> None:
    holds, opposite = played.verdicts["learns"]
    assert (holds["holds"], opposite["holds"]) == (True, False)
    assert holds["paired"]["pairs"] == 2
    assert "over 2 pairs" in played.page("learns")
    assert "at most -10.0 % holds" in played.page("learns")
    assert (played.out / "learns.svg").read_text().count("<circle") == 4
    known = record.read(played.out / "learns.results.json").results.measured
    assert all(known["trained", seed].tokens >= TOKENS for seed in (0, 1))
    assert all(1 < (known["trained", seed].members or 0) <= 2 for seed in (0, 1))


def test_a_diverged_run_is_counted_and_in_no_average(played: Played) -> None:
    page = played.page("diverges")
    [wild] = [line for line in page.splitlines() if line.startswith("| wild")]
    assert wild == "| wild | 0 | - | - | - | - | - | - | 100.0 % | 6.0 | 2 |"
    assert played.verdicts["diverges"] == []  # no pair, so no claim is decided
    assert "wild ends" not in page
    assert (played.out / "diverges.svg").read_text().count("<circle") == 2


def test_the_best_rate_is_found_and_its_losses_are_a_reference_for_runs_of_this_size_and_text(played: Played) -> None:
    page, kept = played.page("tuned"), record.read(played.out / "tuned.results.json")
    assert "inner.learning_rate 0.02 is the best of 3 trials" in page
    assert "not bracketed" not in page
    settings = run_settings("decoupled", SMALL | {"seed": 3})
    [file] = reference.files([played.out])
    found = reference.compare([reference.read(file)], settings, TOKENS, load_corpus(str(played.text)).digest(), None)
    losses = [kept.results.measured["data-parallel", seed].loss for seed in (0, 1)]
    assert found["arms"]["data-parallel"]["loss"] == pytest.approx(sum(loss or 0.0 for loss in losses) / 2)
    assert found["where"] == kept.where


def test_a_set_that_was_cut_off_goes_on_with_the_trials_that_are_missing(played: Played) -> None:
    whole = played.page("learns")
    trials = sorted(path for path in played.out.glob("*.json") if len(path.stem) == 32)
    assert len(trials) == 4 + 4 + 3 + 2
    one = next(path for path in trials if json.loads(path.read_text())["members"] is not None)
    before = one.read_text()
    one.unlink()
    times = {path: path.stat().st_mtime_ns for path in trials if path != one}
    again = run([argument for argument in played.arguments if Path(argument).stem not in ("diverges", "tuned")])
    assert json.loads(again.stdout) == {"learns": played.verdicts["learns"]}
    assert {path: path.stat().st_mtime_ns for path in times} == times  # none was played again
    assert {**json.loads(one.read_text()), "wall_s": 0} == {**json.loads(before), "wall_s": 0}  # a trial is the same each time
    assert played.page("learns") == whole
