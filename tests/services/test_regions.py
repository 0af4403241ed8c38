"""Runs in three regions, each with a server of its own that is linked to no other."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.services.cluster import Cluster, Events, Folded, Service, check_accounts, fold_log, small, some_versions
from tests.services.forking import Nursery
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
from diloco.wire import messages
from diloco.wire.messages import Answer, Body, Combined, Record

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


async def test_where_offers_are_merged_in_their_region_one_of_each_region_crosses_a_round(regions: Regions) -> None:
    # everybody is waited for, in each region and by the owner, and waits for the version: what crosses does not depend on the pace
    settings = apart(
        learners=6,
        tokens=6 * 40 * SAMPLES,
        regions__merge=True,
        round__quorum="all",
        round__learners_wait=True,
        log__archive=True,
    )
    run = await regions(settings)
    await run.begin()
    await run.ended()
    stored, combined, alone = await pulled(run)
    pulses = await run.finished_pulses()
    read = {region: await run.read(region) for region in REGIONS}
    demand_one_log(*read.values())
    check_accounts(pulses, read["us"])

    home = {f"toy-{share}": REGIONS[share % 3] for share in range(6)}
    owners = {f"syncer-{index}": REGIONS[index] for index in range(3)}
    for log in read["us"]:
        for record in log.versions:
            own = owners[record.syncer]
            elsewhere = sorted(member.learner for member in record.members if home[member.learner] != own)
            together = [[record.members[place].learner for place in one.members] for one in record.combined]
            assert sorted(name for names in together for name in names) == elsewhere
            assert all(len({home[name] for name in names}) == 1 for names in together)
            assert all(owners[one.syncer] == home[names[0]] for one, names in zip(record.combined, together, strict=True))
            if not record.closing and len(record.members) == 6:
                assert [len(names) for names in together] == [2, 2]

    sent = run.events("offers_combined")
    # closing rounds are answered again by who had answered them before they were closing
    last = {log.index: log.versions[-1].version for log in read["us"]}
    rounds = Counter((values["fragment"], values["version"]) for values in sent if values["version"] < last[values["fragment"]])
    assert rounds
    assert set(rounds.values()) == {2}  # of each of the regions where the owner is not
    assert 0 < combined <= len(sent)
    # learners' own offers were read once, by their region's syncer: none of them crossed
    assert 0 < alone <= stored - len(sent)

    RunDirectory(run.directory, run.name, run.url, None, run.settings, nats_bulk_url=run.server("us").url).save()
    verdict = await verify.check(run.directory)
    assert verdict.holds, verdict
    found = {check.name: check.found for check in verdict.checks}
    # those made in this region, whose archive this is
    assert re.match(r"[1-9]\d* versions are, to the bit, the merges of their offers", found["merges"])


async def test_combined_offers_that_cannot_be_are_refused_and_never_merged(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 60 * SAMPLES, regions__merge=True, round__learners_wait=True))
    run.coordinator()
    run.syncers()
    run.learners()
    await run.link()
    await run.all_ready()
    identity = messages.run_id(run.name, run.settings.digest())
    bad: dict[str, dict[str, Any]] = {
        "of-another": {"syncer": "syncer-0"},
        "in-eight-bits": {"bits": 8},
        "of-nobody": {"members": [forged("eve")]},
        "of-too-many-steps": {"members": [forged("toy-0", steps=SAMPLES + 1)]},
        "of-another-fragment": {"fragment": 1},
    }
    frames = {name: messages.pack(combined_of(name, **changes), identity) for name, changes in bad.items()}
    frames["garbage"] = b"hello"
    for region in REGIONS:
        link = await NatsTransport.open(run.url, run.server(region).url, "forger", get_logger(), give_up_after_s=20)
        for name, frame in frames.items():
            await link.bulk.jetstream().publish(run.subjects.combined(0, name), frame)
        await link.close()
    await run.until(
        lambda: {values["sender"] for values in run.events("message_refused")} >= frames.keys(), "all are refused, and named"
    )
    run.gate.open()
    await run.ended()
    pulses, read = await run.finished_pulses(), await run.read("us")
    check_accounts(pulses, read)
    assert {m.learner for log in read for r in log.versions for m in r.members} == {"toy-0", "toy-1", "toy-2"}


def forged(learner: str, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "incarnation": 1,
        "number": 1,
        "after": (0, 0),
        "round": 1,
        "base_version": 0,
        "base_hash": bytes(32),
    }
    values |= {"steps": 1, "tokens": SAMPLES, "lost_tokens": 0, "data": [(0, 0, 1)]}
    return Answer(learner, **values | changes)


def combined_of(syncer: str, **changes: Any) -> Combined:
    body = Body(0, bytes(32), 0, bytes(8))
    values: dict[str, Any] = {"fragment": 0, "syncer": syncer, "incarnation": 1, "number": 1, "bits": 4, "body": body}
    return Combined(**values | {"members": [forged("toy-0")]} | changes)


async def pulled(run: Region) -> tuple[int, int, int]:
    """Offers that all regions have stored, and those that readers got: combined ones, and learners' own."""
    stored = combined = alone = 0
    for region in REGIONS:
        link = await NatsTransport.open(run.url, run.server(region).url, "reader", get_logger(), give_up_after_s=20)
        try:
            stream = await link.bulk.jetstream().stream_info(run.subjects.offer_stream)
            readers = await link.bulk.jetstream().consumers_info(run.subjects.offer_stream)
        finally:
            await link.close()
        stored += stream.state.last_seq
        for reader in readers:
            assert reader.delivered is not None
            subjects = reader.config.filter_subjects or [reader.config.filter_subject]
            if ".combined." in str(subjects[0]):
                combined += reader.delivered.consumer_seq
            else:
                alone += reader.delivered.consumer_seq
    return stored, combined, alone


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
