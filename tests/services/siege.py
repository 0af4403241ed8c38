"""A run besieged by one insider at a time: ``python -m tests.services.siege --actions 20000 --rate 100 --seed 1``.

A real server with a run's keys, learners, syncers and a coordinator as processes, and one identity more, of each role in turn,
under which ``diloco siege`` attacks. Beyond what the command judges, it is checked here that

* no service ends, and a version of every fragment is made after the last action;
* each entry of the log that was there stays in its place.

With ``--regions`` the run has two, each with a server and a syncer, that merge their own offers, and a control store; the
insider is of the second one, and sends to every server that knows it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.services.cluster import Cluster, newest_entries, small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, REGIONS, two_regions
from tests.services.secured import make_keys, members, serving

from diloco.nats import identity
from diloco.transport import Stored
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.reading.attach import attached
from diloco_ops.siege import siege_command
from diloco_ops.siege.siege import SiegeOutcome

RUN = "besieged"
NAMES = Subjects(RUN)
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
BASE_S = 15.0  # each time that the pace is taken without the adversary


async def lay_siege(
    cluster: Cluster, servers: Sequence[Server], keys: Folder, *, actions: int, rate: float, seed: int, base_s: float
) -> SiegeOutcome:
    """Besiege a run of a cluster from its first versions on, with ``diloco siege``; check what the command cannot see.

    ``servers``: the only one, or the control store's and then each region's.
    """
    cluster.coordinator()
    cluster.syncers()
    for share in range(LEARNERS):
        cluster.toy_process(share)
    await cluster.link()
    await cluster.until(lambda: cluster.heartbeats.keys() >= HONEST, "learners are heard")
    await some_versions(cluster, of=sorted(HONEST))
    entries = [entry.model_copy(update={"founder": False}) for entry in keys.roster.identities if entry.founder]
    keys.replace(*entries)  # as diloco keys founded
    for server in servers:
        server.reload()
    before = await newest_entries(cluster)
    seen, regions = cluster.directory / "seen", cluster.settings.regions.names
    bulk = [f"{name}={server.url}" for name, server in zip(regions, servers[1:], strict=True)]
    await attached(seen, RUN, servers[0].url, bulk, str(keys.identity_file("test")))
    attacker = identity.load(keys.identity_file(LIAR))
    outcomes, _ = await siege_command.besiege(
        seen, RUN, [attacker], actions=actions, rate=rate, seed=seed, base_s=base_s, tell=lambda outcome: None
    )
    [outcome] = outcomes
    ended = {service.name: service.said for service in cluster.services if service.process.poll() is not None}
    assert not ended, (ended, outcome.row)
    await some_versions(cluster, of=sorted(HONEST))
    await check_log(cluster, before)
    return outcome


async def check_log(cluster: Cluster, before: Sequence[Stored | None]) -> None:
    """Check that entries stay as they were, and that every fragment's log can be loaded."""
    store, fragments = await cluster.store()
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


async def besiege(
    nursery: Nursery,
    directory: Path,
    role: str,
    *,
    actions: int,
    rate: float,
    seed: int,
    base_s: float = BASE_S,
    regions: bool = False,
) -> SiegeOutcome:
    """Besiege a run of its own; raises AssertionError where its log is not what it was."""
    values: dict[str, Any] = {"tokens": 10**9, "learners": LEARNERS, "shards": SYNCERS}
    how: dict[str, Any] = {"actions": actions, "rate": rate, "seed": seed, "base_s": base_s}
    if regions:
        who = replace(ROLES[role], region=REGIONS[1])
        settings = small(**values, regions__names=list(REGIONS), regions__merge=True)
        async with two_regions(nursery, directory, RUN, settings, [who]) as guarded:
            guarded.liars, guarded.forged = {LIAR}, True
            servers = [guarded.servers[name] for name in (CONTROL, *REGIONS)]
            return await lay_siege(guarded, servers, guarded.keys, **how)
    keys = make_keys(directory / "keys", RUN, [*members(LEARNERS, SYNCERS), ROLES[role]])
    with serving(keys, directory / "nats") as server:
        cluster = Cluster(nursery, directory / RUN, server.url, RUN, small(**values))
        cluster.identity, cluster.liars = str(keys.path / "identities" / "{name}.identity"), {LIAR}
        cluster.forged = True  # insiders write into the log, and announce rounds
        try:
            return await lay_siege(cluster, [server], keys, **how)
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
    how: dict[str, Any] = {"actions": asked.actions, "rate": asked.rate, "seed": asked.seed, "regions": asked.regions}
    print(siege_command.HEAD, flush=True)
    failed, nursery = False, Nursery()
    for role in asked.role or ROLES:
        with tempfile.TemporaryDirectory(prefix="siege-") as folder:
            outcome = await besiege(nursery, Path(folder), role, **how)
        print(siege_command.table_row(outcome), flush=True)
        failed |= bool(outcome.faults(siege_command.longest_stall_s(small())))
    nursery.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
