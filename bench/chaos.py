"""Failures in a live run: what they cost it, whether the simulator says the same of them, and what grows meanwhile.

python bench/chaos.py drill                       # a fault every 3 s for a minute, on a small model: `make chaos`
python bench/chaos.py drill --long                # a fault every 10 s for half an hour, the default model: `make chaos-long`
python bench/chaos.py drill --long --for 180      # the same in a tenth of the time
python bench/chaos.py simulated                   # a real run and the simulator through the same failures: 80 seconds
python bench/chaos.py simulated --tape tape.jsonl # other failures
python bench/chaos.py soak                        # two hours with a kill every minute: does anything grow?
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

from harness.console import Bench, Keep, Result, Script, folder, say
from harness.host import machine
from harness.live_run import ASLEEP_TOKENS, DILOCO, ENDLESS, Up, asleep, up
from harness.soak import VICTIMS, exceeded, measure_soak, summarise

from diloco.core.learner.slots import choose
from diloco.errors import BrokerError, MessageError, RunError
from diloco.log.stream import pass_over
from diloco.process.tasks import end
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import Offer
from diloco_lab.published import validation
from diloco_lab.published.validation import RunObservations, SeenOffer, SeenVersion
from diloco_ops import failures
from diloco_ops.audit import verify
from diloco_ops.chaos.verdict import describe
from diloco_ops.failures import Failure, FailureTape
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader

POLL_S = 0.1
STARTED_S = 180.0

# ---- drill

LEARNERS = 4
PARTIES = ("--learners", str(LEARNERS), "--shards", "2", "--standbys", "2", "--coordinators", "2")
SMALL = {
    "task.layers": 1,
    "task.width": 32,
    "task.heads": 2,
    "task.context": 32,
    "task.batch": 4,
    "fragments.count": 12,
    "round.steps": 12,
}

SMALL_TOKENS = 6_000_000
SLOW_SMALL, SLOW_LONG = 80.0, 3.0  # a step takes so many times as long, so that all else has room
LOSS_MARGIN = 0.03
PROBE_S = 45.0
LEAD_IN_S = 20.0  # that tell the undisturbed pace, where the run lasts long
BEFORE_S = 60.0  # what a run does before chaos begins, and some more
BUDGET_MARGIN = 1.1  # a machine may get faster after the probe; a run that ends before chaos does is a failed measurement
SETTLED_CYCLES, WATCHED_CYCLES = 2, 4  # of the short run, after chaos: until versions are even again, and to be counted in


def running(directory: Path, tokens: int, slow: float, settings: dict[str, int]) -> contextlib.AbstractContextManager[Up]:
    """Begin a run."""
    slowed = [f"--slow=learner-{learner}={slow}" for learner in range(LEARNERS)]
    return up(directory, *PARTIES, *slowed, tokens=tokens, sets=settings, patience_s=STARTED_S)


def probe(directory: Path) -> float:
    """Return the undisturbed pace of a slowed run, in tokens a second."""
    with running(directory, ENDLESS, SLOW_LONG, {}) as run:
        run.until(lambda: run.status() and all(each["version"] >= 2 for each in run.status()["fragments"]), "two cycles")
        before = run.status()
        time.sleep(PROBE_S)
        after = run.status()
    return float((after["tokens_processed"] - before["tokens_processed"]) / (after["wall_s"] - before["wall_s"]))


def disturb(run: Up, options: list[str]) -> Result:
    """Return the verdict of chaos on a run that has just been begun."""
    folder = run.directory.parent
    run.until((run.directory / "services" / "evaluator.pid").exists, "it has started")
    command = [*DILOCO, "chaos", str(run.directory), *options, "--json", "--record", str(folder / "tape.jsonl")]
    verdict_file = folder / "verdict.json"
    with verdict_file.open("wb") as out:
        chaos = subprocess.Popen(command, stdout=out)
    while chaos.poll() is None:
        if run.process.poll():
            chaos.send_signal(signal.SIGINT)
            chaos.wait()
            raise SystemExit(f"{run.directory}: the run ended with code {run.process.returncode}: {run.said()}")
        time.sleep(POLL_S)
    if not verdict_file.stat().st_size:
        raise SystemExit(f"{run.directory}: chaos ended with code {chaos.returncode} and without a verdict")
    verdict: Result = json.loads(verdict_file.read_text())
    return verdict


def finish(run: Up) -> Result:
    """Return the report of a run at its end."""
    if run.process.wait():
        raise SystemExit(f"{run.directory}: the run ended with code {run.process.returncode}: {run.said()}")
    report: Result = json.loads((run.directory / "report.json").read_text())
    return report


def compare(disturbed: Result, undisturbed: Result) -> Result:
    """Return the results of two runs, from their reports."""
    names = ("wall_s", "tokens_budget", "tokens_processed", "tokens_merged", "versions", "val_loss")
    return {
        "disturbed": {name: disturbed[name] for name in names},
        "undisturbed": {name: undisturbed[name] for name in names},
        "difference": disturbed["val_loss"] / undisturbed["val_loss"] - 1,
    }


def measure_short(folder: Path, tokens: int | None, options: list[str]) -> Result:
    """Do chaos on a run that is ended with it."""
    with running(folder / "disturbed", tokens or SMALL_TOKENS, SLOW_SMALL, SMALL) as run:
        verdict = disturb(run, options)
        evenness = measure_evenness(run)
    passed = verdict["holds"] and evenness["most_in_a_step"] < SMALL["fragments.count"]
    return {"verdict": verdict, "evenness": evenness, "passed": passed}


def measure_evenness(run: Up) -> Result:
    """Return how evenly a run makes versions from two cycles from now on, in steps of its reference."""
    cycle_s = SMALL["round.steps"] * max(learner["step_s"] for learner in run.status()["learners"].values())
    time.sleep(SETTLED_CYCLES * cycle_s)
    before, began_s = steps_taken(run), time.time()
    time.sleep(WATCHED_CYCLES * cycle_s)
    after, ended_s = steps_taken(run), time.time()
    times_s = [(ended_s - began_s) / (after[name] - step) for name, step in sorted(before.items()) if after[name] > step]
    step_s = times_s[choose(times_s, 1)]
    made_s = asyncio.run(versions_made_s(run.directory))
    steps = int((ended_s - began_s) / step_s)
    each = Counter(int((at_s - began_s) / step_s) for at_s in made_s if at_s >= began_s)
    counts = [each[step] for step in range(steps)]
    without = max(len(row) for row in "".join(" " if count else "0" for count in counts).split(" "))
    return {
        "step_s": step_s,
        "step_times_s": times_s,
        "steps": steps,
        "versions": sum(counts),
        "most_in_a_step": max(counts),
        "steps_without": without,
    }


def steps_taken(run: Up) -> dict[str, int]:
    """Return by learner the steps that it has taken."""
    return {name: learner["step"] for name, learner in run.status()["learners"].items()}


async def versions_made_s(directory: Path) -> list[float]:
    """Return when the versions in a run's log were made, Unix time at the syncers."""
    async with run_reader.opened(directory) as seen:
        stop = max([await seen.log.reader.end_sequence(fragment.index) for fragment in seen.map.fragments])
        heads = seen.log.entries.heads(pass_over, stop_sequence=stop)
        return [head.record.committed_at_s async for head in heads if head.record.makes_version]


