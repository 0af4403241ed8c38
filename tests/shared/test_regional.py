"""One region's log as a new owner finds it: the last entry, and the highest epoch that anybody has claimed."""

from __future__ import annotations

import contextlib
import copy
import uuid
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.fixtures import MakeServer
from tests.made.fragment_vectors import each
from tests.pace import DEADLINE_S

from diloco.core.log.fold import Replica
from diloco.core.log.quorum import CLAIM_STEP, MAX_COPIED, MAX_UNCOMMITTED, LogHead
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import RunError
from diloco.log import entries
from diloco.log.follower import FollowedEntry, LogFollower
from diloco.log.log import Log
from diloco.log.regional import RegionalLog
from diloco.log.stream import RefusedEntry
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.transport import Fence
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Claim, Genesis, Record
from diloco.wire.offers import Offer

pytestmark = pytest.mark.services

SETTINGS = run_settings("decoupled", {"regions.names": ["eu", "us"], "fragments.count": 1, "shards": 1})


@dataclass
class Region:
    """The log of one region; every entry is a takeover."""

    log: Log
    genesis: bytes
    replica: Replica
    fence: int = 0

    async def entry(self, epoch: int) -> None:
        """Store an entry behind whatever is the last message."""
        chain = self.replica.chain
        record: Record = merging.make_marker(self.replica, "takeover", SETTINGS, syncer="s", now_s=0.0, epoch=epoch)
        self.fence = await self.log.writer.append_record(record, b"", [], self.fence)
        chain.advance(record, framing.hash_of(record, self.log.run), self.fence)

    async def version(self, values: NDArray[np.float32]) -> None:
        """Store a version that merges these values, float32 [64], of one learner."""
        chain = self.replica.chain
        number = chain.version + 1
        sent = Offer(
            0,
            "ann",
            1,
            number,
            (1, number - 1),
            number,
            number - 1,
            bytes(32),
            32,
            1,
            1,
            0,
            [],
            Body(0, bytes(32), 0, bytes(8)),
        )
        merge = Merge(number, (RoundOffer(sent, values.view(np.uint8)),), False, 0.0, 0.0)
        record, inline, parts = merging.make_version(
            self.replica, np.zeros(64, np.float32), values, merge, SETTINGS, bits=32, syncer="s", attempt=bytes(8), now_s=0.0
        )
        self.fence = await self.log.writer.append_record(record, inline, parts, self.fence)
        chain.advance(record, framing.hash_of(record, self.log.run), self.fence)

    async def claim(self, epoch: int, **lies: Any) -> None:
        """Store a claim behind whatever is the last message."""
        chain = self.replica.chain
        last = LogHead(chain.epoch, chain.version, False, chain.head, chain.sequence)
        claim = Claim(0, epoch, "mallory", last.epoch, last.version, False, last.entry_hash, last.sequence)
        frame = framing.pack(msgspec.structs.replace(claim, **lies), self.log.run)
        subject = self.log.subjects.record(0)
        self.fence = await self.log.transport.append(
            subject, frame, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S
        )

    async def found(self, known_epoch: int = 0) -> tuple[int, bytes, int]:
        """Return the highest epoch, the last entry, and the last message."""
        end = await self.log.region.log_end(0, self.genesis, known_epoch)
        return end.epoch, end.last.entry_hash, end.sequence


@pytest.fixture
async def region(link: NatsTransport) -> Region:
    fragments = build_map([TensorSpec("w", (64,))], 1)
    name = f"run-{uuid.uuid4().hex[:8]}"
    log = Log(link, name, framing.run_id(name, SETTINGS.digest()), fragments, SETTINGS)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    await log.writer.found("ann", SETTINGS.digest(), each([np.zeros(64, np.float32)]))
    genesis = await log.reader.genesis()
    assert genesis is not None
    return Region(log, genesis[1], (await log.reader.load(0, *genesis)).replica)


async def test_an_old_entry_that_is_stored_once_more_hides_none_behind_it(region: Region) -> None:
    await region.entry(1)
    old = await region.log.transport.last(region.log.subjects.log_stream, region.log.subjects.record(0))
    assert old is not None
    await region.entry(2)
    epoch, newest, _ = await region.found()
    await region.log.transport.append(
        region.log.subjects.record(0), old.data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S
    )
    assert (await region.found())[:2] == (epoch, newest) == (2, region.replica.chain.head)


async def test_before_any_entry_there_is_genesis(region: Region) -> None:
    assert await region.found() == (0, region.genesis, 0)
    await region.claim(1)
    assert await region.found() == (1, region.genesis, region.fence)


