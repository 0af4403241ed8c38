"""Who trains on which batches when learners die, return, leave and join, and that every token is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from tests.made.fixtures import Launch
from tests.pace import scaled_s
from tests.services.cluster import Cluster, small
from tests.services.toy import SAMPLES, Toy

from diloco.core.run.changes import Changes
from diloco.service.rundir import RunDirectory
from diloco_ops.reading.run_reader import read_chains
from diloco_ops.report import build

Batch = tuple[int, int]


def trained(cluster: Cluster, *names: str) -> Counter[Batch]:
    """How often each (share, batch) was trained by these learners, as they noted themselves."""
    counted: Counter[Batch] = Counter()
    for name in names:
        for line in Toy.diary(cluster.directory, name).read_text().splitlines():
            share, batch = line.split()
            counted[int(share), int(batch)] += 1
    return counted


def holds(cluster: Cluster, name: str, share: int) -> bool:
    """Whether a learner has come to hold a share."""
    return any(share in event["held"] for event in cluster.events("shares", name))


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


@pytest.mark.promise("every token is merged or counted as lost, also when learners die")
async def test_every_token_is_merged_or_lost_though_learners_die(launch: Launch) -> None:
    """toy-2 is killed and does not return, so that another takes its share; toy-3 is killed and returns at once."""
    liveness: dict[str, Any] = {"liveness__dead_s": scaled_s(1.5), "liveness__lease_s": scaled_s(2.0)}
    cluster = launch(small(learners=4, tokens=4 * 80 * SAMPLES, round__quorum="all", **liveness))
    cluster.gate.close()
    cluster.toy(0)
    cluster.toy(1)
    killed = [cluster.toy_process(2), cluster.toy_process(3)]
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    await cluster.all_ready()

    def of_all() -> set[int]:
        return {event["fragment"] for event in cluster.events("version_committed") if event["members"] == 4}

    taken = await cluster.step_on(30, lambda: len(of_all()) == cluster.settings.fragments.count, "all four are merged")
    await cluster.step_until(taken)
    cluster.gate.open(taken + 2)
    for process in killed:  # before, in or after those steps
        process.kill()
    cluster.toy_process(3)
    await cluster.until(lambda: any(holds(cluster, name, 2) for name in ("toy-0", "toy-1", "toy-3")), "another takes the share")
    cluster.gate.open()
    await cluster.ended()
    folded, report = await cluster.folded(), await reported(cluster)

    # everything that a learner noted is in the report, but for what a killed one could not report
    noted = {f"toy-{i}": trained(cluster, f"toy-{i}") for i in range(4)}
    for name in ("toy-0", "toy-1"):
        assert report["learners"][name]["tokens_processed"] == noted[name].total() * SAMPLES
    for name in ("toy-2", "toy-3"):
        untold = noted[name].total() - report["learners"][name]["tokens_processed"] // SAMPLES
        assert 0 <= untold <= 2, name  # those after the steps that all have heard of
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
    cluster = launch(
        small(learners=2, tokens=2 * 60 * SAMPLES, liveness__dead_s=scaled_s(1.0), liveness__lease_s=scaled_s(1.5))
    )
    cluster.gate.close()
    cluster.toy(0)
    dies = cluster.toy_process(1)
    await cluster.begin(coordinator=False, until_step=0)
    await cluster.step_until(12)
    assert set(trained(cluster, "toy-1")) == {(1, batch) for batch in range(12)}
    dies.kill()
    await cluster.until(lambda: holds(cluster, "toy-0", 1), "the other one takes its share")
    cluster.gate.open()
    await cluster.ended()
    assert any(share == 1 for share, _ in trained(cluster, "toy-0"))
    assert whole(trained(cluster, "toy-0", "toy-1"), 1)


async def test_who_leaves_frees_its_share_and_who_joins_goes_on_exactly_there(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * 60 * SAMPLES, liveness__dead_s=scaled_s(1.5)))
    await cluster.begin(coordinator=False, until_step=0)  # which is not needed for this
    await cluster.step_until(20)
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
