"""The tensors of a task's model: those that are trained, as masters that lie as the log has them, and those that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.jax.leaves import path_of
from diloco_learner.tensors import Shape, Tensor, tensor_of


@dataclass(frozen=True)
class Described:
    """A tensor of a model: its keys in the task's tree, its shape and type there, and what the task says of it."""

    keys: tuple[Any, ...]
    shape: Shape
    dtype: Any
    tensor: Tensor
    arrangement: Arrangement | None

    @property
    def path(self) -> str:
        """Its keys joined by ``/``."""
        return path_of(self.keys)

    @property
    def stored_shape(self) -> Shape:
        """The shape of its master, and in the log."""
        return self.shape if self.arrangement is None else self.arrangement.stored_shape

    def stored(self, values: Any) -> Any:
        """Return values as the log has them, from those of the task."""
        return values if self.arrangement is None else self.arrangement.stored(values)

    def restored(self, values: Any) -> Any:
        """Return values as the task has them, from those of the log."""
        return values if self.arrangement is None else self.arrangement.restored(values)


class ModelTree:
    """The tensors of what ``task.init`` returned, or of its shapes, in the order in which JAX flattens it.

    Raises:
        SettingsError: the task says of a tensor what cannot be; one that is trained has another type than float32 or bfloat16.
    """

    def __init__(self, task: object, made: Any) -> None:
        keyed, self.structure = jax.tree_util.tree_flatten_with_path(made)
        self.tensors = [_described(task, keys, leaf) for keys, leaf in keyed]
        self.trained = [each for each in self.tensors if each.tensor.kind != "frozen"]
        self.frozen = [each for each in self.tensors if each.tensor.kind == "frozen"]

    def parts(self, made: Any) -> tuple[list[Any], list[Any]]:
        """Return the leaves of such a tree apart: those that are trained, and the frozen ones."""
        leaves: list[Any] = self.structure.flatten_up_to(made)  # type: ignore[attr-defined]
        pairs = list(zip(self.tensors, leaves, strict=True))
        trained, frozen = ([leaf for each, leaf in pairs if (each.tensor.kind == "frozen") is kind] for kind in (False, True))
        return trained, frozen

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the task's tree of anything, one for each tensor."""
        return jax.tree.unflatten(self.structure, leaves)

    def masters(self, trained: list[Any]) -> list[jax.Array]:
        """Return new float32 arrays as the log has them, from values as the task has them.

        The values are taken out of their list, so that one without another reference is freed before the next one is copied.
        """
        return [jnp.array(each.stored(jnp.asarray(trained.pop(0))), jnp.float32, copy=True) for each in self.trained]

    def tree(self, stored: Sequence[Any], frozen: Sequence[Any] | None) -> Any:
        """Return the task's tree of arrays that lie as the log has them; without ``frozen`` nothing is in their place."""
        restored = iter([each.restored(values) for each, values in zip(self.trained, stored, strict=True)])
        kept = iter([None] * len(self.frozen) if frozen is None else frozen)
        leaves = [next(kept) if each.tensor.kind == "frozen" else next(restored) for each in self.tensors]
        return self.unflatten(leaves)

    def specs(self) -> list[TensorSpec]:
        """Return the tensors of the log."""
        return [each.tensor.spec(each.path, each.shape) for each in self.trained]


def _described(task: object, keys: tuple[Any, ...], leaf: Any) -> Described:
    path, dtype = path_of(keys), getattr(leaf, "dtype", None)
    place = members.place(task.init)  # type: ignore[attr-defined]
    if dtype is None:
        raise SettingsError(f"task: parameter {path!r} is a {type(leaf).__name__}, expected an array{place}")
    shape = tuple(leaf.shape)
    tensor = tensor_of(task, path, shape)
    if tensor.kind == "frozen":
        return Described(keys, shape, dtype, tensor, None)
    return Described(keys, shape, _trained_dtype(path, dtype, place), tensor, tensor.arrangement(shape))


def _trained_dtype(path: str, dtype: Any, place: str) -> jnp.dtype:
    if dtype in (jnp.float32, jnp.bfloat16):
        known: jnp.dtype = jnp.dtype(dtype)
        return known
    advice = (
        "keep parameters in one of these types, and cast them in the loss; or return Tensor(kind='frozen') if the "
        "parameter is not trained"
    )
    if dtype == jnp.float16:
        advice = "gradients below 6e-8 would vanish and values above 65504 overflow in float16; use bfloat16"
    raise SettingsError(f"task: parameter {path!r} is {dtype}, expected float32 or bfloat16: {advice}{place}")
