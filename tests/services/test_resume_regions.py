"""Checkpoints of runs in regions, and going on from them: after everything was killed, without a region, in others or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.made.fixtures import Regions
from tests.services.apart import REGIONS, Region, apart
from tests.services.cluster import some_versions
from tests.services.toy import SAMPLES

from diloco.errors import RunError
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco_ops.audit import verify
from diloco_ops.checkpoints import checkpoint
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.reading import region_logs, run_reader
from diloco_ops.up import resume
from diloco_ops.up.embedded import Embedded, server_name

pytestmark = pytest.mark.usefixtures("patient_commands")
LASTS: dict[str, Any] = {"tokens": 3 * 100_000 * SAMPLES, "round__steps": 18}
Ends = list[tuple[int, str]]  # of each fragment: version, and hash of the state


async def ends(path: Path) -> Ends:
    """Where the logs of a run end, by the servers' files."""
    async with run_reader.opened(path) as seen:
        chains = await run_reader.read_chains(seen.log)
        return [(chain.version, chain.state_hash.hex()) for chain in chains]


async def killed(run: Region) -> list[int]:
    """Kill all processes of a run at once; return the versions that were applied somewhere."""
    run.save()
    for service in run.services:
        service.kill()
    applied = [max(of) for of in zip(*(beats[-1].versions for beats in run.heartbeats.values()), strict=True)]
    for server in run.embedded.servers.values():
        server.kill()
    return applied


async def elsewhere(source: RunCheckpoint, path: Path, regions: list[str], at: int | None = None) -> Ends:
    """Go on from a checkpoint in these regions, and say where the logs end there."""
    settings = resume.changed(source, {"regions.names": regions, "shards": max(1, len(regions))})
    await resume.prepare(source, RunDirectory(path, source.manifest.run, "", None, settings), at=at)
    verdict = await verify.check(path)
    assert [check for check in verdict.checks if check.state == "fails"] == []
    return await ends(path)


async def test_a_run_of_which_all_was_killed_and_a_region_lost_goes_on_in_the_regions_that_are_left(
    regions: Regions, tmp_path: Path
) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run, more=1)
    applied = await killed(run)

    shutil.rmtree(run.directory / server_name("us"))

    without = await ends(run.directory)  # what was committed is in a majority, and a majority is left
    assert all(version >= least for (version, _), least in zip(without, applied, strict=True))
    taken, _ = await checkpoint.take(run.directory)
    taken.check()
    assert [cut.version for cut in taken.manifest.fragments] == [version for version, _ in without]
    assert await elsewhere(taken, tmp_path / "fewer", ["ap", "eu"]) == without
    shutil.rmtree(run.directory / server_name("eu"))
    missing = rf"{run.directory / server_name('eu')}: no server answers.*; {run.directory / server_name('us')}: no server"
    for asked in (ends, checkpoint.take):
        with pytest.raises(RunError, match=f"1 of 3 regions hold this run's log, and 2 are needed .*{missing}.*; put these"):
            await asked(run.directory)


@pytest.mark.slow  # the test above has the usual case
async def test_a_checkpoint_of_a_run_in_regions_serves_in_the_same_in_others_and_in_none(
    regions: Regions, tmp_path: Path
) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    with run.slowly():
        run.save()
        live, problems = await checkpoint.take(run.directory)
    # an owner or a learner may have gone on to the next version before the mark came; nothing else is missing
    assert [problem for problem in problems if "rounding" not in problem and "beyond the cut" not in problem] == []
    assert sorted(live.manifest.learners) == ["toy-0", "toy-1", "toy-2"]
    await killed(run)
    whole, cut = await ends(run.directory), [cut.version for cut in live.manifest.fragments]
    assert [version for version, _ in await elsewhere(live, tmp_path / "live", list(REGIONS))] == cut
    taken, _ = await checkpoint.take(run.directory)
    assert await elsewhere(taken, tmp_path / "same", list(REGIONS)) == whole
    assert await elsewhere(taken, tmp_path / "one", []) == whole
    back = await elsewhere(taken, tmp_path / "back", ["a", "b", "c", "d"], at=1)
    assert {version for version, _ in back} == {1}
    there, _ = await checkpoint.take(tmp_path / "one")
    assert await elsewhere(there, tmp_path / "again", list(REGIONS)) == whole


@pytest.mark.slow  # what it makes whole, the first test reads whole
async def test_a_region_that_was_lost_gets_its_log_back_before_anybody_appends(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    await killed(run)
    whole = await ends(run.directory)
    shutil.rmtree(run.directory / server_name("eu"))
    embedded = Embedded(run.directory, REGIONS)
    try:
        for name in embedded.servers:
            embedded.start(name)
        directory = RunDirectory(run.directory, run.name, embedded.url, None, run.settings)
        await region_logs.give_back(directory, embedded.url, embedded.region_urls, get_logger())
    finally:
        embedded.stop()
    shutil.rmtree(run.directory / server_name("ap"))  # what eu has now counts like any region's
    assert await ends(run.directory) == whole
