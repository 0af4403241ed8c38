"""A learner of several processes: how they find each other, what they have to agree on, and the trainer's work in each.

:mod:`diloco.processes.group` connects them, and ends them together; JAX makes one mesh of all their devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh

from diloco.core import tape as events
from diloco.core.fragments import FragmentMap
from diloco.core.roll import LEADER
from diloco.core.rows import carriers
from diloco.errors import IslandError
from diloco.log.log import Log
from diloco.member.peer import Borrower, Loan
from diloco.process.observe import Counted
from diloco.process.tape import TapeFile
from diloco.processes.follower import Follower, LearnerProcess
from diloco.processes.group import Group
from diloco.processes.leader import Leader
from diloco.processes.part import Part
from diloco.service import skeleton
from diloco.settings.service import MeshSettings
from diloco.wire.island import Ping
from diloco.wire.subjects import Subjects
from diloco_learner import agreement, checkpoint, replay
from diloco_learner.beginning import Beginning, connect_jax, room_for_steps
from diloco_learner.island import Island
from diloco_learner.mesh import make_mesh
from diloco_learner.process import Process, make_trainer
from diloco_learner.sides import FollowingSide, LeadingSide, Side
from diloco_learner.task import Task

LOST = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "CANCELLED:", "UNKNOWN:", "FAILED_PRECONDITION:", "INTERNAL: Gloo")
# how JAX's errors begin where another process is gone


def begin_jax(group: Group) -> None:
    """Have JAX connect this process with the others, if there are any: from here on it has all their devices.

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


def work(process: Process) -> None:
    """Train as one of a learner's processes until the run is over, or one of them is asked to end."""
    settings, run = process.settings, process.run
    process.exporter.starting = "the other processes of this learner"
    group = process.wait(agreement.meet(settings, run, process.transport, process.log))
    if group is None:
        return
    process.stack.push(LettingGo(group, process.thread.run))
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
    side = process.wait(make_side(process, fragments, group, island))
    process.at_end(side.its.close)
    side.check_batch(task.tokens_per_batch)
    step = island.trace(beginning.first)
    process.wait(group.agree("program", agreement.program_facts(step)))
    room = partial(room_for_steps, group.size, group.count)
    with room():
        beginning.compile_step(step)
    process.wait(group.agree("compiled", {}))  # collectives connect at the first step, and wait for one another no minute long
    process.stack.enter_context(own_errors_first(group))
    with room():
        island.rehearse(beginning.first)
    if process.wait(group.difference("room", {"steps wait for captures": island.holds})):
        island.hold()
    beginning.over()
    _train(process, task, island, mesh, side, rows, smaller)


def _train(
    process: Process,
    task: Task,
    island: Island,
    mesh: Mesh | None,
    side: Side,
    rows: range | None,
    smaller: MeshSettings,
) -> None:
    its, part = side.its, side.its.part
    renewal = part.group.renewal
    about = [replay.machine(), replay.mesh_event(mesh), events.Processes(part.group.size)]
    side.join([*about, events.Apart()] if island.apart else about)
    if not side.restore(island):
        side.begin_from_log(task.tokens_per_batch)
        if not _take_up(process, its, island):
            _borrow(process, its, island)
    keeper = side.keeper(island)
    changing = None if renewal is None else renewal.guard(its, island.settled, smaller, process.stopping)
    batches = side.batches(task, rows)
    trainer = make_trainer(
        process,
        task.tokens_per_batch,
        island,
        its.steered,
        batches,
        keeper.at_boundary,
        look_ahead=side.look_ahead,
        changing=changing,
    )
    try:
        finished = trainer.run()
    finally:
        keeper.close()
    if not finished and _regroups(process, its):
        if process.stopping():
            return  # it was asked to end meanwhile: the others go on from the same state
        assert renewal is not None, "a generation of a fixed size ends with its learner"
        renewal.renew()
    side.record_end(finished=finished)
    between_up, between_down = part.links.moved_bytes
    process.log.info(
        "island_left",
        finished=finished,
        steps=part.course.step,
        bytes_up=process.transport.bytes_out,
        bytes_down=process.transport.bytes_in,
        processes_bytes_up=between_up,
        processes_bytes_down=between_down,
    )
    process.thread.run(part.group.farewell(), lambda: False)  # until then the leader may ask for what this process has
    side.check_refused()


def _regroups(process: Process, its: LearnerProcess) -> bool:
    """Whether the generation alone has ended, and not the learner; then all processes have taken leave of one another."""
    part, run = its.part, process.thread.run
    if not run(its.is_for_larger_generation(), lambda: False):
        return False
    run(part.group.farewell(), lambda: False)
    its.tape.flush()
    process.log.info("island_regroups", generation=part.group.generation, steps=part.course.step)
    return True


