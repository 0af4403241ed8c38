"""One process of a learner of several: what it does once all have met and have a model, whatever framework computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco.core.run import tape as events
from diloco.core.tensors.fragments import FragmentMap
from diloco.core.tensors.rows import LEADER, carriers
from diloco.log.log import Log
from diloco.member.peer import Borrower, Loan
from diloco.process.observe import Counted
from diloco.process.tape import TapeFile
from diloco.processes.follower import Follower, ProcessSide
from diloco.processes.group import Group
from diloco.processes.leader import Leader
from diloco.processes.part import Part
from diloco.service import skeleton
from diloco.settings.service import MeshSettings
from diloco.wire.process_messages import Ping
from diloco.wire.subjects import Subjects
from diloco_learner.api.model import SharedModel
from diloco_learner.run import checkpoint
from diloco_learner.run.process import LearnerProcess, make_trainer
from diloco_learner.run.sides import FollowingSide, LeadingSide, Side
from diloco_learner.task_api import Batches


async def make_side(process: LearnerProcess, fragments: FragmentMap, group: Group, model: SharedModel) -> Side:
    """Return this process's side: it leads, or follows. Call it in the loop's thread."""
    transport, run, log = process.transport, process.run, process.log
    layouts = [model.row_layout(fragment, group.size) for fragment in fragments.fragments]
    dealt, refused = carriers([fragment.size for fragment in fragments.fragments], group.size), Counted(log)

    def read(index: int) -> Any:
        return model.read(fragments.fragments[index]).to_host()

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


def train(
    process: LearnerProcess,
    side: Side,
    model: SharedModel,
    task: Batches,
    *,
    tokens_per_batch: int,
    rows: range | None,
    about: Sequence[events.TapeEvent],
    mesh: MeshSettings,
) -> None:
    """Join the run, and train until it is over, or until one of the processes is asked to end.

    ``rows``: those that this process makes of each batch (None: all). ``about``: what the learner's tape says of its machines.
    """
    its, part = side.its, side.its.part
    renewal = part.group.renewal
    side.join([*about, events.Apart()] if model.apart else about)
    if not side.restore(model):
        side.begin_from_log(tokens_per_batch)
        if not _take_up(process, its, model):
            _borrow(process, its, model)
    keeper = side.keeper(model)
    changing = None if renewal is None else renewal.guard(its, model.settled, mesh, process.stopping)
    batches = side.batches(task, rows)
    trainer = make_trainer(
        process,
        tokens_per_batch,
        model,
        its.steered,
        batches,
        keeper.at_boundary,
        look_ahead=side.look_ahead,
        changing=changing,
    )
    side.show(trainer.instruments)
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


def _regroups(process: LearnerProcess, its: ProcessSide) -> bool:
    """Whether the generation alone has ended, and not the learner; then all processes have taken leave of one another."""
    part, run = its.part, process.thread.run
    if not run(its.is_for_larger_generation(), lambda: False):
        return False
    run(part.group.farewell(), lambda: False)
    its.tape.flush()
    process.log.info("island_regroups", generation=part.group.generation, steps=part.course.step)
    return True


def _take_up(process: LearnerProcess, its: ProcessSide, model: SharedModel) -> bool:
    """Begin with the optimizer state that a learner of the run before has ended with, if all processes find the same one.

    A run that has merged something by now has newer ones to lend.
    """
    continued = process.run.created.continues
    if continued is None or not process.wait(its.takes_up_state_before()):
        return False
    settings, run = process.settings, bytes.fromhex(continued.identity)
    before = checkpoint.state_before(model, settings.state_dir, settings.name, run, process.log)
    found = None if before is None else f"{before.learner}, {before.saved.state_hash.hex()}"
    if process.wait(its.part.group.difference("before", {"state before": found})) or before is None:
        return False
    checkpoint.put(before.saved, model, optimizer_only=True)
    its.note_state_before(before.learner, before.saved.digest)
    return True


def _borrow(process: LearnerProcess, its: ProcessSide, model: SharedModel) -> None:
    """Borrow an optimizer state: each process the chunks of its own shards, and all of one copy of one peer, or none.

    Parameters are the log's, and the run is asked for nothing that it has not merged anything of. The leader decides for all
    whether the loan is old, and asked for once more.
    """
    part, peers = its.part, process.wait(its.loan_peers())
    layout, loan = model.optimizer_layout(), None
    if peers and layout.arrays:
        borrower = Borrower(
            part.transport,
            run=part.run.identity,
            subjects=Subjects(part.run.name),
            name=skeleton.process_name(process.settings),
            layout=layout,
            wanted=model.wanted(optimizer_only=True),
            put=model.put,
            log=process.log,
        )
        loan = _all_of_one(process, part, "loan", process.wait(borrower.borrow(peers)))
        if loan is not None and process.wait(its.must_ask_again(loan)):
            loan = _all_of_one(process, part, "newer loan", process.wait(borrower.borrow_newer(loan, peers)))
            its.note_newer_loan(loan)
        if loan is None:
            model.forget_optimizer()
    its.note_optimizer(loan)


def _all_of_one(process: LearnerProcess, part: Part, stage: str, loan: Loan | None) -> Loan | None:
    """Return a process's loan if all processes have one of the same copy; None if they do not."""
    found = None if loan is None else f"{loan.peer}, step {loan.step}, {loan.content_hash.hex()}"
    return None if process.wait(part.group.difference(stage, {"loan": found})) else loan
