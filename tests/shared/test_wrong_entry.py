"""An entry that states another state than it folds to: all readers pass over it, and over all that its writer builds on it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from tests.made.shorten import shorten
from tests.made.syncer_parts import SIZE, Begun, begin, merge, offer
from tests.pace import DEADLINE_S

from diloco.core.log.chain import Chain, WrongEntries
from diloco.core.tensors import outer
from diloco.errors import ChainError, StateError, WrongEntryError
from diloco.log.follower import FollowedEntry, LogFollower, Reloaded, Wrong
from diloco.log.stream import RefusedEntry
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.owning.takeover import Takeover

pytestmark = pytest.mark.services


async def right(owner: FragmentOwner, number: int) -> None:
    """Append a version: it takes 1 from every parameter."""
    await owner.commit(merge(owner, offer(owner, "ann", -1.0, number)), 32)


async def wrong(owner: FragmentOwner, number: int) -> bytes:
    """Append a version whose owner has a parameter with a bit too many; return the entry's hash. Its next ones build on it."""
    owner.replica.theta[5] += 2.0**-10
    await right(owner, number)
    return owner.chain.head


class Reading:
    """A run, the owner of its first fragment, and a reader of the log."""

    def __init__(self, begun: Begun, owner: FragmentOwner) -> None:
        self.begun, self.owner = begun, owner
        self.refusals = list[RefusedEntry]()
        self.follower = self.another()

    def another(self) -> LogFollower:
        return LogFollower(self.begun.context.store, self.begun.genesis, self.refusals.append, get_logger(), in_place=False)

    async def taken_over(self, name: str = "syncer-1") -> FragmentOwner:
        """Another syncer takes the fragment over, as its own reading of the log has it."""
        async with asyncio.TaskGroup() as group:
            owner = await Takeover(self.begun.another(name), self.begun.copies, lambda index: True).take(0, group)
        assert owner is not None
        return owner


@pytest.fixture
async def reading(link: NatsTransport) -> Reading:
    """Two versions: every parameter is 1, then 2; nothing is owed to momentum."""
    begun = await begin(link)
    owner = await begun.taken_over()
    await right(owner, 1)
    await right(owner, 2)
    return Reading(begun, owner)


