"""The parameters of a loop of one's own in PyTorch: a module, or its tensors by path. They are read and written in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diloco.core.delta import Reference
from diloco.core.fragments import Fragment, TensorSpec
from diloco.errors import SettingsError
from diloco_learner.model import Vector
from diloco_learner.pytorch.tensors import Rows, Views, on_host, paths_of, shown


@dataclass(frozen=True)
class Copy:
    """A fragment's values as of when it was read: a copy, on the device still."""

    values: torch.Tensor

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them as float32 [size of the fragment], in ``out`` if given. From any thread."""
        return on_host(self.values, out)


class TorchParameters:
    """Float32 tensors on any device.

    Raises:
        SettingsError: there is no tensor, or one of another type or kind.
    """

    def __init__(self, params: Any) -> None:
        self.tree = params
        self._rows = Rows(_views(params))

    def tensors(self, said: object) -> list[TensorSpec]:
        """Return each tensor as the log has it.

        Raises:
            SettingsError: ``said``, by its ``tensor``, says of one what cannot be.
        """
        return self._rows.specs(said, "a loop says by not handing it over")

    def take(self, params: Any) -> None:
        """Take over the values of the same model: those of the module that joined, or tensors of the same names.

        Raises:
            SettingsError: a tensor is missing, new, or of another shape or type.
        """
        if params is self.tree and isinstance(params, torch.nn.Module):
            return
        views, known = _views(params), self._rows.views
        differ = sorted(views.keys() ^ known.keys())
        if differ:
            raise SettingsError(f"step: params are not those that joined: {', '.join(differ[:3])}: hand over the same tensors")
        for path, view in views.items():
            if view.shape != known[path].shape:
                raise SettingsError(
                    f"step: parameter {path!r} has shape {tuple(view.shape)}, expected {tuple(known[path].shape)}, as it joined"
                )
        self.tree, self._rows = params, Rows(views)

    def snapshot(self, fragment: Fragment) -> Copy:
        """Queue a copy of a fragment's values."""
        return Copy(self._rows.read(fragment))

    def write(self, fragment: Fragment, theta: Vector, reference: Reference | Vector | None = None, alpha: float = 0.0) -> None:
        """Write a fragment, as :class:`diloco_learner.model.Carried` says; vectors are float32 [its size]."""
        self._rows.write(fragment, theta, reference, alpha)


def _views(params: Any) -> Views:
    named = paths_of(params) if isinstance(params, torch.nn.Module) else params
    found = {str(name).replace(".", "/"): tensor for name, tensor in named.items()}
    if not found:
        raise SettingsError("join: the module has no parameter that requires a gradient, so there is nothing to train")
    for path, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise SettingsError(f"parameter {path!r} is a {type(tensor).__name__}, expected a tensor, as the others")
        if tensor.dtype != torch.float32:
            raise SettingsError(
                f"parameter {path!r} is {shown(tensor.dtype)}, expected float32: keep float32 masters, and compute in other "
                "types by autocast"
            )
    return {path: tensor.detach() for path, tensor in found.items()}
