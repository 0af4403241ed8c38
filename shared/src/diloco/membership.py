"""Creating, finding and joining a run: settings, fragment map, admission and genesis, through a small key-value bucket.

Keys: ``protocol`` (what members must speak), ``run`` (settings as JSON), ``map`` (the fragment map), ``member.<learner>``
(admission), ``founder`` (who publishes version 0), ``genesis`` (the genesis record, where there are several logs), ``owners``
(which syncer owns which fragments), ``shares`` (which learner holds which share of the data), ``changes`` (what was changed
since the run was created). All are written by compare-and-set or are idempotent, so that any member may do it, and a dead one
is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco import __version__
from diloco.core import changes as listing
from diloco.core import leases
from diloco.core.changes import Action, Changes, Effective, in_force
from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.core.leases import Shares
from diloco.core.ownership import OwnersTable
from diloco.errors import AdmissionError, AppendUncertainError, BrokerError, FenceError, FormatError, RunError, SettingsError
from diloco.log import Log
from diloco.nats.registry import MAX_VALUE_BYTES
from diloco.observe import Logger
from diloco.patience import patiently
from diloco.settings import RunSettings, parse
from diloco.transport import Bucket, Transport
from diloco.wire.messages import OLDEST, VERSION, Count, Genesis, Hash, MemberName, Software, run_id
from diloco.wire.plain import json_object
from diloco.wire.subjects import Subjects

POLL_S = 0.2


class Admission(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a learner writes to be admitted; syncers merge only offers of this incarnation with the run's digests."""

    learner: MemberName
    incarnation: Count
    settings_digest: Hash
    map_digest: Hash


class Protocol(msgspec.Struct, frozen=True):
    """The bucket's key ``protocol``, as JSON, to which later versions may add: what every version must be able to read."""

    protocol: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    software: Software  # that made the run


@dataclass
class Run:
    """A run as its members know it before they know its fragment map."""

    name: str
    settings: RunSettings  # that it was created with, for good
    registry: Bucket

    def __post_init__(self) -> None:
        self.now = Effective(self.settings)  # as far as this process has read the changes; diloco.following sets it

    @property
    def regions(self) -> bool:
        """Whether there are several regions' logs."""
        return bool(self.settings.regions.names)

    @cached_property
    def identity(self) -> bytes:
        """What every frame carries."""
        return run_id(self.name, self.settings.digest())


async def create(transport: Transport, name: str, settings: RunSettings, offer_bytes: int = -1) -> Run:
    """Make the run's streams and bucket and store its settings; a run that exists with the same settings is as good.

    Raises:
        RunError: a run of that name exists with other settings, the first that differs is named; or of another protocol.
    """
    await make_streams(transport, name, settings, offer_bytes)
    replicas = settings.regions.control_replicas if settings.regions.names else settings.log.replicas
    registry = await transport.bucket(Subjects(name).bucket, create=True, replicas=replicas)
    # before the settings: who finds them finds this
    with contextlib.suppress(FenceError):
        await registry.create("protocol", msgspec.json.encode(Protocol(VERSION, __version__)))
    await check_protocol(registry, name)
    try:
        await registry.create("run", settings.canonical())
    except FenceError:
        stored = await registry.get("run")
        difference = first_difference(settings.model_dump(), settings_of(name, stored[0]) if stored else {})
        if difference:
            raise RunError(
                f"run {name!r} exists on the server with another setting: {difference}; resume it with its own settings, or "
                "choose another run name"
            ) from None
    return Run(name, settings, registry)


async def make_streams(transport: Transport, name: str, settings: RunSettings, offer_bytes: int = -1) -> None:
    """Make the streams of a run that a region's server holds; those that exist as they should are as good."""
    names, replicas = Subjects(name), settings.log.replicas
    await transport.ensure_stream(names.log_stream, names.log_filters(), replicas=replicas)
    await transport.ensure_stream(
        names.offer_stream, names.offer_filters(), max_msgs_per_subject=1, max_bytes=offer_bytes, replicas=replicas
    )
    if settings.log.archive:
        await transport.ensure_stream(
            names.archive_stream, names.archive_filters(), max_bytes=settings.log.archive_bytes, replicas=replicas
        )


async def find(transport: Transport, name: str, log: Logger) -> Run:
    """Wait until the run exists, and read its settings.

    Raises:
        RunError: the run is of a protocol that this version does not speak, or what is stored are no settings of this version.
    """
    bucket, waiting = Subjects(name).bucket, False
    while True:
        try:
            registry = await transport.bucket(bucket, create=False)
            stored = await registry.get("run")
            if stored is not None:
                break
        except BrokerError:
            pass
        if not waiting:
            log.info("waiting_for_run")
            waiting = True
        await asyncio.sleep(POLL_S)
    made_by = (await patiently(partial(check_protocol, registry, name), log)).software
    if made_by != __version__:
        log.info("version_differs", sender="run", kind=made_by, here=__version__)
    try:
        return Run(name, parse(RunSettings, settings_of(name, stored[0]), f"run {name!r}"), registry)
    except SettingsError as error:
        raise RunError(f"run {name!r} was made by another version: {error}") from None


