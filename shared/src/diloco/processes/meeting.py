"""The processes of one learner meet: one of them makes sure that they are there, and alike, before any of them computes.

Each that has one of ``processes.address`` listens there, and tries all others. The learner's rule
(:mod:`diloco.processes.assembly`) says which of them has the others come, and leads, and when those that have come begin. Where
fewer than all may begin, the leader listens on, and those that come later wait.

Each that comes says who it is, where it can be reached, and what has to be the same everywhere. The answer is a secret, by
which processes know each other from then on, and all addresses. Before, both ends prove that they have the key of the learner's
identity (:mod:`diloco.processes.proving`). In a run without identities, whatever reaches this address is taken for a process of
the learner. The collectives between processes have neither passwords nor encryption in either case: they need a network of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from diloco.errors import FormatError, HashError, IslandError, MessageError, SettingsError
from diloco.process.observe import Counted, Logger
from diloco.process.tasks import end
from diloco.processes.assembly import Assembly
from diloco.processes.proving import Door, prove
from diloco.processes.stream import Stream
from diloco.settings.service import ProcessesSettings, host_and_port
from diloco.wire.framing import Message
from diloco.wire.process_messages import Address, Arrival, Facts, Ping, Refused, Standing, Welcome, difference

RETRY_S = 0.2  # until a process listens at an address
REACH_S = 5.0  # to connect: a host that is gone says nothing
MAX_CONNECTIONS = 2048  # twice the processes that there may be
STANDING_S = 0.5  # between two words on what a process does; several within the least `processes.silent_s`
SIGNS = 3  # of a process that has come, after which it is there: some may have been under way when it ended
SIGN_APART_S = STANDING_S / 2  # signs that a network held back come at once, and count as one
SIGNS_S = 3.0  # within so long they come, also from a busy host
LOOK_S = 0.1  # between two looks for them
WORDS: Mapping[str, type[Message]] = {kind.kind: kind for kind in (Standing, Welcome, Refused)}  # of one that listens


@dataclass
class _Heard:
    """A process that listens, as it is heard."""

    stream: Stream
    standing: Standing


@dataclass
class _Arrived:
    arrival: Arrival
    stream: Stream
    signs: int = 0  # of life, since it has come
    signed_s: float = -math.inf  # when the last one came
    gone: bool = False

    def note_sign(self, now_s: float) -> None:
        """Take in a sign of life."""
        if now_s - self.signed_s >= SIGN_APART_S:
            self.signs, self.signed_s = self.signs + 1, now_s

    async def is_there(self) -> bool:
        """Return whether the process is there yet, and not lost with its host."""
        enough, clock = self.signs + SIGNS, asyncio.get_running_loop().time
        over_s = clock() + SIGNS_S
        while not self.gone and self.signs < enough and clock() < over_s:
            await asyncio.sleep(LOOK_S)
        return not self.gone and self.signs >= enough


class Meeting:
    """A process at the meeting, with the ``facts`` that have to be the same everywhere. Construct it in the loop's thread.

    ``assembly`` is the rule, and ``key`` that of the identity.
    """

    def __init__(
        self,
        learner: str,
        processes: ProcessesSettings,
        assembly: Assembly,
        run: bytes,
        key: bytes,
        facts: Facts,
        log: Logger,
    ) -> None:
        self.learner, self.processes, self.assembly, self.run, self.facts = learner, processes, assembly, run, facts
        self.log = log
        self.index = processes.index
        self._key, self._door, self._refused = key, Door(key), Counted(log, "connection_refused")
        self.grows = False  # a leader: whether with those that wait a generation would be larger than the one that goes on
        self._at = None if processes.own_address is None else self.index  # the process where this one is, be it itself
        self._heard: dict[int, _Heard] = {}  # the others, by index
        self._problems: dict[int, str] = {}  # by index: why nothing that it says is heard
        self._answer: tuple[int, Message] | None = None  # what a process where this one has come says to that
        self._arrived: dict[int, _Arrived] = {}
        self.assembly.begin(asyncio.get_running_loop().time())
        self._welcome: Welcome | None = None  # a leader's, of the generation that goes on
        self._changed = asyncio.Event()
        self._failure: SettingsError | IslandError | None = None
        self._server: asyncio.Server | None = None
        self._connections = set[asyncio.Task[None]]()

    async def listen(self) -> None:
        """Have the others come, if this process has an address.

        Raises:
            SettingsError: it cannot be listened at.
        """
        address = self.processes.own_address
        if address is None:
            return
        try:
            make = partial(Stream, self.run, self._connected)
            self._server = await asyncio.get_running_loop().create_server(make, *host_and_port(address), reuse_address=True)
        except OSError as error:
            raise SettingsError(
                f"processes.address = {address}: process {self.index} of {self.learner} cannot listen there: "
                f"{error.strerror}: set an address of the host that process {self.index} runs on, and a free port"
            ) from None

    async def meet(self, port: int, generation: int, secret: bytes) -> Welcome:
        """Return the welcome to a generation, once the processes for it have come to one of them.

        ``port``: where the own links are reached. ``generation`` and ``secret`` are those of the generation if this process
        leads it.

        Raises:
            SettingsError: one of them differs.
            IslandError: too few come in time, or no process that leads can be reached.
        """
        others = [index for index in range(len(self.processes.addresses)) if index != self.index]
        hearing = [asyncio.create_task(self._hear(index)) for index in others]
        try:
            welcome = await self._until_welcome(port, generation, secret)
        except BaseException:
            await self.close()
            raise
        finally:
            await end(*hearing)
        if self._welcome is None or not self.assembly.goes_on:
            await self.close()
        return welcome

    async def _until_welcome(self, port: int, generation: int, secret: bytes) -> Welcome:
        clock = asyncio.get_running_loop().time
        over_s = clock() + self.processes.start_s
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if self._answer is not None:
                return self._answered(*self._answer)
            self._turn(port)
            now_s, begins_s = clock(), None
            if self._at == self.index:
                begins_s = self.assembly.begins_s(now_s)
                if begins_s == 0.0 or (begins_s is not None and now_s >= over_s):
                    return await self._lead(port, generation, secret)
            elif self._at is not None and self._heard[self._at].standing.generation is not None:
                over_s = now_s + self.processes.start_s  # as long as it goes on, and says so
            if now_s >= over_s:
                raise IslandError(self._missing())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(over_s - now_s if begins_s is None else min(begins_s, over_s - now_s)):
                    await self._changed.wait()

    def _turn(self, port: int) -> None:
        """Go to the process where this one has to be now, if it is not there."""
        at = self._at
        to = self.assembly.where(at, {index: heard.standing for index, heard in self._heard.items()})
        if to == at:
            return
        self._at = to
        if at == self.index:
            for arrived in self._arrived.values():
                arrived.stream.abort()  # they find the other one, too
        elif at in self._heard:
            self._heard[at].stream.abort()  # or it would count on this one
        if to == self.index:
            self.assembly.begin(asyncio.get_running_loop().time())
        elif to is not None:
            heard = self._heard[to]
            heard.stream.write(Arrival(self.index, self.processes.count, self._reached_at(heard.stream, port), self.facts))
            if heard.standing.generation is not None:
                self.assembly.wait_for_next()
                self.log.info("waiting_for_generation", generation=heard.standing.generation, leader=to)

    def _reached_at(self, stream: Stream, port: int) -> Address:
        """Return where the own links listen: at the own address, or else wherever this host has one towards another process."""
        own = self.processes.own_address
        return (stream.here if own is None else host_and_port(own)[0]), port

    def _missing(self) -> str:
        """Return who has not come in time."""
        within, learner = f"{self.processes.start_s:g} s", f"learner {self.learner}"
        if self._at == self.index:
            missing = [index for index in range(self.processes.count) if index not in self.assembly.present]
            place, note = self.processes.own_address, self.assembly.least_note
            return (
                f"{learner}: {_listed(missing)} of {self.processes.count} did not connect to {place} within "
                f"{within}{note}: read their logs, and check that they can reach that address"
            )
        if self._at is None:
            what = f"{_listed(list(range(len(self.processes.addresses))))} at processes.address = {self.processes.address}"
            what += (
                f" cannot be reached, for more than {within}{''.join(f' ({problem})' for problem in self._problems.values())}"
            )
        else:
            address = self.processes.addresses[self._at]
            what = f"process {self._at} at processes.address = {address} has waited for other processes for more than {within}"
        todo = f"start all {self.processes.count} processes, with an address that each of them can reach"
        return f"{learner}, process {self.index}: {what}: {todo}"

    # ---- a process that others come to

    async def _lead(self, port: int, generation: int, secret: bytes) -> Welcome:
        """Welcome the processes that have come to make a generation."""
        own = self.processes.own_address
        assert own is not None, "no process connects to one without an address"
        host, _ = host_and_port(own)
        chosen = self.assembly.members
        addresses = [(host, port), *(self._arrived[index].arrival.address for index in chosen[1:])]
        welcome = Welcome(generation, secret, (host, free_port(host)), chosen, addresses)
        self._welcome = welcome
        try:
            for index in chosen[1:]:
                await self._arrived[index].stream.send(welcome)
        except (OSError, LookupError) as error:
            raise IslandError(f"learner {self.learner}: a process was lost while all were connecting: {error}") from None
        self._look()
        return welcome

    @property
    def waiting(self) -> set[int]:
        """The processes that have come, of a leader whose generation goes on without them."""
        return set(self._arrived)

    async def close(self) -> None:
        """Listen no more; all that wait here notice."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, stream: Stream) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            stream.abort()
            return
        task = asyncio.get_running_loop().create_task(self._admit(stream))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _admit(self, stream: Stream) -> None:
        try:
            try:
                await self._door.admit(stream)
            except (OSError, EOFError, MessageError) as error:
                self._refused.note(stream.peer, "meeting", reason=f"{type(error).__name__}: {error}")
                return
            telling = asyncio.create_task(self._tell(stream))
            try:
                with contextlib.suppress(OSError, EOFError, MessageError):  # not a process of ours, or gone again
                    await self._take_in(await stream.receive_one(Arrival), stream)
            finally:
                telling.cancel()
        finally:
            stream.abort()
            self._changed.set()

    async def _tell(self, stream: Stream) -> None:
        """Say again and again what this process does."""
        while True:
            assert self._at is not None, "one that listens has others come, if it has not gone to another one"
            stream.write(Standing(self._at, None if self._welcome is None else self._welcome.generation))
            await asyncio.sleep(STANDING_S)

    async def _take_in(self, arrival: Arrival, stream: Stream) -> None:
        index, before = arrival.index, self._arrived.get(arrival.index)
        there = before is not None and await before.is_there()
        if self._at != self.index:
            return  # it has just gone to another one, where those who came here go, too
        reason = self._fault(arrival)
        if there:
            reason = reason or f"processes.index = {index} is already in use: give each process of a learner its own index"
        elif before is not None:
            self._go(before)
        if reason is not None:
            await stream.send(Refused(reason))
            if self.assembly.goes_on:
                self.log.warning("process_refused", process=index, reason=reason)
            elif index not in self._arrived:
                self._failure = SettingsError(f"learner {self.learner}: {reason}")
            return
        if self._welcome is not None and index in self._welcome.members:
            await stream.until_closed()  # the one of before is gone, and soon missed: then all meet
            return
        arrived = self._arrived[index] = _Arrived(arrival, stream)
        self.assembly.come(index, asyncio.get_running_loop().time())
        self.log.info("process_arrived", process=index)
        self._look()
        try:
            while await stream.heard():
                arrived.note_sign(asyncio.get_running_loop().time())
        finally:  # it has been welcomed, or begins again
            self._go(arrived)

    def _go(self, arrived: _Arrived) -> None:
        """Take in that a process has gone."""
        index, arrived.gone = arrived.arrival.index, True
        arrived.stream.abort()
        if self._arrived.get(index) is arrived:
            del self._arrived[index]
            if self._welcome is None:
                self.assembly.go(index)
            self._look()

    def _look(self) -> None:
        """Take in that a process has come or gone."""
        self._changed.set()
        if self._welcome is not None:
            self.grows = self.assembly.grows(self._welcome.members, self._arrived)

    def _fault(self, arrival: Arrival) -> str | None:
        """Return why a process cannot take part."""
        count, index, own = self.processes.count, arrival.index, f"process {self.index}"
        if arrival.count != count:
            return f"process {index} has processes.count = {arrival.count}, {own} has {count}: set the same count for all"
        if index >= count or index == self.index:
            expected = f"0 to {count - 1} except {self.index}"
            return f"a process has processes.index = {index}, expected {expected}: give each process its own index"
        differs = difference(self.facts, arrival.facts, own)
        if differs is not None:
            return f"process {index} differs from {own} in {differs}: make them equal"
        return None

    # ---- the others that listen

    async def _hear(self, index: int) -> None:
        """Hear another process that listens, whenever it is there."""
        address, alone = self.processes.addresses[index], len(self.processes.addresses) == 1
        while True:
            try:
                await self._reach(index, address)
            except (OSError, EOFError):  # it is not there, or begins again; a time-out is the former
                pass
            except HashError:
                problem = (
                    f"process {index} at processes.address = {address} does not have the key of this process's identity: "
                    "give all processes of a learner one identity file, as it was made last (diloco keys)"
                )
                self._note(index, problem, SettingsError if alone else None)
            except MessageError as error:
                self._note(
                    index,
                    f"the program at {address} is not process {index} of this learner: {error}",
                    IslandError if alone else None,
                )
            await asyncio.sleep(RETRY_S)

    def _note(self, index: int, problem: str, failure: type[SettingsError | IslandError] | None) -> None:
        """Note why another process cannot be heard: where it is the only one that could lead, this one ends."""
        if failure is not None:
            self._failure = failure(f"learner {self.learner}, process {self.index}: {problem}")
            self._changed.set()
        elif self._problems.get(index) != problem:
            self._problems[index] = problem
            self.log.warning("process_not_heard", process=index, reason=problem)

    async def _reach(self, index: int, address: str) -> None:
        """Hear another process until it is not heard any more, and raise why."""
        async with asyncio.timeout(REACH_S):
            stream = await Stream.connect(*host_and_port(address), self.run)
        living = asyncio.create_task(self._give_signs(index, stream))
        try:
            await prove(stream, self._key)
            while True:
                async with asyncio.timeout(self.processes.silent_s):
                    message = await stream.receive_any(WORDS)
                if isinstance(message, Standing):
                    self._problems.pop(index, None)
                    self._heard[index] = _Heard(stream, message)
                elif index != self._at:
                    raise FormatError(f"a message {message.kind!r} from a process to which this one has not connected")
                else:
                    self._answer = index, message
                self._changed.set()
        finally:
            living.cancel()
            stream.abort()
            self._heard.pop(index, None)
            self._changed.set()

    async def _give_signs(self, index: int, stream: Stream) -> None:
        """Let the process where this one has come hear that it is there."""
        while True:
            await asyncio.sleep(STANDING_S)
            if self._at == index:
                stream.write(Ping(0, 0, 0))

    def _answered(self, index: int, answer: Message) -> Welcome:
        """Return the welcome of the process that this one has come to.

        Raises:
            SettingsError: it refuses this process.
            IslandError: it welcomes another one.
        """
        if isinstance(answer, Refused):
            raise SettingsError(f"learner {self.learner}: {answer.reason}")
        assert isinstance(answer, Welcome)
        indexes, own, address = answer.members, self.index, self.processes.addresses[index]
        if own not in indexes or indexes != sorted(set(indexes)) or len(indexes) != len(answer.addresses):
            raise IslandError(
                f"learner {self.learner}, process {own}: the program at {address} is not process {index} of this learner: "
                f"it welcomed process {own} to {indexes} at {len(answer.addresses)} addresses"
            )
        return answer


def free_port(host: str) -> int:
    """Return a free port of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _listed(indexes: list[int]) -> str:
    return ("process " if len(indexes) == 1 else "processes ") + ", ".join(map(str, indexes))
