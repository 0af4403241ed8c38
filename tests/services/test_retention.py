"""What stays of a log: keyframes by count, entries since the oldest of them, and, with an archive, every merged offer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.made.fixtures import Launch
from tests.made.run_checks import waiting_settings
from tests.services.cluster import NEVER_S, check_accounts, small
from tests.services.toy import SAMPLES

from diloco.core.tensors import quantise
from diloco.errors import RunError


async def test_old_keyframes_go_and_what_is_needed_stays(launch: Launch) -> None:
    keeps = {"log__keyframe_factor": 0.1, "log__keep_bytes": 0, "log__keep_keyframes": 3}
    run = launch(waiting_settings(steps=90, liveness__dead_s=NEVER_S, **keeps))
    await run.begin()
    await run.ended()

    store, _ = await run.store()
    genesis = await store.reader.genesis()
    assert genesis is not None
    for log in await run.folded():
        sequences = await store.reader.keyframe_sequences(log.index)
        assert len(run.events("keyframe_stored")) > 4 * 3
        assert len(sequences) == 3
        with pytest.raises(RunError):
            await store.reader.load_first(log.index, *genesis)  # genesis's is gone
        assert log.passed_over == 0
        for toy in run.toys:
            assert toy.thetas[log.index].tobytes() == log.theta.tobytes()


@pytest.mark.promise("the archive holds every merged offer")
async def test_every_merged_offer_is_in_the_archive(launch: Launch) -> None:
    run = launch(small(tokens=3 * 60 * SAMPLES, log__archive=True))
    await run.begin()
    await run.ended()

    store, fragments = await run.store()
    folded = await run.folded()
    check_accounts(await run.finished_heartbeats(), folded)
    for log in folded:
        for record in log.versions:
            for member in record.members:
                kept = await store.archive.offer(record, member)
                assert kept is not None
                offer, body = kept
                assert (offer.tokens, offer.steps, offer.base_version) == (member.tokens, member.steps, member.base_version)
                assert body.size == quantise.body_bytes(fragments.fragments[log.index].size, offer.bits)
                assert await store.archive.offer(record, replace(member, incarnation=1)) is None
