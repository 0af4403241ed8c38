"""``diloco rollback``: a run that goes on from what it was at an earlier version, after a loss spike for one.

What is written is an order, a record among the run's changes; each fragment's owner carries it out by an entry of the log,
which has the state of that version (:func:`diloco.core.merging.make_rollback`). Nothing is ordered unless all can be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco import following, membership, outside
from diloco.core.chain import Chain
from diloco.core.changes import Action, Effective, Rollback, in_force
from diloco.errors import RunError
from diloco.operate import Reason, author
from diloco.outside import Outside
from diloco.report.build import read_chains
from diloco.wire.messages import RolledBack

CARRIED_OUT_S = 60.0  # so long an owner may take, until the command stops waiting for it
MAX_NAMED = 5


def rollback(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory; the run is going on.")],
    to_version: Annotated[int, typer.Option(min=0, help="Every fragment that is beyond this version goes back to it.")],
    reason: Reason = "",
) -> int:
    """Take a run back to an earlier version, by new records in its log. Exit code 1 if that is not done within a minute."""
    return asyncio.run(_rollback(directory, to_version, reason))


async def _rollback(path: Path, version: int, reason: str) -> int:
    async with outside.opened(path) as seen:
        change, chains = await order(seen, version, reason, print)
        left = {chain.fragment for chain in chains}
        print(f"change {change}: {len(left)} fragments go back to version {version}")
        try:
            async with asyncio.timeout(CARRIED_OUT_S):
                async for fragment, made in carried_out(seen, change, chains):
                    left.discard(fragment)
                    print(f"fragment {fragment}: version {made.version} is what version {version} was")
        except TimeoutError:
            named = ", ".join(map(str, sorted(left)))
            print(
                f"not done yet for fragments {named}: their owners do it as soon as they can; diloco logs {path} says what "
                "they wait for (rollback_failed: the version was dropped meanwhile)"
            )
    return 1 if left else 0


async def order(seen: Outside, version: int, reason: str, say: Callable[[str], object]) -> tuple[int, list[Chain]]:
    """Have a run go back: the number of the change, and the logs, as they are now, of the fragments that it is for.

    Raises:
        RunError: it cannot, and nothing was ordered.
    """
    run = seen.run
    if not seen.live:
        raise RunError(
            f"{seen.directory.path}: run {run.name!r} is not going on; go on from an earlier version in a new directory: "
            f"diloco up NEW --resume {seen.directory.path} --resume-at {version}"
        )
    if run.settings.round.lockstep:
        raise RunError(
            f"run {run.name!r} trains in lockstep (round.learners_wait with round.steps = 1, as data-parallel does), where a "
            "step is one version of all fragments and they cannot go back one by one; stop it, and go on in a new directory: "
            f"diloco up NEW --resume {seen.directory.path} --resume-at {version}"
        )
    listed, _ = await membership.changes(run)
    before, chains = in_force(run.settings, listed.records), await read_chains(seen.log)
    beyond = [chain for chain in chains if chain.version > version]
    _check(seen, version, before, chains, beyond)
    say(f"looking whether the log has version {version} of {len(beyond)} fragments")
    missing = []
    for chain in beyond:
        try:
            await seen.log.state_at(chain.fragment, version, seen.genesis, seen.genesis_check)
        except RunError as error:
            missing.append(str(error))
    if missing:
        more = f"; {len(missing) - MAX_NAMED} more fragments lack it" if len(missing) > MAX_NAMED else ""
        raise RunError("; ".join(missing[:MAX_NAMED]) + more)

    def decide(now: Effective) -> Sequence[Action]:
        if now.rollbacks != before.rollbacks:
            raise RunError(
                f"run {run.name!r}: somebody else orders it back at this moment; look at diloco set {seen.directory.path}"
            )
        return [Rollback(version, [chain.fragment for chain in beyond])]

    listed = await following.append(seen.transport, run, decide, author=author(seen.transport), reason=reason)
    newest = max(change.number for change in listed.records if isinstance(change.action, Rollback))
    return newest, beyond


def _check(seen: Outside, version: int, now: Effective, chains: Sequence[Chain], beyond: Sequence[Chain]) -> None:
    name = seen.run.name
    # this order would take the place of an earlier one, but for the fragments that it does not name
    others = [chain for chain in chains if chain.version <= version]
    pending = [c.fragment for c in others if c.must_go_back(*now.rollbacks.get(c.fragment, (0, 0)))]
    if pending:
        number, to_version = now.rollbacks[pending[0]]
        raise RunError(
            f"run {name!r}: change {number} takes fragments {', '.join(map(str, pending))} back to version {to_version}, and "
            f"is not carried out yet; diloco logs {seen.directory.path} says what their owners wait for"
        )
    if not beyond:
        versions = [chain.version for chain in chains]
        raise RunError(
            f"run {name!r}: nothing is beyond version {version}; its fragments are at {min(versions)} to {max(versions)}"
        )
    closed = [chain.fragment for chain in chains if chain.closed]
    if closed:
        raise RunError(
            f"run {name!r} ends: the logs of {len(closed)} of its {len(chains)} fragments are closed; go on from a checkpoint, "
            f"or from that version: diloco up NEW --resume {seen.directory.path} --resume-at {version}"
        )
    carried_out = max(chain.change for chain in chains)
    if carried_out > now.number:
        raise RunError(
            f"run {name!r}: its log has carried out change {carried_out}, and there are {now.number} changes: the server has "
            "lost some; nothing can be ordered back before there are as many again"
        )


async def carried_out(seen: Outside, change: int, chains: Sequence[Chain]) -> AsyncIterator[tuple[int, RolledBack]]:
    """Fragments as their logs go back by a change, until all have."""
    left = {chain.fragment for chain in chains}
    start = min(chain.sequence for chain in chains) + 1
    async for entry in seen.log.follow(sorted(left), start, lambda sequence, error: None):
        made = entry.record.rolled_back
        if made is not None and made.change == change and entry.record.fragment in left:
            left.discard(entry.record.fragment)
            yield entry.record.fragment, made
            if not left:
                return
