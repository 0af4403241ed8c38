"""The processes of one learner, connected: how they meet and agree, who is lost, and how all of them end."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from diloco import __version__
from diloco.control.creation import KnownRun
from diloco.core.tensors.rows import LEADER
from diloco.errors import IslandError, SettingsError
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.processes.assembly import Assembly, WholeAssembly
from diloco.processes.links import Handle, Links
from diloco.processes.meeting import Meeting
from diloco.processes.proving import OPEN, secret_of
from diloco.settings.service import LearnerSettings, MeshSettings, host_and_port
from diloco.wire import process_messages as island
from diloco.wire.framing import Message
from diloco.wire.process_messages import (
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
if TYPE_CHECKING:
    from diloco.processes.follower import ProcessSide
    from diloco.states.state import Content

S = TypeVar("S", LeaderAnswer, LoanPeers, Candidate)


def common_facts(run: KnownRun) -> dict[str, Any]:
    """Return the facts that processes of every framework agree on when they meet: their software and the run."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"software": __version__, "python": python, "run": f"{run.name} {run.identity.hex()}"}


class Renews(Protocol):
    """The way of a group to begin again by itself where a process of it is lost (:class:`diloco.elastic.renewing.Renewing`)."""

    def hear(self, source: int, message: Again | Kept) -> None:
        """Take in that another process begins again, or which state the leader keeps. In the loop's thread."""

    def may_renew(self) -> bool:
        """Whether this process begins again where another one is lost. Callable from any thread."""

    def begin_again(self) -> NoReturn:
        """Begin again with those that are left, in the thread that ends this process."""

    def renew(self) -> NoReturn:
        """Begin again after :meth:`Group.farewell`, to meet those that wait."""

    def keeps(self, mesh: MeshSettings) -> bool:
        """Whether this generation, of this mesh, keeps its state where a process is lost."""

    def guard(
        self, its: ProcessSide, model: Callable[[], Content], mesh: MeshSettings, stopping: Callable[[], bool]
    ) -> AbstractContextManager[object]:
        """Begin again where a process is lost from here on, once a step was taken, and unless this one is ``stopping``.

        ``model`` gives what this process has of the model, as of the last boundary. The trainer enters the result while model
        and accounts go from one boundary to the next.
        """


class Group:
    """A process's place among those of its learner. Construct it in the loop's thread, then ``await meet()``.

    A process that is lost cannot be waited for: the others may be within a collective that never ends. So a thread of its own
    watches, and ends this process with the exit code of :class:`~diloco.errors.IslandError`, or has it begin again by itself
    where its ``renewal`` says so.

    ``index`` is this process's number among ``count``, for ever. In a generation of ``size`` processes it has a ``place``, by
    which the others call it, as JAX does; ``links.members`` has the indexes by place.
    """

    def __init__(
        self, settings: LearnerSettings, run: bytes, log: Logger, key: bytes = OPEN, assembly: Assembly | None = None
    ) -> None:
        """``key``: of the learner's identity, if it has one. ``assembly``: the rule by which they meet; None: all come."""
        own = settings.processes
        self._assembly = WholeAssembly(own.index, own.count) if assembly is None else assembly
        self._key, self._loop = key, asyncio.get_running_loop()
        self.settings, self.run, self.log = settings.processes, run, log
        self.name, self.index, self.count = settings.name, settings.processes.index, settings.processes.count
        self.place, self.size = 0, 1  # once they have met
        self._meeting: Meeting | None = None
        self.generation = 0
        self.coordinator: Address = ("", 0)  # of jax.distributed
        self.links = Links(run, log, self._take, self._lost)
        self.beats: dict[int, Ping] = {}  # by process: what it has moved, as it said last
        self.renewal: Renews | None = None  # of a learner that goes on with fewer processes
        self._handle: Handle | None = None
        self._early: list[tuple[int, Message, memoryview]] = []  # messages before there was anybody to handle them
        self._found: dict[str, dict[int, Facts]] = {}  # by stage and process, of a leader
        self._agreed: dict[str, str] = {}  # by stage: the leader's answer
        self._told: dict[str, LeaderAnswer | LoanPeers | Candidate] = {}  # by stage: what the leader said
        self._news = asyncio.Event()
        self._ending = threading.Event()
        self._failure: IslandError | None = None
        self._failed = threading.Event()
        self.ends = threading.Lock()  # of whichever thread ends this process

    async def meet(self, facts: Facts, generation: int) -> None:
        """Meet the other processes, and connect to all of them. ``generation`` is the number of one that this process leads.

        Raises:
            SettingsError: processes differ in ``facts`` or settings.
            IslandError: some do not come, or cannot be reached.
        """
        own = self.name, self.settings, self._assembly, self.run, self._key, facts, self.log
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
    def waiting(self) -> set[int]:
        """The processes that wait at the leader's address, by index."""
        return set() if self._meeting is None else self._meeting.waiting

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
            raise SettingsError(f"learner {self.name}: {reason}: make them equal")

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
            case Again() | Kept() if self.renewal is not None:
                self.renewal.hear(source, message)
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
                self._failure = IslandError(f"{self.links.name(silent)} is gone: it sent nothing {within}")
            elif self.missed:  # nothing of it counts any more, so it does not go on as if it did
                self._failure = IslandError(f"this process was suspended: the others did not hear it {within}")
            else:
                return True
        self.end(self._failure)
        return False

    def end(self, error: IslandError) -> None:
        """End this process at once, or have it begin again, wherever its threads are: they may wait for one that is gone."""
        self.ends.acquire()
        renewal = self.renewal if self.renewal is not None and self.renewal.may_renew() else None
        then = (
            "the others meet again" if renewal is not None else ("all processes of the learner end, and begin again together")
        )
        message = f"learner {self.name}, process {self.index}: {error}; {then}"
        try:
            self.log.error("island_ended", reason=str(error), generation=self.generation)
            if renewal is not None:
                observe.say("diloco-learner", message)
                renewal.begin_again()
            observe.say_end("diloco-learner", message, IslandError.exit_code)
        finally:
            os._exit(IslandError.exit_code)
