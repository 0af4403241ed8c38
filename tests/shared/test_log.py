"""Loading a fragment from a log whose keyframes are damaged: an older one that is whole serves, and it is said so."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct
from structlog.testing import capture_logs
from tests.made.fragment_vectors import each
from tests.made.log_versions import log_of_versions
from tests.pace import DEADLINE_S

from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.fold import Replica
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import outer
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import MessageError, RunError
from diloco.log import stream
from diloco.log.log import Log
from diloco.log.reader import LoadedState
from diloco.log.shortening import LogShortener
from diloco.log.stream import RefusedEntry
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.tasks import end
from diloco.settings.presets import run_settings
from diloco.settings.run import LogSettings
from diloco.transport import Stored
from diloco.wire import framing, subjects
from diloco.wire.body import PART_BYTES, Body
from diloco.wire.entries import Genesis, Keyframe
from diloco.wire.offers import Offer

pytestmark = pytest.mark.services

SETTINGS = run_settings()
SIZE = 360_000  # parameters: a keyframe of noise has three parts


@dataclass
class Written:
    """A log of one fragment, of takeovers alone: epoch after epoch of the same parameters."""

    log: Log
    genesis: tuple[Genesis, bytes]
    replica: Replica
    first: int  # sequence of the keyframe of version 0
    heads: list[int] = field(default_factory=list)  # of keyframes, by epoch

    async def entry(self) -> None:
        """One more entry, and a keyframe of it."""
        chain = self.replica.chain
        record = merging.make_marker(self.replica, "takeover", SETTINGS, syncer="s", now_s=0.0)
        sequence = await self.log.writer.append_record(record, b"", [], await self.log.reader.head_sequence(0))
        chain.advance(record, framing.hash_of(record, self.log.run), sequence)
        self.heads.append(await self.log.writer.append_keyframe(self.replica, None, None))

    async def load(self) -> tuple[LoadedState, list[tuple[int, str]]]:
        """What is loaded, and what is logged as refused."""
        with capture_logs() as logs:
            loaded = await self.log.reader.load(0, *self.genesis)
        return loaded, [(e["sequence"], e["reason"]) for e in logs if e["event"] == "keyframe_refused"]

    async def spoil(self, forge: Callable[[bytes], bytes]) -> int:
        """Store a newer keyframe: what a process makes of the newest."""
        transport, head = self.log.transport, self.log.subjects.keyframe(0)
        newest = await transport.last(self.log.subjects.log_stream, head)
        assert newest is not None
        return await transport.append(head, forge(newest.data), message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)

    async def drop(self, *sequences: int) -> None:
        assert isinstance(self.log.transport, NatsTransport)
        await streams.drop(self.log.transport, self.log.subjects.log_stream, sequences)

    async def part_of(self, head: int) -> int:
        """Sequence of the keyframe's second part."""
        stored = await self.log.transport.get(self.log.subjects.log_stream, head)
        assert stored is not None
        keyframe, _, _ = framing.unpack(stored.data, Keyframe, self.log.run)
        assert keyframe.body.parts == 3
        return head - 2


@pytest.fixture
async def written(link: NatsTransport) -> Written:
    """Version 0, and three entries with a keyframe each."""
    fragments = build_map([TensorSpec("w", (SIZE,))], 1)
    name = f"run-{uuid.uuid4().hex[:8]}"
    log = Log(link, name, framing.run_id(name, SETTINGS.digest()), fragments, SETTINGS)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    await log.writer.found("ann", SETTINGS.digest(), each([np.random.default_rng(1).normal(size=SIZE).astype(np.float32)]))
    genesis = await log.reader.genesis()
    assert genesis is not None
    [first] = await log.reader.keyframe_sequences(0)
    made = Written(log, genesis, (await log.reader.load(0, *genesis)).replica, first)
    for _ in range(3):
        await made.entry()
    return made


async def entry_of(log: Log, head: int) -> int:
    """Sequence of the entry that a keyframe stands after."""
    stored = await log.stream.get(head)
    assert stored is not None
    return framing.unpack(stored.data, Keyframe, log.run)[0].entry_sequence


def flipped(raw: bytes) -> bytes:
    return raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]


