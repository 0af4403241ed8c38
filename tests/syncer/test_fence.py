"""What others store on a fragment's head subject moves its owner's fence, and takes nothing over, on a real log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tests.made.syncer_parts import SIZE, Begun, begin, merge, offer, take_fragment
from tests.pace import DEADLINE_S

import diloco.log.stream
from diloco.errors import AppendUncertainError, FenceError
from diloco.nats.transport import NatsTransport
from diloco.wire import framing
from diloco.wire.entries import Claim
from diloco_ops.keys.permissions import Who
from diloco_ops.siege.adversary import Adversary
from diloco_syncer.owning.fence import TRIES
from diloco_syncer.owning.owner import FragmentOwner

pytestmark = pytest.mark.services


class Meddled:
    """A transport on which others do what they like with an append: ``before`` it, ``after`` it, in the place of its answer."""

    def __init__(self, link: NatsTransport) -> None:
        self.link = link
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None
        self.appends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    async def append(self, subject: str, data: bytes, **how: Any) -> int:
        self.appends += 1
        if self.before is not None:
            await self.before(subject)
        sequence = await self.link.append(subject, data, **how)
        if self.after is not None:
            await self.after(subject)
        return sequence


async def store(begun: Begun, data: bytes = b"no entry", subject: str | None = None) -> int:
    """Store a message without a fence, on fragment 0's head subject."""
    transport = begun.context.transport
    link = transport.link if isinstance(transport, Meddled) else transport
    identifier = transport.random_bytes(8).hex()
    return await link.append(
        subject or begun.context.store.subjects.record(0), data, message_id=identifier, fence=None, timeout_s=DEADLINE_S
    )


async def commit(owner: FragmentOwner, value: float = 1.0) -> None:
    number = owner.chain.cursor("ann")[1] + 1
    await owner.commit(merge(owner, offer(owner, "ann", value, number)), 32)


async def entries(begun: Begun) -> list[tuple[str, int]]:
    """All entries of fragment 0 that are stored: each one's kind and version."""
    store = begun.context.store
    newest = await store.reader.head_sequence(0)
    return [(h.record.entry, h.record.version) async for h in store.entries.heads(lambda _: None, 1, newest, fragment=0)]


async def meddled(link: NatsTransport, **overrides: Any) -> tuple[Begun, Meddled]:
    transport = Meddled(link)
    return await begin(cast(NatsTransport, transport), **overrides), transport


