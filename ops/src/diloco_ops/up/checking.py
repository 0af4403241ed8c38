"""``diloco check``: whether a task can be trained, and what a run would do with it, before anything is started."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import SettingsError
from diloco.settings.loading import assignment
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.time_limits import check_time_limits
from diloco_ops.inputs import data_source
from diloco_ops.learner_programs import TORCH
from diloco_ops.reading.asking import ask
from diloco_ops.up.environment import learner_environment, mesh_of
from diloco_ops.up.project import project_in
from diloco_ops.up.up import DEFAULT_PRESET, overrides_of
from diloco_ops.up.up_options import Data, Preset, Set, TaskOptions, TorchProcesses
from diloco_report.units import count, decimal, size

MAKE = "make"  # the factory in a file, unless it is named


def check(
    task: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|MODULE:MAKE", help="The task: MODULE:MAKE, FILE.py:MAKE, or FILE.py with the factory make."
        ),
    ],
    data: Data = None,
    preset: Preset = DEFAULT_PRESET,
    set_: Set = None,
    options: TaskOptions = None,
    torch_processes: TorchProcesses = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compile one step of a task, take it twice, and report what a run would do with it. Exit code 2: it cannot be trained.

    The settings are those given here, or else those in settings.py beside the task.
    """
    name, folder = found(task)
    chosen = choose(folder, name, preset, overrides_of(set_, options))
    check_time_limits(chosen.settings, "diloco check")
    environment = learner_environment(0, 1, None)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    request = {
        "settings": chosen.settings.model_dump(), "data": data_source(data, chosen.settings),
        "mesh": None if torch_processes is None else mesh_of(torch_processes), "processes": torch_processes,
    }  # fmt: skip
    examination = ask("examine", request, environment)
    if torch_processes is not None and examination["framework"] != TORCH:
        raise SettingsError(f"--torch-processes {torch_processes}: {task} makes a task of {examination['framework']}")
    if json_:
        print(json.dumps(examination | {"settings": chosen.plain()}))
        return
    show(examination, chosen, Console(highlight=False))


@dataclass(frozen=True)
class Chosen:
    """The settings that a task is checked with: those of a preset, but for those ``given``.

    ``file`` has some of these; None: all are given with the command.
    """

    settings: RunSettings
    given: Mapping[str, Any]
    file: Path | None = None

    def plain(self) -> dict[str, Any]:
        """Return where they are from, for JSON."""
        file = None if self.file is None else str(self.file)
        return {"preset": self.settings.preset, "given": dict(self.given), "file": file}

    @property
    def said(self) -> str:
        """Where they are from, for people."""
        preset = f"those of the preset {self.settings.preset}"
        if not self.given:
            return f"settings: {preset}; for others --preset, --set, --task, as for diloco up"
        named = " ".join(assignment(key, value) for key, value in self.given.items())
        source = "" if self.file is None else f", by {self.file.name}"
        return f"settings: {named}{source}; else {preset}"

    @property
    def command(self) -> str:
        """The command that trains the task with them."""
        preset = [] if self.settings.preset == DEFAULT_PRESET else ["--preset", self.settings.preset]
        assigned = {**self.given, "task.name": self.settings.task.name}
        options = [word for key, value in assigned.items() for word in ("--set", assignment(key, value))]
        return shlex.join(["diloco", "up", *preset, *options])


def choose(folder: Path | None, task: str, preset: str, given: Mapping[str, Any]) -> Chosen:
    """Return the settings of a task in a ``folder``: its project's, overridden by those ``given``.

    Raises:
        SettingsError: one is no setting, or out of range.
    """
    project = None if folder is None else project_in(folder)
    if project is None:
        return Chosen(run_settings(preset, {**given, "task.name": task}, "diloco check"), given)
    both = {**project.given, **given}
    return Chosen(run_settings(preset, both | {"task.name": task}, f"diloco check, by {project.file}"), both, project.file)


