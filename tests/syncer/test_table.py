"""The owners table is read and set; a server that is away is complained about once, and again after it was there."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.made.heartbeats import shard_heartbeat

from diloco.control.creation import KnownRun
from diloco.core.run.tape import Owners
from diloco.core.syncer.ownership import Ownership, OwnersTable
from diloco.errors import AppendUncertainError, FenceError
from diloco.process.observe import get_logger
from diloco.process.tape import Recorder
from diloco.settings.presets import run_settings
from diloco_syncer.context import Context, clock_s
from diloco_syncer.owning.table import OwnersRegistry


class Bucket:
    """One key's value, with compare-and-set."""

    def __init__(self) -> None:
        self.value: bytes = b""
        self.revision = 0
        self.away = False

    async def get(self, key: str) -> tuple[bytes, int] | None:
        if self.away:
            raise AppendUncertainError("no answer")
        return (self.value, self.revision) if self.revision else None

    async def create(self, key: str, value: bytes) -> int:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        if revision != self.revision:
            raise FenceError("another revision")
        self.value, self.revision = value, self.revision + 1
        return self.revision

    def set(self, *owners: str) -> None:
        """Set the table as another syncer does."""
        self.value, self.revision = msgspec.msgpack.encode([sorted(set(owners)), list(owners)]), self.revision + 1


class Tape:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def record(self, event: Any) -> None:
        self.events.append(event)

    def flush(self) -> None:
        return


class ChunkAssembler:
    """A registry over a bucket of the test's own: one syncer, two fragments, one shard."""

    def __init__(self) -> None:
        self.bucket, self.tape = Bucket(), Tape()
        self.changed = self.announced = 0
        run = KnownRun("run", run_settings(overrides={"shards": 1}), cast(Any, self.bucket))
        settings = type("Settings", (), {"name": "a"})()
        transport = type("Transport", (), {"wall_s": lambda self: 1.5})()
        fragment_map = type("Map", (), {"fragments": [None, None]})()
        self.regions = type("Regions", (), {"begun": True})()
        context = cast(
            Context,
            type("Context", (), {"run": run, "settings": settings, "log": get_logger(), "map": fragment_map,
                                 "transport": transport, "regions": self.regions})(),
        )  # fmt: skip
        self.ownership = Ownership("a", 1, [1, 1], 1, 1.5)
        tape = cast(Recorder, self.tape)
        self.registry = OwnersRegistry(context, self.ownership, tape, self._changed, self._announce)

    def _changed(self) -> None:
        self.changed += 1

    async def _announce(self) -> None:
        self.announced += 1


@pytest.fixture
def parts() -> ChunkAssembler:
    return ChunkAssembler()


async def test_the_first_table_is_set_announced_and_recorded(parts: ChunkAssembler) -> None:
    parts.ownership.hear(shard_heartbeat("a", 1), clock_s())
    await parts.registry.settle()
    assert parts.ownership.table == OwnersTable(["a"], ["a", "a"])
    assert (parts.ownership.revision, parts.announced, parts.changed) == (1, 1, 0)
    assert parts.tape.events == [Owners(1500, 1, (0, 1))]


async def test_there_is_no_table_before_a_majority_of_regions_has_begun(parts: ChunkAssembler) -> None:
    """So without a table no region can have been counted, and each may begin with version 0."""
    parts.ownership.hear(shard_heartbeat("a", 1), clock_s())
    parts.regions.begun = False
    await parts.registry.settle()
    assert (parts.ownership.table, parts.bucket.revision) == (None, 0)
    parts.regions.begun = True
    await parts.registry.settle()
    assert parts.ownership.table == OwnersTable(["a"], ["a", "a"])


async def test_anothers_table_is_adopted_and_the_heads_of_owned_fragments_are_not_trusted(parts: ChunkAssembler) -> None:
    parts.bucket.set("b", "a")
    await parts.registry.settle()
    assert parts.ownership.table == OwnersTable(["a", "b"], ["b", "a"])
    assert (parts.announced, parts.changed) == (0, 1)
    assert parts.tape.events == [Owners(1500, 1, (1,))]


async def test_of_two_that_set_a_table_at_once_the_second_one_reads(parts: ChunkAssembler) -> None:
    parts.ownership.hear(shard_heartbeat("a", 1), clock_s())
    parts.ownership.read(None, 0, clock_s())
    parts.bucket.set("b", "b")
    await parts.registry.settle()
    assert parts.ownership.table == OwnersTable(["b"], ["b", "b"])
    assert parts.announced == 0


async def test_a_server_that_is_away_is_complained_about_once_and_once_more_the_next_time(parts: ChunkAssembler) -> None:
    parts.bucket.set("a", "a")
    with capture_logs() as logs:
        for away in (True, True, False, True):
            parts.bucket.away = away
            parts.ownership.distrust()
            await parts.registry.settle()
    assert [entry["event"] for entry in logs] == ["owners_not_settled"] * 2