async def test_the_newest_is_loaded_where_it_is_whole(written: Written) -> None:
    loaded, refused = await written.load()
    assert (loaded.replica.chain.epoch, loaded.keyframe_sequence, loaded.refused) == (3, written.heads[2], ())
    assert refused == []


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (flipped, "hash"),
        (lambda raw: raw[: len(raw) // 2], "keyframe: "),
        (lambda raw: b"", "keyframe: "),
        (lambda raw: raw.replace(b"DLC\x02", b"DLC\x01"), "protocol version 1, expected 2"),
    ],
)
async def test_a_damaged_one_is_named_once_and_the_one_before_serves(
    written: Written, forge: Callable[[bytes], bytes], said: str
) -> None:
    bad = await written.spoil(forge)

    loaded, refused = await written.load()

    assert (loaded.replica.chain.epoch, loaded.keyframe_sequence, loaded.refused) == (3, written.heads[2], (bad,))
    [(sequence, reason)] = refused
    assert sequence == bad
    assert said in reason
    newest = await written.log.reader.newest_keyframe(0)
    assert newest is not None
    assert newest[1] == written.heads[2]
    assert (await written.load())[1] == []  # it was said before


async def test_one_whose_part_is_missing_likewise(written: Written) -> None:
    await written.drop(await written.part_of(written.heads[2]))

    loaded, refused = await written.load()

    assert (loaded.replica.chain.epoch, loaded.refused) == (2, (written.heads[2],))
    assert refused == [(written.heads[2], "fragment 0, keyframe of version 0: part 2 of 3 is missing")]
    np.testing.assert_array_equal(loaded.replica.theta, written.replica.theta, strict=True)


async def test_version_0_serves_while_all_that_follows_is_there(written: Written) -> None:
    for head in written.heads:
        await written.drop(await written.part_of(head))

    loaded, refused = await written.load()

    assert (loaded.replica.chain.epoch, loaded.replica.chain.sequence) == (0, 0)
    assert [sequence for sequence, _ in refused] == written.heads[::-1]


async def test_one_whose_entries_were_purged_does_not_serve(written: Written) -> None:
    log = written.log
    third = await log.reader.head_sequence(0)
    await log.transport.purge(log.subjects.log_stream, log.subjects.record_tree(0), third)
    await written.drop(await written.part_of(written.heads[2]))

    with pytest.raises(RunError, match=r"fragment 0 has no keyframe that can be loaded: .*part 2 of 3") as caught:
        await written.load()

    assert str(caught.value).count("the entries after it were purged") == 3  # the two before, and version 0


async def test_what_is_gone_is_said(written: Written) -> None:
    await written.drop(*written.heads, written.first)
    with pytest.raises(RunError, match=r"fragment 0 has no keyframe.*diloco up --resume"):
        await written.load()


@contextlib.asynccontextmanager
async def shortening(log: Log, judged: int, kept: int = 2) -> AsyncIterator[LogShortener]:
    """A shortener that has noted all keyframes of the log."""
    settings = LogSettings(keep_keyframes=kept, keep_bytes=0)
    shortener = LogShortener(log, lambda: settings, {0: judged}, get_logger())
    following = asyncio.ensure_future(shortener.follow())
    stored = await log.reader.keyframe_sequences(0)
    async with asyncio.timeout(DEADLINE_S):
        while shortener.noted(0) != stored:
            await asyncio.sleep(0.01)
    yield shortener
    await end(following)


async def test_the_log_is_dropped_before_the_oldest_keyframe_that_stays(written: Written) -> None:
    head = written.log.subjects.record(0)
    entries = [stored.sequence async for stored in written.log.stream.by_now(head)]
    async with shortening(written.log, judged=0) as shortener:
        await shortener.shorten()
        assert await written.log.reader.keyframe_sequences(0) == written.heads[1:]
        assert [stored.sequence async for stored in written.log.stream.by_now(head)] == entries[1:]
        await shortener.shorten()  # there is nothing more
        await written.entry()
        async with asyncio.timeout(DEADLINE_S):
            while shortener.noted(0) != written.heads[1:]:
                await asyncio.sleep(0.01)
        await shortener.shorten()
    assert await written.log.reader.keyframe_sequences(0) == written.heads[2:]
    loaded, refused = await written.load()
    assert (loaded.replica.chain.epoch, refused) == (4, [])
    assert await written.log.reader.genesis() is not None


