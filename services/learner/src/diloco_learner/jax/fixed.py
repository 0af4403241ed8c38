"""Frozen tensors and constants: arguments of a step besides parameters and batch, which are not compiled into it.

Frozen tensors and constants are in no message. Each learner has its own, and their hashes are in the fragment map, tensor by
tensor, so that a learner that has others is not admitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.fragments import FixedSpec
from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.jax.leaves import path_of
from diloco_learner.jax.loss import Given
from diloco_learner.jax.mesh import CONSTANTS, Placement
from diloco_learner.task import Task


class Fixed:
    """The frozen tensors and the constants of an island. ``frozen`` are those of its tree.

    Raises:
        SettingsError: a constant is no array.
    """

    def __init__(self, task: Task, placement: Placement, frozen: Sequence[jax.Array]) -> None:
        self._frozen = list(zip(placement.tree.frozen, frozen, strict=True))
        self.given: Given = {"frozen": list(frozen)} if frozen else {}
        self._constants: list[FixedSpec] = []
        if hasattr(task, "constants"):
            loaded = task.constants()
            self._constants = [_spec(CONSTANTS + path, values) for path, values in _arrays(task, loaded)]
            self.given["constants"] = placement.constants(loaded)

    def specs(self) -> list[FixedSpec]:
        """Return path, type, shape and hash of each; all processes of the learner call it, and wait for the devices."""
        return [*(_spec(each.path, _whole(leaf)) for each, leaf in self._frozen), *self._constants]


def check_finite(make: Any, arrays: Any) -> None:
    """Check that the arrays that a task's member makes hold numbers.

    Raises:
        SettingsError: one holds NaN or infinity.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(arrays)
    floating = [(keys, leaf) for keys, leaf in keyed if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = jax.device_get(_finite([leaf for _, leaf in floating]))
    for (keys, _), numbers in zip(floating, finite, strict=True):
        if not numbers:
            name, place = f"{make.__name__}()", members.place(make)
            raise SettingsError(f"task: {name} returned {path_of(keys)!r} with NaN or infinity, expected numbers{place}")


@jax.jit
def _finite(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return of each array whether all its values are finite; one program for all."""
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def _arrays(task: Task, loaded: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    keyed, _ = jax.tree_util.tree_flatten_with_path(loaded)
    for keys, leaf in keyed:
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            place = members.place(task.constants)  # type: ignore[attr-defined]
            raise SettingsError(
                f"task: constants() returned {path_of(keys)!r} as a {type(leaf).__name__}, expected an array{place}"
            )
        yield path_of(keys), np.asarray(leaf)


def _whole(leaf: jax.Array) -> NDArray[Any]:
    """Return all values of an array on the host; where it is split, its devices gather it."""
    if len(leaf.sharding.device_set) == 1:
        return np.asarray(leaf)
    mesh = leaf.sharding.mesh  # type: ignore[attr-defined]
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return np.asarray(jax.jit(lambda values: values, out_shardings=whole)(leaf).addressable_data(0))


def _spec(path: str, values: NDArray[Any]) -> FixedSpec:
    data = np.ascontiguousarray(values)
    return FixedSpec.of(path, data.dtype.name, values.shape, data.reshape(-1).view(np.uint8).data)
