"""Experiments: files are checked, seeds are paired, bounds are Student's, results are kept by all that they depend on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.pace import DEADLINE_S
from typer.testing import CliRunner

from diloco.errors import FormatError, SettingsError
from diloco.settings.run import RunSettings
from diloco_lab.commands import experiment as commands
from diloco_lab.commands.experiment import lab
from diloco_lab.experiment import answer, record, spec, tuning
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import ENVIRONMENT, Results, jobs, pool
from diloco_lab.experiment.spec import Arm, SettingsChange
from diloco_lab.experiment.statistics import paired, seeds_for
from diloco_lab.experiment.store import TrialStore, task_digest
from diloco_lab.paces.spec import PaceSpec
from diloco_ops.report import reference

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


CHANGE = "{ after = 0.5, settings = { 'round.steps' = 8 } }"


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
        ("[arms.equal]", "[arms.equal]\ntuned = { 'inner.rate' = [1, 2, 3] }", "no setting 'inner.rate'"),
        ("[arms.equal]", "[arms.equal]\ntuned = { 'inner.learning_rate' = [1, 3, 2] }", "to try must rise"),
        (
            "[arms.equal]",
            "[arms.equal]\nchosen = 'before'\ntuned = { 'inner.learning_rate' = [1, 2, 3] }",
            "settings are either chosen beforehand or tuned: inner.learning_rate; leave out chosen or tuned",
        ),
        ("[arms.equal]", f"[arms.equal]\nchanges = [{CHANGE}, {CHANGE}]", "must come one after another"),
        ("[arms.equal]", f"[arms.equal]\nmethod = 'alone'\nchanges = [{CHANGE}]", "which 'alone' is not"),
        (
            "[arms.equal]",
            "[arms.equal]\nchanges = [{ after = 0.5, settings = { 'task.batch' = 8 } }]",
            "arm equal, changes: task.batch",
        ),
        ("[arms.equal]", "[arms.equal]\nchanges = [{ after = 1.5, settings = { 'round.steps' = 8 } }]", "less than 1"),
        ("[arms.equal]", "[arms.equal]\ntuned = { 'inner.learning_rate' = [1, 3] }", "at least 3"),
        ("seeds = 3", "seeds = 3\nbars = ['eqal']", "names arm 'eqal' .did you mean 'equal'"),
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
    experiment, store = spec.load(str(tiny)), TrialStore(tmp_path / "out")
    listed = list(jobs(experiment, store, None))
    assert [(job.arm, job.seed) for job in listed[:3]] == [("equal", 0), ("one-slow", 0), ("equal", 1)]
    assert len({job.path for job in listed}) == 6
    settings = listed[0].settings
    other_pace = Arm(pace=PaceSpec(step_s=0.2))
    changed = Arm(changes=[SettingsChange(after=0.5, settings={"round.steps": 6})])
    paths = {store.path(arm, settings, None) for arm in (Arm(), other_pace, changed)} | {store.path(Arm(), settings, "text")}
    assert len(paths) == 4
    assert listed[0].path in paths
    store.put(listed[0].path, measured(None))
    assert store.get(listed[0].path) == measured(None)
    assert store.get(listed[1].path) is None
    listed[0].path.write_text("{")
    with pytest.raises(FormatError, match="delete the file"):
        store.get(listed[0].path)


TUNED = """
[arms.tuned]
tuned = { "inner.learning_rate" = [0.01, 0.02, 0.04], "task.batch" = [2, 4, 8] }
"""


def test_the_best_combination_is_chosen_over_seeds_of_its_own(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(TINY.replace("[arms.equal]", f"{TUNED}\n[arms.equal]"))
    experiment = spec.load(str(tiny))
    search = tuning.search(experiment)
    assert search is not None
    listed = list(jobs(search, TrialStore(tmp_path / "out"), None))
    assert len(listed) == 2 * 9
    assert {job.seed for job in listed}.isdisjoint({job.seed for job in jobs(experiment, TrialStore(tmp_path / "out"), None)})
    # the least mean is that of 0.02 and 8, though 0.04 and 2 has the least single loss; one of 0.01 and 2 diverged
    known: dict[tuple[float, float], list[float | None]] = {
        (0.02, 8): [1.5, 1.5],
        (0.04, 2): [1.2, 1.9],
        (0.01, 2): [1.0, None],
    }
    losses: dict[tuple[str, int], Measured] = {}
    for name, arm in search.arms.items():
        at = (arm.settings["inner.learning_rate"], arm.settings["task.batch"])
        for seed, loss in zip(search.seed_range, known.get(at, [2.0, 2.0]), strict=True):
            losses[name, seed] = measured(loss)
    found = tuning.tried(experiment, Results(losses, {}))
    [choice] = tuning.choose(experiment, found)
    assert choice == tuning.TunedArm("tuned", {"inner.learning_rate": 0.02, "task.batch": 8}, 1.5, 18, ["task.batch"])
    assert "not bracketed: try further values of task.batch" in choice.sentence()
    settled = tuning.settled(experiment, [choice])
    chosen = settled.settings_of("tuned", 0)
    assert (chosen.inner.learning_rate, chosen.task.batch) == (0.02, 8)
    assert tuning.search(settled) is None


def test_tuned_arms_get_equal_numbers_of_trials(tiny: Path) -> None:
    one = "tuned = { 'inner.learning_rate' = [0.01, 0.02, 0.04] }"
    tiny.write_text(TINY.replace("[arms.equal]", f"{TUNED}\n[arms.equal]\n{one}"))
    with pytest.raises(SettingsError, match=r"equal numbers of trials, these do not: tuned 9, equal 3"):
        spec.load(str(tiny))


def test_every_arm_is_compared_with_the_bars(tiny: Path) -> None:
    tiny.write_text(TINY.replace("seeds = 3", 'seeds = 3\nbars = ["equal"]'))
    experiment = spec.load(str(tiny))
    # +2 %, 0 %, +1 %: 1 % and 4.303 * 1 % / sqrt(3) = 2.5 %
    ended = results([1.0, 2.0, 3.0], [1.02, 2.0, 3.03])
    equal, slow = answer.rows(experiment, ended)
    place = answer.head(experiment, ended).index("above equal")
    assert (equal[place], slow[place]) == ("-", "+1.0 ± 2.5 %")


def test_raw_results_are_one_file_from_which_the_page_is_made_again(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(TINY.replace("[arms.equal]", f"{TUNED}\n[arms.equal]"))
    experiment, known = spec.load(str(tiny)), results([2.0, None, 2.1], [1.98, 5.0, 1.97])
    known.failed["tuned", 1] = "trial: no end"
    found = tuning.tried(experiment, Results({}, {}))
    kept = record.ExperimentRecord("tiny", experiment, found, known, {"measured": "2026-11-23"})
    path = tmp_path / f"tiny{record.SUFFIX}"
    path.write_text(kept.encode())
    again = record.read(path)
    assert answer.markdown(again) == answer.markdown(kept)
    assert again.asked == experiment
    assert "tuned, seed 1, failed: trial: no end" in answer.markdown(again)
    path.write_text(kept.encode().replace('"seed"', '"sead"'))
    with pytest.raises(FormatError, match="not results of an experiment"):
        record.read(path)


def test_a_page_is_made_again_from_raw_results(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    kept = record.ExperimentRecord(
        "tiny", spec.load(str(tiny)), [], results([2.0, 2.0], [1.98, 1.96]), {"measured": "2026-11-23"}
    )
    (folder / f"tiny{record.SUFFIX}").write_text(kept.encode())
    file = tmp_path / "page.md"
    file.write_text("# Mine\n\n<!-- lab: tiny -->\noutdated\n<!-- end -->\n\nBehind it.\n")
    for _ in range(2):
        assert CliRunner().invoke(lab, ["page", str(file)]).exit_code == 0
        text = file.read_text()
        assert text.startswith("# Mine\n\n<!-- lab: tiny -->\nIs a slow learner welcome?\n")
        assert text.endswith("(page/tiny.svg)\n<!-- end -->\n\nBehind it.\n")
        assert "| equal | 2 | 2.0000 |" in text
        assert "outdated" not in text
    assert "<circle" in (folder / "tiny.svg").read_text()
    beside_results = folder / "inside.md"
    beside_results.write_text("<!-- lab: tiny -->\n<!-- end -->\n")
    assert CliRunner().invoke(lab, ["page", str(file), str(beside_results)]).exit_code == 0
    assert beside_results.read_text().endswith("(tiny.svg)\n<!-- end -->\n")
    file.write_text("<!-- lab: other -->\n<!-- end -->\n")
    ended = CliRunner().invoke(lab, ["page", str(file)])
    assert isinstance(ended.exception, FormatError)
    assert "diloco lab run other" in str(ended.exception)


def test_references_of_reports_are_made_from_the_raw_results_that_are_published() -> None:
    published = Path(__file__).parents[2] / "docs" / "quality"
    for file in reference.files([reference.shipped()]):  # NAME-KEY.reference.json
        kept = record.read(published / f"{file.name.rpartition('-')[0]}{record.SUFFIX}")
        assert reference.read(file) == kept.reference()


def test_only_tuned_data_parallel_arms_of_one_size_are_a_reference(tiny: Path) -> None:
    rates = "tuned = { 'inner.learning_rate' = [0.01, 0.02, 0.04] }"
    arms = f"[arms.bar]\nmethod = 'data-parallel'\n{rates}\n[arms.untuned]\nmethod = 'data-parallel'\n[arms.ours]\n{rates}\n"
    arms += "[arms.before]\nmethod = 'data-parallel'\nchosen = 'the best of three'\n"
    tiny.write_text(TINY.replace("[arms.equal]", f"{arms}\n[arms.equal]"))
    experiment = spec.load(str(tiny))
    found = [
        tuning.Tried(arm, {"inner.learning_rate": rate}, [loss])
        for arm in ("bar", "ours")
        for rate, loss in ((0.01, 3.0), (0.02, 1.0), (0.04, 2.0))
    ]
    losses: list[tuple[str, int, float | None]] = [("bar", 0, 1.5), ("bar", 1, None), ("bar", 2, 1.25), ("untuned", 0, 1.0)]
    losses.append(("before", 0, 1.75))
    played = Results({(arm, seed): measured(loss) for arm, seed, loss in losses}, {})
    made = record.ExperimentRecord("tiny", experiment, found, played, {"measured": "today"}, "aa").reference()
    assert made is not None
    assert made.arms == {
        "bar": reference.Losses([1.5, 1.25], "inner.learning_rate 0.02 is the best of 3 trials"),
        "before": reference.Losses([1.75], "the best of three"),
    }
    assert (made.conditions["tokens"], made.conditions["learners"], made.conditions["text"]) == (2048, 2, "aa")
    assert record.ExperimentRecord("tiny", experiment, found, played, {}, text=None).reference() is None
    tiny.write_text(
        tiny.read_text().replace("[arms.ours]", "[arms.ours]\nmethod = 'data-parallel'\nsettings = { learners = 4 }")
    )
    other = Results(played.measured | {("ours", 0): measured(1.0)}, {})
    assert record.ExperimentRecord("tiny", spec.load(str(tiny)), found, other, {}, "aa").reference() is None


@pytest.mark.services
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


@pytest.mark.services
def test_a_trial_finds_a_task_in_the_folder_of_the_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_task_of_mine.py").write_text("LAYERS = 7")
    monkeypatch.chdir(tmp_path)
    experiment, store = spec.load(str(tiny)), TrialStore(tmp_path / "out")
    name = next(iter(experiment.arms))
    settings = experiment.settings_of(name, 0)
    path = store.path(experiment.arms[name], settings, None)
    mine, lost = (with_task(settings, task) for task in ("a_task_of_mine:make", "another:make"))
    with pool(1) as processes:
        assert processes.submit(eval, "__import__('a_task_of_mine').LAYERS").result() == 7
        before = store.path(experiment.arms[name], mine, None)
        assert before != path
        with pytest.raises(SettingsError, match="'another:make': no module 'another'"):
            store.path(experiment.arms[name], lost, None)
        (tmp_path / "a_task_of_mine.py").write_text("LAYERS = 8")
        task_digest.cache_clear()  # another command
        assert store.path(experiment.arms[name], mine, None) != before, "a result of other code"


def with_task(settings: RunSettings, name: str) -> RunSettings:
    return settings.model_copy(update={"task": settings.task.model_copy(update={"name": name})})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which the examples of the repository are not found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).name != "examples"])
    for module in ("mixture_of_experts", "vision_transformer"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The experiments that a command would play, without playing them."""
    names: list[str] = []

    def note(name: str, _experiment: object, _playing: object) -> list[object]:
        names.append(name)
        return []

    monkeypatch.setattr(commands, "_run", note)
    return names


