"""``diloco set``, ``eject`` and ``readmit``: changing a run while it is live, each time by a record that stays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import MsgspecError, convert
from rich.console import Console
from rich.table import Table

from diloco.control import creation
from diloco.control.changes import read_changes
from diloco.control.hearing import hear
from diloco.core.run.changes import (
    SETTABLE,
    Action,
    Changes,
    Effective,
    Eject,
    Readmit,
    Set,
    Tokens,
    text_of,
    with_setting,
)
from diloco.errors import MessageError, RunError, SettingsError
from diloco.log.log import Log
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import changed_settings
from diloco.settings.run import RunSettings
from diloco.settings.time_limits import contradiction
from diloco.settings.validation import value_of
from diloco.transport import Heard
from diloco.wire.control import Announcement
from diloco.wire.fields import MemberName
from diloco.wire.subjects import Subjects
from diloco_ops.operate.changing import Reason, Say, make_changes
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import LiveRun
from diloco_report import units

HEAR_S = 1.0  # beyond two heartbeats: announcements come four times a second
COMMAND = "diloco set"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a live run.")]
Learner = Annotated[str, typer.Argument(metavar="LEARNER", help="The learner's name.")]


def set_(
    directory: Directory,
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="round.steps=12, tokens=2e9, ...")
    ] = None,
    reason: Reason = "",
) -> None:
    """Change settings or the token budget of a live run. Without any, list what can be set and what was changed."""
    wanted = parse_assignments(assignments or [], COMMAND)
    asyncio.run(apply_settings(directory, wanted, reason) if wanted else _list(directory))


def eject(directory: Directory, learner: Learner, reason: Reason = "") -> None:
    """Exclude a learner: its offers are refused, it is not waited for, and its process ends."""
    asyncio.run(exclude(directory, learner, reason))


def readmit(directory: Directory, learner: Learner, reason: Reason = "") -> None:
    """Let a learner that was ejected or quarantined take part again."""
    asyncio.run(take_back(directory, learner, reason))


def _name(learner: str) -> str:
    try:
        return convert(learner, MemberName)
    except MsgspecError:
        raise SettingsError(f"learner {learner!r}: a name has lower-case letters, digits, - and _, at most 48") from None


async def _list(path: Path) -> None:
    async with run_reader.reached(path) as live:
        _show(live.run.created, live.run.now, await read_changes(live.run))


async def apply_settings(path: Path, wanted: Mapping[str, Any], reason: str, say: Say = print) -> None:
    """Give settings of a live run, or its token budget, the values that are wanted.

    Raises:
        SettingsError: one cannot be set, or not so, or time limits contradict each other then.
        RunError: the run is not going on, or has begun to close.
    """
    async with run_reader.reached(path) as live:
        budget = wanted.get("tokens")
        processed = await _processed(live) if budget is not None else 0

        def decide(now: Effective) -> list[Action]:
            actions, settings = [], now.settings
            for key, value in wanted.items():
                if key == "tokens":
                    changed, action = _extended(settings, value, processed)
                else:
                    changed = with_setting(settings, key, value, COMMAND)
                    action = Set(key, value_of(changed, key))
                if changed != settings:
                    actions.append(action)
                settings = changed
            found = contradiction(settings)
            if found is not None and found != contradiction(now.settings):  # an old one may take several changes
                raise SettingsError(f"{COMMAND}: {found}")
            return actions

        await _change(live, decide, reason, say)


def _extended(settings: RunSettings, value: Any, processed: int) -> tuple[RunSettings, Action]:
    changed = changed_settings(settings, {"tokens": value}, COMMAND)
    if changed.tokens <= processed:
        raise SettingsError(f"{COMMAND}: tokens = {changed.tokens}: {processed} tokens are processed already; give more")
    return changed, Tokens(changed.tokens)


async def exclude(path: Path, learner: str, reason: str, say: Say = print) -> None:
    """Eject a learner.

    Raises:
        SettingsError: it is no name.
        RunError: no such learner was ever admitted, or the run is not going on.
    """
    learner = _name(learner)
    async with run_reader.reached(path) as live:
        if await live.run.registry.get(f"member.{learner}") is None:
            raise RunError(f"run {live.run.name!r}: no learner {learner!r} was ever admitted; diloco status {path} names them")
        await _change(live, lambda now: [] if learner in now.ejected else [Eject(learner)], reason, say)


async def take_back(path: Path, learner: str, reason: str, say: Say = print) -> None:
    """Readmit a learner.

    Raises:
        SettingsError: it is no name.
        RunError: it is neither ejected nor quarantined, or the run is not going on.
    """
    learner = _name(learner)
    async with run_reader.reached(path) as live:

        def decide(now: Effective) -> list[Action]:
            excluded = now.excluded
            if learner not in excluded:
                names = ", ".join(sorted(excluded)) or "none"
                raise RunError(
                    f"run {live.run.name!r}: learner {learner!r} already takes part; ejected or quarantined: {names}"
                )
            return [Readmit(learner)]

        await _change(live, decide, reason, say)


async def _change(live: LiveRun, decide: Callable[[Effective], Sequence[Action]], reason: str, say: Say) -> None:
    if not await make_changes(live.transport, live.run, decide, reason, say):
        say("nothing to change: the settings already have these values")


def _show(created: RunSettings, now: Effective, listed: Changes) -> None:
    console = Console(soft_wrap=True)
    table = Table("setting", "now", "at first", box=None, pad_edge=False)
    for key in ("tokens", *SETTABLE):
        value, first = value_of(now.settings, key), value_of(created, key)
        table.add_row(key, str(value), "" if value == first else str(first))
    console.print(table)
    for learner, change in sorted(now.ejected.items()):
        console.print(f"ejected: {learner}, by {change.label}", markup=False, highlight=False)
    for learner, why in now.quarantines().items():
        console.print(f"quarantined: {learner}, by {why}", markup=False, highlight=False)
    for change in listed.records:
        console.print(f"{units.moment(change.at_s)}  {change.label}: {text_of(change)}", markup=False, highlight=False)


async def _processed(live: LiveRun) -> int:
    """Return the tokens that the run has merged or lost, by its log.

    Raises:
        RunError: the run has begun to close.
    """
    run, transport, names = live.run, live.transport, Subjects(live.run.name)
    closing = asyncio.Event()

    async def hear_round(announced: Announcement, _: Heard) -> None:
        if announced.closing:
            closing.set()

    await hear(transport, names.round(), Announcement, run.identity, hear_round, None)
    until_s = time.monotonic() + HEAR_S
    log = Log(transport, run.name, run.identity, await creation.find_map(run), run.created)
    logged = 0
    for fragment in log.map.fragments:
        with contextlib.suppress(MessageError):  # in a run with regions it may be a claim
            head = await log.reader.newest(fragment.index)
            if head is not None:
                logged = max(logged, head.record.tokens_merged + head.record.tokens_lost)
                if head.record.closing:
                    closing.set()
    await asyncio.sleep(max(0.0, until_s - time.monotonic()))
    if closing.is_set():
        raise RunError(
            f"run {run.name!r} has begun to close: its learners stop, and its budget can no longer be changed; go on from "
            "a checkpoint in a new run"
        )
    return logged
