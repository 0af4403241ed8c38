"""The command: it shows what is wrong and what would be done, asks, has it done, and waits until it is.

A key of the bucket is written by the command. A fragment's log is written by its owner alone, so the command writes an order,
a record among the run's changes, as ``diloco rollback`` does; the owner appends the state of the last good version
(:func:`diloco.core.syncer.merging.make_rollback`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import BrokerError, RunError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.wire.subjects import Subjects
from diloco_ops.operate import rollback
from diloco_ops.operate.changing import Reason, make_changes
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import ANSWER_TIMEOUT_S, RunReader
from diloco_ops.repair import logs
from diloco_ops.repair.keys import LiveBucket
from diloco_ops.repair.logs import Examined

Confirm = Callable[[str], bool]


def repair(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory; the run must be running.")],
    fragment: Annotated[list[int] | None, typer.Option(help="Fragment that continues from a good version; repeatable.")] = None,
    to_version: Annotated[
        int | None, typer.Option(min=0, help="Version that the fragments continue from; default: the newest of each.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of the bucket to restore or remove.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    reason: Reason = "",
) -> int:
    """Find unreadable entries and keys of a run, and continue after them. Exit code 1 if a repair is still needed."""
    if key is not None and (fragment or to_version is not None):
        raise RunError("diloco repair: --key repairs the bucket, --fragment a log; give only one of them")
    if to_version is not None and not fragment:
        raise RunError("diloco repair: --to-version needs --fragment")
    confirm: Confirm = lambda question: not dry_run and (yes or typer.confirm(question))  # noqa: E731
    if key is not None:
        return asyncio.run(_repair_key(directory, key, confirm))
    if fragment:
        return asyncio.run(_repair_fragments(directory, fragment, to_version, reason, confirm))
    return asyncio.run(_examine(directory))


async def _examine(path: Path) -> int:
    """Say what is wrong with a run, and with which command it is repaired."""
    left = 0
    async with opened_keys(rundir.load(path)) as keys:
        for remedy in await keys.damaged():
            print(f"key {remedy.key}: {remedy.reason}; diloco repair {path} --key {remedy.key}: {remedy.text}")
            left += 1
    if left:
        return 1  # the logs cannot be read before the keys
    async with run_reader.opened(path) as seen:
        for one in seen.map.fragments:
            examined = await logs.examine(seen, one.index)
            for line in examined.lines():
                print(line)
            if examined.is_stuck:
                print(f"fragment {one.index} is stuck: diloco repair {path} --fragment {one.index}")
                left += 1
        if not left:
            print(f"run {seen.run.name}: nothing is to be repaired")
    return 1 if left else 0


@asynccontextmanager
async def opened_keys(directory: RunDirectory) -> AsyncIterator[LiveBucket]:
    """Open the bucket of a run at its own server, whatever its keys hold.

    Raises:
        BrokerError: a server does not answer, or has no such bucket.
    """
    if not directory.nats_url:
        raise RunError(f"{directory.path}: run {directory.name!r} has not been started yet")
    names = Subjects(directory.name)
    async with contextlib.AsyncExitStack() as stack:
        # what removes a key does so at the server of the streams, which is another one in a run with regions
        control = await run_reader.connect(replace(directory, nats_bulk_url=None), "outside", ANSWER_TIMEOUT_S)
        stack.push_async_callback(control.close)
        home = control
        if directory.nats_bulk_url is not None:
            home = await run_reader.connect(directory, "outside", ANSWER_TIMEOUT_S)
            stack.push_async_callback(home.close)
        registry = await control.bucket(names.bucket, create=False)
        try:
            genesis = await home.last(names.log_stream, names.genesis)
        except BrokerError:
            genesis = None
        yield LiveBucket(directory, control, registry, genesis.data if genesis else None)


async def _repair_key(path: Path, key: str, confirm: Confirm) -> int:
    async with opened_keys(rundir.load(path)) as keys:
        remedy = await keys.remedy(key)
        if remedy is None:
            print(f"key {key}: no repair needed")
            return 0
        print(f"key {key}: {remedy.reason}")
        print(f"repair: {remedy.text}" if remedy.value is None else f"remedy: {remedy.text}")
        if not confirm("do it?"):
            return 1
        await keys.carry_out(remedy)
        print(f"key {key}: done; restart the services that have ended")
    return 0


async def _repair_fragments(path: Path, fragments: Sequence[int], version: int | None, reason: str, confirm: Confirm) -> int:
    async with run_reader.opened(path) as seen:
        examined = await _orderable(seen, fragments)
        orders = [one.order(seen.run.name, version) for one in examined]
        for one, order in zip(examined, orders, strict=True):
            for line in one.lines():
                print(line)
            versions, tokens = one.lost(order.version)
            lost = f"{versions} versions of {tokens} tokens are lost"
            print(f"fragment {order.fragment}: goes on from version {order.version}; {lost}")
        if not confirm("order it?"):
            return 1
        changes = await make_changes(seen.transport, seen.run, lambda _: orders, reason)
        left = {change.number: one.chain for change, one in zip(changes, examined, strict=True)}
        for number, chain in list(left.items()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rollback.CARRIED_OUT_S):
                    async for index, made in rollback.carried_out(seen, number, [chain]):
                        print(f"fragment {index}: version {made.version} is what version {made.to_version} was")
                        del left[number]
        for number, chain in left.items():
            print(
                f"fragment {chain.fragment}: change {number} is still pending; its owner carries it out as soon as it "
                f"can: diloco logs {path} shows what it waits for"
            )
    return 1 if left else 0


async def _orderable(seen: RunReader, fragments: Sequence[int]) -> list[Examined]:
    """Examine fragments that are to be repaired.

    Raises:
        RunError: it cannot be ordered.
    """
    run, count = seen.run, len(seen.map.fragments)
    unknown = [index for index in fragments if not 0 <= index < count]
    if unknown:
        raise RunError(f"run {run.name!r} has fragments 0 to {count - 1}, not {unknown[0]}")
    if not seen.live:
        raise RunError(f"{seen.directory.path}: run {run.name!r} is not running, so nothing can be appended: start it")
    if run.created.round.lockstep:
        raise RunError(
            f"run {run.name!r} trains in lockstep, where fragments cannot go back one by one; stop it, and go on in a new "
            f"directory: diloco up --run-dir NEW --resume {seen.directory.path} --resume-at VERSION"
        )
    return [await logs.examine(seen, index) for index in dict.fromkeys(fragments)]