async def test_a_claim_is_not_hidden_by_entries_that_its_claimant_has_brought_there(region: Region) -> None:
    await region.entry(1)
    await region.claim(7)
    for _ in range(MAX_COPIED):
        await region.entry(1)
    assert await region.found() == (7, region.replica.chain.head, region.fence)
    await region.entry(7)
    assert await region.found() == (7, region.replica.chain.head, region.fence)


@pytest.mark.parametrize("lies", [{}, {"entry_epoch": 2**62 - 1}, {"entry_hash": b"x" * 32, "entry_version": 2**60}])
async def test_nobody_can_claim_what_nobody_else_could_claim_after(region: Region, lies: dict[str, Any]) -> None:
    await region.entry(1)
    await region.claim(2**62, **lies)
    assert await region.found() == (1, region.replica.chain.head, region.fence)
    # one after the other they go up by so much at most
    for steps in (1, 2, 3):
        await region.claim(1 + steps * CLAIM_STEP, **lies)
        assert await region.found() == (1 + steps * CLAIM_STEP, region.replica.chain.head, region.fence)
    await region.claim(2 + 4 * CLAIM_STEP)
    assert (await region.found())[0] == 1 + 3 * CLAIM_STEP


async def test_an_entry_that_no_reader_accepts_for_its_epoch_is_not_gone_on_with(region: Region) -> None:
    await region.entry(1)
    head = region.replica.chain.head
    await region.entry(2**62)
    assert await region.found() == (1, head, region.fence)
    await region.claim(2)
    assert await region.found(known_epoch=1) == (2, head, region.fence)


async def test_a_region_that_was_away_is_claimed_with_an_epoch_that_others_have_come_to(region: Region) -> None:
    await region.entry(1)
    await region.claim(2**30)  # where syncers know of epoch 2^30 - 1
    assert (await region.found(known_epoch=2**30 - 1))[0] == 2**30


async def test_the_end_of_a_long_log_is_found_by_its_newest_entries_alone(region: Region) -> None:
    """They may have large bodies, and the link be thin. False notices make nothing but work."""
    log, values = region.log, np.arange(64, dtype=np.float32)
    for version in range(1, 61):
        await region.version(values)
        await log.region.notice(0, version, 0, region.replica.chain.head, region.fence)
    end = await log.region.log_end(0, region.genesis, 0)
    assert (end.last.version, end.last.entry_hash, end.sequence) == (60, region.replica.chain.head, region.fence)
    assert [head.record.version for head in end.read] == list(range(60 - MAX_COPIED, 61))

    for lie in ((0, 44, 0, b"?" * 32, region.fence), (0, 44, 0, b"?" * 32, 2**62), (0, 2**60, 0, b"?" * 32, 1)):
        await log.region.notice(*lie)
        again = await log.region.log_end(0, region.genesis, 0)
        assert (again.last, again.epoch, again.sequence) == (end.last, 0, end.sequence)
        assert len(again.read) > MAX_COPIED


