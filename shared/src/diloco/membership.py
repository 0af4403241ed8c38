"""Creating, finding and joining a run: settings, fragment map, admission and genesis, through a small key-value bucket.

Keys: ``run`` (settings as JSON), ``map`` (the fragment map), ``member.<learner>`` (admission), ``founder`` (who publishes
version 0). All are written by compare-and-set or are idempotent, so that any member may do it, and a dead one is replaced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import AdmissionError, BrokerError, FenceError, FormatError, RunError, SettingsError
from diloco.log import Log
from diloco.nats import streams
from diloco.nats.connection import Link
from diloco.nats.registry import MAX_VALUE_BYTES, Registry
from diloco.observe import Logger
from diloco.settings import RunSettings, parse
from diloco.wire.messages import Count, Genesis, Hash, MemberName, run_id
from diloco.wire.subjects import Subjects

POLL_S = 0.2


class Admission(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a learner writes to be admitted; syncers merge only offers of this incarnation with the run's digests."""

    learner: MemberName
    incarnation: Count
    settings_digest: Hash
    map_digest: Hash


@dataclass(frozen=True)
class Run:
    """A run as its members know it before they know its fragment map."""

    name: str
    settings: RunSettings
    registry: Registry

    @property
    def identity(self) -> bytes:
        """What every frame carries."""
        return run_id(self.name, self.settings.digest())


async def create(link: Link, name: str, settings: RunSettings, offer_bytes: int = -1) -> Run:
    """Make the run's streams and bucket and store its settings; a run that exists with the same settings is as good.

    Raises:
        RunError: a run of that name exists with other settings; the first that differs is named.
    """
    names = Subjects(name)
    await streams.ensure(link, names.log_stream, names.log_filters())
    await streams.ensure(link, names.offer_stream, names.offer_filters(), max_msgs_per_subject=1, max_bytes=offer_bytes)
    registry = await Registry.open(link, names.bucket, create=True)
    # the very bytes that the settings' digest is of, so that other implementations can hash what they read
    text = json.dumps(settings.model_dump(), sort_keys=True, separators=(",", ":")).encode()
    try:
        await registry.create("run", text)
    except FenceError:
        stored = await registry.get("run")
        difference = first_difference(settings.model_dump(), _settings_of(name, stored[0]) if stored else {})
        if difference:
            raise RunError(
                f"run {name!r} exists on the server with another setting: {difference}; resume it with its own settings, or "
                "choose another run name"
            ) from None
    return Run(name, settings, registry)


async def find(link: Link, name: str, log: Logger) -> Run:
    """Wait until the run exists, and read its settings.

    Raises:
        RunError: what is stored are no settings of this version.
    """
    bucket, waiting = Subjects(name).bucket, False
    while True:
        try:
            registry = await Registry.open(link, bucket, create=False)
            stored = await registry.get("run")
            if stored is not None:
                break
        except BrokerError:
            pass
        if not waiting:
            log.info("waiting_for_run")
            waiting = True
        await asyncio.sleep(POLL_S)
    try:
        return Run(name, parse(RunSettings, _settings_of(name, stored[0]), f"run {name!r}"), registry)
    except SettingsError as error:
        raise RunError(f"run {name!r} was made by another version: {error}") from None


def _settings_of(name: str, stored: bytes) -> dict[str, Any]:
    try:
        values = json.loads(stored)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
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


async def join(run: Run, learner: str, incarnation: int, ours: FragmentMap, settings_digest: bytes) -> None:
    """Propose the fragment map, or find that it is the run's already, and admit the learner.

    Raises:
        AdmissionError: this learner's model is not the run's; the first differing tensor is named.
    """
    packed = ours.pack()
    if len(packed) > MAX_VALUE_BYTES:
        raise AdmissionError(
            f"run {run.name!r}: the list of this model's {len(ours.tensors)} tensors has {len(packed)} bytes, at most "
            f"{MAX_VALUE_BYTES} are allowed; use fewer tensors, or shorter names"
        )
    try:
        await run.registry.create("map", packed)
    except FenceError:
        check_same_map(ours, await find_map(run), run.name)
    if settings_digest != run.settings.digest():
        raise AdmissionError(f"run {run.name!r}: learner {learner} was made for other settings than the run's")
    admission = Admission(learner, incarnation, settings_digest, ours.digest)
    await run.registry.put(f"member.{learner}", msgspec.msgpack.encode(admission))


async def admitted(run: Run, learner: str, map_digest: bytes) -> int | None:
    """The incarnation in which a learner is admitted, or None if it is not, or not to this run's settings and map."""
    try:
        stored = await run.registry.get(f"member.{learner}")
        if stored is None:
            return None
        admission = msgspec.msgpack.decode(stored[0], type=Admission)
    except (FormatError, msgspec.MsgspecError, RecursionError):
        return None
    same = admission.settings_digest == run.settings.digest() and admission.map_digest == map_digest
    return admission.incarnation if same and admission.learner == learner else None


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
        found = await log.genesis()
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
                await log.found(learner, run.settings.digest(), initial())
                continue
        await asyncio.sleep(POLL_S)


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
