"""A learner of several processes: how they find each other, what they have to agree on, and the trainer's work in each.

:mod:`diloco.member.group` connects them, and ends them together; JAX makes one mesh of all their devices.
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
from diloco.member import rescue
from diloco.member.group import Group
from diloco.member.leader import Leader
from diloco.member.part import Follower, Part
from diloco.member.peer import Borrower, Loan
from diloco.member.rescue import Rescue
from diloco.process.observe import Counted
from diloco.process.tape import TapeFile
from diloco.service import skeleton
from diloco.settings.run import RunSettings
from diloco.wire.island import Ping, Told
from diloco.wire.subjects import Subjects
from diloco_learner import agreement, checkpoint, parts, replay
from diloco_learner.beginning import Beginning, connect_jax, room_for_steps
from diloco_learner.feed import Batch, Feed, Streams
from diloco_learner.island import Island
from diloco_learner.mesh import make_mesh
from diloco_learner.metrics import ObservedMember, ObservedPart
from diloco_learner.model import digest_of
from diloco_learner.parts import LeadingKeeper, PartKeeper
from diloco_learner.process import Process, make_trainer
from diloco_learner.task import Task

REGROUP = "regroup"
BEGINS = "begins"
AGAIN = "again"
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
    apart = rescue.keeps(settings, smaller, group.size)
    island, fragments = beginning.make_island(mesh, copies=True, apart=apart)
    rows = None if mesh is None else agreement.rows_to_make(task, run.created, beginning.first, island.own_rows)
    member = process.wait(make_member(process, fragments, group, island))
    process.at_end(member.close)
    if isinstance(member, Leader):
        member.admission.check_batch(task.tokens_per_batch)
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
    _train(process, task, island, mesh, member, rows)


def _train(
    process: Process, task: Task, island: Island, mesh: Mesh | None, member: Leader | Follower, rows: range | None
) -> None:
    settings, run, log = process.settings, process.run.created, process.log
    batches: Iterator[Batch]
    look_ahead, labels = None, process.exporter.labels()
    if isinstance(member, Leader):
        process.wait(member.join())  # it gathers the model from all processes, if it founds the run
        process.exporter.observed = ObservedPart(member.part, labels, ObservedMember(member, process.transport, labels))
        for event in (replay.machine(), replay.mesh_event(mesh), events.Processes(member.part.group.size)):
            member.tape.record(event)
        if island.apart:
            member.tape.record(events.Apart())
        batches, look_ahead = Feed(task, run, member.leased, log, rows), member.look_ahead
    else:
        process.wait(member.join())
        process.exporter.observed = ObservedPart(member.part, labels)
        batches = DecidedBatches(task, run, member, rows)
    if not parts.restore(process, island, member.part, member if isinstance(member, Leader) else None):
        if isinstance(member, Leader):
            member.count_steps(task.tokens_per_batch)
        if not _take_up(process, member, island):
            _borrow(process, member, island)
    keeper = _keeper(process, island, member)
    part, kept = member.part, Rescue(island.settled, member, settings, log)
    if island.apart:
        part.group.rescue = kept
    trainer = make_trainer(
        process, task.tokens_per_batch, island, member, batches, keeper.at_boundary, look_ahead, kept.changing
    )
    part.group.may_renew = lambda: settings.processes.elastic and part.course.step > 0 and not process.stopping()
    try:
        finished = trainer.run()
    finally:
        keeper.close()
    if not finished and _regroups(process, member):
        if process.stopping():
            return  # it was asked to end meanwhile: the others go on from the same state
        part.group.renew()
    if isinstance(member, Leader):
        try:
            digest = digest_of(member.map, lambda index: process.thread.run(part.gather(index), lambda: False))
            member.tape.record(events.End(finished, digest))
        except IslandError as error:  # all have ended as decided, and this process stood still meanwhile
            log.warning("end_not_recorded", reason=str(error))
    transport = process.transport
    between_up, between_down = part.links.moved_bytes
    log.info(
        "island_left",
        finished=finished,
        steps=part.course.step,
        bytes_up=transport.bytes_out,
        bytes_down=transport.bytes_in,
        processes_bytes_up=between_up,
        processes_bytes_down=between_down,
    )
    process.thread.run(part.group.farewell(), lambda: False)  # until then the leader may ask for what this process has
    if isinstance(member, Leader):
        process.wait(member.refusals.check())


def _keeper(process: Process, island: Island, member: Leader | Follower) -> PartKeeper:
    settings, log = process.settings, process.log
    return (
        LeadingKeeper(island, member, settings, log)
        if isinstance(member, Leader)
        else PartKeeper(island, member, settings, log)
    )


def _regroups(process: Process, member: Leader | Follower) -> bool:
    """Whether the generation alone has ended, and not the learner; then all processes have taken leave of one another."""
    part, run = member.part, process.thread.run
    said = Told("end", REGROUP if member.regroups else "") if isinstance(member, Leader) else None
    if run(part.group.hear_leader(Told, "end", said), lambda: False).text != REGROUP:
        return False
    run(part.group.farewell(), lambda: False)
    if isinstance(member, Leader):
        member.tape.flush()
    process.log.info("island_regroups", generation=part.group.generation, steps=part.course.step)
    return True


def _take_up(process: Process, member: Leader | Follower, island: Island) -> bool:
    """Begin with the optimizer state that a learner of the run before has ended with, if all processes find the same one.

    A run that has merged something by now has newer ones to lend.
    """
    part, continued = member.part, process.run.created.continues
    if continued is None:
        return False
    said = Told("begins", "" if member.learner.peers() else BEGINS) if isinstance(member, Leader) else None
    if process.wait(part.group.hear_leader(Told, "begins", said)).text != BEGINS:
        return False
    settings, run = process.settings, bytes.fromhex(continued.identity)
    before = checkpoint.state_before(island, settings.state_dir, settings.name, run, process.log)
    found = None if before is None else f"{before.learner}, {before.saved.state_hash.hex()}"
    if process.wait(part.group.difference("before", {"state before": found})) or before is None:
        return False
    checkpoint.put(before.saved, island, optimizer_only=True)
    if isinstance(member, Leader):
        before.note(member, process.log)
    return True


def _borrow(process: Process, member: Leader | Follower, island: Island) -> None:
    """Borrow an optimizer state: each process the chunks of its own shards, and all of one copy of one peer, or none.

    Parameters are the log's, and the run is asked for nothing that it has not merged anything of. The leader decides for all
    whether the loan is old, and asked for once more.
    """
    part = member.part
    said = Told("peers", ",".join(member.loans.watch(member.learner.peers()))) if isinstance(member, Leader) else None
    names = process.wait(part.group.hear_leader(Told, "peers", said)).text
    layout, loan = island.optimizer_layout(), None
    if names and layout.arrays:
        subjects, wanted = Subjects(part.run.name), island.wanted(optimizer_only=True)
        asker = skeleton.process_name(process.settings)
        borrower = Borrower(part.transport, part.run.identity, subjects, asker, layout, wanted, island.put, process.log)
        peers = names.split(",")
        loan = _all_of_one(process, part, "loan", process.wait(borrower.borrow(peers)))
        if loan is not None:
            said = (
                Told("loan, again", AGAIN if member.loans.must_ask_again(loan) else "") if isinstance(member, Leader) else None
            )
            if process.wait(part.group.hear_leader(Told, "loan, again", said)).text == AGAIN:
                loan = _all_of_one(process, part, "newer loan", process.wait(borrower.borrow_newer(loan, peers)))
                if isinstance(member, Leader):
                    member.loans.note_age(loan)
        if loan is None:
            island.forget_optimizer()
    if isinstance(member, Leader):
        member.note_optimizer(loan)


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


async def make_member(process: Process, fragments: FragmentMap, group: Group, island: Island) -> Leader | Follower:
    """Return this process's part: the leader, or one that follows. Call it in the loop's thread."""
    transport, run, log = process.transport, process.run, process.log
    layouts = [island.row_layout(fragment, group.size) for fragment in fragments.fragments]
    dealt = carriers([fragment.size for fragment in fragments.fragments], group.size)

    def read(index: int) -> Any:
        return island.read(fragments.fragments[index]).to_host()

    def make(store: Log, refused: Counted) -> Part:
        group.links.sign_of_life = lambda: Ping(transport.bytes_out, transport.bytes_in, refused.total)
        return Part(transport, run, group, store, layouts, dealt, read, refused, log, process.exporter.telemetry)

    own = [index for index, carrier in enumerate(dealt) if carrier == group.place]
    log.info("carries", fragments=own, parameters=sum(fragments.fragments[index].size for index in own))
    if group.place == LEADER:
        tape = TapeFile(process.settings.state_dir, process.settings.name, run.identity, log)

        def lead(leader: Leader) -> Part:
            return make(leader.store, leader.refused)

        return Leader(transport, run, fragments, process.settings, log, tape, lead, layouts)
    store = Log(transport, run.name, run.identity, fragments, run.created)
    return Follower(make(store, Counted(log)), fragments, store)


class DecidedBatches(Iterator[Batch]):
    """The batches that the leader decides on, for a process that does not lead; each is made once it is decided."""

    def __init__(self, task: Task, settings: RunSettings, follower: Follower, rows: range | None) -> None:
        self.follower, self._streams = follower, Streams(task, settings, rows)

    def __next__(self) -> Batch:
        """Return the batch of the step after the next decision, once there is one.

        Raises:
            DataError: its data cannot be had here.
        """
        share, index = self.follower.next_batch()
        return Batch(share, index, self._streams.batch(share, index))
