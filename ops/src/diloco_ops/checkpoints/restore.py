"""The streams of a resumed run on its servers: a checkpoint's bucket, and its log up to the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.control.shares import key_of
from diloco.control.whole import KEY
from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.fold import Replica
from diloco.core.run import changes
from diloco.core.run.changes import SETTABLE, Action, Effective, Set
from diloco.errors import RunError
from diloco.log.log import Log
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.service.rundir import RunDirectory
from diloco.settings import folders
from diloco.settings.run import RunSettings
from diloco.settings.validation import value_of
from diloco.transport import Fence
from diloco.wire import framing
from diloco.wire.entries import Genesis
from diloco.wire.subjects import Subjects
from diloco_ops.audit import residuals
from diloco_ops.broker import snapshot
from diloco_ops.broker.server import CONNECT_TIMEOUT_S, Server
from diloco_ops.broker.snapshot import StreamSnapshot
from diloco_ops.checkpoints import shorten
from diloco_ops.checkpoints.manifest import RunCheckpoint, SavedStream

KEY_OF_CHANGES = "changes"
STORED_WITHIN_S = 10.0  # on this machine it takes milliseconds

Residual: TypeAlias = NDArray[np.float32]  # [size]


async def restore(
    source: RunCheckpoint,
    directory: RunDirectory,
    control: NatsTransport,
    homes: Sequence[NatsTransport],
    at: int | None,
    *,
    scratch: bool = False,
) -> None:
    """Restore the bucket at the control store, and the log at each region's server, ``homes``; or at the only one.

    ``scratch``: they are one server, from which both are copied to where the run goes on. It keeps everything once.

    Raises:
        RunError: the log does not hold version ``at``, or a server has this run already.
        BrokerError: a server refuses or is silent. Nothing is left at any of them then.
    """
    manifest, names, created = source.manifest, Subjects(directory.name), directory.settings
    settings = _kept_once(created) if scratch else created
    made: list[tuple[NatsTransport, str]] = []
    try:
        await _unpack(source, manifest.bucket, control, settings)
        made.append((control, f"KV_{names.bucket}"))
        registry = await control.bucket(names.bucket, create=False)
        origin = KnownRun(directory.name, source.settings, registry)
        if origin.regions == bool(settings.regions.names):
            for home in homes:
                await _unpack(source, manifest.log, home, settings)
                made.append((home, names.log_stream))
                carried_out = await _shorten(home, source, names, at)
            await _bring_residuals(source, origin, homes, at)
        else:
            made += [(home, names.log_stream) for home in homes]
            carried_out = await _begin_other_kind(source, origin, homes, settings, at)
        if at is not None:
            stored = await registry.get(KEY_OF_CHANGES)
            if stored is not None:
                listed = changes.unpack(stored[0], origin.identity)
                await registry.put(KEY_OF_CHANGES, listed.without_rollbacks(at, carried_out).pack())
        revision = await registry.put("run", created.canonical())
        await streams.purge(control, f"KV_{names.bucket}", f"$KV.{names.bucket}.{KEY}", revision)  # numbers begin again
        if at is not None:  # claims to data shares go on from where they were: at an earlier version that is too far
            await streams.purge(control, f"KV_{names.bucket}", f"$KV.{names.bucket}.{key_of('*')}", revision)
        run = (
            KnownRun(directory.name, created, registry) if scratch else await creation.create(homes[0], directory.name, created)
        )
        overridden = partial(_overridden, source.settings, created)
        await append_changes(control, run, overridden, author="resume", reason="resumed with it")
    except BaseException:
        for link, name in made:
            await streams.delete(link, name)
        raise


def _kept_once(settings: RunSettings) -> RunSettings:
    return settings.model_copy(update={"log": settings.log.model_copy(update={"replicas": 1})})


async def _unpack(source: RunCheckpoint, stream: SavedStream, link: NatsTransport, settings: RunSettings) -> None:
    taken = StreamSnapshot(stream.config, stream.state, stream.saved.size_bytes, stream.saved.blake3)
    await snapshot.restore(link, taken, source.path / stream.saved.file, replicas=settings.log.replicas)


async def _shorten(link: NatsTransport, source: RunCheckpoint, names: Subjects, at: int | None) -> list[int]:
    """Drop the messages of a restored log beyond a cut: the checkpoint's, or every fragment's version ``at``.

    Return by fragment the change of the run by which the rest was rolled back last; 0 for none.
    """
    cuts, run = source.manifest.fragments, framing.run_id(source.manifest.run, source.settings.digest())
    held = await shorten.read(link, names, run, len(cuts), regions=bool(source.settings.regions.names))
    try:
        ends = [cut.sequence for cut in cuts] if at is None else [messages.end_of(at) for messages in held]
        carried_out = await shorten.shorten(link, names, held, ends)
    except RunError as error:
        raise RunError(f"{source.path}: {'' if at is None else f'--resume-at {at}: '}{error}") from None
    for messages, end in zip(held, ends, strict=True):
        notice = messages.missing_notice(end)
        if notice is not None:
            subject, frame = names.commit_notice(notice.fragment), framing.pack(notice, run)
            await link.append(subject, frame, message_id=f"cut-{notice.fragment}", fence=None, timeout_s=STORED_WITHIN_S)
    return carried_out


async def _bring_residuals(source: RunCheckpoint, run: KnownRun, homes: Sequence[NatsTransport], at: int | None) -> None:
    """Give each region's log the residuals of the cut that were known in other regions alone."""
    saved = source.manifest.residuals
    if saved is None or at is not None:
        return
    fragment_map = await creation.find_map(run)
    brought = residuals.read(source.path / saved.file, fragment_map)
    for home in homes:
        log = Log(home, run.name, run.identity, fragment_map, run.created)
        await residuals.store(log, brought, await _genesis(source, log), [cut.version for cut in source.manifest.fragments])


