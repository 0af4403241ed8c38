"""Keyframes of a fragment in a real log: when one is stored, and which are dropped."""

from __future__ import annotations

import pytest
from tests.made.shorten import shorten
from tests.made.syncer_parts import begin, merge, offer

from diloco.core.log.fold import keyframe_bytes
from diloco.errors import FenceError
from diloco.nats.transport import NatsTransport
from diloco_syncer.owning.keyframes import Keyframes

pytestmark = pytest.mark.services


async def test_one_is_due_when_the_log_has_grown_by_its_size_times_the_factor(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 2.0})
    owner, store = await begun.taken_over(), begun.context.store
    copy, size_bytes = owner.copy, keyframe_bytes(64, 1)
    keyframes = Keyframes(begun.context, copy)
    copy.log_bytes = 2 * size_bytes - 1
    await keyframes.keep()
    assert len(await store.reader.keyframe_sequences(0)) == 1
    copy.log_bytes += 1
    await keyframes.keep()
    sequences = await store.reader.keyframe_sequences(0)
    assert (len(sequences), copy.keyframe_sequence, copy.log_bytes) == (2, sequences[-1], 0)


async def test_one_is_due_at_once_after_a_newer_one_that_is_damaged_and_once_the_newest_is_whole_no_other(
    link: NatsTransport,
) -> None:
    begun = await begin(link, **{"log.keep_keyframes": 2, "log.keep_bytes": 0})
    owner, store = await begun.taken_over(), begun.context.store
    keyframes = Keyframes(begun.context, owner.copy)
    first = owner.copy.keyframe_sequence
    await keyframes.store()
    owner.copy.refused, owner.copy.keyframe_sequence = (owner.copy.keyframe_sequence,), first
    for _ in range(2):
        await keyframes.keep()
        assert len(await store.reader.keyframe_sequences(0)) == 3


async def test_the_oldest_are_dropped_by_a_coordinator_alone(link: NatsTransport) -> None:
    begun = await begin(link, **{"log.keyframe_factor": 1e-3, "log.keep_keyframes": 2, "log.keep_bytes": 0})
    owner, store = await begun.taken_over(), begun.context.store
    for number in range(1, 6):
        await owner.commit(merge(owner, offer(owner, "ann", 1.0, number)), 32)
    stored = await store.reader.keyframe_sequences(0)
    assert len(stored) == 6  # with that of version 0
    await shorten(begun)
    assert await store.reader.keyframe_sequences(0) == stored[-2:]
    assert (await begun.owner()).chain.version == 5


async def test_of_a_fragment_that_another_syncer_has_taken_over_nothing_is_stored(link: NatsTransport) -> None:
    begun = await begin(link)
    owner = await begun.taken_over()
    await begun.taken_over(context=begun.another("syncer-1"))
    with pytest.raises(FenceError):
        await owner.keyframes.store()
    assert len(await begun.context.store.reader.keyframe_sequences(0)) == 1