def found(task: str) -> tuple[str, Path | None]:
    """Return the setting ``task.name`` of what is named, and the folder of its module where that is a file.

    Raises:
        SettingsError: there is no such file.
    """
    text, _, make = task.partition(":")
    if not text.endswith(".py"):
        return task, None
    file = Path(text)
    if not file.is_file():
        raise SettingsError(f"{text}: there is no such file; name a file, or MODULE:MAKE")
    if not file.stem.isidentifier():
        raise SettingsError(f"{text}: cannot be imported, because {file.stem!r} is not a valid module name; rename the file")
    return f"{file.stem}:{make or MAKE}", file.resolve().parent


def show(found: dict[str, Any], chosen: Chosen, console: Console) -> None:
    """Print an examination for people; warnings last."""
    console.print(chosen.said, markup=False, soft_wrap=True)
    devices = ", ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in Counter(found["devices"]).items())
    console.print(f"framework: {found['framework']}, here on {devices}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "shape", "type", "size", "fragments", "merged by", "matrices"):
        table.add_column(title, justify="right" if title in ("size", "matrices") else "left", no_wrap=title != "tensor")
    for tensor in found["tensors"]:
        row = tensor["path"], _shape(tensor), tensor["dtype"], size(tensor["size_bytes"]), _placed(tensor), tensor["merge"]
        table.add_row(*row, str(tensor["matrices"]))
    console.print(table)
    for array in found["state"]:
        where = f"in fragment {_placed(array)}" if array["fragments"] else "each learner's own"
        about = f"state {array['path']}, {_shape(array)} {array['dtype']}: {array['merge']}, {where}"
        console.print(about, markup=False, highlight=False, soft_wrap=True)
    offers = [fragment["offer_bytes"] for fragment in found["fragments"]]
    console.print(
        f"\n{count(found['parameters'])} parameters in {len(found['tensors'])} tensors, {len(offers)} fragments; "
        f"an offer is of {size(min(offers))} to {size(max(offers))}, before compression"
    )
    console.print(_strategies(found["strategies"]))
    memory = ", ".join(f"{name} {size(value)}" for name, value in found["memory"].items())
    console.print(f"one step: {found['step_s']:.3f} s on this machine; memory: {memory or 'unknown'}")
    if found["processes"] is not None:
        console.print(_processes(found["processes"]), markup=False, soft_wrap=True)
    units = f" {found['units']}" if found["units"] else ""
    console.print(f"loss of the first batch: {decimal(found['loss'], 4)}{units}")
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if not found["warnings"]:
        several = "" if found["processes"] is None else f" --torch-processes {found['processes']['count']}"
        console.print(f"nothing unusual: {chosen.command}{several}", markup=False, soft_wrap=True)


def _processes(found: dict[str, Any]) -> str:
    """Return a line about a process of a learner of several."""
    axes = ", ".join(f"{axis} {number}" for axis, number in found["mesh"].items() if number > 1)
    whole = found["whole"]
    rest = f"; whole in each: {', '.join(whole[:3])}{', ...' if len(whole) > 3 else ''}" if whole else ""
    return (
        f"{found['count']} processes ({axes}): each has at most {size(found['parameters_bytes'])} of parameters and "
        f"{size(found['optimizer_bytes'])} of optimizer state, and takes {found['rows']} of {found['batch_rows']} rows of a "
        f"batch{rest}"
    )


def _strategies(found: list[dict[str, Any]]) -> Table:
    """Return a table of what each strategy would make of the model, in bytes of float32."""
    table = Table(box=None, pad_edge=False)
    table.add_column("fragments.strategy", no_wrap=True)
    for title in ("fragments", "smallest", "largest"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        sizes = ("-", "-") if one["refusal"] else (size(one["smallest_bytes"]), size(one["largest_bytes"]))
        table.add_row(one["strategy"], "not possible" if one["refusal"] else str(one["fragments"]), *sizes)
    return table


def _placed(tensor: dict[str, Any]) -> str:
    """Return the fragments that a tensor lies in."""
    fragments = tensor["fragments"]
    return str(fragments[0]) if len(fragments) == 1 else f"{len(fragments)}: {fragments[0]} to {fragments[-1]}"


def _shape(tensor: dict[str, Any]) -> str:
    return "x".join(map(str, tensor["shape"])) or "number"
