"""A learner that comes back: what it does at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pace import DEADLINE_S

from diloco_learner.run import alone, checkpoint
from diloco_learner.run.process import LoopThread


class JoinedError(Exception):
    """The log has been read."""


def test_the_checkpoint_is_checked_while_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, checked = LoopThread(), asyncio.Event()

    def own_states(*_: Any) -> Iterator[Any]:
        thread.loop.call_soon_threadsafe(checked.set)
        yield None

    async def join(_: Any) -> None:
        await asyncio.wait_for(checked.wait(), DEADLINE_S)
        raise JoinedError

    monkeypatch.setattr(checkpoint, "own_states", own_states)
    process: Any = SimpleNamespace(
        settings=SimpleNamespace(role="learner"),
        run=SimpleNamespace(identity=b""),
        log=None,
        thread=thread,
        stopping=lambda: False,
    )
    member: Any = SimpleNamespace(join=join)
    try:
        with pytest.raises(JoinedError):
            alone.work(process, None, member, None, 1, [])  # type: ignore[arg-type]
    finally:
        thread.close()
