"""The follower of a log: folded, refused, loaded again; and the copies that a syncer keeps with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.made.log_versions import log_of_versions
from tests.pace import DEADLINE_S

from diloco.core.log.fold import Replica
from diloco.core.syncer import merging
from diloco.log.follower import Event, FollowedEntry, LogFollower, Reloaded
from diloco.log.log import Log
from diloco.log.stream import RefusedEntry
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.entries import Genesis
from diloco_syncer.owning.copies import Copies

pytestmark = pytest.mark.services


Events = AsyncIterator[Event]


class Followed:
    """A log of three versions, a follower and a writer."""

    def __init__(self, log: Log, genesis: tuple[Genesis, bytes], newest: Replica, *, in_place: bool = False) -> None:
        self.log, self.newest, self.refusals = log, newest, list[RefusedEntry]()
        self.follower = LogFollower(log, genesis, self.refusals.append, get_logger(), in_place=in_place)

    async def append(self, epoch: int | None = None) -> int:
        """Append a takeover behind the newest entry; with ``epoch``, one that does not follow it."""
        record = merging.make_marker(self.newest, "takeover", run_settings(), syncer="s", now_s=0.0)
        chain, head = self.newest.chain, await self.log.reader.head_sequence(0)
        if epoch is not None:
            return await self.log.writer.append_record(msgspec.structs.replace(record, epoch=epoch), b"", [], head)
        sequence = await self.log.writer.append_record(record, b"", [], head)
        chain.advance(record, framing.hash_of(record, self.log.run), sequence)
        return sequence


@pytest.fixture
async def followed(link: NatsTransport) -> Followed:
    log, genesis, states = await log_of_versions(link, 3, {2})
    return Followed(log, genesis, states[-1])


async def coming(events: Events) -> Event:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(events)


async def test_entries_that_follow_are_folded_and_those_that_do_not_are_told(followed: Followed) -> None:
    copy = await followed.follower.load(0)
    assert (copy.replica.chain.version, copy.keyframe_version, copy.residual) == (3, 2, None)
    theta = copy.replica.theta
    async with contextlib.aclosing(followed.follower.follow([0])) as events:
        stray = await followed.append(epoch=0)
        taken = await followed.append()

        event = await coming(events)

    assert isinstance(event, FollowedEntry)
    assert (event.entry.sequence, event.copy.replica.chain.epoch) == (taken, 1)
    assert [(refusal.sender, refusal.sequence) for refusal in followed.refusals] == [("s", stray)]
    assert event.copy.replica.theta is theta  # no version was made


async def test_a_fragment_whose_entries_are_missing_is_loaded_again(followed: Followed) -> None:
    follower, newest = followed.follower, followed.newest
    copy = await follower.load(0)
    first, second = [await followed.log.reader.state_at(0, version, *follower.genesis) for version in (1, 2)]
    follower.copies[0] = replace(copy, replica=first)  # as of when the second version, purged now, had not been read
    await followed.log.writer.append_keyframe(newest, np.zeros(100, np.float32), None)
    assert isinstance(followed.log.transport, NatsTransport)
    await streams.drop(followed.log.transport, followed.log.subjects.log_stream, [second.chain.sequence])

    async with contextlib.aclosing(follower.follow([0])) as events:
        event = await coming(events)

    assert isinstance(event, Reloaded)
    assert not event.rewound
    assert event.copy.replica.chain == newest.chain
    assert follower.copies[0] is event.copy


async def test_a_log_that_has_lost_its_newest_entry_is_noticed_and_read_again(followed: Followed) -> None:
    follower = followed.follower
    before = await follower.load(0)
    assert await follower.holds()
    assert isinstance(followed.log.transport, NatsTransport)
    await streams.drop(followed.log.transport, followed.log.subjects.log_stream, [before.replica.chain.sequence])
    assert not await follower.holds()

    follower.rewind()
    assert await follower.holds(), "a load that is under way is not begun again"
    async with contextlib.aclosing(follower.follow([0])) as events:
        event = await coming(events)

    assert isinstance(event, Reloaded)
    assert event.rewound
    assert event.copy.replica.chain.version == 2
    assert await follower.holds()


async def test_copies_that_are_kept_are_not_loaded_again(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    log, loads = followed.log, list[int]()
    load = log.reader.load

    async def counted(fragment: int, *genesis: object, residual: bool) -> object:
        loads.append(fragment)
        return await load(fragment, *genesis, residual=residual)  # type: ignore[arg-type]

    monkeypatch.setattr(log.reader, "load", counted)
    copies = Copies(log, followed.follower.genesis, followed.refusals.append, get_logger())

    async def follow_once() -> None:
        ready = asyncio.Event()

        async def folded(*_: object) -> None:
            raise AssertionError("nothing comes")

        following = asyncio.create_task(copies.follow([0], ready.set, folded, lambda: None))
        async with asyncio.timeout(DEADLINE_S):
            await ready.wait()
        following.cancel()
        await asyncio.wait([following])

    await follow_once()
    [kept] = copies.known()
    await follow_once()
    assert copies.known() == [kept]
    assert loads == [0]
    assert isinstance(log.transport, NatsTransport)
    await streams.drop(log.transport, log.subjects.log_stream, [followed.newest.chain.sequence])
    await follow_once()  # the log has lost what the copy holds
    assert loads == [0, 0, 0]  # what nothing follows is compared with what an older keyframe leads to
    assert copies.known()[0].replica.chain.version == 2