async def test_nothing_is_dropped_before_a_keyframe_that_no_learner_has_folded(written: Written) -> None:
    async with shortening(written.log, judged=-1) as shortener:
        await shortener.shorten()
    assert await written.log.reader.keyframe_sequences(0) == [written.first, *written.heads]


async def test_more_keyframes_stay_while_learners_are_behind(link: NatsTransport) -> None:
    """With a keyframe after each version, the second newest may be of one that no learner has folded yet."""
    log, genesis, states = await log_of_versions(link, 6, {1, 2, 3, 5, 6})
    keyframes = await log.reader.keyframe_sequences(0)
    async with shortening(log, judged=4) as shortener:
        await shortener.shorten()
    assert await log.reader.keyframe_sequences(0) == keyframes[3:]
    assert (await log.reader.state_at(0, 3, *genesis)).state().tobytes() == states[3].state().tobytes()


async def test_keyframes_that_are_dropped_while_they_are_read_are_not_damaged(written: Written) -> None:
    log, refused = written.log, list[RefusedEntry]()
    reading = log.reader.keyframes(0, refused.append)
    found = [(await anext(reading)).keyframe_sequence]
    await log.writer.purge_below(0, await entry_of(log, written.heads[2]))
    found += [loaded.keyframe_sequence async for loaded in reading]
    assert (found, refused) == ([written.heads[0], written.heads[2]], [])


JUNK: list[Callable[[bytes], bytes]] = [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: raw + b"x"]


@pytest.mark.parametrize("forge", [*JUNK, None])
async def test_keyframes_of_a_stolen_syncer_have_nothing_dropped(
    written: Written, forge: Callable[[bytes], bytes] | None
) -> None:
    """With heads of which all is right but the parts, or of nothing at all."""
    attempt = bytes(8)

    def without_parts(raw: bytes) -> bytes:
        keyframe, _, inline = framing.unpack(raw, Keyframe, written.log.run)
        return framing.pack(
            replace_struct(keyframe, body=replace_struct(keyframe.body, attempt=attempt)), written.log.run, inline
        )

    for _ in range(3):
        await written.spoil(forge or without_parts)
    async with shortening(written.log, judged=0) as shortener:
        with capture_logs() as logs:
            await shortener.shorten()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["keyframe_refused"] * 3
    assert (await written.log.reader.keyframe_sequences(0))[:2] == written.heads[1:]
    loaded, _ = await written.load()
    assert (loaded.replica.chain.epoch, loaded.keyframe_sequence) == (3, written.heads[2])


async def test_damaged_ones_do_not_count_among_those_that_stay(written: Written) -> None:
    await written.drop(await written.part_of(written.heads[1]))
    async with shortening(written.log, judged=0) as shortener:
        await shortener.shorten()
    assert await written.log.reader.keyframe_sequences(0) == written.heads


async def test_nothing_is_dropped_where_the_log_has_lost_a_keyframe_that_was_whole(written: Written) -> None:
    async with shortening(written.log, judged=-1) as shortener:
        await shortener.shorten()  # reads them
        await written.drop(written.heads[2])
        shortener.judged = {0: 0}
        await shortener.shorten()
    assert await written.log.reader.keyframe_sequences(0) == [written.first, *written.heads[:2]]


