"""The processes of one learner meet: the leader makes sure that they are there, and alike, before any of them computes.

The leader listens at ``processes.address`` until all have come. With ``processes.least`` it waits until so many have, and
nobody else comes any more (:mod:`diloco.core.roll`); and it listens on, and tells those that come later to wait.

Each of the others says who it is, where it can be reached, and what has to be the same everywhere. The answer is a secret, by
which processes know each other from then on, and all addresses. Before, both ends prove that they have the key of the learner's
identity (:mod:`diloco.member.proving`). In a run without identities all who reach this address are taken for processes of the
learner. The collectives between processes have neither passwords nor encryption in either case: they belong into a network of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.core.roll import Roll, members
from diloco.errors import FormatError, HashError, IslandError, MessageError, SettingsError
from diloco.member.links import Stream
from diloco.member.proving import Door, prove
from diloco.process.observe import Counted, Logger
from diloco.settings.service import ProcessesSettings, host_and_port
from diloco.wire.framing import Message
from diloco.wire.island import Address, Arrival, Facts, Ping, Refused, Wait, Welcome, difference

RETRY_S = 0.2  # until the leader listens
ARRIVAL_S = 5.0  # from a connection to its first message
MAX_CONNECTIONS = 2048  # twice the processes that there may be
WAIT_S = 1.0  # between two answers to a process that waits, and two signs of life of it; small beside any time to meet
LOOK_S = 0.1  # between two looks for signs of life; small beside WAIT_S
SIGNS = 2  # of a process, after which it is there: one may have been under way when it ended


@dataclass
class _Arrived:
    arrival: Arrival
    stream: Stream
    signs: int = 0  # of life, since it has come


class Meeting:
    """A process at the meeting, with the ``facts`` that have to be the same everywhere. Construct it in the loop's thread.

    ``sizes`` are the numbers of processes that a generation may have, the largest first; ``key`` is that of the identity.
    """

    def __init__(
        self,
        learner: str,
        processes: ProcessesSettings,
        sizes: Sequence[int],
        run: bytes,
        key: bytes,
        facts: Facts,
        log: Logger,
        expected: frozenset[int] = frozenset(),
    ) -> None:
        """Begin; ``expected``: processes that are known to come, at a leader."""
        self.learner, self.processes, self.sizes, self.run, self.facts, self.log = learner, processes, sizes, run, facts, log
        self._expected = expected
        self._key, self._door, self._refused = key, Door(key), Counted(log, "connection_refused")
        self.grows = False  # a leader: whether with those that wait a generation would be larger than the one that goes on
        self._arrived: dict[int, _Arrived] = {}
        self._roll: Roll
        self._welcome: Welcome | None = None  # a leader's, of the generation that goes on
        self._changed = asyncio.Event()
        self._failure: SettingsError | None = None
        self._server: asyncio.Server | None = None
        self._connections = set[asyncio.Task[None]]()

    # ---- a leader

    async def lead(self, address: Address, coordinator: Address, generation: int, secret: bytes) -> Welcome:
        """Wait until the others have come, and welcome them. ``address``, ``coordinator``: where this process is reached.

        Raises:
            SettingsError: one of them differs, or the address cannot be listened at.
            IslandError: too few come in time.
        """
        host, port = host_and_port(self.processes.address, "processes.address")
        try:
            self._server = await asyncio.start_server(self._connected, host, port, reuse_address=True)
        except OSError as error:
            raise SettingsError(
                f"processes.address = {self.processes.address}: process 0 of {self.learner} cannot listen there: "
                f"{error.strerror}: name an address of the host that process 0 runs on, and a port that is free"
            ) from None
        try:
            chosen = await self._gather()
            addresses = [address, *(self._arrived[index].arrival.address for index in chosen[1:])]
            welcome = Welcome(generation, secret, coordinator, chosen, addresses)
            for index in chosen[1:]:
                await self._arrived[index].stream.send(welcome)
        except OSError as error:
            await self.close()
            raise IslandError(f"learner {self.learner}: a process went away while all met: {error}") from None
        except BaseException:
            await self.close()
            raise
        self._welcome = welcome
        if not self.processes.elastic:
            await self.close()
        self._look()
        return welcome

    @property
    def waiting(self) -> set[int]:
        """The processes that have come, of a leader whose generation goes on without them."""
        return set(self._arrived)

    async def _gather(self) -> list[int]:
        """Return the processes that have come to make a generation."""
        clock = asyncio.get_running_loop().time
        self._roll = Roll(self.sizes, self.processes.regroup_s, clock(), self._expected)
        over_s = clock() + self.processes.start_s
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            now_s = clock()
            begins_s = self._roll.begins_s(now_s)
            if begins_s == 0.0 or (begins_s is not None and now_s >= over_s):
                return self._roll.members
            if now_s >= over_s:
                raise IslandError(self._missing())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(over_s - now_s if begins_s is None else min(begins_s, over_s - now_s)):
                    await self._changed.wait()

    def _missing(self) -> str:
        missing = [index for index in range(self.processes.count) if index not in self._roll.present]
        least = f" (at least {self.sizes[-1]} have to: processes.least)" if self.processes.elastic else ""
        return (
            f"learner {self.learner}: of its {self.processes.count} processes, {_listed(missing)} did not come to "
            f"{self.processes.address} within {self.processes.start_s:g} s{least}: look at their logs, and whether they reach "
            "it"
        )

    async def close(self) -> None:
        """Listen no more; all that wait here notice."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._arrive(Stream(reader, writer, self.run)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _arrive(self, stream: Stream) -> None:
        try:
            try:
                await self._door.admit(stream)
            except (OSError, EOFError, MessageError) as error:
                self._refused.note(stream.peer, "meeting", reason=f"{type(error).__name__}: {error}")
                return
            with contextlib.suppress(OSError, EOFError, MessageError, TimeoutError):  # not a process of ours, or gone again
                async with asyncio.timeout(ARRIVAL_S):
                    arrival = await stream.receive_one(Arrival)
                await self._take_in(arrival, stream)
        finally:
            stream.abort()
            self._changed.set()

    async def _take_in(self, arrival: Arrival, stream: Stream) -> None:
        index, reason = arrival.index, self._fault(arrival)
        if reason is None and index in self._arrived and await self._is_there(self._arrived[index]):
            reason = f"processes.index = {index} is there already: each process of a learner has an index of its own"
        if reason is not None:
            await stream.send(Refused(reason))
            if self.processes.elastic:
                self.log.warning("process_refused", process=index, reason=reason)
            elif index not in self._arrived:
                self._failure = SettingsError(f"learner {self.learner}: {reason}")
            return
        if self._welcome is not None and index in self._welcome.members:
            await stream.until_closed()  # the one of before is gone, and soon missed: then all meet
            return
        arrived = self._arrived[index] = _Arrived(arrival, stream)
        self._roll.come(index, asyncio.get_running_loop().time())
        self.log.info("process_arrived", process=index)
        self._look()
        waiting = asyncio.create_task(self._have_it_wait(stream))
        try:
            while await stream.heard():
                arrived.signs += 1
        finally:  # it has been welcomed, or begins again
            waiting.cancel()
            if self._arrived.get(index) is arrived:
                self._go(index)

    def _go(self, index: int) -> None:
        """Take in that a process has gone."""
        del self._arrived[index]
        if self._welcome is None:
            self._roll.go(index)
        self._look()

    async def _is_there(self, arrived: _Arrived) -> bool:
        """Return whether a process that has come is there yet, and not lost with its host; one that is not is forgotten."""
        index, enough = arrived.arrival.index, arrived.signs + SIGNS
        over_s = asyncio.get_running_loop().time() + (SIGNS + 1) * WAIT_S
        while self._arrived.get(index) is arrived and asyncio.get_running_loop().time() < over_s:
            if arrived.signs >= enough:
                return True
            await asyncio.sleep(LOOK_S)
        if self._arrived.get(index) is arrived:
            self._go(index)
            arrived.stream.abort()
        return index in self._arrived

    async def _have_it_wait(self, stream: Stream) -> None:
        while True:
            if self._welcome is not None:
                stream.write(Wait(self._welcome.generation))
            await asyncio.sleep(WAIT_S)

    def _look(self) -> None:
        """Take in that a process has come or gone."""
        self._changed.set()
        if self._welcome is not None:
            present = self._welcome.members
            self.grows = len(members({*present, *self._arrived}, self.sizes)) > len(present)

    def _fault(self, arrival: Arrival) -> str | None:
        """Return why a process cannot take part."""
        count = self.processes.count
        if arrival.count != count:
            return f"process {arrival.index} has processes.count = {arrival.count}, process 0 has {count}: name one for all"
        if not 0 < arrival.index < count:
            return f"a process has processes.index = {arrival.index}, expected 1 to {count - 1}: each has an index of its own"
        differs = difference(self.facts, arrival.facts)
        if differs is not None:
            return f"process {arrival.index} differs from process 0 in {differs}: they have to be the same"
        return None

    # ---- another process

    async def come(self, listening_port: int) -> Welcome:
        """Go to the leader, and wait for its welcome. ``listening_port``: where the own links are reached, on any address.

        Raises:
            SettingsError: the leader refuses this process.
            IslandError: the leader cannot be reached in time, or goes away.
        """
        index, address = self.processes.index, self.processes.address
        host, port = host_and_port(address, "processes.address")
        reached = False
        try:
            async with asyncio.timeout(self.processes.start_s) as limit:
                while True:
                    try:
                        reader, writer = await asyncio.open_connection(host, port)
                    except OSError:
                        await asyncio.sleep(RETRY_S)
                        continue
                    stream = Stream(reader, writer, self.run)
                    try:
                        await self._prove(stream)
                        own: Address = writer.get_extra_info("sockname")[0], listening_port
                        await stream.send(Arrival(index, self.processes.count, own, self.facts))
                        reached = True
                        living = asyncio.create_task(_give_signs(stream))
                        try:
                            answer = await self._answer(stream, limit)
                        finally:
                            living.cancel()
                    except (OSError, EOFError):  # it ended, or begins again
                        await asyncio.sleep(RETRY_S)
                        continue
                    finally:
                        stream.abort()
                    if isinstance(answer, Welcome):
                        self._check(answer)
                        return answer
                    assert isinstance(answer, Refused)
                    raise SettingsError(f"learner {self.learner}: {answer.reason}")
        except TimeoutError:
            what = "waits for other processes" if reached else "cannot be reached"
            raise IslandError(
                f"learner {self.learner}, process {index}: process 0 at processes.address = {address} {what}, for more than "
                f"{self.processes.start_s:g} s: start all {self.processes.count} processes, with an address that each reaches"
            ) from None
        except FormatError as error:
            raise IslandError(
                f"learner {self.learner}, process {index}: what answers at {address} is no process 0: {error}"
            ) from None

    async def _prove(self, stream: Stream) -> None:
        try:
            await prove(stream, self._key)
        except HashError:
            raise SettingsError(
                f"learner {self.learner}, process {self.processes.index}: process 0 at processes.address = "
                f"{self.processes.address} does not have the key of this process's identity: give all processes of a learner "
                "one identity file, as it was made last (diloco keys)"
            ) from None

    def _check(self, welcome: Welcome) -> None:
        """Find out that a generation has this process, and an address of each.

        Raises:
            FormatError: it has not.
        """
        members, index = welcome.members, self.processes.index
        if index not in members or members != sorted(set(members)) or len(members) != len(welcome.addresses):
            raise FormatError(f"process {index} is welcomed to {members} at {len(welcome.addresses)} addresses")

    async def _answer(self, stream: Stream, limit: asyncio.Timeout) -> Message:
        """Return the leader's word; while it has this process wait, there is no limit."""
        waits = False
        while True:
            answer = await stream.receive_any({Welcome.kind: Welcome, Refused.kind: Refused, Wait.kind: Wait})
            if not isinstance(answer, Wait):
                return answer
            limit.reschedule(asyncio.get_running_loop().time() + self.processes.start_s)
            if not waits:
                self.log.info("waiting_for_generation", generation=answer.generation)
            waits = True


async def _give_signs(stream: Stream) -> None:
    """Let the leader hear that this process is there."""
    while True:
        await asyncio.sleep(WAIT_S)
        stream.write(Ping(0, 0, 0))


def free_port(host: str) -> int:
    """Return a port of this host that nobody listens at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _listed(indexes: list[int]) -> str:
    return ("process " if len(indexes) == 1 else "processes ") + ", ".join(map(str, indexes))
