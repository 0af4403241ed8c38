"""Kills of random processes of a learner of several, again and again, beside a learner of one process.

    python bench/kills.py                       # 50 kills, each some seconds after the learner steps again
    python bench/kills.py --kills 5 --seed 7 --json
    python bench/kills.py --processes 2

``diloco up`` begins a learner of three processes, of which two go on without the third (``processes.least``); each of them
may lead. Its steps sleep (``bench/island.py``), as those of a learner whose accelerators do the work. Each kill (SIGKILL) is at
a random moment, of a process chosen at random, so also while one that was lost before comes back. Then the token budget is set
so that the run ends.

``stepping again``: from the kill to the end of the next generation's first step, by heartbeats, where the killed process was
one of the generation; a process that only waits to be taken back is not missed. ``steps lost``: those that heartbeats
told of and that the next generation begins without. ``pace``: steps a second of the other learner during all the kills, over
those before.

Exit code 1 unless both learners' tokens are merged or lost (nothing is held at the end), ``diloco verify`` holds (no batch is
merged twice), no process took another course than its leader (by the hash that they compare at each boundary, all have
applied each version after the same step), and ``diloco replay --learners`` makes all lives again, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import script
import tomli_w
from restart import Watch
from up import Up, events, up, watching

from diloco.wire.control import Heartbeat
from diloco_ops.up.environment import service_environment

ISLAND, PLAIN = "learner-0", "plain"
LOST = ("is gone", "begins again", "a collective failed", "did not hear this process")  # how others end with a killed process
SETS = {
    "task.name": "island:make_paired", "task.layers": 4, "task.width": 64, "task.batch": 6, "fragments.count": 4,
    "round.steps": 8, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2, "log.keyframe_factor": 1000,
}  # fmt: skip
TOKENS = 1024  # of a step of bench/island.py
BEFORE_S = 30.0  # in which the pace without kills is taken
LAST_STEPS = 200  # of both learners, after the last kill
PATIENCE_S = 900.0  # only ends what hangs
PACE_TARGET, AGAIN_TARGET_S, LOST_TARGET = 0.99, 5.0, 2


@contextmanager
def plain(running: Up, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a learner of one process beside those of ``diloco up``."""
    own = tomllib.loads((running.directory / "services" / f"{ISLAND}.toml").read_text())
    config = running.directory / f"{PLAIN}.toml"
    config.write_text(tomli_w.dumps({name: own[name] for name in ("nats_url", "run", "state_dir")} | {"name": PLAIN}))
    command = [sys.executable, "-m", "diloco_learner", "--config", str(config)]
    process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


class Drill:
    """Kills in a run that goes on, and what its heartbeats tell of them."""

    def __init__(self, running: Up, watch: Watch, chance: random.Random, services: Sequence[str]) -> None:
        self.running, self.watch, self.chance, self.services = running, watch, chance, services

    async def until(self, reached: Callable[[], object], what: str) -> None:
        """Wait until something is so."""
        ends_s = time.monotonic() + PATIENCE_S
        while not reached():
            if self.running.process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"bench/kills.py: the run ended, or not within {PATIENCE_S:g} s: {what}")
            await asyncio.sleep(0.01)

    def both_step(self) -> bool:
        """Whether both learners step, and have applied versions of all fragments."""
        heard = [self.watch.heartbeats[name][-1][1] for name in (ISLAND, PLAIN) if name in self.watch.heartbeats]
        return len(heard) == 2 and all(beat.state == "stepping" and min(beat.versions) > 0 for beat in heard)

    async def steps(self, learner: str, count: int) -> None:
        """Wait for so many further steps of a learner."""
        wanted = self._last(learner).step + count
        await self.until(lambda: self._last(learner).step >= wanted, f"{learner} takes step {wanted}")

    async def pace(self, since_s: float) -> float:
        """Return the other learner's steps a second since then."""
        ends: dict[int, float] = {}
        for at_s, heartbeat in self.watch.heartbeats[PLAIN]:
            if at_s >= since_s:
                ends.setdefault(heartbeat.step, at_s)
        return (max(ends) - min(ends)) / (ends[max(ends)] - ends[min(ends)])

    async def kill(self) -> dict[str, Any]:
        """Kill a process, wait until the learner steps in another generation, and return what that cost."""
        alive = [service for service in self.services if self._lives(service)]
        service = self.chance.choice(alive)
        before, members = self._last(ISLAND), self._generation()
        killed_s = time.time()
        os.kill(self.running.pid(service), signal.SIGKILL)
        led = bool(members) and members[0] == self.services.index(service)
        found = {"service": service, "led": led, "processes": len(members)}
        if self.services.index(service) not in members:
            return found | {"missed": False}
        await self.until(lambda: self._new_steps(before.incarnation), f"a generation without the killed {service} steps")
        stepped_s, begun = self._new_steps(before.incarnation)[0]
        known = [beat.step for _, beat in self.watch.heartbeats[ISLAND] if beat.incarnation <= before.incarnation]
        return found | {"missed": True, "again_s": stepped_s - killed_s, "lost_steps": max(0, max(known) - begun)}

    async def end(self) -> None:
        """Have the run end when both learners have taken some steps more, and wait until it has."""

        def used() -> int:
            return sum(self._last(learner).tokens for learner in (ISLAND, PLAIN))

        await asyncio.to_thread(self.running.finish, used, LAST_STEPS * TOKENS)

    def _last(self, learner: str) -> Heartbeat:
        return self.watch.heartbeats[learner][-1][1]

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

    def _lives(self, service: str) -> bool:
        try:
            os.kill(self.running.pid(service), 0)
        except (OSError, ValueError):  # it has ended, or its file is being written
            return False
        return True


