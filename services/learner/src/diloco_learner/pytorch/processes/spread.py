"""A task's module with its masters, spread over the processes of a learner, and the tensors of both by path."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.pytorch import names
from diloco_learner.pytorch.processes.process_mesh import Processes
from diloco_learner.pytorch.shards import local_of
from diloco_learner.pytorch.task import TorchTask
from diloco_learner.pytorch.tensors import Views, check_views, paths_of
from diloco_learner.task_api import STATE


class SpreadModule:
    """A module as this process trains it, and its masters, which are the module itself where all of it is float32.

    Attributes:
        views: of the masters' parameters, by path in the log, as the task's ``tensors`` has them.
        trained: the masters' parameters by path: that of their view, if they have one, or else by their name.
        tables: the paths of embeddings among them.
        named_state: the buffers that ``tensors`` names.

    Raises:
        SettingsError: ``tensors`` are not views of all parameters; the module cannot be spread.
    """

    def __init__(self, task: TorchTask, settings: RunSettings, processes: Processes, module: nn.Module, source: str) -> None:
        self._task, self._settings, self._source = task, settings, source
        rounds = any(tensor.dtype != torch.float32 for tensor in module.parameters() if tensor.requires_grad)
        masters = copy.deepcopy(module).float() if rounds else module
        whole, tables = self._named(masters), names.tables(masters)
        if hasattr(task, "tensors"):
            whole = check_views(_of(whole, state=False), masters, source, members.place(task.tensors))
        paths = _paths(masters, whole)
        with members.users_errors(settings.task, getattr(task, "parallelize", None)):
            self.module = processes.spread(task, module, source)
            self.masters = processes.spread(task, masters, source) if rounds else self.module
        self.views: Views = whole if processes.size == 1 else self._views_of_parts(whole)
        self.trained = {
            paths[each.name]: each.tensor for each in names.parameters_of(self.masters) if each.tensor.requires_grad
        }
        self.tables = {paths[name] for name in tables & paths.keys()}
        self.named_state = _of(self._named(self.module), state=True) if hasattr(task, "tensors") else {}

    def _named(self, module: nn.Module) -> Any:
        """Return what the task's ``tensors`` says of a module, or its parameters by path."""
        if not hasattr(self._task, "tensors"):
            return paths_of(module)
        with members.users_errors(self._settings.task, self._task.tensors):
            return self._task.tensors(module)

    def _views_of_parts(self, whole: Views) -> Views:
        """Return the views of parameters that are spread; they are those that were found ``whole``.

        Raises:
            SettingsError: one is a copy now.
        """
        found = {path: view.detach() for path, view in _of(self._named(self.masters), state=False).items()}
        own = {local_of(each.tensor).untyped_storage().data_ptr() for each in names.parameters_of(self.masters)}
        for path, view in whole.items():
            part = found.get(path)
            if (
                part is None
                or part.shape != view.shape
                or (local_of(part).numel() and local_of(part).untyped_storage().data_ptr() not in own)
            ):
                where = members.place(self._task.tensors) if hasattr(self._task, "tensors") else ""
                raise SettingsError(
                    f"{self._source}: tensors() has {path!r}, which is no view of a parameter once that is spread over "
                    "processes: give a view that only exchanges axes, such as parameter.T, or keep the parameter whole in "
                    f"parallelize(){where}"
                )
        return {path: found[path] for path in whole}


def _of(named: Any, *, state: bool) -> Any:
    """Return those of a task's ``tensors`` that are of its state, or the others; what is no mapping as it is."""
    if not isinstance(named, Mapping):
        return {} if state else named
    return {path: view for path, view in named.items() if str(path).startswith(STATE) is state}


def _paths(module: nn.Module, views: Views) -> dict[str, str]:
    """Return the paths of trained parameters by name: that of their view, if they have one, or else their own."""
    paths: dict[int, list[str]] = {}
    for path, view in views.items():
        paths.setdefault(view.untyped_storage().data_ptr(), []).append(path)
    found = {}
    for each in names.parameters_of(module):
        if each.tensor.requires_grad:
            own = paths[each.tensor.untyped_storage().data_ptr()]
            found[each.name] = own[0] if len(own) == 1 else each.path
    return found
