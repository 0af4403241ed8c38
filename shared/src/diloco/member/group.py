"""The processes of one learner, connected: how they meet and agree, who is lost, and how all of them end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Protocol, TypeVar

from diloco.core.roll import LEADER
from diloco.errors import IslandError, SettingsError
from diloco.member.links import BYE_LOOK_S, Handle, Links
from diloco.member.meeting import Meeting
from diloco.member.proving import OPEN, secret_of
from diloco.process import observe, renewal
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings, host_and_port
from diloco.wire import island
from diloco.wire.framing import Message
from diloco.wire.island import (
    Address,
    Again,
    Agree,
    Agreed,
    Candidate,
    Facts,
    Kept,
    LeaderAnswer,
    LoanPeers,
    Ping,
    difference,
)

WATCH_S = 0.25  # small beside the least `processes.silent_s`
OTHERS_S = 2.0  # in which the others notice what this process has, and begin again too
KEEP_S = 60.0  # in which they write what they keep
NOTHING = Kept("", 0)

R = TypeVar("R")
S = TypeVar("S", LeaderAnswer, LoanPeers, Candidate)


class Rescue(Protocol):
    """Keeps a process's state where another process is lost. Its methods are called in the thread that ends this one."""

    def settle(self) -> Kept:
        """Let nothing change any more; return which state is kept. The leader's is asked."""

    def save(self, kept: Kept) -> None:
        """Write what this process has of the state."""


