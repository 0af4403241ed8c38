"""Loops of PyTorch in a run, each a process, and a bare loop that takes the same steps, in turns.

In a turn the processes of the one side go on and those of the other are stopped, so that other work on the machine meets both
alike. The other learners of the run are asleep in their steps: on two cores they would take the measured loop's processor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import diloco
from diloco.nats.connection import malloc_environment
from diloco.process import observe
from diloco.settings.run import RunSettings
from harness.crowd import Crowd, services
from harness.parties import RUN, STEP_TOKENS, Party

LAYERS = 13
SETTLE_S = 1.5  # of a turn, that does not count
WARM_STEPS = 3
LARGEST_BATCH = 1 << 16  # a step that takes no time has to end somewhere
LOOP_CORE, OTHER_CORE = 0, 1


class TakenStep(NamedTuple):
    """One step of a loop: when it ended, by the monotonic clock, and how long ``run.step`` took of it."""

    ended_s: float
    call_s: float
    call_cpu_s: float  # processor time of the loop's thread
    ended_cpu_s: float  # processor time of the loop's thread until then


class SquareLayers:
    """A module of square layers and its optimizer; on a ``mesh`` of ranks the layers are sharded (FSDP2)."""

    def __init__(self, parameters: int, mesh: Any = None) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        width = max(1, round((parameters / LAYERS) ** 0.5))
        self.module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for layer in self.module:
                fully_shard(layer, mesh=mesh)
        self._optimizer = torch.optim.SGD(self.module.parameters(), 1e-3, momentum=0.9)
        self._torch, self._width = torch, width

    def batch(self, rows: int) -> Any:
        """Return so many rows of noise, float32 [rows, width]."""
        return self._torch.randn(rows, self._width)

    def step(self, batch: Any) -> Any:
        """Take a step on a batch; return its loss."""
        self._optimizer.zero_grad()
        loss = (self.module(batch) - batch).square().mean()
        loss.backward()
        self._optimizer.step()
        return loss

    def rows(self, step_s: float) -> int:
        """Return of how many rows a batch is whose step takes about so long."""
        rows, took_s = 16, 0.0
        while took_s < step_s and rows < LARGEST_BATCH:
            rows = min(2 * rows, max(rows + 1, round(rows * step_s / took_s))) if took_s else rows
            batch = self.batch(rows)
            self.step(batch)
            took_s = min(self._took_s(batch) for _ in range(WARM_STEPS))
        return rows

    def _took_s(self, batch: Any) -> float:
        began_s = time.perf_counter()
        self.step(batch)
        return time.perf_counter() - began_s


def loop_main(pipe: Connection, url: str | None, index: int, parameters: int, step_s: float, rows: int | None) -> None:
    """Take steps in a process of its own, in the run of ``url``, or without one.

    Steps compute on batches of ``rows``, or are asleep for ``step_s``. A bare loop says first how many rows take that long. A
    joined one says that it is there, joins when it is told to, and says how long that took. Each word is answered with the
    steps since the last one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layers = SquareLayers(parameters)
    if url is None:
        rows = layers.rows(step_s) if rows is None else rows
        pipe.send(rows)
        _take_steps(pipe, layers, None, rows, step_s)
        return
    observe.configure(f"loop-{index}", RUN, level="warning", fmt="console", file=None)
    pipe.send("here")
    pipe.recv()
    began_s = time.monotonic()
    with diloco.join(url, run=RUN, name=f"loop-{index}", params=layers.module, tokens=STEP_TOKENS, data="own") as run:
        pipe.send(time.monotonic() - began_s)
        _take_steps(pipe, layers, run, rows or 0, step_s)


def _take_steps(pipe: Connection, layers: SquareLayers, run: Any, rows: int, step_s: float) -> None:
    """Take steps until the run ends; without rows they are asleep."""
    batch, loss = layers.batch(max(1, rows)), None
    taken: list[TakenStep] = []
    while run is None or not run.over:
        if rows:
            loss = layers.step(batch)
        else:
            time.sleep(step_s)
            loss = layers.step(batch) if loss is None else loss
        called_s, called_cpu_s = time.monotonic(), time.thread_time()
        if run is not None:
            run.step(layers.module, loss=loss)
        ended_s = time.monotonic()
        ended_cpu_s = time.thread_time()
        taken.append(TakenStep(ended_s, ended_s - called_s, ended_cpu_s - called_cpu_s, ended_cpu_s))
        if pipe.poll():
            pipe.recv()
            pipe.send(taken)
            taken = []


