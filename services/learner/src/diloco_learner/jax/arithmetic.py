"""The arithmetic of an island: its loss and its steps, as pure functions of arrays, which JAX traces.

Parameters are a list of arrays in float32, the masters, in the order in which JAX flattens the task's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from diloco_learner.jax.inner import BuiltIn
from diloco_learner.jax.loss import Given, Loss, MeasuredLoss
from diloco_learner.jax.mesh import Leaves, Placement
from diloco_learner.jax.own_optimizer import OwnOptimizer

Evaluated: TypeAlias = tuple[jax.Array, dict[str, jax.Array], jax.Array | None]  # loss, metrics, tokens that they are means of


class Arithmetic:
    """The functions of one model."""

    def __init__(self, loss: Loss, optimizer: BuiltIn | OwnOptimizer, placement: Placement) -> None:
        self.loss, self.optimizer, self._placement, self.model = loss, optimizer, placement, placement.tree

    def step(
        self,
        leaves: Leaves,
        held: Leaves | None,
        optimizer: Any,
        state: Any,
        batch: Any,
        given: Given,
        learning_rate: jax.Array,
    ) -> tuple[Leaves, Leaves | None, Any, Any, Any]:
        """Return parameters, gradients held, optimizer's and task's state after a step, and scalars as :meth:`measure`."""
        gradients, after, output = self.measure(leaves, state, batch, given)
        moved = self.move(
            leaves, held, optimizer, state, gradients=gradients, after=after, finite=output[2], learning_rate=learning_rate
        )
        return *moved, output

    def measure(self, leaves: Leaves, state: Any, batch: Any, given: Given) -> tuple[Leaves, Any, Any]:
        """Return gradients, the task's state after the step, and scalars.

        These are the loss, the norm of the gradients, whether a step is to be taken: where both are finite and the loss counts
        something; the task's metrics, and its tokens, if it counts them.
        """

        def loss_of(values: Leaves) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array | None, Any]]:
            found = self._train_loss(values, state, batch, given)
            return found.loss, (found.metrics, found.tokens, found.state)

        (loss, (metrics, tokens, after)), gradients = jax.value_and_grad(loss_of, has_aux=True)(self.rounded(leaves))
        gradients = [gradient.astype(jnp.float32) for gradient in self._placement.split(gradients)]
        # tensordot, and not vdot, whose flattening would gather a gradient that is split along another axis than its first
        norm = jnp.sqrt(sum(jnp.tensordot(gradient, gradient, gradient.ndim) for gradient in gradients))
        taken = jnp.isfinite(loss) & jnp.isfinite(norm)
        if tokens is not None:
            taken &= tokens > 0
        return gradients, after, (loss, norm, taken, metrics, tokens)

    def count(self, leaves: Leaves, state: Any, batch: Any, given: Given) -> jax.Array | None:
        """Return the tokens that a training step's loss counts; None: it does not say.

        XLA leaves out what they do not depend on, which is the model where a mask says what counts.
        """
        return self._train_loss(self.rounded(leaves), state, batch, given).tokens

    def _train_loss(self, leaves: Leaves, state: Any, batch: Any, given: Given) -> MeasuredLoss:
        return self.loss.of(self._placement.loss, self.tree(leaves, given), batch, given, state, train=True)

    def move(
        self,
        leaves: Leaves,
        held: Leaves | None,
        optimizer: Any,
        state: Any,
        gradients: Leaves,
        after: Any,
        finite: jax.Array,
        learning_rate: jax.Array,
    ) -> tuple[Leaves, Leaves | None, Any, Any]:
        """Return parameters, gradients held, optimizer state and the task's after a step of these gradients.

        ``after`` is the task's state after it. All are as before if the step was not ``finite``.
        """
        if held is None:
            new_leaves, new_optimizer = self.optimizer.step(gradients, optimizer, leaves, learning_rate)
            new_held = None
        else:
            assert isinstance(self.optimizer, BuiltIn), "an outer AdamW allows no inner optimizer"
            updates, new_optimizer = self.optimizer.update(gradients, optimizer, leaves)
            new_leaves, new_held = leaves, [gradient + update for gradient, update in zip(held, updates, strict=True)]

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        moved: tuple[Leaves, Leaves | None, Any, Any]
        moved = jax.tree.map(chosen, (new_leaves, new_held, new_optimizer, after), (leaves, held, optimizer, state))
        return moved

    def evaluate(self, leaves: Leaves, state: Any, batch: Any, given: Given) -> Evaluated:
        """Return loss, metrics and tokens of a batch that is not trained on."""
        params = self.tree(self.rounded(leaves), given)
        found = self.loss.of(self._placement.loss, params, batch, given, state, train=False)
        return found.loss, found.metrics, found.tokens

    def rounded(self, leaves: Leaves) -> Leaves:
        """Return the parameters that masters stand for, rounded where they lie: a mesh gathers what is rounded."""
        if not any(each.dtype == jnp.bfloat16 for each in self.model.trained):
            return leaves
        return self._placement.split([_as(each.dtype, leaf) for each, leaf in zip(self.model.trained, leaves, strict=True)])

    def tree(self, leaves: Sequence[jax.Array], given: Given) -> Any:
        """Return arrays that lie as masters do in the task's tree, among the frozen ones."""
        return self.model.tree(leaves, given.get("frozen", ()))


def _as(dtype: jnp.dtype, master: jax.Array) -> jax.Array:
    if dtype == jnp.float32:
        return master
    # by itself, a conversion is left out by XLA where a task converts back: it would see the master there
    return jax.lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7).astype(dtype)
