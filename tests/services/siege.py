"""A run besieged by one insider at a time: ``python -m tests.services.siege --actions 20000 --rate 100 --seed 1``.

A real server with a run's keys, learners, syncers and a coordinator as processes, and one identity more, of each role in turn,
whose holder sends all that :mod:`tests.services.adversary` draws. The table says what came of it. What may not be:

* a service ends, or its listener falls silent: a version of every fragment is made after the last action;
* a version is lost: each that was there stays in its place, and the reference folds the whole log;
* a key of the bucket changes that the role may not write (:data:`MAY_CHANGE`), or one that many write holds others' words;
* the honest learners are slower than :data:`LEAST_PACE` of their pace without it.

With ``--regions`` the run has two, each with a server and a syncer, that merge their own offers, and a control store; the
insider is of the second one, and sends to every server that knows it.

The pace without it is taken twice: with nothing sent, and with the same messages sent to a subject without a subscriber. The
second one tells the work of this process and of the server's connection from that of the services.

What a role is there to do is not tried (:data:`WITHHELD`): a syncer may drop what its log does not need any more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import nats.errors
from tests.made import raw_messages
from tests.services.adversary import Adversary
from tests.services.cluster import Cluster, newest_entries, small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, REGIONS, two_regions
from tests.services.secured import Guest, guest, make_keys, members, serving

from diloco.control import admission
from diloco.control.creation import KnownRun
from diloco.nats import streams
from diloco.transport import Stored
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import CONTROL as CONTROL_STORE
from diloco_ops.keys.permissions import Who, is_known

RUN = "besieged"
NAMES = Subjects(RUN)
STORE = f"KV_{NAMES.bucket}"
LIAR = "liar"
LEARNERS, SYNCERS = 3, 2
HONEST = {f"toy-{share}" for share in range(LEARNERS)}
ROLES = {
    "observer": Who(LIAR, "observer"),
    "evaluator": Who(LIAR, "evaluator"),
    "learner": Who(LIAR, "learner"),
    "founder": Who(LIAR, "learner", founder=True),
    "syncer": Who(LIAR, "syncer"),
    "coordinator": Who(LIAR, "coordinator", founder=True),
}
OWN_KEYS = {f"member.{LIAR}", f"share.{LIAR}", f"refused.{LIAR}"}  # owners report in the last one what they refuse of it
MAY_CHANGE = {
    "learner": OWN_KEYS,
    "founder": OWN_KEYS,
    "syncer": {"owners", "changes", "refused.*"},
    "coordinator": {"coordinator"},
}
WRITTEN_BY_ALL = {"owners", "coordinator", "history"}  # by honest members, all the time
WITHHELD = {"syncer": [f"$JS.API.STREAM.PURGE.{stream}" for stream in (NAMES.log_stream, NAMES.offer_stream)]}
LEAST_PACE = 0.9
BASE_S = 15.0  # each time that the pace is taken without the adversary


@dataclass
class Outcome:
    """What came of one role's siege."""

    role: str
    sent: Counter[str] = field(default_factory=Counter)  # actions by kind
    refused: int = 0  # by the server
    cut: int = 0  # connections
    ended: list[str] = field(default_factory=list)  # services
    versions: int = 0  # made meanwhile
    changed: list[str] = field(default_factory=list)  # keys that it may not change
    # steps and versions a second beside it, relative to those without any message, and to those beside unread messages
    pace: tuple[float, float] = (0.0, 0.0)
    unheard: tuple[float, float] = (0.0, 0.0)

    def row(self) -> str:
        sent = ", ".join(f"{count} {kind}" for kind, count in sorted(self.sent.items()))
        wrong = f"{', '.join(self.ended) or 'none'} | {', '.join(self.changed) or 'none'}"
        paces = " | ".join(f"{pace:.0%}" for pace in (*self.pace, *self.unheard))
        return f"| {self.role} | {sent} | {self.refused} | {self.cut} | {wrong} | {self.versions} | {paces} |"


HEAD = """| role | actions by payload | refused | cut off | services ended | keys changed | versions | steps' pace | versions' \
| steps', of unheard | versions', of unheard |
|---|---|---|---|---|---|---|---|---|---|---|"""


