"""One process's part in a learner of several: its links, its carrier, its readings, and the decisions that it carries out.

Two threads share it, as they share a :class:`~diloco.member.member.Member`: the trainer's, which takes decisions in order, and
the loop's, which everything that comes goes through. The trainer sees a :class:`~diloco.member.member.Member` where the process
leads, and a :class:`~diloco.processes.follower.Follower` where it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.control.creation import KnownRun
from diloco.core.learner.decisions import Course
from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.fragment_state import HostReader, Reader
from diloco.core.tensors.fragments import FragmentMap
from diloco.core.tensors.rows import LEADER, RowLayout, carriers
from diloco.errors import IslandError
from diloco.log.log import Log
from diloco.member.member_tracing import MemberTraces
from diloco.process.observe import Counted, Logger
from diloco.process.tasks import Tasks
from diloco.process.telemetry import Telemetry
from diloco.processes.carrier import Carrier
from diloco.processes.group import Group
from diloco.processes.lending import LentParts
from diloco.processes.shipping import Shipping
from diloco.states.state import Saved
from diloco.transport import Transport
from diloco.wire import process_messages as island
from diloco.wire.framing import Message
from diloco.wire.process_messages import Decided, PartSaved, Save, Write

Vector = NDArray[np.float32]
Deal = Callable[[Sequence[int]], Sequence[RowLayout]]  # of the carriers: the rows of all processes; both by fragment

LOOK_S = 0.5  # whether a process that rows are awaited of has ended


@dataclass(frozen=True)
class Saving:
    """A state that is to be saved, as of the boundary that was carried out last: this process's part of the accounts."""

    number: int  # of the decision
    save: Save
    accounts: dict[str, Any]  # plain values: the leader's part has them
    arrays: dict[str, NDArray[Any]]  # of the carried fragments, any dtype [...] by name; they are not written to


@dataclass(frozen=True)
class _Due:
    """A decision that came, and this process's part in it."""

    decided: Decided
    writes: list[tuple[int, VersionWrite]]
    saving: Saving | None