def measure_long(folder: Path, tokens: int | None, options: list[str], for_s: float) -> Result:
    """Do chaos on a run that goes on to its end, and run another without to compare it with."""
    say("probing the pace")
    pace = probe(folder / "probe")
    tokens = tokens or round(pace * (for_s + BEFORE_S) * BUDGET_MARGIN)
    say(f"{pace:.0f} tokens a second; chaos, on a budget of {tokens}")
    with running(folder / "disturbed", tokens, SLOW_LONG, {}) as run:
        verdict = disturb(run, [*options, "--lead-in", str(LEAD_IN_S)])
        say(f"chaos is over, the invariants {'hold' if verdict['holds'] else 'DO NOT HOLD'}; the run goes on to its end")
        reports = [finish(run)]
    checked = asyncio.run(verify.check(folder / "disturbed"))
    say("the same without chaos")
    with running(folder / "undisturbed", tokens, 1.0, {}) as run:
        reports.append(finish(run))
    loss, lasted = compare(*reports), verdict["chaos_s"] >= for_s - 1
    return {
        "verdict": verdict,
        "lasted": lasted,
        "tokens_per_s": pace,
        "verified": {check.name: f"{check.state}: {check.found}" for check in checked.checks},
        "loss": loss,
        "passed": verdict["holds"] and lasted and checked.holds and loss["difference"] <= LOSS_MARGIN,
    }


