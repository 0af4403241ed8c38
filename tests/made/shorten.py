"""Shortening of a log, as a coordinator does that has read all of it."""

from __future__ import annotations

import asyncio

from tests.made.syncer_parts import Begun
from tests.pace import DEADLINE_S

from diloco.log.shortening import LogShortener, RunShortener
from diloco.log.stream import pass_over
from diloco.process.observe import get_logger
from diloco.process.tasks import end


async def shorten(begun: Begun) -> None:
    """Drop all that may go of a log by now."""
    store, run = begun.context.store, begun.context.run
    judging = RunShortener(store, run.created, {}, lambda: run.in_force.log, get_logger())
    shortener = LogShortener(store, judging.settings, judging.judged, get_logger())
    following = asyncio.ensure_future(shortener.follow())
    for fragment in store.map.fragments:
        stop = await store.reader.end_sequence(fragment.index)
        if stop:
            async for head in store.entries.heads(pass_over, 1, stop, fragment=fragment.index):
                judging.note(head.record)
        stored = await store.reader.keyframe_sequences(fragment.index)
        async with asyncio.timeout(DEADLINE_S):
            while shortener.noted(fragment.index) != stored:
                await asyncio.sleep(0.01)
    await shortener.shorten()
    await end(following)
