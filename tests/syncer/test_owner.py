"""One owned fragment: versions, the fence, rollback, the archive and keyframes, on a real log."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tests.made.heartbeats import learner_heartbeat
from tests.made.shorten import shorten
from tests.made.syncer_parts import SIZE, Begun, begin, change, merge, offer
from tests.pace import DEADLINE_S, scaled_s

from diloco.core.run.changes import Changes, Repair, Rollback
from diloco.core.syncer.round import RoundOffer
from diloco.errors import FenceError, FormatError, UnmergeableError
from diloco.nats.transport import NatsTransport
from diloco_syncer.context import clock_s
from diloco_syncer.owning.owner import FragmentOwner

pytestmark = pytest.mark.services

DEAD_S = scaled_s(2.0)


async def test_a_version_is_the_mean_of_its_offers_and_loads_as_the_owner_has_it(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    await owner.commit(merge(owner, offer(owner, "ann", 1.0), offer(owner, "bob", 3.0)), 32)
    assert owner.chain.version == 1
    # an outer gradient is base minus local: the parameters move against it
    np.testing.assert_allclose(owner.replica.theta, np.full(SIZE, -2.0, np.float32))
    loaded = (await begun.owner()).replica
    assert (loaded.chain.version, loaded.chain.epoch, loaded.chain.head) == (1, 1, owner.chain.head)
    np.testing.assert_array_equal(loaded.theta, owner.replica.theta)
    counts = begun.context.counts
    assert (counts.versions, counts.merged_members, counts.round_times.sum_s) == (1, 2, 0.2)


async def test_without_offers_the_log_is_closed(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    await owner.commit(merge(owner, closing=True), 32)
    assert owner.chain.closed
    assert (await begun.owner()).chain.closed
    assert begun.context.counts.versions == 0


async def test_of_two_owners_the_fence_lets_one_append(link: NatsTransport) -> None:
    begun = await begin(link)
    old = await begun.taken_over()
    new = await begun.taken_over(context=begun.another("syncer-1"))
    with pytest.raises(FenceError):
        await old.commit(merge(old, offer(old, "ann", 1.0)), 32)
    assert await new.lost() is None
    assert await old.lost() == "ownership_lost"
    await new.commit(merge(new, offer(new, "ann", 1.0)), 32)
    assert (new.chain.version, new.chain.epoch) == (1, 2)


async def test_a_merge_that_overflows_is_not_appended(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    with pytest.raises(UnmergeableError, match=r"with offers of ann, bob, .* the merge is not finite"):
        await owner.commit(merge(owner, offer(owner, "ann", 3e38), offer(owner, "bob", 3e38)), 32)
    assert (await begun.owner()).chain.version == 0


async def test_the_only_learner_that_lives_moves_as_far_as_it_likes_but_not_before_others_can_have_been_heard(
    link: NatsTransport,
) -> None:
    begun = await begin(link, **{"liveness.dead_s": DEAD_S})
    owner = await begun.taken_over()
    far = merge(owner, offer(owner, "ann", 1000.0))  # of norm 8000, where 0.8 times 100 may be
    begun.context.roster.hear(learner_heartbeat("ann", 4, 0, 0, tokens=40, step_s=0.1), clock_s())
    with pytest.raises(UnmergeableError, match=r"with offers of ann, .* a norm above 80"):
        await owner.commit(far, 32)
    await asyncio.sleep(DEAD_S)
    begun.context.roster.hear(learner_heartbeat("ann", 5, 0, 0, tokens=50, step_s=0.1), clock_s())
    await owner.commit(far, 32)
    assert owner.chain.version == 1


async def test_an_entry_or_a_keyframe_that_nobody_could_read_is_not_stored(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    names, stream = begun.context.store.subjects, begun.context.store.stream
    head = await stream.last(names.record(0))
    record = structs.replace(owner.marker("close"), tokens_lost=2**62 + 1)
    with pytest.raises(FormatError, match="Expected `int` <= 4611686018427387904"):
        await owner.append(record, b"", [])
    assert await stream.last(names.record(0)) == head
    owner.chain.ends[3] = 2**62 + 1
    with capture_logs() as logs:
        await owner.store_keyframe()
    assert [entry["event"] for entry in logs] == ["keyframe_not_stored"]
    assert (await begun.owner()).copy.keyframe_version == 0
    # it goes on all the same
    await owner.commit(merge(owner, offer(owner, "ann", 1.0)), 32)
    assert (await begun.owner()).chain.version == 1


async def test_offers_that_no_entry_could_hold_together_are_left_out_before_anything_is_folded(link: NatsTransport) -> None:
    owner = await (await begin(link)).taken_over()
    claims = {"ann": 5, "bob": 2**61, "cat": 2**61}
    held = [offer(owner, name, 1.0, lost_tokens=lost) for name, lost in claims.items()]
    with pytest.raises(UnmergeableError, match="with offers of cat"):
        await owner.commit(merge(owner, *held), 32)
    assert not owner.replica.theta.any()
    await owner.commit(merge(owner, *held[:2]), 32)
    assert owner.chain.tokens_lost == 2**61 + 5


async def test_heads_are_checked_now_and_then_more_often_while_a_round_is_slow_and_not_while_it_is_busy(
    link: NatsTransport,
) -> None:
    owner = await (await begin(link)).taken_over()
    assert await owner.lost() is None
    now_s = owner.checked_at_s
    assert not owner.must_check(now_s + 9.9)
    assert owner.must_check(now_s + 10.1)
    owner.round.opened_at_s = now_s
    assert not owner.must_check(now_s + 1.9)
    assert owner.must_check(now_s + 2.1)
    owner.busy = True
    assert not owner.must_check(now_s + 100)
    owner.busy = False
    owner.distrust()
    assert owner.must_check(now_s)


async def test_an_order_takes_the_fragment_back_once(link: NatsTransport) -> None:
    begun = await begin(link)
    owner, run = await begun.taken_over(), begun.context.run
    for number, value in enumerate((1.0, 2.0, 4.0), 1):
        await owner.commit(merge(owner, offer(owner, "ann", value, number)), 32)
    assert owner.order() is None
    change(run, Rollback(2, [0]))
    order = owner.order()
    assert order == (1, 2, None)
    await owner.roll_back(*order)
    assert owner.chain.version == 4
    np.testing.assert_allclose(owner.replica.theta, np.full(SIZE, -3.0, np.float32))
    assert owner.order() is None
    assert (await begun.owner()).order() is None, "the log says that it is done"


async def test_a_repair_goes_on_from_the_newest_version_behind_what_is_no_entry_and_takes_the_ends_of_shares_back(
    link: NatsTransport,
) -> None:
    begun = await begin(link)
    owner, run = await begun.taken_over(), begun.context.run
    far = [(0, 10**9, 4)]
    for number, changes in enumerate(({}, {"data": far}, {}), 1):
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, number, **changes)), 32)
    subject = begun.context.store.subjects.record(0)
    sequence = int((await link.bulk.jetstream().publish(subject, b"no record")).seq)
    change(run, Repair(0, 1, sequence))
    order = owner.order()
    assert order == (1, 1, sequence)
    assert owner.chain.version == 3
    assert owner.chain.ends[0] > 10**9
    await owner.roll_back(*order)
    assert (owner.chain.version, owner.chain.ends, owner.chain.tokens_merged) == (4, {0: 4}, 120)
    np.testing.assert_array_equal(owner.replica.theta, np.full(SIZE, -1.0, np.float32))
    assert owner.order() is None
    run.adopt(
        Changes(run.identity).then(Repair(0, 1, 0), at_s=0.0, author="a").then(Repair(0, 4, 0), at_s=0.0, author="a").records
    )
    order = owner.order()
    assert order == (2, 4, 0)
    await owner.roll_back(*order)
    other = await begun.owner()
    assert (other.chain.head, other.chain.version, other.order()) == (owner.chain.head, 5, None)


async def test_a_rollback_to_a_version_that_is_gone_is_given_up(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 1e-3, "log.keep_keyframes": 2, "log.keep_bytes": 0})
    owner, run = await begun.taken_over(), begun.context.run
    for number in range(1, 6):
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, number)), 32)
    await shorten(begun)
    change(run, Rollback(1, [0]))
    with capture_logs() as logs:
        await owner.roll_back(1, 1)
    assert [entry["event"] for entry in logs] == ["rollback_failed"]
    assert owner.chain.version == 5
    assert owner.order() is None


CURRENT = {"merge.against": "current", "merge.method": "rda", "merge.granularity": "tensor", "outer.momentum": 0.9}


async def with_a_late_offer(begun: Begun, *, restarts: bool) -> FragmentOwner:
    """Make three versions, then a fourth of an answer and an offer on version 1; ``restarts``: the fourth by a new owner.

    Each round has another offer, so that each version moves the fragment elsewhere.
    """
    owner = await begun.taken_over()
    rng = np.random.default_rng(3)
    late = None
    for number in range(1, 4):
        if number == 2:
            late = offer(owner, "bob", 0.0)
            late.body.view(np.float32)[:] = rng.normal(size=SIZE)
        answer = offer(owner, "ann", 0.0, number)
        answer.body.view(np.float32)[:] = rng.normal(size=SIZE)
        await owner.commit(merge(owner, answer), 32)
    if restarts:
        await shorten(begun)
        owner = await begun.taken_over(context=begun.another("syncer-1"))
    assert late is not None
    await owner.commit(merge(owner, offer(owner, "ann", 1.0, 4), late), 32)
    return owner


async def test_a_new_owner_takes_a_late_offer_against_the_newest_value_as_the_owner_before_it(link: NatsTransport) -> None:
    """Bit for bit, though it never had the value of the offer's base in memory."""
    with capture_logs() as logs:
        undisturbed = await with_a_late_offer(await begin(link, **CURRENT), restarts=False)
    assert not [entry for entry in logs if entry["event"] == "base_read"]
    with capture_logs() as logs:
        taken_over = await with_a_late_offer(await begin(link, **CURRENT), restarts=True)
    [read] = [entry for entry in logs if entry["event"] == "base_read"]
    assert (read["version"], read["newest"]) == (1, 3)
    assert taken_over.replica.theta.tobytes() == undisturbed.replica.theta.tobytes()
    assert taken_over.replica.momentum.tobytes() == undisturbed.replica.momentum.tobytes()


