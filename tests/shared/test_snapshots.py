"""Which states of whole checkpoints a learner keeps, and what the bucket's key says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import cast

import pytest

from diloco.control.whole import KEY, WholeCheckpoints, note_whole, read_whole
from diloco.errors import BrokerError, FenceError
from diloco.member.snapshots import drop_superseded, superseded
from diloco.process.observe import get_logger
from diloco.settings.service import LearnerSettings
from diloco.states import statefolder
from diloco.transport import Bucket


class Keys:
    """A bucket in memory; ``silent``: its server does not answer."""

    def __init__(self, value: bytes | None = None, *, silent: bool = False) -> None:
        self.stored = None if value is None else (value, 1)
        self.silent = silent
        self.others: list[bytes] = []  # what another operator writes first

    async def get(self, key: str) -> tuple[bytes, int] | None:
        assert key == KEY
        if self.silent:
            raise BrokerError("no answer")
        return self.stored

    async def create(self, key: str, value: bytes) -> int:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        if self.others:
            self.stored = self.others.pop(), (self.stored[1] if self.stored else 0) + 1
        if (self.stored[1] if self.stored else 0) != revision:
            raise FenceError("another one")
        self.stored = value, revision + 1
        return revision + 1


def bucket(keys: Keys) -> Bucket:
    return cast(Bucket, keys)


@pytest.mark.parametrize(
    ("saved", "whole", "current", "dropped"),
    [
        ([1, 2, 3], None, 4, []),
        ([1, 2, 3, 4, 5, 6, 7, 8], None, 9, [1]),  # the newest eight, with the one that is being saved
        ([6, 7, 8, 9, 10, 11, 12, 1, 2], None, 3, [6, 7]),  # the operator's folder is another one, and its numbers begin again
        ([4, 8, 9, 10, 11, 12], WholeCheckpoints(8, 4), 13, []),
        ([3, 4, 5, 8, 9], WholeCheckpoints(8, 4), 10, [3, 5]),
        ([3, 4], WholeCheckpoints(8), 9, [3, 4]),
        ([3, 4], WholeCheckpoints(8), 4, [3]),  # the one that is being saved is never dropped
    ],
)
def test_what_is_superseded(saved: list[int], whole: WholeCheckpoints | None, current: int, dropped: list[int]) -> None:
    assert superseded(saved, whole, current) == dropped


def test_the_key_has_the_newest_two_numbers() -> None:
    async def noted() -> list[WholeCheckpoints | None]:
        keys, seen = Keys(), list[WholeCheckpoints | None]()
        for number in (4, 8, 8, 6, 13):
            await note_whole(bucket(keys), number)
            seen.append(await read_whole(bucket(keys)))
        return seen

    assert asyncio.run(noted()) == [
        WholeCheckpoints(4),
        WholeCheckpoints(8, 4),
        WholeCheckpoints(8, 4),
        WholeCheckpoints(8, 6),  # an older one became whole later
        WholeCheckpoints(13, 8),
    ]


def test_two_operators_note_theirs_at_once() -> None:
    async def noted() -> WholeCheckpoints | None:
        keys = Keys()
        keys.others.append(b'{"newest": 5, "before": 2}')
        await note_whole(bucket(keys), 4)
        return await read_whole(bucket(keys))

    assert asyncio.run(noted()) == WholeCheckpoints(5, 4)


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b'{"newest": -1}', b'{"newest": "8"}', b'{"newest": 1e300}'])
def test_a_damaged_key_says_nothing(value: bytes) -> None:
    assert asyncio.run(read_whole(bucket(Keys(value)))) is None


def test_a_key_of_a_later_version_is_read() -> None:
    assert asyncio.run(read_whole(bucket(Keys(b'{"newest": 8, "before": 4, "by": "ada"}')))) == WholeCheckpoints(8, 4)


def test_files_are_dropped_of_this_learner_alone(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        for index, name in enumerate(("ann", "ann.part-1", "bob")):
            path = tmp_path / statefolder.FOLDER / str(number) / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"state")
            os.utime(path, (number, number + index))
    (tmp_path / statefolder.FOLDER / "ann.safetensors").write_bytes(b"its own")
    (tmp_path / statefolder.FOLDER / "3" / "bob.safetensors").unlink()
    settings = LearnerSettings(name="ann", state_dir=tmp_path)

    def left() -> list[str]:
        return sorted(str(path.relative_to(tmp_path / statefolder.FOLDER)) for path in tmp_path.rglob("*.safetensors"))

    before = left()
    asyncio.run(drop_superseded(bucket(Keys(silent=True)), settings, 5, get_logger()))
    asyncio.run(drop_superseded(bucket(Keys()), settings, 5, get_logger()))
    assert left() == before
    asyncio.run(drop_superseded(bucket(Keys(b'{"newest": 4, "before": 2}')), settings, 5, get_logger()))
    assert left() == [
        "1/bob.safetensors",
        "2/ann.part-1.safetensors",
        "2/ann.safetensors",
        "2/bob.safetensors",
        "ann.safetensors",
    ]
    assert not (tmp_path / statefolder.FOLDER / "3").exists()  # empty, so it goes too
