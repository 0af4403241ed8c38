"""One check after another: this machine, each server, the run, and what the run needs of both."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast, get_args

from diloco import __version__
from diloco.control import creation
from diloco.control.changes import read_changes
from diloco.control.creation import KnownRun
from diloco.control.quarantines import read_outliers
from diloco.core.tensors.fragments import FragmentMap, unpack_map
from diloco.errors import BrokerError, DilocoError, RunError, SettingsError
from diloco.nats import identity, opening
from diloco.nats.connection import OLDEST_SERVER, malloc_environment
from diloco.nats.identity import Identity
from diloco.nats.registry import Registry
from diloco.nats.transport import NatsTransport
from diloco.service import skeleton as service
from diloco.service import volume
from diloco.settings.run import RunSettings
from diloco.settings.service import CoordinatorSettings, SyncerSettings, TorchLearnerSettings, check_region, host_and_port
from diloco.settings.validation import parse
from diloco.wire import framing
from diloco.wire.subjects import Subjects, reader
from diloco_ops.broker.admin import SERVER_AWAY
from diloco_ops.broker.probe import NotAllowedError, Probe
from diloco_ops.doctor import access, machine, needs, reach, region_verdicts, verdicts
from diloco_ops.doctor import mesh_check as island
from diloco_ops.doctor import server_check as server
from diloco_ops.doctor.check import Check, Role, skipped
from diloco_ops.doctor.needs import ModelSizes
from diloco_ops.doctor.server_check import ServerPlace

LOGIN_S = 5.0  # several round trips over the slowest link that a run bears
CHECK_S = 30.0  # no check takes longer
LISTEN_S = (1.2, 10.0)  # at least, two heartbeats of a coordinator; and at most
HEARTBEATS = 4  # that are waited for


class DoctorSettings(TorchLearnerSettings, SyncerSettings, CoordinatorSettings):
    """The settings of any service."""

    role: Role = "learner"  # type: ignore[assignment]  # more than a learner's


@dataclass
class _Open:
    """A place that has let us in."""

    place: ServerPlace
    probe: Probe
    jetstream: bool


class ServiceExamination:
    """The checks of one service."""

    def __init__(self, settings: DoctorSettings, role: Role | None, step_s: float | None) -> None:
        """``role``: None is that of the identity, or of the settings. ``step_s``: None is what is heard from learners."""
        self.settings, self.step_s = settings, step_s
        self.role: Role = role or settings.role
        self.subjects = Subjects(settings.run)
        self._role_given = role is not None
        self._identity: Identity | None = None
        self._open: dict[str, _Open] = {}
        self._run: KnownRun | None = None
        self._map: FragmentMap | None = None

    async def checks(self) -> AsyncIterator[Check]:
        """Yield all checks, each as soon as it is made."""
        try:
            for check in (*self._who(), *self._machine()):
                yield check
            for place in places(self.settings, self.role, self._identity):
                async for check in self._arrive(place):
                    yield check
            async for check in self._look_at_run():
                yield check
            if self.role == "learner" and island.is_island(self.settings):
                async for check in self._look_at_island():
                    yield check
            for opened in self._open.values():
                async for check in self._look_at(opened):
                    yield check
            for check in self._sizes():
                yield check
        finally:
            for opened in self._open.values():
                await opened.probe.transport.close()

    # ---- this machine

    def _who(self) -> Iterable[Check]:
        """Check the name and the identity."""
        try:
            self.settings = service.named(self.settings)
        except DilocoError as error:
            yield Check(
                "numbering",
                "failed",
                str(error),
                "",
                "let the service's user write there, or make one more identity for this service",
            )
            self.settings = self.settings.model_copy(update={"name": f"{self.settings.name[:-1]}0"})
        settings = self.settings
        if settings.identity is None:
            yield skipped("identity", "none is set: connections have no TLS and no credentials")
            return
        try:
            found = identity.load(identity.identity_file(settings.identity, settings.name))
            if not self._role_given and found.role in get_args(Role):
                self.role = cast(Role, found.role)
            expected = settings.name, settings.run, settings.region, self.role, settings.processes.count
            found = identity.of_service(settings.identity, *expected)
            assert found.tls is not None  # it is whole
        except SettingsError as error:
            yield Check("identity", "failed", str(error), "an identity of this service")
            return
        self._identity = found
        yield verdicts.identity(found.path, found.role, found.name, found.expires, datetime.now(UTC))
        lacks = verdicts.grant(self.role, found.name, authority=found.authority is not None, granted=found.grant is not None)
        if lacks is not None:
            yield lacks

    def _machine(self) -> Iterable[Check]:
        python = sys.version_info[:3]
        yield verdicts.versions(self.role, __version__, framing.VERSION, python, machine.jax_version())
        yield verdicts.open_files(machine.open_files())
        if platform.libc_ver()[0] == "glibc":
            wanted = malloc_environment()
            yield verdicts.allocator({name: os.environ.get(name) for name in wanted}, wanted)
        address = self.settings.metrics_address
        yield (
            verdicts.listening(address, machine.refusal_to_listen(address))
            if address
            else skipped("metrics", "no address is set")
        )

    def _sizes(self) -> Iterable[Check]:
        """Check memory and disk against the run's model."""
        run, model = self._run, self._carried
        if run is None or model is None:
            yield skipped("memory", "the run has no model yet")
        else:
            available = machine.available_bytes()
            yield (
                skipped("memory", "this system does not report its amount")
                if available is None
                else verdicts.memory(self.role, run.in_force, model, available)
            )
        path = self.settings.state_dir.absolute()
        try:
            disk = machine.disk(path)
        except DilocoError as error:
            yield Check(
                "state_dir", "failed", str(error), "", "let the service's user write there, or give it another state_dir"
            )
            return
        needed = needs.disk_bytes(self.role, model.size if model else 0, self.settings.checkpoint_s > 0)
        try:
            volume.check(path, self.settings.run)
        except RunError as error:
            yield Check("state_dir", "failed", str(error))
            return
        foreign = machine.foreign_files(path, run.identity) if run else []
        yield verdicts.state_dir(path, disk.free_bytes, disk.total_bytes, needed, disk.sync_s, foreign)

    @property
    def _model(self) -> ModelSizes | None:
        return None if self._map is None else ModelSizes.of(self._map)

    @property
    def _carried(self) -> ModelSizes | None:
        """The part of the model that this process of a learner carries; of all other services the whole."""
        model, count = self._model, self.settings.processes.count if self.role == "learner" else 1
        return None if model is None else ModelSizes(math.ceil(model.size / count), model.largest)

    # ---- servers

    async def _arrive(self, place: ServerPlace) -> AsyncIterator[Check]:
        """Reach a place's servers, and log in."""
        try:
            urls = opening.checked(",".join(place.urls))
        except SettingsError as error:
            yield Check(f"{place.name} reach", "failed", str(error), "", "correct the address")
            return
        reached = await asyncio.gather(*map(reach.reach, urls))
        yield verdicts.reached(place.name, [(one.url, one.address, one.connect_s, one.error) for one in reached])
        there = [url for url, one in zip(urls, reached, strict=True) if not one.error]
        if not there:
            yield skipped(f"{place.name} server", "a server that cannot be reached cannot be examined further")
            return
        try:
            info = await asyncio.to_thread(reach.first_word, there[0])
        except BrokerError as error:
            yield Check(f"{place.name} server", "failed", str(error), "a NATS server", "correct the address")
            return
        yield verdicts.server(place.name, info, OLDEST_SERVER)
        if self._identity is not None:
            secure = await self._limited(f"{place.name} tls", lambda: self._certificates(place.name, there))
            yield secure
        if self.settings.identity is not None and (self._identity is None or secure.verdict == "failed"):
            yield skipped(f"{place.name} login", "a server is examined further only once identity and TLS are in order")
            return
        try:
            probe = await Probe.open(urls, f"{self.settings.name}-doctor", self._identity, LOGIN_S)
        except BrokerError as error:
            yield verdicts.turned_away(place.name, str(error))
            return
        self._open[place.name] = _Open(place, probe, info.jetstream)
        yield Check(f"{place.name} login", "ok", "accepted")

    async def _certificates(self, place: str, urls: Sequence[str]) -> Check:
        """Check the certificate that ends first, of all servers of a place."""
        assert self._identity is not None
        tls = self._identity.tls
        ends = await asyncio.gather(*(asyncio.to_thread(reach.certificate_ends, url, tls) for url in urls))
        return verdicts.certificate(place, min(ends), datetime.now(UTC))

    async def _look_at(self, opened: _Open) -> AsyncIterator[Check]:
        """Try all that can be tried at a place that let us in."""
        place = opened.place
        if self._identity is not None:
            yield await self._limited(f"{place.name} list", lambda: _check_list(opened))
        yield await self._limited(f"{place.name} permissions", lambda: self._permissions(opened))
        if place.shortened:
            yield await self._limited(f"{place.name} shortening", lambda: _check_shortening(opened))
        if not place.control and not place.bulk:
            return
        if opened.jetstream:
            yield await self._limited(f"{place.name} storage", lambda: self._storage(opened))
            yield await self._limited(f"{place.name} limits", lambda: self._limits(opened))
            for check in await self._several(f"{place.name} room", lambda: self._scratch(opened)):
                yield check
            yield await self._limited(f"{place.name} clock", lambda: _check_clock(opened, self.subjects))
        else:
            yield skipped(f"{place.name} storage", "not available without JetStream")
        for check in await self._several(f"{place.name} link", lambda: self._link(opened)):
            yield check

    async def _limited(self, name: str, work: Callable[[], Coroutine[Any, Any, Check]]) -> Check:
        async def one() -> list[Check]:
            return [await work()]

        return (await self._several(name, one))[0]

    async def _several(self, name: str, work: Callable[[], Coroutine[Any, Any, list[Check]]]) -> list[Check]:
        """Make checks; if they fail to be made, return one that failed, called ``name``."""
        try:
            async with asyncio.timeout(CHECK_S):
                return await work()
        except SERVER_AWAY as error:
            reason = str(error) if isinstance(error, BrokerError) else f"no answer within {CHECK_S:g} s"
            return [Check(name, "failed", reason, "", "read the server's log")]

    async def _permissions(self, opened: _Open) -> Check:
        tried = opened.place.access
        refused = await server.forbidden(opened.probe, tried)
        excess = await server.excessive(opened.probe, tried) if self._identity is not None else []
        return verdicts.allowed(opened.place.name, tried.needed, refused, excess)

    def _needed_storage(self, place: ServerPlace) -> dict[str, int] | None:
        """Return the bytes needed by stream; None: not known yet."""
        if self._run is None or self._map is None:
            return None
        needed = needs.storage_bytes(self._run.in_force, self._map.size) if place.bulk else {}
        return needed | ({"bucket": needs.CONTROL_BYTES} if place.control else {})

    async def _storage(self, opened: _Open) -> Check:
        found = await server.storage(opened.probe, self.settings.run)
        return verdicts.storage(opened.place.name, found, self._needed_storage(opened.place))

    async def _limits(self, opened: _Open) -> Check:
        wider = await server.wider_limits(opened.probe, self.settings.run)
        return verdicts.limits(opened.place.name, wider, lists_have_none=opened.probe.lacks_limit)

    async def _scratch(self, opened: _Open) -> list[Check]:
        """Make streams of our own for a moment, to see whether there is room and how long a sync takes."""
        place, probe = opened.place.name, opened.probe
        needed = self._needed_storage(opened.place)
        found = await server.storage(probe, self.settings.run)
        missing = verdicts.missing_bytes(found, needed or {})
        try:
            async with server.scratch(probe, self.settings.name, "file", max(1, found.used_bytes + missing)):
                room = verdicts.reserved(place, missing, "")
        except NotAllowedError:
            why = "this identity may not create streams"
            return [
                skipped(f"{place} room", why),
                skipped(f"{place} sync", f"{why}; the disk of state_dir is measured instead"),
            ]
        except BrokerError as error:
            room = verdicts.reserved(place, missing, str(error))
        async with (
            server.scratch(probe, self.settings.name, "memory", server.SCRATCH_BYTES) as memory,
            server.scratch(probe, self.settings.name, "file", server.SCRATCH_BYTES) as file,
        ):
            memory_s, file_s = await server.append_s(probe, (memory, file))
        return [
            room if needed else skipped(f"{place} room", "the run has no model yet"),
            verdicts.sync(place, memory_s, file_s),
        ]

    async def _link(self, opened: _Open) -> list[Check]:
        place, settings = opened.place, self._run.in_force if self._run else None
        if not place.bulk:
            return [
                verdicts.signs(place.name, await server.round_trip_s(opened.probe), self._run.in_force if self._run else None)
            ]
        speed = await server.speed(opened.probe)
        settings = self._run.in_force if self._run else None
        return verdicts.link(place.name, self.role, speed, settings, self._model, self.step_s, far=place.far)

    # ---- the run

    async def _look_at_run(self) -> AsyncIterator[Check]:
        control = next((opened for opened in self._open.values() if opened.place.control), None)
        if control is None:
            yield skipped("run", "its control server refuses this identity")
            yield skipped("name", "messages of other processes cannot be received")
            return
        yield await self._limited("run", lambda: self._read_run(control.probe.transport))
        if self._run is None:
            yield skipped("name", "the run is not there yet")
            return
        regions = self._run.created.regions.names
        if regions and self.role in ("syncer", "coordinator"):
            yield region_verdicts.other_regions(self.role, self.settings.region, regions, self.settings.region_urls)
        for check in await self._several("name", lambda: self._listen(control)):
            yield check

    async def _read_run(self, transport: NatsTransport) -> Check:
        name = self.settings.run
        try:
            registry = await Registry.open(transport, self.subjects.bucket, create=False)
            stored = await registry.get("run")
        except BrokerError as error:
            return verdicts.no_run(name, self.role, str(error))
        if stored is None:
            return verdicts.no_run(name, self.role, "it has no settings")
        try:
            await creation.check_protocol(registry, name)
            settings = parse(RunSettings, creation.settings_of(name, stored[0]), f"run {name!r}")
            check_region(self.settings.region, settings.regions.names, name)
            found = KnownRun(name, settings, registry)
            found.adopt((await read_changes(found)).records)
            await read_outliers(found)
            self._run = found
            stored_map = await registry.get("map")
            self._map = None if stored_map is None else unpack_map(stored_map[0])
        except BrokerError:
            raise
        except DilocoError as error:
            return Check(
                "run", "failed", str(error), "", "check that this is the intended run; if it is, update the older service"
            )
        if self.role == "learner" and self.settings.name in self._run.now.excluded:
            return verdicts.excluded(name, self.settings.name)
        if self.role == "coordinator":
            difference = creation.difference_from(self.settings.settings, settings.model_dump())
            if difference:
                return Check("run", "failed", difference, "the settings of the run", "correct them, or choose another run name")
        return verdicts.run(name, settings, self._map)

    async def _look_at_island(self) -> AsyncIterator[Check]:
        """Check the mesh of a learner's devices, and the way between its processes."""
        processes, run = self.settings.processes, self._run.created if self._run else None
        fit = None
        try:
            fit = await island.measure(self.settings, run)
            yield island.mesh(fit, processes.count, run_known=run is not None)
        except DilocoError as error:
            yield Check("mesh", "failed", str(error))
        if processes.count == 1:
            return
        yield island.meets(processes, *await island.meeting(processes))
        host, _ = host_and_port(processes.addresses[0], "processes.address")
        yield island.host_name(socket.gethostname(), await asyncio.to_thread(island.own_address), host)
        if fit is not None:
            yield island.facts(fit)

    async def _listen(self, control: _Open) -> list[Check]:
        assert self._run is not None
        liveness = self._run.in_force.liveness
        listen_s = min(max(HEARTBEATS * max(liveness.heartbeat_s, liveness.takeover_s / 6), LISTEN_S[0]), LISTEN_S[1])
        probe = server.HeartbeatProbe(self._run.identity, self.settings.name)
        own = {"syncer": self.subjects.shard(), "coordinator": self.subjects.coordinator}.get(
            self.role, self.subjects.heartbeat()
        )
        signs = (self.subjects.heartbeat(), self.subjects.shard(), self.subjects.coordinator)
        heard = await probe.listen(control.probe, signs, listen_s)
        found = probe.members
        self.step_s = found.step_s if self.step_s is None else self.step_s
        if own in heard:
            return verdicts.members(self.settings.name, found, listen_s)
        return [skipped("name", "this identity may not listen to processes of its own role")]


