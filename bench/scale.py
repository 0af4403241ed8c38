"""Costs of a run in each of its processes, by the number of learners: per version while they train, per second at rest.

    python bench/scale.py rounds --learners 1 4 16 64 --due-s 0.5 1 2
    python bench/scale.py rest --learners 4 16 32 64
    python bench/scale.py times --learners 4 32

Learners have no framework, and their steps are asleep: processor time is the protocol's. Everything is on one machine, so
the processors' time is counted, not the clock's. Where the run's processes take more than four fifths of it, fragments are due
half as often.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import psutil
from harness.console import Bench, Result, Script, say
from harness.crowd import Crowd, Figures, crowd, difference, of_kind, wait_until
from harness.host import MB, machine
from harness.live_run import DILOCO, ENDLESS, events
from harness.parties import RUN

from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings

KINDS = ("syncer", "server", "coordinator", "learner")
BUSY = 0.8
SETTLE_S = 50.0  # syncers tell learners who is alive once they have listened for a lease
LEAST_CYCLES = 2  # of all fragments, that are measured
Learners = Annotated[Sequence[int], "numbers of learners"]
Parameters = Annotated[int, "of the model"]


def settings_of(learners: int, syncers: int, fragments: int, steps: int) -> RunSettings:
    """Return the settings of a run in which each fragment is due every so many steps."""
    given: dict[str, Any] = {
        "learners": learners, "shards": syncers, "tokens": ENDLESS, "fragments.count": fragments, "round.steps": steps,
    }  # fmt: skip
    return run_settings("decoupled", given)


def window(run: Crowd, window_s: float, least_versions: int = 0) -> tuple[Figures, Figures]:
    """Return the figures of two moments that are so far apart, and further until there are so many new versions."""
    before = run.figures()
    time.sleep(window_s)
    after = run.figures()
    while after.versions - before.versions < least_versions:
        time.sleep(window_s / 4)
        after = run.figures()
    return before, after


def taken(before: Figures, after: Figures) -> dict[str, Any]:
    """Return what each kind of process has taken between two moments: processor seconds, messages and bytes heard."""
    cpu = difference(after.cpu_s, before.cpu_s)
    heard, sizes = difference(after.messages, before.messages), difference(after.bytes, before.bytes)
    return {
        "took_s": after.at_s - before.at_s,
        "busy": sum(cpu.values()) / (after.at_s - before.at_s) / (psutil.cpu_count() or 1),
        "versions": after.versions - before.versions,
        "step_cpu_s": (after.step_cpu_s - before.step_cpu_s) / max(1, after.steps - before.steps),
        "cpu_s": {kind: sum(of_kind(cpu, kind)) for kind in KINDS if kind != "learner"}
        | {"learner": statistics.fmean(of_kind(cpu, "learner"))},
        "messages": statistics.fmean(of_kind(heard, "learner")),
        "bytes": statistics.fmean(of_kind(sizes, "learner")),
    }


# ---- rounds


def rounds(
    *,
    learners: Learners = (1, 4, 16, 32, 64),
    due_s: Annotated[Sequence[float], "a fragment is due each so many seconds"] = (0.5, 1.0, 2.0),
    syncers: Annotated[Sequence[int], "numbers of syncers"] = (1,),
    parameters: Parameters = 200_000,
    fragments: int = 8,
    step_s: Annotated[float, "of a step, asleep"] = 0.1,
    window_s: Annotated[float, "that is measured, at least"] = 20.0,
) -> Result:
    """Measure what a version of a fragment costs: of the syncers and the server also for each learner."""
    rows = []
    for count in learners:
        for shards in syncers:
            for due in due_s:
                rows.append(_rounds(count, shards, parameters, fragments, step_s, due, window_s))
                say(_round_line(rows[-1]))
    return {"machine": machine(), "parameters": parameters, "fragments": fragments, "step_s": step_s, "rows": rows}


def _rounds(
    learners: int, syncers: int, parameters: int, fragments: int, step_s: float, due_s: float, window_s: float
) -> Result:
    settings = settings_of(learners, syncers, fragments, max(fragments, round(due_s * fragments / step_s)))
    with crowd(settings, learners=learners, parameters=parameters, step_s=step_s) as run:
        window(run, max(SETTLE_S, due_s * fragments))  # until all fragments are in turn
        found = taken(*window(run, max(window_s, LEAST_CYCLES * due_s * fragments), LEAST_CYCLES * fragments))
        memory = run.memory_bytes()
        joined_s = max(run.joined_s)
    if found["busy"] > BUSY and due_s < 60:
        return _rounds(learners, syncers, parameters, fragments, step_s, 2 * due_s, window_s)
    versions, cpu = found["versions"], found["cpu_s"]
    return {
        "learners": learners,
        "syncers": syncers,
        "due_s": due_s,
        "busy": found["busy"],
        "versions": versions,
        "joined_s": joined_s,
        # milliseconds for each version; of the services, also for each learner
        "syncer_ms": 1e3 * cpu["syncer"] / versions / learners,
        "server_ms": 1e3 * cpu["server"] / versions / learners,
        "coordinator_ms": 1e3 * cpu["coordinator"] / versions / learners,
        "learner_ms": 1e3 * cpu["learner"] / versions,
        "step_ms": 1e3 * found["step_cpu_s"],
        "messages": found["messages"] / versions,
        "bytes": found["bytes"] / versions,
        "memory_bytes": {kind: statistics.median(of_kind(memory, kind)) for kind in KINDS},
    }


ROUND_HEAD = (
    "learners  syncers  due    busy   syncer   server   coordinator  learner  run.step  heard: messages  kB      joined   "
    "memory MB: syncer server coordinator learner"
)


def _round_line(row: Result) -> str:
    memory = " ".join(f"{row['memory_bytes'][kind] / MB:6.0f}" for kind in KINDS)
    return (
        f"{row['learners']:8}  {row['syncers']:7}  {row['due_s']:3g} s  {row['busy']:4.0%}  {row['syncer_ms']:5.1f} ms "
        f"{row['server_ms']:5.1f} ms  {row['coordinator_ms']:8.1f} ms {row['learner_ms']:6.1f} ms {row['step_ms']:6.2f} ms "
        f"{row['messages']:15.1f} {row['bytes'] / 1e3:8.1f} {row['joined_s']:7.1f} s  {memory}"
    )


def show_rounds(result: Result) -> None:
    print(
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores. {result['parameters'] / 1e6:g}M parameters, "
        f"{result['fragments']} fragments, steps of {result['step_s']:g} s. Of a version: syncers, server and coordinator for "
        f"each learner, and a learner.\n{ROUND_HEAD}"
    )
    print(*map(_round_line, result["rows"]), sep="\n")


# ---- rest


def rest(
    *,
    learners: Learners = (4, 16, 32, 64),
    syncers: int = 1,
    parameters: Parameters = 200_000,
    window_s: Annotated[float, "that is measured"] = 30.0,
) -> Result:
    """Measure what learners that have joined cost in a second without steps."""
    rows = []
    for count in learners:
        rows.append(_rest(count, syncers, parameters, window_s))
        say(_rest_line(rows[-1]))
    return {"machine": machine(), "rows": rows}


def _rest(learners: int, syncers: int, parameters: int, window_s: float) -> Result:
    with crowd(settings_of(learners, syncers, 8, 40), learners=learners, parameters=parameters, step_s=0) as run:
        window(run, SETTLE_S)
        found = taken(*window(run, window_s))
    took_s = found["took_s"]
    cpu = {f"{kind}_ms": 1e3 * used_s / took_s for kind, used_s in found["cpu_s"].items()}
    return {"learners": learners, **cpu, "messages": found["messages"] / took_s, "bytes": found["bytes"] / took_s}


def _rest_line(row: Result) -> str:
    cpu = "  ".join(f"{row[f'{kind}_ms']:8.1f} ms" for kind in KINDS)
    return f"{row['learners']:8}  {cpu}  {row['messages']:10.1f}  {row['bytes'] / 1e3:8.2f} kB"


def show_rest(result: Result) -> None:
    print("learners       syncer       server  coordinator  each learner  it hears: messages and kB, each in a second")
    print(*map(_rest_line, result["rows"]), sep="\n")


# ---- times


def times(*, learners: Learners = (4, 32), parameters: Parameters = 200_000, step_s: float = 0.25) -> Result:
    """Measure how long it takes to join at once, to take over from a syncer, to verify, and to open the page."""
    rows = []
    for count in learners:
        with crowd(settings_of(count, 2, 8, 32), learners=count, parameters=parameters, step_s=step_s) as run:
            rows.append({"learners": count, "joined_s": max(run.joined_s)} | _times(run))
        say(_times_line(rows[-1]))
    return {"machine": machine(), "rows": rows}


def _times(run: Crowd) -> Result:
    window(run, 5.0, least_versions=16)
    opened_s = min(run.opened_s() for _ in range(3))
    owned, before = _taken(run, "syncer-0"), _taken(run, "syncer-1")
    run.services["syncer-0"].kill()
    to_come = Counter(owned) + Counter(before)
    taken_over_s = wait_until(lambda: Counter(_taken(run, "syncer-1")) >= to_come, "the other syncer takes over")
    seen = str(run.folder / "seen")
    subprocess.run([*DILOCO, "attach", seen, "--run", RUN, "--nats", run.server.url], check=True, capture_output=True)
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run([*DILOCO, "verify", seen, "--json"], check=True, capture_output=True).stdout
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(said)
    return {
        "opened_s": opened_s,
        "taken_over_s": taken_over_s,
        "verify_cpu_s": ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime,
        "versions": found["versions"],
    }


def _taken(run: Crowd, syncer: str) -> list[int]:
    """Return a fragment for each time that a syncer has taken it over."""
    return [event["fragment"] for event in events(run.folder / syncer, syncer, "taken_over")]


def _times_line(row: Result) -> str:
    return (
        f"{row['learners']:8}  {row['joined_s']:8.1f} s  {row['taken_over_s']:9.1f} s  {row['opened_s']:10.3f} s  "
        f"{row['verify_cpu_s']:8.2f} s of CPU for {row['versions']} versions"
    )


def show_times(result: Result) -> None:
    print("learners  all joined  taken over  page opened  verify")
    print(*map(_times_line, result["rows"]), sep="\n")


SCRIPT = Script(__doc__, Bench(rounds, show_rounds), Bench(rest, show_rest), Bench(times, show_times))

if __name__ == "__main__":
    SCRIPT.run()
