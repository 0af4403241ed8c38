"""The whole way of a model's delta: from a learner's last step before all rounds are due, to all versions applied.

    python bench/whole_way.py                       # 100M parameters, 24 fragments, one learner, int4 both ways
    python bench/whole_way.py --parameters 1000000 --repeat 1 --json

Every fragment goes once through snapshot, encode, publish, store, deliver, decode, merge, encode, append, deliver, decode,
fold and apply; learner, syncer and nats-server are processes of their own on this machine. All 24 rounds are due at once,
which no run does: there they are spread over the steps between two rounds. Founding the run (a keyframe of 12 bytes a
parameter) comes before it, and is told but not counted.

By stage: ``busy_s`` is CPU time summed over its calls, ``wall_s`` the same of wall-clock time (waiting for a core counts),
``first_s`` and ``last_s`` when, from the last step's end, the first call began and the last ended.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import script
from parties import Event, cpu_s, running

from diloco.settings.presets import run_settings

TARGET_S = 2.0


def measure(parameters: int, fragments: int, repeat: int) -> dict[str, Any]:
    """Run it ``repeat`` times in one run of its own."""
    settings = run_settings(
        "decoupled",
        {"fragments.count": fragments, "learners": 1, "shards": 1, "round.steps": 1, "tokens": 10**12, "liveness.dead_s": 600},
    )
    rounds: list[dict[str, Any]] = []
    with running(settings, parameters, trace=True) as parties:
        (learner,) = parties.learners
        syncer, server = parties.syncer, parties.server
        learner.hear()
        founded_s = float(learner.ask("join"))
        served = syncer.ask("fragments")
        while served < fragments:
            time.sleep(0.2)
            served = syncer.ask("fragments")
        time.sleep(2 * settings.liveness.heartbeat_s)  # the syncer has heard the learner, and reads the offers' stream
        names = ("learner", "syncer", "nats-server")
        for _ in range(repeat):
            before = learner.cpu_s(), syncer.cpu_s(), cpu_s(server.pid)
            _, out_before, in_before = learner.ask("events")
            began_s, ended_s, stepped_cpu_s = learner.ask("round")
            after = learner.cpu_s() - stepped_cpu_s, syncer.cpu_s(), cpu_s(server.pid)
            events, out_after, in_after = learner.ask("events")
            stages = {"learner": by_stage(events, began_s)} | {"syncer": by_stage(syncer.ask("events")[0], began_s)}
            used = dict(zip(names, (b - a for a, b in zip(before, after, strict=True)), strict=True))
            for name, known in stages.items():
                known["event loop and rest"] = {"busy_s": used[name] - sum(stage["busy_s"] for stage in known.values())}
            rounds.append(
                {
                    "wall_s": ended_s - began_s,
                    "cpu_s": used,
                    "bytes_up": out_after - out_before,
                    "bytes_down": in_after - in_before,
                    "stages": stages,
                }
            )
    best = min(rounds, key=lambda result: float(result["wall_s"]))
    return {
        "parameters": parameters,
        "fragments": fragments,
        "founded_s": founded_s,
        "wall_s": best["wall_s"],
        "wall_median_s": statistics.median(result["wall_s"] for result in rounds),
        "target_s": TARGET_S * parameters / 1e8,
        "bytes_per_parameter": (best["bytes_up"] + best["bytes_down"]) / parameters,
        "best": best,
        "all_wall_s": [result["wall_s"] for result in rounds],
    }


def by_stage(events: list[Event], began_s: float) -> dict[str, dict[str, float]]:
    """Return sums of events that began after ``began_s``."""
    stages: dict[str, dict[str, float]] = {}
    for event in events:
        if event.began_s < began_s:
            continue
        stage = stages.setdefault(
            event.stage, {"calls": 0, "busy_s": 0.0, "wall_s": 0.0, "first_s": event.began_s - began_s, "last_s": 0.0}
        )
        stage["calls"] += 1
        stage["busy_s"] += event.cpu_s
        stage["wall_s"] += event.wall_s
        stage["first_s"] = min(stage["first_s"], event.began_s - began_s)
        stage["last_s"] = max(stage["last_s"], event.ended_s - began_s)
    return stages


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    best = result["best"]
    print(f"{result['parameters']:,} parameters in {result['fragments']} fragments; founding took {result['founded_s']:.1f} s")
    print(
        f"whole way: {result['wall_s']:.2f} s (best of {len(result['all_wall_s'])}, median {result['wall_median_s']:.2f} s); "
        f"target {result['target_s']:.2f} s"
    )
    print(
        f"bytes: {best['bytes_up']:,} up, {best['bytes_down']:,} down, both ways "
        f"{result['bytes_per_parameter']:.3f} a parameter"
    )
    print("CPU time: " + ", ".join(f"{name} {value:.2f} s" for name, value in best["cpu_s"].items()))
    print(f"{'':28}{'calls':>6}{'busy_s':>9}{'wall_s':>9}{'first_s':>9}{'last_s':>9}")
    for process, stages in best["stages"].items():
        print(process)
        for name, stage in stages.items():
            cells = f"{stage['busy_s']:9.3f}"
            if "calls" in stage:
                cells = f"{stage['calls']:6}{cells}{stage['wall_s']:9.3f}{stage['first_s']:9.3f}{stage['last_s']:9.3f}"
            print(f"  {name:26}{cells if 'calls' in stage else ' ' * 6 + cells}")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    result = measure(arguments.parameters, arguments.fragments, arguments.repeat)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
