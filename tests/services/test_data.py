"""Who trains on which batches when learners die, return, leave and join, and that every token is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.made.fixtures import Launch
from tests.services.cluster import Cluster, small
from tests.services.toy import SAMPLES, SLOW, Toy

from diloco.core.changes import Changes
from diloco.service.rundir import RunDirectory
from diloco_ops.report import build
from diloco_ops.run_reader import read_chains

Batch = tuple[int, int]


def trained(cluster: Cluster, *names: str) -> Counter[Batch]:
    """How often each (share, batch) was trained by these learners, as they noted themselves."""
    counted: Counter[Batch] = Counter()
    for name in names:
        for line in Toy.diary(cluster.directory, name).read_text().splitlines():
            share, batch = line.split()
            counted[int(share), int(batch)] += 1
    return counted


def on_share(cluster: Cluster, name: str, share: int) -> bool:
    """Whether a learner has told that it trains on a share."""
    return any(first[0] == share for first in cluster.heartbeats[name][-1].trained)


async def reported(cluster: Cluster) -> dict[str, Any]:
    """The report of a finished run."""
    store, fragments = await cluster.store()
    chains = await read_chains(store)
    directory = RunDirectory(cluster.directory, cluster.name, cluster.url, None, cluster.settings)
    series = json.loads((cluster.directory / "series.json").read_text())
    ledger = build.read_ledger(directory, store.run, series, len(chains))
    found = build.Findings(
        directory=directory,
        map=fragments,
        chains=chains,
        owners=[""] * len(chains),
        series=series,
        ledger=ledger,
        evaluation={},
        links={},
        changes=Changes(bytes(8)),
        references=[],
        failures={},
    )
    return build.build(found)


def whole(batches: Counter[Batch], share: int) -> bool:
    """Whether the batches of a share begin at its beginning and have no gap."""
    mine = sorted(batch for s, batch in batches if s == share)
    return mine == list(range(len(mine)))


async def test_every_token_is_merged_or_lost_though_learners_die(launch: Launch) -> None:
    """toy-2 is killed and does not return, so that another takes its share; toy-3 is killed and returns at once."""
    cluster = launch(small(learners=4, tokens=4 * 200 * SAMPLES, liveness__dead_s=1.5, liveness__lease_s=2.0))
    cluster.toy(0)
    cluster.toy(1)
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    await cluster.all_ready()
    # those in processes begin at once, and are as slow as the others: the budget must last until all of this has happened
    killed = [cluster.toy_process(2, slow=SLOW), cluster.toy_process(3, slow=SLOW)]
    with cluster.slowly():
        await cluster.until(lambda: {"toy-2", "toy-3"} <= cluster.heartbeats.keys(), "the processes have joined")
        cluster.gate.open()
        await cluster.until(
            lambda: all(min(cluster.heartbeats[f"toy-{i}"][-1].versions) > 1 for i in (2, 3)), "both have merged"
        )
        for process in killed:
            process.kill()
        cluster.toy_process(3, slow=SLOW)
        others = ("toy-0", "toy-1", "toy-3")
        await cluster.until(lambda: any(on_share(cluster, name, 2) for name in others), "another trains on toy-2's share")
    cluster.hurry()
    await cluster.ended()
    folded, report = await cluster.folded(), await reported(cluster)

    # everything that a learner noted is in the report, but for what a killed one could tell nobody
    noted = {f"toy-{i}": trained(cluster, f"toy-{i}") for i in range(4)}
    for name in ("toy-0", "toy-1"):
        assert report["learners"][name]["tokens_processed"] == noted[name].total() * SAMPLES
    for name in ("toy-2", "toy-3"):
        untold = noted[name].total() - report["learners"][name]["tokens_processed"] // SAMPLES
        assert 0 <= untold <= 2, name
    processed = report["tokens_processed"]
    assert processed == sum(learner["tokens_processed"] for learner in report["learners"].values())
    assert processed == cluster.settings.tokens + report["tokens_overshoot"] + report["tokens_forgotten"]
    assert report["tokens_overshoot"] >= 0

    # fragment by fragment: the log's own members, counted here, and what is lost, add up to it
    for log, stated in zip(folded, report["fragments"], strict=True):
        merged = sum(member.tokens for record in log.entries for member in record.members)
        assert stated["tokens_merged"] == merged
        assert processed == merged + stated["tokens_lost"]
        in_versions: Counter[tuple[str, int, int, int]] = Counter()
        for record in log.entries:
            for member in record.members:
                assert sum(count for _, _, count in member.data) * SAMPLES == member.tokens
                for share, first, count in member.data:
                    for batch in range(first, first + count):
                        in_versions[member.learner, member.incarnation, share, batch] += 1
                        assert noted[member.learner][share, batch]
        assert max(in_versions.values()) == 1
    assert report["data"]["errors"] == []

    # no batch of any share was left out, and toy-2's share went on without it
    together = trained(cluster, *noted)
    assert all(whole(together, share) for share in range(4))
    by_share = {row["share"]: row for row in report["data"]["shares"]}
    assert by_share[2]["learners"] != ["toy-2"]
    assert sum(row["trained"] + row["repeated"] for row in by_share.values()) * SAMPLES == processed


async def test_a_dead_learners_share_is_taken_over_without_any_coordinator(launch: Launch) -> None:
    cluster = launch(small(learners=2, tokens=2 * 300 * SAMPLES, liveness__dead_s=1.0, liveness__lease_s=1.5))
    cluster.toy(0)
    dies = cluster.toy_process(1, slow=SLOW)
    await cluster.begin(coordinator=False)
    await cluster.until(lambda: "toy-1" in cluster.heartbeats and on_share(cluster, "toy-1", 1), "toy-1 trains on its share")
    dies.kill()
    await cluster.until(lambda: on_share(cluster, "toy-0", 1), "the other one trains on it")
    cluster.hurry()
    await cluster.ended()
    assert whole(trained(cluster, "toy-0", "toy-1"), 1)


async def test_who_leaves_frees_its_share_and_who_joins_goes_on_exactly_there(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * 100 * SAMPLES, liveness__dead_s=1.5))
    await cluster.begin(coordinator=False)  # which is not needed for this
    await cluster.until(lambda: cluster.heartbeats["toy-1"][-1].step > 20, "toy-1 has taken steps")
    leaving = cluster.toys.pop(1)
    leaving.stop()
    cluster.gate.close()  # however long it takes to join
    position = max(batch for _, batch in trained(cluster, "toy-1")) + 1
    newcomer = cluster.toy(7, name="newcomer")
    scavenger = cluster.toy(0, name="scavenger")
    await cluster.until(lambda: {"newcomer", "scavenger"} <= cluster.gate.held, "both are to take their first step")
    cluster.gate.open()
    await cluster.ended()
    assert newcomer.finished
    assert scavenger.finished
    noted = trained(cluster, "newcomer")
    other = trained(cluster, "scavenger")
    # anyone who came first has the free share, the other another lap over one of the run's
    taken, lap = sorted((noted, other), key=lambda batches: min(batches)[0])
    assert {share for share, _ in taken} == {1}
    assert {share for share, _ in lap} == {3}
    assert min(batch for _, batch in taken) == position
    assert whole(trained(cluster, "toy-1", "newcomer", "scavenger"), 1)
    assert set(trained(cluster, "toy-0", "toy-1", "toy-2", "newcomer", "scavenger").values()) == {1}
