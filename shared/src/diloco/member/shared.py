"""A learner's state between two threads: a lock, news for the thread that waits, and the tasks of the loop thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from diloco.core.learner.learner import Learner
from diloco.process.tasks import Tasks


class SharedLearner:
    """``lock`` guards ``learner``; nothing slow is done under it. Construct it in the loop thread."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.lock = learner, threading.Condition(threading.Lock())
        self.failure: BaseException | None = None  # of a task, or what else ends this learner
        self.loop = asyncio.get_running_loop()
        self.leave_by_s: float | None = None  # when it ends whatever is unmerged; None: it was not asked to end
        self._unseen = False  # something happened since the last boundary
        self.tasks = Tasks(self._fail)  # of the loop thread

    def tell(self) -> None:
        """Wake the trainer if it waits for news; the lock is held."""
        self._unseen = True
        self.lock.notify_all()

    def begin_boundary(self) -> None:
        """Count news from here on; the lock is held.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        if self.failure is not None:
            raise self.failure
        self._unseen = False

    def wait_for_news(self, timeout_s: float) -> None:
        """Sleep until something happens that the last boundary has not seen, at most ``timeout_s``."""
        self.wait_until(lambda: self._unseen, timeout_s)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        """Sleep until ``reached``, which is asked at all news, at most ``timeout_s`` (None: however long it takes)."""
        with self.lock:
            self.lock.wait_for(reached, timeout_s)

    def leave(self, within_s: float) -> None:
        """Have the learner take no further step, and end within this time; the lock is held."""
        self.leave_by_s = self.loop.time() + within_s
        self.learner.leaving = True

    def fail(self, error: BaseException | None) -> None:
        """End the learner at its next boundary; the first error counts. The lock is held."""
        self.failure = self.failure or error
        self.tell()

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self.fail(error)