async def test_an_offer_whose_base_no_log_has_any_more_is_refused_by_name(link: NatsTransport) -> None:
    """Two keyframes stay, of versions 2 and 3, and what follows them: version 1 cannot be folded any more."""
    short = {"log.keyframe_factor": 1e-3, "log.keep_keyframes": 2, "log.keep_bytes": 0}
    begun = await begin(link, **CURRENT, **short)
    with pytest.raises(UnmergeableError, match="version 1 is not in the log, which has those from 2 to the newest") as raised:
        await with_a_late_offer(begun, restarts=True)
    assert (raised.value.event, raised.value.learners) == ("merge_base_unknown", ("bob",))
    # nothing has changed, and the version is made without it
    owner = await begun.taken_over(context=begun.another("syncer-2"))
    assert owner.chain.version == 3
    await owner.commit(merge(owner, offer(owner, "ann", 1.0, 4)), 32)
    assert owner.chain.version == 4


async def test_a_new_owner_refuses_an_offer_that_was_made_from_another_state_than_the_log_has(link: NatsTransport) -> None:
    begun = await begin(link, **CURRENT)
    owner = await begun.taken_over()
    for number in (1, 2):
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, number)), 32)
    owner = await begun.taken_over(context=begun.another("syncer-1"))
    other = offer(owner, "bob", 1.0, base_version=1, round=2, base_hash=b"x" * 32)
    with pytest.raises(UnmergeableError, match="base 1 has another state hash in the log"):
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, 3), other), 32)


