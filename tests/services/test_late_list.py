"""Servers that get their new list of identities one after another, and what their members make of it."""

from __future__ import annotations

from pathlib import Path

from tests.pace import scaled_s
from tests.services.cluster import small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import Guarded, guarded_regions

from diloco_ops.keys.folder import authorization

REGIONS = ("ap", "eu", "us")
NEWCOMER = "syncer-0"  # of ap
LATE = "eu"  # its server


def list_without(cluster: Guarded, name: str) -> str:
    """The list of the late server as it was before an identity was added."""
    roster = cluster.keys.roster
    server = roster.server(LATE)
    assert server is not None
    others = [entry for entry in roster.identities if entry.name != name]
    return authorization(roster.model_copy(update={"identities": others}), server)


async def test_a_syncer_that_one_regions_server_does_not_know_yet_works_without_it(nursery: Nursery, tmp_path: Path) -> None:
    settings = small(shards=3, tokens=10**9, regions__names=list(REGIONS), regions__away_s=scaled_s(3.0))
    async with guarded_regions(nursery, tmp_path, "late", settings, REGIONS) as cluster:
        late, listed = cluster.servers[LATE], cluster.keys.server_folder(LATE) / "auth.conf"
        newest = listed.read_text()
        listed.write_text(list_without(cluster, NEWCOMER))
        late.reload()
        cluster.coordinator()
        cluster.syncers()
        toys = {region: cluster.toy_process(share).name for share, region in enumerate(REGIONS)}
        await cluster.link()

        def owns() -> bool:
            heard = cluster.shard_heartbeats.get(NEWCOMER)
            return heard is not None and heard.state == "owner" and heard.versions > 0

        await cluster.until(owns, "the newcomer makes versions")
        await some_versions(cluster, of=[name for region, name in toys.items() if region != LATE])
        waits = cluster.events("waiting_for_nats", NEWCOMER)
        assert {values["other_region"] for values in waits} == {LATE}
        assert "does not know the identity" in waits[0]["reason"]
        assert "give that server its new auth.conf, and reload it" in waits[0]["reason"]
        assert waits[0]["attempts"] == 1
        assert LATE not in {region for region, _, _ in cluster.shard_heartbeats[NEWCOMER].crossing}

        listed.write_text(newest)
        late.reload()

        def crosses() -> bool:
            return any(region == LATE and sent for region, sent, _ in cluster.shard_heartbeats[NEWCOMER].crossing)

        await cluster.until(crosses, "the newcomer stores versions there")
        await some_versions(cluster, of=list(toys.values()))


async def test_an_identity_that_its_own_regions_server_does_not_know_ends(nursery: Nursery, tmp_path: Path) -> None:
    settings = small(shards=3, tokens=10**9, regions__names=list(REGIONS))
    async with guarded_regions(nursery, tmp_path, "late", settings, REGIONS) as cluster:
        listed = cluster.keys.server_folder(LATE) / "auth.conf"
        listed.write_text(list_without(cluster, "syncer-1"))
        cluster.servers[LATE].reload()
        [(code, said)] = await cluster.refused(cluster.syncer(1))
        assert code == 4
        assert "does not know the identity" in said