async def test_what_an_insider_draws_moves_the_fence_and_its_owner_goes_on_in_its_epoch(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    names, who = begun.context.store.subjects, Who("liar", "syncer")
    adversary = Adversary(1, names, begun.context.run.identity, who, [who])
    kinds = set()
    for _ in range(3):
        for _ in range(30):
            kind, data = adversary._payload("diloco.R.fragment.*.head")
            kinds.add(kind)
            await store(begun, data[: 1 << 19])
        assert await owner.lost() is None
        await store(begun)
        await commit(owner)
    assert kinds >= {"valid", "fields", "damaged", "random", "json", "empty"}
    assert (owner.chain.version, owner.chain.epoch) == (3, 1)
    reader = await begun.owner()
    assert (reader.chain.head, reader.chain.epoch) == (owner.chain.head, 1)
    np.testing.assert_array_equal(reader.replica.theta, np.full(SIZE, -3.0, np.float32))


async def test_entries_that_do_not_follow_are_passed_over_and_the_residual_stays(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    await commit(owner)
    owner.residual[:] = 0.25
    run, record = begun.context.run.identity, owner.marker("takeover")
    for other in (
        structs.replace(record, epoch=owner.chain.epoch),
        structs.replace(owner.marker("close"), previous=b"p" * 32),
        structs.replace(owner.marker("close"), fragment=1),
        structs.replace(owner.marker("close"), epoch=9),
        Claim(0, 7, "syncer-1", 1, 1, False, owner.chain.head, owner.chain.sequence),
    ):
        await store(begun, framing.pack(other, run))
    assert await owner.lost() is None
    await commit(owner)
    assert (owner.chain.version, owner.chain.epoch) == (2, 1)
    assert (await begun.owner()).chain.head == owner.chain.head
    np.testing.assert_array_equal(owner.replica.theta, np.full(SIZE, -2.25, np.float32), "the residual is in version 2")


async def test_an_append_is_tried_as_often_as_somebody_gets_before_it_but_not_for_ever(link: NatsTransport) -> None:
    begun, transport = await meddled(link)
    owner = await begun.taken_over()

    async def before(subject: str) -> None:
        if transport.appends < TRIES:
            await store(begun)

    transport.appends, transport.before = 0, before
    await commit(owner)
    assert (owner.chain.version, transport.appends) == (1, TRIES)

    async def always(subject: str) -> None:
        await store(begun)

    transport.appends, transport.before = 0, always
    with pytest.raises(FenceError):
        await commit(owner)
    assert transport.appends == TRIES
    transport.before = None
    again = await begun.taken_over()
    assert (again.chain.version, again.chain.epoch) == (1, 2)
    assert await entries(begun) == [("takeover", 0), ("version", 1), ("takeover", 1)]


@pytest.mark.parametrize("size", [SIZE, 400_000], ids=["one message", "in parts"])
async def test_an_entry_whose_answer_is_lost_is_found_behind_what_others_store_and_not_stored_twice(
    link: NatsTransport, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.made.syncer_parts.SIZE", size)
    begun, transport = await meddled(link)
    owner = await begun.taken_over()

    async def after(subject: str) -> None:
        await store(begun)
        await store(begun, b"")
        if transport.appends == 1:
            raise AppendUncertainError(f"{subject}: no answer")

    transport.appends, transport.after = 0, after
    await commit(owner)
    transport.after = None
    await commit(owner)
    assert (owner.chain.version, owner.chain.epoch) == (2, 1)
    assert await entries(begun) == [("takeover", 0), ("version", 1), ("version", 2)]
    reader = await begun.owner()
    assert reader.chain.head == owner.chain.head
    np.testing.assert_array_equal(reader.replica.theta, owner.replica.theta)


async def test_an_entry_that_is_not_stored_before_others_store_theirs_is_stored_behind(link: NatsTransport) -> None:
    begun, transport = await meddled(link)
    owner = await begun.taken_over()

    async def before(subject: str) -> None:
        if transport.appends == 1:
            await store(begun)
            raise AppendUncertainError(f"{subject}: no answer")

    transport.appends, transport.before = 0, before
    await commit(owner)
    assert await entries(begun) == [("takeover", 0), ("version", 1)]
    assert (await begun.owner()).chain.head == owner.chain.head


async def test_a_takeover_behind_what_is_no_entry_ends_the_owner_s_turn(link: NatsTransport) -> None:
    begun = await begin(link)
    old = await begun.taken_over()
    await store(begun)
    new = await take_fragment(begun, begun.another("syncer-1"))
    assert new is not None
    await store(begun)
    with pytest.raises(FenceError):
        await commit(old)
    assert await old.lost() == "ownership_lost"
    assert await new.lost() is None
    await commit(new)
    assert (new.chain.version, new.chain.epoch) == (1, 2)


async def test_the_takeover_of_one_that_knows_another_head_ends_the_turn_of_an_owner_whose_entry_was_wrong(
    link: NatsTransport,
) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    before = owner.chain.head
    owner.replica.theta += 0.5  # bad memory
    await commit(owner)
    takeover = structs.replace(owner.marker("takeover"), previous=before, version=0, state_hash=begun.genesis[0].fragments[0])
    await store(begun, framing.pack(takeover, begun.context.run.identity))
    assert await owner.lost() == "ownership_lost"
    with pytest.raises(FenceError):
        await commit(owner)


async def test_a_takeover_in_the_place_of_messages_that_a_server_lost_ends_the_turn_of_an_owner_that_had_passed_over_them(
    link: NatsTransport,
) -> None:
    begun = await begin(link)
    old = await begun.taken_over()
    await commit(old)
    new = await take_fragment(begun, begun.another("syncer-1"))
    assert new is not None
    await commit(new)
    old.copy.fence = await store(begun)  # it stood there already, behind messages that are gone
    await store(begun)
    assert await old.lost() == "ownership_lost"
    assert await new.lost() is None


async def test_a_takeover_needs_no_second_load_for_what_is_stored_meanwhile(link: NatsTransport) -> None:
    begun, transport = await meddled(link)
    old = await begun.taken_over()
    await commit(old)

    async def before(subject: str) -> None:
        if transport.appends < 3:
            await store(begun)

    transport.appends, transport.before = 0, before
    with capture_logs() as logs:
        new = await take_fragment(begun, begun.another("syncer-1"))
    assert new is not None
    assert (new.chain.version, new.chain.epoch, transport.appends) == (1, 2, 3)
    assert "takeover_retried" not in [entry["event"] for entry in logs]


async def test_a_keyframe_is_stored_behind_what_is_no_entry_and_found_behind_what_is_no_keyframe(link: NatsTransport) -> None:
    begun, transport = await meddled(link)
    owner = await begun.taken_over()
    await commit(owner)
    head = begun.context.store.subjects.keyframe(0)

    async def after(subject: str) -> None:
        await store(begun, subject=head)
        if transport.appends == 2:
            raise AppendUncertainError(f"{subject}: no answer")

    await store(begun)
    transport.appends, transport.after = 0, after
    with capture_logs() as logs:
        await owner.store_keyframe()
    assert "keyframe_not_stored" not in [entry["event"] for entry in logs]
    stored = await begun.context.store.stream.get(owner.copy.keyframe_sequence)
    assert stored is not None
    assert stored.subject == head
    assert (await begun.owner()).copy.keyframe_sequence == owner.copy.keyframe_sequence
    assert owner.has_keyframe
    transport.after = None
    await commit(owner)
    assert (owner.chain.version, owner.chain.epoch) == (2, 1)


async def test_a_log_is_closed_behind_what_is_no_entry_and_stays_closed(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    await store(begun)
    await owner.commit(merge(owner, closing=True), 32)
    await store(begun)
    assert owner.chain.closed
    assert await owner.lost() is None
    assert (await begun.owner()).chain.closed


async def test_more_than_can_be_looked_at_is_left_to_a_takeover(link: NatsTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    monkeypatch.setattr(diloco.log.stream, "MOST_BEHIND", 5)
    for _ in range(5):
        await store(begun)
    assert await owner.lost() is None
    for _ in range(6):
        await store(begun)
    with pytest.raises(FenceError):
        await commit(owner)
    assert await owner.lost() == "ownership_lost"
    monkeypatch.undo()
    monkeypatch.setattr(diloco.log.stream, "MOST_BEHIND_BYTES", 1000)
    await store(begun, bytes(1001))
    again = await begun.owner()
    await store(begun, bytes(1001))
    assert await again.lost() == "ownership_lost"
