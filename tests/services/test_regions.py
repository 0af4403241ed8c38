"""Runs in three regions, each with a server of its own that is linked to no other."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Regions
from tests.made.toy_replay import redo_toys
from tests.pace import DEADLINE_S
from tests.services.apart import REGIONS, Region, apart, demand_one_log
from tests.services.cluster import NEVER_S, check_accounts, fill, small, some_versions
from tests.services.toy import SAMPLES

from diloco.core.log import catch_up
from diloco.errors import SettingsError
from diloco.nats.connection import NatsLink
from diloco.process.observe import get_logger
from diloco_ops.audit import verify
from diloco_ops.broker.server import find_binary

pytestmark = pytest.mark.usefixtures("patient_commands")

STORAGE_BYTES = 8 << 20
HOUR_S = 3600.0  # of clocks
# fragments change no hands however slow the machine is, so that no keyframe is stored and the whole log is there to be read
HELD = {"regions__away_s": 600.0, "liveness__dead_s": NEVER_S}
# it goes on until the test ends; more than some three versions a second would only keep the machine busy
LASTS: dict[str, Any] = {"tokens": 10**9, "round__steps": 36}


@pytest.mark.parametrize(
    "clocks",
    [{}, pytest.param({"ap": -3 * HOUR_S, "eu": 5 * HOUR_S}, marks=pytest.mark.slow)],
    ids=["", "clocks hours apart"],
)
async def test_all_regions_have_one_log_and_nothing_is_lost(regions: Regions, clocks: Mapping[str, float]) -> None:
    run = await regions(apart(tokens=3 * 24 * SAMPLES, round__learners_wait=True, **HELD), clocks=clocks)
    await run.begin()
    await run.ended()
    heartbeats = await run.finished_heartbeats()
    read = {region: await run.read(region) for region in REGIONS}
    demand_one_log(*read.values())
    assert len({tuple(log.state_hash for log in logs) for logs in read.values()}) == 1
    assert all(log.entries[-1].closing for log in read["us"])
    check_accounts(heartbeats, read["us"])
    owners = {record.syncer for log in read["us"] for record in log.entries}
    assert owners == {"syncer-0", "syncer-1", "syncer-2"}  # each region owns its share
    assert {m.learner for log in read["us"] for r in log.versions for m in r.members} == {"toy-0", "toy-1", "toy-2"}
    run.save()
    verdict = await verify.check(run.directory)
    held = {check.name: check.state for check in verdict.checks}
    assert held == dict.fromkeys(("log", "keyframes", "changes", "tapes", "offers", "data"), "holds") | dict.fromkeys(
        ("merges", "report"),
        "unchecked",  # there is no archive, nor a report
    )


@pytest.mark.slow  # the simulation has clocks that jump, and regions whose servers go
async def test_fragments_change_hands_between_regions_whose_clocks_are_hours_apart(regions: Regions) -> None:
    run = await regions(apart(**LASTS), clocks={"ap": -3 * HOUR_S, "eu": 5 * HOUR_S})
    await run.begin()
    await some_versions(run)
    [lost] = [service for service in run.services if service.name == "syncer-1"]
    lost.kill()
    await some_versions(run)  # those that eu owned are another region's now
    taken = await run.read("us", closed=False)
    assert "syncer-1" not in {log.entries[-1].syncer for log in taken}

    run.clocks["eu"] = -5 * HOUR_S  # it comes back before it went
    run.services.remove(lost)
    run.syncer(1)
    await run.until(lambda: bool(run.shard_heartbeats["syncer-1"].fragments), "eu owns its share again")
    await some_versions(run)

    read = {region: await run.read(region, closed=False) for region in REGIONS}
    demand_one_log(*read.values())
    for before, log in zip(taken, read["us"], strict=True):
        assert before.entries[-1] in log.entries


@pytest.mark.slow  # one that comes back has been lost before, and nothing that was committed then may go either
async def test_a_region_lost_for_good_takes_nothing_that_was_committed_with_it(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
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


@pytest.mark.slow  # one that is cut off has missed as much, below; the simulation has regions whose servers go
async def test_a_region_whose_server_was_away_gets_what_it_missed(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    run.server("eu").kill()
    await some_versions(run, more=3, of=["toy-0", "toy-2"])
    missed = [log.entries[-1] for log in await run.read("us", closed=False)]

    run.server("eu").start()

    versions = [entry.version for entry in missed]
    await run.until(
        lambda: bool(np.all(np.greater_equal(run.heartbeats["toy-1"][-1].versions, versions))),
        "eu's learner has applied what it missed",
    )
    there = await run.read("eu", closed=False)
    for entry, log in zip(missed, there, strict=True):
        assert entry in log.entries


# nats-py lets go of connections, unclosed, on which no greeting came in time
@pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.promise("a region that is cut off trains on, and all regions end with one log")
async def test_a_region_that_is_cut_off_trains_on_and_what_it_stored_for_itself_is_passed_over(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    run.relay.cut(run.lines("eu"))
    toy, others = run.toys[1], ["toy-0", "toy-2"]
    assert toy.member is not None
    before = toy.member.step

    await some_versions(run, of=others)  # those that eu owned are taken over
    cut = await run.read("us", closed=False)
    assert all(log.entries[-1].syncer != "syncer-1" for log in cut)
    await run.until(lambda: bool(run.events("region_away", "coordinator")), "the coordinator notices")
    told = await regions_told(run, lambda told: told["eu"]["fragments"] == 0 and away_of(told) == ["eu"])
    assert all(region["bytes_in"] > 0 and region["bytes_out"] > 0 for region in told.values())
    await run.until(lambda: toy.member is not None and toy.member.step > before + 10, "eu's learner trains on")

    run.relay.heal(run.lines("eu"))
    back: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while "toy-1" not in back:  # the first versions that it applies are those that the others made without it
            await some_versions(run, 1, of=["toy-1"])
            read = {region: await run.read(region, closed=False) for region in REGIONS}
            demand_one_log(*read.values())
            logs = zip(cut, read["us"], strict=True)
            since = [record for old, log in logs for record in log.entries if record not in old.entries]
            back = {member.learner for record in since for member in record.members}
    await run.until(lambda: bool(run.events("region_back", "coordinator")), "the coordinator hears it again")
    await regions_told(run, lambda told: away_of(told) == [])


def away_of(told: dict[str, Any]) -> list[str]:
    return [name for name, region in told.items() if region["away_s"] is not None]


async def regions_told(run: Region, so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask the coordinator until it says something of the regions."""
    async with asyncio.timeout(DEADLINE_S):
        while not so(told := (await run.status())["regions"]):
            run.check_alive()
            await asyncio.sleep(0.1)
    found: dict[str, Any] = told
    return found


