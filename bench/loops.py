"""PyTorch loops in a run: what it costs each of several ranks, what kills of ranks cost, and the pace of trainers.

python bench/loops.py ranks --ranks 1 2 4           # a minute each
python bench/loops.py kills --kills 50 --ranks 2    # half an hour
python bench/loops.py trainers --pin --pairs 16     # three trainers, six minutes each
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from harness.console import Bench, Keep, Result, Script, folder, say
from harness.crowd import Traffic, services
from harness.host import MB, machine, rss_bytes
from harness.intervals import T95, ratio
from harness.live_run import ENDLESS, Up, asked, up, watched
from harness.loops import loop_main, sides
from harness.parties import RUN, STEP_TOKENS, Party, spawn
from harness.rank_loops import ISLAND, RankFigures, rank_main
from harness.trainer_loops import TRAINERS, trainer_main

from diloco.processes.meeting import free_port
from diloco.service import rundir
from diloco.settings.presets import run_settings

LOOPBACK = "127.0.0.1"
SETTLE_S = 10.0
PATIENT_S = 600.0  # a process that is stopped for a turn is not dead

# ---- ranks


def ranks(
    *,
    ranks: Sequence[int] = (1, 2, 4),
    parameters: int = 860_000,
    fragments: int = 24,
    steps: int = 20,
    step_s: float = 0.1,
    for_s: float = 30.0,
) -> Result:
    """Measure what a run costs each rank of a loop whose parameters are sharded over ranks (FSDP2), of which steps are asleep.

    With one rank the module is not sharded. A learner with one process trains beside the loop. The result has for each rank and
    step: processor time of the process, processor time and wall time of the loop's thread in `run.step`, and bytes to and from
    the server.
    """
    given = {"learners": 2, "shards": 1, "tokens": ENDLESS, "fragments.count": fragments, "round.steps": steps}
    rows: list[Result] = []
    for count in ranks:
        with services(run_settings("decoupled", given)) as run:
            port = free_port(LOOPBACK)
            for rank in range(count):
                words = run.server.url, rank, count, port, parameters, step_s
                run.learners.append(run.spawn(rank_main, f"{ISLAND}-{rank}", *words))
            run.learners.append(run.spawn(loop_main, "loop-1", run.server.url, 1, parameters, step_s, 0))
            run.join()
            time.sleep(SETTLE_S + 2 * steps * step_s)
            island = run.learners[:count]
            before = run.traffic()
            for party in island:
                party.ask("forget")
            time.sleep(for_s)
            figures: list[RankFigures] = [party.ask("figures") for party in island]
            after = run.traffic()
            memory = [rss_bytes(party.pid) for party in island]
        rows += [
            _rank_row(count, rank, its, _moved(before, after, rank), held)
            for rank, (its, held) in enumerate(zip(figures, memory, strict=True))
        ]
        for row in rows[-count:]:
            say(_rank_line(row))
    return machine() | {"parameters": parameters, "fragments": fragments, "steps": steps, "step_s": step_s, "rows": rows}


def _moved(before: dict[str, Traffic], after: dict[str, Traffic], rank: int) -> tuple[int, int]:
    """Return the bytes that a rank has received and sent between two looks."""
    name = ISLAND if rank == 0 else f"{ISLAND}-p{rank}"
    none = Traffic(0, 0, 0)
    old, new = before.get(name, none), after.get(name, none)
    return new.received_bytes - old.received_bytes, new.sent_bytes - old.sent_bytes


def _rank_row(count: int, rank: int, figures: RankFigures, moved: tuple[int, int], held_bytes: int) -> Result:
    steps = figures.steps
    return {
        "ranks": count, "rank": rank, "steps": steps, "cpu_s": figures.cpu_s / steps, "call_cpu_s": figures.call_cpu_s / steps,
        "call_s": figures.call_s / steps, "call_longest_s": figures.blocked_longest_s, "received_bytes": moved[0] / steps,
        "sent_bytes": moved[1] / steps, "rss_bytes": held_bytes,
    }  # fmt: skip


def _rank_line(row: Result) -> str:
    return (
        f"{row['ranks']:5}  {row['rank']:4}  {1000 * row['cpu_s']:9.2f} ms  {1000 * row['call_cpu_s']:9.2f} ms  "
        f"{1000 * row['call_s']:9.2f} ms  {row['received_bytes'] / 1e3:8.1f} kB  {row['sent_bytes'] / 1e3:8.1f} kB  "
        f"{row['rss_bytes'] / MB:6.0f} MB"
    )


def show_ranks(result: Result) -> None:
    print(f"{result['cpu']}, {result['cores']} cores; of each rank, for a step of {result['step_s']:g} s:")
    print("ranks  rank     all CPU   CPU in step  clock in step     received         sent  memory")
    print(*map(_rank_line, result["rows"]), sep="\n")


# ---- kills

SILENT_S = 10.0  # `processes.silent_s`: within so long the others end
HANGS_S = 90.0  # longer than any time limit of a loop that joins
LAST_STEPS = 200
DIRECTORY = RUN  # the run has its directory's name


class RankKills:
    """Kills of a rank of a loop, each of which ends all its ranks, until it is begun again."""

    def __init__(self, url: str, count: int, chance: random.Random, parameters: int, step_s: float) -> None:
        self.url, self.count, self.chance = url, count, chance
        self.parameters, self.step_s = parameters, step_s

    def begin(self) -> list[Party]:
        """Begin all ranks, as ``torchrun`` does."""
        port = free_port(LOOPBACK)
        words = self.count, port, self.parameters, self.step_s
        return [spawn(rank_main, f"{ISLAND}-{rank}", self.url, rank, *words) for rank in range(self.count)]

    def kill(self, pause_s: float) -> Result:
        """Begin all ranks, kill one at a random moment, and return how long the others took to end."""
        begun = self.begin()
        for rank in begun:
            rank.hear()  # its group has met: what is before is PyTorch's own
            rank.pipe.send("join")
        time.sleep(self.chance.uniform(0, pause_s))
        victim = self.chance.randrange(self.count)
        stepped = begun[victim].pipe.poll()
        begun[victim].process.kill()
        killed_s, took_s = time.monotonic(), list[float]()
        for rank in begun:
            rank.process.join(max(0.0, killed_s + HANGS_S - time.monotonic()))
            took_s.append(time.monotonic() - killed_s)
        hung = [index for index, rank in enumerate(begun) if rank.process.exitcode is None]
        for index in hung:
            begun[index].process.kill()
            begun[index].process.join()
        return {"rank": victim, "joined": stepped, "others_ended_s": max(took_s), "hung": hung}


def kills(
    *,
    kills: int = 50,
    ranks: int = 2,
    seed: int = 0,
    pause_s: Annotated[float, "most seconds from joining to the kill"] = 12.0,
    parameters: int = 100_000,
    step_s: float = 0.05,
    keep: Keep = None,
) -> Result:
    """Kill random ranks of a loop at random moments, while it joins or steps. A learner with one process trains beside it.

    After each kill the loop begins again with all its ranks. In the end the run's budget is set so that it ends.
    Exit code 1 unless all other ranks have ended after each kill, the tokens of each learner are merged or lost, and
    ``diloco verify`` holds, so that no batch is merged twice.
    """
    chance = random.Random(seed)
    with folder(keep) as place:
        directory = place / DIRECTORY
        sets = {"learners": 2, "fragments.count": 4, "round.steps": 8}
        with up(directory, tokens=ENDLESS, sets=sets, command="serve") as running:
            found, codes = _killed(running, kills, ranks, pause_s, chance=chance, parameters=parameters, step_s=step_s)
        checks = _accounts(directory)
    passed = checks["holds"] and not any(kill["hung"] for kill in found)
    return machine() | {"kills": found, "ranks": ranks, "seed": seed, "codes": codes, "checks": checks, "passed": passed}


def _killed(
    running: Up, kills: int, ranks: int, pause_s: float, *, chance: random.Random, parameters: int, step_s: float
) -> tuple[list[Result], list[int | None]]:
    with watched(running) as watch:
        url = rundir.load(running.directory).nats_url
        other = spawn(loop_main, "loop-1", url, 1, parameters, step_s, 0)
        other.hear()
        other.pipe.send("join")
        other.hear()
        drill, found = RankKills(url, ranks, chance, parameters, step_s), list[Result]()
        for number in range(kills):
            found.append({"kill": number} | drill.kill(pause_s))
            say(_kill_line(found[-1]))
        last = drill.begin()
        for rank in last:
            rank.hear()
            rank.pipe.send("join")
        for rank in last:
            rank.hear()
        running.until(lambda: ISLAND in watch.heartbeats and watch.last(ISLAND).step > LAST_STEPS, "the loop steps again")
        running.finish(watch.tokens, LAST_STEPS * STEP_TOKENS)
        for party in (other, *last):
            party.process.join(PATIENT_S)
        return found, [party.process.exitcode for party in (other, *last)]


def _accounts(directory: Path) -> Result:
    """Return what the report and ``diloco verify`` state of the learners' tokens."""
    report = json.loads((directory / "report.json").read_text())["learners"]
    keys = ("tokens_processed", "tokens_merged", "tokens_lost")
    tokens = {name: [learner[key] for key in keys] for name, learner in report.items()}
    balanced = all(abs(processed - merged - lost) <= 2 for processed, merged, lost in tokens.values())  # each is rounded
    verified = bool(asked("verify", str(directory)).get("holds"))
    return {"tokens": tokens, "verified": verified, "holds": balanced and verified}


