"""``diloco restore``: a checkpoint onto given servers with identities, after everything else was lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.apart import demand_one_log
from tests.services.cluster import small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, Guarded, in_regions, keys_of
from tests.services.secured import AN_HOUR, HOST, guest, put
from tests.services.toy import SAMPLES

from diloco.errors import DilocoError, RunError, SettingsError
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.settings.run import RunSettings
from diloco.wire.subjects import Subjects
from diloco_ops.audit import verify
from diloco_ops.broker import snapshot
from diloco_ops.broker.snapshot import StreamSnapshot
from diloco_ops.checkpoints import checkpoint, collecting, manifest
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.checkpoints.restoration import restore_to
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.reading.attach import attached
from diloco_ops.up import resume

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
        await attached(path, RUN, self.cluster.url, self.bulk, str(self.identity))
        return path

    @property
    def bulk(self) -> list[str]:
        return [f"{region}={self.cluster.servers[region].url}" for region in self.cluster.regions]

    async def restore(self, source: RunCheckpoint, **overrides: Any) -> list[str]:
        said: list[str] = []
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        await restore_to(source.path, self.cluster.url, self.bulk, self.identity, given, said.append)
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


@dataclass(frozen=True)
class Lost:
    """What is left of a run in three regions when all its servers and learners' disks are gone."""

    source: RunCheckpoint
    keys: Folder


@pytest.fixture(scope="module")
def kept() -> list[Lost]:
    """The run that the tests of this module lose: the first one makes it."""
    return []


@pytest.fixture
async def lost(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, kept: list[Lost]) -> Lost:
    if not kept:
        path = tmp_path_factory.mktemp("lost")
        keys = keys_of(path / "keys", RUN, settings_of(), REGIONS)
        kept.append(Lost(await taken_and_lost(nursery, path, keys), keys))
    return kept[0]


async def taken_and_lost(nursery: Nursery, path: Path, keys: Folder) -> RunCheckpoint:
    """A checkpoint of a run in three regions, with its learners' states."""
    async with in_regions(nursery, path, RUN, settings_of(), REGIONS, keys) as run:
        await run.begin()
        await some_versions(run, more=1)
        seen = await Operator(run, keys).attach(path / "seen")
        with run.slowly():
            taken, _ = await checkpoint.take(seen)
        assert sorted(taken.absent()) == ["toy-0", "toy-1", "toy-2"]
        await some_versions(run, more=1)  # work that is lost
        assert await collecting.collect(taken.path, [run.directory], lambda _: None) == 0
        directory = run.directory
    shutil.rmtree(directory)
    for place in (CONTROL, *REGIONS):
        shutil.rmtree(path / place)
    return manifest.load(taken.path)


def another(source: RunCheckpoint, path: Path) -> RunCheckpoint:
    """A checkpoint of the same run, taken at another time."""
    shutil.copytree(source.path, path)
    later = msgspec.structs.replace(source.manifest, created_at_s=source.manifest.created_at_s + 1)
    signed = msgspec.structs.replace(later, hash=later.right_hash())
    (path / manifest.MANIFEST).write_bytes(msgspec.json.encode(signed))
    return manifest.load(path)


def put_states_back(source: RunCheckpoint, run: Guarded) -> None:
    for name, learner in source.manifest.learners.items():
        resume.copy_state([source.path / file.file for file in learner.files], run.directory / "checkpoints", name)


async def demand_goes_on(run: Guarded, source: RunCheckpoint, operator: Operator, path: Path) -> None:
    """The services start, go on from the cut, and a stranger finds one sound log in all regions."""
    await run.begin()
    await some_versions(run, more=1)
    for name in ("toy-0", "toy-1", "toy-2"):
        saved = source.manifest.learners[name]
        assert saved.step is not None
        steps = [beat.step for beat in run.heartbeats[name] if beat.state == "stepping"]
        assert steps[0] >= saved.step  # from the state that was put back
    verdict = await verify.check(await operator.attach(path))
    assert [check for check in verdict.checks if check.state == "fails"] == []
    run.gate.close()
    logs = [await run.read(region, closed=False) for region in run.regions]
    demand_one_log(*logs)
    for cut, fragment in zip(source.manifest.fragments, logs[0], strict=True):
        assert fragment.entries[-1].version > cut.version


async def test_three_regions_that_lost_everything_go_on_from_the_checkpoint(
    nursery: Nursery, tmp_path: Path, lost: Lost
) -> None:
    source, keys = lost.source, lost.keys
    async with in_regions(nursery, tmp_path, RUN, settings_of(), REGIONS, keys) as run:
        operator = Operator(run, keys)
        said = await operator.restore(source)
        assert [line.partition(":")[0] for line in said[:3]] == ["region ap", "region eu", "region us"]
        assert await operator.restore(source) == ["run run: this checkpoint is restored there already; start its services"]
        put_states_back(source, run)
        await demand_goes_on(run, source, operator, tmp_path / "again")
        with pytest.raises(
            RunError, match=r"run 'run' is there already.*the control store has.*region us has.*diloco runs rem"
        ):
            await operator.restore(source)


