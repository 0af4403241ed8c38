"""Runs in three regions, each with a server of its own that is linked to no other."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.services.cluster import DEADLINE_S, Cluster, Events, Folded, Service, check_accounts, fold_log, small, some_versions
from tests.services.forking import Nursery
from tests.services.test_verify import redo
from tests.services.toy import SAMPLES, Toy

from diloco import checkpoint, membership, verify
from diloco.embedded import Embedded, server_name
from diloco.errors import RunError, SettingsError
from diloco.log import Log
from diloco.membership import Run
from diloco.nats.server import Server
from diloco.nats.transport import NatsTransport
from diloco.observe import Logger, get_logger
from diloco.rundir import RunDirectory
from diloco.settings import LearnerSettings, RunSettings
from diloco.wan.config import checked
from diloco.wan.relay import Line, Relay
from diloco.wire.messages import Record

REGIONS = ("ap", "eu", "us")
Regions = Callable[..., Awaitable["Region"]]


def apart(**overrides: Any) -> RunSettings:
    """Settings of a small run in three regions."""
    return small(shards=3, regions__names=list(REGIONS), regions__away_s=3.0, **overrides)


class Region(Cluster):
    """A cluster with a server a region, and a control store; service ``n`` is in region ``n % 3``, links lead to others."""

    embedded: Embedded
    relay: Relay

    def server(self, region: str) -> Server:
        return self.embedded.servers[server_name(region)]

    def lines(self, region: str) -> list[Line]:
        """All links from and to a region."""
        return [line for name, line in self.relay.lines.items() if region in name.split("-")]

    def place(self, number: int, *, syncer: bool = False) -> dict[str, Any]:
        """Settings of a service in a region."""
        return self.embedded.place(number, syncer=syncer)

    def coordinator(self) -> Service:
        return self.start("coordinator", "diloco_coordinator", settings=self.settings.model_dump(), **self.place(2))

    def syncer(self, index: int) -> Service:
        return self.start(f"syncer-{index}", "diloco_syncer", **self.place(index, syncer=True))

    def toy(self, share: int, **behaviour: Any) -> Toy:
        settings = LearnerSettings(
            name=f"toy-{share}",
            run=self.name,
            state_dir=self.directory,
            share=share,
            checkpoint_s=0.0,
            **self.place(share),
        )
        toy = Toy(settings, cast(Logger, Events()), **{"before_step": self.gate} | behaviour)
        self.toys.append(toy)
        toy.start()
        return toy

    async def read(self, region: str, *, closed: bool = True) -> list[Folded]:
        """One region's log, folded by the reference."""
        link = await NatsTransport.open(self.url, self.server(region).url, "reader", get_logger(), give_up_after_s=20)
        try:
            run = Run(self.name, self.settings, await link.bucket(self.subjects.bucket, create=False))
            log = Log(link, self.name, run.identity, await membership.find_map(run), self.settings)
            genesis = await log.genesis()
            assert genesis is not None
            fragments = log.map.fragments
            return [await fold_log(log, fragment, genesis, self.settings, closed_by_now=closed) for fragment in fragments]
        finally:
            await link.close()


@pytest.fixture
async def regions(nursery: Nursery, tmp_path: Path) -> AsyncIterator[Regions]:
    async with contextlib.AsyncExitStack() as made:

        async def make(settings: RunSettings) -> Region:
            embedded = Embedded(tmp_path / "run", REGIONS)
            for name in embedded.servers:
                embedded.start(name)
            made.callback(embedded.stop)
            links: dict[str, Any] = dict(embedded.links())
            # as fast as can be: that links are thin and long is the benches' matter
            links["links"] = {name: {"delay_s": 0.005} for name in links["links"]}
            relay = Relay(checked(links, "links"), get_logger())
            await relay.start()
            made.push_async_callback(relay.close)
            cluster = Region(nursery, tmp_path / "run", embedded.url, "run", settings)
            cluster.embedded, cluster.relay = embedded, relay
            made.push_async_callback(cluster.close)
            return cluster

        yield make


