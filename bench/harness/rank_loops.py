"""A PyTorch loop of several ranks in a run, each rank a process, whose parameters are sharded over them (FSDP2)."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import diloco
from diloco.process import observe
from harness.loops import SquareLayers
from harness.parties import RUN, STEP_TOKENS

LOOPBACK = "127.0.0.1"
ISLAND = "island"  # the name of the learner


class RankFigures(NamedTuple):
    """Totals of a rank since it was asked last."""

    steps: int
    call_s: float  # in ``run.step``, by the clock
    call_cpu_s: float  # in it, processor time of the loop's thread
    cpu_s: float  # processor time of the process; its steps are asleep, so all of it is the protocol's
    blocked_longest_s: float  # in one ``run.step``


def rank_main(pipe: Connection, url: str, rank: int, ranks: int, port: int, parameters: int, step_s: float) -> None:
    """Take steps as one rank of a learner, in a process of its own, until the run is over.

    The first step computes, and all others are asleep for ``step_s``. The process says that it is there, joins when it is told
    to, and says how long that took. Each further word is answered with :class:`RankFigures`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layers = SquareLayers(parameters, _meet(rank, ranks, port))
    layers.step(layers.batch(1))  # the ranks connect at their first collective
    observe.configure(f"{ISLAND}-{rank}", RUN, level="warning", fmt="console", file=None)
    join = diloco.join  # all that it imports is here before the rank says so
    pipe.send("here")
    pipe.recv()
    began_s = time.monotonic()
    with join(url, run=RUN, name=ISLAND, params=layers.module, tokens=STEP_TOKENS, data="own") as run:
        pipe.send(time.monotonic() - began_s)
        _sleep_in_steps(pipe, layers, run, step_s)


def _meet(rank: int, ranks: int, port: int) -> Any:
    """Return the mesh of all ranks, or None of a single one."""
    if ranks == 1:
        return None
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    os.environ |= {
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    distributed.init_process_group("gloo")
    return init_device_mesh("cpu", (ranks,))


def _sleep_in_steps(pipe: Connection, layers: SquareLayers, run: Any, step_s: float) -> None:
    steps, call_s, call_cpu_s, longest_s, cpu_s = 0, 0.0, 0.0, 0.0, time.process_time()
    while not run.over:
        time.sleep(step_s)
        called_s, called_cpu_s = time.monotonic(), time.thread_time()
        run.step(layers.module)
        took_s = time.monotonic() - called_s
        steps, call_s, longest_s = steps + 1, call_s + took_s, max(longest_s, took_s)
        call_cpu_s += time.thread_time() - called_cpu_s
        if pipe.poll():
            pipe.recv()
            pipe.send(RankFigures(steps, call_s, call_cpu_s, time.process_time() - cpu_s, longest_s))
            steps, call_s, call_cpu_s, longest_s, cpu_s = 0, 0.0, 0.0, 0.0, time.process_time()
