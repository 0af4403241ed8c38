"""Which fragments are owned follows from the owners table, on a real server; the other syncers are heartbeats of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.made.heartbeats import shard_heartbeat
from tests.made.syncer_parts import Begun, begin, merge, offer
from tests.pace import DEADLINE_S

from diloco.control import tables
from diloco.core.syncer.ownership import Ownership, OwnersTable
from diloco.errors import RunError
from diloco.nats.transport import NatsTransport
from diloco.process.tape import Unrecorded
from diloco.process.tasks import end
from diloco_syncer.context import clock_s
from diloco_syncer.offers.intake import Intake
from diloco_syncer.owning.governor import Governor

pytestmark = pytest.mark.services


@dataclass
class Governed:
    """A governor at work. It hears its own heartbeat as often as it should, and that of others where the test says so."""

    begun: Begun
    ownership: Ownership
    governor: Governor
    others: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: what their heartbeats say
    announced: int = 0
    number: int = 0

    async def announce(self) -> None:
        self.announced += 1

    def hear(self) -> None:
        self.number += 1
        heard = [shard_heartbeat("syncer-0", self.number)]
        heard += [shard_heartbeat(name, self.number, **changes) for name, changes in self.others.items()]
        for heartbeat in heard:
            self.ownership.hear(heartbeat, clock_s())
        self.governor.news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            await asyncio.sleep(self.ownership.heartbeat_s / 2)
            self.hear()

    async def table(self, *owners: str) -> None:
        """Another syncer sets the table."""
        run = self.begun.context.run
        await tables.owners(run, 2).write(OwnersTable(sorted(set(owners)), list(owners)), self.ownership.revision)
        self.ownership.distrust()


@asynccontextmanager
async def governed(link: NatsTransport, **overrides: Any) -> AsyncIterator[Governed]:
    begun = await begin(link, **overrides)
    ownership = begun.ownership()
    intake = Intake(begun.context, None, lambda _: None)

    async def announce() -> None:
        await made.announce()

    governor = Governor(begun.context, ownership, intake, Unrecorded(), lambda: None, announce)
    made = Governed(begun, ownership, governor)
    governor.begin(begun.copies)
    made.hear()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(governor.govern(group)), group.create_task(governor.check_heads())]
        yield made
        await end(*tasks)
        await governor.stop()
        await intake.stop()


async def test_alone_it_sets_the_table_and_takes_everything_over(link: NatsTransport) -> None:
    async with governed(link) as made:
        await made.until(lambda: len(made.governor.owned) == 2)
        assert made.ownership.table == OwnersTable(["syncer-0"], ["syncer-0", "syncer-0"])
        assert {owner.chain.epoch for owner in made.governor.owned.values()} == {1}
        assert made.announced == 1
        assert not made.governor.over


async def test_a_fragment_that_the_table_gives_to_another_is_handed_over_with_a_keyframe(link: NatsTransport) -> None:
    async with governed(link) as made:
        await made.until(lambda: len(made.governor.owned) == 2)
        owner = made.governor.owned[0]
        await owner.commit(merge(owner, offer(owner, "ann", 1.0)), 32)
        had = owner.has_keyframe
        made.others["syncer-1"] = {}
        await made.table("syncer-1", "syncer-0")
        await made.until(lambda: made.governor.owned.keys() == {1})
        assert (had, owner.has_keyframe) == (False, True)
        await made.until(lambda: made.announced == 2)


async def test_it_owns_nothing_that_another_live_syncer_still_owns(link: NatsTransport) -> None:
    async with governed(link) as made:
        made.others["syncer-1"] = {"fragments": [1]}
        await made.table("syncer-0", "syncer-0")
        await made.until(lambda: made.governor.owned.keys() == {0})
        made.others["syncer-1"] = {"fragments": []}
        await made.until(lambda: made.governor.owned.keys() == {0, 1})


async def test_without_fragments_it_follows_those_of_others_and_takes_over_from_there(link: NatsTransport) -> None:
    async with governed(link) as made:
        made.others["syncer-1"] = {"fragments": [0, 1]}
        await made.table("syncer-1", "syncer-1")
        other = await made.begun.taken_over(context=made.begun.another("syncer-1"))
        await made.until(lambda: len(made.begun.copies.known()) == 2)
        await other.commit(merge(other, offer(other, "ann", 1.0)), 32)
        await made.until(lambda: made.begun.copies.known()[0].replica.chain.version == 1)
        del made.others["syncer-1"]  # it dies, and is gone after takeover_s
        await made.until(lambda: len(made.governor.owned) == 2)
        assert (made.governor.owned[0].chain.version, made.governor.owned[0].chain.epoch) == (1, 2)


async def test_what_another_process_has_appended_to_is_let_go_of_and_the_table_read_again(link: NatsTransport) -> None:
    async with governed(link) as made:
        await made.until(lambda: len(made.governor.owned) == 2)
        lost = made.governor.owned[0]
        await made.begun.taken_over(context=made.begun.another("syncer-1"))
        made.ownership.read(made.ownership.table, 0, clock_s())  # its revision is another one: the heads are looked at
        with capture_logs() as logs:
            await made.until(lambda: made.governor.owned.get(0) is not lost)
        assert "ownership_lost" in [entry["event"] for entry in logs]
        await made.until(lambda: len(made.governor.owned) == 2)
        assert made.governor.owned[0].chain.epoch == 3


async def test_it_is_over_when_all_logs_are_closed_and_stays_so_as_long_as_they_are(link: NatsTransport) -> None:
    async with governed(link) as made:
        await made.until(lambda: len(made.governor.owned) == 2)
        for owner in made.governor.owned.values():
            assert not made.governor.over
            await owner.commit(merge(owner, closing=True), 32)
        assert made.governor.closed == {0, 1}
        assert made.governor.over
        assert await made.governor.stays_over()


async def test_one_that_leaves_is_over_when_it_owns_nothing(link: NatsTransport) -> None:
    async with governed(link) as made:
        await made.until(lambda: len(made.governor.owned) == 2)
        made.ownership.leaving = True
        await made.until(lambda: made.governor.over)
        assert not made.governor.owned


async def test_the_older_of_two_processes_with_one_name_ends(link: NatsTransport) -> None:
    async with governed(link) as made, asyncio.TaskGroup() as group:
        for number in range(1, 5):
            made.ownership.hear(shard_heartbeat("syncer-0", number, incarnation=2), clock_s())
        # the one at work waits for news that it is not told of
        with pytest.raises(RunError, match="a newer process has joined as 'syncer-0'"):
            await made.governor.govern(group)
