"""The state that is kept where a process of a learner is lost: as of its leader's last boundary, and no step before is lost.

A step of a learner that goes on with fewer processes is two programs. Until the first has ended at the leader, its devices have
the whole model as of its last boundary, since each process has whole replicas. So the leader writes the model and the accounts
as of then, and all who are left write the arrays of the fragments that they carry. Those that the lost process carried are gone
(:meth:`~diloco.core.learner.learner.Learner.restore`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from diloco.errors import IslandError
from diloco.process.observe import Logger
from diloco.processes.follower import ProcessSide
from diloco.settings.service import LearnerSettings, MeshSettings
from diloco.states import state
from diloco.states.state import Content, StateFilePart
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Kept

T = TypeVar("T")

OTHERS_S = 2.0  # in which the others notice what this process has, and begin again too


def keeps(settings: LearnerSettings, mesh: MeshSettings, size: int) -> bool:
    """Whether a generation of ``size`` processes keeps its state: fewer may go on, and each has whole replicas."""
    return settings.processes.elastic and size > 1 and mesh.data % size == 0


class Changing:
    """A ``with`` statement in which model and accounts go from one boundary to the next: in between they fit no other."""

    def __init__(self) -> None:
        self._lock, self._between = threading.Lock(), False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._between = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._between = kind is not None
        self._lock.release()

    def end(self, within_s: float) -> bool:
        """Have nothing change any more; return whether model and accounts are as of one boundary."""
        return self._lock.acquire(timeout=within_s) and not self._between


class Rescue:
    """A process's part in that (:class:`diloco.elastic.renewing.Rescues`)."""

    def __init__(self, model: Callable[[], Content], process: ProcessSide, settings: LearnerSettings, log: Logger) -> None:
        """``model`` gives the model as of the last boundary; a leader's is asked, in the thread that ends this process."""
        self.model, self.process, self.settings, self.log = model, process, settings, log
        self.changing = Changing()
        self._accounts: dict[str, Any] = {}

    def settle(self) -> Kept:
        """Let nothing change any more; return which state is kept.

        Raises:
            IslandError: there is none.
        """
        process = self.process
        if not self.changing.end(OTHERS_S):
            raise IslandError("the model stayed between two boundaries, so no state can be kept")

        async def keep() -> tuple[Kept, dict[str, Any]]:
            return process.keep()

        kept, self._accounts = self._run(keep())
        return kept

    def save(self, kept: Kept) -> None:
        """Write what this process has.

        Raises:
            DilocoError: it does not have it.
            OSError: the disk does not take it.
        """
        part, settings = self.process.part, self.settings

        async def arrays() -> dict[str, Any]:
            return part.arrays(kept.number)

        content = Content.of(self._run(arrays()))
        if self.process.leads:
            content = self.model() + content
        group = part.group
        path = StateFolder(settings.state_dir, settings.name).kept(group.place)
        which = StateFilePart(group.place, group.size, kept.name)
        saved = state.save(path, part.run.identity, settings.name, self._accounts, content, part=which)
        self.process.note_saved(saved.digest)
        self.log.info("state_kept", set=kept.name, steps=part.course.step, bytes=saved.size_bytes)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.process.part.loop).result(OTHERS_S)
