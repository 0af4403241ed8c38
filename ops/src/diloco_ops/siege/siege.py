"""One identity's siege of a live run: its hostile messages, and the run's pace before, during and after them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import cast

from diloco.control import admission
from diloco.control.creation import KnownRun
from diloco.errors import MessageError, RunError
from diloco.nats import streams
from diloco.nats.identity import Identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.transport import Heard
from diloco_ops.broker import raw_messages
from diloco_ops.chaos.watch import ChaosWatch
from diloco_ops.keys.permissions import Who, permissions
from diloco_ops.reading.run_reader import RunReader, read_chains
from diloco_ops.siege.adversary import Adversary, HostileAction

LEAST_PACE = 0.9
LOOK_S = 0.1  # the resolution of stalls
QUIET_S = 10.0  # then a member is silent: heartbeats come every second or two
OPEN_S = 10.0  # a server that answers no sooner is no server to rehearse on
# written when a run is created or begins, and by operators: no member changes them while a run stands
PROTECTED = ("run", "protocol", "map", "founder", "genesis", "changes", "whole_checkpoint", "member.*")


@dataclass(frozen=True)
class KnownServer:
    """A server that the identity may connect to, and the regions that it serves; none in a run without regions."""

    url: str
    serves: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPace:
    """A run's pace in a stretch of time."""

    steps_per_s: float
    versions_per_s: float
    longest_stall_s: float  # of any fragment: the time without a version

    def relative_to(self, usual: Sequence[RunPace]) -> tuple[float, float]:
        """Return steps and versions a second as shares of the means of ``usual``; NaN where these are 0."""
        steps = sum(pace.steps_per_s for pace in usual) / len(usual)
        versions = sum(pace.versions_per_s for pace in usual) / len(usual)
        return self.steps_per_s / (steps or math.nan), self.versions_per_s / (versions or math.nan)


@dataclass
class SiegeOutcome:
    """Result of one identity's siege."""

    name: str
    role: str
    sent: Counter[str] = field(default_factory=Counter)  # messages by kind of payload
    refused: int = 0  # by the server
    cut: int = 0  # connections
    silent: list[str] = field(default_factory=list)  # members that were heard before, and are not any more
    keys_changed: list[str] = field(default_factory=list)  # that the identity may not write
    logs_damaged: list[str] = field(default_factory=list)  # fragments whose log cannot be loaded, with the reason
    usual: list[RunPace] = field(default_factory=list)  # before and after, with nothing sent
    unheard: list[RunPace] = field(default_factory=list)  # with the same messages sent to a subject that none listens to
    besieged: RunPace | None = None

    @property
    def paces(self) -> tuple[float, float, float, float]:
        """Steps and versions a second, as shares of those with nothing sent, and of those with unheard messages."""
        assert self.besieged is not None
        return *self.besieged.relative_to(self.usual), *self.besieged.relative_to(self.unheard)

    def faults(self, longest_stall_s: float) -> list[str]:
        """Return the faults of a siege, one line each. ``longest_stall_s``: the longest stop that a takeover explains."""
        assert self.besieged is not None
        found = [f"{name} is silent" for name in self.silent]
        found += [f"the key {key} has changed" for key in self.keys_changed]
        found += self.logs_damaged
        if self.besieged.longest_stall_s > longest_stall_s:
            found.append(
                f"a fragment made no version for {self.besieged.longest_stall_s:.1f} s, more than the {longest_stall_s:.1f} s "
                "of a takeover"
            )
        if self.paces[3] < LEAST_PACE:
            found.append(f"versions came at {self.paces[3]:.0%} of the pace beside unheard messages, below {LEAST_PACE:.0%}")
        return found

    @property
    def row(self) -> Mapping[str, object]:
        """The outcome as JSON has it."""
        assert self.besieged is not None
        steps, versions, unheard_steps, unheard_versions = (None if math.isnan(pace) else round(pace, 3) for pace in self.paces)
        return {
            "name": self.name,
            "role": self.role,
            "messages": dict(sorted(self.sent.items())),
            "refused_by_server": self.refused,
            "connections_cut": self.cut,
            "silent": self.silent,
            "keys_changed": self.keys_changed,
            "logs_damaged": self.logs_damaged,
            "steps_pace": steps,
            "versions_pace": versions,
            "steps_pace_of_unheard": unheard_steps,
            "versions_pace_of_unheard": unheard_versions,
            "longest_stall_s": round(self.besieged.longest_stall_s, 2),
            "longest_stall_usual_s": round(max(pace.longest_stall_s for pace in self.usual), 2),
        }


