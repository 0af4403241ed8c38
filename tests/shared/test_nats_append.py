"""Appends against a real server: fences, repeats, full streams, and servers that die or freeze in the middle."""

from __future__ import annotations

import asyncio
import resource
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamState
from tests.made.fixtures import MakeServer
from tests.made.nats_links import freeze, open_link
from tests.pace import DEADLINE_S, scaled_s

from diloco.errors import AppendUncertainError, BrokerError, FenceError, StorageFullError
from diloco.nats import append as appending
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink, subscribe
from diloco.transport import Fence, Stored
from diloco_ops.broker import snapshot
from diloco_ops.broker.server import Server

PART_BYTES = 1 << 19
ATTEMPT_S = scaled_s(2.0)  # what was on its way to a server that ended is never answered


@dataclass
class Log:
    """A stream of the test's own."""

    link: NatsLink
    name: str = field(default_factory=lambda: "S" + uuid.uuid4().hex)

    @property
    def head(self) -> str:
        return f"{self.name}.head"

    async def append(
        self, data: bytes, parts: list[bytes], fence: int | None, identifier: str = "", timeout_s: float = DEADLINE_S
    ) -> int:
        return await append(
            self.link,
            self.head,
            data,
            parts=parts,
            part_subject=lambda index: f"{self.name}.part.{index}",
            message_id=identifier or uuid.uuid4().hex,
            fence=None if fence is None else Fence(self.head, fence),
            timeout_s=timeout_s,
        )

    async def state(self) -> StreamState:
        return (await self.link.bulk.jetstream().stream_info(self.name)).state


@pytest.fixture
async def log(link: NatsLink) -> AsyncIterator[Log]:
    made = Log(link)
    await streams.ensure(link, made.name, [f"{made.name}.>"])
    yield made
    await streams.delete(link, made.name)


def bodies(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([(seed + index) % 256]) * PART_BYTES for index in range(count)]


@pytest.mark.services
async def test_single_messages_count_up(log: Log) -> None:
    assert [await log.append(b"%d" % n, [], None) for n in range(3)] == [1, 2, 3]
    stored = await streams.last(log.link, log.name, log.head)
    assert stored == Stored(log.head, 3, b"2")


@pytest.mark.services
async def test_a_fence_lets_only_the_expected_head_be_followed(log: Log) -> None:
    assert await log.append(b"a", [], 0) == 1
    with pytest.raises(FenceError, match=r"head: another process appended first"):
        await log.append(b"b", [], 0)
    assert await log.append(b"b", [], 1) == 2
    assert (await log.state()).messages == 2


@pytest.mark.services
async def test_a_repeated_single_message_is_stored_once(log: Log) -> None:
    assert await log.append(b"a", [], None, "same") == 1
    assert await log.append(b"a", [], None, "same") == 1
    assert (await log.state()).messages == 1


@pytest.mark.services
async def test_parts_come_before_their_head(log: Log) -> None:
    parts = bodies(41)  # 20.5 MB: more than may be in flight
    assert await log.append(b"head", parts, 0) == 42
    for index in (0, 17, 40):
        stored = await streams.get(log.link, log.name, index + 1)
        assert stored == Stored(f"{log.name}.part.{index}", index + 1, parts[index])
    assert await log.append(b"head 2", [b"tiny"], 42) == 44


@pytest.mark.services
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 100])
async def test_batches_around_the_flow_window(log: Log, count: int) -> None:
    assert await log.append(b"head", [b"%d" % index for index in range(count)], 0) == count + 1


@pytest.mark.services
async def test_a_repeated_batch_is_stored_once_and_its_sequence_found(log: Log) -> None:
    for fence in (0, None):
        assert await log.append(b"head", bodies(3), fence, "same") == 4
    assert (await log.state()).messages == 4
    await log.append(b"next", [], None)
    assert await log.append(b"head", bodies(3), None, "same") == 5, "anyone who fences nothing is told what is there last"


@pytest.mark.services
async def test_the_last_sequence_of_a_subject_is_told_to_its_writer(log: Log) -> None:
    head = f"{log.name}.head"
    assert await streams.last_sequence(log.link, head) == 0
    await log.append(b"first", bodies(2), None)
    assert await streams.last_sequence(log.link, head) == 3
    await log.append(b"second", [], None)
    assert await streams.last_sequence(log.link, head) == 4
    assert (await log.state()).messages == 4, "asking stores nothing"
    with pytest.raises(AppendUncertainError, match="no answer"):
        await streams.last_sequence(log.link, "not.stored")


