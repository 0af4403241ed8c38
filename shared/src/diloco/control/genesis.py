"""The genesis of a run: one learner is elected to store version 0, and one record names it for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.control.creation import POLL_S, KnownRun
from diloco.control.tables import BucketTable
from diloco.errors import AppendUncertainError, BrokerError, FenceError, MessageError, RunError
from diloco.log.log import Log
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.wire import framing
from diloco.wire.entries import Genesis

Initial: TypeAlias = Callable[[int], Awaitable[NDArray[np.float32]]]
RENEWED_SHARE = 0.25  # of the time after which a founder is replaced: it says so often that it goes on


async def await_genesis(
    run: KnownRun,
    log: Log,
    learner: str | None,
    initial: Initial | None,
    logger: Logger,
) -> tuple[Genesis, bytes]:
    """Return the genesis record and its hash; a learner (None: another service) founds the run if no other does.

    A run that continues another one is founded before it has members, and by no learner, since no learner has its version 0.
    The founder is elected by compare-and-set, and says meanwhile that it goes on. One that has not for ``liveness.dead_s`` of
    this member's clock is replaced. If both finish, the bucket's key ``genesis`` decides whose record is the run's.

    A run with versions is never founded twice: where the key exists and the log is empty, the log was purged or lost.

    Args:
        initial: gives version 0 of a fragment, float32 [size]; a learner has it. It is asked for one after another.

    Raises:
        RunError: a learner could found the run, but the key says that it was founded, and its log is empty.
    """
    watched: tuple[int, float] | None = None
    clock, complaint = asyncio.get_running_loop().time, Complaint(logger)
    founder = BucketTable[bytes](run.registry, "founder", lambda stored: stored or b"", bytes)

    async def values(revision: int) -> AsyncIterator[NDArray[np.float32]]:
        assert learner is not None
        assert initial is not None
        said_s = clock()
        for fragment in log.map.fragments:
            if clock() - said_s > RENEWED_SHARE * run.created.liveness.dead_s:
                revision, said_s = await founder.write(learner.encode(), revision), clock()
            yield await initial(fragment.index)

    while True:
        try:
            found = await log.reader.genesis()
        except BrokerError as error:
            if not run.regions or isinstance(error, AppendUncertainError):
                raise
            await asyncio.sleep(POLL_S)  # the region's syncer has not made its streams yet
            continue
        if found is not None:
            return found
        founds = learner is not None and run.created.continues is None
        before = await _was_founded(run, log, founds, complaint)
        if founds and not before:
            assert learner is not None
            _, revision = await founder.read()
            if watched is None or watched[0] != revision:
                watched = (revision, clock())
            if revision == 0 or clock() - watched[1] > run.created.liveness.dead_s:
                try:
                    revision = await founder.write(learner.encode(), revision)
                except FenceError:
                    continue
                logger.info("founding")
                await log.writer.found(learner, run.created.digest(), values(revision), decision(run))
                continue
        await asyncio.sleep(POLL_S)


async def _was_founded(run: KnownRun, log: Log, founds: bool, complaint: Complaint) -> bool:
    """Return whether the key ``genesis`` exists; a member that ``founds`` stores the missing record from it."""
    decided = await decided_genesis(run)
    if decided is None or run.regions:  # a region's syncer stores the record, once its log is whole
        return decided is not None
    if await _is_empty(log):
        if founds:
            raise RunError(_emptied(run))
        complaint.warn("log_is_empty", reason=_emptied(run))
    elif founds:  # the founder has died between the key and the record
        with contextlib.suppress(FenceError):
            await log.writer.append_genesis(decided)
    return True


async def _is_empty(log: Log) -> bool:
    """Whether a fragment has no keyframe, though version 0 of each is stored before the key ``genesis``."""
    names = log.subjects
    for fragment in log.map.fragments:
        if await log.transport.last(names.log_stream, names.keyframe(fragment.index)) is None:
            return True
    return False


def _emptied(run: KnownRun) -> str:
    return (
        f"run {run.name!r}: the bucket's key 'genesis' says that the run was founded, but its log is empty: the log was "
        "purged or lost, and founding the run again would restart the training at version 0; continue from a checkpoint "
        f"(diloco up --resume), or remove the run (diloco runs remove {run.name}) and begin a new one"
    )


def decision(run: KnownRun) -> Callable[[bytes], Awaitable[bool]]:
    """Return how to find out whether a genesis record is the run's: whether it becomes the bucket's key ``genesis``."""
    return partial(_decide, run)


async def _decide(run: KnownRun, genesis_frame: bytes) -> bool:
    """Whether a genesis record is the run's: the first one that is asked for."""
    try:
        await run.registry.create("genesis", genesis_frame)
    except FenceError:
        return await decided_genesis(run) == genesis_frame
    return True


async def decided_genesis(run: KnownRun) -> bytes | None:
    """Return the frame of the run's genesis record, which each region's log is to have; None before there is one.

    Raises:
        RunError: the bucket holds something else.
    """
    stored = await run.registry.get("genesis")
    if stored is None:
        return None
    try:
        framing.unpack(stored[0], Genesis, run.identity)
    except MessageError as error:
        raise RunError(
            f"run {run.name!r}: the bucket's key 'genesis' is damaged ({error}); diloco repair RUN --key genesis"
        ) from None
    return stored[0]
