"""What an insider can have a region's merge do that is not its own: a syncer of another region, a learner, a coordinator."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made.regional_offers import combined_of
from tests.services.cluster import small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, Guarded, two_regions
from tests.services.secured import Guest, guest

from diloco.wire import framing, subjects
from diloco.wire.control import Announcement
from diloco.wire.entries import CommitNotice
from diloco.wire.subjects import Subjects
from diloco_ops.keys.permissions import Who

RUN = "regional"
NAMES = Subjects(RUN)
SYNCER = "mallory"  # of region us, as which it is known in eu too
LIARS = [Who(SYNCER, "syncer", "us"), Who("eve", "learner", "eu"), Who("trudy", "coordinator", "eu")]
STRAY_BYTES = 64 * 1024
MADE = 6  # versions of every fragment that are made in spite of the lies
LARGEST = 2**62
LEARNERS, FRAGMENTS = 4, 4


def applied(cluster: Guarded) -> list[int]:
    """By fragment: the version that all learners have."""
    return [min(heard[-1].versions[index] for heard in cluster.heartbeats.values()) for index in range(FRAGMENTS)]


def lies(cluster: Guarded, number: int, announced: list[tuple[int, bool]]) -> Iterator[tuple[str, bytes]]:
    """Announcements, notices and regional offers of every fragment.

    ``announced``: how far ahead of the version that the learners have, and whether as a closing round.
    """
    run = cluster.run_id
    for index, version in enumerate(applied(cluster)):
        for ahead, closing in announced:
            lie = Announcement(index, version + ahead, LARGEST, SYNCER, 0.0, closing, LARGEST, cluster.settings.round.steps, [])
            yield NAMES.round(index), framing.pack(lie, run)
        for sequence in (1, LARGEST):
            yield NAMES.commit_notice(index), framing.pack(CommitNotice(index, 0, number, bytes(32), sequence), run)
        offer = NAMES.regional_offer(index, SYNCER)
        yield offer, framing.pack(combined_of(SYNCER, fragment=index, number=number + 1), run)
        yield subjects.offer_part(offer, number % 3), bytes(STRAY_BYTES)
        yield subjects.log_part(NAMES.record(index), b"attempt.", 0), b"attempt.stray"


@pytest.mark.parametrize(
    "announced",
    [
        pytest.param([(1, True)], id="the last round"),
        pytest.param([(2, False), (3, True), (2**40, True)], id="later rounds", marks=pytest.mark.slow),
    ],
)
async def test_no_syncer_of_another_region_stops_a_regions_merge(
    nursery: Nursery, tmp_path: Path, announced: list[tuple[int, bool]]
) -> None:
    settings = small(
        learners=LEARNERS,
        tokens=10**9,
        regions__names=["eu", "us"],
        regions__merge=True,
        round__quorum="all",
        regions__away_s=600.0,
    )
    async with two_regions(nursery, tmp_path, RUN, settings, LIARS) as cluster, contextlib.AsyncExitStack() as stack:
        cluster.liars = {SYNCER}
        for index in range(FRAGMENTS):  # which any syncer may write
            cluster.liars |= {NAMES.commit_notice(index), NAMES.round(index)}
        cluster.coordinator()
        cluster.syncers()
        for share in range(LEARNERS):
            cluster.toy_process(share)
        await cluster.link()
        toys = [f"toy-{share}" for share in range(LEARNERS)]
        await cluster.until(lambda: cluster.heartbeats.keys() >= set(toys), "learners are heard")
        await some_versions(cluster, of=toys)
        links = [
            await stack.enter_async_context(guest(cluster.servers[CONTROL], cluster.keys, SYNCER, cluster.servers[region]))
            for region in ("eu", "us")
        ]
        before = len(cluster.events("regional_offer_stored"))

        async def lie(number: int) -> None:
            for subject, data in lies(cluster, number, announced):
                for there in links:
                    client = there.link.control if ".round." in subject else there.link.bulk
                    await client.publish(subject, data)
            for there in links:
                await there.flush()

        wanted = [version + MADE for version in applied(cluster)]
        for number in itertools.count(1):  # of each round that is open, again with every version
            await lie(number)
            known = applied(cluster)
            if all(map(operator.ge, known, wanted)):
                break
            await cluster.until(lambda known=known: applied(cluster) != known, "a version is made")  # type: ignore[misc]
        versions = sum(cluster.heartbeats[toys[0]][-1].versions)
        # one of each region where the owner is not, and one more to an announcement of an epoch that none had before
        assert len(cluster.events("regional_offer_stored")) - before <= versions + 2 * FRAGMENTS
        eu, us = links
        assert await eu.refused(NAMES.regional_offer(0, SYNCER)) == []  # it is of another region
        assert await us.refused(NAMES.regional_offer(0, SYNCER)) == [NAMES.regional_offer(0, SYNCER)]
        for name in ("eve", "trudy"):
            async with guest(cluster.servers[CONTROL], cluster.keys, name, cluster.servers["eu"]) as other:
                tried = [
                    NAMES.round(0),
                    NAMES.commit_notice(0),
                    NAMES.regional_offer(0, name),
                    NAMES.regional_offer(0, "syncer-0"),
                ]
                await _publish(other, tried)
                assert await other.refused(*tried) == []
        for region in ("eu", "us"):
            await cluster.read(region, closed=False)  # the reference folds it


async def _publish(sender: Guest, names: list[str]) -> None:
    for name in names:
        for client in (sender.link.control, sender.link.bulk):
            await client.publish(name, b"lie")
