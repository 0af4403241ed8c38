"""A fragment is taken over: the entry that says so, on a real log."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs
from tests.made.syncer_parts import begin, merge, offer, take_fragment

from diloco.log.follower import LogCopy
from diloco.nats.transport import NatsTransport

pytestmark = pytest.mark.services


async def test_each_takeover_is_an_entry_of_a_higher_epoch(link: NatsTransport) -> None:
    begun = await begin(link)
    old = await take_fragment(begun)
    assert old is not None
    await old.commit(merge(old, offer(old, "ann", 1.0)), 32)
    with capture_logs() as logs:
        new = await take_fragment(begun, begun.another("syncer-1"))
    assert new is not None
    assert (new.chain.version, new.chain.epoch) == (1, 2)
    assert [entry["event"] for entry in logs] == ["residual_reset", "taken_over"]
    assert await old.lost() == "ownership_lost"


async def test_a_fragment_that_is_no_longer_wanted_is_left_alone(link: NatsTransport) -> None:
    begun = await begin(link)
    assert await take_fragment(begun, wanted=False) is None
    assert (await begun.owner()).chain.epoch == 0


async def test_a_log_that_is_closed_is_owned_without_a_word(link: NatsTransport) -> None:
    begun = await begin(link)
    old = await take_fragment(begun)
    assert old is not None
    await old.commit(merge(old, closing=True), 32)
    new = await take_fragment(begun, begun.another("syncer-1"))
    assert new is not None
    assert new.chain.closed
    assert new.has_keyframe, "none is stored of a closed log"
    assert await old.lost() is None


async def test_an_entry_that_nobody_could_read_takes_nothing_over(link: NatsTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = await begin(link)
    copy = await begun.copies.take(0)
    copy.replica.chain.epoch = 2**62  # as high as an epoch can be

    async def taken(index: int) -> LogCopy:
        return copy

    monkeypatch.setattr(begun.copies, "take", taken)
    assert await take_fragment(begun) is None
    assert await take_fragment(begun) is None
    monkeypatch.undo()
    assert (await begun.owner()).chain.epoch == 0
    assert begun.context.refused.counts() == {("syncer-0", "FormatError"): 2}
