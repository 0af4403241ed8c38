"""Learners of several processes: what rounds cost each process, and what it costs to lose some and to take them back.

python bench/processes.py rounds --processes 1 2 --steps 120
python bench/processes.py elastic --processes 2 3
python bench/processes.py kills                       # 50 kills, each some seconds after the learner steps again
python bench/processes.py kills --kills 5 --seed 7 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
from harness.console import Bench, Keep, Result, Script, folder, say
from harness.host import cpu_s, machine
from harness.live_run import ASLEEP_TOKENS, ENDLESS, Up, Watch, asked, asleep, events, up, watching

from diloco_ops.up.environment import service_environment

ISLAND, PLAIN = "learner-0", "plain"
LOOK_S = 0.1
NEVER = 100_000  # steps of a round that does not come


def services_of(processes: int) -> list[str]:
    """Return the names under which ``diloco up`` begins a learner's processes, by index."""
    return [ISLAND, *(f"{ISLAND}-p{index}" for index in range(1, processes))]


def options_for(processes: int, devices: int, least: int | None = None) -> list[str]:
    """Return options of a run of one learner of so many processes."""
    found = ["--learners", "1", "--shards", "1"]
    found += ["--processes-per-learner", str(processes), "--devices-per-learner", str(devices)]
    return found if least is None else [*found, "--least-processes", str(least)]


# ---- rounds


def rounds(
    *,
    processes: Sequence[int] = (1, 2),
    steps: int = 120,
    step_s: float = 0.2,
    tensors: int = 16,
    width: int = 256,
    interval: Annotated[int, "steps of a round"] = 16,
    turns: Annotated[int, "pairs of runs; their medians are shown"] = 1,
) -> None:
    """Measure bytes and processor time of each process of a learner of one and of several processes, of rounds alone.

    The task is that of ``harness/asleep.py``, whose step takes a set time. Its arithmetic and its collectives still take
    processor time, so each learner trains twice: with rounds, and with an interval that is longer than the run, so that there
    is none. Printed is the difference, without bytes and time of founding and joining. Processor time is counted from the
    moment at which a process has joined to its end, bytes from its beginning.
    """
    sets = {
        "task.name": "harness.asleep:make", "task.layers": tensors, "task.width": width, "fragments.count": 8,
        "inner.optimizer": "adamw",
    }  # fmt: skip
    print(f"{tensors * width**2 / 1e6:.2f}M parameters, a round each {interval} steps; a step, of rounds alone:")
    print("processes  process  NATS up    NATS down  others up  others down  CPU")
    for count in processes:
        pairs: list[list[list[float]]] = []
        for _ in range(turns):
            with_rounds, without = (
                trained(count, steps, step_s, sets | {"round.steps": round_steps}) for round_steps in (interval, NEVER)
            )
            pairs.append([[a - b for a, b in zip(*its, strict=True)] for its in zip(with_rounds, without, strict=True)])
        for index, found in enumerate(zip(*pairs, strict=True)):
            *moved, cpu_ms = map(statistics.median, zip(*found, strict=True))
            columns = "  ".join(f"{size_bytes / 1e3:6.1f} kB" for size_bytes in moved)
            print(f"{count:9}  {index:7}  {columns}  {cpu_ms:8.1f} ms", flush=True)


def trained(count: int, steps: int, step_s: float, sets: Mapping[str, Any]) -> list[list[float]]:
    """Run once; return for each process bytes up and down, to and from others, and processor time in ms, a step."""
    names, joined_s, used_s = services_of(count), dict[str, float](), dict[str, float]()
    options, tokens = options_for(count, max(2, count)), steps * ASLEEP_TOKENS
    with folder() as place:
        directory = place / "run"
        with up(directory, *options, tokens=tokens, sets=sets, environment=asleep(step_s)) as running:
            while running.process.poll() is None:
                for name in names:
                    now_s = cpu_s(running.pid(name))
                    if now_s:
                        used_s[name] = now_s
                        if name not in joined_s and running.events(name, "joined"):
                            joined_s[name] = now_s
                time.sleep(LOOK_S)
        report = json.loads((directory / "report.json").read_text())["learners"][ISLAND]
        lines: list[list[float]] = []
        for name in names:
            its = next(iter(events(directory, name, "island_left")), report)
            moved = [its.get(key, 0) for key in ("bytes_up", "bytes_down", "processes_bytes_up", "processes_bytes_down")]
            lines.append([value / report["steps"] for value in (*moved, 1000 * (used_s[name] - joined_s[name]))])
        return lines


# ---- elastic

LAST = "checkpoint_restored"
EVENTS = (
    "process_arrived", "island_ended", "state_kept", "island_regroups", "processes_met", "island_ready", "compiled", "joined",
    LAST,
)  # fmt: skip