@dataclass
class Sides:
    """A run with the loop that is measured, and the bare loop beside it."""

    run: Crowd
    bare: Party

    def turn(self, turn_s: float, *, run_first: bool) -> dict[str, Any]:
        """Let each side go on for so long; return what the two loops say."""
        loops = [self.run.learners[0], self.bare]
        taken = {loop.pid: self._steps(loop, turn_s) for loop in (loops if run_first else reversed(loops))}
        joined, alone = (taken[loop.pid] for loop in loops)
        calls_s = sorted(step.call_s for step in joined)
        step_s, bare_step_s = _step_s(joined), _step_s(alone)
        return {
            "steps": len(joined),
            "step_s": step_s,
            "bare_step_s": bare_step_s,
            "step_cpu_s": _step_cpu_s(joined),
            "bare_step_cpu_s": _step_cpu_s(alone),
            "pace": bare_step_s / step_s,
            "call_mean_s": statistics.fmean(calls_s),
            "call_median_s": statistics.median(calls_s),
            "call_p99_s": calls_s[int(0.99 * len(calls_s))],
            "call_cpu_s": statistics.fmean(step.call_cpu_s for step in joined),
            "blocked": statistics.fmean(calls_s) / step_s,
        }

    def pin(self) -> None:
        """Have both loops' threads at one core, and everything else, the threads of their own processes too, at another."""
        loops = {self.run.learners[0].pid, self.bare.pid}  # a process's first thread has its number
        for pid in (*self._run_pids(), self.bare.pid, os.getpid()):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # a thread that has ended
                    os.sched_setaffinity(int(task.name), {LOOP_CORE if int(task.name) in loops else OTHER_CORE})

    def go_on(self) -> None:
        """Let all processes go on, so that they can end."""
        _signal([*self._run_pids(), self.bare.pid], signal.SIGCONT)

    def _steps(self, loop: Party, turn_s: float) -> list[TakenStep]:
        sides = [self._run_pids(), [self.bare.pid]]
        halt, go = sides if loop is self.bare else reversed(sides)
        _signal(halt, signal.SIGSTOP)
        _signal(go, signal.SIGCONT)
        time.sleep(SETTLE_S)
        loop.ask("forget")
        time.sleep(turn_s)
        steps: list[TakenStep] = loop.ask("steps")
        return steps

    def _run_pids(self) -> list[int]:
        return list(self.run.pids().values())


@contextlib.contextmanager
def sides(
    settings: RunSettings,
    *,
    learners: int,
    parameters: int,
    step_s: float,
    asleep: bool,
    pin: bool,
    measured: Callable[..., None] = loop_main,
) -> Iterator[Sides]:
    """Begin a run of so many loops and a bare one, and wait until all have joined.

    ``asleep``: no loop computes. ``measured``: the loop of the two that are compared, with the arguments of :func:`loop_main`.
    """
    with services(settings) as run:
        for name in malloc_environment():  # services have it, and a user's loop has not
            os.environ.pop(name)
        bare = run.spawn(measured, "bare", None, 0, parameters, step_s, 0 if asleep else None)
        rows = bare.hear()
        for index in range(learners):
            main, computes = (measured, rows) if index == 0 else (loop_main, 0)
            run.learners.append(run.spawn(main, f"loop-{index}", run.server.url, index, parameters, step_s, computes))
        run.join()
        begun = Sides(run, bare)
        try:
            if pin:
                begun.pin()
            yield begun
        finally:
            begun.go_on()


def _step_s(steps: Sequence[TakenStep]) -> float:
    """Return the mean time of steps, the first of which only begins it."""
    return (steps[-1].ended_s - steps[0].ended_s) / (len(steps) - 1)


def _step_cpu_s(steps: Sequence[TakenStep]) -> float:
    """Return the mean processor time of the loop's thread in a step; what a step takes beyond it was spent waiting."""
    return (steps[-1].ended_cpu_s - steps[0].ended_cpu_s) / (len(steps) - 1)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)
