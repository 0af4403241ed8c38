"""The verdict on a run that was broken on purpose: versions, tokens and recoveries, and the log as it is in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from diloco.errors import DilocoError
from diloco.log.log import Log
from diloco.log.stream import pass_over
from diloco.process import logs
from diloco_ops.audit import verify
from diloco_ops.broker.admin import SERVER_AWAY
from diloco_ops.chaos.breaking import Breaker
from diloco_ops.chaos.refused_messages import RefusalCount
from diloco_ops.chaos.witness import Witness
from diloco_ops.reading import run_reader
from diloco_report.units import share

T = TypeVar("T")

FEW = "held by fewer than a majority of regions"

SETTLE_S = 60.0  # many times the longest recovery
CHECK_ATTEMPTS = 5
CHECK_RETRY_S = 3.0  # a run that ends takes its server with it, in about so long


async def judge(
    path: Path, began_s: float, witness: Witness, breaker: Breaker, unaccounted: Mapping[str, int]
) -> dict[str, Any]:
    """Compare the logs of the run in ``path`` with all that was seen of it, and look for refusals of honest messages.

    Args:
        path: the run's directory.
        began_s: since when refusals count, as a time of the epoch.
        witness: what was seen of versions and recoveries.
        breaker: what was damaged, or stored twice, on purpose.
        unaccounted: tokens unaccounted for in the end, by learner.

    Returns:
        The verdict: each broken invariant (``violations``), whether there is none (``holds``), and the numbers.
    """
    lost, changed, too_few = witness.compare(await _retried(lambda: _read_again(path)))
    checked = await _retried(lambda: verify.check(path))
    violations = [f"{check.name}: {check.found}" for check in checked.checks if check.state == "fails"]
    for count, what in ((lost, "lost"), (witness.doubled, "doubled"), (changed, "changed"), (too_few, FEW)):
        if count:
            violations.append(f"{count} versions {what}")
    refused = RefusalCount.read(logs.merge(path), began_s, breaker.damaged, breaker.repeated)
    violations += refused.honest
    if not witness.finished:
        violations += [f"{name}: {tokens} tokens unaccounted for" for name, tokens in unaccounted.items()]
        violations += [f"{r.target}: not recovered from {r.kind} within {SETTLE_S:g} s" for r in witness.open]
    return {
        "holds": not violations,
        "violations": violations,
        "versions": {"seen": len(witness.versions), "lost": lost, "doubled": witness.doubled, "changed": changed},
        "takeovers": witness.takeovers,
        "refused": {"honest": len(refused.honest), "made": refused.made},
        "tokens_unaccounted": sum(map(abs, unaccounted.values())),
        "recovery": witness.recovery_times(),
        "checks": {check.name: check.state for check in checked.checks},
    }


async def _read_again(path: Path) -> list[dict[tuple[int, int], set[bytes]]]:
    """Return the entry hashes that each region's log holds now, or the only one, by fragment and the version that they make."""
    async with run_reader.opened(path) as seen:
        found = [await _versions(log) for log in seen.regions.values() or [seen.log]]
        return found + [{} for _ in seen.run.created.regions.names[len(found) :]]


async def _versions(log: Log) -> dict[tuple[int, int], set[bytes]]:
    stored: dict[tuple[int, int], set[bytes]] = {}
    stop = max([await log.reader.end_sequence(fragment.index) for fragment in log.map.fragments])
    if stop:
        async for head in log.entries.heads(pass_over, stop_sequence=stop):
            if head.record.makes_version:
                stored.setdefault((head.record.fragment, head.record.version), set()).add(head.entry_hash)
    return stored


async def _retried(work: Callable[[], Awaitable[T]]) -> T:
    """Try again where the run ends, and its server with it, in the middle of a check."""
    for attempt in range(CHECK_ATTEMPTS):
        try:
            return await work()
        except (DilocoError, OSError, *SERVER_AWAY):
            if attempt == CHECK_ATTEMPTS - 1:
                raise
            await asyncio.sleep(CHECK_RETRY_S)
    raise AssertionError("unreachable")


def describe(verdict: dict[str, Any]) -> str:
    """Return the verdict as text."""
    refused = verdict["refused"]
    lines = [
        "",
        f"{sum(verdict['failures'].values())} failures in {verdict['wall_s']:g} s: "
        + ", ".join(f"{count} {kind}" for kind, count in verdict["failures"].items()),
        "versions: " + ", ".join(f"{count} {what}" for what, count in verdict["versions"].items()),
        f"tokens: {verdict['tokens_unaccounted']} unaccounted for, {verdict['tokens_lost']} lost "
        f"({share(verdict['lost_fraction'], 1)} of those processed; undisturbed "
        f"{share(verdict['lost_fraction_undisturbed'], 1)})",
        f"goodput of the learners: {share(verdict['goodput'], 1)} of their undisturbed pace",
        f"takeovers: {verdict['takeovers']}",
        f"refused: {refused['honest']} honest messages; messages damaged or repeated by chaos: {refused['made']} times",
        "recovery after                count   median      max",
    ]
    for what, times in verdict["recovery"].items():
        lines.append(f"  {what:<26} {times['count']:>6.0f} {times['median_s']:>6.2f} s {times['max_s']:>6.2f} s")
    if verdict["left_out"]:
        lines.append(f"left out of the tape: {', '.join(f'{n} {kind}' for kind, n in verdict['left_out'].items())}")
    unchecked = [name for name, state in verdict["checks"].items() if state == "unchecked"]
    if unchecked:
        lines.append(f"not checked: {', '.join(unchecked)} (diloco verify says why)")
    lines += [f"BROKEN: {violation}" for violation in verdict["violations"]]
    lines.append("verdict: all invariants hold" if verdict["holds"] else "verdict: broken")
    return "\n".join(lines)