async def _begin_other_kind(
    source: RunCheckpoint, run: KnownRun, homes: Sequence[NatsTransport], settings: RunSettings, at: int | None
) -> list[int]:
    """Begin logs of another kind, in regions or in one place, with a keyframe of each fragment as of the cut.

    A log in regions tells what is committed by notices, and its epochs rise by more than one: so neither kind serves as the
    other, and what is before the cut stays in the checkpoint. Return what :func:`_shorten` does.
    """
    with folders.temporary() as folder:
        server = Server(Path(folder) / "nats")
        server.start()
        scratch = None
        try:
            scratch = await NatsTransport.open(server.url, server.url, "resume", observe.get_logger(), CONNECT_TIMEOUT_S)
            await _unpack(source, source.manifest.log, scratch, run.created)
            await _shorten(scratch, source, Subjects(run.name), at)
            return await _copy_states(source, run, scratch, homes, settings, at)
        finally:
            if scratch is not None:
                await scratch.close()
            server.stop()


async def _copy_states(
    source: RunCheckpoint,
    run: KnownRun,
    scratch: NatsTransport,
    homes: Sequence[NatsTransport],
    settings: RunSettings,
    at: int | None,
) -> list[int]:
    fragment_map = await creation.find_map(run)
    old = Log(scratch, run.name, run.identity, fragment_map, run.created)
    genesis = await _genesis(source, old)
    frame, cuts = framing.pack(genesis[0], run.identity), source.manifest.fragments
    known = (
        {} if source.manifest.residuals is None else residuals.read(source.path / source.manifest.residuals.file, fragment_map)
    )
    if await run.registry.get("genesis") is None:
        await run.registry.create("genesis", frame)
    logs = []
    for home in homes:
        await creation.make_streams(home, run.name, settings)
        logs.append(Log(home, run.name, run.identity, fragment_map, settings))
    carried_out = []
    for index, cut in enumerate(cuts):
        version = cut.version if at is None else at
        replica = await old.reader.state_at(index, version, *genesis)
        residual = known.get(index) if at is None else None
        if residual is None and at is None:
            loaded = await old.reader.load(index, *genesis)
            residual = loaded.residual if loaded.replica.chain.version == version else None
        for log in logs:
            await _begin_fragment(old, log, replica, residual, regions=bool(settings.regions.names))
        carried_out.append(replica.chain.change)
    for log in logs:
        await log.writer.append_genesis(frame)
    return carried_out


async def _genesis(source: RunCheckpoint, log: Log) -> tuple[Genesis, bytes]:
    genesis = await log.reader.genesis()
    if genesis is None:
        raise RunError(f"{source.path}: its log has no genesis record; go on from another checkpoint")
    return genesis


async def _begin_fragment(old: Log, log: Log, replica: Replica, residual: Residual | None, *, regions: bool) -> None:
    """Store the entry that a fragment stands after, its keyframe behind that, and in regions that the entry is committed."""
    chain, record = replica.chain, log.subjects.record(replica.chain.fragment)
    if not chain.version:
        first = Chain(fragment=chain.fragment, version=0, epoch=0, head=NO_ENTRY, sequence=0, state_hash=chain.state_hash)
        await log.writer.append_keyframe(replace(replica, chain=first), None, Fence(log.subjects.genesis, 0))
        return
    entry = await old.stream.get(chain.sequence)
    if entry is None:
        raise RunError(f"fragment {chain.fragment}: the entry that makes version {chain.version} is gone")
    sequence = await log.writer.append(record, entry.data, [], b"", Fence(record, 0))
    moved = replace(replica, chain=replace(chain, sequence=sequence))
    await log.writer.append_keyframe(moved, residual, Fence(record, sequence))
    if regions:
        await log.region.notice(chain.fragment, chain.version, chain.epoch, chain.head, sequence)


def _overridden(before: RunSettings, wanted: RunSettings, now: Effective) -> list[Action]:
    """Return the settings to set again because a change made while the run went on would prevail over them."""
    given = [key for key in SETTABLE if value_of(wanted, key) != value_of(before, key)]
    return [Set(key, value_of(wanted, key)) for key in given if value_of(wanted, key) != value_of(now.settings, key)]