@pytest.mark.services
async def test_a_zombie_stores_nothing_not_even_parts(log: Log) -> None:
    await log.append(b"old owner", bodies(2), 0)
    await log.append(b"new owner", [], 3)
    before = await log.state()
    for parts in ([], bodies(1), bodies(24)):
        with pytest.raises(FenceError):
            await log.append(b"zombie", parts, 3)
    after = await log.state()
    assert (after.messages, after.last_seq) == (before.messages, before.last_seq) == (4, 4)


@pytest.mark.services
async def test_two_writers_with_the_same_fence_one_wins(log: Log) -> None:
    results = await asyncio.gather(*(log.append(b"%d" % n, bodies(8, n), 0) for n in range(3)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, FenceError) for result in results) == 2
    stored = await streams.last(log.link, log.name, log.head)
    assert stored is not None
    assert stored.sequence == next(result for result in results if isinstance(result, int))


@pytest.mark.services
async def test_a_full_stream_says_so_and_has_room_again_after_a_purge(link: NatsLink) -> None:
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"], max_bytes=4 << 20)
    with pytest.raises(StorageFullError, match=r"raise the stream's or server's limit"):
        await log.append(b"head", bodies(30), 0)
    assert await streams.last(link, log.name, log.head) is None, "without its head a body was never stored"
    with pytest.raises(StorageFullError):
        await log.append(b"x" * PART_BYTES, [], 0)
    await streams.purge(link, log.name, f"{log.name}.>", (await log.state()).last_seq + 1)
    assert await log.append(b"head", bodies(3), 0) > 0
    await streams.delete(link, log.name)


@pytest.mark.services
async def test_a_full_server_says_so(make_server: MakeServer) -> None:
    server = make_server(max_file_bytes=4 << 20)
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    with pytest.raises(StorageFullError):
        await log.append(b"head", bodies(30), 0)

    async def fill() -> None:
        for _ in range(20):
            await log.append(b"x" * PART_BYTES, [], None)

    with pytest.raises(StorageFullError):
        await fill()
    await link.close()


@pytest.mark.services
async def test_a_broken_disk_is_uncertain_until_it_is_fixed_and_the_server_restarted(make_server: MakeServer) -> None:
    server = make_server()
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (2 << 20, hard))  # no file may grow further, as on a full disk
    for parts in (bodies(6), bodies(6), []):
        silent = r"no answer within 0.5 s; .* its log says why; if its disk is full"
        with pytest.raises(AppendUncertainError, match=rf"{log.head}: ({silent}|batch publish ID unknown)"):
            await log.append(b"head", parts, 0, "same", timeout_s=0.5)
    async with asyncio.timeout(DEADLINE_S):
        while "file too large" not in server.log_file.read_text():
            await asyncio.sleep(0.01)
    retrying = asyncio.create_task(retried(log, bodies(6)))
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    assert await retrying == 7
    assert (await log.state()).messages == 7
    await link.close()


@pytest.mark.services
async def test_a_batch_that_the_server_does_not_know_any_more_is_uncertain(log: Log) -> None:
    """It was restarted since the first message, or heard nothing of the batch for 10 s."""
    batch = appending._Batch(log.link.bulk, log.head, 5.0, appending.FLOW_MESSAGES)
    await batch.start()
    batch.sent = 1  # to another life of the server
    with pytest.raises(AppendUncertainError, match="batch publish ID unknown"):
        await batch.add(log.head, b"head", {}, last=True)
    await batch.stop()


@pytest.mark.services
@pytest.mark.parametrize("parts", [0, 40])
async def test_who_tries_again_at_once_does_not_keep_the_connection_from_coming_back(
    make_server: MakeServer, parts: int
) -> None:
    server = make_server()
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    await asyncio.to_thread(server.kill)
    attempts = since = 0  # in all, and since something else has run

    async def send() -> int:
        nonlocal attempts, since
        while True:
            attempts, since = attempts + 1, since + 1
            assert since < 100, "it spins, and nothing else runs"
            try:
                within_s = DEADLINE_S if link.bulk.is_connected else 0.3
                return await log.append(b"head", bodies(parts), 0, "same", timeout_s=within_s)
            except AppendUncertainError:
                pass

    async def run_beside() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0.01)

    async with asyncio.timeout(DEADLINE_S):
        beside, sending = asyncio.create_task(run_beside()), asyncio.create_task(send())
        while attempts < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        assert await sending == parts + 1
    beside.cancel()
    assert (await log.state()).messages == parts + 1
    await link.close()


@pytest.mark.services
async def test_a_refusal_is_an_error_of_its_own(log: Log) -> None:
    for data, parts in ((b"x" * (1 << 20), []), (b"head", [b"x", b"x" * (2 << 20)])):
        with pytest.raises(BrokerError, match=r"the server's max_payload is 1048576"):
            await log.append(data, parts, None)
    with pytest.raises(AppendUncertainError):  # no stream takes it
        await append(log.link, "no.listener", b"x", message_id="1", fence=None, timeout_s=DEADLINE_S)