async def check_protocol(registry: Bucket, name: str) -> Protocol:
    """What the members of a run must speak.

    Raises:
        RunError: this version does not: one that is older than the run, after a downgrade, or much newer.
    """
    stored = await registry.get("protocol")
    try:
        found = Protocol(VERSION, "") if stored is None else msgspec.json.decode(stored[0], type=Protocol)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RunError(f"run {name!r}: the bucket's key 'protocol' is damaged ({error}); choose another run name") from None
    if not OLDEST <= found.protocol <= VERSION:
        ours = str(VERSION) if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
        raise RunError(
            f"run {name!r} was made by diloco {found.software} and speaks protocol {found.protocol}; this is diloco "
            f"{__version__}, which speaks {ours}: "
            + ("update it" if found.protocol > VERSION else f"use diloco {found.software}, or begin another run")
        )
    return found


def settings_of(name: str, stored: bytes) -> dict[str, Any]:
    """The value of the key ``run``.

    Raises:
        RunError: it is no JSON object.
    """
    values = json_object(stored)
    if values is None:
        raise RunError(
            f"run {name!r}: the bucket holds {stored[:40]!r} for its settings, no JSON object; choose another run name"
        )
    return values


async def find_map(run: Run) -> FragmentMap:
    """Wait until a learner has proposed the fragment map."""
    while True:
        stored = await run.registry.get("map")
        if stored is not None:
            return unpack_map(stored[0])
        await asyncio.sleep(POLL_S)


async def join(
    run: Run, learner: str, incarnation: int, ours: FragmentMap, settings_digest: bytes, *, founds: bool = True
) -> int:
    """Propose the fragment map, or find that it is the run's already, and admit the learner; the incarnation it is admitted as.

    One who may not found a run waits until it has a map. The incarnation is
    ``incarnation``, or one more than the one admitted before where that is larger: a clock may have jumped back.

    Raises:
        AdmissionError: this learner's model is not the run's; the first differing tensor is named.
    """
    packed = ours.pack()
    if len(packed) > MAX_VALUE_BYTES:
        raise AdmissionError(
            f"run {run.name!r}: the list of this model's {len(ours.tensors)} tensors has {len(packed)} bytes, at most "
            f"{MAX_VALUE_BYTES} are allowed; use fewer tensors, or shorter names"
        )
    if not founds or not await _propose(run, packed):
        check_same_map(ours, await find_map(run), run.name)
    if settings_digest != run.settings.digest():
        raise AdmissionError(f"run {run.name!r}: learner {learner} was made for other settings than the run's")
    key = f"member.{learner}"
    while True:
        stored = await run.registry.get(key)
        before = _admission(stored[0]) if stored else None
        if before is not None:
            incarnation = max(incarnation, before.incarnation + 1)
        value = msgspec.msgpack.encode(Admission(learner, incarnation, settings_digest, ours.digest))
        try:
            if stored is None:
                await run.registry.create(key, value)
            else:
                await run.registry.update(key, value, stored[1])
            return incarnation
        except FenceError:  # another process of this name: the later one is admitted
            continue


async def _propose(run: Run, packed: bytes) -> bool:
    """Whether this map has become the run's, and not somebody else's."""
    try:
        await run.registry.create("map", packed)
    except FenceError:
        return False
    return True


def _admission(stored: bytes) -> Admission | None:
    try:
        return msgspec.msgpack.decode(stored, type=Admission)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # somebody else wrote it


async def admitted(run: Run, learner: str, map_digest: bytes) -> int | None:
    """The incarnation in which a learner is admitted, or None if it is not, or not to this run's settings and map."""
    try:
        stored = await run.registry.get(f"member.{learner}")
    except FormatError:
        return None
    admission = _admission(stored[0]) if stored else None
    if admission is None:
        return None
    same = admission.settings_digest == run.settings.digest() and admission.map_digest == map_digest
    return admission.incarnation if same and admission.learner == learner else None


async def owners(run: Run, fragments: int) -> tuple[OwnersTable | None, int]:
    """Which syncer owns which of so many fragments, and the key's revision (0: it is not set).

    A value that is no such table counts as none, to be replaced.
    """
    stored = await run.registry.get("owners")
    if stored is None:
        return None, 0
    try:
        table = msgspec.msgpack.decode(stored[0], type=OwnersTable)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None, stored[1]
    return (table if len(table.owners) == fragments else None), stored[1]


