"""The pace of a run's learners against the same step in a bare JAX loop, taking turns, and the learners' blocked share.

    python bench/pace.py                                      # 2 learners of 0.87M parameters, H = 20, real steps
    python bench/pace.py --step-s 0.05                        # steps that sleep, as with an accelerator
    python bench/pace.py --set learners=1 --set round.steps=5 --turns 3 --json

It begins a run with ``diloco up``, and beside it as many bare loops as learners: the learner's own step, of JAX or PyTorch, on
a batch that is there, the next step dispatched before the one before has ended. In a turn all processes of the one side are
stopped and those of the other go on for ``--turn-s``, then the other way round, so that other work on the machine meets both
alike. The first ``SETTLE_S`` of each turn do not count.

A turn's pace is the bare loops' time of a step over the learners' time of a step. The run has syncers, a coordinator, an
evaluator and a NATS server, too: where steps compute on the same cores, their processor time is in the pace, though no step
waits for them. ``blocked`` is what the learners themselves say: it has neither. ``cpu`` and ``bare_cpu`` are the processor
time of a learner's process and of a bare loop's, of the turn's time. ``--no-evaluator`` keeps the evaluator stopped, which
shares a learner's device where there is only one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
from harness.console import Bench, Result, Script, folder
from harness.host import cpu_s, machine
from harness.live_run import Watch, asleep, up, watching

from diloco.settings import folders
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import run_settings
from diloco_ops.up.environment import learner_environment

if TYPE_CHECKING:
    from diloco_learner.api.model import Output

SETTLE_S = 1.5
REAL = ["task.layers=4", "task.width=128", "task.context=64", "task.batch=4"]
SLEEPING = ["task.name=harness.asleep:make_unstopped", "task.layers=13", "task.width=256", "inner.optimizer=adamw"]
USUAL = ["learners=2", "round.steps=20"]
PATIENCE_S = 400.0  # only ends what hangs
PATIENT = ["liveness.dead_s=600", "liveness.lease_s=600"]  # who is stopped is not dead


class Bare:
    """A bare loop in a process of its own, which writes a line when a step has ended."""

    def __init__(self, sets: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--bare", *(f"--set={item}" for item in sets)]
        environment = os.environ | learner_environment(0, 1, None)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.ends_s: list[float] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.ends_s += (float(line) for line in self.process.stdout)

    def step_s(self, began_s: float, ended_s: float) -> float:
        """Return the mean time of a step that ended between two times of the wall clock."""
        return _step_s([at_s for at_s in list(self.ends_s) if began_s <= at_s <= ended_s])


def take_steps(sets: Sequence[str]) -> NoReturn:
    """Take steps without end."""
    from diloco_learner.frameworks import load
    from diloco_learner.task_api import first_batch

    settings, cache_dir = run_settings("decoupled", parse_assignments(list(sets))), folders.cache_dir()
    loaded = load(settings.task, None, cache_dir)
    loaded.framework.keep_programs(cache_dir)  # it is the learners' program
    model, batch = loaded.framework.make_model(loaded.task, settings, None), first_batch(loaded.task, settings)

    def step() -> Output:
        output = model.begin_step(batch, 0.0)
        model.finish_step()
        return output

    flight = step()
    while True:
        landing, flight = flight, step()
        landing.wait()
        print(time.time(), flush=True)


def _step_s(ends_s: Sequence[float]) -> float:
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a learner that has died is said by its turn
            process.send_signal(number)


def _guards(process: psutil.Process) -> bool:
    """Whether it is the launcher's shell, which ends all services once the launcher is killed. It must not be stopped."""
    return process.cmdline()[:1] == ["/bin/sh"]


async def _turn(go: Sequence[psutil.Process], halt: Sequence[psutil.Process], turn_s: float) -> tuple[float, float]:
    """Let the one side go on and stop the other; return from when to when it counts."""
    _signal(halt, signal.SIGSTOP)
    _signal(go, signal.SIGCONT)
    await asyncio.sleep(SETTLE_S)
    began_s = time.time()
    await asyncio.sleep(turn_s)
    return began_s, time.time()