@pytest.mark.services
async def test_what_goes_wrong_inside_a_batch_names_its_head(log: Log) -> None:
    await log.append(b"head", [], 0)
    with pytest.raises(FenceError, match=rf"^{log.head}: another process appended first"):
        await log.append(b"head", bodies(2), 0)
    with pytest.raises(AppendUncertainError, match=r"^no.listener: no stream stores this subject"):
        await append(
            log.link, "no.listener", b"x", parts=[b"x"], part_subject=str, message_id="1", fence=None, timeout_s=DEADLINE_S
        )
    # what should store it answers something else
    for answer, said in ((b"hello", "the server answered b'hello'"), (b'{"type": "gap"}', "the server ended the batch early")):
        strange = f"strange.{log.name}"

        async def respond(message: Msg, answer: bytes = answer) -> None:
            await message.respond(answer)

        subscription = await subscribe(log.link.control, f"{strange}.>", respond)
        with pytest.raises(AppendUncertainError, match=rf"^{strange}.head: {said}"):
            await append(
                log.link,
                f"{strange}.head",
                b"x",
                parts=[b"x"],
                part_subject=f"{strange}.{{}}".format,
                message_id="1",
                fence=None,
                timeout_s=DEADLINE_S,
            )
        await subscription.unsubscribe()


@pytest.mark.services
async def test_a_closed_connection_is_not_uncertain(nats_server: Server) -> None:
    link = await open_link(nats_server)
    await link.close()
    with pytest.raises(BrokerError, match="connection is closed") as caught:
        await Log(link).append(b"x", [], None)
    assert not isinstance(caught.value, AppendUncertainError)


@pytest.mark.services
@pytest.mark.parametrize("parts", [0, 40])
async def test_a_frozen_server_is_uncertain_and_a_retry_stores_once(make_server: MakeServer, parts: int) -> None:
    server = make_server()
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    await freeze(server)
    with pytest.raises(AppendUncertainError, match="no answer"):
        await log.append(b"head", bodies(parts), 0, "same", timeout_s=0.5)
    server.send_signal(signal.SIGCONT)
    assert await retried(log, bodies(parts)) == parts + 1
    assert (await log.state()).messages == parts + 1
    await link.close()


@pytest.mark.services
@pytest.mark.parametrize("sent", [10, 50])
async def test_kill_in_the_middle_of_a_batch_then_retry_stores_once(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr("diloco.nats.opening.FLUSH_TIMEOUT_S", 1)
    server = make_server()
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    parts = bodies(60)  # 30 MB
    sending = asyncio.create_task(log.append(b"head", parts, 0, "same", timeout_s=ATTEMPT_S))
    while link.bulk.stats["out_msgs"] < sent and not sending.done():
        await asyncio.sleep(0)
    await asyncio.to_thread(server.kill)
    with pytest.raises(AppendUncertainError):
        await sending
    await asyncio.to_thread(server.start)
    assert await retried(log, parts) == 61
    state = await log.state()
    assert (state.messages, state.last_seq) == (61, 61)
    for index in range(0, 60, 17):
        stored = await streams.get(link, log.name, index + 1)
        assert stored == Stored(f"{log.name}.part.{index}", index + 1, parts[index])
    await link.close()


@pytest.mark.services
async def test_a_cancelled_append_ends_at_once(make_server: MakeServer) -> None:
    server = make_server()
    link = await open_link(server)
    log = Log(link)
    await streams.ensure(link, log.name, [f"{log.name}.>"])
    await freeze(server)
    sending = asyncio.create_task(log.append(b"head", bodies(200), 0, timeout_s=10 * DEADLINE_S))
    await asyncio.sleep(0.3)  # by now it waits: for an answer, or for room in the socket's buffer
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(DEADLINE_S):
            await sending
    server.kill()
    await link.close()


async def retried(log: Log, parts: list[bytes]) -> int:
    """Append as a caller does: again, with the same id, until the answer comes."""
    while True:
        try:
            return await log.append(b"head", parts, None, "same", timeout_s=ATTEMPT_S)
        except AppendUncertainError:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "data", [b"", b"[" * 100_000, b"[]", b'{"error": null}', b'{"error": {"err_code": []}}', b'{"seq": "1"}']
)
def test_what_is_no_acknowledgement_is_uncertain(data: bytes) -> None:
    with pytest.raises(AppendUncertainError, match="expected a publish acknowledgement"):
        appending._parse("subject", data)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"[]", b'{"error": null}', b'{"error": "no"}'])
def test_what_is_no_answer_to_a_snapshot_is_an_error(data: bytes) -> None:
    with pytest.raises(BrokerError):
        snapshot._parse("stream", data)
