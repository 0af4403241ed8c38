"""Reading streams of a real server: order, once each, bounded memory, and going on after whatever happens."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from nats.js.api import StorageType
from tests.made.fixtures import MakeServer
from tests.made.nats_links import freeze, open_link
from tests.pace import DEADLINE_S

from diloco.errors import BrokerError, RewoundError
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink
from diloco.nats.pull import OVERHEAD_BYTES, PulledMessage, Puller
from diloco.process.tasks import end
from diloco_ops.broker import raw_messages
from diloco_ops.broker.server import Server

pytestmark = pytest.mark.services


@pytest.fixture
async def stream(link: NatsLink) -> AsyncIterator[str]:
    name = "S" + uuid.uuid4().hex
    await streams.ensure(link, name, [f"{name}.>"])
    yield name
    await streams.delete(link, name)


async def fill(link: NatsLink, stream: str, bodies: Sequence[bytes], first: int = 0) -> None:
    """Store ``bodies`` on <stream>.<number modulo 10>, in one batch."""
    numbers = [number % 10 for number in range(first, first + len(bodies))]
    *parts, head = bodies
    await append(
        link,
        f"{stream}.{numbers[-1]}",
        head,
        parts=parts,
        part_subject=lambda index: f"{stream}.{numbers[index]}",
        message_id=uuid.uuid4().hex,
        fence=None,
        timeout_s=DEADLINE_S,
    )


async def take(puller: Puller, count: int, limit_s: float = DEADLINE_S) -> list[PulledMessage]:
    """The next ``count`` messages."""
    messages: list[PulledMessage] = []
    async with asyncio.timeout(limit_s):
        async for message in puller:
            messages.append(message)
            if len(messages) == count:
                break
    return messages


def texts(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def test_every_message_comes_once_and_in_order(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(100))
    messages = await take(Puller(link, stream, [f"{stream}.>"], 0), 100)
    assert [message.data for message in messages] == texts(100)
    assert [message.sequence for message in messages] == list(range(1, 101))
    assert [message.pending for message in messages] == list(range(99, -1, -1))
    assert messages[42].subject == f"{stream}.2"


async def test_filters_and_start(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(50))
    messages = await take(Puller(link, stream, [f"{stream}.3", f"{stream}.7"], 14), 8)
    assert [message.sequence for message in messages] == [14, 18, 24, 28, 34, 38, 44, 48]
    assert [message.pending for message in messages] == [7, 6, 5, 4, 3, 2, 1, 0]


async def test_later_messages_come_when_they_are_stored(link: NatsLink, stream: str) -> None:
    taking = asyncio.create_task(take(Puller(link, stream, [f"{stream}.>"], 3), 3))
    for number in range(5):
        await fill(link, stream, [b"%d" % number], number)
    assert [message.data for message in await taking] == [b"2", b"3", b"4"]


async def test_a_puller_goes_on_where_it_was_left(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(30))
    puller = Puller(link, stream, [f"{stream}.>"], 1)
    first = await take(puller, 10)
    second = await take(puller, 20)
    assert [message.data for message in first + second] == texts(30)


async def test_many_small_messages(link: NatsLink) -> None:
    name, count = "S" + uuid.uuid4().hex, 20_000
    api = link.control.jetstream()
    # in memory: storing that many on disk, each by itself, takes longer than all the rest
    await api.add_stream(name=name, subjects=[f"{name}.>"], storage=StorageType.MEMORY, allow_batched=True)
    await fill(link, name, texts(count))
    puller = Puller(link, name, [f"{name}.>"], 1, window_bytes=1 << 30)  # one request could hold them all
    messages = []
    async for message in puller:
        messages.append(message)
        if len(messages) == count:
            [consumer] = await api.consumers_info(name)
            assert consumer.delivered.consumer_seq == count, "the first one was never thought lost"
            break
    assert [message.sequence for message in messages] == list(range(1, count + 1))
    assert [message.data for message in messages] == texts(count)
    await streams.delete(link, name)


async def test_the_largest_messages_through_the_smallest_window(link: NatsLink, stream: str) -> None:
    bodies = [bytes([number]) * ((1 << 20) - 1024) for number in range(8)]
    await fill(link, stream, bodies)
    messages = await take(Puller(link, stream, [f"{stream}.>"], 1, window_bytes=1), 8)
    assert [message.data for message in messages] == bodies


async def test_messages_come_without_their_data_where_only_their_sequences_are_asked_for(link: NatsLink, stream: str) -> None:
    await fill(link, stream, [bytes(1 << 18)] * 10)
    before = link.bytes_in
    messages = await take(Puller(link, stream, [f"{stream}.>"], 3, headers_only=True), 8)
    assert [(message.sequence, message.data) for message in messages] == [(sequence, b"") for sequence in range(3, 11)]
    assert link.bytes_in - before < 1 << 18


async def test_a_consumer_from_which_nothing_comes_is_given_up_after_ever_longer_silences(
    link: NatsLink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers may wait in this process, which has no time to read them: to ask again would only make more of them."""
    monkeypatch.setattr("diloco.nats.pull.SILENCE_S", 0.05)
    made_s: list[float] = []

    async def unasked(puller: Puller, consumer: str, inbox: str, number: int) -> None:
        if number == 0:
            made_s.append(time.monotonic())

    monkeypatch.setattr(Puller, "_request", unasked)
    reading = asyncio.ensure_future(take(Puller(link, stream, [f"{stream}.>"], 1), 1))
    async with asyncio.timeout(DEADLINE_S):
        while len(made_s) < 5:
            await asyncio.sleep(0.01)
    await end(reading)
    assert [after - before >= 0.05 * 2**i for i, (before, after) in enumerate(pairwise(made_s))] == 4 * [True]


