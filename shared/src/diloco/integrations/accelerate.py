"""A loop that ``accelerate`` has prepared, as a learner of a run."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

import diloco
from diloco.integrations.joined_trainer import inner_optimizer


def join(accelerator: Accelerator, model: Any, optimizer: Any, url: str, **join_arguments: Any) -> Any:
    """Return a run to be entered, in which each step that the prepared ``optimizer`` takes is booked.

    ``accelerator.register_for_checkpointing(run)`` keeps its state in the accelerator's checkpoints, of several ranks the first
    one's. Call ``accelerator.load_state`` before the run is entered.

    Args:
        accelerator: that has prepared them.
        model: the prepared model.
        optimizer: the prepared optimizer.
        url: of the run's NATS server.
        join_arguments: further arguments of ``diloco.join``: ``run``, and ``tokens`` of an optimizer's step of all ranks.
    """
    own = {"data": "own", "optimizer": inner_optimizer(optimizer)} | join_arguments
    return diloco.join(url, params=accelerator.unwrap_model(model), **own)
