"""A task's training loss as JAX traces it, for facts that a step does not reveal."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.experimental import checkify

from diloco.settings.run import RunSettings
from diloco_learner.jax.island import Island
from diloco_learner.jax.loss import Given, Loss
from diloco_learner.task import Task

BEYOND = re.compile(r"out-of-bounds indexing for array of shape (?P<shape>\(.*?\)): (?P<index>index .*)")  # as checkify says it


def traced(task: Task, settings: RunSettings) -> Any:
    """Return a task's training loss as a function of parameters, batch, arrays that it is given, and its state."""
    loss = Loss(task, settings.seed)

    def call(params: Any, batch: Any, given: Given, state: Any) -> jax.Array:
        def own(params: Any, batch: Any, arrays: Any, others: Any) -> Any:
            return task.loss(params, batch, **arrays, **others)

        return loss.of(own, params, batch, loss.given((0, 0)) | given, state, train=True).loss

    return call


def company(island: Island) -> tuple[Given, Any]:
    """Return the constants that the loss is given, and the state."""
    company = island.company()
    return {"constants": company["constants"]}, company["state"]


def out_of_bounds(task: Task, settings: RunSettings, island: Island, batch: Any) -> str:
    """Return by which index the loss of a batch reaches beyond the end of an array; nothing if it does not, or this is unknown.

    JAX gives the array's last element, or NaN, then: a token that the vocabulary does not have is no error.
    """
    guarded = checkify.checkify(traced(task, settings), errors=checkify.index_checks)
    try:
        error, _ = jax.jit(guarded)(island.params(), batch, *company(island))
    except NotImplementedError:  # of a primitive that checkify does not know
        return ""
    said = (error.get() or "").partition("\n")[0].strip(" .")
    found = BEYOND.fullmatch(said)
    return said if found is None else f"{found['index']}, in an array of shape {found['shape']}"
