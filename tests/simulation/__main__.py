"""``python -m tests.simulation``: play many schedules and say what came of them, or one of them again, with what happened."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from pathlib import Path

from tests.simulation.play import play_all, world

BLOCK = 10_000  # schedules of one line of a report


def replay(seed: int, kind: dict[str, bool]) -> int:
    """Play one schedule and print all that happened."""
    outcome = world(seed, verbose=True, **kind).run()
    for at_s, who, what in outcome.trace:
        print(f"{at_s:9.4f} {who:<12} {what}")
    print(f"\nseed {seed}: {outcome.virtual_s:.1f} s of virtual time, {dict(sorted(outcome.stats.items()))}")
    if outcome.error is not None:
        traceback.print_exception(outcome.error)
    return int(outcome.error is not None)


def play(first: int, schedules: int, jobs: int, report: Path | None, kind: dict[str, bool]) -> int:
    """Play schedules of consecutive seeds, and print rate, faults and the seeds that failed; a line of ``report`` a block."""
    total: Counter[str] = Counter()
    failed = 0
    seconds = cpu_s = 0.0
    for begin in range(first, first + schedules, BLOCK):
        block = range(begin, min(begin + BLOCK, first + schedules))
        result, seeds = play_all(block, jobs, **kind), []
        for outcome in result.outcomes:
            total.update(outcome.stats)
            if outcome.error is not None:
                seeds.append(outcome.seed)
                print(f"seed {outcome.seed}: {type(outcome.error).__name__}: {outcome.error}", flush=True)
        failed, seconds, cpu_s = failed + len(seeds), seconds + result.seconds, cpu_s + result.cpu_s
        if report is not None:
            line = {"first": begin, "schedules": len(block), "failed": sorted(seeds), "a_minute": round(result.rate())}
            with report.open("a") as file:
                file.write(json.dumps(line | {"a_core_minute": round(result.rate(cores=True))}) + "\n")
    for what, count in sorted(total.items()):
        print(f"{count:>10,} {what}")
    rates = f"{schedules / seconds * 60:,.0f} a minute, {schedules / cpu_s * 60:,.0f} a core's minute"
    print(f"{schedules:,} schedules from seed {first}: {failed} failed; {rates}")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes to play them in")
    parser.add_argument("--report", type=Path, metavar="FILE", help=f"append a line of JSON for each {BLOCK:,} schedules")
    parser.add_argument("--regions", action="store_true", help="of clusters in three regions")
    parser.add_argument("--merged", action="store_true", help="of clusters in three regions that merge their own offers")
    parser.add_argument("--rollbacks", action="store_true", help="of clusters that are ordered back now and then")
    parser.add_argument("--faulty", action="store_true", help="of clusters in which a syncer's memory goes bad")
    parser.add_argument("--hostile", action="store_true", help="of clusters whose heads a stranger stores nonsense on")
    parser.add_argument("--state", action="store_true", help="of clusters that merge state beside parameters")
    parser.add_argument("--empties", action="store_true", help="of clusters in three regions, one of which loses its disk")
    parser.add_argument("--islands", action="store_true", help="of clusters whose learners are islands of several processes")
    parser.add_argument("--even", action="store_true", help="of clusters of eight fragments, whose versions are made evenly")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one schedule, and print what happened")
    arguments = parser.parse_args()
    kinds = ("regions", "merged", "rollbacks", "faulty", "hostile", "state", "empties", "islands", "even")
    kind = {name: getattr(arguments, name) for name in kinds}
    kind["regions"] |= kind["merged"] | kind["empties"]
    for alone in ("islands", "even"):
        if kind[alone] and sum(kind.values()) > 1:
            parser.error(f"--{alone} goes with no other kind")
    if arguments.replay is not None:
        return replay(arguments.replay, kind)
    return play(arguments.seed, arguments.schedules, arguments.jobs, arguments.report, kind)


if __name__ == "__main__":
    sys.exit(main())
