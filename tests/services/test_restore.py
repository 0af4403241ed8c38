"""``diloco restore``: a checkpoint onto given servers with identities, after everything else was lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.apart import demand_one_log
from tests.services.cluster import small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, Guarded, in_regions, keys_of
from tests.services.secured import Guest, guest
from tests.services.toy import SAMPLES

from diloco.errors import DilocoError, RunError, SettingsError
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.settings.run import RunSettings
from diloco.wire.subjects import Subjects
from diloco_ops import checkpoint, collecting, manifest, resume, verify
from diloco_ops.attach import attached
from diloco_ops.broker import snapshot
from diloco_ops.broker.snapshot import Snapshot
from diloco_ops.keys.folder import Folder
from diloco_ops.manifest import Checkpoint
from diloco_ops.restoration import region_urls, restore_to

pytestmark = pytest.mark.usefixtures("patient_commands")
RUN = "run"
REGIONS = ("ap", "eu", "us")
NAMES = Subjects(RUN)


def settings_of(regions: Sequence[str] = REGIONS) -> RunSettings:
    return small(shards=3, learners=3, tokens=3 * 100_000 * SAMPLES, round__steps=18, regions__names=list(regions))


@dataclass
class Operator:
    """An operator's command line: one identity, and the servers of a cluster."""

    cluster: Guarded
    keys: Folder

    @property
    def identity(self) -> Path:
        return self.keys.identity_file("operator")

    async def attach(self, path: Path) -> Path:
        bulk = self.cluster.servers[self.cluster.regions[0]].url
        await attached(path, RUN, self.cluster.url, bulk, str(self.identity))
        return path

    async def restore(self, source: Checkpoint, **overrides: Any) -> list[str]:
        said: list[str] = []
        bulk = [f"{region}={self.cluster.servers[region].url}" for region in self.cluster.regions]
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        await restore_to(source.path, self.cluster.url, bulk, self.identity, given, said.append)
        return said

    @contextlib.asynccontextmanager
    async def link(self, place: str) -> AsyncIterator[NatsTransport]:
        control = self.cluster.servers[CONTROL]
        async with guest(control, self.keys, "operator", None if place == CONTROL else self.cluster.servers[place]) as found:
            yield found.link

    async def held(self, place: str) -> dict[str, Any] | None:
        """What a region's server has of the log, or the control store of the bucket."""
        async with self.link(place) as link:
            return await streams.info(link, f"KV_{NAMES.bucket}" if place == CONTROL else NAMES.log_stream)


@pytest.fixture
def keys(tmp_path: Path) -> Folder:
    return keys_of(tmp_path / "keys", RUN, settings_of(), REGIONS)


async def taken_and_lost(nursery: Nursery, tmp_path: Path, keys: Folder) -> Checkpoint:
    """A checkpoint of a run in three regions, with its learners' states; all servers are gone then."""
    async with in_regions(nursery, tmp_path, RUN, settings_of(), REGIONS, keys) as run:
        await run.begin()
        await some_versions(run, more=1)
        seen = await Operator(run, keys).attach(tmp_path / "seen")
        with run.slowly():
            taken, _ = await checkpoint.take(seen)
        assert sorted(taken.absent()) == ["toy-0", "toy-1", "toy-2"]
        await some_versions(run, more=1)  # work that is lost
        assert await collecting.collect(taken.path, [run.directory], lambda _: None) == 0
        directory = run.directory
    shutil.rmtree(directory)
    for place in (CONTROL, *REGIONS):
        shutil.rmtree(tmp_path / place)
    return manifest.load(taken.path)


def put_states_back(source: Checkpoint, run: Guarded) -> None:
    for name, learner in source.manifest.learners.items():
        resume.copy_state([source.path / file.file for file in learner.files], run.directory / "checkpoints", name)


async def demand_goes_on(run: Guarded, source: Checkpoint, operator: Operator, path: Path, regions: Sequence[str]) -> None:
    """The services start, go on from the cut, and a stranger finds one sound log in all regions."""
    await run.begin()
    await some_versions(run, more=1)
    for name in ("toy-0", "toy-1", "toy-2"):
        saved = source.manifest.learners[name]
        assert saved.step is not None
        assert run.heartbeats[name][0].step >= saved.step  # from the state that was put back
    verdict = await verify.check(await operator.attach(path))
    assert [check for check in verdict.checks if check.state == "fails"] == []
    run.gate.close()
    logs = [await run.read(region, closed=False) for region in regions]
    demand_one_log(*logs)
    for cut, fragment in zip(source.manifest.fragments, logs[0], strict=True):
        versions = [record.version for record in fragment.entries]
        assert versions[-1] > cut.version


async def test_three_regions_that_lost_everything_go_on_from_the_checkpoint(
    nursery: Nursery, tmp_path: Path, keys: Folder
) -> None:
    source = await taken_and_lost(nursery, tmp_path, keys)
    async with in_regions(nursery, tmp_path, RUN, settings_of(), REGIONS, keys) as run:
        operator = Operator(run, keys)
        said = await operator.restore(source)
        assert [line.partition(":")[0] for line in said[:3]] == ["region ap", "region eu", "region us"]
        assert await operator.restore(source) == ["run run: this checkpoint is restored there already; start its services"]
        put_states_back(source, run)
        await demand_goes_on(run, source, operator, tmp_path / "again", REGIONS)
        with pytest.raises(
            RunError, match=r"run 'run' is there already.*the control store has.*region us has.*diloco runs rem"
        ):
            await operator.restore(source)
