"""Experiments: files are checked, seeds are paired, bounds are Student's, results are kept by all that they depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.errors import FormatError, SettingsError
from diloco_lab.commands.experiment import lab
from diloco_lab.experiment import answer, spec
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import ENVIRONMENT, Results, jobs
from diloco_lab.experiment.spec import Arm
from diloco_lab.experiment.statistics import paired, seeds_for
from diloco_lab.experiment.store import Store
from diloco_lab.paces.spec import PaceSpec

TINY = """
question = "Is a slow learner welcome?"
seeds = 3

[settings]
tokens = 2048
learners = 2
"task.layers" = 1
"task.width" = 16
"task.heads" = 2
"task.context" = 16
"task.batch" = 4
"fragments.count" = 2
"round.steps" = 4

[arms.equal]

[arms.one-slow]
pace = { factors = [1.0, 5.0] }

[[claims]]
arm = "one-slow"
against = "equal"
below = 0.01
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def measured(loss: float | None) -> Measured:
    return Measured(loss, 2048, 1.0)


def results(equal: list[float | None], slow: list[float | None]) -> Results:
    both = {"equal": equal, "one-slow": slow}
    return Results({(arm, seed): measured(loss) for arm, known in both.items() for seed, loss in enumerate(known)}, {})


@pytest.mark.parametrize("name", spec.named())
def test_every_experiment_that_comes_with_the_lab_can_be_read(name: str) -> None:
    experiment = spec.load(name)
    assert experiment.question.endswith("?")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds = 3", "seed = 3", "no setting 'seed'"),
        ("tokens = 2048", "token = 2048", "no setting 'token'"),
        ("below = 0.01", "above = 0.01", "no setting"),
        ('against = "equal"', 'against = "equals"', "names arm 'equals' .did you mean 'equal'"),
        ("factors = [1.0, 5.0]", "factors = [1.0, 0.5]", "pace"),
        ("seeds = 3", "seeds = 0", "seeds"),
    ],
)
def test_what_is_unknown_or_wrong_in_a_file_is_named(tiny: Path, old: str, new: str, said: str) -> None:
    assert old in TINY
    tiny.write_text(TINY.replace(old, new, 1))
    with pytest.raises(SettingsError, match=said):
        spec.load(str(tiny))


def test_an_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"no experiment 'nois' .did you mean 'noise'"):
        spec.load("nois")


def test_paired_differences_by_hand() -> None:
    # +2 %, 0 %, +1 %: mean 1 %, deviation 1 %; t(2): 4.303 two-sided, 2.920 one-sided; error 1 % / sqrt(3)
    found = paired([1.02, 2.0, 3.03], [1.0, 2.0, 3.0])
    assert found.pairs == 3
    assert found.mean == pytest.approx(0.01)
    assert found.spread == pytest.approx(0.01)
    assert found.interval == pytest.approx((0.01 - 4.303 * 0.01 / 3**0.5, 0.01 + 4.303 * 0.01 / 3**0.5), rel=1e-3)
    assert found.bound == pytest.approx(0.01 + 2.920 * 0.01 / 3**0.5, rel=1e-3)
    assert paired([1.1], [1.0]).bound is None


def test_so_many_seeds_tell_a_difference() -> None:
    # of spread 1 %: t(4) = 2.132, / sqrt(5) = 0.953; t(3) = 2.353, / 2 = 1.18
    assert seeds_for(0.01, 0.01) == 5
    assert seeds_for(0.5, 0.001) is None


def test_a_claim_is_judged_by_its_bound_over_the_seeds_that_both_have(tiny: Path) -> None:
    experiment = spec.load(str(tiny))
    [holds] = answer.verdicts(experiment, results([2.0, 2.0, 2.0], [1.98, 2.0, 1.96]))
    assert holds.holds
    # the mean is below the claim, the bound is not
    [unsure] = answer.verdicts(experiment, results([2.0, 2.0, 2.0], [1.98, 2.06, 2.0]))
    assert unsure.paired.mean < 0.01
    assert unsure.holds is False
    # what diverged is in no average, and its pair neither
    ended = results([2.0, None, 2.0], [1.98, 5.0, 1.97])
    [two] = answer.verdicts(experiment, ended)
    assert two.paired.pairs == 2
    assert [row[-1] for row in answer.rows(experiment, ended)] == ["1", "0"]
    [one] = answer.verdicts(experiment, results([2.0], [1.9]))
    assert one.holds is None
    assert "nothing is decided" in one.sentence()


def test_a_result_is_kept_by_all_that_it_depends_on(tiny: Path, tmp_path: Path) -> None:
    experiment, store = spec.load(str(tiny)), Store(tmp_path / "out")
    listed = list(jobs(experiment, store, None))
    assert [(job.arm, job.seed) for job in listed[:3]] == [("equal", 0), ("one-slow", 0), ("equal", 1)]
    assert len({job.path for job in listed}) == 6
    settings = listed[0].settings
    other_pace = Arm(pace=PaceSpec(step_s=0.2))
    paths = {store.path(Arm(), settings, None), store.path(other_pace, settings, None), store.path(Arm(), settings, "text")}
    assert len(paths) == 3
    assert listed[0].path in paths
    store.put(listed[0].path, measured(None))
    assert store.get(listed[0].path) == measured(None)
    assert store.get(listed[1].path) is None
    listed[0].path.write_text("{")
    with pytest.raises(FormatError, match="delete the file"):
        store.get(listed[0].path)


def test_a_trial_computes_in_one_thread() -> None:
    code = """
import jax, os
jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(names.count("tf_XLAEigen"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "1"


@pytest.mark.slow
def test_what_needs_too_long_is_refused_before_it_begins(tiny: Path, tmp_path: Path) -> None:
    arguments = ["run", str(tiny), "--out", str(tmp_path / "out"), "--max-hours", "0", "--arm", "equal"]
    ended = CliRunner().invoke(lab, arguments)
    assert isinstance(ended.exception, SettingsError)
    assert "more than --max-hours 0" in str(ended.exception)


@pytest.mark.slow
def test_smoke_is_played_once_and_then_known(tmp_path: Path) -> None:
    arguments = ["run", "smoke", "--out", str(tmp_path / "out"), "--json"]
    first, again = CliRunner().invoke(lab, arguments), CliRunner().invoke(lab, arguments)
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == again.stdout
    assert len(list((tmp_path / "out").glob("*.json"))) == 6
    assert "decoupled ends" in (tmp_path / "out" / "smoke.md").read_text()
    assert "<circle" in (tmp_path / "out" / "smoke.svg").read_text()
