"""The modules that a user's task is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_lab.experiment import own_code
from diloco_lab.experiment.own_code import modules_of
from diloco_lab.experiment.store import task_digest


def write(folder: Path, **files: str) -> None:
    """Write modules; in a keyword ``__`` stands for the folder's separator, ``_of`` at its end for ``__init__``."""
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/').replace('_of', '__init__')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def names(folder: Path, module: str, file: str) -> list[str]:
    found = modules_of(module, folder / file)
    assert all(path.is_file() for path in found.values())
    return sorted(found)


def test_a_module_s_own_are_those_beside_it_that_it_imports_wherever_it_does(tmp_path: Path) -> None:
    write(
        tmp_path,
        task="import json, data.text\nimport numpy\ndef make(settings, data):\n    from model import Net\n    return Net()",
        model="import task\ntry:\n    import layers\nexcept ImportError:\n    pass",
        layers="",
        data__nothing="",
        data__text="from . import words\nfrom .deep.er import far\nfrom .. import above",
        data__words="from data import nothing_of_this_name",
        data__deep___of="",
        data__deep__er="from ..words import all",
        words="",  # it has the name of data.words, and is not imported
        train="",
    )
    assert names(tmp_path, "task", "task.py") == [
        "data.deep", "data.deep.er", "data.text", "data.words", "layers", "model", "task",
    ]  # fmt: skip


def test_a_module_in_a_package_has_the_packages_around_it(tmp_path: Path) -> None:
    write(tmp_path, mine___of="from .tasks import one", mine__tasks___of="", mine__tasks__one="import other", other="")
    whole = ["mine", "mine.tasks", "mine.tasks.one", "other"]
    assert names(tmp_path, "mine.tasks.one", "mine/tasks/one.py") == whole
    assert names(tmp_path, "mine", "mine/__init__.py") == whole


def test_of_a_module_that_is_installed_libraries_beside_it_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, mine___of="", mine__task="import jax\nfrom mine import data", mine__data="", jax___of="")
    assert names(tmp_path, "mine.task", "mine/task.py") == ["jax", "mine", "mine.data", "mine.task"]
    monkeypatch.setattr(own_code, "LIBRARIES", {tmp_path})
    assert names(tmp_path, "mine.task", "mine/task.py") == ["mine", "mine.data", "mine.task"]


def test_what_is_no_python_is_named(tmp_path: Path) -> None:
    write(tmp_path, task="import helper", helper="def broken(:")
    with pytest.raises(SettingsError, match=r"helper\.py: cannot be read as Python: invalid syntax"):
        modules_of("task", tmp_path / "task.py")
    (tmp_path / "compiled.so").write_bytes(bytes(9))
    assert list(modules_of("compiled", tmp_path / "compiled.so")) == ["compiled"]


def test_an_edit_in_a_module_that_a_task_imports_makes_it_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, edited_task="import edited_helper", edited_helper="LAYERS = 7", not_imported="")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        task_digest.cache_clear()  # another command
        return task_digest("edited_task:make")

    before = digest()
    write(tmp_path, not_imported="LAYERS = 8")
    assert digest() == before
    write(tmp_path, edited_helper="LAYERS = 8")
    assert digest() != before
    assert task_digest("gpt") == ""