class _Refusals:
    """A logger that counts what a connection is told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __getattr__(self, level: str) -> Callable[..., None]:
        def count(event: str, **values: object) -> None:
            self.counts[event] += 1

        return count


class Siege:
    """One identity's siege of a run that is being watched."""

    def __init__(
        self,
        watch: ChaosWatch,
        control: NatsTransport,
        identity: Identity,
        servers: Sequence[KnownServer],
        adversary: Adversary,
    ) -> None:
        """Attack over ``servers``, in the order that the adversary knows them in; ``control`` reads the control store."""
        self.watch, self.control, self.identity = watch, control, identity
        self.servers, self.adversary = servers, adversary
        self.run: RunReader = watch.run
        self.outcome = SiegeOutcome(identity.name, identity.role)
        self._clock = asyncio.get_running_loop().time

    async def lay(self, actions: int, rate: float, base_s: float) -> SiegeOutcome:
        """Send the actions, ``rate`` a second, between two measurements of the undisturbed pace, each of ``base_s``."""
        outcome, before = self.outcome, await self._protected_keys()
        if self.identity.role == "learner":
            await self._join()
        outcome.usual.append(await self._pace(asyncio.sleep(base_s)))
        outcome.unheard.append(await self._pace(self._send_unheard(base_s, rate)))
        outcome.besieged = await self._pace(self._attack(actions, rate))
        outcome.unheard.append(await self._pace(self._send_unheard(base_s, rate)))
        heard = self._heard()
        outcome.usual.append(await self._pace(asyncio.sleep(max(base_s, QUIET_S))))
        newest = self._heard()
        outcome.silent = sorted(name for name, heartbeat in heard.items() if newest.get(name) is heartbeat)
        after = await self._protected_keys()
        outcome.keys_changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        outcome.logs_damaged = await self._damaged_logs()
        return outcome

    def _heard(self) -> dict[str, object]:
        """Return the last heartbeat of each member, by name."""
        witness = self.watch.witness
        return {name: last for name, last in (witness.heartbeats | witness.shards).items() if name != self.identity.name}

    async def _join(self) -> None:
        """Have the run admit the learner, so that its messages count."""
        async with self._connected() as (links, _):
            registry = await links[0].bucket(self.run.log.subjects.bucket, create=False)
            known = KnownRun(self.run.run.name, self.run.run.created, registry)
            self.adversary.incarnation = await admission.join(
                known,
                self.identity.name,
                1,
                self.run.map,
                self.run.run.created.digest(),
                founds=False,
                grant=self.identity.grant,
            )

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[list[NatsTransport], _Refusals]]:
        """Connect to each server under the identity."""
        refusals = _Refusals()
        async with contextlib.AsyncExitStack() as stack:
            links = []
            for server in self.servers:
                link = await NatsTransport.open(
                    server.url, server.url, self.identity.name, cast(Logger, refusals), OPEN_S, identity=self.identity
                )
                stack.push_async_callback(link.close)
                links.append(link)
            yield links, refusals

    async def _attack(self, actions: int, rate: float) -> None:
        drawn, began_s, sent = islice(self.adversary.actions(), actions), time.monotonic(), 0
        while sent < actions:
            async with self._connected() as (links, refusals):
                await self._listen(links)
                while not any(link.bulk.is_closed for link in links):
                    await asyncio.sleep(max(0.0, began_s + sent / rate - time.monotonic()))
                    action = next(drawn, None)
                    if action is None:
                        break
                    sent += 1
                    if not await self._sent(action, links):
                        break
                for link in links:
                    self.outcome.cut += not await raw_messages.is_flushed(link)
                self.outcome.refused += refusals.counts["permission_denied"]
                self.outcome.cut += refusals.counts["nats_reconnected"]

    async def _sent(self, action: HostileAction, links: Sequence[NatsTransport]) -> bool:
        """Send an action's messages; False: the connection was lost."""
        for _ in range(action.times):
            if not await raw_messages.is_published(
                links[action.server], action.subject, action.data, action.headers, action.reply
            ):
                return False
            self.outcome.sent[action.kind] += 1
        return True

    async def _listen(self, links: Sequence[NatsTransport]) -> None:
        """Hear what the identity may hear, so that it can be sent again."""

        async def heard(message: Heard) -> None:
            self.adversary.hear(message.data)

        who, regions = who_of(self.identity), self.run.run.created.regions.names
        for link, server in zip(links, self.servers, strict=True):
            for subject in permissions(who, self.run.run.name, regions, server.serves).subscribe:
                if not subject.startswith("_"):
                    await link.subscribe(subject, heard)

    async def _send_unheard(self, for_s: float, rate: float) -> None:
        """Send messages to a subject that none listens to: the load of the siege itself."""
        began_s, subject = time.monotonic(), f"{self.identity.inbox}.unheard".encode()
        async with self._connected() as (links, _):
            for number, action in enumerate(islice(self.adversary.actions(), round(for_s * rate))):
                await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
                for _ in range(action.times):
                    await raw_messages.is_published(links[0], subject, action.data)

    async def _pace(self, meanwhile: Awaitable[None]) -> RunPace:
        chains = self.watch.witness.chains
        began_s, steps, versions = self._clock(), self._steps(), [chain.version for chain in chains]
        longest, since, seen = 0.0, [began_s] * len(chains), list(versions)

        async def look() -> None:
            nonlocal longest
            while True:
                now_s = self._clock()
                for fragment, chain in enumerate(chains):
                    if chain.version != seen[fragment]:
                        seen[fragment], since[fragment] = chain.version, now_s
                    longest = max(longest, now_s - since[fragment])
                await asyncio.sleep(LOOK_S)

        looking = asyncio.ensure_future(look())
        try:
            await meanwhile
        finally:
            await end(looking)
        took_s = self._clock() - began_s
        made = sum(chain.version - version for chain, version in zip(chains, versions, strict=True))
        return RunPace((self._steps() - steps) / took_s, made / took_s, longest)

    def _steps(self) -> int:
        return sum(heartbeat.step for heartbeat in self.watch.witness.learners() if heartbeat.learner != self.identity.name)

    async def _protected_keys(self) -> dict[str, bytes]:
        """Return the values of the keys that no member changes, but for those that the identity may write."""
        names, found = self.run.log.subjects, {}
        own = [p.removeprefix(f"$KV.{names.bucket}.") for p in self._own_keys()]
        for subject in await streams.subjects(self.control, f"KV_{names.bucket}", f"$KV.{names.bucket}.>"):
            key = subject.removeprefix(f"$KV.{names.bucket}.")
            if _matches(key, PROTECTED) and not _matches(key, own):
                stored = await self.run.run.registry.get(key)
                found[key] = stored[0] if stored else b""
        return found

    def _own_keys(self) -> list[str]:
        run = self.run.run
        allowed = permissions(who_of(self.identity), run.name, run.created.regions.names, self.servers[0].serves)
        return [subject for subject in allowed.publish if subject.startswith("$KV.")]

    async def _damaged_logs(self) -> list[str]:
        seen = [chain.version for chain in self.watch.witness.chains]
        try:
            ends = [chain.version for chain in await read_chains(self.run.log)]
        except (MessageError, RunError) as error:
            return [f"a log cannot be read: {error}"]
        return [
            f"the log of fragment {fragment} ends at version {end}, {version} was seen"
            for fragment, (end, version) in enumerate(zip(ends, seen, strict=True))
            if end < version
        ]


def who_of(identity: Identity) -> Who:
    """Return an identity as far as rights go by it."""
    return Who(
        identity.name,
        identity.role,
        identity.region,
        founder=identity.founder,
        public_key=identity.public_key,
        processes=identity.processes,
    )


def _matches(key: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