def _take_up(process: Process, its: LearnerProcess, island: Island) -> bool:
    """Begin with the optimizer state that a learner of the run before has ended with, if all processes find the same one.

    A run that has merged something by now has newer ones to lend.
    """
    continued = process.run.created.continues
    if continued is None or not process.wait(its.takes_up_state_before()):
        return False
    settings, run = process.settings, bytes.fromhex(continued.identity)
    before = checkpoint.state_before(island, settings.state_dir, settings.name, run, process.log)
    found = None if before is None else f"{before.learner}, {before.saved.state_hash.hex()}"
    if process.wait(its.part.group.difference("before", {"state before": found})) or before is None:
        return False
    checkpoint.put(before.saved, island, optimizer_only=True)
    its.note_state_before(before.learner, before.saved.digest)
    return True


def _borrow(process: Process, its: LearnerProcess, island: Island) -> None:
    """Borrow an optimizer state: each process the chunks of its own shards, and all of one copy of one peer, or none.

    Parameters are the log's, and the run is asked for nothing that it has not merged anything of. The leader decides for all
    whether the loan is old, and asked for once more.
    """
    part, peers = its.part, process.wait(its.loan_peers())
    layout, loan = island.optimizer_layout(), None
    if peers and layout.arrays:
        borrower = Borrower(
            part.transport,
            run=part.run.identity,
            subjects=Subjects(part.run.name),
            name=skeleton.process_name(process.settings),
            layout=layout,
            wanted=island.wanted(optimizer_only=True),
            put=island.put,
            log=process.log,
        )
        loan = _all_of_one(process, part, "loan", process.wait(borrower.borrow(peers)))
        if loan is not None and process.wait(its.must_ask_again(loan)):
            loan = _all_of_one(process, part, "newer loan", process.wait(borrower.borrow_newer(loan, peers)))
            its.note_newer_loan(loan)
        if loan is None:
            island.forget_optimizer()
    its.note_optimizer(loan)


def _all_of_one(process: Process, part: Part, stage: str, loan: Loan | None) -> Loan | None:
    """Return a process's loan if all processes have one of the same copy; None if they do not."""
    found = None if loan is None else f"{loan.peer}, step {loan.step}, {loan.content_hash.hex()}"
    return None if process.wait(part.group.difference(stage, {"loan": found})) else loan


class LettingGo:
    """At the end of a ``with`` statement: let go of the other processes, unless it ends by an error, which they notice."""

    def __init__(self, group: Group, run: Callable[[Coroutine[Any, Any, None], Callable[[], bool]], None]) -> None:
        self.group, self.run = group, run

    def __call__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the connections, and JAX's."""
        self.group.ending()
        if error is None:
            self.run(self.group.close(), lambda: False)
            jax.distributed.shutdown()


@contextmanager
def own_errors_first(group: Group) -> Iterator[None]:
    """Let an error of this process be what it ends with, and not that others end because of it."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter where a program's call fails, and not its result
        if str(error).startswith(LOST):
            group.end(IslandError(f"a collective failed, as where a process is gone: {str(error).splitlines()[0]}"))
        group.ending()
        raise
    except IslandError as error:
        group.end(error)
    except BaseException:
        group.ending()
        raise


def exit_from_jax(code: int) -> None:
    """End a process at once that has failed while JAX holds it together with others: they may never answer again."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def make_side(process: Process, fragments: FragmentMap, group: Group, island: Island) -> Side:
    """Return this process's side: it leads, or follows. Call it in the loop's thread."""
    transport, run, log = process.transport, process.run, process.log
    layouts = [island.row_layout(fragment, group.size) for fragment in fragments.fragments]
    dealt, refused = carriers([fragment.size for fragment in fragments.fragments], group.size), Counted(log)

    def read(index: int) -> Any:
        return island.read(fragments.fragments[index]).to_host()

    group.links.sign_of_life = lambda: Ping(transport.bytes_out, transport.bytes_in, refused.total)
    store = Log(transport, run.name, run.identity, fragments, run.created)
    part = Part(
        transport,
        run,
        group,
        store=store,
        layouts=layouts,
        carriers=dealt,
        read=read,
        refused=refused,
        log=log,
        telemetry=process.exporter.telemetry,
    )
    own = [index for index, carrier in enumerate(dealt) if carrier == group.place]
    log.info("carries", fragments=own, parameters=sum(fragments.fragments[index].size for index in own))
    if group.place == LEADER:
        tape = TapeFile(process.settings.state_dir, process.settings.name, run.identity, log)
        return LeadingSide(process, Leader(part, fragments, process.settings, log, tape))
    return FollowingSide(process, Follower(part, fragments))
