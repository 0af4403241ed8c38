"""The task's own optimizer: any optax transformation, which sees the task's tree of parameters.

The task gets the run's learning rate as a schedule. A step's rate is an argument of its compiled program, and the schedule
gives it whatever count it is called with: the transformation is made once, and the rate is handed to it while it is traced.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.jax.leaves import difference, path_of
from diloco_learner.jax.mesh import Leaves
from diloco_learner.jax.tree import ModelTree
from diloco_learner.task import Task

ALONE = "its only array"


class OwnOptimizer:
    """The optimizer that a task makes, of its parameters that are trained, as it has them.

    Raises:
        SettingsError: it is no optax transformation, or the run has no place for one.
    """

    sees_masters = False

    def __init__(self, task: Task, settings: RunSettings, tree: ModelTree) -> None:
        make = task.optimizer  # type: ignore[attr-defined]
        self._model, self._where, self._make, self._task = tree, members.place(make), make, settings.task
        self.paths = [each.keys for each in tree.trained]
        if settings.offers_gradients:
            raise SettingsError(
                "task: optimizer() with outer.optimizer = adamw, whose learners take no steps themselves: remove "
                f"optimizer(), or use another preset{self._where}"
            )
        self._rate: Any = np.float32(0)
        self._transformation = make(self._scheduled)
        if not all(callable(getattr(self._transformation, name, None)) for name in ("init", "update")):
            came = type(self._transformation).__name__
            raise SettingsError(f"task: optimizer() returned a {came}, expected an optax transformation{self._where}")

    def init(self, leaves: Leaves) -> Any:
        """Return the state of an optimizer that begins.

        Raises:
            SettingsError: it holds something that is no array, or that cannot be saved.
        """
        with members.users_errors(self._task, self._make):
            begun = self._transformation.init(self._tree(leaves))
        return jax.tree_util.tree_map_with_path(self._array, begun)

    def step(self, gradients: Leaves, state: Any, leaves: Leaves, learning_rate: jax.Array) -> tuple[Leaves, Any]:
        """Return parameters and state after a step.

        Raises:
            SettingsError: updates or state are not as the parameters or the state before.
        """
        self._rate = learning_rate
        try:
            with members.users_errors(self._task, self._make):
                updates, moved = self._transformation.update(self._tree(gradients), state, self._tree(leaves))
        finally:
            self._rate = np.float32(0)
        self._compare("updates", self._tree(leaves), updates)
        self._compare("state", state, moved)
        pairs = zip(self._model.trained, leaves, jax.tree.leaves(updates), strict=True)
        return [leaf + each.stored(update) for each, leaf, update in pairs], moved

    def _scheduled(self, count: Any) -> Any:
        return self._rate

    def _tree(self, leaves: Leaves) -> Any:
        return self._model.tree(leaves, None)

    def _array(self, path: Any, leaf: Any) -> jax.Array:
        found = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if not (jnp.issubdtype(found.dtype, jnp.number) or found.dtype == jnp.bool_):
            raise SettingsError(
                f"task: optimizer(): its state has {_named(path)} as {found.dtype}, which cannot be saved: store numbers "
                f"there; for a random key store its jax.random.key_data{self._where}"
            )
        return jax.lax.convert_element_type(jnp.array(found), jnp.array(found).dtype)

    def _compare(self, kind: str, expected: Any, came: Any) -> None:
        if (differs := difference(expected, came)) is not None:
            path, wanted, found = differs
            raise SettingsError(
                f"task: optimizer(): its {kind} has {path or ALONE} as {found}, expected {wanted}, as before the step"
                f"{self._where}"
            )


def _named(path: Any) -> str:
    return path_of(path) or ALONE
