"""Options of a task: a dataclass filled from the run's settings, with each mistake in one line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import TaskSettings
from diloco_learner.api.options import filled
from diloco_learner.task import load_task


@dataclass(frozen=True)
class Options:
    rate: float
    width: int = 64
    name: str = "small"
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    sizes: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width = {self.width} must be even")


def test_fields_are_filled_and_others_keep_their_defaults() -> None:
    values = {"rate": 1, "sizes": [3, 4, 5], "norm": "layer", "tied": True}
    assert filled(Options, values) == Options(rate=1.0, sizes=(3, 4, 5), norm="layer", tied=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, r"--task rate=VALUE: option 'rate' of Options has no default, so it has to be given"),
        (
            {"rate": 1, "widht": 3},
            r"--task widht: Options has no option 'widht' \(did you mean 'width'\?\); its options are rate, ",
        ),
        ({"rate": "fast"}, r"--task rate = 'fast': option 'rate' of Options is float"),
        ({"rate": True}, r"--task rate = True: option 'rate' of Options is float"),
        ({"rate": 1, "width": 2.5}, r"--task width = 2\.5: option 'width' of Options is int"),
        ({"rate": 1, "name": 3}, r"""option 'name' of Options is str; quote text .*: --task 'name="3"'"""),
        ({"rate": 1, "norm": "batch"}, r"--task norm = 'batch': option 'norm' of Options is Literal\['rms', 'layer'\]"),
        ({"rate": 1, "sizes": [1, "two"]}, r"--task sizes = \[1, 'two'\]: option 'sizes' of Options is tuple\[int, \.\.\.\]"),
        ({"rate": 1, "sizes": 7}, r"--task sizes = 7"),
        ({"rate": 1, "width": 3}, r"--task: Options: width = 3 must be even"),
    ],
)
def test_a_wrong_option_is_named(values: Mapping[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        filled(Options, values)


@dataclass(frozen=True)
class Odd:
    table: dict[str, int]


def test_a_field_of_another_type_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"option 'table' of Odd is dict\[str, int\], expected bool, int, float, str, a Lit"
    ):
        filled(Odd, {"table": 1})


MODULE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    width: int = 64

@dataclass
class Mutable:
    width: int = 64

class Model:
    tokens_per_batch = 1
    init = loss = batches = lambda self, *arguments: None
    def __init__(self, settings, data, options: Options):
        self.width = options.width

def make(settings, data, options: Options):
    return Model(settings, data, options)

def unnamed(settings, data, options):
    return Model(settings, data, options)

def mutable(settings, data, options: Mutable):
    return Model(settings, data, options)

def missing(settings, data, options: Optoins):
    return Model(settings, data, options)

def none(settings, data):
    return Model(settings, data, Options())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "optional", raising=False)
    (tmp_path / "optional.py").write_text(MODULE)


def load(name: str, **options: Any) -> Any:
    return load_task(TaskSettings(name=f"optional:{name}", options=options), None)


@pytest.mark.parametrize("name", ["make", "Model"])
def test_a_factory_gets_the_options_of_its_annotation(module: None, name: str) -> None:
    assert load(name, width=7).width == 7
    assert load(name).width == 64


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none", r"--task width: the task has no options, because .* no parameter 'options' \(.*optional\.py, line 31\)"),
        (
            "unnamed",
            r"the annotation of its factory's parameter 'options' is missing, expected a class that @dataclass\(frozen",
        ),
        (
            "mutable",
            r"parameter 'options' is <class 'optional\.Mutable'>, expected a class that @dataclass\(frozen=True\) makes",
        ),
        ("missing", r"parameter 'options': name 'Optoins' is not defined \(.*optional\.py, line 28\)"),
    ],
)
def test_a_factory_that_cannot_take_them(module: None, name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(name, width=7)


def test_the_built_in_task_has_none() -> None:
    with pytest.raises(SettingsError, match="--task width: the built-in task has no options"):
        load_task(TaskSettings(options={"width": 3}), None)


def test_options_are_part_of_a_run_s_identity_and_a_run_without_keeps_the_one_it_had() -> None:
    plain, narrow, wide = (run_settings(overrides=values) for values in ({}, *({"task.options.width": w} for w in (64, 128))))
    assert len({settings.digest() for settings in (plain, narrow, wide)}) == 3
    assert "options" not in plain.model_dump()["task"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"deep": {"table": 1}}, r"task\.options\.a: expected a bool, a number, text, or a list of at most 1024 of these"),
        ([[1]], "expected a bool, a number, text, or a list"),
        (float("nan"), r"task\.options\.a: expected finite numbers"),
    ],
)
def test_values_that_settings_cannot_hold(value: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        run_settings(overrides={"task.options.a": value})
