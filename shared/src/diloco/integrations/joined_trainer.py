"""The part of a learner that all trainers share: it joins a run when training begins, and leaves it at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import diloco
from diloco.errors import RunError, SettingsError


def inner_optimizer(optimizer: Any) -> Any:
    """Return the PyTorch optimizer inside the wrappers of trainers. Its own hooks are called for each step that is taken.

    Raises:
        SettingsError: there is none.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "register_step_post_hook"):
        raise SettingsError(
            f"diloco: the trainer's optimizer is a {type(optimizer).__name__}, expected one of torch.optim: choose one, "
            "without an engine around it"
        )
    return optimizer


class JoinedTrainer:
    """A trainer that is in a run while it trains. ``url`` and ``join`` are arguments of ``diloco.join``.

    ``keeps_state``: whether the trainer's checkpoints contain the learner's state (``run.state_dict()``), to continue from it.
    """

    def __init__(self, url: str, *, keeps_state: bool = True, **join: Any) -> None:
        self.url, self.join, self.keeps_state = url, {"data": "own"} | join, keeps_state
        self.run: Any = None  # while training goes on

    def begin(self, params: Any, optimizer: Any, state: Mapping[str, Any] | None = None, schedules: Iterable[Any] = ()) -> None:
        """Join the run.

        Args:
            params: a module, or its tensors by name.
            optimizer: the trainer's optimizer.
            state: the learner's state to continue from.
            schedules: the trainer's schedules. Those that called :meth:`learning_rate_factor` before the run was joined are
                updated, so that the first step has the run's rate.

        Raises:
            SettingsError: the state is of another run, learner or model.
        """
        if self.run is not None:  # some trainers say nothing when an exception ends their training
            self.end(RunError("the training before has ended by an exception"))
        joined = diloco.join(self.url, params=params, optimizer=inner_optimizer(optimizer), **self.join)
        self.run = joined.__enter__() if state is None else self._enter_from(joined, state)
        for schedule in schedules:
            self._renew_rates(schedule)

    def _enter_from(self, joined: Any, state: Mapping[str, Any]) -> Any:
        """Join the run as the learner of a state."""
        try:
            joined.load_state_dict(state)
            return joined.__enter__()
        except SettingsError as error:
            raise SettingsError(
                f"{error} (the trainer's checkpoint has this learner's state: with keeps_state=False the callback joins as new)"
            ) from error

    def end(self, error: BaseException | None = None) -> None:
        """Leave the run; after an error, at once."""
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    @property
    def over(self) -> bool:
        """Whether the run's budget is used up: take no further step."""
        return self.run is not None and bool(self.run.over)

    def learning_rate_factor(self, step: int = 0) -> float:
        """Return the factor of the learning rate by the run's schedule; ``step`` is ignored.

        A trainer applies it with ``LambdaLR(optimizer, callback.learning_rate_factor)``. Before the run is joined the factor
        is 0. The rate of the first step is set when the run is joined.
        """
        return 0.0 if self.run is None else float(self.run.learning_rate_factor)

    def _renew_rates(self, schedule: Any) -> None:
        """Set the rates that a schedule takes from :meth:`learning_rate_factor`, as they are now."""
        schedule = getattr(schedule, "scheduler", schedule)  # accelerate wraps it
        factors = getattr(schedule, "lr_lambdas", ())
        for factor, group, rate in zip(factors, schedule.optimizer.param_groups, schedule.base_lrs, strict=False):
            if factor == self.learning_rate_factor:
                group["lr"] = rate * self.learning_rate_factor()