async def test_messages_that_are_lost_while_they_are_read_are_left_out(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_stream = written.log.reader.stream
    newest = await log_stream.last(log_stream.subjects.keyframe(0))
    await written.drop(written.heads[2])  # the server goes back after it was asked for the newest

    async def last(subject: str) -> Stored | None:
        return newest

    monkeypatch.setattr(log_stream, "last", last)
    monkeypatch.setattr(stream, "LOOK_S", 0.05)
    async with asyncio.timeout(DEADLINE_S):
        assert await written.log.reader.keyframe_sequences(0) == [written.first, *written.heads[:2]]


async def test_a_message_that_is_slow_to_come_is_looked_for_ever_more_rarely(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look brings that message once more: a process that has no time to read would have nothing else to read."""
    log_stream, looked_s = written.log.reader.stream, [time.monotonic()]
    stored = await log_stream.last(log_stream.subjects.keyframe(0))
    assert stored is not None

    async def pull(*_: Any, **__: Any) -> AsyncIterator[Stored]:
        await asyncio.Event().wait()
        yield stored

    async def get(sequence: int) -> Stored | None:
        looked_s.append(time.monotonic())
        return stored

    monkeypatch.setattr(log_stream.transport, "pull", pull)
    monkeypatch.setattr(log_stream, "get", get)
    monkeypatch.setattr(stream, "LOOK_S", 0.05)
    reading = asyncio.ensure_future(written.log.reader.keyframe_sequences(0, stored))
    async with asyncio.timeout(DEADLINE_S):
        while len(looked_s) < 5:
            await asyncio.sleep(0.01)
    await end(reading)
    assert [after - before >= 0.05 * 2**i for i, (before, after) in enumerate(pairwise(looked_s))] == 4 * [True]


async def test_the_state_at_a_version_is_what_it_was_then(link: NatsTransport) -> None:
    log, genesis, states = await log_of_versions(link, 6, {2, 4})
    for version in (0, 1, 2, 3, 4, 5, 6):
        past = await log.reader.state_at(0, version, *genesis)
        assert past.chain.version == version
        assert past.state().tobytes() == states[version].state().tobytes()
    with pytest.raises(RunError, match="fragment 0: version 7 is not in the log, whose newest version is 6"):
        await log.reader.state_at(0, 7, *genesis)


async def test_what_was_purged_is_not_made_up(link: NatsTransport) -> None:
    log, genesis, states = await log_of_versions(link, 6, {2, 4})
    second = (await log.reader.keyframe_sequences(0))[1]
    await log.writer.purge_below(0, await entry_of(log, second))
    assert (await log.reader.state_at(0, 3, *genesis)).state().tobytes() == states[3].state().tobytes()
    for version in (0, 1):
        with pytest.raises(RunError, match=f"version {version} is not in the log, which has those from 2 to the newest"):
            await log.reader.state_at(0, version, *genesis)


async def test_a_rollback_is_appended_and_loaded_like_any_entry(link: NatsTransport) -> None:
    log, genesis, states = await log_of_versions(link, 3, set())
    replica, residual, past = states[-1], np.ones(100, np.float32), await log.reader.state_at(0, 1, *genesis)
    record, inline, parts = merging.make_rollback(
        replica, residual, past, 5, run_settings(), syncer="s", attempt=bytes(8), now_s=0.0
    )
    await log.writer.append_record(record, inline, parts, replica.chain.sequence)
    again = await log.reader.state_at(0, 4, *genesis)
    assert again.state().tobytes() == states[1].state().tobytes()
    assert (again.chain.floor, again.chain.change, again.chain.state_hash) == (4, 5, states[1].chain.state_hash)
    await log.writer.append_keyframe(again, None, None)
    assert (await log.reader.load(0, *genesis)).replica.chain == again.chain
    # what was undone is still there to go back to
    assert (await log.reader.state_at(0, 3, *genesis)).chain.head == record.previous


async def test_a_keyframe_whose_state_is_not_its_entrys_is_refused(written: Written) -> None:
    """Anyone who may write keyframes cannot give those who join other parameters than the log's."""
    true = written.replica
    theta = true.theta + np.float32(1)
    chain = replace(true.chain, state_hash=outer.state_hash(theta, true.momentum))
    sequence = await written.log.writer.append_keyframe(Replica(chain, theta, true.momentum, true.optimizer), None, None)
    loaded, refused = await written.load()
    assert loaded.keyframe_sequence == written.heads[-1]
    assert [number for number, _ in refused] == [sequence]


async def store(log: Log, subject: str, data: bytes) -> int:
    return await log.transport.append(subject, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)


async def test_what_is_stored_later_on_the_subject_of_a_part_changes_no_keyframe(written: Written) -> None:
    """Any syncer may store parts of keyframes, and sees the attempts of those that are there."""
    log, head = written.log, written.log.subjects.keyframe(0)
    for sequence in (written.first, *written.heads):
        stored = await log.transport.get(log.subjects.log_stream, sequence)
        assert stored is not None
        keyframe, _, _ = framing.unpack(stored.data, Keyframe, log.run)
        for garbage in (keyframe.body.attempt + b"garbage", b"", b"x"):
            await store(log, subjects.log_part(head, keyframe.body.attempt, 1), garbage)

    loaded, refused = await written.load()

    assert (loaded.keyframe_sequence, refused) == (written.heads[-1], [])
    assert loaded.replica.theta.tobytes() == written.replica.theta.tobytes()


@pytest.mark.parametrize("later", [b"", b"an entry's part", b"garbage!"])
async def test_parts_that_others_store_between_those_of_an_entry_take_nothing_of_it(written: Written, later: bytes) -> None:
    """Any syncer may store parts: of attempts of its own at any time, of an entry's when it has seen one of them."""
    log, replica, stream = written.log, written.replica, written.log.subjects.log_stream
    values = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    sent, attempt = Body(0, bytes(32), 0, bytes(8)), b"attempt1"
    merge = Merge(
        1,
        (RoundOffer(Offer(0, "ann", 1, 1, (1, 0), 1, 0, bytes(32), 32, 1, 1, 0, [], sent), values.view(np.uint8)),),
        False,
        0.0,
        0.0,
    )
    record, inline, parts = merging.make_version(
        replica, np.zeros(SIZE, np.float32), values, merge, SETTINGS, bits=32, syncer="s", attempt=attempt, now_s=0.0
    )
    assert len(parts) == 3
    head, start = log.subjects.record(0), replica.chain.sequence + 1
    for index, part in enumerate(parts):
        await store(log, subjects.log_part(head, attempt, index), part)
        await store(log, subjects.log_part(head, b"another1", 0), b"another1" + b"stray")
        await store(log, subjects.log_part(head, b"another2", index), attempt + b"under another attempt's subject")
    sequence = await store(log, head, framing.pack(record, log.run, inline))
    for index in range(3):
        await store(log, subjects.log_part(head, attempt, index), later)

    refused: list[RefusedEntry] = []
    [entry] = [entry async for entry in log.entries.follow([0], start, refused.append, sequence)]
    assert (entry.sequence, refused) == (sequence, [])
    assert entry.body is not None
    assert entry.body.tobytes() == values.tobytes()
    assert await log.transport.first(stream, subjects.log_part(head, b"none....", 0), 1) is None


@pytest.mark.parametrize("filters_many", [True, False])
async def test_a_reader_of_some_fragments_reads_no_parts_of_others(
    link: NatsTransport, monkeypatch: pytest.MonkeyPatch, filters_many: bool
) -> None:
    """Also under an identity that may name one subject alone: it hears all heads, and asks for the parts of its own."""
    name, values = f"run-{uuid.uuid4().hex[:8]}", np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    fragments = build_map([TensorSpec(tensor, (SIZE,)) for tensor in "uvw"], 3)
    log = Log(link, name, framing.run_id(name, SETTINGS.digest()), fragments, SETTINGS)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    await log.writer.found("ann", SETTINGS.digest(), each([np.zeros(SIZE, np.float32)] * 3))
    genesis = await log.reader.genesis()
    assert genesis is not None
    offered = Offer(0, "ann", 1, 1, (1, 0), 1, 0, bytes(32), 32, 1, 1, 0, [], Body(0, bytes(32), 0, bytes(8)))
    for fragment in range(3):
        replica = (await log.reader.load(fragment, *genesis)).replica
        merge = Merge(1, (RoundOffer(replace_struct(offered, fragment=fragment), values.view(np.uint8)),), False, 0.0, 0.0)
        made = merging.make_version(
            replica, np.zeros(SIZE, np.float32), values, merge, SETTINGS, bits=32, syncer="s", attempt=bytes(8), now_s=0.0
        )
        assert len(made[2]) == 3
        last = await log.writer.append_record(*made, 0)

    monkeypatch.setattr(NatsTransport, "filters_many", filters_many)
    before = link.bytes_in
    refused: list[RefusedEntry] = []
    entries = [entry async for entry in log.entries.follow([0, 2], 1, refused.append, last)]
    assert refused == []
    assert [entry.record.fragment for entry in entries] == [0, 2]
    assert all(entry.body is not None and entry.body.tobytes() == values.tobytes() for entry in entries)
    assert 2 * values.nbytes < link.bytes_in - before < 2.5 * values.nbytes


@pytest.mark.parametrize(
    ("bits", "of_the_run", "feature"), [(1, 1, None), (1, 2, "one_bit"), (2, 2, None), (2, 1, "two_bits"), (2, 4, "two_bits")]
)
async def test_a_record_of_few_bits_is_an_entry_only_where_the_run_requires_them(
    link: NatsTransport, bits: int, of_the_run: int, feature: str | None
) -> None:
    """Members that do not know so few bits pass such a record over; so must all others of their run."""
    settings = run_settings("decoupled", {"codec.offer_bits": of_the_run})
    name = f"run-{uuid.uuid4().hex[:8]}"
    log = Log(link, name, framing.run_id(name, settings.digest()), build_map([TensorSpec("w", (SIZE,))], 1), settings)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    await log.writer.found("ann", settings.digest(), each([np.zeros(SIZE, np.float32)]))
    genesis = await log.reader.genesis()
    assert genesis is not None
    replica = (await log.reader.load(0, *genesis)).replica
    record = replace_struct(merging.make_marker(replica, "takeover", settings, syncer="s", now_s=0.0), bits=bits)
    await store(log, log.subjects.record(0), framing.pack(record, log.run))
    if feature is None:
        newest = await log.reader.newest(0)
        assert newest is not None
        assert newest.record == record
    else:
        with pytest.raises(MessageError, match=f"an entry with bits = {bits}, in a run that does not require '{feature}'"):
            await log.reader.newest(0)


async def test_an_entry_whose_part_is_missing_is_refused(written: Written) -> None:
    log, replica = written.log, written.replica
    record = replace_struct(
        merging.make_marker(replica, "takeover", SETTINGS, syncer="s", now_s=0.0),
        body=Body(2 * PART_BYTES, bytes(32), 3, b"attempt1"),
    )
    head, start = log.subjects.record(0), replica.chain.sequence + 1
    await store(log, subjects.log_part(head, b"attempt1", 0), b"attempt1" + b"alone")
    sequence = await store(log, head, framing.pack(record, log.run))
    refused: list[RefusedEntry] = []
    assert [entry async for entry in log.entries.follow([0], start, refused.append, sequence)] == []
    assert ["part 2 of 3 is missing" in str(refusal.error) for refusal in refused] == [True]


@pytest.mark.parametrize("purged", [False, True])
async def test_a_later_keyframe_of_version_0_or_of_another_fragment_hides_none(written: Written, purged: bool) -> None:
    """A founder, or a syncer, may store one behind those of the run: who loads goes on from the run's."""
    log, first = written.log, Chain.from_genesis(0, *written.genesis)
    if purged:
        await log.writer.purge_below(0, await entry_of(log, written.heads[1]))

    def forge(raw: bytes, **changes: Any) -> bytes:
        keyframe, _, inline = framing.unpack(raw, Keyframe, log.run)
        return framing.pack(replace_struct(keyframe, **changes), log.run, inline)

    await written.spoil(partial(forge, entry_hash=NO_ENTRY, entry_sequence=0, version=0, epoch=0, state_hash=first.state_hash))
    loaded, refused = await written.load()
    assert (loaded.replica.chain.epoch, loaded.keyframe_sequence, refused) == (3, written.heads[2], [])
    other = await written.spoil(partial(forge, fragment=1))
    loaded, refused = await written.load()
    assert loaded.keyframe_sequence == written.heads[2]
    assert refused == [(other, "keyframe of fragment 1 came as one of fragment 0")]
    newest = await log.reader.newest_keyframe(0)
    assert newest is not None
    assert newest[1] == written.heads[2]


async def test_the_first_genesis_record_is_the_runs(link: NatsTransport) -> None:
    """Who may found a run may store more on its subject, and so may a syncer of a region: no reader goes by it."""
    log, genesis, _ = await log_of_versions(link, 1, set())
    later = framing.pack(replace_struct(genesis[0], founder="mallory"), log.stream.run)
    for data in (b"", b"x", later):
        await link.append(log.subjects.genesis, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)
        assert await log.reader.genesis() == genesis


async def noisy(link: NatsTransport) -> tuple[Log, tuple[Genesis, bytes], Replica, int]:
    """A log with a keyframe of noise: parameters, momentum and residual of 1.3 MB each. Return the sequence of its head too."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    fragments = build_map([TensorSpec("w", (SIZE,))], 1)
    log = Log(link, name, framing.run_id(name, SETTINGS.digest()), fragments, SETTINGS)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    noise = np.random.default_rng(7)
    await log.writer.found("ann", SETTINGS.digest(), each([noise.normal(size=SIZE).astype(np.float32)]))
    genesis = await log.reader.genesis()
    assert genesis is not None
    replica, residual = (await log.reader.load(0, *genesis)).replica, np.zeros(SIZE, np.float32)
    sent = Body(0, bytes(32), 0, bytes(8))
    offer = Offer(0, "ann", 1, 1, (0, 0), 1, 0, bytes(32), 4, 1, 1, 0, [], sent)
    record, inline, parts = merging.make_version(
        replica,
        residual,
        noise.normal(size=SIZE).astype(np.float32),
        Merge(1, (RoundOffer(offer, np.empty(0, np.uint8)),), False, 0.0, 0.0),
        SETTINGS,
        bits=4,
        syncer="s",
        attempt=bytes(8),
        now_s=0.0,
    )
    sequence = await log.writer.append_record(record, inline, parts, 0)
    replica.chain.advance(record, framing.hash_of(record, log.run), sequence)
    return log, genesis, replica, await log.writer.append_keyframe(replica, residual, None)


async def test_a_reader_without_use_for_a_residual_leaves_its_parts_out(link: NatsTransport) -> None:
    log, genesis, replica, head = await noisy(link)
    stored = await log.transport.get(log.subjects.log_stream, head)
    assert stored is not None
    keyframe, _, _ = framing.unpack(stored.data, Keyframe, log.run)
    count, part_sequence = keyframe.body.parts, head - keyframe.body.parts
    assert count >= 7  # the state has two thirds of them
    before = link.bytes_in
    whole = await log.reader.load(0, *genesis)
    whole_bytes, before = link.bytes_in - before, link.bytes_in
    assert np.count_nonzero(whole.residual) > SIZE / 2
    bare = await log.reader.load(0, *genesis, residual=False)
    assert (link.bytes_in - before) / whole_bytes < 0.85
    for loaded in (whole, bare):
        assert (loaded.replica.chain, loaded.keyframe_sequence) == (replica.chain, head)
        assert loaded.replica.state().tobytes() == replica.state().tobytes()
    assert bare.residual.size == 0

    await streams.drop(link, log.subjects.log_stream, [part_sequence + count - 1])
    assert (await log.reader.load(0, *genesis, residual=False)).replica.state().tobytes() == replica.state().tobytes()
    older = await log.reader.load(0, *genesis)
    assert (older.replica.chain.version, older.refused) == (0, (head,))
    await streams.drop(link, log.subjects.log_stream, [part_sequence + 1])
    older = await log.reader.load(0, *genesis, residual=False)
    assert (older.replica.chain.version, older.refused) == (0, (head,))


async def test_a_residual_that_takes_no_room_is_no_part_of_the_estimate(link: NatsTransport) -> None:
    """Two thirds of the parts hold less than the state then: all are read."""
    log, genesis, replica, _ = await noisy(link)
    head = await log.writer.append_keyframe(replica, None, None)
    bare = await log.reader.load(0, *genesis, residual=False)
    assert (bare.keyframe_sequence, bare.replica.state().tobytes()) == (head, replica.state().tobytes())


async def test_a_keyframe_of_another_state_is_refused_with_its_residual_or_without(link: NatsTransport) -> None:
    log, genesis, replica, head = await noisy(link)
    other = Replica(replica.chain, replica.theta + 1, replica.momentum, replica.optimizer)
    noise = np.random.default_rng(8).normal(size=SIZE).astype(np.float32)
    forged = await log.writer.append_keyframe(other, noise, None)
    for residual in (True, False):
        loaded = await log.reader.load(0, *genesis, residual=residual)
        assert (loaded.keyframe_sequence, loaded.refused) == (head, (forged,))
