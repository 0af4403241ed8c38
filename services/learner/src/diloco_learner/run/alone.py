"""A learner or an evaluator of one process, from the moment at which it has a model, independent of the framework."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from diloco.core.run import tape as events
from diloco.core.tensors.fragments import FragmentMap
from diloco.member.member import Member
from diloco.process.tape import TapeFile
from diloco_learner.api.model import Model, parameters_digest
from diloco_learner.data.feed import BatchFeed
from diloco_learner.run import checkpoint
from diloco_learner.run.evaluator import Evaluator
from diloco_learner.run.learner_metrics import ObservedMember
from diloco_learner.run.process import LearnerProcess, make_trainer
from diloco_learner.task_api import Batches


def make_member(process: LearnerProcess, fragments: FragmentMap) -> Member:
    """Return the member of this process, which is closed at the end."""
    member = process.wait(_member(process, fragments))
    process.at_end(member.close)
    return member


async def _member(process: LearnerProcess, fragments: FragmentMap) -> Member:
    settings, run, log = process.settings, process.run, process.log
    tape = TapeFile(settings.state_dir, settings.name, run.identity, log) if settings.role == "learner" else None
    return Member(
        transport=process.transport,
        run=run,
        fragment_map=fragments,
        settings=settings,
        log=log,
        tape=tape,
        telemetry=process.exporter.telemetry,
    )


def work(
    process: LearnerProcess,
    model: Model,
    member: Member,
    task: Batches,
    tokens_per_batch: int,
    about: Sequence[events.TapeEvent],
) -> None:
    """Join the run, and train or evaluate until it is over, or until this process is asked to end.

    ``about``: what a learner's tape says of its machine.
    """
    settings = process.settings
    joining = process.thread.begin(member.join(lambda fragment: model.read(fragment).to_host()))
    states = checkpoint.own_states(settings, model, process.run.identity, process.log)
    # to read and hash the newest one may take as long as to read the log, and needs nothing of it
    newest = list(islice(states, 1)) if settings.role == "learner" else []
    process.thread.finish(joining, process.stopping)
    process.exporter.observed = ObservedMember(member, process.transport, process.exporter.labels())
    if settings.role != "learner":
        run = process.run.created
        Evaluator(
            model,
            member,
            run,
            settings.state_dir,
            process.log,
            sample_every_s=settings.sample_every_s,
            stopping=process.stopping,
        ).run()
        return
    if not checkpoint.restore(chain(newest, states), model, member, process.log):
        member.count_steps()
        wanted = model.wanted(optimizer_only=True)
        if not checkpoint.take_up(model, member, settings.state_dir, process.log) and (
            process.wait(member.borrow(model.optimizer_layout(), wanted, model.put)) is None
        ):
            model.forget_optimizer()
    for event in about:
        member.tape.record(event)
    _train(process, model, member, task, tokens_per_batch)


def _train(process: LearnerProcess, model: Model, member: Member, task: Batches, tokens_per_batch: int) -> None:
    """Train until the run is over or this process is asked to end, and save its state."""
    settings, log, run = process.settings, process.log, process.run
    keeper = checkpoint.CheckpointKeeper(model, member, settings, log)
    feed = BatchFeed(task, run.created, member.leased, log)
    trainer = make_trainer(process, tokens_per_batch, model, member, feed, keeper.at_boundary)
    member.show(trainer.instruments)
    try:
        finished = trainer.run()
    finally:
        keeper.close()
    member.tape.record(events.End(finished, parameters_digest(model, member.map)))
    keeper.save_last()  # of a run that is over, too: another one may continue it
    process.wait(member.refusals.check())
