"""A state in parts at several processes is lent by one of them, over real connections."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from tests.made.process_groups import met, until
from tests.pace import DEADLINE_S

from diloco.core.tensors.chunks import Chunk
from diloco.errors import RunError
from diloco.member.peer import InMemory
from diloco.process.tasks import Tasks
from diloco.processes import lending
from diloco.processes.lending import LentParts, SharedState, Values
from diloco.wire.process_messages import PartSaved

pytestmark = pytest.mark.usefixtures("groups_closed")

NUMBER = 6
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)
STATE = {"mu": ARRAY, "count": np.array(3, np.int32)}
ROWS = [Chunk("mu", (6, 4), "float32", (0, 0), (3, 4)), Chunk("mu", (6, 4), "float32", (3, 0), (6, 4))]
COUNT = Chunk.whole("count", (), "int32")


class Half(InMemory):
    """A part: one process's rows of the state."""

    def __init__(self, rows: Chunk) -> None:
        super().__init__(STATE)
        self.rows, self.dropped = rows, False

    def read(self, wanted: Chunk) -> Values:
        assert wanted.name != "mu" or self.rows.overlap(wanted) == wanted, "each is asked for what it has"
        return super().read(wanted)

    def drop(self) -> None:
        self.dropped = True


async def lent() -> tuple[SharedState, list[Half], list[LentParts]]:
    groups = await met()
    ends = [LentParts(group.links, Tasks(lambda error: None).spawn) for group in groups]
    halves = [Half(rows) for rows in ROWS]
    for group, end, half in zip(groups, ends, halves, strict=True):
        group.handle(end.hear)
        end.keep(NUMBER, half)
    owners = {"mu": list(enumerate(ROWS)), "count": [(0, COUNT)]}
    parts = {process: PartSaved(NUMBER, bytes([process] * 32), 48) for process in (0, 1)}
    return SharedState(ends[0], NUMBER, halves[0].layout, owners, parts), halves, ends


async def test_a_slice_is_put_together_from_the_parts_that_it_lies_in() -> None:
    state, _, _ = await lent()
    across = Chunk("mu", (6, 4), "float32", (2, 1), (5, 3))
    read = [asyncio.to_thread(state.read, chunk) for chunk in (across, COUNT, *ROWS)]
    found = await asyncio.gather(*read)
    for chunk, values in zip((across, COUNT, *ROWS), found, strict=True):
        np.testing.assert_array_equal(values, STATE[chunk.name][chunk.where], strict=True)


async def test_what_is_dropped_is_dropped_everywhere_and_lent_no_more() -> None:
    state, halves, _ = await lent()
    state.drop()
    await until(lambda: all(half.dropped for half in halves))
    for chunk, reason in zip(ROWS, ("not lent any more", "process 1 gives 0 bytes of mu, expected 48"), strict=True):
        with pytest.raises(RunError, match=reason):
            await asyncio.to_thread(state.read, chunk)


async def test_states_with_other_parts_are_told_apart() -> None:
    state, halves, ends = await lent()
    parts = {0: PartSaved(NUMBER, bytes(32), 48), 1: PartSaved(NUMBER, bytes([7] * 32), 48)}
    other = SharedState(ends[0], NUMBER, halves[0].layout, state.owners, parts)
    assert len(state.content_hash) == 32
    assert other.content_hash != state.content_hash


async def test_a_process_that_gives_nothing_in_time_is_named_and_its_late_answer_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "ANSWER_TIMEOUT_S", 0.05)
    state, halves, _ = await lent()
    answered, may_answer = threading.Event(), threading.Event()

    def late(wanted: Chunk) -> Values:
        assert may_answer.wait(DEADLINE_S)
        answered.set()
        return InMemory.read(halves[1], wanted)

    monkeypatch.setattr(halves[1], "read", late)
    with pytest.raises(RunError, match="process 1 gives no slice of the state of boundary 6"):
        await asyncio.to_thread(state.read, ROWS[1])
    may_answer.set()
    await until(answered.is_set)
    monkeypatch.undo()
    np.testing.assert_array_equal(await asyncio.to_thread(state.read, ROWS[1]), ARRAY[3:])