def demand_one_log(*read: list[Folded]) -> None:
    """What several regions hold does not differ; each may begin at another keyframe, and end before the others."""
    for fragments in zip(*read, strict=True):
        entries: dict[tuple[int, int, str], Record] = {}
        for log in fragments:
            for record in log.entries:
                assert entries.setdefault((record.epoch, record.version, record.entry), record) == record


async def test_all_regions_have_one_log_and_nothing_is_lost(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 60 * SAMPLES, round__learners_wait=True))
    await run.begin()
    await run.ended()
    pulses = await run.finished_pulses()
    read = {region: await run.read(region) for region in REGIONS}
    demand_one_log(*read.values())
    assert len({tuple(log.state_hash for log in logs) for logs in read.values()}) == 1
    assert all(log.entries[-1].closing for log in read["us"])
    check_accounts(pulses, read["us"])
    owners = {record.syncer for log in read["us"] for record in log.entries}
    assert owners == {"syncer-0", "syncer-1", "syncer-2"}  # each region owns its share
    assert {m.learner for log in read["us"] for r in log.versions for m in r.members} == {"toy-0", "toy-1", "toy-2"}


async def test_a_region_lost_for_good_takes_nothing_that_was_committed_with_it(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 100_000 * SAMPLES))
    await run.begin()
    await some_versions(run)
    RunDirectory(run.directory, run.name, run.url, None, run.settings, nats_bulk_url=run.server("us").url).save()
    with pytest.raises(RunError, match="checkpoints know one server only"):
        await checkpoint.take(run.directory)
    [lost] = [service for service in run.services if service.name == "syncer-1"]
    before = [log.entries[-1] for log in await run.read("us", closed=False)]

    lost.kill()
    run.server("eu").kill()

    others = ["toy-0", "toy-2"]
    await some_versions(run, of=others)
    after = await run.read("us", closed=False)
    for old, log in zip(before, after, strict=True):
        assert old in log.entries
        assert log.entries[-1].syncer != "syncer-1"


async def test_a_region_whose_server_was_away_gets_what_it_missed(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 100_000 * SAMPLES))
    await run.begin()
    await some_versions(run)
    run.server("eu").kill()
    await some_versions(run, more=3, of=["toy-0", "toy-2"])
    missed = [log.entries[-1] for log in await run.read("us", closed=False)]

    run.server("eu").start()

    versions = [entry.version for entry in missed]
    await run.until(
        lambda: bool(np.all(np.greater_equal(run.pulses["toy-1"][-1].versions, versions))),
        "eu's learner has applied what it missed",
    )
    there = await run.read("eu", closed=False)
    for entry, log in zip(missed, there, strict=True):
        assert entry in log.entries


# nats-py lets go of connections, unclosed, on which no greeting came in time
@pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
async def test_a_region_that_is_cut_off_trains_on_and_what_it_stored_for_itself_is_passed_over(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 100_000 * SAMPLES, carry__max_versions=1000))
    await run.begin()
    await some_versions(run)
    run.relay.cut(run.lines("eu"))
    toy, others = run.toys[1], ["toy-0", "toy-2"]
    assert toy.member is not None
    before = toy.member.step

    await some_versions(run, of=others)  # those that eu owned are taken over
    cut = await run.read("us", closed=False)
    assert all(log.entries[-1].syncer != "syncer-1" for log in cut)
    await run.until(lambda: toy.member is not None and toy.member.step > before + 10, "eu's learner trains on")

    run.relay.heal(run.lines("eu"))
    await some_versions(run, of=["toy-1"])
    read = {region: await run.read(region, closed=False) for region in REGIONS}
    demand_one_log(*read.values())
    since = [record for old, log in zip(cut, read["us"], strict=True) for record in log.entries if record not in old.entries]
    assert "toy-1" in {member.learner for record in since for member in record.members}  # it is back


