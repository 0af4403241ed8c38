"""Processes of one learner meet, agree, talk and lose each other, over real connections."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from diloco.core.fragments import Piece
from diloco.core.rows import RowLayout, Rows
from diloco.errors import FormatError, HashError, IslandError, SettingsError
from diloco.member import links
from diloco.member.group import Group
from diloco.member.links import Links
from diloco.member.meeting import free_port
from diloco.member.shipping import Shipping
from diloco.process.observe import get_logger
from diloco.settings.service import LearnerSettings, ProcessesSettings
from diloco.wire import island
from diloco.wire.framing import Message
from diloco.wire.island import Greeting, Leaving, Staged, facts

RUN = bytes(8)
FACTS = facts({"mesh": "fsdp 2", "software": "1"})
PATIENCE_S = 20.0


OPEN: list[Links] = []  # of the test that runs
GROUPS: list[Group] = []


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    for group_ in GROUPS:
        group_.ending()  # or its watch would end this process, which misses the others
    for each in OPEN:
        await each.close()
    GROUPS.clear()
    OPEN.clear()
    await asyncio.sleep(0.01)  # for sockets to be closed


def group(index: int, address: str, count: int = 2, start_s: float = PATIENCE_S) -> Group:
    processes = ProcessesSettings(count=count, index=index, address=address, start_s=start_s)
    made = Group(LearnerSettings(name="ann", processes=processes), RUN, get_logger())
    GROUPS.append(made)
    OPEN.append(made.links)
    return made


def address() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1')}"


async def met(count: int = 2) -> list[Group]:
    where = address()
    groups = [group(index, where, count) for index in range(count)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    return groups


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await asyncio.sleep(0.01)


async def test_processes_meet_agree_and_take_leave() -> None:
    groups = await met(3)
    assert [each.generation for each in groups] == [5, 5, 5]
    assert len({each.coordinator for each in groups}) == 1
    assert [each.links.others for each in groups] == [[1, 2], [0, 2], [0, 1]]
    heard: list[tuple[int, Message]] = []
    groups[2].handle(lambda source, message, inline: heard.append((source, message)))
    await asyncio.gather(*(each.agree("model", {"devices": 4}) for each in groups))
    groups[0].links.write(2, Staged(1, 1))
    groups[0].links.write(2, Staged(1, 2))
    groups[1].links.write(2, Leaving(5))
    await until(lambda: len(heard) == 3)
    assert [message for source, message in heard if source == 0] == [Staged(1, 1), Staged(1, 2)]
    await asyncio.gather(*(each.farewell() for each in groups))


async def test_messages_that_come_before_anybody_handles_them_are_kept() -> None:
    groups = await met()
    groups[0].links.write(1, Staged(0, 7))
    groups[0].links.write(1, island.Agreed("model", ""))  # comes behind it
    await groups[1].agree("model", {})
    heard: list[Message] = []
    groups[1].handle(lambda source, message, inline: heard.append(message))
    assert heard == [Staged(0, 7)]


async def test_processes_that_differ_are_refused_with_both_values() -> None:
    where = address()
    own, other = group(0, where), group(1, where)
    said = "process 1 differs from process 0 in mesh: fsdp 4 there, fsdp 2 at process 0"
    leading, coming = await asyncio.gather(
        own.meet(FACTS, 5), other.meet(facts({"mesh": "fsdp 4", "software": "1"}), 5), return_exceptions=True
    )
    for error in (leading, coming):
        assert isinstance(error, SettingsError)
        assert said in str(error)


async def test_models_that_differ_end_all() -> None:
    groups = await met()
    found = await asyncio.gather(
        groups[0].agree("model", {"batch": "a"}), groups[1].agree("model", {"batch": "b"}), return_exceptions=True
    )
    assert all(isinstance(error, SettingsError) and "batch: b there, a at process 0" in str(error) for error in found)


async def test_a_doubled_index_is_refused_and_the_others_wait_on() -> None:
    where = address()
    leading = asyncio.create_task(group(0, where, 3).meet(FACTS, 5))
    first = asyncio.create_task(group(1, where, 3).meet(FACTS, 5))
    await asyncio.sleep(0.3)
    with pytest.raises(SettingsError, match=r"processes\.index = 1 is there already"):
        await group(1, where, 3).meet(FACTS, 5)
    await asyncio.gather(leading, first, group(2, where, 3).meet(FACTS, 5))


async def test_another_count_is_refused() -> None:
    where = address()
    found = await asyncio.gather(group(0, where, 3).meet(FACTS, 5), group(1, where, 2).meet(FACTS, 5), return_exceptions=True)
    assert all("process 1 has processes.count = 2, process 0 has 3" in str(error) for error in found)


async def test_who_does_not_come_is_named_in_time() -> None:
    where = address()
    leading, _ = await asyncio.gather(
        group(0, where, 3, 0.5).meet(FACTS, 5), group(1, where, 3, 1.5).meet(FACTS, 5), return_exceptions=True
    )
    assert isinstance(leading, IslandError)
    assert re.search(r"of its 3 processes, process 2 did not come to .* within 0.5 s", str(leading))


async def test_a_leader_that_cannot_be_reached_is_named_in_time() -> None:
    where = address()
    with pytest.raises(IslandError, match=f"process 0 at processes.address = {re.escape(where)} cannot be reached"):
        await group(1, where, start_s=0.5).meet(FACTS, 5)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x00\x00\x00\x00",
        (5).to_bytes(4, "big") + b"12345",
        b"",
    ],
)
async def test_strangers_change_nothing(bytes_: bytes) -> None:
    where = address()
    leading = asyncio.create_task(group(0, where).meet(FACTS, 5))
    await asyncio.sleep(0.1)
    host, _, port = where.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes_)
    await group(1, where).meet(FACTS, 5)
    await leading
    writer.transport.abort()


def made(index: int, handle: Any = None) -> tuple[Links, list[IslandError]]:
    lost: list[IslandError] = []
    OPEN.append(Links(index, RUN, get_logger(), handle or (lambda *said: None), lost.append))
    return OPEN[-1], lost


async def linked(secrets: tuple[bytes, bytes] = (b"s" * 32, b"s" * 32)) -> tuple[list[Links], list[list[IslandError]]]:
    pairs = [made(0), made(1)]
    both = [pair[0] for pair in pairs]
    ports = [await each.listen("127.0.0.1") for each in both]
    addresses = [("127.0.0.1", port) for port in ports]
    await asyncio.gather(*(each.connect(addresses, 5, secret, 2.0) for each, secret in zip(both, secrets, strict=True)))
    return both, [pair[1] for pair in pairs]


async def test_without_the_secret_nobody_gets_in() -> None:
    with pytest.raises(IslandError, match="no connection to process"):
        await linked((b"s" * 32, b"t" * 32))


async def test_a_greeting_alone_opens_nothing() -> None:
    both, lost = await linked()
    port = both[0]._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stranger = links.Stream(reader, writer, RUN)
    await stranger.send(Greeting(1, 5, bytes(32)))
    with pytest.raises((EOFError, OSError)):
        await stranger.receive_one(Greeting)  # process 1 is here already
    stranger.abort()
    assert lost == [[], []]


async def test_a_connection_that_ends_without_farewell_is_a_loss() -> None:
    both, lost = await linked()
    both[1]._streams[0].abort()
    await until(lambda: bool(lost[0]))
    assert "process 1 is gone: its connection has ended" in str(lost[0][0])


async def test_damaged_messages_end_the_generation() -> None:
    both, lost = await linked()
    both[1]._streams[0]._writer.write((1 << 30).to_bytes(4, "big"))
    await until(lambda: bool(lost[0]))
    assert "process 1 sends damaged messages: a frame of 1073741824 bytes" in str(lost[0][0])


async def test_a_farewell_is_no_loss() -> None:
    both, lost = await linked()
    await asyncio.gather(*(each.farewell(2.0) for each in both))
    await asyncio.gather(*(each.close() for each in both))
    await asyncio.sleep(0.01)
    assert lost == [[], []]


async def test_who_takes_leave_hears_the_others_until_they_do() -> None:
    """A leader asks for a fragment's last values after another process has taken its last step."""
    groups = await met()
    heard: list[Message] = []
    groups[1].handle(lambda source, message, inline: heard.append(message))
    leaving = asyncio.create_task(groups[1].farewell())
    await asyncio.sleep(5 * links.BYE_LOOK_S)
    groups[0].links.write(1, island.Gather(3))
    await until(lambda: bool(heard))
    assert heard == [island.Gather(3)]
    assert not leaving.done()
    await asyncio.gather(leaving, groups[0].farewell())


