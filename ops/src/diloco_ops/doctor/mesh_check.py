"""A learner of several devices or hosts: whether its mesh fits, and whether its processes find each other.

``python -m diloco_learner.fit`` looks at devices, tensors and batches. It is a process of its own, since JAX holds a GPU's
memory for as long as its process lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import DilocoError
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings, MeshSettings, ProcessesSettings, host_and_port
from diloco_ops.doctor.check import Check, skipped
from diloco_ops.doctor.machine import refusal_to_listen
from diloco_ops.doctor.reach import REFUSED, Reached, reach

FIT_S = 120.0  # JAX begins, and a task's data is opened


@dataclass(frozen=True)
class IslandFit:
    """The devices of this process, the mesh of all, and what has to be the same in all processes: ``diloco_learner.fit``."""

    devices: int
    platform: str
    mesh: Mapping[str, int]
    facts: Mapping[str, str]
    wrong: str = ""


def is_island(settings: LearnerSettings) -> bool:
    """Whether there is a mesh or there are processes to look at."""
    return settings.mesh != MeshSettings() or settings.processes.count > 1


async def measure(settings: LearnerSettings, run: RunSettings | None) -> IslandFit:
    """Return what a learner of these settings would find here. ``run``: None where it is not known yet.

    Raises:
        DilocoError: it cannot be found out; or the run's task or data are not fit to train on.
    """
    own = settings.model_dump(mode="json", include=set(LearnerSettings.model_fields))
    request = json.dumps({"learner": own, "run": None if run is None else run.model_dump(mode="json")})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "diloco_learner.fit"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    try:
        async with asyncio.timeout(FIT_S):
            out, err = await process.communicate(request.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise DilocoError(f"JAX has not found its devices within {FIT_S:g} s") from None
    if process.returncode:
        said = err.decode(errors="replace").strip().splitlines()
        raise DilocoError(said[-1] if said else f"diloco_learner.fit ended with {process.returncode}")
    return IslandFit(**json.loads(out))


async def meeting(settings: ProcessesSettings) -> tuple[str, Reached]:
    """Return why this process cannot listen at its own address, if it has one, and how another one reaches process 0."""
    own, first = settings.own_address, settings.addresses[0]
    refusal = "" if own is None else await asyncio.to_thread(refusal_to_listen, own)
    return refusal, Reached(first) if settings.index == 0 else await reach(f"tcp://{first}")


def own_address() -> str:
    """Return the address that this host's name resolves to; empty: it resolves to none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


# ---- verdicts


def mesh(fit: IslandFit, processes: int, *, run_known: bool) -> Check:
    """Judge the mesh by the devices and, where the run is known, by its tensors and batches."""
    each = f"{fit.devices} devices ({fit.platform})"
    found = each if processes == 1 else f"{each} here, {processes * fit.devices} of {processes} processes"
    if fit.wrong:
        return Check("mesh", "failed", f"{found}: {fit.wrong}")
    axes = ", ".join(f"{axis} {size}" for axis, size in fit.mesh.items())
    fits = "fits the run's tensors and batches" if run_known else "tensors and batches are unknown until the run exists"
    return Check("mesh", "ok", f"{found}: {axes}; {fits}")


def meets(settings: ProcessesSettings, refusal: str, reached: Reached) -> Check:
    """Judge the addresses at which the processes meet, as :func:`meeting` finds them."""
    address, index = settings.addresses[0], settings.index
    if refusal:
        remedy = f"set an address of the host that process {index} runs on, and a free port"
        found = f"processes.address = {settings.own_address}: {refusal}"
        return Check("meeting", "failed", found, f"process {index} listens there", remedy)
    if index == 0:
        if _is_loopback(host_and_port(address, "processes.address")[0]):
            remedy = "correct only if all processes run on this host; otherwise set its address in their network"
            return Check("meeting", "warning", f"processes.address = {address} can be reached only from this host", "", remedy)
        return Check("meeting", "ok", f"process 0 can listen at {address}")
    if not reached.error:
        return Check("meeting", "ok", f"{address} is reached in {1e3 * reached.connect_s:.3g} ms")
    if reached.error == REFUSED:
        return Check("meeting", "ok", f"the host of {address} answers; process 0 listens there while it waits for others")
    remedy = "correct the address, or make it reachable (DNS, firewall): a learner's hosts need all ports between them"
    return Check("meeting", "failed", f"processes.address = {address}: {reached.error}", "process 0 there", remedy)


def host_name(name: str, address: str, meeting_host: str) -> Check:
    """Judge the address that this host's name resolves to: collectives on a CPU (gloo) listen there, and the others connect."""
    needed = "an address that the other hosts can reach, because collectives on a CPU listen there"
    remedy = f"give {name} its address in their network, in /etc/hosts or DNS"
    if not address:
        return Check("host name", "failed", f"{name} is not resolved", needed, remedy)
    if _is_loopback(address) and not _is_loopback(meeting_host):
        return Check("host name", "failed", f"{name} is {address}, which other hosts cannot reach", needed, remedy)
    return Check("host name", "ok", f"{name} is {address}")


def facts(fit: IslandFit) -> Check:
    """Show what processes compare when they meet, to be compared with the doctor's answers on the other hosts."""
    if not fit.facts:
        return skipped("facts", "unknown until the run exists, or because the mesh is refused")
    said = ", ".join(f"{name} {value}" for name, value in sorted(fit.facts.items()))
    digest = hashlib.blake2b(json.dumps(dict(fit.facts), sort_keys=True).encode(), digest_size=4).hexdigest()
    return Check("facts", "ok", f"{digest}: {said}", "equal values on all hosts of this learner")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
