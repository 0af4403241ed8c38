"""Continue a finished run with more tokens, in a new directory: ``diloco up --continue RUN --tokens N``.

A log that is closed stays closed. So that is a new run, with a name, an identity and a budget of its own. Its version 0 has the
parameters and the outer momentum of the closing version, each share of its data begins behind what was trained of it, and its
settings name the run before (:class:`diloco.settings.run.ContinuedRun`): they are part of its identity.

It is founded here, before it has members. The new directory gets besides, in the folder ``before``, the weights that it begins
with, which the evaluator evaluates first, and learners' last states, whose optimizers its learners begin with.

The learning rate is the new run's own schedule, over its own tokens: warm-up from 0, and a cosine to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.control import creation, genesis
from diloco.control.changes import read_changes
from diloco.core.log.chain import Chain
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import RunError
from diloco.log.log import Log
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import changed_settings
from diloco.settings.run import ContinuedRun, RunSettings
from diloco.settings.validation import value_of
from diloco.states import statefolder
from diloco.wire.subjects import Subjects
from diloco_ops.checkpoints import checkpoint, manifest
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader
from diloco_ops.report import build
from diloco_ops.up import resume
from diloco_ops.weights.export import in_one_file, newest

FOUNDER = "up"
# what the model, its data and its order are, and with which arrays the log is folded
KEPT = ("seed", "learners", "fragments", "task", "outer.optimizer")


Check = Callable[[RunDirectory, FragmentMap], RunDirectory]


@dataclass(frozen=True)
class ContinuationSource:
    """The run to go on from; ``notes`` are for the user."""

    directory: RunDirectory
    overrides: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.directory.path

    def changed(self, settings: RunSettings) -> RunSettings:
        """Return a run's settings for its continuation.

        Raises:
            RunError: an override concerns what may not change; it is named.
            SettingsError: an override is no setting, or out of range.
        """
        wanted = changed_settings(settings.for_members(), self.overrides, "diloco up --continue")
        for key in KEPT:
            kept, given = ({key: _plain(value_of(each, key))} for each in (settings, wanted))
            difference = creation.first_difference(given, kept)
            if difference:
                raise RunError(
                    f"{self.path}: run {self.directory.name!r} cannot be continued with another setting: {difference}; "
                    f"{', '.join(KEPT)} must stay, because they define its model and the division of its data"
                )
        return wanted


def find(path: Path, overrides: Mapping[str, Any]) -> ContinuationSource:
    """Find the run to go on from, with ``overrides`` of its settings. :func:`prepare` looks at its log.

    Raises:
        RunError: there is none, or it is a checkpoint.
    """
    if (path / manifest.MANIFEST).exists() and not (path / "run.json").exists():
        raise RunError(
            f"{path}: is a checkpoint of an unfinished run, which continues with its own token budget: diloco up "
            f"--resume {path}; --continue needs the directory of a finished run"
        )
    return ContinuationSource(rundir.load(path.resolve()), overrides)


async def prepare(source: ContinuationSource, directory: RunDirectory, check: Check) -> RunDirectory:
    """Make ``directory`` a run that continues the source; its ``run.json`` is written last. Return it as it is then.

    ``check``: finds out, before anything is written, that the new run can be trained, and returns the directory with its facts.

    Raises:
        RunError: the source is not over; or a setting may not change; or the server has a run of this name already.
        BrokerError: a server refuses or is silent.
        OSError: the disk is full.
    """
    async with run_reader.opened(source.path) as ended:
        chains = await _closed(ended, source)
        settings = await _settings(ended, source, chains, same_data=directory.data == source.directory.data)
        directory = await asyncio.to_thread(check, replace(directory, settings=settings), ended.map)
        async with resume.servers(directory, "continue") as (control, homes):
            if await streams.exists(control, f"KV_{Subjects(directory.name).bucket}"):
                raise RunError(
                    f"run {directory.name!r} already exists at its server; choose another --run-dir, whose last part "
                    "is the run's name"
                )
            try:
                await _found(ended, directory, homes)
            except BaseException:
                await streams.delete(control, f"KV_{Subjects(directory.name).bucket}")
                for home in homes:
                    for stream in (Subjects(directory.name).log_stream, Subjects(directory.name).offer_stream):
                        await streams.delete(home, stream)
                raise
        await asyncio.to_thread(_copy_states, ended, directory, source.notes)
    directory.save()
    return directory


async def _closed(ended: RunReader, source: ContinuationSource) -> list[Chain]:
    """Return the heads of all fragments' logs.

    Raises:
        RunError: one is not closed: the run is going on, or was stopped.
    """
    chains = await run_reader.read_chains(ended.log)
    open_ = [chain for chain in chains if not chain.closed]
    if open_:
        state_ = "going on" if ended.live else "stopped"
        advice = "wait for its end" if ended.live else f"let it end first: diloco up --run-dir {source.path}"
        raise RunError(
            f"{source.path}: run {ended.run.name!r} is not finished, it is {state_}: {len(open_)} of the {len(chains)} logs "
            f"of its fragments have no closing version (fragment {open_[0].fragment} stands at version "
            f"{open_[0].version}); {advice}, or change the budget of the live run: diloco set DIR tokens=N"
        )
    return chains


async def _settings(ended: RunReader, source: ContinuationSource, chains: Sequence[Chain], *, same_data: bool) -> RunSettings:
    """Return the settings of the run that continues this one."""
    ended.run.adopt((await read_changes(ended.run)).records)
    before = ended.run.created.continues
    merged = build.mean([chain.tokens_merged for chain in chains], [fragment.size for fragment in ended.map.fragments])
    if same_data:
        batches = _ends(ended, source, chains)
    else:
        batches = []
        source.notes.append("other data: its shares begin at their beginning, and losses cannot be compared with those before")
    continued = ContinuedRun(
        run=ended.run.name,
        identity=ended.run.identity.hex(),
        tokens=merged + (before.tokens if before else 0),
        batches=batches,
    )
    settings = source.changed(ended.run.in_force)
    if not same_data:
        settings = settings.with_mix(None)  # of the data before
    if settings.outer.optimizer == "adamw":
        source.notes.append("outer.optimizer = adamw counts its versions from 0: its moments begin afresh")
    return settings.model_copy(update={"continues": continued})


def _ends(ended: RunReader, source: ContinuationSource, chains: Sequence[Chain]) -> list[int]:
    """Return by share of the data the batch after all that was merged of it, or trained as far as is known here."""
    ends: dict[int, int] = {}
    for chain in chains:
        for share, end in chain.ends.items():
            ends[share] = max(end, ends.get(share, 0))
    series = build.load_json(source.path / "series.json")
    try:
        ledger = build.read_ledger(source.directory, ended.run.identity, series, len(chains))
    except (KeyError, TypeError, ValueError) as error:
        source.notes.append(
            f"{source.path / 'series.json'}: missing or damaged ({error!r}): shares begin behind what the log has merged"
        )
    else:
        for trained in ledger.trained.values():
            for share, first, count in trained:
                ends[share] = max(first + count, ends.get(share, 0))
    created = ended.run.created
    shares = range(max([created.learners - 1, *ends]) + 1)
    return [max(ends.get(share, 0), created.first_batch(share)) for share in shares]


async def _found(ended: RunReader, directory: RunDirectory, homes: Sequence[NatsTransport]) -> None:
    """Make the new run and its version 0, in each region's log or in the only one. Write the weights, too.

    Two fragments at most are in memory.
    """
    settings = directory.settings
    run = await creation.create(homes[0], directory.name, settings)
    await run.registry.create("map", ended.map.pack())
    for home in homes[1:]:
        await creation.make_streams(home, run.name, settings)
    logs = [Log(home, run.name, run.identity, ended.map, run.created) for home in homes]
    path = statefolder.weights_before(directory.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    hashes = []
    with in_one_file(ended, path) as weights:
        for fragment in ended.map.fragments:
            replica = await newest(ended, fragment.index)
            momentum = replica.momentum if settings.outer.optimizer == "nesterov" else None
            (state_hash, *_) = [await log.writer.append_first(fragment.index, replica.theta, momentum) for log in logs]
            hashes.append(state_hash)
            await asyncio.to_thread(weights.put, fragment, replica.theta)
    await logs[0].writer.conclude(FOUNDER, run.created.digest(), hashes, genesis.decision(run))
    for log in logs[1:]:
        decided = await genesis.decided_genesis(run)
        assert decided is not None
        await log.writer.append_genesis(decided)


def _copy_states(ended: RunReader, directory: RunDirectory, notes: list[str]) -> None:
    """Copy the last states of the run's learners, for the optimizers of the new one's."""
    if ended.run.created.inner.optimizer != directory.settings.inner.optimizer:
        notes.append("inner.optimizer is another one: learners' optimizers begin afresh")
        return
    found = checkpoint.left_states(ended, notes)
    for name, (parts, _) in found.items():
        resume.copy_state(parts, statefolder.states_before(directory.path), name)
    if not found:
        notes.append(
            f"{ended.directory.path / statefolder.FOLDER}: has no learner's last state: learners' optimizers begin afresh"
        )


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
