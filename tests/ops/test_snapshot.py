"""A stream as a file and back, on real servers: same messages, same sequences; damaged files leave nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.made.fixtures import MakeServer
from tests.pace import DEADLINE_S

from diloco.errors import BrokerError, RunError
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink
from diloco.process.observe import get_logger
from diloco.transport import Stored
from diloco_ops.broker import snapshot
from diloco_ops.broker.snapshot import StreamSnapshot

pytestmark = pytest.mark.services


@pytest.fixture
async def links(make_server: MakeServer) -> AsyncIterator[tuple[NatsLink, NatsLink]]:
    """To two servers."""
    servers = make_server(), make_server()
    opened = [await NatsLink.open(server.url, server.url, "test", get_logger(), DEADLINE_S) for server in servers]
    yield opened[0], opened[1]
    for link in opened:
        await link.close()


async def write(link: NatsLink, first: int, count: int) -> None:
    for number in range(first, first + count):
        data = os.urandom(20_000)
        await append(link, f"S.{number % 3}", data, message_id=str(number), fence=None, timeout_s=DEADLINE_S)


async def held(link: NatsLink, last: int) -> list[Stored | None]:
    return [await streams.get(link, "S", sequence) for sequence in range(1, last + 1)]


async def saved(link: NatsLink, path: Path) -> StreamSnapshot:
    await streams.ensure(link, "S", ["S.>"])
    await write(link, 1, 60)
    await streams.purge(link, "S", "S.1", 31)
    return await snapshot.save(link, "S", path)


async def test_every_message_comes_back_with_its_sequence(links: tuple[NatsLink, NatsLink], tmp_path: Path) -> None:
    link, other = links
    file = tmp_path / "stream"
    await streams.ensure(link, "S", ["S.>"])
    await write(link, 1, 60)
    await streams.purge(link, "S", "S.1", 31)
    writing = asyncio.create_task(write(link, 61, 60))  # no writer is held up
    taken = await snapshot.save(link, "S", file)
    await writing
    assert (taken.size_bytes, taken.blake3) == (file.stat().st_size, blake3(file.read_bytes()).hexdigest())
    last = int(taken.state["last_seq"])
    assert 60 <= last <= 120

    await snapshot.restore(other, taken, file)

    expected = await held(link, last)
    assert sum(message is None for message in expected) == 10  # those that were purged
    assert await held(other, last) == expected
    assert await append(other, "S.0", b"next", message_id="next", fence=None, timeout_s=DEADLINE_S) == last + 1


async def test_a_stream_of_an_older_version_comes_back_with_limits(links: tuple[NatsLink, NatsLink], tmp_path: Path) -> None:
    link, other = links
    await link.bulk.jetstream().add_stream(
        name="S", subjects=["S.>"], allow_direct=True, allow_batched=True, duplicate_window=120
    )
    await write(link, 1, 3)
    taken = await snapshot.save(link, "S", tmp_path / "stream")
    await snapshot.restore(other, taken, tmp_path / "stream")
    assert await held(other, 3) == await held(link, 3)
    wider = [[streams.wider_limits(stream["config"]) for stream in await streams.listed(each)] for each in links]
    assert (len(wider[0][0]), wider[1]) == (3, [[]])


async def test_a_stream_is_not_overwritten(links: tuple[NatsLink, NatsLink], tmp_path: Path) -> None:
    link, _ = links
    taken = await saved(link, tmp_path / "stream")
    before = await held(link, 60)
    with pytest.raises(RunError, match=r"stream S: .*in use.*another server, or another run name, is needed"):
        await snapshot.restore(link, taken, tmp_path / "stream")
    assert await held(link, 60) == before


async def test_of_a_damaged_file_nothing_is_left(links: tuple[NatsLink, NatsLink], tmp_path: Path) -> None:
    link, other = links
    file = tmp_path / "stream"
    taken = await saved(link, file)
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:middle], whole[:-1], whole[:middle] + b"wrong" + whole[middle + 5 :], os.urandom(5000)):
        file.write_bytes(damaged)
        with pytest.raises(BrokerError, match="stream S: "):
            await snapshot.restore(other, taken, file)
        assert not await streams.exists(other, "S")
    file.write_bytes(whole)
    await snapshot.restore(other, taken, file)
    assert await streams.exists(other, "S")


async def test_a_stream_that_is_not_there_is_told(links: tuple[NatsLink, NatsLink], tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="stream NONE: stream not found"):
        await snapshot.save(links[0], "NONE", tmp_path / "stream")


@pytest.mark.slow
async def test_a_restore_that_the_server_gave_up_since_the_machine_was_busy_is_begun_again(
    links: tuple[NatsLink, NatsLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = links
    taken = await saved(link, tmp_path / "stream")
    send, sent = snapshot._send, 0

    async def late_at_first(*args: Any) -> dict[str, Any]:
        nonlocal sent
        sent += 1
        await asyncio.sleep(7 if sent == 1 else 0)  # the server waits for five
        return await send(*args)

    monkeypatch.setattr(snapshot, "_send", late_at_first)
    await snapshot.restore(other, taken, tmp_path / "stream")
    assert sent >= 2
    assert await held(other, int(taken.state["last_seq"])) == await held(link, int(taken.state["last_seq"]))
