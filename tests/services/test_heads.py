"""A syncer under its real identity stores what it likes on the heads of fragments: their owners go on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tests.made import raw_messages
from tests.services.cluster import Cluster, small, some_versions
from tests.services.forking import Nursery
from tests.services.secured import guest, make_keys, members, serving

from diloco.wire.subjects import Subjects
from diloco_ops.keys.permissions import Who

RUN, LIAR, MESSAGES = "headed", "liar", 40
LOST = ("ownership_lost", "version_fenced", "takeover_retried", "handed_over")


@pytest.mark.slow  # schedules in virtual time have such syncers, too
async def test_what_a_syncer_stores_on_heads_takes_no_fragment_from_its_owner(nursery: Nursery, tmp_path: Path) -> None:
    """Of each message an owner had to take its fragment over again: 0.65 s, and a round's offers."""
    keys = make_keys(tmp_path / "keys", RUN, [*members(3, 2), Who(LIAR, "syncer")])
    names, draw = Subjects(RUN), Random(1)
    with serving(keys, tmp_path / "nats") as server:
        cluster = Cluster(nursery, tmp_path / RUN, server.url, RUN, small(tokens=10**9))
        cluster.identity, cluster.forged = str(keys.path / "identities" / "{name}.identity"), True
        try:
            await cluster.begin()
            await some_versions(cluster)
            store, fragments = await cluster.store()
            before = [len(cluster.events(event)) for event in (*LOST, "taken_over")]
            async with guest(server, keys, LIAR) as liar:
                for number in range(MESSAGES):
                    for fragment in fragments.fragments:
                        for subject in (names.record(fragment.index), names.keyframe(fragment.index)):
                            entry = await store.transport.last(names.log_stream, subject)
                            assert entry is not None
                            data = draw.choice((b"", draw.randbytes(50), entry.data[:-1], entry.data))
                            await raw_messages.publish(liar.link.bulk, subject.encode(), data)
                    if number % 10 == 9:
                        await some_versions(cluster, 1)
                await some_versions(cluster)
                assert not liar.told, "it has the right to all that"
            assert [len(cluster.events(event)) for event in (*LOST, "taken_over")] == before
            cluster.hurry()
        finally:
            await cluster.close()
