"""A learner of several processes that compute with PyTorch: how they become ranks of one process group, agree, and train.

:mod:`diloco.processes.group` connects them. What each does from then on knows no framework (:mod:`diloco_learner.run.several`).
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from blake3 import blake3
from torch import distributed

from diloco.core.run import tape
from diloco.core.tensors.rows import LEADER
from diloco.errors import IslandError, SettingsError
from diloco.processes.group import Group, common_facts
from diloco.processes.proving import OPEN
from diloco.settings.service import TorchLearnerSettings
from diloco.wire.process_messages import facts
from diloco_learner.pytorch.beginning import begin, machine
from diloco_learner.pytorch.processes.batches import as_bytes
from diloco_learner.pytorch.processes.process_mesh import ProcessMesh, axis_sizes
from diloco_learner.run import several
from diloco_learner.run.process import LearnerProcess
from diloco_learner.run.several import LettingGo, own_errors_first

SHARDING = "torch.distributed.fsdp"


def mesh_sizes(settings: TorchLearnerSettings) -> dict[str, int]:
    """Return the processes along each axis of a learner's mesh.

    Raises:
        SettingsError: they are more or fewer than the learner has; or it is to be what no torch learner of several can be.
    """
    count, least = settings.processes.count, settings.processes.least
    if settings.role != "learner" and count > 1:
        raise SettingsError("processes.count: an evaluator is one process")
    if least not in (None, count):
        raise SettingsError(f"processes.least = {least}: a torch learner has a fixed number of processes: leave it out")
    return axis_sizes(settings.mesh, count)


def work(process: LearnerProcess, settings: TorchLearnerSettings, sizes: Mapping[str, int]) -> None:
    """Train as one of a learner's processes until the run is over, or one of them is asked to end."""
    importlib.import_module(SHARDING)  # now: it takes seconds, in which the others would miss a process that they have met
    process.exporter.starting = "the other processes of this learner"
    group = process.wait(_meet(process, settings))
    process.stack.push(LettingGo(group, process.thread.run, distributed.destroy_process_group))
    connect_torch(group)
    process.stack.enter_context(own_errors_first(group))
    begun = begin(process, settings, ProcessMesh(sizes, group.place))
    island, task = begun.island, begun.task
    found = {"device": island.device, "fragments": begun.fragments.digest.hex(), "tokens": task.tokens_per_batch}
    process.wait(group.agree("model", found | {"first batch": blake3(as_bytes(begun.first)).hexdigest(8)}))
    island.rehearse(begun.first)
    process.wait(group.agree("state", {"optimizer state": island.optimizer_layout().digest.hex()}))
    island.exchange_parts()
    side = process.wait(several.make_side(process, begun.fragments, group, island))
    process.at_end(side.its.close)
    side.check_batch(task.tokens_per_batch)
    process.exporter.starting = "the run's log to be read"
    about = [machine(), tape.Mesh(sizes["data"], sizes["fsdp"], sizes["tensor"]), tape.Processes(group.size)]
    several.train(process, side, island, task, tokens_per_batch=task.tokens_per_batch, rows=None, about=about)


async def _meet(process: LearnerProcess, settings: TorchLearnerSettings) -> Group:
    """Meet the learner's other processes. Call it in the loop's thread.

    Raises:
        SettingsError: they differ.
        IslandError: they do not come, or cannot be reached.
    """
    identity, run = process.transport.identity, process.run
    group = Group(settings, run.identity, process.log, OPEN if identity is None else identity.meeting_key)
    found = common_facts(run) | {"torch": torch.__version__}
    found |= {"mesh": settings.mesh.model_dump_json(), "slow": settings.slow, "task": settings.task}
    await group.meet(facts(found), int(1000 * time.time()))
    return group


def connect_torch(group: Group) -> None:
    """Make the process group of torch, whose ranks are the learner's processes by place. Each takes a GPU, where it sees some.

    Raises:
        IslandError: it cannot.
    """
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(group.place % torch.cuda.device_count())
    host, port = group.coordinator
    try:
        within = timedelta(seconds=group.settings.start_s)
        store = distributed.TCPStore(host, port, group.size, group.place == LEADER, timeout=within)
        distributed.init_process_group(backend, store=store, rank=group.place, world_size=group.size)
    except RuntimeError as error:
        raise IslandError(f"learner {group.name}, process {group.index}: torch cannot connect its processes: {error}") from None


def exit_from_torch(code: int) -> None:
    """End a process at once that has not left its process group: a thread of it may wait for others that never answer again."""
    if distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
