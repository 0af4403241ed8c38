"""Merges made again from the archive, where an offer of an embedding was cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.held_offers import fragment_of, held, replica_of
from tests.made.log_entries import record_of
from tests.made.run_settings import MERGES, settings_of

from diloco.core.syncer import merging
from diloco.core.syncer.round import RoundOffer
from diloco.log.stream import LogEntry
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember, Offer
from diloco_ops.audit.remake import RemadeMerges
from diloco_ops.reading.run_reader import RunReader

FRAGMENT = fragment_of(8, 8, embedding=True)
THETA = np.ones(64, np.float32)
OFFERS = {name: held(name, np.full(64, value, np.float32), tokens=10) for name, value in (("ann", 1), ("bob", 1), ("cat", 10))}


class Archive:
    """The merged offers."""

    async def offer(self, record: Record, member: MergeMember) -> tuple[Offer, NDArray[np.uint8]]:
        item = OFFERS[member.learner]
        assert isinstance(item.offer, Offer)
        return item.offer, item.body


def entry_of(offers: list[RoundOffer], factor: float) -> LogEntry:
    """The version that an owner makes of the offers with this ``quarantine.factor``."""
    settings = settings_of(MERGES, quarantine__factor=factor)
    merged = merging.merged(FRAGMENT, settings, offers, {}, THETA)
    members = [MergeMember.of(offer, 10.0) for item in offers for offer in item.offer.members]
    record = record_of(4, *members, previous=replica_of(THETA).chain.head, bits=32)
    body = merging.encode(merged, np.zeros_like(merged), settings, 32)
    return cast(LogEntry, SimpleNamespace(record=record, body=body))


@pytest.mark.parametrize(
    ("made_with", "known", "holds"),
    [
        (5.0, [5.0], True),
        (5.0, [20.0, 5.0], True),  # it was changed while the run went on
        (0.0, [5.0], True),  # by an owner of an earlier version
        (5.0, [20.0], False),
    ],
)
async def test_a_merge_with_a_cut_offer_is_made_again(made_with: float, known: list[float], holds: bool) -> None:
    run = SimpleNamespace(created=settings_of(MERGES, quarantine__factor=known[0]))
    seen = SimpleNamespace(log=SimpleNamespace(archive=Archive()), run=run, map=SimpleNamespace(fragments=[FRAGMENT]))
    again = RemadeMerges(cast(RunReader, seen), 0, known)
    await again.redo(replica_of(THETA), entry_of(list(OFFERS.values()), made_with))
    assert (again.redone, len(again.wrong)) == ((1, 0) if holds else (0, 1))
