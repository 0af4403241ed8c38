"""Chaos on a run of four learners, two shards with a standby each, two coordinators and NATS, all on this machine.

    python bench/chaos.py                       # a fault every 3 s for a minute, on a small model: `make chaos`
    python bench/chaos.py --long                # a fault every 10 s for half an hour, on the default model: `make chaos-long`
    python bench/chaos.py --long --for 180      # the same in a tenth of the time

``--long`` takes about one and a half times ``--for``. A short run tells the pace, and so the budget with which the disturbed
run lasts until chaos is over. That run then goes on to its end, and is verified once more. An undisturbed run of the same
budget follows, and their final validation losses are compared: what chaos keeps from being merged counts against it. Learners
of the disturbed run are slowed by sleeping, as if their accelerators were not this machine's cores: what is measured is what
failures cost, and not how so many processes share them. The undisturbed run is not slowed, so that it ends sooner.

The short run goes on for some cycles after chaos. From two cycles after it on, versions are counted in each step of the learner
whose steps the cycle is counted in: the most of them in a step, and the most steps without one.

``result.json`` in the folder of the runs has all that is printed. Exit code 1 if an invariant is broken, if the run ended
before chaos did, if its loss is more than 3 % above the undisturbed one's, or if all fragments have a version in one step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import script

from diloco.core.learner.slots import choose
from diloco.log.stream import pass_over
from diloco_ops.audit import verify
from diloco_ops.chaos.verdict import describe
from diloco_ops.reading import run_reader

LEARNERS = 4
PARTIES = ["--learners", str(LEARNERS), "--shards", "2", "--standbys", "2", "--coordinators", "2"]
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
ENDLESS_TOKENS = 10**12
LOSS_MARGIN = 0.03
STARTED_S = 180.0
PROBE_S = 45.0
LEAD_IN_S = 20.0  # that tell the undisturbed pace, where the run lasts long
BEFORE_S = 60.0  # what a run does before chaos begins, and some more
BUDGET_MARGIN = 1.1  # a machine may get faster after the probe; a run that ends before chaos does is a failed measurement
POLL_S = 0.2
SETTLED_CYCLES, WATCHED_CYCLES = 2, 4  # of the short run, after chaos: until versions are even again, and to be counted in


@contextmanager
def running(directory: Path, tokens: int, slow: float, settings: dict[str, int]) -> Iterator[subprocess.Popen[bytes]]:
    """Begin a run; end it in order if it does not end by itself."""
    command = [*script.DILOCO, "up", "--plain", "--run-dir", str(directory), "--tokens", str(tokens), *PARTIES]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    command += [f"--slow=learner-{learner}={slow}" for learner in range(LEARNERS)]
    with directory.with_suffix(".out").open("wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield run
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()


def until(predicate: Callable[[], bool], directory: Path, run: subprocess.Popen[bytes]) -> None:
    """Wait for something that a run is to do soon after it was begun."""
    ends_s = time.monotonic() + STARTED_S
    while not predicate():
        if run.poll() is not None or time.monotonic() > ends_s:
            raise SystemExit(f"bench/chaos.py: {directory}: the run did not start; see {directory.with_suffix('.out')}")
        time.sleep(POLL_S)


def read_status(directory: Path) -> dict[str, Any]:
    """Return the last status of a run."""
    while True:
        with contextlib.suppress(ValueError):  # it is being written
            found: dict[str, Any] = json.loads((directory / "status.json").read_text())
            return found


def probe(directory: Path) -> float:
    """Return the undisturbed pace of a slowed run, in tokens a second."""

    def in_full_swing() -> bool:
        written = (directory / "status.json").exists()
        return written and all(fragment["version"] >= 2 for fragment in read_status(directory)["fragments"])

    with running(directory, ENDLESS_TOKENS, SLOW_LONG, {}) as run:
        until(in_full_swing, directory, run)
        before = read_status(directory)
        time.sleep(PROBE_S)
        after = read_status(directory)
    return float((after["tokens_processed"] - before["tokens_processed"]) / (after["wall_s"] - before["wall_s"]))


def disturb(directory: Path, run: subprocess.Popen[bytes], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the verdict of chaos on a run that has just been begun."""
    until(lambda: (directory / "services" / "evaluator.pid").exists(), directory, run)
    command = [*script.DILOCO, "chaos", str(directory), "--seed", str(arguments.seed), "--for", str(arguments.for_)]
    command += ["--rate", str(arguments.rate), "--json", "--record", str(directory.parent / "tape.jsonl")]
    if arguments.long:
        command += ["--lead-in", str(LEAD_IN_S)]
    verdict_file = directory.parent / "verdict.json"
    with verdict_file.open("wb") as out:
        chaos = subprocess.Popen(command, stdout=out)
    while chaos.poll() is None:
        if run.poll():
            chaos.send_signal(signal.SIGINT)
            chaos.wait()
            raise SystemExit(
                f"bench/chaos.py: {directory}: the run ended with code {run.returncode}; see {directory.with_suffix('.out')}"
            )
        time.sleep(POLL_S)
    if not verdict_file.stat().st_size:
        raise SystemExit(f"bench/chaos.py: {directory}: chaos ended with code {chaos.returncode} and without a verdict")
    verdict: dict[str, Any] = json.loads(verdict_file.read_text())
    return verdict


