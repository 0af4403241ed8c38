"""The tokens that a step's loss counts: known once the loss is computed, and waited for by the thread that books the step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.pytorch.task import TorchMeasured, TorchTask
from diloco_learner.task_api import checked_tokens

Wait = Callable[[], float]  # until the number is on the host


class StepTokens:
    """The tokens of the step on the batch ``at`` a share and an index in it."""

    def __init__(self, task: TorchTask, at: tuple[int, int]) -> None:
        self._task, self._at = task, at
        self._found = Future[Wait | None]()
        self._own: tuple[torch.Tensor, Any] | None = None  # this process's loss, and its share in the mean

    def note(self, counted: Wait | None, loss: torch.Tensor, share: Any) -> None:
        """Note how many there are, once that has been waited for; None: the task does not count them.

        ``loss`` is the mean over those of this process's rows, and has this ``share`` in the mean over processes.
        """
        self._own = loss.detach(), share
        self._found.set_result(counted)

    def fail(self, error: BaseException) -> None:
        """Note that the step has failed: who waits gets the error, if nothing was noted before."""
        if not self._found.done():
            self._found.set_exception(error)

    def wait(self) -> int | None:
        """Wait until they are known; None: the task does not count them. From any thread.

        Raises:
            SettingsError: they are above ``tokens_per_batch``, or no whole number.
        """
        counted = self._found.result()
        if counted is None:
            return None
        return checked_tokens(counted(), self._task.tokens_per_batch, self._at, members.place(self._task.loss))

    def check_uncounted(self) -> None:
        """Find out that a step was not in vain because of rows of this process in which its loss counts no token.

        Raises:
            SettingsError: these rows have no share in the mean over processes, and yet their loss is not finite.
        """
        if self._own is None or not self.wait():
            return
        loss, share = self._own
        if not float(share) and not bool(loss.isfinite()):
            raise SettingsError(
                "task: the loss of rows in which it counts no token is not finite, and a process of a learner may have such "
                f"rows: divide by at least one token, as in total / tokens.clamp(min=1){members.place(self._task.loss)}"
            )


def weighted(measured: TorchMeasured, share: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Return loss and metrics of some rows as they count in a mean over processes: times their ``share``.

    That is a number, or a tensor []. Metrics of rows that do not count may be no numbers.
    """
    if isinstance(share, float) and share == 1:
        return measured.loss, measured.metrics
    metrics = {name: value * float(share) if share else 0.0 for name, value in measured.metrics.items()}
    return measured.loss * share, metrics