async def test_a_region_that_was_not_named_at_the_beginning_joins_by_a_restore(
    nursery: Nursery, tmp_path: Path, lost: Lost
) -> None:
    names = [*REGIONS, "sa"]
    shutil.copytree(lost.keys.path, tmp_path / "keys")
    keys = Folder.open(tmp_path / "keys")
    keys.add_region("sa")
    keys.put_server("sa", [HOST], ["sa"], datetime.now(UTC) + AN_HOUR)
    put(keys, Who("syncer-3", "syncer", "sa"))
    settings = small(shards=4, learners=3, tokens=3 * 100_000 * SAMPLES, round__steps=18, regions__names=names)
    async with in_regions(nursery, tmp_path, RUN, settings, names, keys) as run:
        operator = Operator(run, keys)
        with pytest.raises(SettingsError, match=r"no region 'sa' of this run"):
            await operator.restore(lost.source)
        said = await operator.restore(lost.source, regions__names=names, shards=4)
        assert [line.partition(":")[0] for line in said[:4]] == ["region ap", "region eu", "region sa", "region us"]
        put_states_back(lost.source, run)
        await demand_goes_on(run, lost.source, operator, tmp_path / "again")
        assert run.events("standing_by", "syncer-3")


class CutOffError(Exception):
    """The command was killed."""


def cutting(calls: int, *, amid: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Cut a restore off at its ``calls``-th stream at a server, the scratch server's included: before, or amid its chunks."""
    whole, send, seen = snapshot.restore, snapshot._send, [0]

    async def restore(link: Any, taken: StreamSnapshot, path: Path, **given: Any) -> None:
        seen[0] += 1
        if seen[0] == calls and not amid:
            raise CutOffError
        await whole(link, taken, path, **given)

    async def sent(link: Any, subject: str, path: Path, stream: str) -> dict[str, Any]:
        if seen[0] != calls:
            return await send(link, subject, path, stream)
        with path.open("rb") as file:
            whole = file.read()
        await snapshot._request(link, subject, whole[: len(whole) // 2], stream)
        raise CutOffError

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(snapshot, "restore", restore)
        monkeypatch.setattr(snapshot, "_send", sent)

    return patch


async def test_a_restore_that_is_cut_off_is_typed_again_and_makes_no_stream_twice(
    nursery: Nursery, tmp_path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, keys = lost.source, lost.keys
    made: dict[str, Any] = {}
    async with in_regions(nursery, tmp_path, RUN, settings_of(), REGIONS, keys) as run:
        operator = Operator(run, keys)
        async with operator.link("eu") as link:  # as a syncer makes it that began too early: without a message, nothing is lost
            await link.ensure_stream(NAMES.log_stream, NAMES.log_filters(), replicas=1)
        # the first two streams are at the scratch server; logs that are there already are not restored again
        for cut, there in (
            (cutting(4, amid=True), ["ap"]),
            (cutting(4, amid=False), ["ap", "eu"]),
            (cutting(4, amid=True), REGIONS),
        ):
            with monkeypatch.context() as patch:
                cut(patch)
                with pytest.raises(CutOffError):
                    await operator.restore(source)
            for region in there:
                log = await operator.held(region)
                assert log is not None
                assert made.setdefault(region, log["config"]["metadata"]) == log["config"]["metadata"]
            assert await operator.held(CONTROL) is None  # so no service begins
        with pytest.raises(RunError, match=r"region ap has its log, with \d+ messages.*region eu has.*region us has"):
            await operator.restore(another(source, tmp_path / "other"))
        assert "region ap: the log is there already" in (await operator.restore(source))[0]
        log = await operator.held("us")
        assert log is not None
        assert log["config"]["metadata"] == made["us"]
        assert await operator.held(CONTROL) is not None


async def outcome(restoring: Awaitable[list[str]]) -> str:
    try:
        return (await restoring)[-1]
    except DilocoError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("same", [True, False])
async def test_of_two_restores_at_once_one_is_refused(nursery: Nursery, tmp_path: Path, lost: Lost, *, same: bool) -> None:
    source, keys = lost.source, lost.keys
    other = source if same else another(source, tmp_path / "other")
    async with in_regions(nursery, tmp_path, RUN, settings_of(), REGIONS, keys) as run:
        operator = Operator(run, keys)
        ends = sorted(await asyncio.gather(*(outcome(operator.restore(each)) for each in (source, other))))
        assert re.match(r"refused: .*(another restore of run 'run' is in progress there|run 'run' is there already)", ends[0])
        assert ends[1].startswith("run run is restored at versions")
        tags = [((await operator.held(place)) or {})["config"]["metadata"]["diloco_restore"] for place in (CONTROL, *REGIONS)]
        assert len(set(tags)) == 1