class Group:
    """A process's place among those of its learner. Construct it in the loop's thread, then ``await meet()``.

    A process that is lost cannot be waited for: the others may be within a collective that never ends. So a thread of its own
    watches, and ends this process with the exit code of :class:`~diloco.errors.IslandError`, or where ``may_renew`` says so has
    it begin again by itself (:meth:`renew`).

    ``index`` is this process's number among ``count``, for ever. In a generation of ``size`` processes it has a ``place``, by
    which the others call it, as JAX does; ``links.members`` has the indexes by place.
    """

    def __init__(
        self, settings: LearnerSettings, run: bytes, log: Logger, key: bytes = OPEN, expected: frozenset[int] = frozenset()
    ) -> None:
        """``key``: of the learner's identity, if it has one. ``expected``: processes that are known to come."""
        self._key, self._expected, self._loop = key, expected, asyncio.get_running_loop()
        self.settings, self.run, self.log = settings.processes, run, log
        self.name, self.index, self.count = settings.name, settings.processes.index, settings.processes.count
        self.place, self.size = 0, 1  # once they have met
        self._sizes = settings.processes.sizes(settings.mesh)
        self._meeting: Meeting | None = None
        self.generation = 0
        self.coordinator: Address = ("", 0)  # of jax.distributed
        self.links = Links(run, log, self._take, self._lost)
        self.beats: dict[int, Ping] = {}  # by process: what it has moved, as it said last
        self.may_renew: Callable[[], bool] = lambda: False
        self.rescue: Rescue | None = None
        self._again: set[int] = set()  # places of those that begin again because one is lost
        self._kept: Kept | None = None  # the leader's answer to them
        self._answered = threading.Event()
        self._handle: Handle | None = None
        self._early: list[tuple[int, Message, memoryview]] = []  # messages before there was anybody to handle them
        self._found: dict[str, dict[int, Facts]] = {}  # by stage and process, of a leader
        self._agreed: dict[str, str] = {}  # by stage: the leader's answer
        self._told: dict[str, LeaderAnswer | LoanPeers | Candidate] = {}  # by stage: what the leader said
        self._news = asyncio.Event()
        self._ending = threading.Event()
        self._failure: IslandError | None = None
        self._failed = threading.Event()
        self._end = threading.Lock()  # of whichever thread ends this process

    async def meet(self, facts: Facts, generation: int) -> None:
        """Meet the other processes, and connect to all of them. ``generation`` is the number of one that this process leads.

        Raises:
            SettingsError: processes differ in ``facts`` or settings.
            IslandError: some do not come, or cannot be reached.
        """
        own = self.name, self.settings, self._sizes, self.run, self._key, facts, self.log, self._expected
        meeting = self._meeting = Meeting(*own)
        address = self.settings.own_address
        await meeting.listen()
        port = await self.links.listen(None if address is None else host_and_port(address)[0])
        welcome = await meeting.meet(port, generation, os.urandom(32))
        self.generation, self.coordinator, members = welcome.generation, welcome.coordinator, welcome.members
        self.place, self.size = members.index(self.index), len(members)
        secret, within_s = secret_of(self._key, welcome.secret), self.settings.start_s
        await self.links.connect(self.place, members, welcome.addresses, welcome.generation, secret, within_s)
        self._begin_to_watch()
        self.log.info("processes_met", processes=self.size, index=self.index, members=members, generation=self.generation)

    @property
    def grows(self) -> bool:
        """Whether the leader may begin a larger generation: with processes that wait at its address."""
        return self._meeting is not None and self._meeting.grows

    @property
    def missed(self) -> bool:
        """Whether this process stood still for so long that the others have gone on without it. Callable from any thread."""
        return self.links.longest_pause_s > self.settings.silent_s

    async def agree(self, stage: str, values: dict[str, Any]) -> None:
        """Make sure that all processes have found the same values.

        Raises:
            SettingsError: they have not: process, name and both values are in the message.
        """
        reason = await self.difference(stage, values)
        if reason:
            raise SettingsError(f"learner {self.name}: {reason}: they have to be the same")

    async def difference(self, stage: str, values: dict[str, Any]) -> str:
        """Return how the values differ that the processes have found; empty if they do not. All return the same."""
        facts = island.facts(values)
        if self.place == LEADER:
            found = self._found.setdefault(stage, {})
            while len(found) < self.size - 1:
                await self._next()
            own = self.links.name(LEADER)
            differing = ((self.links.name(place), difference(facts, other, own)) for place, other in sorted(found.items()))
            said = (f"{process} differs from {own} in {differs}" for process, differs in differing if differs)
            self._agreed[stage] = next(said, "")
            for process in self.links.others:
                self.links.write(process, Agreed(stage, self._agreed[stage]))
        else:
            self.links.write(LEADER, Agree(stage, facts))
            while stage not in self._agreed:
                await self._next()
        return self._agreed[stage]

    async def hear_leader(self, kind: type[S], stage: str, said: S | None) -> S:
        """Return what the leader says at a stage; it alone gives it."""
        if said is not None:
            for process in self.links.others:
                self.links.write(process, said)
            return said
        while stage not in self._told:
            await self._next()
        heard = self._told[stage]
        if not isinstance(heard, kind):
            raise IslandError(f"{self.links.name(LEADER)} says {heard.kind!r} at {stage!r}, expected {kind.kind!r}")
        return heard

    async def hear_answer(self, stage: str, yes: bool | None) -> bool:
        """Return the leader's yes or no at a stage; it alone gives it."""
        return (await self.hear_leader(LeaderAnswer, stage, None if yes is None else LeaderAnswer(stage, yes))).yes

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    def handle(self, handle: Handle) -> None:
        """Have all further messages handled, and those that came before."""
        self._handle = handle
        early, self._early = self._early, []
        for source, message, content in early:
            handle(source, message, content)

    def _take(self, source: int, message: Message, content: memoryview) -> None:
        match message:
            case Ping():
                self.beats[source] = message
            case island.Bye():
                pass
            case Again():
                self._again.add(source)
                if self.place == LEADER and self._kept is not None:
                    self.links.write(source, self._kept)
                self.links.fail(IslandError(f"{self.links.name(source)} begins again, since one is gone"))
            case Kept() if source == LEADER:
                self._kept = message
                self._answered.set()
            case Agree() if self.place == LEADER:
                self._found.setdefault(message.stage, {})[source] = message.facts
                self._news.set()
            case LeaderAnswer() | LoanPeers() | Candidate() if source == LEADER:
                self._told[message.stage] = message
                self._news.set()
            case Agreed() if source == LEADER:
                self._agreed[message.stage] = message.reason
                self._news.set()
            case _ if self._handle is None:
                self._early.append((source, message, memoryview(bytes(content))))
            case _:
                self._handle(source, message, content)

    # ---- the end

    def ending(self) -> None:
        """Note that the learner ends as decided: no process is missed from here on."""
        self._ending.set()

    async def farewell(self) -> None:
        """Take leave: want nothing more of the others, and answer them until they take leave too."""
        self.ending()
        await self.links.farewell(self.settings.silent_s)

    async def close(self) -> None:
        """Close all connections."""
        if self._meeting is not None:
            await self._meeting.close()
        await self.links.close()

    def _lost(self, error: IslandError) -> None:
        self._failure = error
        self._failed.set()

    def _begin_to_watch(self) -> None:
        threading.Thread(target=self._watch, name="island-watch", daemon=True).start()

    def _watch(self) -> None:
        while self.look():
            self._failed.wait(WATCH_S)

    def look(self) -> bool:
        """End this process if another one is gone, or it is for the others; return whether there is reason to look again."""
        if self._ending.is_set():
            return False
        if self._failure is None:
            silent, within = self.links.silent(self.settings.silent_s), f"for {self.settings.silent_s:g} s (processes.silent_s)"
            if silent is not None:
                self._failure = IslandError(f"{self.links.name(silent)} is gone: it was not heard {within}")
            elif self.missed:  # nothing of it counts any more, so it does not go on as if it did
                self._failure = IslandError(f"the others did not hear this process {within}: it stood still")
            else:
                return True
        self.end(self._failure)
        return False

    def end(self, error: IslandError) -> None:
        """End this process at once, or have it begin again, wherever its threads are: they may wait for one that is gone."""
        self._end.acquire()
        renews = self.may_renew()
        then = "the others meet again" if renews else "all its processes end, and begin again together"
        message = f"learner {self.name}, process {self.index}: {error}; {then}"
        try:
            self.log.error("island_ended", reason=str(error), generation=self.generation)
            if renews:
                observe.say("diloco-learner", message)
                self._part_ways()
                self._renew(frozenset(self._again))
            observe.say_end("diloco-learner", message, IslandError.exit_code)
        finally:
            os._exit(IslandError.exit_code)

    def renew(self) -> NoReturn:
        """Begin again as a fresh process: after :meth:`farewell`, to meet those that wait."""
        self._end.acquire()
        self._renew(self.links.others)

    def _part_ways(self) -> None:
        """Tell the others that a process is gone; wait until the leader knows who begins again, or, where it is lost, each."""
        self._loop.call_soon_threadsafe(self.links.write_others, Again(self.generation))
        rescue = None if self.missed else self.rescue  # the others may have a newer state
        if self.place == LEADER:
            kept = NOTHING if rescue is None else self._tried(rescue.settle, NOTHING)
            self._loop.call_soon_threadsafe(self._answer, kept)
        else:
            self._await(lambda: self._answered.is_set() or self._is_gone(LEADER), OTHERS_S)
            kept = self._kept or NOTHING
        if rescue is not None and kept.name:
            self._tried(lambda: rescue.save(kept), None)
        if self.place == LEADER or self._is_gone(LEADER):
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
        return self.links.has_ended(place, self.settings.silent_s)

    def _renew(self, others: Collection[int]) -> NoReturn:
        """Begin again with others; the leader last, since JAX ends a process at once whose coordination service is gone."""
        if self.place == LEADER:
            self._await(lambda: all(self._is_gone(place) for place in others), OTHERS_S if self.rescue is None else KEEP_S)
        elif not self._is_gone(LEADER):
            renewal.renew()  # the leader knows who comes
        waiting = set() if self._meeting is None else self._meeting.waiting
        renewal.renew({self.index, *waiting, *(self.links.members[place] for place in others)})

    def _await(self, reached: Callable[[], bool], most_s: float) -> None:
        over_s = time.monotonic() + most_s
        while not reached() and time.monotonic() < over_s:
            time.sleep(BYE_LOOK_S)
