"""Going on from a checkpoint of a whole run, in a new directory: ``diloco up --resume PATH``.

The new directory gets a server of its own with the log and the bucket as they were, shortened to the checkpoint's cut, and the
learners' states. The run keeps its name and its identity, so all hashes stay valid, and the changes made while it went on stay
in force. The settings that may be others now are :data:`diloco.settings.run.DEPLOYMENT`; how many
learners are started is the launcher's choice anyway, since shares of the data are leased. With ``at`` every fragment begins
again at that version, and learners from the log.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.control.shares import key_of
from diloco.core import changes
from diloco.core.changes import SETTABLE, Action, Effective, Set
from diloco.errors import MessageError, RunError
from diloco.log.stream import decode_head, decode_keyframe
from diloco.nats import streams
from diloco.nats.connection import Link
from diloco.nats.pull import Message, Puller
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import changed_settings
from diloco.settings.run import DEPLOYMENT, RunSettings
from diloco.settings.validation import value_of
from diloco.wire import framing, subjects
from diloco.wire.entries import Keyframe
from diloco.wire.subjects import Subjects
from diloco_ops import checkpoint, run_reader
from diloco_ops.broker import snapshot
from diloco_ops.broker.server import Server
from diloco_ops.broker.snapshot import Snapshot
from diloco_ops.checkpoint import Checkpoint

CONNECT_TIMEOUT_S = 20.0  # a server that has just been started reads its files first
KEY_OF_CHANGES = "changes"


@dataclass(frozen=True)
class Source:
    """The checkpoint to go on from, and notes on the choice."""

    checkpoint: Checkpoint
    notes: list[str]


def find(path: Path) -> Source:
    """Find the checkpoint to go on from: ``path`` itself, or the newest whole one of the run whose directory it is.

    If there is none yet, take a checkpoint of the stopped run. A damaged one is passed over for an older whole one.

    Raises:
        RunError: there is none; the fault of every candidate is named.
    """
    if (path / "run.json").exists():
        candidates = [folder for _, folder in sorted(checkpoint.numbered(path).items(), reverse=True)]
        if not candidates:
            return _of_stopped(path)
    else:
        number = int(path.name) if path.name.isdecimal() else 0
        siblings = path.resolve().parent.iterdir() if path.exists() else []
        older = {int(p.name): p for p in siblings if p.name.isdecimal() and p.is_dir() and int(p.name) < number}
        candidates = [path, *(folder for _, folder in sorted(older.items(), reverse=True))]
    notes: list[str] = []
    for folder in candidates:
        try:
            found = checkpoint.load(folder)
            found.check()
        except RunError as error:
            notes.append(f"{error}; passed over")
            continue
        if notes:
            notes.append(f"going on from the older checkpoint {folder}")
        return Source(found, notes)
    raise RunError("; ".join(note.removesuffix("; passed over") for note in notes))


def _of_stopped(path: Path) -> Source:
    directory = rundir.load(path)
    if directory.finished:
        raise RunError(
            f"{path}: this run is finished (its report is {directory.report}) and has no checkpoint to go on from; "
            f"its log can be read: diloco verify {path}; for more tokens begin a new run"
        )

    async def take() -> Source:
        async with run_reader.opened(path) as run:
            live = run.live
        if live:
            raise RunError(f"{path}: this run is going on and has no checkpoint; take one: diloco checkpoint {path}")
        taken, notes = await checkpoint.take(path)
        return Source(taken, [f"took a checkpoint of the stopped run: {taken.path}", *notes])

    return asyncio.run(take())


def changed(source: Checkpoint, overrides: Mapping[str, Any]) -> RunSettings:
    """Return the settings to go on with.

    Raises:
        RunError: an override would break the run; it is named.
        SettingsError: an override is no setting, or out of range.
    """
    settings = source.settings
    wanted = changed_settings(settings, overrides, "diloco up --resume")
    if wanted.digest() != settings.digest():
        kept, given = settings.model_dump(exclude=set(DEPLOYMENT)), wanted.model_dump(exclude=set(DEPLOYMENT))
        difference = creation.first_difference(given, kept)
        raise RunError(
            f"{source.path}: run {source.manifest.run!r} cannot go on with another setting: {difference}; only "
            f"{', '.join(DEPLOYMENT)} may change, and the number of learners (--learners)"
        )
    return wanted


async def prepare(source: Checkpoint, directory: RunDirectory, *, at: int | None = None) -> None:
    """Make ``directory`` a run that goes on from ``source``; its ``run.json`` is written last.

    Raises:
        RunError: the log does not hold that version, or the server has this run already.
        BrokerError: the server refuses or is silent.
        OSError: the disk is full.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    if directory.nats_url:
        await _restore(source, directory, directory.nats_url, at)
    else:
        server = Server(directory.path / "nats")
        server.start()
        try:
            await _restore(source, directory, server.url, at)
        finally:
            server.stop()
    if at is None:
        for name, learner in source.manifest.learners.items():
            target = directory.path / "checkpoints" / f"{name}.safetensors"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source.path / learner.saved.file, target)
    directory.save()