@pytest.mark.slow  # the simulation cuts a region off from the others' servers alone
# nats-py lets go of connections, unclosed, on which no greeting came in time
@pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
async def test_an_owner_that_is_heard_but_reaches_no_other_regions_server_is_replaced(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    assert run.shard_heartbeats["syncer-2"].fragments
    ways = [line for name, line in run.relay.lines.items() if name in ("us-ap", "ap-us", "us-eu", "eu-us")]
    run.relay.cut(ways)  # the control store is reached

    await some_versions(run, of=["toy-0", "toy-1"])  # also of what us owned
    assert run.shard_heartbeats["syncer-2"].state == "unable"
    taken = await run.read("eu", closed=False)
    assert all(log.entries[-1].syncer != "syncer-2" for log in taken)

    run.relay.heal(ways)
    await some_versions(run, of=["toy-2"])
    await run.until(lambda: run.shard_heartbeats["syncer-2"].state == "owner", "us owns its share again")
    await some_versions(run)
    read = {region: await run.read(region, closed=False) for region in REGIONS}
    demand_one_log(*read.values())
    for before, log in zip(taken, read["us"], strict=True):
        assert before.entries[-1] in log.entries


@asynccontextmanager
async def without_jetstream(port: int) -> AsyncIterator[None]:
    command = [str(find_binary()), "-a", "127.0.0.1", "-p", str(port)]
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        await server.wait()


@asynccontextmanager
async def too_old(port: int) -> AsyncIterator[None]:
    """Something that greets as an old server does: what comes after is never asked for."""
    greeted: list[asyncio.StreamWriter] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.append(writer)
        writer.write(b'INFO {"server_id":"old","version":"2.10.22","max_payload":1048576,"headers":true,"jetstream":true}\r\n')
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")

    server = await asyncio.start_server(greet, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for writer in greeted:
            writer.close()


Unfit = Callable[[int], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize(
    ("unfit", "reason"),
    [
        (without_jetstream, "JetStream is not enabled; start nats-server with -js"),
        pytest.param(too_old, "nats-server 2.10.22 is too old: at least 2.14 is needed", marks=pytest.mark.slow),
    ],
    ids=["without JetStream", "too old"],
)
async def test_a_region_whose_server_cannot_be_used_keeps_only_itself_waiting(
    regions: Regions, unfit: Unfit, reason: str
) -> None:
    run = await regions(apart(**LASTS))
    server = run.server("eu")
    server.stop()
    async with unfit(server.port):
        run.coordinator()
        for index in (0, 2):
            run.syncer(index)
            run.toy(index)
        ended = await run.refused(run.syncer(1), run.toy_process(1, **run.place(1)))
        assert [code for code, _ in ended] == [4, 4]
        assert all(f"NATS at {server.url}: {reason}" in said for _, said in ended)
        await run.link()
        await run.all_ready()
        run.gate.open()
        await some_versions(run)
        for name in ("syncer-0", "syncer-2"):
            waited = [values for values in run.events("waiting_for_nats", name) if reason in str(values["reason"])]
            assert {values["other_region"] for values in waited} == {"eu"}

    server.start()
    run.services = [service for service in run.services if not service.killed]
    run.syncer(1)
    run.toy(1)
    await run.until(lambda: "toy-1" in run.heartbeats, "eu takes part")
    await some_versions(run, of=["toy-1"])
    demand_one_log(*[await run.read(region, closed=False) for region in REGIONS])


# nats-py lets go of connections, unclosed, on which no greeting came in time
@pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "log",
    [pytest.param({}, marks=pytest.mark.slow), {"log__keep_bytes": 0, "log__keyframe_factor": 0.01}],
    ids=["", "version 0 is dropped"],
)
async def test_a_region_whose_server_comes_back_empty_begins_again_and_the_others_go_on(
    regions: Regions, log: dict[str, Any]
) -> None:
    run = await regions(apart(**LASTS | log))
    await run.begin()
    await some_versions(run, more=6 if log else 2)
    [syncer] = [service for service in run.services if service.name == "syncer-1"]
    toy = run.toys.pop(1)
    syncer.kill()
    await asyncio.to_thread(toy.stop)
    server = run.server("eu")
    server.kill()
    shutil.rmtree(server.directory / "jetstream")
    server.start()
    await some_versions(run, of=["toy-0", "toy-2"])

    def missing() -> set[str]:
        waited = run.events("waiting_for_offers")
        return {values["other_region"] for values in waited if "does not exist" in str(values["reason"])}

    await run.until(lambda: bool(missing()), "its stream is missed")
    assert missing() == {"eu"}
    missed = run.heartbeats["toy-0"][-1].versions

    run.services.remove(syncer)
    run.syncer(1)
    run.toy(1)
    incarnation = run.heartbeats["toy-1"][-1].incarnation
    await run.until(lambda: run.heartbeats["toy-1"][-1].incarnation > incarnation, "eu's learner is back")
    first = next(heartbeat for heartbeat in run.heartbeats["toy-1"] if heartbeat.incarnation > incarnation)
    assert np.greater_equal(first.versions, missed).all()  # it never steps on what is older
    assert run.events("region_brought_back", "syncer-1")
    await some_versions(run, of=["toy-1"])
    demand_one_log(*[await run.read(region, closed=False) for region in REGIONS])


async def test_a_region_whose_server_loses_its_disk_under_living_services_is_brought_back(regions: Regions) -> None:
    """Both notice that the stream is another one, end, and begin again where their launcher starts them again."""
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    [syncer] = [service for service in run.services if service.name == "syncer-1"]
    toy = run.toys.pop(1)
    server = run.server("eu")
    server.kill()
    shutil.rmtree(server.directory / "jetstream")
    server.start()
    [(code, said)] = await run.refused(syncer)
    assert code == 4  # a launcher starts it again; what notices first, a reader or the look at the region, is open
    lost = r"region eu: its server has lost the log of run 'run'; .*"
    missing = r"stream DILOCO_run_\w+: does not exist on the server"
    assert re.fullmatch(rf"diloco-syncer: (?:{lost}|{missing})\n", said)
    await run.until(lambda: toy.failure is not None, "eu's learner ends, too")
    assert str(toy.failure).endswith("does not exist on the server")
    incarnation = run.heartbeats["toy-1"][-1].incarnation
    missed = run.heartbeats["toy-0"][-1].versions

    run.services.remove(syncer)
    run.syncer(1)
    run.toy(1)
    await run.until(lambda: run.heartbeats["toy-1"][-1].incarnation > incarnation, "eu's learner is back")
    first = next(heartbeat for heartbeat in run.heartbeats["toy-1"] if heartbeat.incarnation > incarnation)
    assert np.greater_equal(first.versions, missed).all()  # it never steps on what is older
    await some_versions(run, of=["toy-1"])
    demand_one_log(*[await run.read(region, closed=False) for region in REGIONS])


async def test_a_learner_that_joins_where_the_log_is_old_waits_for_what_the_others_have(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its region is cut off from the other regions, and not from the control store: it hears how far the others are."""
    run = await regions(apart(**LASTS))
    await run.begin()
    await some_versions(run)
    toy, others = run.toys.pop(1), ["toy-0", "toy-2"]
    await asyncio.to_thread(toy.stop)
    bulk = [line for name, line in run.relay.lines.items() if "eu" in name.split("-") and "control" not in name]
    run.relay.cut(bulk)
    await some_versions(run, more=3, of=others)  # those that eu owned are taken over

    with monkeypatch.context() as impatient:
        impatient.setattr(catch_up, "QUIET_S", 0.5)
        toy = run.toy(1)
        await run.until(lambda: toy.member is not None and toy.member.step > 0, "it trains on what its region has")
        [old] = run.events("region_is_old", "toy-1")
        assert (old["region"], old["version"] < old["stated_version"]) == ("eu", True)
        assert old["fragment"] in range(len(run.heartbeats["toy-0"][-1].versions))
        run.toys.remove(toy)
        await asyncio.to_thread(toy.stop)
    await run.until(lambda: run.heartbeats["toy-1"][-1].state == "left", "it has left")
    incarnation = run.heartbeats["toy-1"][-1].incarnation
    missed = run.heartbeats["toy-0"][-1].versions
    run.toy(1)
    await run.until(lambda: bool(run.events("region_catches_up", "toy-1")), "it waits")
    [waits] = run.events("region_catches_up", "toy-1")
    assert waits["region"] == "eu"
    assert waits["stated_version"] > waits["version"]
    assert run.heartbeats["toy-1"][-1].incarnation == incarnation  # it has said nothing: it takes no step

    run.relay.heal(bulk)
    await run.until(lambda: run.heartbeats["toy-1"][-1].incarnation > incarnation, "it has joined")
    first = next(heartbeat for heartbeat in run.heartbeats["toy-1"] if heartbeat.incarnation > incarnation)
    assert np.greater_equal(first.versions, missed).all()
    assert not run.events("region_is_old")
    assert not run.events("message_refused")
    await some_versions(run, of=["toy-1"])


@pytest.mark.slow
async def test_a_region_whose_storage_is_full_keeps_only_itself_waiting(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    server = run.server("eu")
    server.max_file_bytes = STORAGE_BYTES
    server.stop()
    server.start()
    await run.begin()
    await some_versions(run)
    link = await NatsLink.open(server.url, server.url, "foreign", get_logger(), DEADLINE_S)
    await fill(link.bulk.jetstream(timeout=DEADLINE_S), STORAGE_BYTES)

    def heard(event: str, service: str, **values: str) -> bool:
        met = [found for found in run.events(event, service) if "storage is full" in str(found["reason"])]
        return any(values.items() <= found.items() for found in met)

    await run.until(lambda: heard("offer_not_stored", "toy-1"), "eu's learner says why its work has to wait")
    await run.until(
        lambda: all(heard("storage_full", f"syncer-{i}", other_region="eu") for i in range(3)), "all syncers say it of eu"
    )
    toy = run.toys[1].member
    assert toy is not None
    before = toy.step
    await run.until(lambda: toy.step > before + 30, "eu's learner trains on")
    await some_versions(run, of=["toy-0", "toy-2"])  # also of what eu owned: others have taken it over
    await run.until(lambda: bool(run.events("commits_nothing", "syncer-1")), "eu's syncer says why it gave way")
    assert "stores nothing" in str(run.events("commits_nothing", "syncer-1")[0]["reason"])

    await link.bulk.jetstream(timeout=DEADLINE_S).delete_stream("foreign")
    await link.close()
    full = await run.read("us", closed=False)
    back: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while "toy-1" not in back:
            await some_versions(run, 1)
            read = {region: await run.read(region, closed=False) for region in REGIONS}
            demand_one_log(*read.values())
            logs = zip(full, read["us"], strict=True)
            since = [record for old, log in logs for record in log.entries if record not in old.entries]
            back = {member.learner for record in since for member in record.members}


async def test_two_runs_share_their_servers_and_know_nothing_of_each_other(regions: Regions) -> None:
    settings = apart(tokens=3 * 24 * SAMPLES, **HELD)
    one = await regions(settings, name="one")
    two = await regions(settings, name="two", beside=one)
    runs = (one, two)
    for run in runs:
        await run.begin()
    other = apart(tokens=1, **HELD).model_dump()
    [(code, said)] = await one.refused(one.start("another", "diloco_coordinator", settings=other, **one.place(0)))
    assert code == 5
    assert "run 'one' exists on the server with another setting: tokens is 1152 there, 1 here" in said
    assert "resume it with its own settings, or choose another run name" in said

    for run in runs:
        await run.ended()

    for run in runs:
        check_accounts(await run.finished_heartbeats(), await run.read("us"))
        assert not run.events("message_refused")


@pytest.mark.slow  # it needs a machine that keeps up with the fast links for a minute
async def test_precision_follows_a_link_that_becomes_slow_and_recovers(regions: Regions) -> None:
    """An entry of 100 kB at 16 bits in a cycle: 3.3 s at the slow link's rate, and next to nothing at the other.

    A cycle of 48 steps takes more than a second, and less than three however slow the machine is.
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
        **HELD,
    )
    run = await regions(settings)
    await run.begin()
    await some_versions(run)
    slow = [run.relay.lines[name] for name in ("eu-us", "us-eu", "eu-ap", "ap-eu")]
    run.relay.set(slow, {"rate_bits_per_s": 240e3}, None)

    def went(bits: int, reasons: set[str], way: str) -> set[str]:
        """The syncers whose way to or from eu went by so many bits for such a reason."""
        found = [(name, run.events("bandwidth_changed", name)) for name in ("syncer-0", "syncer-2")]
        changed = {"other_region": "eu", "bits": bits, "way": way}
        return {name for name, events in found for e in events if e["reason"] in reasons and changed.items() <= e.items()}

    for way in ("records", "offers"):
        await run.until(lambda way=way: bool(went(8, {"load", "queue"}, way)), f"{way} have fewer bits")  # type: ignore[misc]
    fallen = went(8, {"load", "queue"}, "records")
    await run.until(lambda: any(run.shard_heartbeats[name].record_bits == 8 for name in fallen), "heartbeats say so")

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

    run.save()
    for toy in run.toys:
        await asyncio.to_thread(toy.stop)
    verdict = await verify.check(run.directory)
    assert verdict.holds, verdict
    redone = await redo_toys(run.directory)
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
        (["us"], "lists one region ('us')"),
        (["us", "e-u"], "should match pattern"),
    ],
)
def test_regions_that_cannot_be_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        small(regions__names=names)
