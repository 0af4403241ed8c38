"""Learners over a real server hear of each other by syncers' summaries, and by heartbeats where no summary comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.made.fixtures import Launch
from tests.pace import scaled_s
from tests.services.cluster import Cluster, check_accounts, small
from tests.services.secured import make_keys, members, serving
from tests.services.toy import SAMPLES, Toy

from diloco.control.hearing import name_in
from diloco.nats.client import Client
from diloco.nats.received import Delivered as Line
from diloco.nats.transport import NatsTransport
from diloco.settings.run import RunSettings

Delivered: TypeAlias = Counter[tuple[str, str]]
RUN = "presence"


def settings(learners: int, **changes: Any) -> RunSettings:
    liveness = {"heartbeat_s": scaled_s(0.1), "dead_s": scaled_s(1.0), "lease_s": scaled_s(2.0), "takeover_s": scaled_s(2.0)}
    named = {f"liveness__{name}": value for name, value in liveness.items()}
    return small(learners=learners, **{"tokens": learners * 60 * SAMPLES} | named | changes)


def link_of(toy: Toy) -> NatsTransport:
    assert toy.member is not None
    assert isinstance(toy.member.transport, NatsTransport)
    return toy.member.transport


def hear_heartbeats(toys: Iterable[Toy]) -> list[bool]:
    return [toy.member is not None and toy.member.living.hears_heartbeats for toy in toys]


async def only_summaries(cluster: Cluster) -> None:
    """Wait until no learner hears heartbeats."""
    toys = cluster.toys
    await cluster.until(lambda: all(toy.member for toy in toys) and not any(hear_heartbeats(toys)), "summaries are enough")


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    """Heartbeats of learners that came to this process, by connection and sender."""
    came: Delivered = Counter()
    deliver = Client.deliver

    async def counting(client: Client, line: Line, block: bytes, payload: bytes) -> None:
        subject = line.subject.decode()
        if ".heartbeat." in subject:
            came[client.options["name"], name_in(subject)] += 1
        await deliver(client, line, block, payload)

    monkeypatch.setattr(Client, "deliver", counting)
    return came


async def heartbeats_come(cluster: Cluster, delivered: Delivered, count: int = 10) -> bool:
    """Wait until each learner has sent so many heartbeats; return whether any came to another one meanwhile."""
    listeners = [f"{toy.name}-control" for toy in cluster.toys]
    before, ends = Counter(delivered), {name: len(beats) + count for name, beats in cluster.heartbeats.items()}
    ends = {toy.name: ends[toy.name] for toy in cluster.toys}
    await cluster.until(lambda: all(len(cluster.heartbeats[name]) >= end for name, end in ends.items()), "heartbeats are sent")
    return any(delivered[pair] > before[pair] for pair in delivered if pair[0] in listeners)


async def test_learners_hear_summaries_and_heartbeats_again_without_a_syncer(launch: Launch, delivered: Delivered) -> None:
    cluster = launch(settings(3))
    cluster.gate.close()
    cluster.toy(0)
    cluster.toy(1)
    dies = cluster.toy_process(2)
    await cluster.begin(coordinator=False, until_step=0)
    await cluster.step_until(6)
    syncers = [service for service in cluster.services if service.name.startswith("syncer")]
    await only_summaries(cluster)
    await heartbeats_come(cluster, delivered)  # those that were on their way
    assert not await heartbeats_come(cluster, delivered)
    dies.kill()

    def taken() -> bool:
        return any(2 in event["held"] for toy in cluster.toys for event in cluster.events("shares", toy.name))

    await cluster.until(taken, "its share is taken over")
    for service in syncers:
        service.kill()
    await cluster.until(lambda: all(hear_heartbeats(cluster.toys)), "heartbeats are heard again")
    assert await heartbeats_come(cluster, delivered)
    cluster.syncers()
    await only_summaries(cluster)
    cluster.gate.open()
    await cluster.ended()


@pytest.mark.parametrize("file", ["new", "old"])
async def test_with_identities_that_do_not_know_the_summaries_learners_go_on_by_heartbeats(
    launch: Launch, delivered: Delivered, tmp_path: Path, file: str
) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(2, 2))
    rights = keys.server_folder("nats") / "auth.conf"
    if file == "old":
        lines = rights.read_text().splitlines(keepends=True)
        rights.write_text("".join(line for line in lines if f"diloco.{RUN}.presence." not in line))
    with serving(keys, tmp_path / "nats") as server:
        cluster = launch(settings(2), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        await cluster.begin(until_step=0)
        await cluster.step_until(6)
        if file == "new":
            await only_summaries(cluster)
            assert cluster.events("optional_denied") == []
        else:
            expected = {toy.name for toy in cluster.toys}
            assert {name for name in expected if cluster.events("optional_denied", name)} == expected

            def refused() -> list[str]:
                return [name for name in ("syncer-0", "syncer-1") if cluster.events("optional_denied", name)]

            await cluster.until(lambda: bool(refused()), "a syncer tries to send a summary")
            assert await heartbeats_come(cluster, delivered)
            assert all(hear_heartbeats(cluster.toys))
            assert [len(cluster.events("optional_denied", name)) for name in refused()] == [1]
        assert cluster.events("permission_denied") == []
        assert [link_of(toy).control.denied for toy in cluster.toys] == [0, 0]
        cluster.gate.open()
        await cluster.ended()
        check_accounts(await cluster.finished_heartbeats(), await cluster.folded())