def _kill_line(kill: Result) -> str:
    when, hung = "stepping" if kill["joined"] else "joining", f", HUNG: {kill['hung']}" if kill["hung"] else ""
    return f"{kill['kill']:3}: rank {kill['rank']}, {when}: all others ended after {kill['others_ended_s']:.1f} s{hung}"


def show_kills(result: Result) -> None:
    took = [kill["others_ended_s"] for kill in result["kills"]]
    joining = sum(not kill["joined"] for kill in result["kills"])
    print(
        f"{len(took)} kills of one of {result['ranks']} ranks, {joining} of them while joining: all others ended after "
        f"{statistics.median(took):.1f} s in the median, {max(took):.1f} s at most (silent_s is {SILENT_S:g} s)"
    )
    for name, (processed, merged, lost) in result["checks"]["tokens"].items():
        print(f"  {name}: {processed} tokens = {merged} merged and {lost} lost")
    print(f"verify {result['checks']['verified']}; exit codes at the end {result['codes']}")


# ---- trainers


def trainers(
    names: Annotated[Sequence[str], tuple(TRAINERS)] = tuple(TRAINERS),
    *,
    step_s: float = 0.036,
    parameters: int = 860_000,
    fragments: int = 24,
    steps: int = 20,
    pairs: Annotated[int, tuple(T95)] = 4,
    turn_s: float = 6.0,
    pin: Annotated[bool, "both loops' threads at core 0, and everything else at core 1"] = False,
) -> Result:
    """Measure the pace of trainers in a run, beside the same training without one, in turns."""
    given = {
        "learners": 2, "shards": 1, "tokens": ENDLESS, "fragments.count": fragments, "round.steps": steps,
        "liveness.dead_s": PATIENT_S, "liveness.lease_s": PATIENT_S,
    }  # fmt: skip
    rows: list[Result] = []
    for name in names:
        main = functools.partial(trainer_main, name)
        common: dict[str, Any] = {"learners": 2, "parameters": parameters, "step_s": step_s, "asleep": False, "pin": pin}
        with sides(run_settings("decoupled", given), **common, measured=main) as both:
            time.sleep(SETTLE_S + steps * step_s)
            turns = [both.turn(turn_s, run_first=pair % 2 == 0) for pair in range(pairs)]
        pace = ratio([turn["bare_step_s"] for turn in turns], [turn["step_s"] for turn in turns])
        rows.append({"trainer": name, "turns": turns, "pace": pace})
        say(_trainer_line(rows[-1]))
    return machine() | {"pairs": pairs, "pin": pin, "rows": rows}


def _trainer_line(row: Result) -> str:
    bare_s, pace = statistics.median(turn["bare_step_s"] for turn in row["turns"]), row["pace"]
    interval = f" ({100 * pace['low']:.1f} to {100 * pace['high']:.1f}, 95 %)" if "low" in pace else ""
    return f"{row['trainer']:12}  bare step {1000 * bare_s:6.1f} ms  pace {100 * pace['ratio']:5.1f} %{interval}"


def show_trainers(result: Result) -> None:
    print(f"{result['cpu']}, {result['cores']} cores, {result['pairs']} pairs")
    print(*map(_trainer_line, result["rows"]), sep="\n")


SCRIPT = Script(__doc__, Bench(ranks, show_ranks), Bench(kills, show_kills), Bench(trainers, show_trainers))

if __name__ == "__main__":
    SCRIPT.run()
