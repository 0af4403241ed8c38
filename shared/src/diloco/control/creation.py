"""Creating and finding a run: its streams, its settings, the protocol that it speaks, its fragment map.

A run is a small key-value bucket beside its streams. Keys: ``protocol`` (what members must speak), ``run`` (settings as JSON),
``map`` (the fragment map), ``member.<learner>`` (:mod:`~diloco.control.admission`), ``founder`` and ``genesis``
(:mod:`~diloco.control.genesis`), ``owners`` (:mod:`~diloco.control.tables`), ``share.<learner>``
(:mod:`~diloco.control.shares`), ``changes`` (:mod:`~diloco.control.changes`), ``quarantine.<syncer>``
(:mod:`~diloco.control.quarantines`). All are written by compare-and-set or are idempotent, so that any member may do it, and a
dead one is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import msgspec

from diloco import __version__
from diloco.core.run.changes import Change, Effective, in_force
from diloco.core.run.quarantine import Statements
from diloco.core.tensors.fragments import FragmentMap, unpack_map
from diloco.errors import BrokerError, FenceError, FormatError, RunError, SettingsError
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.settings.run import CONTINUES, NARROW_BITS, REGIONAL_QUARANTINE, RunSettings
from diloco.settings.time_limits import check_time_limits, contradiction
from diloco.settings.validation import parse
from diloco.transport import Bucket, Transport
from diloco.wire.fields import Software
from diloco.wire.framing import OLDEST, VERSION, run_id
from diloco.wire.plain import json_object
from diloco.wire.subjects import Subjects

Feature = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,32}\Z")]
MAX_FEATURES = 64
POLL_S = 0.2  # how soon a member sees what another one has made: short beside the start of a process


class Protocol(msgspec.Struct, frozen=True):
    """The bucket's key ``protocol``, as JSON, to which later versions may add. Every version must be able to read it."""

    protocol: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    software: Software  # that made the run
    requires: Annotated[list[Feature], msgspec.Meta(max_length=MAX_FEATURES)] = []  # that each member must know beside it


# those that a run may require of this version (docs/protocol.md, section 16)
FEATURES = frozenset({*NARROW_BITS.values(), CONTINUES, REGIONAL_QUARANTINE})
_PROTOCOL_DECODER = msgspec.json.Decoder(Protocol)


@dataclass
class KnownRun:
    """A run as its members know it before they know its fragment map."""

    name: str
    created: RunSettings  # its settings as created, for good; their digest is its identity
    registry: Bucket
    authority: str | None = None  # public key of who signs learners' grants; None: without identities, and for commands

    def __post_init__(self) -> None:
        self._now = Effective(self.created)
        self._statements: Statements = {}
        self._owners: Sequence[str] | None = None

    @property
    def in_force(self) -> RunSettings:
        """The settings in force, as far as this process has read the run's changes."""
        return self._now.settings

    @property
    def now(self) -> Effective:
        """The changes in force, as far as this process has read them."""
        return self._now

    def adopt(self, changes: Sequence[Change]) -> None:
        """Go by these changes, all that were made since the run was created.

        Raises:
            SettingsError: one sets what cannot be set; nothing has changed.
        """
        self._now = self.after(changes)

    def after(self, changes: Sequence[Change]) -> Effective:
        """Return what is in force after these changes, all that were made, with what was read of outliers.

        Raises:
            SettingsError: one sets what cannot be set.
        """
        return in_force(self.created, changes).judged(self._statements, self._owners)

    def judge(self, statements: Statements, owners: Sequence[str] | None) -> None:
        """Go by what syncers have stated of outliers; ``owners``: of the fragments, None if they are not known."""
        self._statements, self._owners = statements, owners
        self._now = self._now.judged(statements, owners)

    @property
    def regions(self) -> bool:
        """Whether there are several regions' logs."""
        return bool(self.created.regions.names)

    @cached_property
    def identity(self) -> bytes:
        """Identity of the run, which every frame carries."""
        return run_id(self.name, self.created.digest())


async def create(
    transport: Transport, name: str, settings: RunSettings, offer_bytes: int = -1, *, check_limits: bool = False
) -> KnownRun:
    """Make the run's streams and bucket and store its settings; succeed too if it exists with the same settings.

    Raises:
        RunError: a run of that name exists with other settings, the first that differs is named; or of another protocol.
        SettingsError: with ``check_limits``, the run is new, and its time limits contradict each other.
    """
    replicas = settings.regions.control_replicas if settings.regions.names else settings.log.replicas
    registry = await transport.bucket(Subjects(name).bucket, create=True, replicas=replicas)
    stored = await registry.get("run")
    if stored is not None:
        await check_protocol(registry, name)  # before the streams: those of another version are left as they are
    elif check_limits:
        check_time_limits(settings, f"run {name!r}")
    await make_streams(transport, name, settings, offer_bytes)
    if stored is None:
        # before the settings: a member that finds them finds this
        with contextlib.suppress(FenceError):
            await registry.create("protocol", msgspec.json.encode(Protocol(VERSION, __version__, settings.requires)))
        await check_protocol(registry, name)
        with contextlib.suppress(FenceError):
            await registry.create("run", settings.canonical())
            return KnownRun(name, settings, registry, transport.authority)
        stored = await registry.get("run")
    await check_protocol(registry, name)  # the right to write may have ended
    difference = difference_from(settings, settings_of(name, stored[0]) if stored else {})
    if difference:
        raise RunError(
            f"run {name!r} exists on the server with another setting: {difference}; resume it with its own settings, or "
            "choose another run name"
        )
    return KnownRun(name, settings, registry, transport.authority)


