"""The arithmetic of an island: its loss and its steps, as pure functions of arrays, which JAX traces.

Parameters are a list of arrays in float32, the masters, in the order in which JAX flattens the task's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from diloco_learner.inner import BuiltIn
from diloco_learner.loss import Given, Loss
from diloco_learner.mesh import Leaves, Placement
from diloco_learner.own_optimizer import OwnOptimizer

LossAndMetrics: TypeAlias = tuple[jax.Array, dict[str, jax.Array]]


class Arithmetic:
    """The functions of one model. ``structure`` and ``dtypes`` are those of the task's parameters."""

    def __init__(
        self,
        loss: Loss,
        optimizer: BuiltIn | OwnOptimizer,
        placement: Placement,
        structure: Any,
        dtypes: Sequence[jnp.dtype],
    ) -> None:
        self.loss, self.optimizer, self._placement = loss, optimizer, placement
        self._structure, self._dtypes = structure, dtypes

    def step(
        self, leaves: Leaves, held: Leaves | None, state: Any, batch: Any, given: Given, learning_rate: jax.Array
    ) -> tuple[Leaves, Leaves | None, Any, Any]:
        """Return parameters, gradients held and optimizer state after a step, and its scalars, as :meth:`measure`."""
        gradients, output = self.measure(leaves, batch, given)
        return *self.move(leaves, held, state, gradients, output[2], learning_rate), output

    def measure(self, leaves: Leaves, batch: Any, given: Given) -> tuple[Leaves, Any]:
        """Return gradients, and scalars: loss, norm of the gradients, whether both are finite; and the task's metrics."""

        def loss_of(values: Leaves) -> LossAndMetrics:
            return self.loss.of(self._placement.loss, self.tree(values), batch, given, train=True)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(self.rounded(leaves))
        gradients = [gradient.astype(jnp.float32) for gradient in self._placement.split(gradients)]
        # tensordot, and not vdot, whose flattening would gather a gradient that is split along another axis than its first
        norm = jnp.sqrt(sum(jnp.tensordot(gradient, gradient, gradient.ndim) for gradient in gradients))
        return gradients, (loss, norm, jnp.isfinite(loss) & jnp.isfinite(norm), metrics)

    def move(
        self,
        leaves: Leaves,
        held: Leaves | None,
        state: Any,
        gradients: Leaves,
        finite: jax.Array,
        learning_rate: jax.Array,
    ) -> tuple[Leaves, Leaves | None, Any]:
        """Return parameters, gradients held and optimizer state after a step of these gradients; as they are if not finite."""
        if held is None:
            new_leaves, new_state = self.optimizer.step(gradients, state, leaves, learning_rate)
            new_held = None
        else:
            assert isinstance(self.optimizer, BuiltIn), "an outer AdamW has no other optimizer beside it"
            updates, new_state = self.optimizer.update(gradients, state, leaves)
            new_leaves, new_held = leaves, [gradient + update for gradient, update in zip(held, updates, strict=True)]

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        moved: tuple[Leaves, Leaves | None, Any]
        moved = jax.tree.map(chosen, (new_leaves, new_held, new_state), (leaves, held, state))
        return moved

    def evaluate(self, leaves: Leaves, batch: Any) -> LossAndMetrics:
        """Return loss and metrics of a batch that nobody trains on."""
        return self.loss.of(self._placement.loss, self.tree(self.rounded(leaves)), batch, {}, train=False)

    def rounded(self, leaves: Leaves) -> Leaves:
        """Return the parameters that masters stand for, rounded where they lie: a mesh gathers what is rounded."""
        if not any(dtype == jnp.bfloat16 for dtype in self._dtypes):
            return leaves
        return self._placement.split([_as(dtype, leaf) for dtype, leaf in zip(self._dtypes, leaves, strict=True)])

    def tree(self, leaves: Sequence[jax.Array]) -> Any:
        """Return arrays in the task's tree."""
        return jax.tree.unflatten(self._structure, leaves)


def _as(dtype: jnp.dtype, master: jax.Array) -> jax.Array:
    if dtype == jnp.float32:
        return master
    # by itself, a conversion is left out by XLA where a task converts back: it would see the master there
    return jax.lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7).astype(dtype)