class Part:
    """Construct it in the loop's thread. ``lead`` is told the messages for the leader, where this process is it."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        group: Group,
        *,
        store: Log,
        layouts: Sequence[RowLayout],
        carriers: Sequence[int],
        read: Callable[[int], Vector],
        refused: Counted,
        log: Logger,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Begin; ``read`` gives a fragment as it is between steps, float32 [size], with this process's rows in it."""
        self.transport, self.run, self.group, self.log, self.read = transport, run, group, log, read
        self.tasks = Tasks(self.fail)  # of the loop's thread
        self.links, self.refused, self.carriers = group.links, refused, carriers
        self.shipping = Shipping(group.links, layouts, [fragment.size for fragment in store.map.fragments])
        self.loop = asyncio.get_running_loop()
        self._traces = MemberTraces(telemetry, run.identity, group.name, self.loop.time, transport.wall_s)
        self.carrier = Carrier(
            transport,
            run,
            store,
            group.links,
            self.shipping,
            carriers=carriers,
            name=group.name,
            refused=refused,
            spawn=self.tasks.spawn,
            log=log,
            traces=self._traces,
        )
        self.lent = LentParts(group.links, self.tasks.spawn)
        self.course = Course(run.identity, group.generation)
        self.remembers = False  # whether arrays are kept as they were before the newest decision
        self.lead: Callable[[int, Message], None] | None = None
        self._news = threading.Condition()
        self._decided: deque[_Due] = deque()  # not carried out; the lock is held
        self.saving: Saving | None = None  # as of the boundary that was carried out last
        self._failure: BaseException | None = None
        self._copy: tuple[int, dict[str, NDArray[Any]]] | None = None  # the newest: number of the decision, and arrays
        self._copied = asyncio.Event()
        self._readings: dict[tuple[int, int], Reader] = {}  # by fragment and decision
        self._asked: set[tuple[int, int]] = set()  # readings that are asked for and have not been made
        self._whole: dict[int, set[int]] = {}  # by fragment: processes whose rows came to a leader that gathers
        self._gathered = asyncio.Event()
        self._oldest = 0  # readings of earlier decisions are wanted no more
        self._newest = -1  # number of the decision that came last
        group.handle(self._handle)

    @property
    def needed(self) -> list[frozenset[int]]:
        """By fragment, the processes that have to have a version's rows before it is applied."""
        return [
            frozenset({carrier, *(place for place in range(self.group.size) if layout.held[place].size)})
            for carrier, layout in zip(self.carriers, self.shipping.layouts, strict=True)
        ]

    @property
    def carried_parameters(self) -> int:
        """Parameters of the fragments that this process carries."""
        return sum(self.carrier.store.map.fragments[index].size for index in self.carrier.fragments)

    # ---- the loop's thread

    def fail(self, error: BaseException) -> None:
        """End this process at its next boundary. Callable from any thread."""
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    async def close(self) -> None:
        """End all tasks, and lend nothing any more."""
        await self.tasks.end()
        self.lent.close()

    def _handle(self, source: int, message: Message, content: memoryview) -> None:
        try:
            self._take_in(source, message, content)
        except Exception as error:
            self.fail(error)  # a process's message to itself fails nowhere else
            raise

    def _take_in(self, source: int, message: Message, content: memoryview) -> None:
        match message:
            case Decided():
                self._take(message)
            case island.Rows():
                self._receive(source, message, content)
            case island.Stage():
                self.carrier.stage(message)
            case island.Encode():
                self._hand_over(message)
            case island.Store():
                self.carrier.store_offer(message)
            case island.CopyState():
                self._copy = message.number, self.arrays(message.number)
                self._copied.set()
            case island.AskSlice() | island.Slice() | island.DropLoan():
                self.lent.hear(source, message, content)
            case island.Gather():
                self.tasks.spawn(self._send_whole(message.fragment))
            case _ if self.lead is not None:
                self.lead(source, message)
            case _:
                raise IslandError(f"process {source} sent {message.kind} to process {self.links.place}, which does not lead")

    def _take(self, decided: Decided) -> None:
        writes: list[tuple[int, VersionWrite]] = []
        self._newest = decided.number
        self.carrier.begin_decision(remember=self.remembers)
        for write in decided.writes:
            applied = self._written(write)
            if applied is not None:
                writes.append((write.fragment, applied))
        self._oldest = decided.number - 1
        for key in [key for key in self._readings if key[1] < self._oldest]:
            del self._readings[key]
        saving = None
        if decided.save is not None:
            saving = Saving(decided.number, decided.save, {}, self.carrier.dump())
        with self._news:
            self._decided.append(_Due(decided, writes, saving))
            self._news.notify_all()

    def _written(self, write: Write) -> VersionWrite | None:
        try:
            return self.carrier.write(write)
        except LookupError as error:
            raise IslandError(
                f"process {self.links.place}: version {write.version} of fragment {write.fragment} was decided, and its "
                f"rows are not here ({error})"
            ) from None

    def _receive(self, source: int, head: island.Rows, content: memoryview) -> None:
        vector = self.shipping.take(source, head, content)
        if vector is None:
            return
        if head.what == "snapshot":
            self.carrier.receive_snapshot(source, head.fragment, head.number)
        elif head.what == "whole":
            self._note_whole(source, head.fragment)
        else:
            self.carrier.receive(head, vector)

    def arrays(self, number: int) -> dict[str, NDArray[Any]]:
        """Return the carried fragments' arrays, any dtype [...] by name, as decision ``number`` leaves them.

        It is the newest that has come, or the one before.

        Raises:
            IslandError: it is neither.
        """
        if not self._newest - 1 <= number <= self._newest:
            raise IslandError(f"process {self.links.place}: asked for decision {number}, but the newest is {self._newest}")
        return self.carrier.dump(before=number < self._newest)

    async def copied(self, number: int, within_s: float) -> dict[str, NDArray[Any]]:
        """Return the carried fragments' arrays, any dtype [...] by name, once the leader has had them copied.

        They are as decision ``number`` leaves them.

        Raises:
            IslandError: the leader has none copied of then.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._copy is None or self._copy[0] != number:
                    self._copied.clear()
                    await self._copied.wait()
        except TimeoutError:
            found = "has asked for none" if self._copy is None else f"has asked for that of boundary {self._copy[0]}"
            raise IslandError(
                f"{self.links.name(self.links.place)} asked for its state as of boundary {number}, and process 0 {found} "
                f"within {within_s:g} s: ask for it in all processes, after the same step"
            ) from None
        (_, arrays), self._copy = self._copy, None
        return arrays

    # ---- readings

    def _hand_over(self, encode: island.Encode) -> None:
        """Send this process's rows of a snapshot to the carrier, once it has been read."""
        if self.carriers[encode.fragment] == self.links.place:
            self.carrier.begin_offer(encode)
        key = encode.fragment, encode.number
        reader = self._readings.pop(key, None)
        if reader is None:
            self._asked.add(key)
        else:
            self.tasks.spawn(self._send_rows(key, reader))

    async def _send_rows(self, key: tuple[int, int], reader: Reader) -> None:
        fragment, number = key
        carrier = self.carriers[fragment]
        if carrier != self.links.place and not self.shipping.rows(fragment, self.links.place, "snapshot").size:
            return
        vector = reader() if isinstance(reader, HostReader) else await asyncio.to_thread(reader)
        if carrier == self.links.place:
            self.shipping.add(fragment, "snapshot", number, vector)
            self.carrier.receive_snapshot(carrier, fragment, number)
        else:
            await self.shipping.send([carrier], fragment, number, "snapshot", vector)

    def _note_reading(self, key: tuple[int, int], reader: Reader) -> None:
        if key in self._asked:
            self._asked.discard(key)
            self.tasks.spawn(self._send_rows(key, reader))
        elif key[1] >= self._oldest:
            self._readings[key] = reader

    async def _send_whole(self, fragment: int) -> None:
        vector = await asyncio.to_thread(self.read, fragment)
        if self.links.place == LEADER:
            self.shipping.add(fragment, "whole", 0, vector)
            self._note_whole(LEADER, fragment)
        else:
            await self.shipping.send([LEADER], fragment, 0, "whole", vector)

    def _note_whole(self, source: int, fragment: int) -> None:
        self._whole.setdefault(fragment, set()).add(source)
        self._gathered.set()

    async def gather(self, fragment: int) -> Vector:
        """Return a fragment as the processes have it that take no step now, float32 [size]. For a leader.

        Raises:
            IslandError: a process that has rows of it has taken leave and ended, and is not missed.
        """
        others = [p for p in self.links.others if self.shipping.rows(fragment, p, "whole").size]
        self.links.write_all(island.Gather(fragment))
        while not self._whole.get(fragment, set()).issuperset([LEADER, *others]):
            ended = next((p for p in others if self.links.has_ended(p, self.group.settings.silent_s)), None)
            if ended is not None:
                raise IslandError(f"process {ended} has ended: its rows of fragment {fragment} are unavailable")
            self._gathered.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gathered.wait(), LOOK_S)
        del self._whole[fragment]
        return self.shipping.release(fragment, "whole")

    # ---- the trainer's thread

    def boundary(self) -> tuple[Decided, list[tuple[int, VersionWrite]]]:
        """Wait for the next decision, and go on by it; return it, and what is to be written into the model.

        Raises:
            IslandError: it is not the next one.
            DilocoError: a task of the loop's thread failed.
        """
        with self._news:
            self._await_decision()
            due = self._decided.popleft()
        self._traces.applied([(write.fragment, write.version) for write in due.decided.writes], due.decided.step)
        self.saving = due.saving
        passed = self.course.take(due.decided)
        if self.links.place != LEADER:
            self.tell_leader(passed)
        return due.decided, due.writes

    def part_saved(self, saving: Saving, saved: Saved | None, content_hash: bytes) -> None:
        """Tell the leader that this process's part of a state is on the disk, or (None) is not. Callable from any thread."""
        content, size_bytes = (None, 0) if saved is None else (content_hash, saved.size_bytes)
        self.tell_leader(PartSaved(saving.number, content, size_bytes))

    def tell_leader(self, message: Message) -> None:
        """Send a small message to the leader. Callable from any thread."""
        self.loop.call_soon_threadsafe(self.links.write, LEADER, message)

    def next_decision(self) -> Decided:
        """Wait for the next decision, and return it; it stays the next one."""
        with self._news:
            self._await_decision()
            return self._decided[0].decided

    def submit(self, fragment: int, reader: Reader) -> None:
        """Keep a way to read a fragment as it is at this boundary."""
        key = fragment, self.course.number - 1
        self.loop.call_soon_threadsafe(self._note_reading, key, reader)

    @property
    def is_decided(self) -> bool:
        """Whether the next boundary need not wait: a decision is there, or an error."""
        return bool(self._decided or self._failure)

    def wait_for_decision(self, timeout_s: float) -> None:
        """Sleep until there is a decision to be carried out, at most ``timeout_s``."""
        with self._news:
            self._news.wait_for(lambda: self.is_decided, timeout_s)

    def _await_decision(self) -> None:
        self._news.wait_for(lambda: self.is_decided)
        if self._failure is not None:
            raise self._failure


def make_part(
    transport: Transport,
    run: KnownRun,
    group: Group,
    fragments: FragmentMap,
    *,
    deal: Deal,
    read: Callable[[int], Vector],
    log: Logger,
    telemetry: Telemetry | None,
) -> Part:
    """Return a process's part in a group that has met. Call it in the loop's thread.

    ``read`` gives a fragment as it is between steps, float32 [size], with this process's rows in it.
    """
    dealt, refused = carriers([fragment.size for fragment in fragments.fragments], group.size), Counted(log)
    group.links.sign_of_life = lambda: island.Ping(transport.bytes_out, transport.bytes_in, refused.total)
    part = Part(
        transport,
        run,
        group,
        store=Log(transport, run.name, run.identity, fragments, run.created),
        layouts=deal(dealt),
        carriers=dealt,
        read=read,
        refused=refused,
        log=log,
        telemetry=telemetry,
    )
    log.info("carries", fragments=part.carrier.fragments, parameters=part.carried_parameters)
    return part