SMALL_TOKENS = 16 * 12  # of a step
SMALL = {
    "task.layers": 1, "task.width": 64, "task.heads": 2, "task.context": 16, "task.batch": 12, "fragments.count": 4,
    "round.steps": 8, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2,
}  # fmt: skip
ELASTIC_PATIENCE_S = 300.0


class Lost:
    """A learner of so many processes whose last one is killed, and held back for a while."""

    def __init__(self, running: Up, count: int) -> None:
        self.running, self.last = running, services_of(count)[-1]

    def trained(self) -> None:
        """Wait until a checkpoint is some steps old."""
        saved = self.running.directory / "checkpoints" / "learner-0.safetensors"
        self.running.until(saved.exists, "the first checkpoint")
        began_s = time.time()
        self.running.until(lambda: saved.stat().st_mtime > began_s, "the next checkpoint")

    def events(self, since: datetime) -> list[dict[str, Any]]:
        """Return the leader's events from a time on."""
        return [event for event in self.running.events("learner-0", *EVENTS) if event["time"] >= since]

    def restored(self, since: datetime) -> None:
        """Wait until a generation has begun from a checkpoint since."""
        self.running.until(lambda: any(event["event"] == LAST for event in self.events(since)), "a new generation")

    def lose(self) -> datetime:
        """Kill the last process, and hold the one that is begun in its place; return when."""
        killed, at = self.running.pid(self.last), datetime.now(UTC)
        self.running.signal(signal.SIGKILL, self.last)
        self.running.until(lambda: self.running.pid(self.last) not in (0, killed), "a process in the killed one's place")
        self.running.signal(signal.SIGSTOP, self.last)
        return at

    def let_go(self) -> datetime:
        """Let the process go that was held; return when it knocks."""
        at = datetime.now(UTC)
        self.running.signal(signal.SIGCONT, self.last)
        self.restored(at)
        knocked: datetime = self.events(at)[0]["time"]
        return knocked

    def report(self, what: str, since: datetime) -> None:
        """Print the leader's events, in seconds from the first."""
        said = [f"{event['event']} {(event['time'] - since).total_seconds():.1f}" for event in self.events(since)]
        print(f"{what}: {', '.join(said)}", flush=True)


def elastic(*, processes: Sequence[int] = (2, 3)) -> None:
    """Measure how long a learner of several processes takes to go on without one that is lost, and to take it back.

    Its last process is killed and held back, the others go on, and it is let go again. The seconds are by the leader's log:
    from the kill, or from when the lost process knocks, to each event of the new generation, of which `checkpoint_restored` is
    the last before its first step. Programs come from a cache of their own: the same was done once before.
    """
    for count in processes:
        with folder() as place:
            own = {"DILOCO_CACHE_DIR": str(place / "cache"), "DILOCO_CHECKPOINT_S": "2"}
            options, tokens = options_for(count, count, count - 1), 10**6 * SMALL_TOKENS
            for name in ("first", "second"):
                with up(
                    place / name, *options, tokens=tokens, sets=SMALL, environment=own, patience_s=ELASTIC_PATIENCE_S
                ) as running:
                    learner = Lost(running, count)
                    learner.trained()
                    lost = learner.lose()
                    learner.restored(lost)
                    learner.trained()
                    if name == "second":
                        learner.report(f"{count} to {count - 1}, from the kill", lost)
                    knocked = learner.let_go()
                    if name == "second":
                        learner.report(f"{count - 1} to {count}, from when it knocks", knocked)


# ---- kills

ENDED = ("is gone", "begins again", "a collective operation failed", "did not hear it")  # how others end with a killed process
SETS = {
    "task.name": "harness.asleep:make_paired", "task.layers": 4, "task.width": 64, "task.batch": 6, "fragments.count": 4,
    "round.steps": 8, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2, "log.keyframe_factor": 1000,
}  # fmt: skip
UNOPTIMISED = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
BEFORE_S = 30.0  # in which the pace without kills is taken
LAST_STEPS = 200  # of both learners, after the last kill
KILLS_PATIENCE_S = 900.0
PACE_TARGET, AGAIN_TARGET_S, LOST_TARGET = 0.99, 5.0, 2


