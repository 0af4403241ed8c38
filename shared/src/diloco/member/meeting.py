"""The processes of one learner meet: the leader makes sure that they are all there, and alike, before any of them computes.

The leader listens at ``processes.address`` until all have come. Each of the others says who it is, where it can be reached,
and what has to be the same everywhere. The answer is a secret, by which processes know each other from then on, and all
addresses. All who reach this address are taken for processes of the learner: like the collectives between the processes,
which have neither passwords nor encryption, it belongs into a network of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field

from diloco.errors import FormatError, IslandError, MessageError, SettingsError
from diloco.member.links import Stream
from diloco.process.observe import Logger
from diloco.settings.service import ProcessesSettings, host_and_port
from diloco.wire.framing import Message
from diloco.wire.island import Address, Arrival, Facts, Refused, Welcome, difference

RETRY_S = 0.2  # until the leader listens
ARRIVAL_S = 5.0  # from a connection to its first message
MAX_CONNECTIONS = 2048  # twice the processes that there may be


@dataclass
class _Arrived:
    arrival: Arrival
    stream: Stream


@dataclass
class Meeting:
    """A process at the meeting, with the ``facts`` that have to be the same everywhere."""

    learner: str
    processes: ProcessesSettings
    run: bytes
    facts: Facts
    log: Logger
    _arrived: dict[int, _Arrived] = field(default_factory=dict)

    async def lead(self, address: Address, coordinator: Address, generation: int, secret: bytes) -> Welcome:
        """Wait until all others have come, and welcome them.

        Raises:
            SettingsError: one of them differs, or the address cannot be listened at.
            IslandError: some do not come in time.
        """
        host, port = host_and_port(self.processes.address, "processes.address")
        changed, failure = asyncio.Event(), list[SettingsError]()
        connections = set[asyncio.Task[None]]()

        async def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(reader, writer, self.run)
            try:
                await self._arrive(stream, failure, changed)
            finally:
                stream.abort()
                changed.set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(connections) >= MAX_CONNECTIONS:
                writer.transport.abort()
                return
            task = asyncio.get_running_loop().create_task(arrive(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        try:
            server = await asyncio.start_server(connected, host, port, reuse_address=True)
        except OSError as error:
            raise SettingsError(
                f"processes.address = {self.processes.address}: process 0 of {self.learner} cannot listen there: "
                f"{error.strerror}: name an address of the host that process 0 runs on, and a port that is free"
            ) from None
        try:
            async with asyncio.timeout(self.processes.start_s):
                while len(self._arrived) < self.processes.count - 1:
                    await changed.wait()
                    changed.clear()
                    if failure:
                        raise failure[0]
            addresses = [address, *(self._arrived[index].arrival.address for index in range(1, self.processes.count))]
            welcome = Welcome(generation, secret, coordinator, addresses)
            for arrived in self._arrived.values():
                await arrived.stream.send(welcome)
            return welcome
        except TimeoutError:
            missing = [index for index in range(1, self.processes.count) if index not in self._arrived]
            raise IslandError(
                f"learner {self.learner}: of its {self.processes.count} processes, {_listed(missing)} did not come to "
                f"{self.processes.address} within {self.processes.start_s:g} s: look at their logs, and whether they reach it"
            ) from None
        except OSError as error:
            raise IslandError(f"learner {self.learner}: a process went away while all met: {error}") from None
        finally:
            server.close()
            for task in list(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _arrive(self, stream: Stream, failure: list[SettingsError], changed: asyncio.Event) -> None:
        with contextlib.suppress(OSError, EOFError, MessageError, TimeoutError):  # not a process of ours, or gone again
            async with asyncio.timeout(ARRIVAL_S):
                arrival = await stream.receive_one(Arrival)
            reason = self._fault(arrival)
            if reason is not None:
                await stream.send(Refused(reason))
                if arrival.index not in self._arrived:
                    failure.append(SettingsError(f"learner {self.learner}: {reason}"))
                return
            self._arrived[arrival.index] = _Arrived(arrival, stream)
            self.log.info("process_arrived", process=arrival.index)
            changed.set()
            try:
                await stream.until_closed()
            finally:
                self._arrived.pop(arrival.index, None)  # it has been welcomed, or begins again

    def _fault(self, arrival: Arrival) -> str | None:
        """Return why a process cannot take part."""
        count = self.processes.count
        if arrival.count != count:
            return f"process {arrival.index} has processes.count = {arrival.count}, process 0 has {count}: name one for all"
        if not 0 < arrival.index < count:
            return f"a process has processes.index = {arrival.index}, expected 1 to {count - 1}: each has an index of its own"
        if arrival.index in self._arrived:
            return f"processes.index = {arrival.index} is there already: each process of a learner has an index of its own"
        differs = difference(self.facts, arrival.facts)
        if differs is not None:
            return f"process {arrival.index} differs from process 0 in {differs}: they have to be the same"
        return None

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
            async with asyncio.timeout(self.processes.start_s):
                while True:
                    try:
                        reader, writer = await asyncio.open_connection(host, port)
                    except OSError:
                        await asyncio.sleep(RETRY_S)
                        continue
                    stream = Stream(reader, writer, self.run)
                    try:
                        own: Address = writer.get_extra_info("sockname")[0], listening_port
                        await stream.send(Arrival(index, self.processes.count, own, self.facts))
                        reached = True
                        answer: Message = await stream.receive_any({Welcome.kind: Welcome, Refused.kind: Refused})
                    except (OSError, EOFError):  # it ended, or begins again
                        await asyncio.sleep(RETRY_S)
                        continue
                    finally:
                        stream.abort()
                    if isinstance(answer, Welcome):
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


def free_port(host: str) -> int:
    """Return a port of this host that nobody listens at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _listed(indexes: list[int]) -> str:
    return ("process " if len(indexes) == 1 else "processes ") + ", ".join(map(str, indexes))
