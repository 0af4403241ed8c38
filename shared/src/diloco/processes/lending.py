"""Loans of a state that lies in parts at several processes: the leader serves all of it, slice by slice.

Each process keeps its part in a file. The leader asks the processes whose parts a slice lies in, so that a borrower sees one
lender, whatever it consists of. Calls are the loop's where nothing else is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors.chunks import Chunk
from diloco.errors import DilocoError, HashError, IslandError, RunError
from diloco.member.peer import Layout, Lendable
from diloco.processes.links import Links
from diloco.wire.framing import Message
from diloco.wire.process_messages import AskSlice, DropLoan, PartSaved, Slice

ANSWER_TIMEOUT_S = 10.0  # a process whose loop stands still so long is about to be given up

Values = NDArray[Any]
Owners = Mapping[str, Sequence[tuple[int, Chunk]]]  # by array: the process that lends a chunk of it; no two overlap


class LentParts:
    """The own parts of states that are lent, by the number of the decision that they are of, and slices of others' parts."""

    def __init__(self, links: Links, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self.links, self.spawn = links, spawn
        self.loop = asyncio.get_running_loop()
        self._kept: dict[int, Lendable] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}  # by request
        self._requests = 0

    def keep(self, number: int, part: Lendable) -> None:
        """Have a part to lend. Callable from any thread."""
        self._kept[number] = part

    def drop_everywhere(self, number: int) -> None:
        """Have all processes drop their parts. Callable from any thread."""
        self.loop.call_soon_threadsafe(self.links.write_all, DropLoan(number))

    def close(self) -> None:
        """Drop what is lent."""
        for number in list(self._kept):
            self._drop(number)

    def hear(self, source: int, message: Message, content: memoryview) -> None:
        """Take in what concerns a loan."""
        match message:
            case AskSlice():
                self.spawn(self._answer(source, message))
            case Slice():
                if blake3(content).digest() != message.digest:
                    raise HashError(f"process {source}: a slice of a loan does not have the hash that it states")
                answer = self._asked.get(message.request)
                if answer is not None and not answer.done():  # it is not waited for any more, where it took too long
                    answer.set_result(bytes(content))
            case DropLoan():
                self._drop(message.number)
            case _:
                raise IslandError(f"process {source} sent {message.kind!r}, which is not part of a loan")

    def read(self, process: int, number: int, wanted: Chunk) -> Values:
        """Return a chunk that is in a process's part, any dtype [its lengths]. Not to be called in the loop's thread.

        Raises:
            DilocoError: it is lent no more, or the process does not answer.
        """
        if process == self.links.place:
            kept = self._kept.get(number)
            if kept is None:
                raise RunError(f"the state of boundary {number} is not lent any more")
            return kept.read(wanted)
        asking = asyncio.run_coroutine_threadsafe(self._ask(process, number, wanted), self.loop)
        try:
            content = asking.result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            asking.cancel()
            raise RunError(f"process {process} gives no slice of the state of boundary {number}") from None
        if len(content) != wanted.size_bytes:
            raise RunError(f"process {process} gives {len(content)} bytes of {wanted.name}, expected {wanted.size_bytes}")
        values: Values = np.frombuffer(content, wanted.dtype).reshape(wanted.lengths)
        return values

    async def _ask(self, process: int, number: int, wanted: Chunk) -> bytes:
        self._requests += 1
        request = self._requests
        answer: asyncio.Future[bytes] = self.loop.create_future()
        self._asked[request] = answer
        try:
            self.links.write(process, AskSlice(request, number, wanted.name, list(wanted.start), list(wanted.stop)))
            return await answer
        finally:
            del self._asked[request]

    async def _answer(self, source: int, asked: AskSlice) -> None:
        content = b""
        kept = self._kept.get(asked.number)
        if kept is not None:
            places = {array[0]: place for place, array in enumerate(kept.layout.arrays)}
            chunk = kept.layout.slice(places.get(asked.name, len(places)), asked.start, asked.stop)
            if chunk is not None:
                try:
                    content = np.ascontiguousarray(await asyncio.to_thread(kept.read, chunk)).tobytes()
                except DilocoError:  # it was dropped meanwhile
                    content = b""
        await self.links.send(source, Slice(asked.request, blake3(content).digest()), memoryview(content))

    def _drop(self, number: int) -> None:
        kept = self._kept.pop(number, None)
        if kept is not None:
            kept.drop()


class SharedState:
    """A state as of decision ``number`` whose parts several processes lend: one that can be lent (:class:`Lendable`)."""

    def __init__(self, lent: LentParts, number: int, layout: Layout, owners: Owners, parts: Mapping[int, PartSaved]) -> None:
        self.lent, self.number, self.layout, self.owners = lent, number, layout, owners
        hasher = blake3(layout.digest)
        for _, part in sorted(parts.items()):
            assert part.content is not None
            hasher.update(part.content)
        self.content_hash = hasher.digest()

    def read(self, wanted: Chunk) -> Values:
        """Return a chunk, any dtype [its lengths]. Not to be called in the loop's thread.

        Raises:
            DilocoError: it is lent no more, or a process does not answer.
        """
        values = np.empty(wanted.lengths, wanted.dtype)
        for process, owned in self.owners[wanted.name]:
            part = owned.overlap(wanted)
            if part is not None:
                values[part.within(wanted)] = self.lent.read(process, self.number, part)
        return values

    def drop(self) -> None:
        """Have all processes drop their parts. Callable from any thread."""
        self.lent.drop_everywhere(self.number)
