"""Streams: made once, found again, and refused when they are not what is asked for."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import nats.js.api
import pytest
from nats.js.api import StreamConsumerLimits
from tests.pace import DEADLINE_S

from diloco.errors import BrokerError, RunError, StorageFullError
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink
from diloco.transport import Stored

pytestmark = pytest.mark.services


@pytest.fixture
async def name(link: NatsLink) -> AsyncIterator[str]:
    name = "S" + uuid.uuid4().hex
    yield name
    await streams.delete(link, name)


async def change(link: NatsLink, name: str, **values: Any) -> None:
    """As an administrator would."""
    api = link.bulk.jetstream()
    config = (await api.stream_info(name)).config
    await api.update_stream(config.evolve(**values))


async def store(link: NatsLink, subject: str, data: bytes) -> int:
    return await append(link, subject, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)


async def test_a_stream_is_made_once_with_what_the_protocol_says(link: NatsLink, name: str) -> None:
    subjects = [f"{name}.b", f"{name}.a.>"]
    await streams.ensure(link, name, subjects)
    await store(link, f"{name}.b", b"kept")
    await streams.ensure(link, name, subjects)
    await streams.ensure(link, name, subjects[::-1])
    info = await link.bulk.jetstream().stream_info(name)
    assert info.state.messages == 1
    config = info.config
    assert (config.retention, config.discard, config.storage) == ("limits", "new", "file")
    assert (config.max_msgs_per_subject, config.max_bytes, config.max_age) == (-1, -1, 0)
    assert (config.allow_direct, config.allow_batched, config.duplicate_window) == (True, True, 60)
    assert (config.max_msg_size, config.max_consumers) == (1_048_576, 32_768)
    assert config.consumer_limits == StreamConsumerLimits(inactive_threshold=60)


async def test_a_stream_of_an_older_version_is_as_good_and_its_wider_limits_are_named(link: NatsLink, name: str) -> None:
    older = nats.js.api.StreamConfig(name=name, subjects=[f"{name}.>"], discard=nats.js.api.DiscardPolicy.NEW)
    older = older.evolve(allow_direct=True, allow_batched=True, duplicate_window=120)
    await link.bulk.jetstream().add_stream(older)
    await streams.ensure(link, name, [f"{name}.>"])

    async def wider() -> list[str]:
        [config] = [found["config"] for found in await streams.listed(link) if found["config"]["name"] == name]
        return streams.wider_limits(config)

    assert await wider() == [
        "max_msg_size = no limit, expected at most 1048576",
        "duplicate_window = 120000000000, expected at most 60000000000",
        "consumer_limits.inactive_threshold = no limit, expected at most 60000000000",
    ]
    await streams.delete(link, name)
    await streams.ensure(link, name, [f"{name}.>"])
    assert await wider() == []


async def test_of_one_message_a_subject_the_newest_stays(link: NatsLink, name: str) -> None:
    await streams.ensure(link, name, [f"{name}.>"], max_msgs_per_subject=1, max_bytes=10_000)
    for number in range(3):
        await store(link, f"{name}.a", b"%d" % number)
    state = (await link.bulk.jetstream().stream_info(name)).state
    assert (state.messages, state.last_seq) == (1, 3)
    for number in range(20):
        await store(link, f"{name}.{number}", bytes(1000))  # the old goes, nothing is refused
    assert await streams.last(link, name, f"{name}.a") is None


@pytest.mark.parametrize(
    ("existing", "wanted", "said"),
    [
        ({"subjects": ["{}.x"]}, {}, r"subjects = \['S\w+\.x'\], expected \['S\w+\.>'\]"),
        ({"retention": "interest"}, {}, "retention = interest, expected limits"),
        ({"discard": "old"}, {}, "discard = old, expected new"),
        ({"max_msgs_per_subject": 2}, {}, "max_msgs_per_subject = 2, expected -1"),
        ({"max_msgs_per_subject": 2, "discard": "old"}, {"max_msgs_per_subject": 1}, "max_msgs_per_subject = 2, expected 1"),
        ({"allow_direct": False}, {}, "allow_direct = False, expected True"),
        ({"allow_batched": False}, {}, "allow_batched = (False|None), expected True"),
        ({"max_msgs": 5}, {}, "max_msgs = 5, expected no limit"),
        ({"max_age": 3600.0}, {}, "max_age = 3600, expected no limit"),
        ({"max_msg_size": 1000}, {}, "max_msg_size = 1000, expected at least 1048576"),
        ({"duplicate_window": 30.0}, {}, "duplicate_window = 30, expected at least 60"),
    ],
)
async def test_another_stream_of_the_name_is_refused(
    link: NatsLink, name: str, existing: dict[str, Any], wanted: dict[str, Any], said: str
) -> None:
    values: dict[str, Any] = {"subjects": ["{}.>"], "discard": "new", "allow_direct": True, "allow_batched": True} | existing
    values["subjects"] = [subject.format(name) for subject in values["subjects"]]
    await link.bulk.jetstream().add_stream(nats.js.api.StreamConfig(name=name, duplicate_window=120).evolve(**values))
    with pytest.raises(RunError, match=rf"^stream {name}: has {said}; .*choose another run name"):
        await streams.ensure(link, name, [f"{name}.>"], **wanted)


async def test_a_limit_that_somebody_raised_is_as_good(link: NatsLink, name: str) -> None:
    async def ensure() -> None:
        assert await streams.ensure(link, name, [f"{name}.>"], max_bytes=100_000) is None

    await ensure()
    await store(link, f"{name}.a", bytes(60_000))
    with pytest.raises(StorageFullError, match=rf"{name}.a: storage is full"):
        await store(link, f"{name}.a", bytes(60_000))
    await change(link, name, max_bytes=1_000_000, duplicate_window=240.0)
    assert await store(link, f"{name}.a", bytes(60_000)) == 2
    await ensure()
    await change(link, name, max_bytes=-1)
    await ensure()
    assert (await link.bulk.jetstream().stream_info(name)).config.max_bytes == -1, "and is left as it is"


@pytest.mark.parametrize(("lowered", "wanted"), [(5_000, -1), (5_000, 100_000), (99_999, 100_000)])
async def test_a_limit_that_somebody_lowered_is_told_and_left_as_it_is(
    link: NatsLink, name: str, lowered: int, wanted: int
) -> None:
    assert await streams.ensure(link, name, [f"{name}.>"], max_bytes=wanted) is None
    await change(link, name, max_bytes=lowered)
    assert await streams.ensure(link, name, [f"{name}.>"], max_bytes=wanted) == lowered
    assert (await link.bulk.jetstream().stream_info(name)).config.max_bytes == lowered


async def test_what_the_server_refuses_is_told(link: NatsLink, name: str) -> None:
    with pytest.raises(BrokerError, match=rf"stream {name}: .*\(code \d+\)"):
        await streams.ensure(link, name, [f"{name}.>"], replicas=3)
    await streams.ensure(link, name, [f"{name}.>"])
    with pytest.raises(BrokerError, match=r"stream OTHER: subjects overlap .*\(code 10065\)"):
        await streams.ensure(link, "OTHER", [f"{name}.a"])


async def test_single_messages_and_purges(link: NatsLink, name: str) -> None:
    await streams.ensure(link, name, [f"{name}.>"])
    for number in range(6):
        await store(link, f"{name}.{number % 2}", b"%d" % number)
    assert await streams.last(link, name, f"{name}.0") == Stored(f"{name}.0", 5, b"4")
    assert await streams.get(link, name, 2) == Stored(f"{name}.1", 2, b"1")
    assert await streams.first(link, name, f"{name}.1", 3) == Stored(f"{name}.1", 4, b"3")
    assert await streams.last(link, name, f"{name}.none") is None
    assert await streams.get(link, name, 7) is None
    assert await streams.first(link, name, f"{name}.0", 6) is None
    await streams.purge(link, name, f"{name}.0", 5)
    assert [await streams.get(link, name, sequence) is None for sequence in range(1, 7)] == [1, 0, 1, 0, 0, 0]
    await streams.purge(link, name, f"{name}.>", 7)
    assert await streams.last(link, name, f"{name}.1") is None


async def test_a_stream_that_is_not_there(link: NatsLink) -> None:
    assert not await streams.exists(link, "NONE")
    await streams.delete(link, "NONE")
    for call in (streams.last(link, "NONE", "x"), streams.get(link, "NONE", 1), streams.purge(link, "NONE", "x", 2)):
        with pytest.raises(BrokerError, match="stream NONE: does not exist on the server"):
            await call