@pytest.mark.parametrize("late", ["nothing", "a claim", "an entry"])
@pytest.mark.parametrize("versions", [5, 40], ids=["few versions", "many versions"])
async def test_a_lost_log_is_brought_from_a_keyframe_or_from_all_entries_if_few(
    region: Region, make_server: MakeServer, versions: int, late: str
) -> None:
    """What is there then is whole: a reader folds it to the same state, and it has the newest entries, and their notices.

    A message that was sent before the loss may be stored before all that is brought.
    """
    log, url, values = region.log, make_server().url, np.arange(64, dtype=np.float32)
    for version in range(1, versions + 1):
        await region.version(values)
        await log.region.notice(0, version, 0, region.replica.chain.head, region.fence)
        if version in (3, 30):
            await log.writer.append_keyframe(region.replica, None, Fence(log.subjects.record(0), region.fence))
    genesis, frame = await log.reader.genesis(), await log.transport.last(log.subjects.log_stream, log.subjects.genesis)
    assert genesis is not None
    assert frame is not None
    link = await NatsTransport.open(url, url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    try:
        home = Log(link, log.subjects.run, log.run, log.map, SETTINGS)
        await link.ensure_stream(home.subjects.log_stream, home.subjects.log_filters())
        end, notice = await log.region.log_end(0, region.genesis, 0), await log.region.furthest_notice(0)
        assert notice is not None
        if late == "a claim":
            await home.region.claim(0, 1, "s", LogHead(0, 0, False, region.genesis, 0), 0)
        elif late == "an entry":
            first = await anext(log.entries.stored(0, 1, end.sequence))
            await home.region.append_packed(first, 0)
        for _ in range(2):  # once more changes nothing
            await home.region.bring_from(log.region, 0, end, {notice.entry_hash}, *genesis)
        await home.writer.append_genesis(frame.data)
        stop, refused = await home.reader.end_sequence(0), list[RefusedEntry]()
        heads = [head.record.version async for head in home.entries.heads(refused.append, stop_sequence=stop)]
        assert refused == []
        oldest = 30 if versions == 40 else 3 if late == "an entry" else 1  # out of place, it makes a keyframe necessary
        assert heads == list(range(oldest, versions + 1))
        loaded = await LogFollower(home, genesis, lambda refusal: None, get_logger(), in_place=True).load(0)
        chain = region.replica.chain
        assert (loaded.replica.chain.version, loaded.replica.chain.state_hash) == (versions, chain.state_hash)
    finally:
        await link.close()


async def test_uncommitted_entries_take_bounded_memory_and_are_read_again_when_they_are_committed(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any syncer may store entries with bodies: until a notice comes, readers hold them back."""
    log, chain = region.log, region.replica.chain
    kept = [entries.Bodies(300)]
    monkeypatch.setattr(entries, "Bodies", lambda most_bytes: kept[0])
    values = np.arange(64, dtype=np.float32)
    for version in range(1, 4):
        await region.version(values + version)
    await log.region.notice(0, 3, chain.epoch, chain.head, region.fence)
    stop = await log.reader.end_sequence(0)

    refused: list[RefusedEntry] = []
    read = [entry async for entry in log.entries.follow([0], 1, refused.append, stop)]

    assert [None if entry.body is None else entry.body.tobytes() for entry in read] == [
        (values + n).tobytes() for n in (1, 2, 3)
    ]
    assert (refused, kept[0].kept_bytes) == ([], 0)


async def test_a_log_that_was_copied_without_notices_between_is_whole_for_all_who_read_it_to_its_end(region: Region) -> None:
    """Syncers of version 0.2 copied any number of entries to a region that came back, and told of the last one alone."""
    log, chain, genesis = region.log, region.replica.chain, await region.log.reader.genesis()
    assert genesis is not None
    for epoch in range(1, MAX_UNCOMMITTED + 10):
        await region.entry(epoch)
    await log.region.notice(0, 0, chain.epoch, chain.head, region.fence)

    refused: list[RefusedEntry] = []
    loaded = await LogFollower(log, genesis, refused.append, get_logger(), in_place=True).load(0)
    heads = [head async for head in log.entries.heads(refused.append, stop_sequence=await log.reader.end_sequence(0))]

    assert (loaded.replica.chain.epoch, loaded.replica.chain.head) == (chain.epoch, chain.head)
    assert [head.record.epoch for head in heads] == list(range(1, chain.epoch + 1))
    assert refused == []


async def test_what_is_no_entry_and_no_notice_stops_no_owner(region: Region) -> None:
    log, names = region.log, region.log.subjects

    async def garbage(subject: str) -> int:
        return await log.transport.append(subject, b"garbage", message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)

    assert await log.region.furthest_notice(0) is None
    await region.entry(1)
    first = region.replica.chain.head
    await garbage(names.commit_notice(0))
    assert await log.region.furthest_notice(0) is None
    await log.region.notice(0, 0, 1, first, region.fence)
    region.fence = await garbage(names.record(0))
    await garbage(names.commit_notice(0))
    await region.entry(2)
    notice = await log.region.furthest_notice(0)
    assert notice is not None
    assert notice.entry_hash == first
    assert [p.entry_hash async for p in log.entries.stored(0, 1, region.fence)] == [first, region.replica.chain.head]
    assert await region.found() == (2, region.replica.chain.head, region.fence)
    await log.region.notice(0, 1, 2, region.replica.chain.head, region.fence)
    assert await log.region.before(0, 1) == notice.sequence


async def test_false_notices_lead_no_owner_astray(region: Region) -> None:
    """Any syncer may store notices. An owner goes by those whose entry is where they say."""
    log, heads = region.log, list[tuple[bytes, int]]()
    for epoch in (1, 2, 3):
        await region.entry(epoch)
        heads.append((region.replica.chain.head, region.fence))
    first, second, third = heads
    await log.region.notice(0, 0, 1, *first)
    await log.region.notice(0, 0, 2, *second)
    lies: list[tuple[int, int, int, bytes, int]] = [
        (0, 0, 3, b"?" * 32, third[1]),  # of no entry
        (0, 0, 3, third[0], 2**62),  # nowhere
        (0, 0, 3, third[0], second[1]),  # elsewhere
        (0, 2**61, 3, third[0], third[1]),  # of another version
    ]
    for lie in lies:
        await log.region.notice(*lie)
        newest = await log.region.furthest_notice(0)
        assert newest is not None
        assert (newest.entry_hash, newest.sequence) == second
        assert await log.region.before(0, 1) == second[1]
    await log.region.notice(0, 0, 3, *third)
    assert await log.region.before(0, 1) == third[1]


async def test_a_notice_that_is_stored_late_hides_none_of_a_later_entry(region: Region) -> None:
    """Its sender gave up long before, and notices of later entries were stored. Others may have stored false ones between."""
    log, heads = region.log, list[tuple[bytes, int]]()
    for epoch in (1, 2, 3):
        await region.entry(epoch)
        heads.append((region.replica.chain.head, region.fence))
        await log.region.notice(0, 0, epoch, *heads[-1])
    first, second, third = heads
    for late in ((1, *first), (2, *second), (9, *first), (3, b"?" * 32, third[1]), (1, *first)):
        await log.region.notice(0, 0, *late)
        notice = await log.region.furthest_notice(0)
        assert notice is not None
        assert (notice.epoch, notice.entry_hash, notice.sequence) == (3, *third)


async def test_the_notice_of_a_wrong_entry_is_not_the_furthest_once_the_log_has_gone_on_from_before_it(region: Region) -> None:
    """An owner leaves wrong entries out, so its takeover has a smaller version than they have, and a higher epoch."""
    log, values = region.log, np.arange(64, dtype=np.float32)
    await region.version(values)
    before = copy.deepcopy(region.replica)
    await region.version(values)
    await log.region.notice(0, 2, 0, region.replica.chain.head, region.fence)
    region.replica = before
    await region.entry(1)
    await log.region.notice(0, 1, 1, region.replica.chain.head, region.fence)
    notice = await log.region.furthest_notice(0)
    assert notice is not None
    assert (notice.version, notice.epoch, notice.entry_hash) == (1, 1, region.replica.chain.head)


@pytest.mark.parametrize("loaded_first", [True, False])
async def test_an_entry_that_a_region_is_given_twice_is_no_wrong_one(region: Region, loaded_first: bool) -> None:
    """An owner, and a syncer of the region, may each give it a snapshot, and so the entry that it stands after."""
    log, chain, genesis = region.log, region.replica.chain, await region.log.reader.genesis()
    assert genesis is not None
    refused: list[RefusedEntry] = []
    follower = LogFollower(log, genesis, refused.append, get_logger(), in_place=True)
    await region.entry(1)
    await log.region.notice(0, 0, 1, chain.head, region.fence)
    if loaded_first:  # and meets it as it follows; else as it loads
        await follower.load(0)
    once = await log.stream.get(region.fence)
    assert once is not None
    region.fence = again = await log.writer.append(log.subjects.record(0), once.data, [], b"", None)
    await log.region.notice(0, 0, 1, chain.head, again)
    if not loaded_first:
        assert (await follower.load(0)).replica.chain.sequence == again
    await region.entry(2)
    await log.region.notice(0, 0, 2, chain.head, region.fence)
    async with contextlib.aclosing(follower.follow([0])) as events:
        event = await anext(events)
    assert isinstance(event, FollowedEntry)
    assert (event.copy.replica.chain.epoch, event.copy.replica.chain.sequence, refused) == (2, region.fence, [])


class Overtaken:
    """A region's log that has dropped version 0; while that is looked for, an owner gives ``home`` a keyframe, and goes on."""

    def __init__(self, log: Log, home: Log) -> None:
        self.log, self.home, self.reader = log, home, self

    async def load_first(self, fragment: int, genesis: Genesis, check: bytes) -> None:
        await self.install_snapshot(fragment, self.home.region, 0)
        end = await self.home.region.log_end(fragment, check, 0)
        await self.home.region.claim(fragment, end.epoch + 1, "s", end.last, end.sequence)
        raise RunError(f"fragment {fragment} has no keyframe of version 0")

    async def install_snapshot(self, fragment: int, to: RegionalLog, expected_sequence: int) -> object:
        return await self.log.region.install_snapshot(fragment, to, expected_sequence)


async def test_a_region_that_begins_again_gets_no_snapshot_behind_one_that_an_owner_gave_it(
    region: Region, make_server: MakeServer
) -> None:
    log, url = region.log, make_server().url
    await region.entry(1)
    await log.writer.append_keyframe(region.replica, None, Fence(log.subjects.record(0), region.fence))
    genesis = await log.transport.last(log.subjects.log_stream, log.subjects.genesis)
    assert genesis is not None
    link = await NatsTransport.open(url, url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    try:
        home = Log(link, log.subjects.run, log.run, log.map, SETTINGS)
        await link.ensure_stream(home.subjects.log_stream, home.subjects.log_filters())
        source = cast(RegionalLog, Overtaken(log, home))
        await home.region.begin_from(source, genesis.data)
        assert await home.reader.genesis() is None  # it begins again, and finds the owner's
        await home.region.begin_from(source, genesis.data)
        assert await home.reader.genesis() is not None
        stored = [message.sequence async for message in home.stream.by_now(home.subjects.record(0))]
        assert len(stored) == 2  # the keyframe's entry, and the owner's claim
    finally:
        await link.close()
