"""A run is founded once: what happens when its log was purged, and every service begins again."""

from __future__ import annotations

from tests.made.fixtures import Launch
from tests.services.cluster import small, some_versions

ALL = 2**62  # a sequence beyond all


async def test_a_purged_log_ends_its_founder_and_is_not_begun_again(launch: Launch) -> None:
    run = launch(small(tokens=10**9))
    await run.begin()
    await some_versions(run)
    for service in run.services:
        service.kill()
    for toy in run.toys:
        toy.stop()
    run.toys.clear()
    link = await run.link()
    await link.purge(run.subjects.log_stream, ">", ALL)

    syncer, founder = run.syncer(0), run.toy_process(0)
    [(code, said)] = await run.refused(founder)

    assert code == 5
    assert f"run '{run.name}': the bucket's key 'genesis' says that the run was founded, but its log is empty" in said
    assert "diloco up --resume" in said
    await run.until(lambda: bool(run.events("log_is_empty", syncer.name)), "the syncer says why it waits")
    assert await link.last(run.subjects.log_stream, run.subjects.genesis) is None
