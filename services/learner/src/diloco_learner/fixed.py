"""Arrays that a step is given besides parameters and batch, and never compiled into it: frozen tensors, constants, state.

Frozen tensors and constants are in no message. Each learner has its own, and their hashes are in the fragment map, tensor by
tensor, so that a learner that has others is not admitted. A state is its learner's own, and its steps change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.fragments import FixedSpec
from diloco.errors import SettingsError
from diloco_learner import members
from diloco_learner.leaves import path_of
from diloco_learner.loss import Given
from diloco_learner.mesh import CONSTANTS, Placement
from diloco_learner.task import Task

RULES = ("average", "latest", "local")


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
    """Find out that the arrays that a task's member makes hold numbers.

    Raises:
        SettingsError: one holds NaN or infinity.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(arrays)
    for keys, leaf in keyed:
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            name, place = f"{make.__name__}()", members.place(make)
            raise SettingsError(f"task: {name} returned {path_of(keys)!r} with NaN or infinity, expected numbers{place}")


def check_state(task: Task, state: Any) -> None:
    """Find out that each array of a task's state stays its learner's own, and that the task has one if its loss takes one.

    Raises:
        SettingsError: one is to be merged, which is not built, or has no rule; or there is none.
    """
    say = getattr(task, "merge_state", None)
    keyed, _ = jax.tree_util.tree_flatten_with_path(state)
    for keys, leaf in keyed:
        path, floats = path_of(keys), jnp.issubdtype(leaf.dtype, jnp.floating)
        rule = ("average" if floats else "latest") if say is None else say(path)
        if rule == "local":
            continue
        place = members.place(task.init_state if say is None else say)  # type: ignore[attr-defined]
        if rule not in RULES:
            raise SettingsError(f"task: merge_state({path!r}) is {rule!r}, expected 'local'{place}")
        default = ", the default," if say is None else ""
        raise SettingsError(
            f"task: state {path!r} is to be merged by {rule!r}{default} which is not built yet: return 'local' from "
            f"merge_state(path), and each learner keeps its own{place}"
        )


def first_state(task: Task, key: jax.Array) -> Any:
    """Return a task's state to begin with, arrays that nobody else has; None if it has none.

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
                f"task: init_state() returned {path_of(keys)!r} as {made.dtype}, which cannot be saved: keep numbers there, "
                f"of a random key jax.random.key_data{place}"
            )
        return jax.lax.convert_element_type(made, made.dtype)  # of no weak type, which steps would return otherwise

    return array


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
    digest = blake3(data.reshape(-1).view(np.uint8).data).digest()
    return FixedSpec(path, data.dtype.name, values.shape, digest)
