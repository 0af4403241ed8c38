"""Going on from a checkpoint of a whole run, in a new directory: ``diloco up --resume PATH``.

The new directory gets a server of its own with the log and the bucket as they were, shortened to the checkpoint's cut, and the
learners' states; in a run with regions each region's server gets the log, so that all of them hold what is committed. The run
keeps its name and its identity, so all hashes stay valid, and the changes made while it went on stay in force. The settings
that may be others now are :data:`diloco.settings.run.DEPLOYMENT`, regions among them; how many learners are started is the
launcher's choice anyway, since shares of the data are leased. With ``at`` every fragment begins again at that version, and
learners from the log.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.control import creation
from diloco.errors import RunError
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.places import has_scheme, parse_place
from diloco.settings.presets import changed_settings
from diloco.settings.run import DEPLOYMENT, RunSettings
from diloco.states import statefolder
from diloco_ops.broker.server import CONNECT_TIMEOUT_S
from diloco_ops.checkpoints import checkpoint, in_bucket, manifest, restore
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.reading import run_reader
from diloco_ops.up.embedded import Embedded


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint to go on from, and notes on the choice."""

    checkpoint: RunCheckpoint
    notes: list[str]


def find(given: str | Path, at: int | None = None) -> ResumeSource:
    """Find the checkpoint to go on from: what is given, or the newest whole one of the run whose directory it is.

    A place has checkpoints below it, or is one; it is brought to this machine.

    If there is none yet, take a checkpoint of the stopped run; of one that is over, too, where it is to begin again ``at`` an
    earlier version. A damaged one is passed over for an older whole one.

    Raises:
        RunError: there is none; the fault of every candidate is named.
        ObjectStoreError: its place cannot be read.
    """
    if has_scheme(str(given)):
        return ResumeSource(*in_bucket.find(parse_place(str(given), "--resume"), RunCheckpoint.check))
    path = Path(given)
    if (path / "run.json").exists():
        candidates = [folder for _, folder in sorted(manifest.numbered(path / manifest.FOLDER).items(), reverse=True)]
        if not candidates:
            return _of_stopped(path, at)
    else:
        number = int(path.name) if path.name.isdecimal() and path.exists() else 0
        siblings = sorted(manifest.numbered(path.resolve().parent).items(), reverse=True)
        candidates = [path, *(folder for at, folder in siblings if at < number)]
    notes: list[str] = []
    for folder in candidates:
        try:
            found = manifest.load(folder)
            found.check()
        except RunError as error:
            notes.append(f"{error}; passed over")
            continue
        if notes:
            notes.append(f"resuming from the older checkpoint {folder}")
        return ResumeSource(found, notes)
    raise RunError("; ".join(note.removesuffix("; passed over") for note in notes))


def _of_stopped(path: Path, at: int | None) -> ResumeSource:
    directory = rundir.load(path)
    if directory.finished and at is None:
        raise RunError(
            f"{path}: this run is finished (its report is {directory.report}) and has no checkpoint to go on from; for more "
            f"tokens: diloco up --continue {path} --tokens N; to begin again at an earlier version: --resume-at VERSION"
        )

    async def take() -> ResumeSource:
        async with run_reader.opened(path) as run:
            live = run.live
        if live and not directory.finished:
            raise RunError(f"{path}: this run is going on and has no checkpoint; take one: diloco checkpoint {path}")
        taken, notes = await checkpoint.take(path, of_finished=True)
        return ResumeSource(taken, [f"took a checkpoint of the stopped run: {taken.path}", *notes])

    return asyncio.run(take())


def changed(source: RunCheckpoint, overrides: Mapping[str, Any], command: str = "diloco up --resume") -> RunSettings:
    """Return the settings to go on with; ``command`` is named in errors.

    Raises:
        RunError: an override would break the run; it is named.
        SettingsError: an override is no setting, or out of range.
    """
    settings = source.settings
    wanted = changed_settings(settings, overrides, command)
    if wanted.digest() != settings.digest():
        kept, given = settings.model_dump(exclude=set(DEPLOYMENT)), wanted.model_dump(exclude=set(DEPLOYMENT))
        difference = creation.first_difference(given, kept)
        raise RunError(
            f"{source.path}: run {source.manifest.run!r} cannot go on with another setting: {difference}; only "
            f"{', '.join(DEPLOYMENT)} and the number of learners (--learners) may change"
        )
    return wanted


async def prepare(source: RunCheckpoint, directory: RunDirectory, *, at: int | None = None) -> None:
    """Make ``directory`` a run that continues ``source``; its ``run.json`` is written last.

    Raises:
        RunError: the log does not hold that version, or the server has this run already.
        BrokerError: the server refuses or is silent.
        OSError: the disk is full.
    """
    async with servers(directory, "resume") as (control, homes):
        await restore.restore(source, directory, control, homes, at)
    if at is None:
        for name, learner in source.manifest.learners.items():
            copy_state([source.path / saved.file for saved in learner.files], directory.path / statefolder.FOLDER, name)
    directory.save()


@asynccontextmanager
async def servers(directory: RunDirectory, name: str) -> AsyncIterator[tuple[NatsTransport, list[NatsTransport]]]:
    """Connect, as ``name``, to the control store and to each region's server of a new run, or to its only server twice.

    Without a server of its own, the run's directory is made, and those that are embedded in it are started meanwhile.

    Raises:
        BrokerError: a server refuses or is silent.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        url, urls = directory.nats_url, [directory.nats_url]
        if not url:
            embedded = Embedded(directory.path, directory.settings.regions.names)
            stack.callback(embedded.stop)
            for server in embedded.servers:
                embedded.start(server)
            url, urls = embedded.url, list(embedded.region_urls.values()) or [embedded.url]
        links = []
        for each in (url, *urls):
            links.append(await NatsTransport.open(url, each, name, observe.get_logger(), CONNECT_TIMEOUT_S))
            stack.push_async_callback(links[-1].close)
        yield links[0], links[1:]


def copy_state(parts: Sequence[Path], folder: Path, learner: str) -> None:
    """Copy the files of a learner's state into a folder of states.

    Raises:
        OSError: the disk is full.
    """
    for index, part in enumerate(parts):
        target = statefolder.part_file(folder, learner, index)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part, target)
