"""A learner of several processes whose devices JAX makes one mesh of: what they have to agree on, and how they end together.

:mod:`diloco.processes.group` connects them. What each does from then on knows no framework (:mod:`diloco_learner.run.several`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import jax

from diloco.core.run import tape as events
from diloco.errors import IslandError
from diloco.processes.group import Group
from diloco_learner import replay
from diloco_learner.jax import agreement
from diloco_learner.jax.beginning import Beginning, connect_jax, room_for_steps
from diloco_learner.jax.mesh import make_mesh
from diloco_learner.run import several
from diloco_learner.run.process import LearnerProcess
from diloco_learner.run.several import LettingGo, own_errors_first

LOST = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "CANCELLED:", "UNKNOWN:", "FAILED_PRECONDITION:", "INTERNAL: Gloo")
# how JAX's errors begin where another process is gone


def begin_jax(group: Group) -> None:
    """Make JAX connect this process with the others, if there are any. From then on it has all their devices.

    Raises:
        IslandError: it cannot.
    """
    if group.size == 1:
        return
    host, port = group.coordinator
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        connect_jax(address, group.size, group.place, group.settings.start_s)
    except RuntimeError as error:
        raise IslandError(f"learner {group.name}, process {group.index}: JAX cannot connect its processes: {error}") from None


def work(process: LearnerProcess) -> None:
    """Train as one of a learner's processes until the run is over, or one of them is asked to end."""
    settings, run = process.settings, process.run
    process.exporter.starting = "the other processes of this learner"
    group = process.wait(agreement.meet(settings, run, process.transport, process.log))
    if group is None:
        return
    process.stack.push(LettingGo(group, process.thread.run, jax.distributed.shutdown))
    begin_jax(group)
    smaller = settings.mesh.of(group.size, group.count)
    assert smaller is not None, "the leader knows the sizes of a generation"
    mesh = make_mesh(smaller)
    beginning = Beginning(process, lambda name: nullcontext())  # one that waited would keep the others from a collective
    task = beginning.task
    agreement.check_meshes(settings, task, run.created, beginning.first)
    process.wait(group.agree("model", agreement.model_facts(mesh, task, run.created, beginning.first)))
    apart = group.renewal is not None and group.renewal.keeps(smaller)
    island, fragments = beginning.make_island(mesh, copies=True, apart=apart)
    rows = None if mesh is None else agreement.rows_to_make(task, run.created, beginning.first, island.own_rows)
    side = process.wait(several.make_side(process, fragments, group, island))
    process.at_end(side.its.close)
    side.check_batch(task.tokens_per_batch)
    step = island.trace(beginning.first)
    process.wait(group.agree("program", agreement.program_facts(step)))
    room = partial(room_for_steps, group.size, group.count)
    with room():
        beginning.compile_step(step)
    process.wait(group.agree("compiled", {}))  # collectives connect at the first step, and wait for one another no minute long
    process.stack.enter_context(own_errors_first(group))
    process.stack.enter_context(lost_processes())
    with room():
        island.rehearse(beginning.first)
    if process.wait(group.difference("room", {"steps wait for captures": island.holds})):
        island.hold()
    beginning.over()
    about = [replay.machine(), replay.mesh_event(mesh), events.Processes(group.size)]
    renewal = group.renewal
    guard = None if renewal is None else partial(renewal.guard, side.its, island.settled, smaller, process.stopping)
    tokens = task.tokens_per_batch
    several.train(process, side, island, task, tokens_per_batch=tokens, rows=rows, about=about, guard=guard)


@contextmanager
def lost_processes() -> Iterator[None]:
    """Turn an error of JAX into one that says that a process may be gone, if it indicates that.

    Raises:
        IslandError: a collective failed.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter where a program's call fails, and not its result
        if str(error).startswith(LOST):
            raise IslandError(
                f"a collective operation failed, perhaps because a process is gone: {str(error).splitlines()[0]}"
            ) from None
        raise


def exit_from_jax(code: int) -> None:
    """End a process at once that has failed while JAX holds it together with others: they may never answer again."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
