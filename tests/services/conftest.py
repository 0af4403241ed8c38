"""``launch(settings)``: a run of a test's own; ``diloco(...)``: the command, as its user sees it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.services.cluster import Cluster
from tests.services.forking import Nursery

from diloco import cli, observe
from diloco.nats.server import Server
from diloco.settings import RunSettings


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str


Launch = Callable[..., Cluster]
Diloco = Callable[..., Ended]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


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