class Drill:
    """Kills in a run that goes on, and what its heartbeats tell of them."""

    def __init__(self, running: Up, watch: Watch, chance: random.Random, services: Sequence[str]) -> None:
        self.running, self.watch, self.chance, self.services = running, watch, chance, services

    def both_step(self) -> bool:
        """Whether both learners step, and have applied versions of all fragments."""
        heard = self.watch.learners()
        return len(heard) == 2 and all(beat.state == "stepping" and min(beat.versions) > 0 for beat in heard)

    async def steps(self, learner: str, count: int) -> None:
        """Wait for so many further steps of a learner."""
        wanted = self.watch.last(learner).step + count
        await self.running.reach(lambda: self.watch.last(learner).step >= wanted, f"{learner} takes step {wanted}")

    async def kill(self) -> Result:
        """Kill a process, wait until the learner steps in another generation, and return what that cost."""
        alive = [service for service in self.services if psutil.pid_exists(self.running.pid(service) or -1)]
        service = self.chance.choice(alive)
        before, members = self.watch.last(ISLAND), self._generation()
        killed_s = time.time()
        self.running.signal(signal.SIGKILL, service)
        led = bool(members) and members[0] == self.services.index(service)
        found = {"service": service, "led": led, "processes": len(members)}
        if self.services.index(service) not in members:
            return found | {"missed": False}
        new_steps = self._new_steps
        await self.running.reach(lambda: new_steps(before.incarnation), f"a generation without the killed {service} steps")
        stepped_s, begun = new_steps(before.incarnation)[0]
        known = [beat.step for _, beat in self.watch.heartbeats[ISLAND] if beat.incarnation <= before.incarnation]
        return found | {"missed": True, "again_s": stepped_s - killed_s, "lost_steps": max(0, max(known) - begun)}

    def _new_steps(self, incarnation: int) -> list[tuple[float, int]]:
        """Return when a step ended in a generation after this one, and with how many steps that generation had begun."""
        begun: dict[int, int] = {}
        found = []
        for at_s, heartbeat in self.watch.heartbeats[ISLAND]:
            if heartbeat.incarnation > incarnation and heartbeat.state == "stepping":  # before, its state is not loaded
                first = begun.setdefault(heartbeat.incarnation, heartbeat.step)
                if heartbeat.step > first:
                    found.append((at_s, first))
        return found

    def _generation(self) -> list[int]:
        """Return the indexes of the newest generation's processes, the leader first."""
        met = [event for service in self.services for event in self.running.events(service, "processes_met")]
        return max(met, key=lambda event: event["generation"])["members"] if met else []


async def drill(directory: Path, kills: int, processes: int, seed: int, pause_s: float, step_s: float) -> Result:
    """Train, kill, and have the run end; return what the kills cost."""
    own = asleep(step_s) | UNOPTIMISED | {"DILOCO_CHECKPOINT_S": "1", "DILOCO_CACHE_DIR": str(directory.parent / "cache")}
    options = options_for(processes, processes, processes - 1)
    with up(directory, *options, tokens=ENDLESS, sets=SETS, environment=own, patience_s=KILLS_PATIENCE_S) as running:
        watch = await watching(running)
        drills = Drill(running, watch, random.Random(seed), services_of(processes))
        await running.reach(lambda: ISLAND in watch.heartbeats, "the learner's first heartbeat")
        other = running.add_learner(PLAIN, ISLAND, service_environment() | own)
        try:
            await running.reach(drills.both_step, "both learners step")
            began_s = time.time()
            await asyncio.sleep(BEFORE_S)
            before, began_s, load, results = watch.pace(PLAIN, began_s), time.time(), os.getloadavg()[0], list[Result]()
            for number in range(kills):
                await asyncio.sleep(drills.chance.uniform(0, pause_s))
                results.append({"kill": number} | await drills.kill())
                say(line_of(results[-1]))
            during = watch.pace(PLAIN, began_s)
            await drills.steps(ISLAND, LAST_STEPS)
            await asyncio.to_thread(running.finish, watch.tokens, LAST_STEPS * ASLEEP_TOKENS)
            await asyncio.to_thread(other.wait)
        finally:
            other.terminate()
            other.wait()
        codes = {"up": running.process.returncode, PLAIN: other.returncode}
        await watch.link.close()
    return {"kills": results, "codes": codes, "pace": during / before, "load": [load, os.getloadavg()[0]]}


def line_of(kill: Mapping[str, Any]) -> str:
    """Return a kill as a line of text."""
    about = f"{kill['kill']:3}: {kill['service']}{', which led,' if kill['led'] else ''} of {kill['processes']} processes"
    if not kill["missed"]:
        return f"{about} was waiting to be taken back"
    return f"{about}: stepping again after {kill['again_s']:.1f} s, {kill['lost_steps']} steps lost"