async def _restore(source: Checkpoint, directory: RunDirectory, url: str, at: int | None) -> None:
    manifest, names, settings = source.manifest, Subjects(directory.name), directory.settings
    transport = await NatsTransport.open(url, url, "resume", observe.get_logger(), CONNECT_TIMEOUT_S)
    made: list[str] = []
    try:
        for stream in (manifest.log, manifest.bucket):
            taken = Snapshot(stream.config, stream.state, stream.saved.size_bytes, stream.saved.blake3)
            await snapshot.restore(transport, taken, source.path / stream.saved.file, replicas=settings.log.replicas)
            made.append(str(stream.config["name"]))
        carried_out = await _shorten(transport, source, names, at)
        registry = await transport.bucket(names.bucket, create=False)
        if at is not None:
            stored = await registry.get(KEY_OF_CHANGES)
            if stored is not None:
                listed = changes.unpack(stored[0], framing.run_id(manifest.run, source.settings.digest()))
                await registry.put(KEY_OF_CHANGES, listed.without_rollbacks(at, carried_out).pack())
        revision = await registry.put("run", settings.canonical())
        if at is not None:  # claims to data shares go on from where they were: at an earlier version that is too far
            await streams.purge(transport, f"KV_{names.bucket}", f"$KV.{names.bucket}.{key_of('*')}", revision)
        run = await creation.create(transport, directory.name, settings)
        overridden = partial(_overridden, source.settings, settings)
        await append_changes(transport, run, overridden, author="resume", reason="resumed with it")
    except BaseException:
        for name in made:
            await streams.delete(transport, name)
        raise
    finally:
        await transport.close()


def _overridden(before: RunSettings, wanted: RunSettings, now: Effective) -> list[Action]:
    """Return the settings to set again because a change made while the run went on would prevail over them."""
    given = [key for key in SETTABLE if value_of(wanted, key) != value_of(before, key)]
    return [Set(key, value_of(wanted, key)) for key in given if value_of(wanted, key) != value_of(now.settings, key)]


@dataclass
class _Stored:
    """The messages of one fragment in a log, by sequence."""

    messages: list[int] = field(default_factory=list)  # of entries, parts included
    versions: list[tuple[int, int]] = field(default_factory=list)  # sequence and version, where an entry made one
    rollbacks: list[tuple[int, int]] = field(default_factory=list)  # sequence of an entry, and change carried out with it
    keyframes: list[tuple[int, str, Keyframe]] = field(default_factory=list)  # sequence and attempt of its parts
    parts: list[tuple[int, str]] = field(default_factory=list)  # of keyframes: sequence and attempt


async def _shorten(link: Link, source: Checkpoint, names: Subjects, at: int | None) -> list[int]:
    """Drop the messages of a restored log beyond a cut: the checkpoint's, or every fragment's version ``at``.

    Return by fragment the change of the run by which the rest was rolled back last; 0 for none.
    """
    cuts = source.manifest.fragments
    stored = [_Stored() for _ in cuts]
    async for message in Puller(link, names.log_stream, [names.fragment_trees], 1):
        _note(message, stored, framing.run_id(source.manifest.run, source.settings.digest()))
        if not message.pending:
            break
    doomed: list[int] = []
    carried_out: list[int] = []
    for index, held in enumerate(stored):
        end = cuts[index].sequence if at is None else _end_of(source, index, held, at)
        if not any(keyframe.entry_sequence <= end for _, _, keyframe in held.keyframes):
            raise RunError(f"{source.path}: fragment {index}: its log begins only after the version to go on from")
        doomed += [sequence for sequence in held.messages if sequence > end]
        carried_out.append(max((change for sequence, change in held.rollbacks if sequence <= end), default=0))
        kept = {attempt for _, attempt, keyframe in held.keyframes if keyframe.entry_sequence <= end}
        doomed += [sequence for sequence, _, keyframe in held.keyframes if keyframe.entry_sequence > end]
        doomed += [sequence for sequence, attempt in held.parts if attempt not in kept]
    await streams.drop(link, names.log_stream, doomed)
    return carried_out


def _note(message: Message, stored: list[_Stored], run: bytes) -> None:
    index = subjects.fragment_of(message.subject)
    if index is None or index >= len(stored):
        return
    held, head, tokens = stored[index], subjects.is_head(message.subject), message.subject.split(".")
    try:
        if tokens[2] == "fragment":
            held.messages.append(message.sequence)
            if head:
                record = decode_head(message, run).record
                if record.makes_version:
                    held.versions.append((message.sequence, record.version))
                if record.rolled_back is not None:
                    held.rollbacks.append((message.sequence, record.rolled_back.change))
        elif head:
            keyframe, _ = decode_keyframe(message, run)
            held.keyframes.append((message.sequence, keyframe.body.attempt.hex(), keyframe))
            if keyframe.rolled_back is not None:
                held.rollbacks.append((keyframe.entry_sequence, keyframe.rolled_back.change))
        elif len(tokens) > 5:
            held.parts.append((message.sequence, tokens[5]))
    except MessageError:
        return  # a reader that folds the log refuses it


def _end_of(source: Checkpoint, index: int, held: _Stored, at: int) -> int:
    """Sequence of the last entry to keep so that the fragment stands at version ``at``."""
    ends = {version: sequence for sequence, version in held.versions}
    ends |= {keyframe.version: keyframe.entry_sequence for _, _, keyframe in held.keyframes if keyframe.version not in ends}
    if at not in ends:
        raise RunError(
            f"{source.path}: --resume-at {at}: the log has versions {min(ends)} to {max(ends)} of fragment {index}; how far "
            "back it goes is set by log.keep_keyframes and log.keep_bytes"
        )
    return ends[at]
