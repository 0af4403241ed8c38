"""The inner optimizer, by optax, without its learning rate, which is given at every step: AdamW, or Muon for matrices.

The learning rate follows the run's tokens, not the learner's steps: the tokens that the newest applied version states plus
the learner's own since (design.md section 5). A learner that joins late thus begins where the others are.

Where the outer optimizer is AdamW (``outer.optimizer``), a learner's step only makes its gradient, and AdamW's step is taken
from the average of them, in the fold of the log.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import SequenceKey
from optax import contrib

from diloco.core.tensors.outer import EPSILON
from diloco.settings.run import InnerSettings, RunSettings

Rows = tuple[int, ...]
Leaves = list[jax.Array | optax.MaskedNode]  # of the model; the mask stands for tensors that are another optimizer's

MUON_MOMENTUM = 0.95  # as its author has it (Jordan 2024), like the five Newton-Schulz steps
MUON_RMS = 0.2  # of an update's entries, as AdamW's are about (Liu et al., arXiv 2502.16982), so one rate serves both


def optimizer(settings: RunSettings, matrices: Sequence[Rows]) -> optax.GradientTransformation:
    """Return the inner optimizer after clipping to a global norm; weights of two or more axes decay, norms and biases do not.

    AdamW is that of arXiv 1711.05101. ``matrices`` says of each tensor the rows of its matrices, one below the other: each is
    Muon's by itself, where ``inner.optimizer`` is ``muon``; those with none, embeddings and the head for instance, are AdamW's.

    Updates are to be multiplied by minus the learning rate. For an outer AdamW only the clipping is left: of the learner's
    own gradient, since no process has the whole of the average, whose norm is then within the bound too.
    """
    inner = settings.inner
    clip = optax.clip_by_global_norm(inner.clip_norm)
    if settings.offers_gradients:
        return clip
    direction: optax.GradientTransformation = optax.scale_by_adam(inner.beta1, inner.beta2, EPSILON)
    if inner.optimizer == "muon":
        direction = _muon_or(direction, matrices)
    return optax.chain(clip, direction, _decay(inner))


class BuiltIn:
    """The optimizer that the run's settings describe, as a step uses it: of the list of parameters, so many of them."""

    def __init__(self, transformation: optax.GradientTransformation, count: int) -> None:
        self.init, self.update = transformation.init, transformation.update
        self.sees_masters = True
        self.paths = [(SequenceKey(index),) for index in range(count)]

    def step(
        self, gradients: list[jax.Array], state: Any, leaves: list[jax.Array], learning_rate: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        """Return parameters and state after a step."""
        updates, moved = self.update(gradients, state, leaves)
        return [leaf - learning_rate * update for leaf, update in zip(leaves, updates, strict=True)], moved


def _decay(inner: InnerSettings) -> optax.GradientTransformation:
    return optax.add_decayed_weights(inner.weight_decay, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params))


def _muon_or(other: optax.GradientTransformation, matrices: Sequence[Rows]) -> optax.GradientTransformation:
    """Return Muon for tensors with matrices, and ``other`` for the rest."""
    labels = ["muon" if rows else "other" for rows in matrices]
    return optax.partition({"muon": _muon(matrices), "other": other}, labels)


def _muon(matrices: Sequence[Rows]) -> optax.GradientTransformation:
    """Orthogonalise the momentum of each matrix by itself (Muon); an update's entries have a root mean square of 0.2.

    An orthogonal r x c matrix has entries of root mean square 1 / sqrt(max(r, c)), hence the factor.
    """
    axes = contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    inner = contrib.scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: axes, tree))

    def split(tree: Leaves) -> list[Any]:
        return [_apart(leaf, rows) for leaf, rows in zip(tree, matrices, strict=True)]

    def init(params: Leaves) -> optax.OptState:
        return inner.init(split(params))

    def update(updates: Leaves, state: optax.OptState, params: object = None) -> tuple[Leaves, optax.OptState]:
        directions, state = inner.update(split(updates), state)
        return [_together(each, leaf) for leaf, each in zip(updates, directions, strict=True)], state

    return optax.GradientTransformation(init, update)


def _apart(leaf: jax.Array | optax.MaskedNode, rows: Rows) -> Any:
    """Return a tensor's matrices: [matrices, rows, columns] where they have as many rows, else a list of [1, rows, columns]."""
    if isinstance(leaf, optax.MaskedNode):
        return leaf
    flat = leaf.reshape(-1, leaf.shape[-1])
    if len(set(rows)) == 1:
        return flat.reshape(len(rows), rows[0], -1)
    ends = list(itertools.accumulate(rows))
    return [flat[None, end - count : end] for count, end in zip(rows, ends, strict=True)]


def _together(directions: Any, leaf: jax.Array | optax.MaskedNode) -> jax.Array | optax.MaskedNode:
    """Return the updates of a tensor, of the ``leaf``'s shape, from the directions of its matrices."""
    if isinstance(leaf, optax.MaskedNode):
        return leaf
    scaled = [MUON_RMS * jnp.sqrt(max(each.shape[1:])) * each for each in jax.tree.leaves(directions)]
    flat = scaled[0] if len(scaled) == 1 else jnp.concatenate(scaled, axis=1)
    return flat.reshape(leaf.shape)
