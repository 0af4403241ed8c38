"""``diloco-learner``: one island as a process, or (role ``evaluator``) one that only watches the global model.

Two threads: JAX steps in the main one, everything that talks to NATS in the other, which runs the asyncio loop.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from jax.sharding import Mesh

from diloco.control.creation import Run
from diloco.core import tape as events
from diloco.core.fragments import FragmentMap
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.tape import TapeFile
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.settings.service import LearnerSettings
from diloco_learner import agreement, checkpoint, programs, replay, together
from diloco_learner.beginning import Beginning, LoopThread, Process, make_trainer, set_up_jax
from diloco_learner.evaluator import Evaluator
from diloco_learner.feed import Feed
from diloco_learner.island import Island
from diloco_learner.mesh import make_mesh
from diloco_learner.metrics import ObservedMember
from diloco_learner.task import Task


async def _find(settings: LearnerSettings, exporter: Exporter, log: Logger) -> tuple[NatsTransport, Run]:
    await exporter.start()
    transport = exporter.transport = await service.connect(settings, settings.role, log, settings.processes)
    return transport, await service.find_run(transport, settings, log)


async def _member(process: Process, fragments: FragmentMap) -> Member:
    settings, run, log = process.settings, process.run, process.log
    tape = TapeFile(settings.state_dir, settings.name, run.identity, log) if settings.role == "learner" else None
    return Member(process.transport, run, fragments, settings, log, tape)


def _train(process: Process, task: Task, island: Island, mesh: Mesh | None, member: Member) -> None:
    """Train until the run is over or this process is asked to end, and save its state."""
    settings, log, run = process.settings, process.log, process.run
    member.tape.record(replay.machine())
    if mesh is not None:
        member.tape.record(replay.mesh_event(mesh))
    keeper = checkpoint.Keeper(island, member, settings, log)
    feed = Feed(task, run.created, member.leased, log)
    trainer = make_trainer(process, task, island, member, feed, keeper.at_boundary)
    try:
        finished = trainer.run()
    finally:
        keeper.close()
    member.tape.record(events.End(finished, replay.parameters_digest(island, member.map)))
    keeper.save_last()  # of a run that is over, too: another one may continue it


def _work_alone(process: Process, mesh: Mesh | None) -> None:
    """Train, or evaluate, as the only process of a learner."""
    settings, learns = process.settings, process.settings.role == "learner"
    beginning = Beginning(process, lambda name: programs.compiled_once(settings.cache_dir, name, process.stopping))
    task = beginning.task
    island, fragments = beginning.make_island(mesh, copies=learns)
    member = process.wait(_member(process, fragments))
    process.at_end(member.close)
    if learns:
        member.admission.check_batch(task.tokens_per_batch)
        beginning.compile_step(island.trace(beginning.first))
        island.rehearse(beginning.first)
    beginning.over()
    process.wait(member.join(lambda fragment: island.read(fragment).to_host()))
    process.exporter.observed = ObservedMember(member, process.transport, process.exporter.labels())
    if not learns:
        run = process.run.created
        Evaluator(island, member, run, settings.state_dir, process.log, stopping=process.stopping).run()
        return
    if not checkpoint.restore(settings, island, member, process.log):
        member.count_steps(task.tokens_per_batch)
        wanted = island.wanted(optimizer_only=True)
        if not checkpoint.take_up(island, member, settings.state_dir, process.log) and (
            process.wait(member.borrow(island.optimizer_layout(), wanted, island.put)) is None
        ):
            island.forget_optimizer()
    _train(process, task, island, mesh, member)


def work(settings: LearnerSettings, stopping: Callable[[], bool]) -> None:
    """Join the run and train, or evaluate, until it is over or this process is asked to end."""
    set_up_jax(settings)
    alone = settings.processes.count == 1
    if not alone:
        agreement.check(settings)
    mesh = make_mesh(settings.mesh) if alone else None
    log, thread = observe.get_logger(), LoopThread()
    exporter = Exporter(settings, settings.role, log)
    with ExitStack() as stack:
        stack.callback(thread.close)
        stack.callback(lambda: thread.run(exporter.close(), lambda: False))
        transport, run = thread.run(_find(settings, exporter, log), stopping)
        stack.callback(lambda: thread.run(transport.close(), lambda: False))
        process = Process(settings, run, transport, thread, exporter, stack, stopping, log)
        if alone:
            _work_alone(process, mesh)
        else:
            together.work(process)


def _main() -> int:
    settings = service.parse_settings(LearnerSettings, "diloco-learner")
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    work(settings, stop.is_set)
    observe.get_logger().info("stopped", asked=stop.is_set())
    return 0


def main() -> None:
    """Console script."""
    code = observe.run_main(_main, "diloco-learner")
    together.exit_from_jax(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
