"""``diloco init``: projects that pass their own test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from tests.made.fixtures import Diloco

from diloco_ops.up.starting import PROJECTS, Template

FILES = {"README.md", "settings.py", "task.py", "test_task.py", "train.py"}
MORE = {Template.GPT: set[str](), Template.SFT: {"make_model.py", "model", "chats.jsonl"}}  # of others: images.py


@pytest.mark.parametrize("template", list(Template))
def test_a_project_passes_its_own_test(
    template: Template, diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = diloco("init", "mine", "--template", template.value)
    assert made.code == 0, made
    more = MORE.get(template, {"images.py"})
    made_here = {"make_model.py"} if PROJECTS[template].missing() else more
    expected = FILES | (made_here if template is Template.SFT else more)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == expected
    assert (tmp_path / "mine" / "README.md").read_text().count("\n") <= 12
    if missing := PROJECTS[template].missing():
        assert missing in made.out
        pytest.skip(f"{template.value}: not installed: {missing}")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    own = [path.removesuffix(".py") for path in FILES | more if path.endswith(".py")]
    for name in own:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("test_task").test_the_task_is_fit()
    for name in own:
        sys.modules.pop(name, None)


def test_a_folder_that_is_there_is_left_alone(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    refused = diloco("init", "mine")
    assert (refused.code, list((tmp_path / "mine").iterdir())) == (5, [])
    assert "mine: exists; name a new folder" in refused.err
    unknown = diloco("init", "yours", "--template", "gtp")
    assert unknown.code == 2
    assert "'gtp' is not one of 'gpt', 'flax', 'equinox', 'torch', 'vision', 'sft'" in unknown.err
