"""Processes of a learner that begin again by themselves where one of them is lost, to meet those that are left.

They tell one another, and wait until the leader knows who comes. Where each has a whole replica, the state as of the leader's
last boundary is kept meanwhile (:mod:`diloco.elastic.rescue`). A learner whose processes all end together has none of this.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol, TypeVar

from diloco.core.tensors.rows import LEADER
from diloco.elastic.rescue import OTHERS_S, Changing, Rescue, keeps
from diloco.errors import IslandError
from diloco.process import renewal
from diloco.processes.follower import ProcessSide
from diloco.processes.group import Group
from diloco.processes.links import BYE_LOOK_S
from diloco.settings.service import LearnerSettings, MeshSettings
from diloco.states.state import Content
from diloco.wire.process_messages import Again, Kept

KEEP_S = 60.0  # in which they write what they keep
NOTHING = Kept("", 0)

R = TypeVar("R")


class Rescues(Protocol):
    """Keeps a process's state where another process is lost. Its methods are called in the thread that ends this one."""

    def settle(self) -> Kept:
        """Let nothing change any more; return which state is kept. The leader's is asked."""

    def save(self, kept: Kept) -> None:
        """Write what this process has of the state."""


class Renewing:
    """A group's way to begin again (:class:`diloco.processes.group.Renews`). Construct it in the loop's thread."""

    def __init__(self, group: Group, settings: LearnerSettings) -> None:
        self.group, self.settings, self.log = group, settings, group.log
        self.links, self._loop = group.links, asyncio.get_running_loop()
        self.may: Callable[[], bool] = lambda: False
        self.rescue: Rescues | None = None
        self._again: set[int] = set()  # places of those that begin again because one is lost
        self._kept: Kept | None = None  # the leader's answer to them
        self._answered = threading.Event()

    def hear(self, source: int, message: Again | Kept) -> None:
        """Take in that another process begins again, or which state the leader keeps. In the loop's thread."""
        match message:
            case Again():
                self._again.add(source)
                if self.group.place == LEADER and self._kept is not None:
                    self.links.write(source, self._kept)
                self.links.fail(IslandError(f"{self.links.name(source)} begins again, because a process is gone"))
            case Kept() if source == LEADER:
                self._kept = message
                self._answered.set()

    def may_renew(self) -> bool:
        """Whether this process begins again where another one is lost."""
        return self.may()

    def keeps(self, mesh: MeshSettings) -> bool:
        """Whether this generation keeps its state: fewer processes may go on, and each has whole replicas."""
        return keeps(self.settings, mesh, self.group.size)

    def guard(
        self, its: ProcessSide, model: Callable[[], Content], mesh: MeshSettings, stopping: Callable[[], bool]
    ) -> Changing:
        """Begin again where a process is lost from here on, once a step was taken, and unless this one is ``stopping``."""
        rescue, part = Rescue(model, its, self.settings, self.log), its.part
        if self.keeps(mesh):
            self.rescue, part.remembers = rescue, True
        self.may = lambda: part.course.step > 0 and not stopping()
        return rescue.changing

    def renew(self) -> NoReturn:
        """Begin again as a fresh process: after :meth:`Group.farewell`, to meet those that wait."""
        self.group.ends.acquire()
        self._renew(self.links.others)

    def begin_again(self) -> NoReturn:
        """Begin again where a process is lost, with those that are left."""
        self._part_ways()
        self._renew(frozenset(self._again))

    def _part_ways(self) -> None:
        """Tell the others that a process is gone; wait until the leader knows who begins again, or, where it is lost, each."""
        self._loop.call_soon_threadsafe(self.links.write_others, Again(self.group.generation))
        rescue = None if self.group.missed else self.rescue  # the others may have a newer state
        if self.group.place == LEADER:
            kept = NOTHING if rescue is None else self._tried(rescue.settle, NOTHING)
            self._loop.call_soon_threadsafe(self._answer, kept)
        else:
            self._await(lambda: self._answered.is_set() or self._is_gone(LEADER), OTHERS_S)
            kept = self._kept or NOTHING
        if rescue is not None and kept.name:
            self._tried(lambda: rescue.save(kept), None)
        if self.group.place == LEADER or self._is_gone(LEADER):
            self._await(lambda: all(place in self._again or self._is_gone(place) for place in self.links.others), OTHERS_S)

    def _tried(self, work: Callable[[], R], otherwise: R) -> R:
        """Return what ``work`` gives; a state that cannot be kept is no reason not to begin again."""
        try:
            return work()
        except Exception as error:
            self.log.warning("state_not_kept", reason=f"{type(error).__name__}: {error}")
            return otherwise

    def _answer(self, kept: Kept) -> None:
        self._kept = kept
        for place in self._again:
            self.links.write(place, kept)

    def _is_gone(self, place: int) -> bool:
        return self.links.has_ended(place, self.group.settings.silent_s)

    def _renew(self, others: Collection[int]) -> NoReturn:
        """Begin again with others; the leader last, since JAX ends a process at once whose coordination service is gone."""
        if self.group.place == LEADER:
            self._await(lambda: all(self._is_gone(place) for place in others), OTHERS_S if self.rescue is None else KEEP_S)
        elif not self._is_gone(LEADER):
            renewal.renew()  # the leader knows who comes
        renewal.renew({self.group.index, *self.group.waiting, *(self.links.members[place] for place in others)})

    def _await(self, reached: Callable[[], bool], most_s: float) -> None:
        over_s = time.monotonic() + most_s
        while not reached() and time.monotonic() < over_s:
            time.sleep(BYE_LOOK_S)
