"""Threads in virtual time: real ones, of which one runs at a time, while the scheduler waits for it.

A thread runs until it sleeps or waits; then the scheduler goes on, and it again when its time has come. It is its process's: it
stands still while that is frozen, and ends with it. Modules under test are given :class:`Lock`, :class:`Event`,
:func:`sleep`, :func:`monotonic` and :func:`run_coroutine_threadsafe` in place of the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from diloco.testing.loop import ProcessLoop

LOOK_S = 0.005  # between two looks at what a thread waits for


class Killed(BaseException):
    """The thread's process is no more."""


class Thread:
    """A thread of the process with ``loop``, which begins at once. Errors that it ends by are the loop's."""

    current: Thread | None = None

    def __init__(self, loop: ProcessLoop, work: Callable[[], object]) -> None:
        self.loop, self._work = loop, work
        self._error: BaseException | None = None
        self._turn, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        loop.threads.append(self)
        threading.Thread(target=self._run, daemon=True).start()
        self._go_on()

    def end(self) -> None:
        """End it where it waits: its process is dead."""
        if not self.over and Thread.current is not self:
            self._go_on()

    def sleep(self, seconds: float) -> None:
        """Go on later. Called in the thread."""
        if self._is_killed:
            raise Killed
        self.loop.call_later(seconds, self._go_on)
        self._rest.release()
        self._turn.acquire()
        if self._is_killed:
            raise Killed

    @property
    def _is_killed(self) -> bool:
        return self.loop.dead

    def _go_on(self) -> None:
        before, Thread.current = Thread.current, self
        self._turn.release()
        self._rest.acquire()
        Thread.current = before
        if self._error is not None:
            self.loop.failed(self._error)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            with contextlib.suppress(Killed):
                self._work()
        except BaseException as error:
            self._error = error
        self.over = True
        self._rest.release()


def current() -> Thread:
    """Return the thread that runs now."""
    assert Thread.current is not None, "nothing may wait but a thread"
    return Thread.current


def sleep(seconds: float) -> None:
    """Sleep, in a thread."""
    current().sleep(seconds)


def monotonic() -> float:
    """Return the time, in a thread."""
    return current().loop.time()


def _await(reached: Callable[[], bool], timeout: float | None) -> bool:
    """Wait in a thread; return whether it was reached in time. Where it is, there is no wait, and it need not be one."""
    if reached():
        return True
    thread = current()
    over_s = None if timeout is None else thread.loop.time() + timeout
    while over_s is None or thread.loop.time() < over_s:
        thread.sleep(LOOK_S)
        if reached():
            return True
    return False


class Lock:
    """A lock that threads wait for."""

    def __init__(self) -> None:
        self._held = False

    def locked(self) -> bool:
        """Whether it is held."""
        return self._held

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, as :class:`threading.Lock` has it."""
        taken = _await(lambda: not self._held, timeout if timeout >= 0 else None) if blocking else not self._held
        self._held = self._held or taken
        return taken

    def release(self) -> None:
        """Give it back."""
        self._held = False


class Event:
    """An event that threads wait for."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Have it happen."""
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, as :class:`threading.Event` has it."""
        return _await(self.is_set, timeout)


class _Result:
    """The result of what runs in the loop, for a thread."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it.

        Raises:
            TimeoutError: it does not come in time.
        """
        if not _await(self._task.done, timeout):
            raise TimeoutError
        return self._task.result()


def run_coroutine_threadsafe(work: Coroutine[Any, Any, Any], loop: ProcessLoop) -> _Result:
    """Run work in a loop, as :func:`asyncio.run_coroutine_threadsafe` has it."""
    return _Result(loop.create_task(work))
