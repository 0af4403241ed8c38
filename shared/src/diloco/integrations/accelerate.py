"""A loop that uses ``accelerate``, as a learner of a run."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

import diloco
from diloco.integrations.joined_trainer import inner_optimizer


def join(accelerator: Accelerator, model: Any, optimizer: Any, url: str, **join_arguments: Any) -> Any:
    """Return a run, for a ``with`` statement inside which each step of the prepared ``optimizer`` is booked.

    ``accelerator.register_for_checkpointing(run)`` stores the learner's state in the accelerator's checkpoints; with several
    ranks, that of the first one. Call ``accelerator.load_state`` before the ``with`` statement.

    Args:
        accelerator: the accelerator that prepared them.
        model: the prepared model.
        optimizer: the prepared optimizer.
        url: URL of the run's NATS server.
        join_arguments: further arguments of ``diloco.join``: ``run``, and ``tokens``, those of a step over all ranks.
    """
    own = {"data": "own", "optimizer": inner_optimizer(optimizer)} | join_arguments
    return diloco.join(url, params=accelerator.unwrap_model(model), **own)
