"""A device's queue of work: steps, reads and writes of a model run in order, in a separate thread.

PyTorch computes on a CPU within the call. So that a trainer can queue a boundary behind the step in flight and the next step
behind it, as devices with a queue of their own allow, calls are made by this thread. The trainer's waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Queue:
    """Work in order. An error of a piece of work is raised where its outcome is asked for, and by all work after it."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "torch")
        self._failed: BaseException | None = None

    def add(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue ``work(*arguments)``; return its outcome to be."""
        return self._worker.submit(self._do, work, *arguments)

    def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Queue ``work(*arguments)``, and wait for its outcome."""
        return self.add(work, *arguments).result()

    def ask(self, work: Callable[..., T], *arguments: Any) -> T:
        """Queue ``work(*arguments)``, which changes nothing, and wait for its outcome; an error of it is no other work's."""

        def outcome() -> T | Exception:
            try:
                return work(*arguments)
            except Exception as error:
                return error

        found = self.do(outcome)
        if isinstance(found, Exception):
            raise found
        return found

    def _do(self, work: Callable[..., T], *arguments: Any) -> T:
        if self._failed is not None:  # a version that was not written, for one: what follows would be of another model
            raise self._failed
        try:
            return work(*arguments)
        except BaseException as error:
            self._failed = error
            raise