async def _check_shortening(opened: _Open) -> Check:
    return region_verdicts.shortening(opened.place.name, await server.may_shorten(opened.probe, opened.place.shortened))


async def _check_list(opened: _Open) -> Check:
    return verdicts.listed(opened.place.name, await opened.probe.server_list())


async def _check_clock(opened: _Open, subjects: Subjects) -> Check:
    place = opened.place
    stream = f"KV_{subjects.bucket}" if place.control else subjects.log_stream
    found = await server.clock(opened.probe, stream)
    if found is None:
        return skipped(
            f"{place.name} clock", "the server's time is read from the run's streams, and the run does not exist yet"
        )
    return verdicts.clock(place.name, found.ahead_s, found.uncertainty_s)


def places(settings: DoctorSettings, role: Role, identity: Identity | None) -> Sequence[ServerPlace]:
    """Return the servers that a service uses."""
    run, name = settings.run, settings.name
    own = reader(name, identity.public_key if identity else None)
    control = access.at_control(role, run, name)
    bulk = access.at_bulk(role, run, name, own)
    if settings.bulk_url == settings.nats_url:
        found = [ServerPlace("nats", (settings.nats_url,), control + bulk, control=True, bulk=True)]
    else:
        found = [
            ServerPlace("control", (settings.nats_url,), control, control=True),
            ServerPlace(settings.region or "bulk", (settings.bulk_url,), bulk, bulk=True),
        ]
    if role == "syncer":
        tried = access.other_region(run, own)
        found += [ServerPlace(region, (url,), tried, bulk=True, far=True) for region, url in settings.region_urls.items()]
    elif role == "coordinator":
        log, tried = Subjects(run).log_stream, access.shortened_region(run, own)
        found[-1] = replace(found[-1], shortened=log)
        found += [ServerPlace(region, (url,), tried, far=True, shortened=log) for region, url in settings.region_urls.items()]
    return found
