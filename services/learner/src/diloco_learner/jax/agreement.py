"""Agreement of a learner's processes before they compute together, and the way they meet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from blake3 import blake3
from jax.sharding import Mesh

from diloco.control.creation import KnownRun
from diloco.errors import SettingsError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.processes.group import Group, common_facts
from diloco.processes.proving import OPEN
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.wire.process_messages import Facts, facts
from diloco_learner.jax.mesh import axis_sizes, check_rows, partitions, rows_alone, shapes_of
from diloco_learner.jax.tree import ModelTree
from diloco_learner.task import Task, makes_rows, rows_of
from diloco_learner.task_api import next_batch


def check(settings: LearnerSettings) -> None:
    """Refuse what several processes cannot do.

    Raises:
        SettingsError: the setting and what to do are named.
    """
    if settings.role != "learner":
        raise SettingsError("processes.count: an evaluator is one process")
    own, mesh = settings.processes, settings.mesh
    if own.elastic and mesh.of(own.least or 1, own.count) is None:
        raise SettingsError(
            f"processes.least = {own.least} of {own.count}: mesh.data = {mesh.data} cannot shrink so far: set mesh.data "
            f"so that mesh.data * {own.least} / {own.count} is a whole number, such as {own.count}, or leave "
            "processes.least out"
        )


def first_facts(settings: LearnerSettings, run: KnownRun) -> Facts:
    """Return what processes have to agree on before JAX begins."""
    return facts(
        common_facts(run)
        | {
            "jax": jax.__version__,
            "mesh": settings.mesh.model_dump_json(),
            "slow": settings.slow,
            "least": settings.processes.least,
            "addresses": settings.processes.addresses if len(settings.processes.addresses) > 1 else None,
        }
    )


def model_facts(mesh: Mesh | None, task: Task, settings: RunSettings, first: Any) -> dict[str, Any]:
    """Return what they have to agree on before they compute together; ``first`` is the first batch of the first share."""
    devices = jax.devices()
    keyed, _ = jax.tree_util.tree_flatten_with_path(shapes_of(task, jax.random.key(settings.seed)))
    tensors = " ".join(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}" for path, leaf in keyed)
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": None if mesh is None else dict(mesh.shape),
        "model": blake3(tensors.encode()).hexdigest(8),
        "first batch": batch_digest(first),
    }


def rows_to_make(task: Task, settings: RunSettings, first: Any, own: range) -> range | None:
    """Return the rows that this process makes of each batch, ``own``; None: its task makes whole batches alone.

    Raises:
        SettingsError: its rows are not those of the whole batch; ``first`` is the first one of the first share.
    """
    if not makes_rows(task):
        return None
    made = next_batch(task, task.batches(0, settings.learners, settings.seed, 0, rows=own), 0, 0)
    if batch_digest(made) != batch_digest(rows_alone(first, own, rows_of(task, first))):
        raise SettingsError(
            f"task.name = {settings.task.name!r}: batches(..., rows={own}) gives other rows than the whole batch has: row "
            "i must not depend on the requested rows, and arrays without rows must be whole"
        )
    return own


def program_facts(step: Sequence[jax.stages.Lowered]) -> dict[str, Any]:
    """Return what they have to agree on before they step: its programs."""
    return {"step": blake3("".join(program.as_text() for program in step).encode()).hexdigest(8)}


def check_meshes(settings: LearnerSettings, task: Task, run: RunSettings, first: Any) -> None:
    """Check that the tensors and the batches of a task fit the meshes of all generations that the learner may have.

    Raises:
        SettingsError: they do not fit one.
    """
    own, count = settings.processes, settings.processes.count
    tree = ModelTree(task, shapes_of(task, jax.random.key(run.seed)))
    for size in own.sizes(settings.mesh):
        mesh = settings.mesh.of(size, count)
        assert mesh is not None
        try:
            sizes = axis_sizes(mesh, size * jax.local_device_count(), jax.default_backend())
            partitions(task, tree, sizes)
            check_rows(rows_of(task, first), sizes)
        except SettingsError as error:
            if size == count:
                raise
            raise SettingsError(
                f"processes.least = {own.least}: the learner may continue with {size} of {count} processes (mesh.data = "
                f"{mesh.data}): {error}"
            ) from None


def batch_digest(batch: Any) -> str:
    """Return a digest of a batch: equal ones have equal arrays in equal places."""
    leaves, structure = jax.tree.flatten(batch)
    digest = blake3(str(structure).encode())
    for leaf in leaves:
        values = np.ascontiguousarray(leaf)
        digest.update(f"{values.dtype}{values.shape}".encode() + values.tobytes())
    return digest.hexdigest(8)


async def meet(settings: LearnerSettings, run: KnownRun, transport: NatsTransport, log: Logger) -> Group | None:
    """Meet the learner's other processes. Call it in the loop's thread.

    None if the run is over, and no process may come any more: of a learner that goes on with fewer.

    Raises:
        SettingsError: they differ.
        IslandError: they do not come, or cannot be reached.
    """
    identity = transport.identity
    key = OPEN if identity is None else identity.meeting_key
    first, generation = first_facts(settings, run), int(1000 * time.time())
    if settings.processes.elastic:
        from diloco.elastic import coming  # a learner of a fixed size has none of it

        group = coming.make_group(settings, run, key, log)
        return group if await coming.meet(group, first, generation, run, transport, log) else None
    group = Group(settings, run.identity, log, key)
    await group.meet(first, generation)
    return group
