"""``diloco check``: the task that is meant, and what people see of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.services.conftest import Diloco

from diloco.errors import SettingsError
from diloco_ops.checking import found

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_file_is_a_module_with_a_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    assert found(str(tmp_path / "mine.py")) == ("mine:make", tmp_path)
    assert found(f"{tmp_path / 'mine.py'}:other") == ("mine:other", tmp_path)
    assert found("package.mine:make") == ("package.mine:make", None)
    (tmp_path / "my-task.py").touch()
    with pytest.raises(SettingsError, match="'my-task' is no name of a module; rename it"):
        found(str(tmp_path / "my-task.py"))
    with pytest.raises(SettingsError, match=r"none\.py: there is no such file; name a file, or MODULE:MAKE"):
        found("none.py")


def test_an_example_is_checked_from_its_file(diloco: Diloco) -> None:
    small = ["--task", "width=16", "--set", "fragments.count=2", "--set", "shards=1", "--set", "learners=2"]
    seen = diloco("check", str(EXAMPLES / "classifier.py"), *small)
    assert seen.code == 0, seen
    assert "nothing unusual: diloco up --set task.name=classifier:make" in seen.out
    refused = diloco("check", str(EXAMPLES / "classifier.py"), *small, "--task", "widths=3")
    assert refused.code == 2
    assert "--task widths: Options has no option 'widths' (did you mean 'width'?)" in refused.err
    said = json.loads(diloco("check", str(EXAMPLES / "classifier.py"), *small, "--json").out)
    assert (said["parameters"], said["units"], said["warnings"]) == (16 * 64 + 10 * 16, "nats per image", [])
