"""Values of the bucket that another program wrote: they count as none."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from diloco.control import admission, tables
from diloco.control.creation import KnownRun
from diloco.settings.presets import run_settings

NAME = msgspec.msgpack.encode("syncer-0")
NOT_TEXT = NAME[:-1] + b"\xff"


class Bucket:
    """One value under all keys."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    async def get(self, key: str) -> tuple[bytes, int]:
        return self.value, 7


def run(value: bytes) -> KnownRun:
    return KnownRun("run", run_settings(overrides={"learners": 2}), cast(Any, Bucket(value)))


@pytest.mark.parametrize(
    "value", [b"", b"\xc1", b"\x91" * 100_000, b"\x92\x91" + NOT_TEXT + b"\x91" + NOT_TEXT, b"\x94" + NOT_TEXT]
)
async def test_what_is_no_value_counts_as_none(value: bytes) -> None:
    assert await tables.owners(run(value), 1).read() == (None, 7)
    assert (await admission.admitted(run(value), "syncer-0", bytes(32))).incarnation is None


async def test_a_value_that_is_one() -> None:
    table, revision = await tables.owners(run(b"\x92\x91" + NAME + b"\x91" + NAME), 1).read()
    assert (table and table.owners, revision) == (["syncer-0"], 7)
