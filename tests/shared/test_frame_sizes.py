"""The largest frame of each kind, from the bounds of its fields."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.message_examples import MESSAGES

from diloco.control.hearing import decoding
from diloco.process.observe import Counted, get_logger
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, ShardHeartbeat
from diloco.wire.fields import MAX_COUNT, MAX_FRAGMENTS, MAX_RANGES, MAX_SHARES
from diloco.wire.frame_sizes import largest_bytes
from diloco.wire.framing import Message
from diloco.wire.subjects import Subjects

RUN = bytes(8)
FRAGMENTS = 4


def largest_heartbeat(fragments: int = FRAGMENTS) -> Heartbeat:
    """A heartbeat with each field as long as it can be."""
    counts, data = [MAX_COUNT] * fragments, [(MAX_SHARES - 1, MAX_COUNT, MAX_COUNT)] * MAX_RANGES
    lists: dict[str, Any] = dict.fromkeys(("versions", "steps", "fragment_tokens", "lost_tokens"), counts)
    counted = dict.fromkeys(("incarnation", "step", "tokens", "batch_tokens", "bytes_up", "bytes_down", "refused"), MAX_COUNT)
    texts = {"region": "r" * 16, "software": "9" * 32, "failure": "\N{GRINNING FACE}" * 500}
    return learner_heartbeat("l" * 48, trained=data, loss=1e300, step_s=1e12, **lists, **counted, **texts)


@given(st.sampled_from(sorted(MESSAGES, key=lambda kind: kind.kind)).flatmap(lambda kind: MESSAGES[kind]))
def test_no_message_is_larger_than_its_kind_can_be(message: Message) -> None:
    assert len(framing.pack(message, RUN)) <= largest_bytes(type(message))


@pytest.mark.parametrize("fragments", [1, FRAGMENTS, 100, MAX_FRAGMENTS])
def test_the_largest_heartbeat_fits_and_the_bound_is_not_twice_as_large(fragments: int) -> None:
    size = len(framing.pack(largest_heartbeat(fragments), RUN))
    assert size <= largest_bytes(Heartbeat, fragments) < 2 * size


def test_a_heartbeat_of_four_fragments_has_at_most_five_thousand_bytes() -> None:
    assert largest_bytes(Heartbeat, FRAGMENTS) < 5000
    assert largest_bytes(Announcement) < 3000
    assert largest_bytes(ShardHeartbeat, FRAGMENTS) < 10_000


@pytest.mark.parametrize("size", [5000, 1 << 20])
async def test_a_message_larger_than_its_kind_can_be_is_refused_undecoded(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, decoded = Counted(get_logger()), list[int]()
    monkeypatch.setattr(framing, "unpack", lambda data, *_: decoded.append(len(data)))

    async def handle(heartbeat: Heartbeat, heard: Heard) -> None:
        raise AssertionError

    frame = framing.pack(largest_heartbeat(), RUN, bytes(size))
    heard = Msg(cast(Client, None), Subjects("run").heartbeat("l"), data=frame)
    await decoding(Heartbeat, RUN, handle, refused, FRAGMENTS)(heard)
    assert decoded == []
    assert refused.counts() == {(heard.subject, "FormatError"): 1}


async def test_a_shard_heartbeat_of_a_run_of_the_most_fragments_is_heard() -> None:
    refused, heard_of = Counted(get_logger()), list[str]()

    async def handle(heartbeat: ShardHeartbeat, heard: Heard) -> None:
        heard_of.append(heartbeat.syncer)

    fragments = list(range(MAX_FRAGMENTS))
    open_ = [(fragment, 1, 1, 1.0) for fragment in fragments]
    frame = framing.pack(shard_heartbeat("s", 1, fragments=fragments, open=open_), RUN)
    await decoding(ShardHeartbeat, RUN, handle, refused)(Msg(cast(Client, None), Subjects("run").shard("s"), data=frame))
    assert heard_of == ["s"]
