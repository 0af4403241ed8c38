"""``launch(settings)``: a run of a test's own, ``regions(settings)``: one in three regions; ``diloco(...)``: the command."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.made.fixtures import Diloco, Ended, Launch, Regions
from tests.pace import DEADLINE_S, scaled_s
from tests.services.apart import REGIONS, Region
from tests.services.cluster import Cluster
from tests.services.finished import Finished, finish
from tests.services.forking import Nursery

from diloco.process import observe
from diloco.process.observe import get_logger
from diloco.settings.run import RunSettings
from diloco_ops import cli
from diloco_ops.broker.server import Server
from diloco_ops.checkpoints import marker
from diloco_ops.operate import rollback
from diloco_ops.reading import inspect, run_reader, runs
from diloco_ops.repair import repair_command as repairing
from diloco_ops.up.embedded import Embedded
from diloco_ops.wan.config import checked
from diloco_ops.wan.relay import Relay


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def finished(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that is over, which does not change: three toys, one of which was killed with kill -9 and begun again."""
    return asyncio.run(finish(nursery, tmp_path_factory.mktemp("finished") / "run"))


@pytest.fixture
async def launch(nursery: Nursery, nats_server: Server, tmp_path: Path) -> AsyncIterator[Launch]:
    """On the shared server unless another one's URL is given; on a server of its own, ask for ``make_server`` first."""
    made: list[Cluster] = []

    def make(settings: RunSettings, url: str | None = None, name: str | None = None, directory: Path | None = None) -> Cluster:
        name = name or f"run-{uuid.uuid4().hex[:8]}"
        cluster = Cluster(nursery, directory or tmp_path / name, url or nats_server.url, name, settings)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        await cluster.close()


@pytest.fixture
async def regions(nursery: Nursery, tmp_path: Path) -> AsyncIterator[Regions]:
    """``regions(settings)``: a run in three regions; ``beside`` another one, it is on that one's servers."""
    async with contextlib.AsyncExitStack() as made:

        async def start() -> tuple[Embedded, Relay]:
            embedded = Embedded(tmp_path / "run", REGIONS)
            made.callback(embedded.stop)
            for name in embedded.servers:
                embedded.start(name)
            links: dict[str, Any] = dict(embedded.links())
            # as fast as can be: that links are thin and long is the benches' matter
            links["links"] = {name: {"delay_s": 0.005} for name in links["links"]}
            relay = Relay(checked(links, "links"), get_logger())
            await relay.start()
            made.push_async_callback(relay.close)
            return embedded, relay

        async def make(
            settings: RunSettings, name: str = "run", clocks: Mapping[str, float] | None = None, beside: Region | None = None
        ) -> Region:
            embedded, relay = (beside.embedded, beside.relay) if beside else await start()
            run = Region(nursery, tmp_path / name, name, settings, embedded, relay, clocks or {})
            made.push_async_callback(run.close)
            return run

        yield make


@pytest.fixture
def patient_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands in this process wait as a test does: a person gives up sooner on a server or a run."""
    for module, name in (
        (inspect, "ANSWER_TIMEOUT_S"),
        (marker, "MARKER_TIMEOUT_S"),
        (repairing, "ANSWER_TIMEOUT_S"),
        (rollback, "CARRIED_OUT_S"),
        (run_reader, "ANSWER_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, DEADLINE_S)
    for listening in (marker, runs):
        monkeypatch.setattr(listening, "HEAR_S", scaled_s(listening.HEAR_S))
    monkeypatch.setattr(marker, "ATTEMPTS", 1000)  # a run may go on by a version while its learners answer


@pytest.fixture
def diloco(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Diloco]:
    """The console script in this process, which saves the time to start one."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["diloco", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        seen = capfd.readouterr()
        assert "Traceback" not in seen.out + seen.err
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, seen.out, seen.err)

    yield run
    observe.reset()