async def drill(directory: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Train, kill, and have the run end; return what the kills cost."""
    own = {"PYTHONPATH": str(Path(__file__).parent), "BENCH_STEP_S": str(asked.step_s), "DILOCO_CHECKPOINT_S": "1"}
    own |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "DILOCO_CACHE_DIR": str(directory.parent / "cache")}
    options = [
        "--learners",
        "1",
        "--shards",
        "1",
        "--tokens",
        str(10**9 * TOKENS),
        "--least-processes",
        str(asked.processes - 1),
    ]
    options += ["--processes-per-learner", str(asked.processes), "--devices-per-learner", str(asked.processes)]
    with up(directory, options, SETS, own) as running:
        watch = await watching(running)
        drills = Drill(running, watch, random.Random(asked.seed), services_of(asked.processes))
        await drills.until(lambda: ISLAND in watch.heartbeats, "the learner's first heartbeat")
        with plain(running, service_environment() | own) as other:
            await drills.until(drills.both_step, "both learners step")
            began_s = time.time()
            await asyncio.sleep(BEFORE_S)
            before, began_s, load, results = await drills.pace(began_s), time.time(), os.getloadavg()[0], list[dict[str, Any]]()
            for number in range(asked.kills):
                await asyncio.sleep(drills.chance.uniform(0, asked.pause_s))
                results.append({"kill": number} | await drills.kill())
                if not asked.json:
                    print(line_of(results[-1]), flush=True)
            during = await drills.pace(began_s)
            await drills.steps(ISLAND, LAST_STEPS)
            await drills.end()
            await asyncio.to_thread(other.wait)
            codes = {"up": running.process.returncode, PLAIN: other.returncode}
        await watch.link.close()
    return {"kills": results, "codes": codes, "pace": during / before, "load": [load, os.getloadavg()[0]]}


def line_of(kill: Mapping[str, Any]) -> str:
    """Return a kill as a line of text."""
    about = f"{kill['kill']:3}: {kill['service']}{', which led,' if kill['led'] else ''} of {kill['processes']} processes"
    if not kill["missed"]:
        return f"{about} was waiting to be taken back"
    return f"{about}: stepping again after {kill['again_s']:.1f} s, {kill['lost_steps']} steps lost"


def services_of(processes: int) -> list[str]:
    """Return the names under which ``diloco up`` begins a learner's processes, by index."""
    return [ISLAND, *(f"{ISLAND}-p{index}" for index in range(1, processes))]


def checked(directory: Path, processes: int) -> dict[str, Any]:
    """Return what a run's report, logs and tapes say of its accounts, and whether all of them hold."""
    report = json.loads((directory / "report.json").read_text())["learners"]
    tokens = {
        name: [learner[key] for key in ("tokens_processed", "tokens_merged", "tokens_lost")] for name, learner in report.items()
    }
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "BENCH_STEP_S": "0"}
    environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # as the learners were compiled

    def ran(*command: str) -> dict[str, Any]:
        done = subprocess.run(
            [*script.DILOCO, *command, "--json"], capture_output=True, text=True, env=environment, check=False
        )
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return {"holds": False, "error": done.stdout + done.stderr}
        return found

    verified = ran("verify", str(directory))
    replayed = ran("replay", str(directory), "--learners")
    lives = replayed.get("learners", [])
    ends = [event for service in services_of(processes) for event in events(directory, service, "island_ended")]
    wrong = [event["reason"] for event in ends if not any(words in event["reason"] for words in LOST)]
    wrong += [f"{life['learner']}: {life['wrong']}{life['unchecked']}" for life in lives if life["wrong"] or life["unchecked"]]
    balanced = all(abs(processed - merged - lost) <= 2 for processed, merged, lost in tokens.values())  # each is rounded
    return {
        "tokens": tokens, "verified": verified["holds"], "lives": len(lives), "offers": sum(life["offers"] for life in lives),
        "wrong": wrong, "holds": balanced and bool(verified["holds"]) and not wrong and "error" not in replayed,
        "errors": [found["error"] for found in (verified, replayed) if "error" in found],
    }  # fmt: skip


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Do the drill, and check the run that it has left."""
    with script.folder(asked.folder) as folder:
        directory = folder / "run"
        result = asyncio.run(drill(directory, asked)) | {"checks": checked(directory, asked.processes)}
        return {"machine": script.machine(), "directory": str(directory)} | result


def show(result: dict[str, Any]) -> None:
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


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=12.0, help="most seconds from stepping again to the next kill")
    parser.add_argument("--step-s", type=float, default=0.1, help="a step sleeps so long")
    parser.add_argument("--folder", type=Path, help="the run's directory is made here and stays; by default it is temporary")
    arguments = parser.parse_args()
    result = measure(arguments)
    script.print_result(result, arguments, show)
    if not result["checks"]["holds"] or any(result["codes"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