async def test_without_current_no_base_is_read(link: NatsTransport) -> None:
    with capture_logs() as logs:
        await with_a_late_offer(await begin(link), restarts=True)
    assert not [entry for entry in logs if entry["event"] == "base_read"]


async def test_offers_are_archived_before_they_are_merged(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.archive": True})
    owner = await begun.taken_over()
    held = offer(owner, "ann", 1.0)
    await owner.commit(merge(owner, held), 32)
    assert await is_archived(begun, held)


async def is_archived(begun: Begun, held: RoundOffer) -> bool:
    """Whether the archive has an offer, whole, as the one that the newest version merges."""
    newest = await begun.context.store.reader.newest(0)
    assert newest is not None
    kept = await begun.context.store.archive.offer(newest.record, newest.record.members[0])
    if kept is None:
        return False
    found, body = kept
    return structs.replace(found, body=held.offer.body) == held.offer and body.tobytes() == held.body.tobytes()


@pytest.mark.parametrize("junk", [b"", b"junk"])
async def test_what_others_store_in_the_archive_stops_no_version_and_hides_no_offer(link: NatsTransport, junk: bytes) -> None:
    begun = await begin(link, **{"log.archive": True})
    owner = await begun.taken_over()
    names, identity = begun.context.store.subjects, (0, "ann", 1, 1)

    async def store(subject: str) -> None:
        for number in range(3):
            await link.append(subject, junk, message_id=f"{subject} {number}", fence=None, timeout_s=DEADLINE_S)

    await store(names.archived(*identity, None))  # ahead of the offer, on the one subject that can be known by then
    held = offer(owner, "ann", 1.0)
    await owner.commit(merge(owner, held), 32)
    newest = await begun.context.store.reader.newest(0)
    assert newest is not None
    assert newest.record.body is not None
    assert newest.record.version == 1
    await store(names.archived(*identity, newest.record.body.attempt))  # behind it
    assert await is_archived(begun, held)


async def test_an_archive_of_an_earlier_version_is_read(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.archive": True})
    owner, store = await begun.taken_over(), begun.context.store
    held = offer(owner, "ann", 1.0)
    await owner.commit(merge(owner, held), 32)
    names, identity = store.subjects, (0, "ann", 1, 1)
    newest = await store.reader.newest(0)
    assert newest is not None
    assert newest.record.body is not None
    kept = await link.last(names.archive_stream, names.archived(*identity, newest.record.body.attempt))
    assert kept is not None
    await link.purge(names.archive_stream, kept.subject, 1 << 62)
    assert not await is_archived(begun, held)
    for number, data in enumerate((b"junk", kept.data)):
        earlier = names.archived(*identity, None)
        await link.append(earlier, data, message_id=f"{number}", fence=None, timeout_s=DEADLINE_S)
    assert await is_archived(begun, held)


async def test_the_residual_outlives_its_owner_in_a_keyframe(link: NatsTransport) -> None:
    begun = await begin(link, **{"codec.record_bits": 4})
    owner = await begun.taken_over()
    step = np.linspace(0.0, 1.0, SIZE, dtype=np.float32)
    held = offer(owner, "ann", 1.0)
    held.body.view(np.float32)[:] = step
    await owner.commit(merge(owner, held), 4)
    assert np.any(owner.residual)
    had = owner.has_keyframe
    await owner.store_keyframe()
    assert (had, owner.has_keyframe) == (False, True)
    np.testing.assert_array_equal((await begun.owner()).residual, owner.residual)


async def test_a_keyframe_that_another_owner_is_ahead_of_is_only_complained_about(link: NatsTransport) -> None:
    begun = await begin(link)
    old = await begun.taken_over()
    await begun.taken_over(context=begun.another("syncer-1"))
    with capture_logs() as logs:
        await old.store_keyframe()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["keyframe_not_stored"]
