"""Offers come from their stream to the rounds of the fragments that are owned, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.made import syncer_parts
from tests.made.syncer_parts import Begun, begin, merge, offer, send_offer
from tests.pace import DEADLINE_S

from diloco.control.admission import join
from diloco.core.tensors import codec, quantise
from diloco.nats.transport import NatsTransport
from diloco.wire import subjects
from diloco.wire.body import PART_BYTES
from diloco_syncer.offers.intake import Intake
from diloco_syncer.owning.owner import FragmentOwner

pytestmark = pytest.mark.services


@asynccontextmanager
async def reading(begun: Begun, *owners: FragmentOwner) -> AsyncIterator[tuple[Intake, asyncio.Event]]:
    """Read the offers of these fragments; the event is set when one is held."""
    held = asyncio.Event()
    intake = Intake(begun.context, None, lambda _: held.set())
    owned = {owner.index: owner for owner in owners}
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        await intake.read(owned, begun.ownership(), group)
        yield intake, held
        await intake.stop()


async def admit(begun: Begun, *learners: str) -> None:
    run, fragments = begun.context.run, begun.context.map
    for learner in learners:
        await join(run, learner, 1, fragments, run.created.digest())


async def test_an_offer_that_is_stored_is_held_by_its_fragments_round(link: NatsTransport) -> None:
    begun = await begin(link)
    await admit(begun, "ann")
    owner = await begun.taken_over()
    async with reading(begun, owner) as (_, held):
        await send_offer(owner, offer(owner, "ann", 1.0))
        await held.wait()
    assert [answer.learner for answer in owner.round.answers()] == ["ann"]


async def test_an_offer_of_a_learner_that_was_never_admitted_is_refused(link: NatsTransport) -> None:
    begun = await begin(link)
    await admit(begun, "ann")
    owner = await begun.taken_over()
    with capture_logs() as logs:
        async with reading(begun, owner) as (_, held):
            await send_offer(owner, offer(owner, "eve", 1.0))
            await send_offer(owner, offer(owner, "ann", 1.0))
            await held.wait()
    assert [answer.learner for answer in owner.round.answers()] == ["ann"]
    assert [(e["event"], e["sender"]) for e in logs if e["log_level"] == "warning"] == [("message_refused", "eve")]
    assert begun.context.refused.total == 1


async def test_a_new_owner_is_given_what_comes_next_and_after_reading_again_everything(link: NatsTransport) -> None:
    begun = await begin(link)
    await admit(begun, "ann", "bob")
    old = await begun.taken_over()
    new = await begun.taken_over()
    async with reading(begun, old) as (intake, held):
        await send_offer(old, offer(old, "ann", 1.0))
        await held.wait()
        held.clear()
        intake.replace(new)
        await send_offer(new, offer(new, "bob", 1.0))
        await held.wait()
        assert [answer.learner for answer in new.round.answers()] == ["bob"]
        held.clear()
        intake.read_again()
        async with asyncio.TaskGroup() as group:
            await intake.read({0: new}, begun.ownership(), group)
            while len(new.round.answers()) < 2:
                await held.wait()
                held.clear()
            await intake.stop()


async def test_parts_without_a_head_take_no_more_memory_than_an_offer(
    link: NatsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * PART_BYTES  # parameters; an offer of four bits has three parts, one of 32 bits, which is none of this run's, 17
    monkeypatch.setattr(syncer_parts, "SIZE", size)
    begun = await begin(link, **{"codec.offer_bits": 4})
    owner, transport = await begun.taken_over(), begun.context.transport
    head = begun.context.store.subjects.offer(0, "eve")
    async with reading(begun, owner) as (intake, _):
        for number, (subject, data) in enumerate(
            [(subjects.offer_part(head, index), b"attempt." + bytes(PART_BYTES - 8)) for index in range(17)] + [(head, b"none")]
        ):
            await transport.append(subject, data, message_id=f"eve/{number}", fence=None, timeout_s=DEADLINE_S)
        while not begun.context.refused.total:
            await asyncio.sleep(0.01)
        [collector] = intake.collectors.values()
        assert 0 < collector._parts[0].kept_bytes <= codec.packed_limit(quantise.body_bytes(size, 4)) + PART_BYTES


async def test_an_offer_that_was_merged_is_passed_over(link: NatsTransport) -> None:
    begun = await begin(link)
    await admit(begun, "ann", "bob")
    owner = await begun.taken_over()
    held_before = offer(owner, "ann", 1.0)
    await send_offer(owner, held_before)
    await owner.commit(merge(owner, held_before), 32)
    with capture_logs() as logs:
        async with reading(begun, owner) as (_, held):
            await send_offer(owner, offer(owner, "bob", 1.0))
            await held.wait()  # the stream is read in its order: ann's offer has been judged too
    assert [e["sender"] for e in logs if e["event"] == "offer_passed_over"] == ["ann"]
    assert [answer.learner for answer in owner.round.answers()] == ["bob"]
    assert begun.context.counts.missed_offers.counts() == {("ann", "repeated"): 1}
    assert begun.context.refused.total == 0


async def test_what_cannot_be_is_counted_by_sender_and_reason(link: NatsTransport) -> None:
    """No steps are refused; a base, a round and a hash that the log does not have are missed, with a warning that names eve."""
    begun = await begin(link)
    await admit(begun, "ann", "eve")
    owner = await begun.taken_over()
    impossible: list[dict[str, Any]] = [
        {"base_version": 10**6},
        {"round": 10**6},
        {"base_hash": bytes(32)},
        {"steps": 0, "tokens": 0, "data": []},
    ]
    async with reading(begun, owner) as (_, held):
        for number, changes in enumerate(impossible, 1):
            await send_offer(owner, offer(owner, "eve", 1.0, number, **changes))
            # the next one would take its place in the stream
            while begun.context.refused.total + begun.context.counts.missed_offers.total < number:
                await asyncio.sleep(0.01)
        await send_offer(owner, offer(owner, "ann", 1.0))
        await held.wait()
    counts = begun.context.counts
    assert counts.refused_offers.counts() == {("eve", "claim"): 1}
    assert begun.context.refused.counts() == {("eve", "ClaimError"): 1}
    assert counts.missed_offers.counts() == {("eve", "ahead"): 2, ("eve", "other_base"): 1}