async def test_a_slow_reader_is_sent_no_more_than_the_window(nats_server: Server, link: NatsLink, stream: str) -> None:
    reader = await open_link(nats_server)
    await fill(link, stream, [bytes(1 << 19)] * 40)
    window_bytes = 4 << 20
    puller = Puller(reader, stream, [f"{stream}.>"], 1, window_bytes)
    before = reader.bytes_in
    async for message in puller:
        await asyncio.sleep(0.03)  # all that was asked for has time to come
        taken_bytes = message.sequence << 19
        assert reader.bytes_in - before - taken_bytes <= window_bytes + OVERHEAD_BYTES
        if message.sequence == 40:
            break
    await reader.close()


async def test_a_reader_slower_than_every_timer_misses_nothing(
    link: NatsLink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.nats.pull.EXPIRES_S", 0.6)
    monkeypatch.setattr("diloco.nats.pull.SILENCE_S", 0.6)
    monkeypatch.setattr("diloco.nats.pull.INACTIVE_S", 0.3)
    monkeypatch.setattr("diloco.nats.pull.HEARTBEAT_S", 0.2)
    await fill(link, stream, texts(5))
    sequences: list[int] = []
    async for message in Puller(link, stream, [f"{stream}.>"], 1):
        sequences.append(message.sequence)
        if message.sequence == 5:
            await asyncio.sleep(2)  # requests expire, and the server drops the consumer
            await fill(link, stream, texts(5), 5)
        if message.sequence == 10:
            break
    assert sequences == list(range(1, 11))


async def test_deletion_of_the_consumer_is_survived(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(10))
    sequences: list[int] = []
    async for message in Puller(link, stream, [f"{stream}.>"], 1):
        sequences.append(message.sequence)
        if message.sequence in (3, 10):
            for consumer in await link.control.jetstream().consumers_info(stream):
                await link.control.jetstream().delete_consumer(stream, consumer.name)
        if message.sequence == 10:
            await fill(link, stream, texts(10), 10)
        if message.sequence == 20:
            break
    assert sequences == list(range(1, 21))


async def names(link: NatsLink, stream: str) -> list[str]:
    """Of the consumers that a stream has."""
    return sorted(consumer["name"] for consumer in await streams.consumers(link, stream))


async def test_a_process_reads_with_eight_consumers_of_its_name_at_most(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(3))
    pullers = [aiter(Puller(link, stream, [f"{stream}.>"], 1)) for _ in range(9)]
    for puller in pullers[:8]:
        assert (await anext(puller)).sequence == 1
    assert await names(link, stream) == [f"test-{slot}" for slot in range(8)]
    waiting = asyncio.create_task(pullers[8].__anext__())
    await streams.last(link, stream, f"{stream}.2")  # its answer came after that of any consumer that was asked for
    assert not waiting.done()
    await pullers[5].aclose()
    async with asyncio.timeout(DEADLINE_S):
        assert (await waiting).sequence == 1
    for puller in pullers:
        await puller.aclose()
    async with asyncio.timeout(DEADLINE_S):
        while await names(link, stream):
            await asyncio.sleep(0.01)


async def test_processes_of_one_name_all_read_all(link: NatsLink, stream: str, nats_server: Server) -> None:
    """Twelve readers of two processes, and eight names: they take them from one another."""
    other = await open_link(nats_server)
    assert other.name == link.name
    await fill(link, stream, texts(50))

    async def read(own: NatsLink) -> list[bytes]:
        return [message.data for message in await take(Puller(own, stream, [f"{stream}.>"], 1, window_bytes=1), 100)]

    reading = [asyncio.create_task(read(own)) for own in (link, other) for _ in range(6)]
    for first in range(50, 100, 5):
        await asyncio.sleep(0.2)
        await fill(link, stream, texts(5, first), first)
    assert await asyncio.gather(*reading) == [texts(100)] * 12
    await other.close()


async def test_a_process_that_is_started_again_replaces_its_consumers(link: NatsLink, stream: str, nats_server: Server) -> None:
    await fill(link, stream, texts(3))
    before = await open_link(nats_server)
    left = [aiter(Puller(before, stream, [f"{stream}.>"], 1)) for _ in range(8)]
    for puller in left:
        await anext(puller)
    await before.close()  # before it removes any
    assert len(await names(link, stream)) == 8
    assert [message.data for message in await take(Puller(link, stream, [f"{stream}.>"], 1), 3)] == texts(3)


async def test_a_message_that_another_process_of_the_name_took_is_not_missed(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(3))
    for first in (3, 23):
        reading = aiter(Puller(link, stream, [f"{stream}.>"], 1))
        assert [(await anext(reading)).data for _ in range(first)] == texts(first)
        [name] = await names(link, stream)
        theirs = await link.control.subscribe("theirs", max_msgs=1)
        await link.control.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", b"", reply="theirs")
        await link.control.flush()
        await fill(link, stream, texts(20, first), first)
        async with asyncio.timeout(DEADLINE_S):
            assert [(await anext(reading)).data for _ in range(20)] == texts(20, first)
        assert (await theirs.next_msg(DEADLINE_S)).data in texts(20, first)
        await reading.aclose()
        while await names(link, stream):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("harm", ["restart", "kill", "freeze"])
async def test_reading_goes_on_when_the_server_is_back(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr("diloco.nats.pull.SILENCE_S", FROZEN_S / 2)
    monkeypatch.setattr("diloco.nats.pull.HEARTBEAT_S", FROZEN_S / 6)
    server = make_server()
    link = await open_link(server)
    await streams.ensure(link, "S", ["S.>"])
    bodies = [bytes([number]) * (1 << 18) for number in range(160)]  # 40 MB, more than a window
    await fill(link, "S", bodies[:100])
    messages: list[PulledMessage] = []
    async with asyncio.timeout(DEADLINE_S):
        async for message in Puller(link, "S", ["S.>"], 1, window_bytes=4 << 20):
            messages.append(message)
            if message.sequence in (50, 100):
                await disturb(server, harm)
            if message.sequence == 100:
                await fill(link, "S", bodies[100:], 100)
            if message.sequence == 160:
                break
    assert [message.sequence for message in messages] == list(range(1, 161))
    assert [message.data for message in messages] == bodies
    await link.close()


async def test_a_reader_goes_on_when_the_connection_is_remade_and_does_not_wait_for_silence(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.nats.pull.SILENCE_S", 10 * DEADLINE_S)
    monkeypatch.setattr("diloco.nats.pull.EXPIRES_S", 10 * DEADLINE_S)
    server = make_server()
    link = await open_link(server)
    await streams.ensure(link, "S", ["S.>"])
    await fill(link, "S", texts(5))
    puller = Puller(link, "S", ["S.>"], 1)
    async with asyncio.timeout(DEADLINE_S):
        async for message in puller:
            if message.sequence == 5:
                await disturb(server, "kill")
                await fill(link, "S", texts(5), 5)
            if message.sequence == 10:
                break
    await link.close()


FROZEN_S = 1.2  # longer than the reader waits for a heartbeat


async def disturb(server: Server, harm: str) -> None:
    if harm == "freeze":
        await freeze(server)
        await asyncio.sleep(FROZEN_S)
        server.send_signal(signal.SIGCONT)
        return
    await asyncio.to_thread(server.kill if harm == "kill" else server.stop)
    await asyncio.to_thread(server.start)


async def test_purged_messages_are_passed_over(link: NatsLink, stream: str) -> None:
    await fill(link, stream, texts(30))
    await streams.purge(link, stream, f"{stream}.>", 11)
    await streams.purge(link, stream, f"{stream}.4", 40)
    messages = await take(Puller(link, stream, [f"{stream}.>"], 5), 18)
    assert [message.sequence for message in messages] == [n for n in range(11, 31) if n % 10 != 5]


async def test_what_cannot_be_read_is_an_error(nats_server: Server, link: NatsLink, stream: str) -> None:
    with pytest.raises(BrokerError, match="stream NONE: does not exist"):
        await take(Puller(link, "NONE", ["none.>"], 1), 1)
    with pytest.raises(BrokerError, match=f"stream {stream}: cannot be read: .*overlap"):
        await take(Puller(link, stream, [f"{stream}.>", f"{stream}.1"], 1), 1)
    closed = await open_link(nats_server)
    puller = Puller(closed, stream, [f"{stream}.>"], 1)
    await closed.close()
    with pytest.raises(BrokerError, match="connection is closed"):
        await take(puller, 1)


async def test_a_stream_deleted_while_it_is_read_is_an_error(link: NatsLink) -> None:
    name = "S" + uuid.uuid4().hex
    await streams.ensure(link, name, [f"{name}.>"])
    await fill(link, name, texts(1))

    async def delete_while_reading() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async for _ in Puller(link, name, [f"{name}.>"], 1):
                await streams.delete(link, name)

    with pytest.raises(BrokerError, match="does not exist"):
        await delete_while_reading()


async def test_a_cancelled_reader_leaves_nothing_behind(link: NatsLink, stream: str) -> None:
    before = len(asyncio.all_tasks())
    reading = asyncio.create_task(take(Puller(link, stream, [f"{stream}.>"], 1), 1))
    await asyncio.sleep(0.2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(DEADLINE_S):
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.01)


async def test_a_stream_that_lost_what_was_read_is_told_of_but_not_a_purged_one(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    link = await open_link(server)
    await streams.ensure(link, "S", ["S.>"])
    await fill(link, "S", texts(3))
    await freeze(server)
    shutil.copytree(server.directory / "jetstream", tmp_path / "older")
    server.send_signal(signal.SIGCONT)
    reading = aiter(Puller(link, "S", ["S.>"], 1))
    await fill(link, "S", texts(3, 3), 3)
    async with asyncio.timeout(DEADLINE_S):
        assert [(await anext(reading)).data for _ in range(6)] == texts(6)
        await streams.purge(link, "S", "S.>", 7)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await fill(link, "S", texts(1, 6), 6)
        newest = await anext(reading)
        assert newest.data == b"6"
    server.kill()
    shutil.rmtree(server.directory / "jetstream")
    shutil.move(tmp_path / "older", server.directory / "jetstream")
    await asyncio.to_thread(server.start)
    await fill(link, "S", texts(5, 100))  # their sequences are those of what was read, and more
    going_on = aiter(Puller(link, "S", ["S.>"], newest.sequence + 1, read=newest))  # has not read anything itself
    for reader in (reading, going_on):
        with pytest.raises(RewoundError, match="stream S: the server lost message 7, which it had acknowledged"):
            async with asyncio.timeout(DEADLINE_S):
                await anext(reader)
    await link.close()


HOSTILE_HEADERS = (
    b"NATS/1.0\r\nStatus: 404\r\n\r\n",
    b"NATS/1.0 404 No Messages\r\n\r\n",
    b"NATS/1.0 503\r\nNats-Sequence: 1\r\nNats-Subject: other\r\n\r\n",
    b"NATS/1.0 409 Consumer Deleted\r\n\r\n",
    b"NATS/1.0 100 \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Stream\xff: \xff\r\n\r\n",
    b"NATS/1.0",
    b"\xff\xfe",
)


@pytest.mark.parametrize("data", [b"", b"x"])
async def test_no_stored_message_stops_a_reader(link: NatsLink, stream: str, data: bytes) -> None:
    """Neither those who read all, nor those who look one up: its headers and its subject are its writer's."""
    name = stream.encode()
    for headers in HOSTILE_HEADERS:
        await raw_messages.publish(link.bulk, name + b".1", data, headers)
    for token in (b"\xff", b"\xe2\x82", b"a\x0cb"):
        await raw_messages.publish(link.bulk, b"%s.%s" % (name, token), data)
    await link.bulk.flush()
    await fill(link, stream, [b"last"], 2)
    messages = await take(Puller(link, stream, [f"{stream}.>"], 0), len(HOSTILE_HEADERS) + 2)
    read = [message for message in messages if message.subject == f"{stream}.1"]
    assert len(read) >= len(HOSTILE_HEADERS) - 2  # the server itself takes no header that it cannot read
    assert {message.data for message in read} == {data}
    assert messages[-1].data == b"last"
    for message in messages:
        stored = await streams.get(link, stream, message.sequence)
        assert stored is not None
        assert (stored.subject, stored.sequence, stored.data) == (message.subject, message.sequence, message.data)
    going_on = Puller(link, stream, [f"{stream}.>"], messages[-1].sequence, read=messages[-1])
    assert [message.data for message in await take(going_on, 1)] == [b"last"]


async def test_no_header_stops_who_looks_for_the_last_message_of_a_subject(link: NatsLink, stream: str) -> None:
    await fill(link, stream, [b"first"], 1)
    for number, headers in enumerate(HOSTILE_HEADERS):
        subject = f"{stream}.hostile-{number}"
        await raw_messages.publish(link.bulk, subject.encode(), b"x", headers)
        await fill(link, stream, [b"after"], number + 2)  # its answer comes when what was sent before it is stored or refused
        found = []
        for replicas in (1, 3):  # a replicated stream is looked into in another way
            link.replicas[stream] = replicas
            stored = await streams.last(link, stream, subject)
            found.append(stored and (stored.subject, stored.data))
        assert found[0] == found[1]
        assert found[0] in (None, (subject, b"x"))  # the server itself takes no header that it cannot read
    del link.replicas[stream]
