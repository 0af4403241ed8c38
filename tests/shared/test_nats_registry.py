"""The bucket: compare-and-set that one caller wins, whatever the values are, and bounds on what is read from it."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats.js.errors
import pytest
from nats.js.api import KeyValueConfig
from tests.made.fixtures import MakeServer
from tests.made.nats_links import freeze, open_link

from diloco.errors import AppendUncertainError, BrokerError, FenceError, FormatError, StorageFullError
from diloco.nats import registry as module
from diloco.nats.connection import NatsLink
from diloco.nats.registry import MAX_WRITTEN_BYTES, Registry
from diloco.nats.streams import MAX_VALUE_BYTES
from diloco_ops.broker.server import Server

pytestmark = pytest.mark.services


@pytest.fixture
async def bucket(link: NatsLink) -> AsyncIterator[str]:
    name = "B" + uuid.uuid4().hex
    yield name
    await link.bulk.jetstream().delete_stream(f"KV_{name}")


@pytest.fixture
async def registry(link: NatsLink, bucket: str) -> Registry:
    return await Registry.open(link, bucket, create=True)


async def test_what_is_set_is_read_with_its_revision(registry: Registry) -> None:
    assert await registry.get("key") is None
    assert await registry.create("key", b"a") == 1
    assert await registry.get("key") == (b"a", 1)
    assert await registry.put("other.key", b"") == 2
    assert await registry.get("other.key") == (b"", 2)
    assert await registry.update("key", b"b", 1) == 3
    assert await registry.put("key", b"c") == 4
    assert await registry.get("key") == (b"c", 4)


@pytest.mark.parametrize("header", [{"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-TTL": "1s"}])
async def test_no_header_of_a_message_empties_it(
    registry: Registry, bucket: str, link: NatsLink, header: dict[str, str]
) -> None:
    """Who may write one key could otherwise drop all others."""
    await registry.create("key", b"a")
    answer = json.loads((await link.bulk.request(f"$KV.{bucket}.other", b"b", headers=header)).data)
    assert "error" in answer
    assert await registry.get("key") == (b"a", 1)
    assert await registry.get("other") is None


async def test_a_bucket_of_an_earlier_version_is_as_good_and_another_stream_of_its_name_is_not(
    link: NatsLink, bucket: str
) -> None:
    api = link.bulk.jetstream()
    await api.create_key_value(KeyValueConfig(bucket=bucket, history=1))
    registry = await Registry.open(link, bucket, create=True)
    assert await registry.create("key", b"a") == 1
    await api.delete_stream(f"KV_{bucket}")
    await api.create_key_value(KeyValueConfig(bucket=bucket, history=5))
    with pytest.raises(BrokerError, match="already in use"):
        await Registry.open(link, bucket, create=True)


async def test_compare_and_set_refuses_what_has_moved(registry: Registry, bucket: str) -> None:
    await registry.create("key", b"a")
    for call in (registry.create("key", b"b"), registry.update("key", b"b", 7), registry.update("none", b"b", 1)):
        with pytest.raises(FenceError, match=rf"bucket {bucket}: key '(key|none)' was set by another process"):
            await call
    assert await registry.get("key") == (b"a", 1)
    assert await registry.get("none") is None


async def test_one_claimant_wins_even_if_all_claim_the_same(nats_server: Server, registry: Registry, bucket: str) -> None:
    links = [await open_link(nats_server) for _ in range(4)]
    claimants = [await Registry.open(link, bucket, create=True) for link in links]

    async def winners(claim: Callable[[Registry], Awaitable[int]]) -> list[int]:
        results = await asyncio.gather(*map(claim, claimants), return_exceptions=True)
        assert all(isinstance(result, int | FenceError) for result in results)
        return [result for result in results if isinstance(result, int)]

    assert await winners(lambda each: each.create("founder", b"same")) == [1]
    assert await winners(lambda each: each.update("founder", b"same", 1)) == [2]
    for link in links:
        await link.close()


async def test_a_bucket_that_is_there_is_opened(link: NatsLink, registry: Registry, bucket: str) -> None:
    await registry.create("key", b"a")
    for create in (True, False):
        again = await Registry.open(link, bucket, create=create)
        assert await again.get("key") == (b"a", 1)


async def test_a_bucket_that_is_not_there_or_is_another_kind_is_an_error(link: NatsLink) -> None:
    with pytest.raises(BrokerError, match="bucket NONE: does not exist on the server"):
        await Registry.open(link, "NONE", create=False)
    name = "B" + uuid.uuid4().hex
    await link.bulk.jetstream().add_stream(name=f"KV_{name}", subjects=[f"{name}.x"])
    with pytest.raises(BrokerError, match=rf"bucket {name}: stream name already in use .*\(code 10058\)"):
        await Registry.open(link, name, create=True)
    await link.bulk.jetstream().delete_stream(f"KV_{name}")


async def test_a_deleted_key_can_be_made_again(link: NatsLink, registry: Registry, bucket: str) -> None:
    await registry.create("key", b"a")
    await (await link.control.jetstream().key_value(bucket)).delete("key")
    assert await registry.get("key") is None
    assert await registry.create("key", b"b") == 3
    with pytest.raises(FenceError):
        await registry.create("key", b"c")


async def test_values_are_bounded_both_ways(link: NatsLink, registry: Registry, bucket: str) -> None:
    largest = bytes(MAX_WRITTEN_BYTES)
    await registry.put("key", largest)
    assert await registry.get("key") == (largest, 1)
    for call in (registry.put("key", largest + b"x"), registry.create("new", largest + b"x")):
        with pytest.raises(BrokerError, match=rf"key '(key|new)': the value has {MAX_WRITTEN_BYTES + 1} bytes, at most"):
            await call


async def test_nobody_writes_a_value_that_no_reader_takes(link: NatsLink, registry: Registry, bucket: str) -> None:
    foreign, api = f"$KV.{bucket}.foreign", link.control.jetstream()
    for size in (MAX_VALUE_BYTES + 1, link.control.max_payload):
        with pytest.raises(nats.js.errors.APIError, match="message size exceeds maximum allowed"):
            await api.publish(foreign, bytes(size))
    await api.publish(foreign, bytes(MAX_VALUE_BYTES))
    assert await registry.get("foreign") == (bytes(MAX_VALUE_BYTES), 1)


async def test_a_bucket_of_an_older_version_holds_a_value_that_is_refused(link: NatsLink) -> None:
    bucket = "B" + uuid.uuid4().hex
    await link.bulk.jetstream().add_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1)
    registry = await Registry.open(link, bucket, create=True)
    await link.control.jetstream().publish(f"$KV.{bucket}.foreign", bytes(MAX_VALUE_BYTES + 1))  # as another program could
    with pytest.raises(FormatError, match=rf"bucket {bucket}: key 'foreign' holds {MAX_VALUE_BYTES + 1} bytes"):
        await registry.get("foreign")
    await link.bulk.jetstream().delete_stream(f"KV_{bucket}")


class Silenced:
    """A server whose answers do not come while it is on: requests time out, though what they ask for is done."""

    def __init__(self, link: NatsLink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = link.control.request

        async def request(*args: Any, **kwargs: Any) -> Any:
            answer = await real(*args, **kwargs)
            if self.times > 0:
                self.times -= 1
                raise TimeoutError
            return answer

        monkeypatch.setattr(link.control, "request", request)


async def test_an_attempt_that_was_stored_without_an_answer_counts_as_ours(
    link: NatsLink, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced = Silenced(link, monkeypatch)
    silenced.times = 2
    assert await registry.create("key", b"a") == 1
    silenced.times = 1
    assert await registry.update("key", b"b", 1) == 2
    silenced.times = 1
    assert await registry.put("key", b"c") == 3
    assert await registry.get("key") == (b"c", 3)


async def test_an_unanswered_attempt_that_somebody_else_overtook_does_not(
    link: NatsLink, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = link.control.request
    lost = False

    async def lose(subject: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal lost
        if subject.startswith("$KV.") and not lost:
            lost = True
            await real(subject, b"same")  # another process comes first; ours is lost on the way
            raise TimeoutError
        return await real(subject, *args, **kwargs)

    monkeypatch.setattr(link.control, "request", lose)
    with pytest.raises(FenceError):
        await registry.create("key", b"same")


async def test_a_frozen_server_is_waited_for_then_given_up(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr("diloco.nats.opening.FLUSH_TIMEOUT_S", 1)
    server = make_server()
    link = await open_link(server)
    registry = await Registry.open(link, "B", create=True)
    monkeypatch.setattr(module, "ATTEMPTS", 10**6)
    await freeze(server)
    writing = asyncio.create_task(registry.create("key", b"a"))
    reading = asyncio.create_task(registry.get("key"))
    await asyncio.sleep(0.5)
    server.send_signal(signal.SIGCONT)
    assert await writing == 1
    assert await reading in (None, (b"a", 1))
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    await freeze(server)
    for call in (registry.put("key", b"b"), registry.get("key")):
        with pytest.raises(AppendUncertainError, match="bucket B: no answer"):
            await call
    server.kill()
    await link.close()


async def test_a_full_server_and_a_closed_connection_are_told(make_server: MakeServer) -> None:
    server = make_server(max_file_bytes=1 << 20)
    link = await open_link(server)
    registry = await Registry.open(link, "B", create=True)

    async def fill() -> None:
        for number in range(5):
            await registry.put(str(number), bytes(600_000))

    with pytest.raises(StorageFullError, match=r"\$KV.B.\d: storage is full"):
        await fill()
    await link.close()
    with pytest.raises(BrokerError, match="connection is closed"):
        await registry.get("0")