async def set_owners(run: Run, table: OwnersTable, revision: int) -> int:
    """Put ``table`` in the place of the one at ``revision``; its own revision.

    Raises:
        FenceError: somebody else has set another one.
    """
    value = msgspec.msgpack.encode(table)
    return await run.registry.update("owners", value, revision) if revision else await run.registry.create("owners", value)


async def shares(run: Run) -> tuple[Shares, int]:
    """Who holds which share of the data, and the key's revision (0: it is not set).

    A value that is no such table counts as none, to be replaced: what the log has merged is not trained again all the same.
    """
    stored = await run.registry.get("shares")
    if stored is None:
        return leases.begin(run.settings.learners), 0
    try:
        return leases.unpack(stored[0]), stored[1]
    except FormatError:
        return leases.begin(run.settings.learners), stored[1]


async def set_shares(run: Run, table: Shares, revision: int) -> int:
    """Put ``table`` in the place of the one at ``revision``; its own revision.

    Raises:
        FenceError: somebody else has set another one.
    """
    value = table.pack()
    return await run.registry.update("shares", value, revision) if revision else await run.registry.create("shares", value)


async def changes(run: Run) -> tuple[Changes, int]:
    """What was changed since the run was created, and the key's revision (0: nothing was).

    Raises:
        FormatError, ChainError: the key holds no such list.
    """
    stored = await run.registry.get("changes")
    if stored is None:
        return Changes(run.identity), 0
    return listing.unpack(stored[0], run.identity), stored[1]


async def append_changes(
    run: Run, decide: Callable[[Effective], Sequence[Action]], *, at_s: float, author: str, reason: str = ""
) -> Changes:
    """Append the actions that ``decide`` gives for what is in force, all of them or none; the list then.

    ``decide`` is asked again where somebody else appended meanwhile.

    Raises:
        RunError, SettingsError: the list has no room for them, or what they lead to is not possible.
        FormatError, ChainError: what is stored is no such list.
    """
    while True:
        listed, revision = await changes(run)
        effective = in_force(run.settings, listed.records)
        actions = decide(effective)
        for action in actions:
            listed = listed.then(action, at_s=at_s, author=author, reason=reason)
            effective = effective.after(listed.records[-1])
        if not actions:
            return listed
        try:
            if revision:
                await run.registry.update("changes", listed.pack(), revision)
            else:
                await run.registry.create("changes", listed.pack())
        except FenceError:
            continue
        return listed


async def genesis(
    run: Run,
    log: Log,
    learner: str | None,
    initial: Callable[[], Sequence[NDArray[np.float32]]],
    logger: Logger,
) -> tuple[Genesis, bytes]:
    """The genesis record; a learner (None: any other service) founds the run if nobody else does.

    The founder is elected by compare-and-set. One that does not finish within ``liveness.dead_s`` of this member's clock
    is replaced; should both finish, the log's fence lets one genesis record through.
    """
    watched: tuple[int, float] | None = None
    clock = asyncio.get_running_loop().time
    while True:
        try:
            found = await log.genesis()
        except BrokerError as error:
            if not run.regions or isinstance(error, AppendUncertainError):
                raise
            await asyncio.sleep(POLL_S)  # the region's syncer has not made its streams yet
            continue
        if found is not None:
            return found
        if learner is not None:
            stored = await run.registry.get("founder")
            revision = stored[1] if stored else 0
            if watched is None or watched[0] != revision:
                watched = (revision, clock())
            if stored is None or clock() - watched[1] > run.settings.liveness.dead_s:
                try:
                    if stored is None:
                        await run.registry.create("founder", learner.encode())
                    else:
                        await run.registry.update("founder", learner.encode(), revision)
                except FenceError:
                    continue
                logger.info("founding")
                await log.found(learner, run.settings.digest(), initial(), partial(decide, run) if run.regions else None)
                continue
        await asyncio.sleep(POLL_S)


async def decide(run: Run, genesis_frame: bytes) -> bool:
    """Whether a genesis record is the run's: the first one that somebody asks for is."""
    try:
        await run.registry.create("genesis", genesis_frame)
    except FenceError:
        return await decided(run) == genesis_frame
    return True


async def decided(run: Run) -> bytes | None:
    """The frame of the run's genesis record, which each region's log is to have; None before there is one."""
    stored = await run.registry.get("genesis")
    return stored[0] if stored else None


def first_difference(ours: dict[str, object], theirs: dict[str, object], prefix: str = "") -> str | None:
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = first_difference(a, b, f"{prefix}{key}.")
            if inner:
                return inner
        elif a != b:
            return f"{prefix}{key} is {b!r} there, {a!r} here"
    return None