async def make_streams(transport: Transport, name: str, settings: RunSettings, offer_bytes: int = -1) -> None:
    """Make the streams of a run that a region's server holds, unless they exist as they should."""
    names, replicas = Subjects(name), settings.log.replicas
    room = {
        names.log_stream: await transport.ensure_stream(names.log_stream, names.log_filters(), replicas=replicas),
        names.offer_stream: await transport.ensure_stream(
            names.offer_stream, names.offer_filters(), max_msgs_per_subject=1, max_bytes=offer_bytes, replicas=replicas
        ),
    }
    if settings.log.archive:
        room[names.archive_stream] = await transport.ensure_stream(
            names.archive_stream, names.archive_filters(), max_bytes=settings.log.archive_bytes, replicas=replicas
        )
    for stream, max_bytes in room.items():
        if max_bytes is not None:  # it was lowered: the run goes on as far as that goes
            observe.get_logger().warning("stream_limited", stream=stream, max_bytes=max_bytes)


async def find(transport: Transport, name: str, log: Logger) -> KnownRun:
    """Wait until the run exists, and read its settings.

    Raises:
        RunError: the run is of a protocol that this version does not speak, or the settings stored are none of this version.
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
    made_by = (await until_available(partial(check_protocol, registry, name), log)).software
    if made_by != __version__:
        log.info("version_differs", sender="run", kind=made_by, here=__version__)
    try:
        settings = parse(RunSettings, settings_of(name, stored[0]), f"run {name!r}")
    except SettingsError as error:
        raise RunError(f"run {name!r} was made by another version: {error}") from None
    reason = contradiction(settings)
    if reason is not None:
        log.warning("time_limits_contradict", reason=reason)
    return KnownRun(name, settings, registry, transport.authority)


async def open_run(transport: Transport, name: str, settings: RunSettings) -> KnownRun:
    """Open a run whose settings are known."""
    return KnownRun(name, settings, await transport.bucket(Subjects(name).bucket, create=False), transport.authority)


async def stored_settings(registry: Bucket, name: str) -> RunSettings | None:
    """Read the settings that a run was created with; None if its bucket has none.

    Raises:
        RunError: the run is of a protocol that this version does not speak, or the bucket holds no JSON object.
        SettingsError: they are no settings of this version.
    """
    stored = await registry.get("run")
    if stored is None:
        return None
    await check_protocol(registry, name)
    return parse(RunSettings, settings_of(name, stored[0]), f"run {name!r}")


async def check_protocol(registry: Bucket, name: str) -> Protocol:
    """Return the protocol that the members of a run must speak.

    Raises:
        RunError: this version does not: one that is older than the run, after a downgrade, or much newer.
    """
    stored = await registry.get("protocol")
    if stored is None:
        raise RunError(
            f"run {name!r} has no key 'protocol', as if an early diloco 0.1.0 had made it; this is diloco {__version__}, "
            f"which speaks protocol {VERSION}: use diloco 0.1.0, or begin another run; if the key was lost: diloco repair "
            "RUN --key protocol"
        )
    try:
        found = _PROTOCOL_DECODER.decode(stored[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RunError(
            f"run {name!r}: the bucket's key 'protocol' is damaged ({error}); diloco repair RUN --key protocol"
        ) from None
    if not OLDEST <= found.protocol <= VERSION:
        ours = str(VERSION) if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
        raise RunError(
            f"run {name!r} was made by diloco {found.software} and speaks protocol {found.protocol}; this is diloco "
            f"{__version__}, which speaks {ours}: "
            + ("update it" if found.protocol > VERSION else f"use diloco {found.software}, or begin another run")
        )
    unknown = sorted(set(found.requires) - FEATURES)
    if unknown:
        raise RunError(
            f"run {name!r} was made by diloco {found.software} and requires {', '.join(unknown)} of its members; this is "
            f"diloco {__version__}, which lacks that feature: update it"
        )
    return found


def settings_of(name: str, stored: bytes) -> dict[str, Any]:
    """Return the value of the key ``run``.

    Raises:
        RunError: it is no JSON object.
    """
    values = json_object(stored)
    if values is None:
        raise RunError(
            f"run {name!r}: the bucket's key 'run' holds {stored[:40]!r} and not a JSON object; diloco repair RUN --key "
            "run, or choose another run name"
        )
    return values


async def find_map(run: KnownRun) -> FragmentMap:
    """Wait until a learner has proposed the fragment map.

    Raises:
        RunError: the bucket holds something else.
    """
    while True:
        stored = await run.registry.get("map")
        if stored is not None:
            try:
                return unpack_map(stored[0])
            except FormatError as error:
                raise RunError(
                    f"run {run.name!r}: the bucket's key 'map' is damaged, or was written by a version newer than "
                    f"{__version__} ({error}); update diloco, or use diloco repair RUN --key map"
                ) from None
        await asyncio.sleep(POLL_S)


def difference_from(settings: RunSettings, stored: dict[str, object]) -> str | None:
    """Return the first difference of a run's settings from those that are stored with it; None: there is none."""
    return first_difference(settings.for_members().model_dump(), stored)


def first_difference(ours: dict[str, object], theirs: dict[str, object], prefix: str = "") -> str | None:
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = first_difference(a, b, f"{prefix}{key}.")
            if inner:
                return inner
        elif a != b:
            there, here = ("not set" if value is None else repr(value) for value in (b, a))
            return f"{prefix}{key} is {there} there, {here} here"
    return None
