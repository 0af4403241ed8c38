"""The inner optimizer: AdamW by optax, without its learning rate, which is given at every step.

The learning rate follows the run's tokens, not the learner's steps: the tokens that the newest applied version states plus
the learner's own since (design.md section 5). A learner that joins late thus begins where the others are.

Where the outer optimizer is AdamW (``outer.optimizer``), a learner's step is its gradient, and AdamW's step is taken from the
average of them, in the fold of the log.
"""

from __future__ import annotations

import jax
import optax

from diloco.core.outer import EPSILON
from diloco.core.schedule import Moment, scheduled_rate
from diloco.settings import RunSettings


def optimizer(settings: RunSettings) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after clipping to a global norm; weights of two or more axes decay, norms and biases do not.

    Its updates are to be multiplied by minus the learning rate. For an outer AdamW only the clipping is left: of the learner's
    own gradient, since nobody has the whole of the average, whose norm is then within the bound too.
    """
    inner = settings.inner
    clip = optax.clip_by_global_norm(inner.clip_norm)
    if settings.outer.optimizer == "adamw":
        return clip
    return optax.chain(
        clip,
        optax.scale_by_adam(inner.beta1, inner.beta2, EPSILON),
        optax.add_decayed_weights(inner.weight_decay, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    )


def learning_rate(settings: RunSettings, at: Moment) -> float:
    """The rate of a step; 1 where the step is the gradient.

    Where a learner's optimizer state began fresh in mid-run, its rate rises over ``restart_warmup_steps`` of its own.
    """
    if settings.outer.optimizer == "adamw":
        return 1.0
    inner = settings.inner
    rate = scheduled_rate(inner, at.tokens, at.budget)
    if at.warming_steps is None or at.warming_steps >= inner.restart_warmup_steps:
        return rate
    return rate * (at.warming_steps + 1) / (inner.restart_warmup_steps + 1)