async def test_a_silent_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = await linked()
    assert both[0].silent(10.0) is None
    now_s = time.monotonic()
    monkeypatch.setattr("diloco.member.links.time.monotonic", lambda: now_s + 11.0)
    assert both[0].silent(10.0) == 1


SIZE = 300_000  # values: more than two pieces
PIECE = Piece("w", 0, SIZE, (SIZE,), 0, embedding=False)
HALVES = [Rows(((PIECE, (slice(0, SIZE // 2),)),)), Rows(((PIECE, (slice(SIZE // 2, SIZE),)),))]


async def test_rows_arrive_where_they_belong() -> None:
    took: list[Any] = []
    shippings: list[Shipping] = []

    def handle(source: int, message: Message, inline: bytes) -> None:
        if isinstance(message, island.Rows):
            came = shippings[1].take(source, message, inline)
            if came is not None:
                took.append(came)

    pairs = [made(0), made(1, handle)]
    both = [pair[0] for pair in pairs]
    addresses = [("127.0.0.1", await each.listen("127.0.0.1")) for each in both]
    await asyncio.gather(*(each.connect(addresses, 5, b"s" * 32, 2.0) for each in both))
    shippings += [Shipping(each, [RowLayout(HALVES, HALVES)]) for each in both]
    theta = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    await shippings[0].send(1, 0, 3, "theta", HALVES[1].take(theta))
    await until(lambda: bool(took))
    np.testing.assert_array_equal(took[0], theta[SIZE // 2 :])


async def test_rows_that_do_not_fit_are_refused() -> None:
    each, _ = made(0)
    shipping = Shipping(each, [RowLayout(HALVES, HALVES)])
    content = bytes(island.PIECE_BYTES)
    digest = blake3(content).digest()
    with pytest.raises(FormatError, match="rows of fragment 9"):
        shipping.take(0, island.Rows(9, 1, "theta", 0, 2, digest), content)
    with pytest.raises(FormatError, match=r"piece 0 of 7, expected 2"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 7, digest), content)
    with pytest.raises(FormatError, match=r"piece 1 of .* expected 0"):
        shipping.take(0, island.Rows(0, 1, "theta", 1, 2, digest), content)
    with pytest.raises(FormatError, match="piece 0 of 5 bytes"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 2, digest), content[:5])
    with pytest.raises(HashError, match="does not have its hash"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 2, bytes(32)), content)
