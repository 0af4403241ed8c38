"""A learner's time: steps in flight, what this system keeps from steps, and what waits for the task's batches.

The times between the ends of two steps are dealt out, each once, so that the three never exceed the time that passed:

* **busy**: a step is in flight, from the call that dispatches it to its end. A device takes one step at a time: a step that
  was queued behind another one begins at that one's end.
* **data**: none is in flight, and the trainer makes the batch of the next one.
* **blocked**: none is in flight for any other reason.

A step counts from the call and not from its return. Some programs run inside the call; and where cores are few, the thread
that called is often not scheduled again before the step has ended. The dispatch itself is therefore busy time, also where
nothing hides it (0.7 ms for 21 tensors): when the device begins is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of each kind."""

    busy_s: float = 0.0
    blocked_s: float = 0.0
    data_s: float = 0.0


@dataclass(frozen=True)
class MeteredSpan:
    """From one time to another, seconds of one clock."""

    began_s: float
    ended_s: float

    def within(self, other: MeteredSpan) -> float:
        """Return how long it is within another one."""
        return max(0.0, min(self.ended_s, other.ended_s) - max(self.began_s, other.began_s))


class Meter:
    """Deals out the trainer's time, step by step. Times before the first step, and after :meth:`pause`, are not counted."""

    def __init__(self) -> None:
        self._times = Times()
        self._ended_s: float | None = None  # when the newest step that was accounted for ended

    def began_s(self, called_s: float) -> float:
        """Return when the device could begin with the step after the newest, dispatched by a call at ``called_s``."""
        return called_s if self._ended_s is None else max(called_s, self._ended_s)

    def add(self, called_s: float, ended_s: float, batch: MeteredSpan) -> float:
        """Account for the next step, from its call to its end; its batch was made in the time ``batch``.

        Return how long it took, in seconds.
        """
        began_s = self.began_s(called_s)
        gap = MeteredSpan(began_s if self._ended_s is None else self._ended_s, began_s)
        data_s = batch.within(gap)
        self._times = Times(
            self._times.busy_s + ended_s - began_s,
            self._times.blocked_s + gap.ended_s - gap.began_s - data_s,
            self._times.data_s + data_s,
        )
        self._ended_s = ended_s
        return ended_s - began_s

    def pause(self) -> None:
        """Leave out the time until the next step."""
        self._ended_s = None

    def take(self) -> Times:
        """Return the times since the last call."""
        times, self._times = self._times, Times()
        return times
