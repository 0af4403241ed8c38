"""``diloco check``: the task that is meant, and what people see of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.made.fixtures import Diloco

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_ops.up.checking import choose, found
from diloco_ops.up.up import overrides_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_file_is_a_module_with_a_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    assert found(str(tmp_path / "mine.py")) == ("mine:make", tmp_path)
    assert found(f"{tmp_path / 'mine.py'}:other") == ("mine:other", tmp_path)
    assert found("package.mine:make") == ("package.mine:make", None)
    (tmp_path / "my-task.py").touch()
    with pytest.raises(SettingsError, match="'my-task' is not a valid module name; rename the file"):
        found(str(tmp_path / "my-task.py"))
    with pytest.raises(SettingsError, match=r"none\.py: there is no such file; name a file, or MODULE:MAKE"):
        found("none.py")


def test_an_example_is_checked_from_its_file(diloco: Diloco) -> None:
    small = ["--task", "width=16", "--set", "fragments.count=2", "--set", "shards=1", "--set", "learners=2"]
    seen = diloco("check", str(EXAMPLES / "classifier.py"), *small)
    assert seen.code == 0, seen
    given = "fragments.count=2 shards=1 learners=2 task.options.width=16"
    assert f"settings: {given}; else those of the preset decoupled\n" in seen.out
    assert "2 fragments;" in seen.out
    options = " ".join(f"--set {each}" for each in [*given.split(), "task.name=classifier:make"])
    assert f"nothing unusual: diloco up {options}\n" in seen.out
    refused = diloco("check", str(EXAMPLES / "classifier.py"), *small, "--task", "widths=3")
    assert refused.code == 2
    assert "--task widths: Options has no option 'widths' (did you mean 'width'?)" in refused.err
    said = json.loads(diloco("check", str(EXAMPLES / "classifier.py"), *small, "--json").out)
    assert (said["parameters"], said["units"], said["warnings"]) == (16 * 64 + 10 * 16, "nats per image", [])
    assert (said["settings"]["preset"], said["settings"]["file"]) == ("decoupled", None)


def test_settings_are_those_of_the_project_and_over_them_those_of_the_command(tmp_path: Path) -> None:
    bare = choose(tmp_path, "task:make", "decoupled", {})
    assert bare.said == "settings: those of the preset decoupled; for others --preset, --set, --task, as for diloco up"
    assert bare.command == "diloco up --set task.name=task:make"
    (tmp_path / "settings.py").write_text("raise SystemExit('of another program')\nDATABASES = {}")
    assert choose(tmp_path, "task:make", "decoupled", {}) == bare

    own = {"fragments.count": 3, "merge.method": "average", "log.archive": True}
    (tmp_path / "settings.py").write_text(f"LEARNERS, TOKENS = 2, 6 * 10**4\nSETTINGS: dict = {own}")
    given = {"round.steps": 9, "fragments.count": 4, "task.options.names": ["a b", "c"]}
    found = choose(tmp_path, "task:make", "streaming", given)

    assert found.said == (
        "settings: fragments.count=4 merge.method=average log.archive=true learners=2 tokens=60000 round.steps=9 "
        'task.options.names=["a b", "c"], by settings.py; else those of the preset streaming'
    )
    values = found.settings
    assert (values.fragments.count, values.round.steps, values.learners, values.tokens) == (4, 9, 2, 60_000)
    assert values.apply.alpha == 0.5, "the preset's"
    # what it says to type in is a run of these very settings
    command = shlex.split(found.command)
    assert command[:4] == ["diloco", "up", "--preset", "streaming"]
    assert command[4::2] == ["--set"] * len(command[5::2])
    assert run_settings("streaming", overrides_of(command[5::2], None)) == values
    assert choose(None, "task:make", "decoupled", {}) == bare, "a module's project is not known"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SETTINGS = {", r"settings\.py: cannot be read as Python"),
        ("SETTINGS = nothing", r"settings\.py: cannot be run: NameError: name 'nothing'"),
        ("SETTINGS = 3", r"settings\.py: SETTINGS is a int, expected a dict"),
        ("SETTINGS = {'fragment.count': 3}", r"settings\.py: no setting 'fragment"),
        ("LEARNERS = 0; SETTINGS = {}", r"settings\.py: learners = 0"),
    ],
)
def test_a_project_s_settings_that_are_wrong_are_named_with_their_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "settings.py").write_text(text)
    with pytest.raises(SettingsError, match=said):
        choose(tmp_path, "task:make", "decoupled", {})
