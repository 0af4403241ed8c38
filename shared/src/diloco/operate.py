"""``diloco set``, ``eject`` and ``readmit``: changing a run while it goes on, each time by a record that stays."""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import MsgspecError, convert
from rich.console import Console
from rich.table import Table

from diloco import following, membership, outside
from diloco.core.changes import (
    MAX_AUTHOR,
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
from diloco.nats.transport import NatsTransport
from diloco.outside import Reached
from diloco.report import units
from diloco.settings import RunSettings, changed_settings, parse_assignments, value_of
from diloco.transport import Heard
from diloco.wire import messages
from diloco.wire.messages import Announcement, MemberName, Pulse, Record
from diloco.wire.subjects import Subjects

HEAR_S = 1.0  # beyond two pulses: announcements come four times a second
COMMAND = "diloco set"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory; the run is going on.")]
Learner = Annotated[str, typer.Argument(metavar="LEARNER", help="The learner's name.")]
Reason = Annotated[str, typer.Option(help="Why: one line, which is kept with the change.")]


def set_(
    directory: Directory,
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="round.steps=12, tokens=2e9, ...")
    ] = None,
    reason: Reason = "",
) -> None:
    """Change settings of a run that goes on, or its token budget. Without any: what can be set, and what was changed."""
    asyncio.run(_set(directory, assignments or [], reason))


def eject(directory: Directory, learner: Learner, reason: Reason = "") -> None:
    """Let a learner take no part any more: its offers are refused, nobody waits for it, and its process ends."""
    asyncio.run(_eject(directory, _name(learner), reason))


def readmit(directory: Directory, learner: Learner, reason: Reason = "") -> None:
    """Let a learner that was ejected or quarantined take part again."""
    asyncio.run(_readmit(directory, _name(learner), reason))


def _name(learner: str) -> str:
    try:
        return convert(learner, MemberName)
    except MsgspecError:
        raise SettingsError(f"learner {learner!r}: a name has lower-case letters, digits, - and _, at most 48") from None


async def _set(path: Path, assignments: Sequence[str], reason: str) -> None:
    wanted = parse_assignments(assignments, COMMAND)
    async with outside.reached(path) as reached:
        if not wanted:
            _show(reached.run.settings, reached.run.now, (await membership.changes(reached.run))[0])
            return
        budget = wanted.get("tokens")
        processed = await _processed(reached) if budget is not None else 0

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
            return actions

        await _change(reached, decide, reason)


def _extended(settings: RunSettings, value: Any, processed: int) -> tuple[RunSettings, Action]:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 2e9
    changed = changed_settings(settings, {"tokens": value}, COMMAND)
    if changed.tokens <= processed:
        raise SettingsError(f"{COMMAND}: tokens = {changed.tokens}: {processed} are processed already; give more")
    return changed, Tokens(changed.tokens)


async def _eject(path: Path, learner: str, reason: str) -> None:
    async with outside.reached(path) as reached:
        if await reached.run.registry.get(f"member.{learner}") is None:
            raise RunError(
                f"run {reached.run.name!r}: no learner {learner!r} was ever admitted; diloco status {path} names them"
            )
        await _change(reached, lambda now: [] if learner in now.ejected else [Eject(learner)], reason)


async def _readmit(path: Path, learner: str, reason: str) -> None:
    async with outside.reached(path) as reached:

        def decide(now: Effective) -> list[Action]:
            if learner not in now.barred:
                barred = ", ".join(sorted(now.barred)) or "nobody"
                raise RunError(f"run {reached.run.name!r}: learner {learner!r} takes part; ejected or quarantined: {barred}")
            return [Readmit(learner)]

        await _change(reached, decide, reason)


async def _change(reached: Reached, decide: Any, reason: str) -> None:
    before = len((await membership.changes(reached.run))[0].records)
    listed = await following.append(reached.transport, reached.run, decide, author=author(reached.transport), reason=reason)
    made = [change for change in listed.records[before:] if change.author == author(reached.transport)]
    for change in made:
        print(f"change {change.number}: {text_of(change)}")
    if not made:
        print("nothing to change: it is so already")


def author(transport: NatsTransport) -> str:
    """Who changes: the identity, or else the user and the machine, as far as they can be told."""
    if transport.identity is not None:
        return transport.identity.name
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "operator"
    text = f"{user}@{socket.gethostname()}"
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_AUTHOR]


def _show(created: RunSettings, now: Effective, listed: Changes) -> None:
    console = Console(soft_wrap=True)
    table = Table("setting", "now", "at first", box=None, pad_edge=False)
    for key in ("tokens", *SETTABLE):
        value, first = value_of(now.settings, key), value_of(created, key)
        table.add_row(key, str(value), "" if value == first else str(first))
    console.print(table)
    for title, barred in (("ejected", now.ejected), ("quarantined", now.quarantined)):
        for learner, change in sorted(barred.items()):
            console.print(f"{title}: {learner}, by {change.label}", markup=False, highlight=False)
    for change in listed.records:
        console.print(f"{units.moment(change.at_s)}  {change.label}: {text_of(change)}", markup=False, highlight=False)


class _Heard:
    """What members say of how far the run is."""

    def __init__(self, run: bytes) -> None:
        self.run = run
        self.tokens: dict[str, int] = {}  # by learner
        self.closing = False

    async def pulse(self, message: Heard) -> None:
        try:
            pulse, _, _ = messages.unpack(message.data, Pulse, self.run)
        except MessageError:
            return  # the syncers count it
        if pulse.role == "learner":
            self.tokens[pulse.learner] = pulse.tokens
            self.closing = self.closing or pulse.state in ("closing", "finished")

    async def round(self, message: Heard) -> None:
        try:
            announced, _, _ = messages.unpack(message.data, Announcement, self.run)
        except MessageError:
            return
        self.closing = self.closing or announced.closing


async def _processed(reached: Reached) -> int:
    """Tokens that the run has processed, as far as is heard and in its log.

    Raises:
        RunError: the run has begun to close.
    """
    run, transport, names = reached.run, reached.transport, Subjects(reached.run.name)
    heard = _Heard(run.identity)
    await transport.subscribe(names.pulse(), heard.pulse)
    await transport.subscribe(names.round(), heard.round)
    until_s = time.monotonic() + HEAR_S + 2 * run.now.settings.liveness.pulse_s
    logged = 0
    for fragment in range(len((await membership.find_map(run)).fragments)):
        stored = await transport.last(names.log_stream, names.record(fragment))
        if stored is None:
            continue
        try:
            record, _, _ = messages.unpack(stored.data, Record, run.identity)
        except MessageError:
            continue  # in a run with regions it may be a claim
        heard.closing = heard.closing or record.closing
        logged = max(logged, record.tokens_merged + record.tokens_lost)
    await asyncio.sleep(max(0.0, until_s - time.monotonic()))
    if heard.closing:
        raise RunError(
            f"run {run.name!r} has begun to close: its learners stop, and its budget cannot be changed any more; go on from a "
            "checkpoint in a new run"
        )
    return max(logged, sum(heard.tokens.values()))
