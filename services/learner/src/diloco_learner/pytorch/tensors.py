"""The tensors of a module that a run trains: their paths, and reading and writing of their rows, in place.

A parameter's path is its name with ``/`` for ``.``. A run that others train with JAX has the names and layouts of their task:
a task's ``tensors(module)`` gives for each path a view of a parameter, such as its transpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import Fragment, Piece, TensorSpec
from diloco.core.tensors.rows import at
from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.api.model import Vector
from diloco_learner.pytorch import names
from diloco_learner.task_api import STATE, is_merged
from diloco_learner.tensors import Tensor, trained

Views = dict[str, torch.Tensor]
FLOATS = (torch.float32, torch.bfloat16)


def paths_of(module: torch.nn.Module) -> Views:
    """Return the trained parameters of a module by their paths."""
    return {each.path: each.tensor.detach() for each in names.parameters_of(module) if each.tensor.requires_grad}


def merged_buffers(task: object, buffers: Views, named: Mapping[str, Any], source: str) -> Views:
    """Return the buffers of a module that are merged, by their paths in the log.

    ``buffers`` are those that are saved, by name; ``named`` are the task's ``tensors``, of which some may be views of buffers.
    Errors begin with the ``source``.

    Raises:
        SettingsError: a view is of no such buffer, or the task has one averaged that is not float32.
    """
    paths = {buffer.data_ptr(): name.replace(".", "/") for name, buffer in buffers.items()}
    for path, view in named.items():
        if not isinstance(view, torch.Tensor) or view.data_ptr() not in paths or view.ndim > 1:
            raise SettingsError(
                f"{source}: tensors() has {path!r}, which begins with {STATE!r}, but is not a buffer of the module with "
                f"at most one axis: give the buffer itself, such as module.norm.running_mean{members.place(task.tensors)}"  # type: ignore[attr-defined]
            )
        paths[view.data_ptr()] = path.removeprefix(STATE)
    found = {}
    for buffer in buffers.values():
        path = paths[buffer.data_ptr()]
        if is_merged(task, path, shown(buffer.dtype), members.place(task.module)):  # type: ignore[attr-defined]
            found[STATE + path] = buffer
    return found


def check_module(module: Any, source: str, place: str) -> None:
    """Find out that a task's ``module`` is one, that it has trained parameters, and that each is float32 or bfloat16.

    ``source`` begins the sentence, and the ``place`` where the module is made ends it.

    Raises:
        SettingsError: it is none, it has none, or one is of another type.
        ValueError: one has no shape yet.
    """
    if not isinstance(module, torch.nn.Module):
        raise SettingsError(f"{source}: module() returned a {type(module).__name__}, expected a torch.nn.Module{place}")
    named = [(each.name, each.tensor) for each in names.parameters_of(module) if each.tensor.requires_grad]
    if not named:
        raise SettingsError(
            f"{source}: the module has no parameter that requires a gradient, so there is nothing to train{place}"
        )
    for name, tensor in named:
        if tensor.dtype not in FLOATS:
            raise SettingsError(
                f"{source}: parameter {name!r} is {shown(tensor.dtype)}, expected float32 or bfloat16: use "
                f"module.float(), and compute in other types with autocast{place}"
            )
        tensor.numel()


def check_views(views: Any, module: torch.nn.Module, source: str, place: str) -> Views:
    """Return a mapping of paths to views of a module's trained parameters, if they are all of them, each once.

    ``source`` begins an error, and the ``place`` where the views are made ends it.

    Raises:
        SettingsError: a view is no tensor, or shares no memory with a parameter; or a parameter has no view, or two.
    """
    if not isinstance(views, Mapping):
        raise SettingsError(
            f"{source}: tensors() returned a {type(views).__name__}, expected views of parameters by path{place}"
        )
    held = names.parameters_of(module)
    places = {each.tensor.untyped_storage().data_ptr(): each.name for each in held}
    missing = {each.name: each.tensor.numel() for each in held if each.tensor.requires_grad}
    for path, view in views.items():
        if not isinstance(view, torch.Tensor):
            raise SettingsError(
                f"{source}: tensors() has {path!r} as a {type(view).__name__}, expected a view of a parameter{place}"
            )
        name = places.get(view.untyped_storage().data_ptr(), "")
        if name not in missing:
            raise SettingsError(
                f"{source}: tensors() has {path!r}, which shares no memory with a trained parameter: give a view of a "
                f"parameter, such as parameter.T, not a copy{place}"
            )
        missing[name] -= view.numel()
    for name, left in missing.items():
        if left:
            said = f"lacks {left} of the values of" if left > 0 else "repeats values of"
            raise SettingsError(f"{source}: tensors() {said} parameter {name!r}: each value must occur once{place}")
    return {path: view.detach() for path, view in views.items()}


class TensorRows:
    """Rows of named tensors, float32 on any device, which are read and written at once, where they lie."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._arrangements: dict[str, Arrangement] = {}
        self._stored = views  # as the log has them, output units first

    def specs(
        self, said: object, frozen: str, convolutions: Mapping[str, Tensor] = MappingProxyType({}), *, optimized: bool = True
    ) -> list[TensorSpec]:
        """Return every tensor as the log has it, in which it is read and written from now on.

        A task or loop has ``said`` what each is; where it says nothing, the weights of ``convolutions``, by path, are what
        their modules' types say. ``frozen`` is how it says of one so. ``optimized``: by us, as matrices of the model's shape.

        Raises:
            SettingsError: it says of one what cannot be.
        """
        specs = []
        for path, view in self.views.items():
            shape = tuple(view.shape)
            tensor = trained(said, path, shape, frozen)
            if path in convolutions and not hasattr(said, "tensor") and tensor.kind != "embedding":
                tensor = convolutions[path]
            kept = tensor.arrangement(shape)
            if kept is not None and (len(kept.outputs) > 1 or (optimized and tensor.kind == "matrix")):
                raise SettingsError(
                    f"task: tensor({path!r}, {shape}) must have its output axes first: give a view that has them first, "
                    "such as parameter.T; a task does so in tensors(module), a loop in the tensors that it passes"
                )
            if kept is not None:
                self._arrangements[path] = kept
            specs.append(tensor.spec(path, shape))
        self._stored = self._as_stored(self.views)
        return specs

    def moved(self, views: Views) -> TensorRows:
        """Return the rows of other tensors, of the same paths and shapes, as the log has them."""
        rows = TensorRows(views)
        rows._arrangements, rows._stored = self._arrangements, self._as_stored(views)
        return rows

    def read(self, fragment: Fragment) -> torch.Tensor:
        """Return a copy of a fragment's values, float32 [its size], on their device."""
        return torch.cat([self._rows(piece).reshape(-1) for piece in fragment.pieces])

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None, alpha: float) -> None:
        """Write a fragment, as :class:`diloco_learner.api.model.SharedParameters` says; vectors are float32 [its size]."""
        with torch.no_grad():
            for piece in fragment.pieces:
                rows = self._rows(piece)
                new = _part(theta, piece, rows)
                if reference is not None:
                    new = new + (rows - _part(reference, piece, rows))
                rows.copy_(new if alpha == 0 else alpha * rows + (1 - alpha) * new)

    def _rows(self, piece: Piece) -> torch.Tensor:
        view = self._stored[piece.path]
        return view[piece.row_start : piece.row_stop] if view.ndim else view

    def _as_stored(self, views: Views) -> Views:
        return {path: _outputs_first(view, self._arrangements.get(path)) for path, view in views.items()}


def _outputs_first(view: torch.Tensor, kept: Arrangement | None) -> torch.Tensor:
    """Return a view whose first axis is the rows of the log; its other axes are the log's columns, in C order."""
    if kept is None:
        return view
    return view.movedim(kept.outputs[0], 0) if kept.outputs else view[None]


def _part(vector: Baseline | Vector, piece: Piece, rows: torch.Tensor) -> torch.Tensor:
    values = at(vector, piece)
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(rows.device).reshape(rows.shape)


def on_host(values: torch.Tensor, out: Vector | None) -> Vector:
    """Wait for values, float32 [n], and return them on the host, in ``out`` if given."""
    vector: Vector = values.cpu().numpy()
    if out is None:
        return vector
    out[...] = vector
    return out


def shown(dtype: torch.dtype) -> str:
    """Return a type as people name it."""
    return str(dtype).removeprefix("torch.")
