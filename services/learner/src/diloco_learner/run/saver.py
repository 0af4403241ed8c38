"""Writes an island's state as of boundaries to files, in a thread of its own, one after another.

The thread reads the state chunk by chunk (:mod:`diloco_learner.jax.holding`), hashes and writes it, and then the accounts'
arrays, which are not written to any more. So the host never holds more than a few chunks.

Where the devices have room for a copy of the state, the copy is queued between two steps, and training goes on meanwhile. Where
they have not, the next step waits until the thread has read the state from the devices: then a checkpoint takes no memory, and
steps are held up as long as the disk takes its bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from diloco.core.learner.learner import Dump
from diloco.process.observe import Logger
from diloco.states import state
from diloco.states.state import Content, Saved, StateFilePart
from diloco_learner.api.model import SavedModel


class Saver:
    """Saves states of an island for a learner of a run; its files are a part of ``index`` and ``count``."""

    def __init__(self, island: SavedModel, run: bytes, learner: str, log: Logger, index: int = 0, count: int = 1) -> None:
        self.island, self.run, self.learner, self.log = island, run, learner, log
        self.index, self.count = index, count
        self.job: Future[None] | None = None  # begun, and not found ended
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._complained = False
        self.failure = ""  # why the last state that could not be saved was not

    def is_busy(self) -> bool:
        """Whether a state is being saved; an error that none of ours foresees is raised here."""
        if self.job is not None and self.job.done():
            self.settle()
        return self.job is not None

    def settle(self) -> None:
        """Wait until what was begun has ended."""
        if self.job is not None:
            self.job.result()
            self.job = None

    def close(self) -> None:
        """Wait for what is being saved, and save nothing more."""
        self._worker.shutdown()

    def begin(self, work: Callable[[Content], None], *, optimizer_only: bool = False) -> None:
        """Have the thread ``work`` on the state as of now; wait for it only if it has to be read before the next step."""
        capture = self.island.capture(optimizer_only=optimizer_only)
        read = threading.Event()

        def values() -> Iterator[NDArray[Any]]:
            yield from capture.content.values
            read.set()

        def job() -> None:
            try:
                work(Content(capture.content.chunks, values()))
            finally:
                read.set()

        self.job = self._worker.submit(job)
        if capture.held:
            read.wait()

    def save(self, path: Path, name: str, dump: Dump, content: Content, previous: Path | None = None) -> Saved | None:
        """Write a checkpoint whose parts all have this ``name``; None if the disk does not take it."""
        (accounts, arrays), began_s = dump, time.monotonic()
        saved = self.write(path, name, accounts, content + Content.of(arrays), previous, failure="checkpoint_not_saved")
        if saved is not None:
            about = {"step": accounts["step"]} if "step" in accounts else {}  # a part that has no accounts knows none
            took_s = round(time.monotonic() - began_s, 3)
            self.log.debug("checkpoint_saved", file=path.name, set=name, bytes=saved.size_bytes, took_s=took_s, **about)
        return saved

    def write(
        self, path: Path, name: str, accounts: Mapping[str, Any], content: Content, previous: Path | None, *, failure: str
    ) -> Saved | None:
        """Write a file; None if the disk does not take it, which is no reason to end: the event ``failure`` says so once."""
        try:
            saved = state.save(
                path, self.run, self.learner, accounts, content, previous, StateFilePart(self.index, self.count, name)
            )
        except OSError as error:
            self.complain(failure, path, error)
            return None
        self._complained = False
        return saved

    def complain(self, event: str, path: Path, error: Exception) -> None:
        """Say once that something could not be saved."""
        self.failure = str(error)
        if not self._complained:
            self.log.warning(event, file=str(path), reason=str(error))
        self._complained = True
