"""Frameworks by entry point: one claims a task, a distribution adds another, and none is imported that a task does not need."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.made.third_framework import install

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import TaskSettings
from diloco_learner import frameworks, task
from diloco_learner.check import PlannedRun, check
from diloco_learner.examine import examine
from diloco_learner.joining import parameters_of

TASKS = """
import itertools
import numpy as np

class OfJax:
    tokens_per_batch = 4
    def init(self, key): return {"weight": np.ones((2, 3), np.float32)}
    def loss(self, params, batch): return (params["weight"] * batch).sum()
    def batches(self, share, shares, seed, start): return itertools.repeat(np.float32(1))

class OfThird(OfJax):
    init = property()  # an AttributeError: it has none
    def begin(self, key): return OfJax.init(self, key)

class OfBoth(OfJax):
    begin = OfJax.init

class OfBothAndSays(OfBoth):
    framework = "third"

class OfNone:
    tokens_per_batch = 4
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TaskSettings]:
    """``made(name)``: the settings of the task of that name."""
    names = re.findall(r"^class (\w+)", TASKS, re.MULTILINE)
    (tmp_path / "tasks.py").write_text(TASKS + "".join(f"def make{name}(settings, data): return {name}()\n" for name in names))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    return lambda name: TaskSettings(name=f"tasks:make{name}")


def loaded(settings: TaskSettings) -> str:
    return frameworks.load(settings, None, Path()).framework.name


def test_a_task_is_of_the_framework_whose_member_it_has(made: Callable[[str], TaskSettings]) -> None:
    assert loaded(made("OfJax")) == "jax"
    assert frameworks.claimant(None, TaskSettings()).name == "jax"  # the built-in task


def test_a_distribution_adds_a_framework(
    made: Callable[[str], TaskSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert loaded(made("OfJax")) == "jax"
    small = {"shards": 1, "fragments.count": 2, "task.name": made("OfThird").name}
    settings = run_settings(overrides=small)
    assert check(PlannedRun(settings)).framework == "third"
    seen = examine(settings, None)
    assert (seen.framework, seen.devices) == ("third", ["abacus"])
    assert seen.parameters == 6


def test_a_distribution_adds_parameters_that_a_loop_may_hand_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="expected an array of JAX or NumPy"):
        parameters_of({"weight": object()})
    install(tmp_path, monkeypatch)
    from third_framework import Weight  # type: ignore[import-not-found]

    [tensor] = parameters_of(Weight(np.ones((2, 3), np.float32))).tensors(None)
    assert (tensor.path, tensor.shape) == ("weight", (2, 3))
    [tensor] = parameters_of({"bias": np.ones(3, np.float32)}).tensors(None)  # a tree of arrays is no framework's
    assert (tensor.path, tensor.shape) == ("bias", (3,))


def test_a_task_that_two_frameworks_claim_says_which_it_is_of(
    made: Callable[[str], TaskSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    with pytest.raises(SettingsError) as error:
        loaded(made("OfBoth"))
    assert re.fullmatch(
        r"task.name = 'tasks:makeOfBoth': what makeOfBoth returns is claimed by the frameworks jax \(entry point "
        r"diloco_learner.*:JaxFramework of diloco-learner\) and third \(entry point third_framework:Third of third\): name one "
        r"by the task's attribute framework, such as framework = 'jax', or uninstall the other distribution \(.*tasks.py, "
        r"line \d+\)",
        str(error.value),
    )
    assert loaded(made("OfBothAndSays")) == "third"


def test_a_task_that_no_framework_claims(made: Callable[[str], TaskSettings]) -> None:
    said = (
        "task.name = 'tasks:makeOfNone': what makeOfNone returns has no member by which a framework claims it: init() (jax), "
        "module() (torch): add one, or install the distribution of its framework ("
    )
    with pytest.raises(SettingsError, match=re.escape(said)):
        loaded(made("OfNone"))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("Third = 3", "TypeError: it is not a subclass of diloco_learner.frameworks.Framework"),
    ],
)
def test_a_framework_that_fails_is_named_where_no_other_claims_the_task(
    made: Callable[[str], TaskSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    install(tmp_path, monkeypatch, code)
    assert loaded(made("OfJax")) == "jax"
    with pytest.raises(SettingsError) as error:
        loaded(made("OfThird"))
    assert (
        f"; the framework third (entry point third_framework:Third of third) fails: {says}: install what it lacks, or "
        "uninstall it (" in str(error.value)
    )


def test_a_learner_refuses_a_task_of_another_framework(
    made: Callable[[str], TaskSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    said = (
        "task.name = 'tasks:makeOfThird': what makeOfThird returns is a task of third, and this process is a learner of jax: "
        "name a task of jax, or start a learner of third (python -m third_learner)"
    )
    with pytest.raises(SettingsError, match=re.escape(said)):
        task.load_task(made("OfThird"), None)


@pytest.mark.tool
def test_a_task_of_one_framework_imports_no_other(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS + "def make(settings, data): return OfJax()\n")
    (tmp_path / "torch.py").write_text("raise AssertionError('PyTorch is imported')\n")
    program = """
import sys
from diloco.settings.presets import run_settings
from diloco_learner import frameworks
from diloco_learner.check import PlannedRun, check
settings = run_settings(overrides={"shards": 1, "fragments.count": 2, "task.name": "tasks:make"})
frameworks.claimant(None, settings.task)
assert not {"jax", "torch"} & sys.modules.keys()
print(check(PlannedRun(settings)).framework, "jax" in sys.modules, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout.split() == ["jax", "True", "False"]