def drill(
    *,
    long: bool = False,
    for_: Annotated[float | None, "seconds of chaos"] = None,
    rate: Annotated[float | None, "faults a second"] = None,
    tokens: Annotated[int | None, "budget of the disturbed run"] = None,
    seed: int = 1,
    keep: Annotated[Path | None, "folder to keep the runs in; with --long a new one in runs/"] = None,
) -> Result:
    """Do chaos on a run of four learners, two shards with a standby each, two coordinators and NATS, all on this machine.

    ``--long`` takes about one and a half times ``--for``. A short run tells the pace, and so the budget with which the
    disturbed run lasts until chaos is over. That run then goes on to its end, and is verified once more. An undisturbed run of
    the same budget follows, and their final validation losses are compared: what chaos keeps from being merged counts against
    it. Learners of the disturbed run are slowed by sleeping, as if their accelerators were not this machine's cores: what is
    measured is what failures cost, and not how so many processes share them. The undisturbed run is not slowed, so that it ends
    sooner.

    The short run goes on for some cycles after chaos. From two cycles after it on, versions are counted in each step of the
    learner whose steps the cycle is counted in: the most of them in a step, and the most steps without one.

    ``result.json`` in the folder of the runs has all that is printed. Exit code 1 if an invariant is broken, if the run ended
    before chaos did, if its loss is more than 3 % above the undisturbed one's, or if all fragments have a version in one step.
    """
    for_ = for_ or (1800.0 if long else 60.0)
    options = ["--seed", str(seed), "--for", str(for_), "--rate", str(rate or (0.1 if long else 1 / 3))]
    with folder(keep or (Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S") if long else None)) as place:
        found = measure_long(place, tokens, options, for_) if long else measure_short(place, tokens, options)
        result = {"machine": machine()} | found
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def show_drill(result: Result) -> None:
    machine, loss = result["machine"], result.get("loss")
    print(f"{machine['cpu']}, {machine['cores']} cores")
    print(describe(result["verdict"]))
    if loss is None:
        evenness, fragments = result["evenness"], SMALL["fragments.count"]
        print(
            f"evenness: {evenness['versions']} versions in {evenness['steps']} steps of {evenness['step_s']:.2f} s, at most "
            f"{evenness['most_in_a_step']} of {fragments} in a step, at most {evenness['steps_without']} steps without one"
        )
        print("passed" if result["passed"] else "FAILED")
        return
    print(f"\n{'at the end':30} {'disturbed':>12} {'undisturbed':>12}")
    for name, value in loss["disturbed"].items():
        shown = [f"{each:12.4f}" if name == "val_loss" else f"{each:12.0f}" for each in (value, loss["undisturbed"][name])]
        print(f"  {name:28} {shown[0]} {shown[1]}")
    print(f"difference of the losses: {100 * loss['difference']:+.2f} %, at most {100 * LOSS_MARGIN:+.0f} %")
    for name, found in result["verified"].items():
        print(f"verify, {name}: {found}")
    if not result["lasted"]:
        print("the run ended before chaos did: give it more --tokens")
    print("passed" if result["passed"] else "FAILED")


# ---- simulated

SIMULATED = 3  # learners
MODEL = {"task.name": "harness.asleep:make", "task.layers": 10, "task.width": 128, "fragments.count": 10, "round.steps": 16}
TAPE = FailureTape(
    40.0,
    [
        Failure(3.0, "freeze", "learner-0", 8.0),
        Failure(13.0, "slow", "learner-1", 8.0, {"factor": 3.0}),
        Failure(18.0, "freeze", "learner-2", 3.0),
        Failure(24.0, "freeze", "learner-[12]", 5.0),
        Failure(33.0, "cut", "learner-2", 1.5),
    ],
)

KINDS = ("freeze", "slow", "cut")  # a killed learner is back when it has been imported and compiled: not for a simulator to say
TARGET = 0.05


async def watch(run: RunReader, seen: RunObservations) -> list[asyncio.Task[None]]:
    """Note what happens, for ever."""
    transport, subjects, identity = run.transport, run.log.subjects, run.run.identity

    async def hear_heartbeat(message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat, _, _ = framing.unpack(message.data, Heartbeat, identity)
            steps = seen.steps.setdefault(heartbeat.learner, []) if heartbeat.role == "learner" else []
            if heartbeat.state == "stepping" and (not steps or heartbeat.step > steps[-1][1]):
                steps.append((time.monotonic(), heartbeat.step))

    async def hear_round(message: Heard) -> None:
        with contextlib.suppress(MessageError):
            round_, _, _ = framing.unpack(message.data, Announcement, identity)
            seen.announced.setdefault((round_.fragment, round_.version), time.monotonic())

    async def read_offers() -> None:
        async for stored in transport.pull(subjects.offer_stream, [subjects.offer("*")], 1):
            offer, _, _ = framing.unpack(stored.data, Offer, identity)
            seen.offers.append(SeenOffer(time.monotonic(), offer.fragment, len(stored.data), offer.body.size_bytes))

    async def read_log() -> None:
        async for stored in transport.pull(subjects.log_stream, [subjects.record("*")], 1):
            record, _, _ = framing.unpack(stored.data, Record, identity)
            if record.entry == "version":
                tokens, size_bytes = [member.tokens for member in record.members], len(stored.data)
                seen.versions.append(
                    SeenVersion(time.monotonic(), record.fragment, record.version, tokens, size_bytes, record.round_s)
                )

    await transport.subscribe(subjects.heartbeat(), hear_heartbeat)
    await transport.subscribe(subjects.round(), hear_round)
    return [asyncio.create_task(reading) for reading in (read_offers(), read_log())]


async def play(run: Up, tape: Path, lead_in_s: float) -> tuple[float, float, bool]:
    """Play a tape on the run; return when lead-in and tape began, and whether all invariants hold at the end."""
    command = [*DILOCO, "chaos", str(run.directory), "--tape", str(tape), "--lead-in", str(lead_in_s)]
    marks: dict[str, float] = {}
    file = tape.with_name("chaos.txt")
    with file.open("wb") as output:
        chaos = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=output)
        assert chaos.stdout is not None
        async for line in chaos.stdout:
            output.write(line)
            marks.setdefault(line.decode().split()[0] if line.strip() else "", time.monotonic())
    code = await chaos.wait()
    if not {"watching", "chaos"} <= marks.keys():
        raise SystemExit(f"the tape was not played: {file.read_text()}")
    return marks["watching"], marks["chaos"], code == 0


def read_tape(path: Path) -> FailureTape:
    """Return a tape of failures that both can cause."""
    names = [f"learner-{index}" for index in range(SIMULATED)]

    def complaint(failure: Failure) -> str | None:
        met = failure.targets(names)
        return None if met else f"target {failure.target!r}: the comparison breaks learners alone, {', '.join(names)}"

    with path.open() as lines:
        return failures.decode(lines, str(path), known=KINDS, complaint=complaint)


async def opened(stack: contextlib.AsyncExitStack, directory: Path) -> RunReader:
    """Open the run's reader, once the run has begun."""
    ends_s = time.monotonic() + STARTED_S
    while True:
        try:
            return await stack.enter_async_context(run_reader.opened(directory))
        except (RunError, BrokerError):
            if time.monotonic() > ends_s:
                raise
        await asyncio.sleep(POLL_S)


async def simulated(
    *,
    tape: Annotated[Path | None, "failure tape to play instead of the one in here"] = None,
    step: Annotated[float, "what a step takes, in seconds"] = 0.25,
    lead_in: Annotated[float, "seconds without failures"] = 10.0,
    keep: Keep = None,
) -> Result:
    """Compare a small real run with the simulator, through the same failures: what both come to, side by side.

    Begins a run with ``diloco up`` whose learners' steps take ``--step`` seconds and hardly any processor (harness/asleep.py),
    and has ``diloco chaos`` play a failure tape on it. Before the tape begins, ``--lead-in`` seconds tell what the simulator
    cannot know: how long a step, an answer and a commit take, and how well bodies compress. It then plays the same tape, and
    the table says what both counted while it was played. What is seen of the run is seen from outside, by its heartbeats and
    its streams.

    Exit code 1 if a quantity differs by more than 5 %, or if chaos found an invariant broken.
    """
    played = read_tape(tape) if tape else TAPE
    options = ("--learners", str(SIMULATED), "--shards", "1")
    with folder(keep) as place:
        file = place / "tape.jsonl"
        file.write_text(failures.encode(played))
        with up(place / "run", *options, sets=MODEL, environment=asleep(step), patience_s=STARTED_S) as running:
            async with contextlib.AsyncExitStack() as stack:
                run = await opened(stack, running.directory)
                seen = RunObservations(run.run.created, [fragment.size for fragment in run.map.fragments], ASLEEP_TOKENS)
                watching = await watch(run, seen)

                def in_full_swing() -> bool:
                    return len(seen.steps) == SIMULATED and all(len(steps) > 2 for steps in seen.steps.values())

                await running.reach(in_full_swing, "every learner steps")
                lead_in_s, began_s, holds = await play(running, file, lead_in)
                await end(*watching)
    calibration = validation.calibrate(seen, lead_in_s, began_s)
    ends_s = began_s + played.duration_s
    rows = validation.compared(validation.live(seen, calibration, began_s, ends_s), validation.simulated(calibration, played))
    terms = calibration.rounds
    return {
        "machine": machine(),
        "calibration": {
            "step_s": {learner.name: learner.step_s for learner in calibration.learners},
            "answer_s": terms.answer_s,
            "commit_s": terms.commit_s,
            "compression": terms.compression,
        },
        "table": [
            {"quantity": row.quantity, "live": row.live, "simulated": row.simulated, "difference": row.difference}
            for row in rows
        ],
        "drift": validation.drift(seen, lead_in_s, began_s, ends_s),
        "holds": holds,
        "passed": holds and all(abs(row.difference) <= TARGET for row in rows),
    }


def show_simulated(result: Result) -> None:
    machine, calibration = result["machine"], result["calibration"]
    print(f"{machine['cpu']}, {machine['cores']} cores")
    steps = ", ".join(f"{1000 * step_s:.1f}" for step_s in calibration["step_s"].values())
    print(
        f"measured before the tape: steps of {steps} ms, an answer in {1000 * calibration['answer_s']:.0f} ms, "
        f"a commit in {1000 * calibration['commit_s']:.0f} ms, bodies of {100 * calibration['compression']:.1f} %\n"
    )
    print(f"{'quantity':30} {'live':>14} {'simulated':>14} {'difference':>11}")
    for row in result["table"]:
        places = 3 if row["live"] < 100 and row["live"] % 1 else 0
        shown = "".join(f" {row[name]:14,.{places}f}" for name in ("live", "simulated"))
        print(f"{row['quantity']:30}{shown} {100 * row['difference']:+10.1f} %")
    drift = max(map(abs, result["drift"].values()))
    print(f"undisturbed steps took {100 * drift:.1f} % more or less time than before the tape, at most")
    print(f"chaos: {'all invariants hold' if result['holds'] else 'an invariant is broken'}")
    print(f"at most {100 * TARGET:g} % apart: {'passed' if result['passed'] else 'FAILED'}")


# ---- soak


def soak(
    *,
    for_: Annotated[float, "seconds from the first cycle of versions on"] = 7200.0,
    kill_every_s: float = 60.0,
    sample_every_s: float = 10.0,
    keep: Keep = None,
) -> Result:
    """Kill a process every minute, and measure whether any process holds more and more.

    Three learners take steps that sleep, beside an evaluator, three syncers, two coordinators and NATS. SIGKILL ends one of six
    services in turn, and `diloco up` starts it again. One learner, one syncer, one coordinator, NATS and `diloco up`
    itself are never killed. Resident and private memory (RSS, USS), threads, open files and asyncio tasks of every process are
    sampled.

    The table has the last process of each service that lived for two minutes or longer, and `--json` all of them. The first
    tenth of a life, at most five minutes, is left out. `first` and `last` are the medians of the first and the last tenth of
    the rest. `an hour` is the slope of the least-squares line, and `growth` its rise.

    Exit code 1 if a process that is never killed grows by more than the bound that the table states.
    """
    with folder(keep) as place:
        lives, killed = measure_soak(place / "run", for_, kill_every_s, sample_every_s)
        rows = summarise(lives, VICTIMS)
        above = exceeded(rows)
        result = {"machine": machine(), "kills": Counter(killed), "rows": rows, "exceeded": above, "passed": not above}
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def show_soak(result: Result) -> None:
    kills = ", ".join(f"{service} {count}" for service, count in result["kills"].items())
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores; kills: {kills or 'none'}")
    print(f"{'process':16} {'life':>7} {'count':11} {'first':>9} {'last':>9} {'an hour':>9} {'growth':>9} {'at most':>9}")
    newest = {row["service"]: row["pid"] for row in result["rows"]}  # rows of a service are in the order of its lives
    for row in result["rows"]:
        if row["pid"] != newest[row["service"]]:
            continue
        unit = 1e6 if row["count"].endswith("_bytes") else 1
        bound = "" if row["bound"] is None else f"{row['bound'] / unit:9.1f}"
        shown = " ".join(f"{row[name] / unit:9.1f}" for name in ("first", "last", "slope_per_h", "growth"))
        print(f"{row['service']:16} {row['life_s']:5.0f} s {row['count'].replace('_bytes', '_MB'):11} {shown} {bound}".rstrip())
    print(f"FAILED: {', '.join(result['exceeded'])}" if result["exceeded"] else "passed")


SCRIPT = Script(__doc__, Bench(drill, show_drill), Bench(simulated, show_simulated), Bench(soak, show_soak))

if __name__ == "__main__":
    SCRIPT.run()
