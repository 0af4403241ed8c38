"""``diloco rollback``: a run continues from its state at an earlier version, for example after a loss spike.

The command writes an order, a record among the run's changes; each fragment's owner carries it out by an entry of the log,
which has the state of that version (:func:`diloco.core.syncer.merging.make_rollback`). Nothing is ordered unless all can be
done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco.control.changes import read_changes
from diloco.core.log.chain import Chain
from diloco.core.run.changes import Action, Effective, Rollback, in_force
from diloco.errors import RunError
from diloco.log.stream import pass_over
from diloco.wire.entries import RolledBack
from diloco_ops.operate.changing import Reason, Say, make_changes
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader, read_chains
from diloco_report.units import count

CARRIED_OUT_S = 60.0  # so long an owner may take, until the command stops waiting for it
MAX_NAMED = 5
MAX_LISTED = 16  # fragments that a preview lists one by one


def rollback(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a live run.")],
    to_version: Annotated[int, typer.Option(min=0, help="Version to which all fragments beyond it go back.")],
    reason: Reason = "",
    preview: Annotated[bool, typer.Option("--preview", help="Only show what would be lost.")] = False,
) -> int:
    """Take a run back to an earlier version, by new records in its log. Exit code 1 if it takes more than a minute."""
    if preview:
        asyncio.run(foretell(directory, to_version))
        return 0
    return asyncio.run(go_back(directory, to_version, reason))


async def foretell(path: Path, version: int, say: Say = print) -> None:
    """Say what would be lost if a run went back to a version; nothing is ordered.

    Raises: as :func:`order`.
    """
    async with run_reader.opened(path) as seen:
        _, beyond = await _examine(seen, version)
        then = await _states(seen, version, beyond)
        tokens = {chain.fragment: chain.tokens_merged - then[chain.fragment].tokens_merged for chain in beyond}
        for chain in beyond[:MAX_LISTED]:
            say(f"fragment {chain.fragment}: versions {version + 1} to {chain.version}, {count(tokens[chain.fragment])} tokens")
        if len(beyond) > MAX_LISTED:
            say(f"and {len(beyond) - MAX_LISTED} more fragments")
        lost = sum(seen.map.fragments[index].size * each for index, each in tokens.items()) / seen.map.size
        versions, kept = sum(chain.version - version for chain in beyond), len(seen.map.fragments) - len(beyond)
        stay = f"; {kept} fragments are not beyond version {version} and stay" if kept else ""
        say(
            f"lost in all: {versions} versions of {len(beyond)} fragments, {count(round(lost))} tokens of the whole model{stay}"
        )
        say("the budget counts these tokens as used; work merged before the rollback is carried out is also lost")


async def go_back(path: Path, version: int, reason: str, say: Say = print) -> int:
    """Take a run back to a version, and say what each fragment does; return 1 if it is not done within a minute.

    Raises: as :func:`order`.
    """
    async with run_reader.opened(path) as seen:
        number, chains = await order(seen, version, reason, say)
        left = {chain.fragment for chain in chains}
        say(f"{len(left)} fragments go back to version {version}")
        try:
            async with asyncio.timeout(CARRIED_OUT_S):
                async for fragment, made in carried_out(seen, number, chains):
                    left.discard(fragment)
                    say(f"fragment {fragment}: version {made.version} is what version {version} was")
        except TimeoutError:
            named = ", ".join(map(str, sorted(left)))
            say(
                f"still pending for fragments {named}: their owners carry it out as soon as they can; diloco logs {path} "
                "shows what they wait for (rollback_failed: the version was dropped meanwhile)"
            )
    return 1 if left else 0


async def order(seen: RunReader, version: int, reason: str, say: Say) -> tuple[int, list[Chain]]:
    """Order a run back; return the number of the change, and the present heads of the fragments that it is for.

    Raises:
        RunError: it cannot, and nothing was ordered.
    """
    before, beyond = await _examine(seen, version)
    say(f"looking whether the log has version {version} of {len(beyond)} fragments")
    await _states(seen, version, beyond)

    def decide(now: Effective) -> Sequence[Action]:
        if now.rollbacks != before.rollbacks:
            raise RunError(
                f"run {seen.run.name!r}: another rollback of this run is in progress; see diloco set {seen.directory.path}"
            )
        return [Rollback(version, [chain.fragment for chain in beyond])]

    [made] = await make_changes(seen.transport, seen.run, decide, reason, say)
    return made.number, beyond


async def _examine(seen: RunReader, version: int) -> tuple[Effective, list[Chain]]:
    """Return the changes in force, and the heads of the fragments that are beyond a version.

    Raises:
        RunError: the run cannot go back to it.
    """
    run = seen.run
    if not seen.live:
        raise RunError(
            f"{seen.directory.path}: run {run.name!r} is not running; go on from an earlier version in a new directory: "
            f"{_resumed_at(seen, version)}"
        )
    if run.created.round.lockstep:
        raise RunError(
            f"run {run.name!r} trains in lockstep (round.learners_wait with round.steps = 1, as data-parallel does), where a "
            "step is one version of all fragments and they cannot go back one by one; stop it, and go on in a new directory: "
            f"{_resumed_at(seen, version)}"
        )
    listed = await read_changes(run)
    before, chains = in_force(run.created, listed.records), await read_chains(seen.log)
    beyond = [chain for chain in chains if chain.version > version]
    _check(seen, version, before, chains, beyond)
    return before, beyond


async def _states(seen: RunReader, version: int, beyond: Sequence[Chain]) -> dict[int, Chain]:
    """Return by fragment its head as of a version, having folded its state there.

    Raises:
        RunError: the log does not have all of them any more.
    """
    missing, found = [], {}
    for chain in beyond:
        try:
            replica = await seen.log.reader.state_at(chain.fragment, version, seen.genesis, seen.genesis_check)
        except RunError as error:
            missing.append(str(error))
        else:
            found[chain.fragment] = replica.chain
    if missing:
        more = f"; {len(missing) - MAX_NAMED} more fragments lack it" if len(missing) > MAX_NAMED else ""
        raise RunError("; ".join(missing[:MAX_NAMED]) + more)
    return found


def _resumed_at(seen: RunReader, version: int) -> str:
    """Return the command that begins again at a version in a new directory."""
    return f"diloco up --run-dir NEW --resume {seen.directory.path} --resume-at {version}"


def _check(seen: RunReader, version: int, now: Effective, chains: Sequence[Chain], beyond: Sequence[Chain]) -> None:
    name = seen.run.name
    # this order would take the place of an earlier one, but for the fragments that it does not name
    others = [chain for chain in chains if chain.version <= version]
    pending = [c.fragment for c in others if c.must_go_back(*now.rollbacks.get(c.fragment, (0, 0)))]
    if pending:
        number, to_version = now.rollbacks[pending[0]]
        raise RunError(
            f"run {name!r}: change {number} takes fragments {', '.join(map(str, pending))} back to version {to_version}, "
            f"but the owners have not done so yet; diloco logs {seen.directory.path} shows what they wait for"
        )
    if not beyond:
        versions = [chain.version for chain in chains]
        raise RunError(
            f"run {name!r}: no fragment is beyond version {version}; they are at versions {min(versions)} to {max(versions)}"
        )
    closed = [chain.fragment for chain in chains if chain.closed]
    if closed:
        raise RunError(
            f"run {name!r} is ending: the logs of {len(closed)} of its {len(chains)} fragments are closed; continue from a "
            f"checkpoint, or from that version: {_resumed_at(seen, version)}"
        )
    carried_out = max(chain.change for chain in chains)
    if carried_out > now.number:
        raise RunError(
            f"run {name!r}: its log has carried out change {carried_out}, but the server has only {now.number} changes, "
            "because it lost some; a rollback is possible once there are as many again"
        )


async def carried_out(seen: RunReader, number: int, chains: Sequence[Chain]) -> AsyncIterator[tuple[int, RolledBack]]:
    """Yield each fragment as its log goes back by a change, until all have."""
    left = {chain.fragment for chain in chains}
    start = min(chain.sequence for chain in chains) + 1
    async for head in seen.log.entries.heads(pass_over, start):
        fragment, made = head.record.fragment, head.record.rolled_back
        if made is not None and made.change == number and fragment in left:
            left.discard(fragment)
            yield fragment, made
            if not left:
                return