class Siege:
    """A besieged run, from its first version to its last.

    ``servers`` that know the insider, the control store's first, and what each serves.
    """

    def __init__(
        self, cluster: Cluster, servers: Sequence[tuple[Server, list[str]]], keys: Folder, role: str, seed: int
    ) -> None:
        self.cluster, self.servers, self.keys, self.role, self.seed = cluster, servers, keys, role, seed
        self.outcome = Outcome(role)

    async def run(self, actions: int, rate: float, base_s: float) -> Outcome:
        cluster, outcome = self.cluster, self.outcome
        cluster.coordinator()
        cluster.syncers()
        for share in range(LEARNERS):
            cluster.toy_process(share)
        await cluster.link()
        await cluster.until(lambda: cluster.heartbeats.keys() >= HONEST, "learners are heard")
        await some_versions(cluster, of=sorted(HONEST))
        entries = [entry.model_copy(update={"founder": False}) for entry in self.keys.roster.identities if entry.founder]
        self.keys.replace(*entries)  # as diloco keys founded
        for server, _ in self.servers:
            server.reload()
        adversary = await self._adversary()
        before, keys = await newest_entries(cluster), await self._keys()
        silent = [await self._pace(asyncio.sleep(base_s))]
        unheard = [await self._pace(self._to_nobody(adversary, base_s, rate))]
        versions = self._versions()
        beside = await self._pace(self._attack(adversary, actions, rate))
        outcome.versions = self._versions() - versions
        unheard.append(await self._pace(self._to_nobody(adversary, base_s, rate)))
        silent.append(await self._pace(asyncio.sleep(base_s)))
        outcome.pace, outcome.unheard = _relative(beside, silent), _relative(beside, unheard)
        outcome.ended = [s.name for s in cluster.services if s.process.poll() is not None]
        if not outcome.ended:
            await some_versions(cluster, of=sorted(HONEST))
        await self._check_log(before)
        after = await self._keys()
        mine = MAY_CHANGE.get(self.role, set()) | WRITTEN_BY_ALL
        outcome.changed = sorted(
            key
            for key in keys.keys() | after.keys()
            if keys.get(key) != after.get(key) and not any(fnmatchcase(key, pattern) for pattern in mine)
        )
        return outcome

    async def _adversary(self) -> Adversary:
        entries = self.keys.roster.identities
        [own] = [entry.who for entry in entries if entry.name == LIAR]
        store, fragments = await self.cluster.store()
        everybody, withheld = [entry.who for entry in entries], WITHHELD.get(self.role, ())
        regions, serve = self.cluster.settings.regions.names, [serves for _, serves in self.servers]
        made = Adversary(self.seed, NAMES, store.stream.run, own, everybody, withheld, regions, serve)
        if own.role == "learner":
            async with guest(self.servers[0][0], self.keys, LIAR) as liar:
                registry = await liar.link.bucket(NAMES.bucket, create=False)
                run, digest = KnownRun(RUN, self.cluster.settings, registry), self.cluster.settings.digest()
                made.incarnation = await admission.join(run, LIAR, 1, fragments, digest, founds=False)
        return made

    async def _attack(self, adversary: Adversary, actions: int, rate: float) -> None:
        drawn, began_s = islice(adversary.actions(), actions), time.monotonic()
        while sum(self.outcome.sent.values()) < actions:
            async with self._insider() as liars:
                while not any(liar.link.bulk.is_closed for liar in liars):
                    due_s = began_s + sum(self.outcome.sent.values()) / rate
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    action = next(drawn, None)
                    if action is None:
                        break
                    self.outcome.sent[action.kind] += 1
                    try:
                        await raw_messages.publish(
                            liars[action.server].link.bulk, action.subject, action.data, action.headers, action.reply
                        )
                    except (nats.errors.Error, OSError):
                        break
                    if any(service.process.poll() is not None for service in self.cluster.services):
                        return
                for liar in liars:
                    if not liar.link.bulk.is_closed:
                        await liar.flush()  # until the server's refusals are here
                    self.outcome.refused += liar.count("permission_denied")
                    self.outcome.cut += liar.count("nats_reconnected") + liar.link.bulk.is_closed

    @contextlib.asynccontextmanager
    async def _insider(self) -> AsyncIterator[list[Guest]]:
        """Connect to each server."""
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(guest(server, self.keys, LIAR)) for server, _ in self.servers]

    async def _to_nobody(self, adversary: Adversary, for_s: float, rate: float) -> None:
        """Send what the adversary draws to a subject without a subscriber."""
        began_s = time.monotonic()
        async with guest(self.servers[0][0], self.keys, LIAR) as liar:
            for number, action in enumerate(islice(adversary.actions(), round(for_s * rate))):
                await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
                await raw_messages.publish(liar.link.bulk, f"_INBOX_{LIAR}.unheard".encode(), action.data)

    async def _pace(self, meanwhile: Awaitable[None]) -> tuple[float, float]:
        """Steps a second of all honest learners, and versions a second of all fragments."""
        began_s, steps, versions = time.monotonic(), self._steps(), self._versions()
        await meanwhile
        took_s = time.monotonic() - began_s
        return (self._steps() - steps) / took_s, (self._versions() - versions) / took_s

    def _versions(self) -> int:
        return min(sum(self.cluster.heartbeats[name][-1].versions) for name in HONEST)

    def _steps(self) -> int:
        return sum(self.cluster.heartbeats[name][-1].step for name in HONEST)

    async def _check_log(self, before: Sequence[Stored | None]) -> None:
        store, fragments = await self.cluster.store()
        for entry in before:
            assert entry is not None
            kept = await store.transport.get(NAMES.log_stream, entry.sequence)
            assert kept is not None, f"{entry.subject}: lost"
            assert kept.data == entry.data, f"{entry.subject}: another one"
        genesis = await store.reader.genesis()
        assert genesis is not None
        for fragment in fragments.fragments:
            loaded = await store.reader.load(fragment.index, *genesis)
            assert loaded.replica.chain.sequence >= 0

    async def _keys(self) -> dict[str, bytes]:
        found = {}
        async with guest(self.servers[0][0], self.keys, "test") as observer:
            registry = await observer.link.bucket(NAMES.bucket, create=False)
            for subject in await streams.subjects(observer.link, STORE, f"$KV.{NAMES.bucket}.>"):
                key = subject.removeprefix(f"$KV.{NAMES.bucket}.")
                stored = await registry.get(key)
                found[key] = stored[0] if stored else b""
        return found


