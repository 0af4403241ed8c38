"""``diloco siege DIR --as FILE``: lay siege to a rehearsal of a run, and say what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco.control.creation import KnownRun
from diloco.errors import RunError, SettingsError
from diloco.nats import identity
from diloco.nats.identity import Identity
from diloco.process.tasks import end
from diloco.settings.run import RunSettings
from diloco_ops.chaos.watch import ChaosWatch
from diloco_ops.keys.permissions import CONTROL, Who, is_known
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader
from diloco_ops.siege.adversary import Adversary
from diloco_ops.siege.siege import KnownServer, Siege, SiegeOutcome, who_of

HEARD_S = 60.0  # then the run's members are not there
OTHERS = (Who("coordinator", "coordinator"), Who("operator", "operator"), Who("observer", "observer"))
HEAD = (
    "| identity | role | messages | refused by the server | connections cut | silent | keys changed | steps | versions | "
    "steps, of unheard | versions, of unheard | longest stall |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def siege(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the run, as `diloco attach` makes it.")],
    as_: Annotated[
        list[Path],
        typer.Option("--as", metavar="FILE", help="Identity file to attack under; repeatable: one siege after the other."),
    ],
    rehearsal: Annotated[
        str, typer.Option(metavar="RUN", help="The run's name, to confirm: a siege may stop the run, so use a rehearsal.")
    ],
    actions: Annotated[int, typer.Option(min=1, help="Hostile actions under each identity.")] = 20_000,
    rate: Annotated[float, typer.Option(min=0.1, max=10_000, help="Actions a second.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Seed of the messages.")] = 1,
    base_s: Annotated[
        float, typer.Option("--base-s", min=1.0, help="Seconds of each measurement of the undisturbed pace, before and after.")
    ] = 15.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> int:
    """Attack a rehearsal of a run under members' identities, and measure the harm. Exit code 1 if there is any.

    The run must be training, at servers with identities. Make an identity of
    each role for the siege, and revoke it afterwards.

    The exit code is 0 if no process exits, no key changes that the identity may
    not write, no fragment stops for longer than a takeover, and versions come at
    90 % or more of their pace beside as many messages without a subscriber.
    """
    attackers = [identity.load(path) for path in as_]
    for attacker in attackers:
        if attacker.role == "operator":
            raise SettingsError(f"--as {attacker.path}: an operator may delete the run, so there is nothing to try")
    if not json_:
        print(HEAD, flush=True)
    outcomes, stall_s = asyncio.run(
        besiege(
            directory.resolve(),
            rehearsal,
            attackers,
            actions=actions,
            rate=rate,
            seed=seed,
            base_s=base_s,
            tell=_say_nothing if json_ else _say,
        )
    )
    faults = {outcome.name: outcome.faults(stall_s) for outcome in outcomes}
    if json_:
        print(json.dumps([{**outcome.row, "faults": faults[outcome.name]} for outcome in outcomes]))
    for name, lines in faults.items():
        for line in lines if not json_ else ():
            print(f"{name}: {line}")
    return int(any(faults.values()))


def _say(outcome: SiegeOutcome) -> None:
    print(table_row(outcome), flush=True)


def _say_nothing(outcome: SiegeOutcome) -> None:
    """Print nothing: with ``--json`` all outcomes are printed together."""


async def besiege(
    directory: Path,
    rehearsal: str,
    attackers: Sequence[Identity],
    *,
    actions: int,
    rate: float,
    seed: int,
    base_s: float,
    tell: Callable[[SiegeOutcome], None],
) -> tuple[list[SiegeOutcome], float]:
    """Return each attacker's outcome, told as soon as it is known, and how long a fragment may stand still.

    Raises:
        RunError: the run is not going on, or is another than ``rehearsal``.
        SettingsError: an identity is of another run.
    """
    outcomes = []
    async with AsyncExitStack() as stack:
        seen = await stack.enter_async_context(run_reader.opened(directory))
        _check(seen, rehearsal, attackers)
        control = await run_reader.connect(replace(seen.directory, nats_bulk_url=None), "siege", run_reader.ANSWER_TIMEOUT_S)
        stack.push_async_callback(control.close)
        watch = await ChaosWatch.begin(seen)
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(work) for work in watch.following()]
            await watch.listen()
            await _heard(watch)
            for attacker in attackers:
                servers = servers_of(seen, attacker)
                adversary = Adversary(
                    seed,
                    seen.log.subjects,
                    seen.run.identity,
                    who_of(attacker),
                    [*_members(watch), *OTHERS],
                    withheld=withheld(seen.run, attacker),
                    regions=seen.run.created.regions.names,
                    servers=[server.serves for server in servers],
                )
                outcome = await Siege(watch, control, attacker, servers, adversary).lay(actions, rate, base_s)
                outcomes.append(outcome)
                tell(outcome)
            await end(*following)
        return outcomes, longest_stall_s(seen.run.in_force)


def longest_stall_s(settings: RunSettings) -> float:
    """Return how long a fragment may make no version: a takeover, and the patience with a learner that does not answer."""
    return settings.liveness.takeover_s + 4 * settings.liveness.dead_s


def _check(seen: RunReader, rehearsal: str, attackers: Sequence[Identity]) -> None:
    """Refuse a run that is not going on, or is another than the caller names.

    Raises:
        RunError: it is.
        SettingsError: an identity is of another run.
    """
    if seen.run.name != rehearsal:
        raise RunError(f"{seen.directory.path}: holds run {seen.run.name!r}, and --rehearsal names {rehearsal!r}")
    if not seen.live:
        raise RunError(f"run {seen.run.name!r}: is not running; a siege needs a run whose learners take steps")
    for attacker in attackers:
        if attacker.run != seen.run.name:
            raise SettingsError(f"--as {attacker.path}: is an identity of run {attacker.run!r}, not of {seen.run.name!r}")


async def _heard(watch: ChaosWatch) -> None:
    """Wait until a learner and a syncer are heard.

    Raises:
        RunError: they are not.
    """
    try:
        async with asyncio.timeout(HEARD_S):
            while not (watch.stepping() and watch.witness.shards):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RunError(f"run {watch.run.run.name!r}: no learner steps, or no syncer is heard; a siege needs both") from None


def _members(watch: ChaosWatch) -> list[Who]:
    """Return the members that are heard."""
    learners = [Who(heartbeat.learner, heartbeat.role) for heartbeat in watch.witness.heartbeats.values()]
    return [*learners, *(Who(name, "syncer") for name in watch.witness.shards)]


def servers_of(seen: RunReader, attacker: Identity) -> list[KnownServer]:
    """Return the servers that an identity may connect to: the control store's first, then regions' as far as they are known."""
    regions, directory = seen.run.created.regions.names, seen.directory
    if not regions:
        return [KnownServer(directory.nats_url)]
    urls = {CONTROL: directory.nats_url, **(directory.region_urls or {})}
    known = [KnownServer(url, (name,)) for name, url in urls.items()]
    return [server for server in known if is_known(who_of(attacker), regions, server.serves)]


def withheld(run: KnownRun, attacker: Identity) -> list[str]:
    """Return the beginnings of subjects that are not tried: what a role is there to do, and could do harm with."""
    return [f"$JS.API.STREAM.PURGE.DILOCO_{run.name}_"] if attacker.role in ("syncer", "coordinator") else []


def table_row(outcome: SiegeOutcome) -> str:
    """Return an outcome as a row of the table."""
    row = outcome.row
    messages = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.sent.items()))
    wrong = f"{', '.join(outcome.silent) or 'none'} | {', '.join(outcome.keys_changed) or 'none'}"
    paces = " | ".join(f"{pace:.0%}" for pace in outcome.paces)
    return (
        f"| {outcome.name} | {outcome.role} | {messages} | {outcome.refused} | {outcome.cut} | {wrong} | {paces} | "
        f"{row['longest_stall_s']} s |"
    )