def checked(directory: Path, processes: int) -> Result:
    """Return what a run's report, logs and tapes say of its accounts, and whether all of them hold."""
    report = json.loads((directory / "report.json").read_text())["learners"]
    tokens = {
        name: [learner[key] for key in ("tokens_processed", "tokens_merged", "tokens_lost")] for name, learner in report.items()
    }
    said, errors = dict[str, Result](), list[str]()
    for command in (("verify", str(directory)), ("replay", str(directory), "--learners")):
        try:
            said[command[0]] = asked(*command, environment=asleep(0) | UNOPTIMISED)  # as the learners were compiled
        except SystemExit as error:
            errors.append(str(error))
    holds, lives = bool(said.get("verify", {}).get("holds")), said.get("replay", {}).get("learners", [])
    ends = [event for service in services_of(processes) for event in events(directory, service, "island_ended")]
    wrong = [event["reason"] for event in ends if not any(words in event["reason"] for words in ENDED)]
    wrong += [f"{life['learner']}: {life['wrong']}{life['unchecked']}" for life in lives if life["wrong"] or life["unchecked"]]
    balanced = all(abs(processed - merged - lost) <= 2 for processed, merged, lost in tokens.values())  # each is rounded
    return {
        "tokens": tokens, "verified": holds, "lives": len(lives), "offers": sum(life["offers"] for life in lives),
        "wrong": wrong, "holds": balanced and holds and not wrong and not errors, "errors": errors,
    }  # fmt: skip


def kills(
    *,
    kills: int = 50,
    processes: int = 3,
    seed: int = 0,
    pause_s: Annotated[float, "most seconds from stepping again to the next kill"] = 12.0,
    step_s: Annotated[float, "a step sleeps so long"] = 0.1,
    keep: Keep = None,
) -> Result:
    """Kill random processes of a learner of several, again and again, beside a learner of one process.

    ``diloco up`` begins a learner of three processes, of which two go on without the third (``processes.least``); each of them
    may lead. Its steps sleep (``harness/asleep.py``), as those of a learner whose accelerators do the work. Each kill (SIGKILL)
    is at a random moment, of a process chosen at random, so also while one that was lost before comes back. Then the token
    budget is set so that the run ends.

    ``stepping again``: from the kill to the end of the next generation's first step, by heartbeats, where the killed process
    was one of the generation; a process that only waits to be taken back is not missed. ``steps lost``: those that heartbeats
    reported and that the next generation begins without. ``pace``: steps a second of the other learner during all the kills,
    over those before.

    Exit code 1 unless both learners' tokens are merged or lost (nothing is held at the end), ``diloco verify`` holds (no batch
    is merged twice), no process took another course than its leader (by the hash that they compare at each boundary, all have
    applied each version after the same step), and ``diloco replay --learners`` makes all lives again, bit for bit.
    """
    with folder(keep) as place:
        directory = place / "run"
        result = asyncio.run(drill(directory, kills, processes, seed, pause_s, step_s))
        checks = checked(directory, processes)
    passed = checks["holds"] and not any(result["codes"].values())
    return {"machine": machine(), "directory": str(directory), **result, "checks": checks, "passed": passed}


def show_kills(result: Result) -> None:
    """Print what the lines of the kills do not say."""
    missed = [kill for kill in result["kills"] if kill["missed"]]
    again, lost = [kill["again_s"] for kill in missed] or [0.0], [kill["lost_steps"] for kill in missed] or [0]
    checks, whom = result["checks"], Counter(kill["service"] for kill in result["kills"])
    print(f"{len(result['kills'])} kills ({dict(whom)}), {len(missed)} of processes of the generation")
    print(
        f"stepping again: median {statistics.median(again):.1f} s, worst {max(again):.1f} s (target {AGAIN_TARGET_S:g} s from "
        f"when it is noticed); steps lost: median {statistics.median(lost):g}, worst {max(lost)}, in all {sum(lost)} "
        f"(target {LOST_TARGET})"
    )
    for led in (False, True):
        its = [kill for kill in missed if kill["led"] == led]
        if its:
            took = [kill["again_s"] for kill in its]
            print(
                f"  {'the leader' if led else 'others'}, {len(its)} times: median {statistics.median(took):.1f} s, worst "
                f"{max(took):.1f} s, steps lost at most {max(kill['lost_steps'] for kill in its)}"
            )
    print(f"pace of the other learner: {result['pace']:.4f} of that before (target {PACE_TARGET:g}); load {result['load']}")
    for name, (processed, merged, lost_tokens) in checks["tokens"].items():
        print(f"  {name}: {processed} tokens = {merged} merged and {lost_tokens} lost")
    print(f"verify {checks['verified']}; {checks['lives']} lives and {checks['offers']} offers made again; {result['codes']}")
    print("\n".join([*checks["wrong"], *checks["errors"]]) or "nothing differs")


SCRIPT = Script(__doc__, Bench(rounds), Bench(elastic), Bench(kills, show_kills))

if __name__ == "__main__":
    SCRIPT.run()