async def test_precision_follows_a_link_that_becomes_slow_and_recovers(regions: Regions) -> None:
    """An entry of 100 kB at 16 bits in a cycle: 5 s at the slow link's rate, and next to nothing at the other.

    A cycle of 48 steps takes more than a second, and less than five however slow the machine is.
    """
    settings = apart(
        tokens=3 * 100_000 * SAMPLES,
        fragments__count=3,
        round__steps=48,
        task__context=37_500,
        codec__offer_bits=16,
        codec__record_bits=16,
        regions__min_bits=8,
        regions__max_pace=1.0,
        log__archive=True,
        carry__max_versions=1000,
    )
    run = await regions(settings)
    await run.begin()
    await some_versions(run)
    slow = [run.relay.lines[name] for name in ("eu-us", "us-eu", "eu-ap", "ap-eu")]
    run.relay.set(slow, {"rate_bits_per_s": 160e3}, None)

    def went(bits: int, reasons: set[str], way: str) -> set[str]:
        """The syncers whose way to or from eu went by so many bits for such a reason."""
        found = [(name, run.events("bandwidth_changed", name)) for name in ("syncer-0", "syncer-2")]
        changed = {"region": "eu", "bits": bits, "way": way}
        return {name for name, events in found for e in events if e["reason"] in reasons and changed.items() <= e.items()}

    for way in ("records", "offers"):
        await run.until(lambda way=way: bool(went(8, {"load", "queue"}, way)), f"{way} have fewer bits")  # type: ignore[misc]
    fallen = went(8, {"load", "queue"}, "records")
    await run.until(lambda: any(run.shard_pulses[name].record_bits == 8 for name in fallen), "pulses say so")

    async def made(bits: int) -> None:
        """Wait until the newest version of a fragment whose owner had fewer bits is one of so many."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                newest = [log.versions[-1] for log in await run.read("us", closed=False)]
                if any(record.bits == bits for record in newest if record.syncer in fallen):
                    return
                run.check_alive()
                await asyncio.sleep(0.2)

    await made(8)
    run.relay.set(slow, {"rate_bits_per_s": None}, None)
    await run.until(lambda: bool(went(16, {"spare"}, "records") & fallen), "entries have all their bits again")
    await made(16)

    RunDirectory(run.directory, run.name, run.url, None, run.settings, nats_bulk_url=run.server("us").url).save()
    for toy in run.toys:
        await asyncio.to_thread(toy.stop)
    verdict = await verify.check(run.directory)
    assert verdict.holds, verdict
    redone = await redo(run.directory)
    assert [life.wrong for life in redone] == ["", "", ""]
    assert min(life.offers for life in redone) > 3  # of either precision


@pytest.mark.parametrize(
    ("module", "values", "said"),
    [
        (
            "diloco_syncer",
            {"region": "uk"},
            "region = 'uk': not a region of run 'run': there are ap, eu, us (did you mean 'us'?)",
        ),
        ("diloco_syncer", {}, "region: run 'run' has the regions ap, eu, us; set the one that this service is in"),
        (
            "diloco_syncer",
            {"region": "us", "region_urls": {"ap": "nats://127.0.0.1:1"}},
            "region_urls: expected the servers of ap, eu; missing: eu",
        ),
        (
            "diloco_syncer",
            {"region": "us", "region_urls": dict.fromkeys(("ap", "eu", "moon"), "nats://127.0.0.1:1")},
            "region_urls: expected the servers of ap, eu; no such region: moon",
        ),
        (
            "tests.services.toy",
            {"region": "mars", "share": 0},
            "region = 'mars': not a region of run 'run': there are ap, eu, us",
        ),
    ],
)
async def test_a_service_in_no_region_of_the_run_says_so_and_ends(
    regions: Regions, module: str, values: dict[str, Any], said: str
) -> None:
    run = await regions(apart())
    await run.create()
    [(code, line)] = await run.refused(run.start("lost", module, **values))
    assert code == 2
    assert said in line


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["us", "us"], "two regions are named 'us'"),
        (["us"], "one ('us') is none"),
        (["us", "e-u"], "should match pattern"),
    ],
)
def test_regions_that_cannot_be_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        small(regions__names=names)