def _relative(beside: tuple[float, float], without: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Steps and versions beside the adversary, as shares of their means without it; NaN where nothing was done without it."""
    steps, versions = (sum(each) / len(without) for each in zip(*without, strict=True))
    return beside[0] / (steps or math.nan), beside[1] / (versions or math.nan)


async def besiege(
    nursery: Nursery,
    directory: Path,
    role: str,
    actions: int,
    rate: float,
    seed: int,
    base_s: float = BASE_S,
    *,
    regions: bool = False,
) -> Outcome:
    """Besiege a run of its own; raises AssertionError where its log is not what it was."""
    values: dict[str, Any] = {"tokens": 10**9, "learners": LEARNERS, "shards": SYNCERS}
    if regions:
        who = replace(ROLES[role], region=REGIONS[1])
        settings = small(**values, regions__names=list(REGIONS), regions__merge=True)
        async with two_regions(nursery, directory, RUN, settings, [who]) as guarded:
            guarded.liars, guarded.forged = {LIAR}, True
            servers = [(server, [CONTROL_STORE] if name == CONTROL else [name]) for name, server in guarded.servers.items()]
            known = [(server, serves) for server, serves in servers if is_known(who, REGIONS, serves)]
            return await Siege(guarded, known, guarded.keys, role, seed).run(actions, rate, base_s)
    keys = make_keys(directory / "keys", RUN, [*members(LEARNERS, SYNCERS), ROLES[role]])
    with serving(keys, directory / "nats") as server:
        cluster = Cluster(nursery, directory / RUN, server.url, RUN, small(**values))
        cluster.identity, cluster.liars = str(keys.path / "identities" / "{name}.identity"), {LIAR}
        cluster.forged = True  # insiders write into the log, and announce rounds
        try:
            return await Siege(cluster, [(server, [])], keys, role, seed).run(actions, rate, base_s)
        finally:
            await cluster.close()


async def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=20_000, help="of each role")
    parser.add_argument("--rate", type=float, default=100.0, help="actions a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", action="append", choices=sorted(ROLES), help="repeatable; all of them without it")
    parser.add_argument("--regions", action="store_true", help="a run in two regions")
    asked = parser.parse_args()
    print(HEAD, flush=True)
    failed, nursery = False, Nursery()
    for role in asked.role or ROLES:
        with tempfile.TemporaryDirectory(prefix="siege-") as folder:
            outcome = await besiege(nursery, Path(folder), role, asked.actions, asked.rate, asked.seed, regions=asked.regions)
        print(outcome.row(), flush=True)
        failed |= bool(outcome.ended or outcome.changed) or outcome.unheard[0] < LEAST_PACE
    nursery.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
