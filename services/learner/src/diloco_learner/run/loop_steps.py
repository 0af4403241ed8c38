"""The steps of a user's own loop as they are booked: the batch that each was on, the time that it took, and its loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from diloco.core.learner.accounts import StepDone
from diloco.errors import SettingsError
from diloco_learner.data.feed import Batch
from diloco_learner.run.loop_arguments import check_loss, tokens_of

Number: TypeAlias = Callable[[], float]  # waits for it


class LoopSteps:
    """Makes of each call of ``run.step`` what is booked. A loss on its way from a device is waited for a step later."""

    def __init__(self, tokens: int, *, dealt: bool) -> None:
        """Begin; ``tokens``: the most that a step has. ``dealt``: whether the run deals the data."""
        self.tokens, self.dealt = tokens, dealt
        self.taken = 0
        self._noted: Any = None  # the loss of the next step that an optimizer takes
        self._open = deque[Batch]()  # batches whose steps are not booked, in the order in which they were given
        self._loss: Number | None = None
        self._sample: Number | None = None  # of the parameters' values, after a step without a loss
        self._returned_s, self._blocked_s = 0.0, 0.0

    def open(self, feed: Iterator[Batch], most: int) -> Any:
        """Return the data of the next batch, of which at most so many may wait for their steps.

        Raises:
            SettingsError: no step was booked for the last ones.
        """
        if len(self._open) >= most:
            raise SettingsError("batches: no step was booked for the last batch: call run.step once for each batch")
        self._open.append(next(feed))
        return self._open[-1].data

    def check(self, loss: Any, tokens: int | None) -> int:
        """Return the tokens of a step of which the loop says so much.

        Raises:
            SettingsError: the loss is no single number, the tokens cannot be those of a step, or no batch is open.
        """
        check_loss(loss)
        if self.dealt and not self._open:
            raise SettingsError(
                "step: no batch is open: call run.step once for each batch of run.batches; a loop with its own loader "
                'joins with data="own"'
            )
        return tokens_of(tokens, self.tokens)

    def end(self, called_s: float, tokens: int) -> StepDone:
        """Return the step that has ended when the loop called ``run.step``, with what is known of the steps before."""
        batch = self._open.popleft() if self._open else None
        done = StepDone(
            tokens=tokens,
            share=None if batch is None else batch.share,
            batch=self.taken if batch is None else batch.index,
            loss=None if self._loss is None else self._loss(),
            busy_s=called_s - self._returned_s,
            blocked_s=self._blocked_s,
            finite=None if self._sample is None else math.isfinite(self._sample()),
            most=self.tokens,
        )
        self.taken += 1
        return done

    def keep(self, loss: Number | None, sample: Number | None) -> None:
        """Keep the step's loss, or a ``sample`` of the values that it led to, until the next one has ended."""
        self._loss, self._sample = loss, sample

    def go_on(self, called_s: float, now_s: float) -> None:
        """Note when the loop goes on after a call of ``run.step``."""
        self._returned_s, self._blocked_s = now_s, now_s - called_s

    def note_loss(self, loss: Any) -> None:
        """Keep the loss of the next step that an optimizer takes.

        Raises:
            SettingsError: it is no single number.
        """
        check_loss(loss)
        self._noted = loss

    def take_noted(self) -> Any:
        """Return the loss that was noted since the last call; None: there was none."""
        noted, self._noted = self._noted, None
        return noted
