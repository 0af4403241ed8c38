"""One check after another: this machine, each server, the run, and what the run needs of both."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast, get_args

import nats.errors

from diloco import __version__, identity, membership, service, volume
from diloco.core.changes import in_force
from diloco.core.fragments import FragmentMap, unpack_map
from diloco.doctor import deeds, machine, needs, server, verdicts
from diloco.doctor.check import Check, Role, skipped
from diloco.doctor.needs import Model
from diloco.doctor.server import Listener, Place
from diloco.errors import BrokerError, DilocoError, RunError, SettingsError
from diloco.identity import Identity
from diloco.membership import Run
from diloco.nats import connection
from diloco.nats.connection import OLDEST_SERVER
from diloco.nats.registry import Registry
from diloco.nats.transport import NatsTransport
from diloco.observe import Logger
from diloco.settings import CoordinatorSettings, LearnerSettings, RunSettings, SyncerSettings, check_region, parse
from diloco.wire import messages
from diloco.wire.subjects import Subjects

LOGIN_S = 5.0
CHECK_S = 30.0  # no check takes longer
LISTEN_S = (1.2, 10.0)  # at least, two signs of life of a coordinator; and at most
PULSES = 4  # that are waited for


class DoctorSettings(LearnerSettings, SyncerSettings, CoordinatorSettings):
    """What any service would be told."""

    role: Role = "learner"  # type: ignore[assignment]  # more than a learner's


@dataclass
class _Open:
    """A place that has let us in."""

    place: Place
    transport: NatsTransport
    listener: Listener
    jetstream: bool


class Examination:
    """The checks of one service."""

    def __init__(self, settings: DoctorSettings, role: Role | None, step_s: float | None) -> None:
        """``role``: None is that of the identity, or of the settings. ``step_s``: None is what is heard from learners."""
        self.settings, self.step_s = settings, step_s
        self.role: Role = role or settings.role
        self.subjects = Subjects(settings.run)
        self._role_given = role is not None
        self._identity: Identity | None = None
        self._open: dict[str, _Open] = {}
        self._run: Run | None = None
        self._map: FragmentMap | None = None

    async def checks(self) -> AsyncIterator[Check]:
        """All of them, each as soon as it is made."""
        try:
            for check in (*self._who(), *self._machine()):
                yield check
            for place in places(self.settings, self.role):
                async for check in self._arrive(place):
                    yield check
            async for check in self._look_at_run():
                yield check
            for opened in self._open.values():
                async for check in self._look_at(opened):
                    yield check
            for check in self._sizes():
                yield check
        finally:
            for opened in self._open.values():
                await opened.transport.close()

    # ---- this machine

    def _who(self) -> Iterable[Check]:
        """Whose name and identity it is."""
        try:
            self.settings = service.named(self.settings)
        except DilocoError as error:
            yield Check(
                "numbering", "failed", str(error), "", "let the service's user write there, or give it an identity more"
            )
            self.settings = self.settings.model_copy(update={"name": f"{self.settings.name[:-1]}0"})
        settings = self.settings
        if settings.identity is None:
            yield skipped("identity", "none is set: without TLS and credentials")
            return
        try:
            found = identity.load(identity.identity_file(settings.identity, settings.name))
            if not self._role_given and found.role in get_args(Role):
                self.role = cast(Role, found.role)
            found = identity.of_service(settings.identity, settings.name, settings.run, settings.region, self.role)
            assert found.tls is not None  # it is whole
        except SettingsError as error:
            yield Check("identity", "failed", str(error), "an identity of this service")
            return
        self._identity = found
        yield verdicts.identity(found.path, found.role, found.name, found.expires, datetime.now(UTC))

    def _machine(self) -> Iterable[Check]:
        python = sys.version_info[:3]
        yield verdicts.versions(self.role, __version__, messages.VERSION, python, machine.jax_version())
        yield verdicts.open_files(machine.open_files())
        if platform.libc_ver()[0] == "glibc":
            wanted = connection.malloc_environment()
            yield verdicts.allocator({name: os.environ.get(name) for name in wanted}, wanted)
        address = self.settings.metrics_address
        yield (
            verdicts.listening(address, machine.refusal_to_listen(address))
            if address
            else skipped("metrics", "no address is set")
        )

    def _sizes(self) -> Iterable[Check]:
        """What needs to know the run."""
        run, model = self._run, self._model
        if run is None or model is None:
            yield skipped("memory", "the run has no model yet")
        else:
            available = machine.available_bytes()
            yield (
                skipped("memory", "this system does not say how much there is")
                if available is None
                else verdicts.memory(self.role, run.now.settings, model, available)
            )
        path = self.settings.state_dir.absolute()
        try:
            disk = machine.disk(path)
        except DilocoError as error:
            yield Check(
                "state_dir", "failed", str(error), "", "let the service's user write there, or give it another state_dir"
            )
            return
        needed = needs.disk_bytes(self.role, model.parameters if model else 0, self.settings.checkpoint_s > 0)
        try:
            volume.check(path, self.settings.run)
        except RunError as error:
            yield Check("state_dir", "failed", str(error))
            return
        foreign = machine.foreign_files(path, run.identity) if run else []
        yield verdicts.state_dir(path, disk.free_bytes, disk.total_bytes, needed, disk.sync_s, foreign)

    @property
    def _model(self) -> Model | None:
        return None if self._map is None else Model.of(self._map)

    # ---- servers

    async def _arrive(self, place: Place) -> AsyncIterator[Check]:
        """Reach a place's servers, and log in."""
        try:
            urls = connection.checked(",".join(place.urls))
        except SettingsError as error:
            yield Check(f"{place.name} reach", "failed", str(error), "", "correct the address")
            return
        reached = await asyncio.gather(*map(server.reach, urls))
        yield verdicts.reached(place.name, [(one.url, one.address, one.connect_s, one.error) for one in reached])
        there = [url for url, one in zip(urls, reached, strict=True) if not one.error]
        if not there:
            yield skipped(f"{place.name} server", "nothing more is to be seen of what cannot be reached")
            return
        try:
            told = await asyncio.to_thread(server.first_word, there[0])
        except BrokerError as error:
            yield Check(f"{place.name} server", "failed", str(error), "a NATS server", "correct the address")
            return
        yield verdicts.told(place.name, told, OLDEST_SERVER)
        if self._identity is not None:
            secure = await self._limited(f"{place.name} tls", lambda: self._certificates(place.name, there))
            yield secure
        if self.settings.identity is not None and (self._identity is None or secure.verdict == "failed"):
            yield skipped(f"{place.name} login", "nothing is said to a server without an identity and TLS that are in order")
            return
        listener = Listener()
        log = cast(Logger, listener)
        name = f"{self.settings.name}-doctor"
        try:
            client = await connection.connect(urls, name, log, LOGIN_S, self._identity)
        except BrokerError as error:
            yield verdicts.turned_away(place.name, str(error))
            return
        transport = NatsTransport(client, client, name, self._identity)
        self._open[place.name] = _Open(place, transport, listener, told.jetstream)
        yield Check(f"{place.name} login", "ok", "accepted")

    async def _certificates(self, place: str, urls: Sequence[str]) -> Check:
        """Of all servers of a place, that of the one which ends first."""
        assert self._identity is not None
        tls = self._identity.tls
        ends = await asyncio.gather(*(asyncio.to_thread(server.certificate_ends, url, tls) for url in urls))
        return verdicts.certificate(place, min(ends), datetime.now(UTC))

    async def _look_at(self, opened: _Open) -> AsyncIterator[Check]:
        """All that can be tried at a place that let us in."""
        place = opened.place
        yield await self._limited(f"{place.name} permissions", lambda: self._permissions(opened))
        if opened.jetstream:
            yield await self._limited(f"{place.name} storage", lambda: self._storage(opened))
            for check in await self._several(f"{place.name} room", lambda: self._scratch(opened)):
                yield check
            yield await self._limited(f"{place.name} clock", lambda: self._clock(opened))
        else:
            yield skipped(f"{place.name} storage", "there is none without JetStream")
        for check in await self._several(f"{place.name} link", lambda: self._link(opened)):
            yield check

    async def _limited(self, name: str, work: Callable[[], Coroutine[Any, Any, Check]]) -> Check:
        async def one() -> list[Check]:
            return [await work()]

        return (await self._several(name, one))[0]

    async def _several(self, name: str, work: Callable[[], Coroutine[Any, Any, list[Check]]]) -> list[Check]:
        """Checks, of which the first one's name is ``name`` if something goes wrong."""
        try:
            async with asyncio.timeout(CHECK_S):
                return await work()
        except (TimeoutError, nats.errors.Error, BrokerError) as error:
            reason = str(error) if isinstance(error, BrokerError) else f"no answer within {CHECK_S:g} s"
            return [Check(name, "failed", reason, "", "look into the server's log")]

    async def _permissions(self, opened: _Open) -> Check:
        tried = opened.place.deeds
        refused = await server.forbidden(opened.transport.bulk, opened.listener, tried)
        return verdicts.allowed(opened.place.name, len(tried.listens) + len(tried.stores), refused)

    def _needed_storage(self, place: Place) -> dict[str, int] | None:
        """By stream; None: not known yet."""
        if self._run is None or self._map is None:
            return None
        needed = needs.storage_bytes(self._run.now.settings, self._map.parameters) if place.bulk else {}
        return needed | ({"bucket": needs.CONTROL_BYTES} if place.control else {})

    async def _storage(self, opened: _Open) -> Check:
        found = await server.storage(opened.transport.bulk, opened.listener, self.settings.run)
        return verdicts.storage(opened.place.name, found, self._needed_storage(opened.place))

    async def _scratch(self, opened: _Open) -> list[Check]:
        """Streams of our own, for as long as it takes to see whether there is room, and how long a sync takes."""
        place, client = opened.place.name, opened.transport.bulk
        needed = self._needed_storage(opened.place)
        found = await server.storage(client, opened.listener, self.settings.run)
        missing = verdicts.missing_bytes(found, needed or {})
        try:
            async with server.scratch(client, opened.listener, self.settings.name, "file", max(1, found.used_bytes + missing)):
                room = verdicts.reserved(place, missing, "")
        except server.NotAllowedError:
            why = "this identity may make no stream"
            return [skipped(f"{place} room", why), skipped(f"{place} sync", f"{why}; the state_dir's disk is measured")]
        except BrokerError as error:
            room = verdicts.reserved(place, missing, str(error))
        async with (
            server.scratch(client, opened.listener, self.settings.name, "memory", server.SCRATCH_BYTES) as memory,
            server.scratch(client, opened.listener, self.settings.name, "file", server.SCRATCH_BYTES) as file,
        ):
            memory_s, file_s = await server.append_s(client, (memory, file))
        return [
            room if needed else skipped(f"{place} room", "the run has no model yet"),
            verdicts.sync(place, memory_s, file_s),
        ]

    async def _clock(self, opened: _Open) -> Check:
        place = opened.place
        stream = f"KV_{self.subjects.bucket}" if place.control else self.subjects.log_stream
        found = await server.clock(opened.transport.bulk, opened.listener, stream)
        if found is None:
            return skipped(f"{place.name} clock", "the run is not there yet, whose streams tell the server's time")
        return verdicts.clock(place.name, *found)

    async def _link(self, opened: _Open) -> list[Check]:
        place, client = opened.place, opened.transport.bulk
        if not place.bulk:
            return [verdicts.signs(place.name, await server.round_trip(client), self._run.now.settings if self._run else None)]
        speed = await server.speed(client, opened.listener, client.new_inbox)
        settings = self._run.now.settings if self._run else None
        return verdicts.link(place.name, self.role, speed, settings, self._model, self.step_s, far=place.far)

    # ---- the run

    async def _look_at_run(self) -> AsyncIterator[Check]:
        control = next((opened for opened in self._open.values() if opened.place.control), None)
        if control is None:
            yield skipped("run", "its control server does not let us in")
            yield skipped("name", "nobody can be heard")
            return
        yield await self._limited("run", lambda: self._read_run(control.transport))
        if self._run is None:
            yield skipped("name", "the run is not there yet")
            return
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
            await membership.check_protocol(registry, name)
            settings = parse(RunSettings, membership.settings_of(name, stored[0]), f"run {name!r}")
            check_region(self.settings.region, settings.regions.names, name)
            found = Run(name, settings, registry)
            found.now = in_force(settings, (await membership.changes(found))[0].records)
            self._run = found
            stored_map = await registry.get("map")
            self._map = None if stored_map is None else unpack_map(stored_map[0])
        except BrokerError:
            raise
        except DilocoError as error:
            return Check("run", "failed", str(error), "", "is this the run that is meant? Else update the older service")
        if self.role == "learner" and self.settings.name in self._run.now.barred:
            return verdicts.barred(name, self.settings.name)
        if self.role == "coordinator":
            own, there = self.settings.settings.model_dump(), settings.model_dump()
            difference = membership.first_difference(own, there)
            if difference:
                return Check(
                    "run", "failed", difference, "the settings that the run has", "correct them, or choose another run name"
                )
        return verdicts.run(name, settings, self._model)

    async def _listen(self, control: _Open) -> list[Check]:
        assert self._run is not None
        liveness = self._run.now.settings.liveness
        listen_s = min(max(PULSES * max(liveness.pulse_s, liveness.takeover_s / 6), LISTEN_S[0]), LISTEN_S[1])
        ear = server.Ear(self._run.identity, self.settings.name)
        own = {"syncer": self.subjects.shard(), "coordinator": self.subjects.coordinator}.get(self.role, self.subjects.pulse())
        signs = (self.subjects.pulse(), self.subjects.shard(), self.subjects.coordinator)
        heard = await ear.listen(control.transport.control, control.listener, signs, listen_s)
        found = ear.members
        self.step_s = found.step_s if self.step_s is None else self.step_s
        if own in heard:
            return verdicts.members(self.settings.name, found, listen_s)
        return [skipped("name", "this identity may not listen to those whose role it has")]


def places(settings: DoctorSettings, role: Role) -> Sequence[Place]:
    """The servers that a service talks to."""
    run, name = settings.run, settings.name
    control = deeds.at_control(role, run, name)
    bulk = deeds.at_bulk(role, run, name)
    if settings.bulk_url == settings.nats_url:
        found = [Place("nats", (settings.nats_url,), control + bulk, control=True, bulk=True)]
    else:
        found = [
            Place("control", (settings.nats_url,), control, control=True),
            Place(settings.region or "bulk", (settings.bulk_url,), bulk, bulk=True),
        ]
    others = settings.region_urls if role == "syncer" else {}
    return [*found, *(Place(region, (url,), deeds.other_region(run), bulk=True, far=True) for region, url in others.items())]