def _learners(watch: Watch, began_s: float, ended_s: float) -> dict[str, Any]:
    """Return time of a step and blocked share of the learners in a turn, means of both.

    Raises:
        SystemExit: a learner took no two steps in it.
    """
    steps_s, blocked = [], []
    for name, heartbeats in watch.heartbeats.items():
        firsts = {beat.step: (at_s, beat) for at_s, beat in reversed(heartbeats) if began_s <= at_s <= ended_s}
        if len(firsts) < 2:
            raise SystemExit(
                f"{name} ended {len(firsts)} steps in a turn of {ended_s - began_s:.1f} s: take longer turns (--turn-s), or "
                "look whether it has died"
            )
        (first_s, first), (last_s, last) = firsts[min(firsts)], firsts[max(firsts)]
        steps_s.append((last_s - first_s) / (last.step - first.step))
        blocked_s = last.blocked_s - first.blocked_s
        blocked.append(blocked_s / (blocked_s + last.busy_s - first.busy_s))
    return {"step_s": statistics.mean(steps_s), "blocked": statistics.mean(blocked)}


class _Cpu:
    """Processor time of some processes from its construction on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._began_s = {pid: cpu_s(pid) for pid in pids}

    def used_s(self) -> float:
        """Return the mean of the processes."""
        return statistics.mean((cpu_s(pid) or began_s) - began_s for pid, began_s in self._began_s.items())


async def measure(sets: Sequence[str], turns: int, turn_s: float, *, evaluator: bool = True) -> Result:
    results = []
    with folder() as place, up(place / "run", sets=sets, patience_s=PATIENCE_S) as running:
        watch = await watching(running)
        await running.reach(watch.all_step, "all learners step")
        learners = [running.pid(name) for name in watch.heartbeats]
        evaluating = running.pid("evaluator")
        everything = psutil.Process().children(recursive=True)
        run = [process for process in everything if not _guards(process) and (evaluator or process.pid != evaluating)]
        loops = [Bare(sets) for _ in watch.heartbeats]
        others = [psutil.Process(loop.process.pid) for loop in loops]
        try:
            if not evaluator:
                running.signal(signal.SIGSTOP, "evaluator")
            while not all(loop.ends_s for loop in loops):
                if any(loop.process.poll() is not None for loop in loops):
                    raise SystemExit("a bare loop ended before its first step: its last words are on stderr")
                await asyncio.sleep(0.1)
            for _ in range(turns):
                watch.forget()
                cpu = _Cpu(learners)
                turn = _learners(watch, *await _turn(run, others, turn_s))
                turn["cpu"], cpu = cpu.used_s() / (SETTLE_S + turn_s), _Cpu([process.pid for process in others])
                span = await _turn(others, run, turn_s)
                alone_s = statistics.mean(loop.step_s(*span) for loop in loops)
                bare_cpu = cpu.used_s() / (SETTLE_S + turn_s)
                results.append(turn | {"bare_step_s": alone_s, "pace": alone_s / turn["step_s"], "bare_cpu": bare_cpu})
        finally:
            _signal(everything, signal.SIGCONT)
            for loop in loops:
                loop.process.kill()
        await watch.link.close()
    return {"machine": machine(), "load": os.getloadavg(), "turns": results, "settings": list(sets)}


def show(result: Result) -> None:
    turns = result["turns"]
    print(f"{len(turns)} turns, median (least to most); load {result['load'][0]:.0f}")
    times = [("bare_step_s", 1e3, "ms"), ("step_s", 1e3, "ms")]
    for name, scale, unit in (*times, *((name, 100, "%") for name in ("pace", "blocked", "cpu", "bare_cpu"))):
        values = [scale * turn[name] for turn in turns]
        print(f"  {name:12} {statistics.median(values):7.2f} {unit} ({min(values):.2f} to {max(values):.2f})")


async def pace(
    *,
    set_: Annotated[Sequence[str], "KEY=VALUE, a setting of the run; repeatable"] = (),
    step_s: Annotated[float | None, "steps sleep so long, instead of computing"] = None,
    turns: int = 5,
    turn_s: float = 6.0,
    no_evaluator: Annotated[bool, "keep the evaluator stopped"] = False,
    bare: Annotated[bool, "take steps without a run, for ever, as the loops beside it do"] = False,
) -> Result:
    """Begin a run, and measure its pace."""
    if bare:
        take_steps(set_)
    if step_s is not None:
        os.environ |= asleep(step_s)
    sets = [*USUAL, *(REAL if step_s is None else SLEEPING), *PATIENT, *set_]
    return await measure(sets, turns, turn_s, evaluator=not no_evaluator)


SCRIPT = Script(__doc__, Bench(pace, show))

if __name__ == "__main__":
    SCRIPT.run()
