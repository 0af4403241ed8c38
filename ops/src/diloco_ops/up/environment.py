"""The environment of the services that a command starts: threads, and the devices that each learner sees.

A value that the user has set stays. Of ``DILOCO_*`` only settings that all learners may share are handed on, to learners alone,
``DILOCO_TELEMETRY``, to all services, and ``DILOCO_METRICS_ADDRESS``, to each with a port of its own: the others are of single
services, or the command says them itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.core.run import tape
from diloco.errors import SettingsError
from diloco.nats.connection import malloc_environment
from diloco.settings.service import MeshSettings, host_and_port
from diloco.settings.validation import parse, shown
from diloco_ops.up import pages

ONE_THREAD = {  # of computation, for a process that shares this machine's cores with others
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "PJRT_NPROC": "1",  # JAX 0.10 has a pool of a thread a core else, whatever XLA_FLAGS says
}
MESH = "DILOCO_MESH"
OF_ALL = ("DILOCO_TELEMETRY",)
METRICS = "DILOCO_METRICS_ADDRESS"
MOST_PORT = 65535
OF_LEARNERS = ("DILOCO_CACHE_DIR", "DILOCO_CHECKPOINT_S", "DILOCO_LEAVE_S", "DILOCO_SAMPLE_EVERY_S", "DILOCO_ALLOW_CODE")
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")  # its nvidia0, nvidia1, ... are there in containers that do not see the driver's folder


def service_environment() -> dict[str, str]:
    """Return the environment of a service: this machine's cores are shared, so each has one thread of computation."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_") or name in OF_ALL}
    return malloc_environment() | ONE_THREAD | own | {"XLA_FLAGS": _flags(own.get("XLA_FLAGS", ""))}


def learner_environment(index: int, learners: int, devices: int | None) -> dict[str, str]:
    """Return the environment of the ``index``-th learner. Each learner gets the given number of devices.

    None: as many as JAX finds, or an even share of the GPUs. An evaluator's index is the number of learners.
    """
    values = service_environment()
    values |= {name: os.environ[name] for name in OF_LEARNERS if name in os.environ}
    if devices is not None and tape.CPU_DEVICES not in values["XLA_FLAGS"]:
        values.setdefault(CPU_DEVICES, str(devices))
    found = gpus(values)
    if found:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(dealt(found, index, learners, devices))
        if (learners + 1) * (devices or max(1, len(found) // learners)) > len(found):
            values.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # shared: no process takes most of their memory
    return values


def per_process(devices: int | None, processes: int) -> int | None:
    """Return the number of devices of each process of a learner; None: as many as JAX finds.

    Raises:
        SettingsError: the processes do not divide them.
    """
    if devices is not None and devices % processes:
        raise SettingsError(
            f"--devices-per-learner {devices}: not divisible by {processes} processes (--processes-per-learner): each "
            "process needs the same number of devices"
        )
    return None if devices is None else devices // processes


def check_least(least: int, processes: int, devices: int | None) -> None:
    """Check that ``least`` processes of a learner can continue without the others.

    Raises:
        SettingsError: there are not as many, or the mesh cannot shrink so far.
    """
    if least > processes:
        raise SettingsError(
            f"--least-processes {least}: expected 1 to {processes}, as each learner has {processes} (--processes-per-learner)"
        )
    mesh = parse(MeshSettings, mesh_of(devices, processes if least < processes else 1) or {}, f"environment: {MESH}")
    if mesh.of(least, processes) is None:
        raise SettingsError(
            f"--least-processes {least} of {processes}: mesh.data = {mesh.data} ({MESH}) cannot shrink so far: mesh.data "
            f"* {least} / {processes} must be a whole number"
        )


def mesh_of(devices: int | None, replicas: int = 1) -> dict[str, int] | None:
    """Return the learners' setting ``mesh``: DILOCO_MESH, its product being ``devices`` if given.

    Else so many ``replicas``, and fsdp over the devices of each; None if there is nothing to say.

    Raises:
        SettingsError: DILOCO_MESH is no mesh.
    """
    text = os.environ.get(MESH)
    if text is None:
        data = {} if replicas == 1 else {"data": replicas}
        return (data or None) if devices is None else data | {"fsdp": devices // replicas}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise SettingsError(f'environment: {MESH} = {shown(text)}: expected JSON such as {{"data": 2}}')
    mesh = parse(MeshSettings, given, f"environment: {MESH}")
    if mesh.fsdp is None and devices is not None:
        mesh = mesh.model_copy(update={"fsdp": max(1, devices // (mesh.data * mesh.tensor))})
    return mesh.model_dump(exclude_none=True)


def metrics_addresses(count: int) -> list[str]:
    """Return the metrics addresses of ``count`` services: DILOCO_METRICS_ADDRESS and the ports after it; without it, none.

    Raises:
        SettingsError: it is no address, or one of the ports is taken, or is none.
    """
    text = os.environ.get(METRICS, "")
    if not text:
        return []
    try:
        host, first = host_and_port(text)
    except ValueError as error:
        raise SettingsError(f"environment: {error}") from None
    if first == 0:
        return [pages.address(host, 0)] * count
    last = first + count - 1
    if last > MOST_PORT:
        raise SettingsError(
            f"environment: {METRICS} = {text}: {count} services need a port each from there on, and {MOST_PORT} is the last one"
        )
    if taken := [port for port in range(first, last + 1) if not pages.is_free(host, port)]:
        raise SettingsError(
            f"environment: {METRICS} = {text}: the run's {count} services take ports {first} to {last}, and {taken[0]} "
            "is in use; give another first port, or 0 for any"
        )
    return [pages.address(host, port) for port in range(first, last + 1)]


def gpus(values: Mapping[str, str]) -> list[str]:
    """Return the GPUs that learners may use, as CUDA_VISIBLE_DEVICES names them: those that it names, or all that there are."""
    if values.get("JAX_PLATFORMS") == "cpu":
        return []
    visible = values.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    found = list(NVIDIA_GPUS.glob("*")) or list(DEVICES.glob("nvidia[0-9]*"))
    return [str(number) for number, _ in enumerate(found)]


def dealt(found: Sequence[str], index: int, learners: int, devices: int | None) -> list[str]:
    """Return the GPUs of the ``index``-th learner: its own if there are enough, otherwise shared ones."""
    each = devices or max(1, len(found) // learners)
    return [found[(index * each + number) % len(found)] for number in range(min(each, len(found)))]


def _flags(given: str) -> str:
    """Return XLA's flags: all that are given, and ours, but for those that are given."""
    ours = [flag for flag in ONE_THREAD["XLA_FLAGS"].split() if flag.partition("=")[0] not in given]
    return " ".join([given, *ours]).strip()  # XLA reads no further than a word without dashes, as our last one is
