"""The inner optimizer: AdamW by optax, without its learning rate, which is given at every step.

The learning rate follows the run's tokens, not the learner's steps: the tokens that the newest applied version states plus
the learner's own since (design.md section 5). A learner that joins late thus begins where the others are.
"""

from __future__ import annotations

import math

import jax
import optax

from diloco.settings import InnerSettings


def optimizer(settings: InnerSettings) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after clipping to a global norm; weights of two or more axes decay, norms and biases do not.

    Its updates are to be multiplied by minus the learning rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(settings.beta1, settings.beta2),
        optax.add_decayed_weights(settings.weight_decay, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    )


def learning_rate(settings: InnerSettings, tokens_done: int, tokens_budget: int, warming_steps: int | None = None) -> float:
    """Linear warm-up from 0, then a cosine to ``final_fraction`` of the peak at the end of the budget, and flat beyond it.

    ``tokens_done`` counts the tokens of all learners. ``warming_steps`` are those that a learner has taken since its
    optimizer's state began fresh in mid-run (None: it did not): its rate rises over ``restart_warmup_steps`` of its own.
    """
    rate = _scheduled(settings, tokens_done, tokens_budget)
    if warming_steps is None or warming_steps >= settings.restart_warmup_steps:
        return rate
    return rate * (warming_steps + 1) / (settings.restart_warmup_steps + 1)


def _scheduled(settings: InnerSettings, tokens_done: int, tokens_budget: int) -> float:
    progress = min(max(tokens_done / tokens_budget, 0.0), 1.0)
    if progress < settings.warmup_fraction:
        return settings.learning_rate * progress / settings.warmup_fraction
    phase = (progress - settings.warmup_fraction) / (1 - settings.warmup_fraction)
    final = settings.final_fraction
    return settings.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * phase)))