async def coming(events: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(events)


async def test_a_reader_passes_over_it_and_all_that_follows_it_and_goes_on_with_the_takeover(reading: Reading) -> None:
    follower, owner = reading.follower, reading.owner
    copy = await follower.load(0)
    assert copy.replica.theta.tolist() == [2.0] * SIZE
    async with contextlib.aclosing(follower.follow([0])) as events:
        bad = await wrong(owner, 3)
        event = await coming(events)
        assert isinstance(event, Wrong)
        assert event.entry.entry_hash == bad
        assert (event.copy.replica.chain.version, event.copy.replica.theta.tolist()) == (2, [2.0] * SIZE)
        assert [type(refusal.error) for refusal in reading.refusals] == [WrongEntryError]
        assert "version 3: folding gives state" in str(reading.refusals[0].error)

        # versions beyond the next one, which are not taken for a gap in the log, and a keyframe of what no other process has
        await right(owner, 4)
        await right(owner, 5)
        await owner.store_keyframe()
        new = await reading.taken_over()
        assert (new.chain.version, new.chain.epoch, new.replica.theta.tolist()) == (2, 2, [2.0] * SIZE)
        await right(new, 3)

        for entry, version in (("takeover", 2), ("version", 3)):
            event = await coming(events)
            assert (event.entry.record.entry, event.copy.replica.chain.version) == (entry, version)
        assert event.copy.replica.theta.tolist() == [3.0] * SIZE
        assert await owner.lost() == "ownership_lost"
    # those who come now, with and without another keyframe behind that of the old owner
    for _ in range(2):
        again = await reading.another().load(0)
        assert (again.replica.chain.head, again.replica.theta.tolist()) == (new.chain.head, [3.0] * SIZE)
        await new.store_keyframe()
    state = await reading.begun.context.store.reader.state_at(0, 3, *reading.begun.genesis)
    assert state.chain.head == new.chain.head


async def test_a_reader_whose_own_copy_is_damaged_loads_it_again_and_takes_the_entry(reading: Reading) -> None:
    follower = reading.follower
    copy = await follower.load(0)
    copy.replica.theta[7] += 1.0
    async with contextlib.aclosing(follower.follow([0])) as events:
        await right(reading.owner, 3)
        event = await coming(events)
        assert isinstance(event, Reloaded)
        assert (event.copy.replica.chain.head, event.copy.replica.theta.tolist()) == (reading.owner.chain.head, [3.0] * SIZE)
        await right(reading.owner, 4)
        assert isinstance(await coming(events), FollowedEntry)
    assert reading.refusals == []
    assert reading.owner.chain.head not in follower.wrong[0]


async def test_its_writer_loads_the_log_and_finds_its_own_entry_wrong(reading: Reading) -> None:
    await wrong(reading.owner, 3)
    again = await reading.taken_over("syncer-0")
    assert (again.chain.version, again.chain.epoch, again.replica.theta.tolist()) == (2, 2, [2.0] * SIZE)


async def test_a_newcomer_does_not_believe_the_keyframe_after_it(reading: Reading) -> None:
    owner, old = reading.owner, (await reading.another().load(0)).replica.chain
    await owner.store_keyframe()
    await wrong(owner, 3)
    await owner.store_keyframe()
    # before anybody has taken the fragment over
    early = await reading.another().load(0)
    assert (early.replica.chain.head, early.replica.theta.tolist()) == (old.head, [2.0] * SIZE)
    new = await reading.taken_over()
    assert (new.chain.version, new.chain.epoch) == (2, 2)
    # and after: the old keyframe is passed over, whether it is the newest or an older one
    for _ in range(2):
        late = await reading.another().load(0)
        assert (late.replica.chain.head, late.replica.theta.tolist()) == (new.chain.head, [2.0] * SIZE)
        await new.store_keyframe()


async def test_a_keyframe_that_a_learner_vouches_for_is_loaded_at_once(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, store = reading.owner, reading.begun.context.store
    await owner.store_keyframe()
    await right(owner, 3)  # its learner has applied the second version
    loads, load = list[Any](), store.reader.load

    async def counted(fragment: int, genesis: Any, entry_hash: bytes, before: int | None, *others: Any, **how: Any) -> Any:
        loads.append(before)
        return await load(fragment, genesis, entry_hash, before, *others, **how)

    monkeypatch.setattr(store.reader, "load", counted)
    assert (await reading.another().load(0)).replica.chain.head == owner.chain.head
    assert loads == [None]
    await owner.store_keyframe()  # of the third version, which is not applied yet
    assert (await reading.another().load(0)).replica.chain.head == owner.chain.head
    assert loads == [None, None, owner.chain.sequence]


async def test_nothing_is_dropped_but_before_a_keyframe_that_a_learner_vouches_for(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 1e-3, "log.keep_bytes": 0})
    owner, reader = await begun.taken_over(), begun.context.store.reader
    for number in (1, 2, 3):
        await right(owner, number)
    await shorten(begun)
    kept = await reader.keyframe_sequences(0)
    assert len(kept) == 2
    owner.replica.theta[5] += 2.0**-10
    for number in (4, 5, 6):  # of offers that were made before
        late = offer(owner, "ann", -1.0, number, base_version=3, round=owner.chain.version + 1)
        await owner.commit(merge(owner, late), 32)
    await shorten(begun)
    assert (await reader.keyframe_sequences(0))[0] in kept
    again = await LogFollower(begun.context.store, begun.genesis, lambda _: None, get_logger(), in_place=False).load(0)
    assert (again.replica.chain.version, again.replica.theta.tolist()) == (3, [3.0] * SIZE)


def chain_of(replica_state: bytes) -> Chain:
    return Chain(0, 2, 1, b"h" * 32, 7, replica_state)


async def test_an_entry_is_judged_on_a_state_that_is_known_to_be_right(reading: Reading) -> None:
    replica = (await reading.another().load(0)).replica
    before, head = replica.theta.copy(), replica.chain.head
    bad = await wrong(reading.owner, 3)
    entries = reading.begun.context.store.entries
    end = await reading.begun.context.store.reader.end_sequence(0)
    [entry] = [e async for e in entries.follow([0], replica.chain.sequence + 1, reading.refusals.append, end)]
    judged = entry.record, entry.entry_hash, entry.sequence, entry.body
    assert entry.entry_hash == bad
    for _ in range(2):
        with pytest.raises(WrongEntryError):
            replica.judge(*judged)
        assert (replica.theta.tolist(), replica.chain.head) == (before.tolist(), head)
    momentum = replica.momentum.copy()
    replica.momentum[3] = 1.0  # this copy says nothing any more
    with pytest.raises(StateError) as raised:
        replica.judge(*judged)
    assert raised.value.sequence == entry.sequence
    replica.momentum[:] = momentum
    assert outer.state_hash(replica.theta, replica.momentum) == replica.chain.state_hash
    takeover = msgspec.structs.replace(
        reading.owner.marker("takeover"), previous=head, version=2, state_hash=b"x" * 32,
        tokens_merged=replica.chain.tokens_merged,
    )  # fmt: skip
    with pytest.raises(ChainError, match="the state before where it makes no version"):
        replica.judge(takeover, b"t" * 32, 99, None)


async def test_learners_that_go_on_with_an_entry_vouch_for_it(reading: Reading) -> None:
    follower, owner = reading.follower, reading.owner
    await follower.load(0)
    await wrong(owner, 3)
    late = offer(owner, "bob", -1.0, 1, base_version=2)  # of before it
    await owner.commit(merge(owner, offer(owner, "ann", -1.0, 4), late), 32)
    async with contextlib.aclosing(follower.follow([0])) as events:
        assert isinstance(await coming(events), Wrong)
        new = await reading.taken_over()
        await coming(events)
        assert follower.wrong[0].vouchers == {"ann"}
        new.replica.theta[5] += 1.0
        await right(new, 3)
        assert isinstance(await coming(events), Wrong)
    assert follower.wrong[0].vouchers == set()


def test_wrong_entries_are_known_by_what_they_follow_and_only_so_many(reading: Reading) -> None:
    known, record = WrongEntries(), reading.owner.marker("close")
    known.add(record, b"a" * 32)
    follows = msgspec.structs.replace(record, previous=b"a" * 32)
    assert not known.note(record, b"c" * 32)
    assert known.note(follows, b"b" * 32)
    assert known.note(msgspec.structs.replace(record, previous=b"b" * 32), b"d" * 32)
    assert [name in known for name in (b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32)] == [True, True, False, True]
    chain = chain_of(b"s" * 32)
    assert known.stand_after(chain) is record
    chain.epoch = record.epoch + 1
    assert known.stand_after(chain) is None
    for number in range(2000):
        known.add(record, number.to_bytes(32, "big"))
    assert b"a" * 32 not in known
    assert (1999).to_bytes(32, "big") in known
