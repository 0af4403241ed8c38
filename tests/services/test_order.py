"""Services start in any order, and training needs no coordinator once the run exists."""

from __future__ import annotations

from tests.made.fixtures import Launch, MakeServer
from tests.services.cluster import check_accounts, small


async def test_services_wait_for_nats_and_run_and_outlive_the_coordinator(make_server: MakeServer, launch: Launch) -> None:
    server = make_server(start=False)
    cluster = launch(small(shards=1, learners=2, tokens=2 * 80 * 16), server.url)

    cluster.syncer(0)
    cluster.learners()
    names = ["syncer-0", "toy-0", "toy-1"]
    await cluster.until(lambda: all(cluster.events("waiting_for_nats", name) for name in names), "all wait for NATS")
    assert {values["url"] for name in names for values in cluster.events("waiting_for_nats", name)} == {server.url}
    server.start()
    await cluster.until(lambda: all(cluster.events("waiting_for_run", name) for name in names), "all wait for the run")
    coordinator = cluster.coordinator()
    await cluster.link()
    await cluster.all_ready()
    cluster.gate.open()
    await cluster.until(lambda: cluster.tokens() > cluster.settings.tokens // 3, "training")
    cluster.gate.close()
    assert (await cluster.status())["state"] == "training"
    coordinator.kill()
    assert cluster.tokens() < cluster.settings.tokens
    cluster.gate.open()

    await cluster.ended()

    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    # one that is started again finds the run as it is: over
    again = cluster.coordinator()
    await cluster.until(lambda: again.process.poll() == 0, "the coordinator sees that the run is over")
    assert cluster.events("run_finished", "coordinator")[0]["versions"] == sum(len(log.versions) for log in folded)
