"""A task's state: arrays that its steps change, and that no gradient moves, such as the statistics of batch normalisation.

Each array is its learner's own, or is merged: it is in the log then, as a tensor whose version is the average of the learners'
values (docs/protocol.md, section 8).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.jax.leaves import path_of
from diloco_learner.jax.mesh import Placement, copies
from diloco_learner.task import Task
from diloco_learner.task_api import STATE, is_merged


class IslandState:
    """The state of an island; ``values`` is the task's pytree, of arrays that are referenced only here, or None.

    An array that is merged is reached by its path in the log.

    Raises:
        SettingsError: something in it is no array, or the task says of one what cannot be.
    """

    def __init__(self, task: Task, placement: Placement) -> None:
        self._make = functools.partial(placement.state, functools.partial(_first, task))
        self.values: Any = self._make()
        self.rules: dict[str, str] = {}  # of all arrays, by path in the task's tree
        self._merged: dict[str, int] = {}  # by path in the log: the place among the arrays
        keyed, _ = jax.tree_util.tree_flatten_with_path(self.values)
        for index, (keys, leaf) in enumerate(keyed):
            path, made = path_of(keys) or "value", task.init_state  # type: ignore[attr-defined]
            if is_merged(task, path, leaf.dtype.name, members.place(made)):
                self._merged[STATE + path] = index
            self.rules[path] = "average" if STATE + path in self._merged else "local"

    def specs(self) -> list[TensorSpec]:
        """Return the arrays that are merged, as the log has them."""
        return [TensorSpec(path, self[path].shape, state=True) for path in self._merged]

    def merged(self) -> dict[str, jax.Array]:
        """Return the arrays that are merged, by path in the log; they are valid until the next step or write."""
        return {path: self[path] for path in self._merged}

    def arrays(self) -> dict[str, jax.Array]:
        """Return all arrays by their name in checkpoints; they are valid until the next step or write."""
        keyed, _ = jax.tree_util.tree_flatten_with_path(self.values)
        return {STATE + path_of(keys): array for keys, array in keyed}

    def __contains__(self, path: str) -> bool:
        return path in self._merged

    def __getitem__(self, path: str) -> jax.Array:
        found: jax.Array = jax.tree.leaves(self.values)[self._merged[path]]
        return found

    def __setitem__(self, path: str, array: jax.Array) -> None:
        arrays, structure = jax.tree.flatten(self.values)
        arrays[self._merged[path]] = array
        self.values = jax.tree.unflatten(structure, arrays)

    def begin_again(self, merged: dict[str, jax.Array]) -> None:
        """Take the values to begin with, but for those that are ``merged``."""
        self.values = self._make()
        for path, array in merged.items():
            self[path] = array

    def copies(self) -> dict[str, jax.Array]:
        """Queue copies of the arrays that are merged."""
        arrays = list(self.merged().values())
        return dict(zip(self._merged, copies(arrays) if arrays else [], strict=True))

    def twin(self) -> IslandState:
        """Return a state of the same values."""
        other = copy.copy(self)
        other.values = jax.tree.map(jnp.copy, self.values)
        return other


def _first(task: Task, key: jax.Array) -> Any:
    """Return a task's state to begin with; None if it has none.

    Raises:
        SettingsError: something in it is no array.
    """
    if not hasattr(task, "init_state"):
        return None
    return jax.tree_util.tree_map_with_path(_array_of(members.place(task.init_state)), task.init_state(key))


def _array_of(place: str) -> Any:
    def array(keys: Any, leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            came = type(leaf).__name__
            raise SettingsError(f"task: init_state() returned {path_of(keys)!r} as a {came}, expected an array{place}")
        made = jnp.array(leaf, copy=True)
        if not (jnp.issubdtype(made.dtype, jnp.number) or made.dtype == jnp.bool_):
            raise SettingsError(
                f"task: init_state() returned {path_of(keys)!r} as {made.dtype}, which cannot be saved: store numbers "
                f"there; for a random key store its jax.random.key_data{place}"
            )
        return jax.lax.convert_element_type(made, made.dtype)  # of no weak type, which steps would return otherwise

    return array
