"""``torchtitan``'s trainer as a learner of a run. All its ranks together are one learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diloco.errors import SettingsError
from diloco.integrations.joined_trainer import JoinedTrainer

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


@contextmanager
def join(trainer: Trainer, url: str, **join_arguments: Any) -> Iterator[JoinedTrainer]:
    """Make ``trainer.train()`` inside the ``with`` statement a learner of a run.

    The learner joins after the trainer has read its checkpoint, before the first step. Each step of the container of
    optimizers is booked once, however many optimizers it has.

    Args:
        trainer: a built trainer that has not trained yet.
        url: URL of the run's NATS server.
        join_arguments: further arguments of ``diloco.join``: ``run``, and ``tokens``, those of a step over all ranks.

    Raises:
        SettingsError: a rank has several parts of the model.
    """
    if len(trainer.model_parts) != 1:
        raise SettingsError(
            f"diloco: this rank has {len(trainer.model_parts)} parts of the model, expected one: choose a pipeline schedule "
            "with one stage for each rank, such as 1F1B"
        )
    joined, goes_on = JoinedTrainer(url, **join_arguments), trainer.should_continue_training

    def begin_or_go_on() -> bool:
        if joined.run is None:
            schedules = trainer.lr_schedulers.schedulers
            joined.begin(trainer.model_parts[0], trainer.optimizers, schedules=schedules)
        return bool(goes_on()) and not joined.over

    trainer.should_continue_training = begin_or_go_on  # the trainer calls it before each step, after it has read its checkpoint
    try:
        yield joined
    except BaseException as error:
        joined.end(error)
        raise
    else:
        joined.end()
    finally:
        trainer.should_continue_training = goes_on