@pytest.mark.usefixtures("elsewhere")
def test_all_leaves_out_the_experiments_whose_tasks_are_not_found(played: list[str]) -> None:
    ended = CliRunner().invoke(lab, ["run", "--all", "--seeds", "1"])
    assert ended.exit_code == 0
    assert set(spec.named()) - set(played) == {"moe", "vision"}
    line = "left out: moe, vision, whose tasks are not found here; in DiLoCo's checkout: "
    assert line + "PYTHONPATH=examples diloco lab run moe vision" in " ".join(ended.stderr.split())


@pytest.mark.usefixtures("elsewhere")
def test_all_is_all_where_the_tasks_are_found(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    ended = CliRunner().invoke(lab, ["run", "--all"])
    assert ended.exit_code == 0
    assert played == list(spec.named())
    assert "left out" not in ended.stderr


@pytest.mark.usefixtures("elsewhere")
def test_an_experiment_that_is_named_is_refused_without_its_task_before_others_are_played(
    tiny: Path, played: list[str]
) -> None:
    own = tiny.with_name("own.toml")
    own.write_text(TINY.replace("[settings]", "[settings]\n'task.name' = 'a_task_that_is_nowhere:make'"))
    for name, module, remedy in (
        ("moe", "mixture_of_experts", "in DiLoCo's checkout: PYTHONPATH=examples diloco lab run moe"),
        (str(own), "a_task_that_is_nowhere", "start the command in the folder of that module, or set PYTHONPATH to it"),
    ):
        ended = CliRunner().invoke(lab, ["run", str(tiny), name, "--all"])
        assert isinstance(ended.exception, SettingsError)
        assert str(ended.exception) == f"{name}: no module {module!r} of its task, here or where PYTHONPATH says; {remedy}"
    assert played == []


@pytest.mark.services
def test_no_process_of_trials_is_left_behind_by_a_command_that_is_killed(tmp_path: Path) -> None:
    code = tmp_path / "killed.py"  # a file: processes that are spawned import it again
    code.write_text("""
import os, signal
from diloco_lab.experiment.runner import pool

if __name__ == "__main__":
    with pool(1) as processes:
        print(processes.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
""")
    killed = subprocess.run([sys.executable, str(code)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    until_s = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(int(killed.stdout)):
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.slow
def test_what_needs_too_long_is_refused_before_it_begins(tiny: Path, tmp_path: Path) -> None:
    arguments = ["run", str(tiny), "--out", str(tmp_path / "out"), "--max-hours", "0", "--arm", "equal"]
    ended = CliRunner().invoke(lab, arguments)
    assert isinstance(ended.exception, SettingsError)
    assert "more than --max-hours 0" in str(ended.exception)


@pytest.mark.services
@pytest.mark.slow
def test_smoke_is_played_once_and_then_known(tmp_path: Path) -> None:
    arguments = ["run", "smoke", "--out", str(tmp_path / "out"), "--json"]
    first, again = CliRunner().invoke(lab, arguments), CliRunner().invoke(lab, arguments)
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == again.stdout
    assert len(list((tmp_path / "out").glob("*.json"))) == 6 + 1  # the trials', and all of them as one
    read_again = record.read(tmp_path / "out" / "smoke.results.json")
    assert (tmp_path / "out" / "smoke.md").read_text() == f"## smoke\n\n{answer.markdown(read_again)}"
    assert "decoupled ends" in (tmp_path / "out" / "smoke.md").read_text()
    assert "<circle" in (tmp_path / "out" / "smoke.svg").read_text()
