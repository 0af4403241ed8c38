"""The settings that a project of one's own trains its task with: ``settings.py`` beside it, as ``diloco init`` makes it."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import SettingsError

FILE, SETTINGS, TASK = "settings.py", "SETTINGS", "task.py"
COUNTS = {"LEARNERS": "learners", "TOKENS": "tokens"}  # names in the file, and the settings that they are


@dataclass(frozen=True)
class ProjectSettings:
    """Settings by dotted name, and the file that they are from."""

    file: Path
    given: Mapping[str, Any]


def project_in(folder: Path) -> ProjectSettings | None:
    """Return the settings of the project in a folder; None: it has no file of them.

    A ``settings.py`` that does not assign ``SETTINGS`` is another program's, and is not run.

    Raises:
        SettingsError: the file cannot be run, or has no mapping there.
    """
    file = folder / FILE
    if not file.is_file() or not _assigns_settings(file):
        return None
    try:
        found = runpy.run_path(str(file))
    except Exception as error:  # a user's file may do anything wrong
        raise SettingsError(f"{file}: cannot be run: {type(error).__name__}: {error}") from None
    if not isinstance(found[SETTINGS], Mapping):
        raise SettingsError(f"{file}: {SETTINGS} is a {type(found[SETTINGS]).__name__}, expected a dict of settings by name")
    given = {str(key): value for key, value in found[SETTINGS].items()}
    return ProjectSettings(file, given | {setting: found[name] for name, setting in COUNTS.items() if name in found})


def settings_here(overrides: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``overrides`` over the settings of the project in a folder, whose ``task.py`` has the task; or them alone.

    Another task's name among the overrides leaves the project out. The folder is the current one, where services find modules.

    Raises:
        SettingsError: its settings cannot be read.
    """
    if "task.name" in overrides or not (folder / TASK).is_file():
        return dict(overrides)
    project = project_in(folder.resolve())
    if project is None:
        return dict(overrides)
    return {"task.name": f"{Path(TASK).stem}:make", **project.given, **overrides}


def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a user's file.

    Raises:
        SettingsError: it cannot be read, or is no Python.
    """
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read as Python: {error}") from None


def _assigns_settings(file: Path) -> bool:
    """Whether a file assigns ``SETTINGS``; it raises as :func:`parsed` does."""
    body = parsed(file).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign) and node.value is not None]
    return any(isinstance(target, ast.Name) and target.id == SETTINGS for target in targets)