def finish(directory: Path, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the report of a run at its end."""
    if run.wait():
        raise SystemExit(
            f"bench/chaos.py: {directory}: the run ended with code {run.returncode}; see {directory.with_suffix('.out')}"
        )
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def compare(disturbed: dict[str, Any], undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Return the results of two runs, from their reports."""
    names = ("wall_s", "tokens_budget", "tokens_processed", "tokens_merged", "versions", "val_loss")
    return {
        "disturbed": {name: disturbed[name] for name in names},
        "undisturbed": {name: undisturbed[name] for name in names},
        "difference": disturbed["val_loss"] / undisturbed["val_loss"] - 1,
    }


def measure_short(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Chaos on a run that is ended with it."""
    directory = folder / "disturbed"
    with running(directory, arguments.tokens or SMALL_TOKENS, SLOW_SMALL, SMALL) as run:
        verdict = disturb(directory, run, arguments)
        evenness = measure_evenness(directory)
    passed = verdict["holds"] and evenness["most_in_a_step"] < SMALL["fragments.count"]
    return {"verdict": verdict, "evenness": evenness, "passed": passed}


def measure_evenness(directory: Path) -> dict[str, Any]:
    """Return how evenly a run makes versions from two cycles from now on, in steps of its reference."""
    cycle_s = SMALL["round.steps"] * max(learner["step_s"] for learner in read_status(directory)["learners"].values())
    time.sleep(SETTLED_CYCLES * cycle_s)
    before, began_s = steps_taken(directory), time.time()
    time.sleep(WATCHED_CYCLES * cycle_s)
    after, ended_s = steps_taken(directory), time.time()
    times_s = [(ended_s - began_s) / (after[name] - step) for name, step in sorted(before.items()) if after[name] > step]
    step_s = times_s[choose(times_s, 1)]
    made_s = asyncio.run(versions_made_s(directory))
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


def steps_taken(directory: Path) -> dict[str, int]:
    """Return by learner the steps that it has taken."""
    return {name: learner["step"] for name, learner in read_status(directory)["learners"].items()}


async def versions_made_s(directory: Path) -> list[float]:
    """Return when the versions in a run's log were made, Unix time at the syncers."""
    async with run_reader.opened(directory) as seen:
        stop = max([await seen.log.reader.end_sequence(fragment.index) for fragment in seen.map.fragments])
        heads = seen.log.entries.heads(pass_over, stop_sequence=stop)
        return [head.record.committed_at_s async for head in heads if head.record.makes_version]


def measure_long(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Chaos on a run that goes on to its end, and one without to compare it with."""
    directory = folder / "disturbed"
    say("probing the pace")
    pace = probe(folder / "probe")
    tokens = arguments.tokens or round(pace * (arguments.for_ + BEFORE_S) * BUDGET_MARGIN)
    say(f"{pace:.0f} tokens a second; chaos, on a budget of {tokens}")
    with running(directory, tokens, SLOW_LONG, {}) as run:
        verdict = disturb(directory, run, arguments)
        say(f"chaos is over, the invariants {'hold' if verdict['holds'] else 'DO NOT HOLD'}; the run goes on to its end")
        reports = [finish(directory, run)]
    checked = asyncio.run(verify.check(directory))
    say("the same without chaos")
    directory = folder / "undisturbed"
    with running(directory, tokens, 1.0, {}) as run:
        reports.append(finish(directory, run))
    loss, lasted = compare(*reports), verdict["chaos_s"] >= arguments.for_ - 1
    return {
        "verdict": verdict,
        "lasted": lasted,
        "tokens_per_s": pace,
        "verified": {check.name: f"{check.state}: {check.found}" for check in checked.checks},
        "loss": loss,
        "passed": verdict["holds"] and lasted and checked.holds and loss["difference"] <= LOSS_MARGIN,
    }


def say(text: str) -> None:
    """Print the current action, since it takes long."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def show(result: dict[str, Any]) -> None:
    """For people."""
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


def main() -> int:
    parser = script.parser(__doc__)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--for", dest="for_", type=float, help="seconds of chaos")
    parser.add_argument("--rate", type=float, help="faults a second")
    parser.add_argument("--tokens", type=int, help="budget of the disturbed run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in; with --long a new one in runs/")
    arguments = parser.parse_args()
    arguments.for_ = arguments.for_ or (1800.0 if arguments.long else 60.0)
    arguments.rate = arguments.rate or (0.1 if arguments.long else 1 / 3)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or (Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S") if arguments.long else None)
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        result = {"machine": script.machine()} | (measure_long if arguments.long else measure_short)(folder, arguments)
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    script.print_result(result, arguments, show)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
