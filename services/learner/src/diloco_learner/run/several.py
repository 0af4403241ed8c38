"""One process of a learner of several: what it does once all have met and have a model, whatever framework computes it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from diloco.core.run import tape as events
from diloco.core.tensors.fragments import FragmentMap
from diloco.core.tensors.rows import LEADER
from diloco.errors import IslandError
from diloco.member.peer import Borrower, Loan
from diloco.process.tape import TapeFile
from diloco.processes.follower import Follower, ProcessSide
from diloco.processes.group import Group
from diloco.processes.leader import Leader
from diloco.processes.part import Part, make_part
from diloco.service import skeleton
from diloco.wire.subjects import Subjects
from diloco_learner.api.model import SharedModel
from diloco_learner.run import checkpoint
from diloco_learner.run.process import LearnerProcess, make_trainer
from diloco_learner.run.sides import FollowingSide, LeadingSide, Side
from diloco_learner.task_api import Batches


async def make_side(process: LearnerProcess, fragments: FragmentMap, group: Group, model: SharedModel) -> Side:
    """Return this process's side: it leads, or follows. Call it in the loop's thread."""
    part = make_part(
        process.transport,
        process.run,
        group,
        fragments,
        deal=lambda carriers: model.deal_rows(fragments.fragments, carriers),
        read=lambda index: model.read(fragments.fragments[index]).to_host(),
        log=process.log,
        telemetry=process.exporter.telemetry,
    )
    if group.place == LEADER:
        tape = TapeFile(process.settings.state_dir, process.settings.name, process.run.identity, process.log)
        return LeadingSide(process, Leader(part, fragments, process.settings, process.log, tape))
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
    guard: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Join the run, and train until it is over, or until one of the processes is asked to end.

    ``rows``: those that this process makes of each batch (None: all). ``about``: what the learner's tape says of its machines.
    ``guard``: is called before the first step; the trainer enters its result while it goes from one boundary to the next.
    """
    its, part = side.its, side.its.part
    renewal = part.group.renewal
    side.join([*about, events.Apart()] if model.apart else about)
    if not side.restore(model):
        side.begin_from_log()
        if not _take_up(process, its, model):
            _borrow(process, its, model)
    keeper = side.keeper(model)
    batches = side.batches(task, rows)
    trainer = make_trainer(
        process,
        tokens_per_batch,
        model,
        its.steered,
        batches,
        keeper.at_boundary,
        look_ahead=side.look_ahead,
        changing=None if guard is None else guard(),
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


class LettingGo:
    """At the end of a ``with`` statement: let go of the other processes, unless it ends by an error, which they notice.

    ``disconnect`` ends what the framework has between them.
    """

    def __init__(
        self,
        group: Group,
        run: Callable[[Coroutine[Any, Any, None], Callable[[], bool]], None],
        disconnect: Callable[[], None],
    ) -> None:
        self.group, self.run, self.disconnect = group, run, disconnect

    def __call__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the connections, and the framework's."""
        self.group.ending()
        if error is None:
            self.run(self.group.close(), lambda: False)
            self.disconnect()


@contextmanager
def own_errors_first(group: Group) -> Iterator[None]:
    """Let an error of this process be what it ends with, and not that others end because of it."""
    try:
        yield
    except IslandError as error:
        group.end(error)
    except BaseException:
        group.ending()
        raise
