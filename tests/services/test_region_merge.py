"""Runs in three regions that merge their own offers before they cross (``regions.merge``)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
from tests.made.asking import asked
from tests.made.fixtures import Regions
from tests.made.regional_offers import combined_of, forged
from tests.pace import DEADLINE_S
from tests.services.apart import REGIONS, Region, apart, demand_one_log
from tests.services.cluster import NEVER_S, check_accounts, some_versions
from tests.services.liars import Liar
from tests.services.toy import SAMPLES, Regression

from diloco.errors import EjectedError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.wire import framing
from diloco.wire.entries import Genesis
from diloco_ops.audit import verify
from diloco_ops.operate import operate

pytestmark = pytest.mark.usefixtures("patient_commands")

# fragments change no hands however slow the machine is, so that no keyframe is stored and the whole log is there to be read
MERGED: dict[str, Any] = {
    "regions__merge": True,
    "regions__away_s": 600.0,
    "liveness__dead_s": NEVER_S,
    "round__learners_wait": True,
}


async def test_where_offers_are_merged_in_their_region_one_of_each_region_crosses_a_round(regions: Regions) -> None:
    # everybody is waited for, in each region and by the owner, and waits for the version: the pace makes no difference
    settings = apart(learners=6, tokens=6 * 24 * SAMPLES, round__quorum="all", log__archive=True, **MERGED)
    run = await regions(settings)
    await run.begin()
    stored, combined, alone = await pulled_until_ended(run)
    heartbeats = await run.finished_heartbeats()
    read = {region: await run.read(region) for region in REGIONS}
    demand_one_log(*read.values())
    check_accounts(heartbeats, read["us"])

    home = {f"toy-{share}": REGIONS[share % 3] for share in range(6)}
    owners = {f"syncer-{index}": REGIONS[index] for index in range(3)}
    for log in read["us"]:
        for record in log.versions:
            own = owners[record.syncer]
            elsewhere = sorted(member.learner for member in record.members if home[member.learner] != own)
            together = [[record.members[place].learner for place in one.members] for one in record.regional_offers]
            assert sorted(name for names in together for name in names) == elsewhere
            assert all(len({home[name] for name in names}) == 1 for names in together)
            assert all(
                owners[one.syncer] == home[names[0]] for one, names in zip(record.regional_offers, together, strict=True)
            )
            if not record.closing and len(record.members) == 6:
                assert [len(names) for names in together] == [2, 2]

    sent = run.events("regional_offer_stored")
    # closing rounds are answered again by who had answered them before they were closing
    last = {log.index: log.versions[-1].version for log in read["us"]}
    rounds = Counter((values["fragment"], values["version"]) for values in sent if values["version"] < last[values["fragment"]])
    assert rounds
    assert set(rounds.values()) == {2}  # of each of the regions where the owner is not
    assert 0 < combined <= len(sent)
    # learners' own offers were read once, by their region's syncer: none of them crossed
    assert 0 < alone <= stored - len(sent)

    run.save()
    verdict = await verify.check(run.directory)
    assert verdict.holds, verdict
    found = {check.name: check.found for check in verdict.checks}
    # those made in this region, whose archive this is; its syncer owns none where it was the last one to come
    here = [record.syncer for log in read["us"] for record in log.versions if owners[record.syncer] == REGIONS[0]]
    assert re.match(rf"{'[1-9]' if here else '0'}\d* versions equal the merges of their offers bit for bit", found["merges"])


async def test_combined_offers_that_cannot_be_are_refused_and_never_merged(regions: Regions) -> None:
    run = await regions(apart(tokens=3 * 24 * SAMPLES, **MERGED))
    run.coordinator()
    run.syncers()
    run.learners()
    await run.link()
    await run.all_ready()
    identity = framing.run_id(run.name, run.settings.digest())
    registry = await (await run.link()).bucket(run.subjects.bucket, create=False)
    stored = await registry.get("genesis")
    assert stored is not None
    base_hash = framing.unpack(stored[0], Genesis, identity)[0].fragments[0]
    bad: dict[str, dict[str, Any]] = {
        "of-another": {"syncer": "syncer-0"},
        "in-eight-bits": {"bits": 8},
        "of-an-unknown-learner": {"members": [forged("eve")]},
        "of-too-many-steps": {"members": [forged("toy-0", steps=SAMPLES + 1, base_hash=base_hash)]},
        "of-more-than-can-be": {"members": [forged("toy-0", lost_tokens=2**62, base_hash=base_hash)]},
        "of-another-fragment": {"fragment": 1},
    }
    frames = {name: framing.pack(combined_of(name, **changes), identity) for name, changes in bad.items()}
    frames["garbage"] = b"hello"
    run.liars = set(frames)
    for region in REGIONS:
        link = await NatsTransport.open(run.url, run.server(region).url, "forger", get_logger(), DEADLINE_S)
        for name, frame in frames.items():
            await asked(partial(link.bulk.jetstream().publish, run.subjects.regional_offer(0, name), frame))
        await link.close()
    await run.until(
        lambda: {values["sender"] for values in run.events("message_refused")} >= frames.keys(), "all are refused, and named"
    )
    run.gate.open()
    await run.ended()
    heartbeats, read = await run.finished_heartbeats(), await run.read("us")
    check_accounts(heartbeats, read)
    assert {m.learner for log in read for r in log.versions for m in r.members} == {"toy-0", "toy-1", "toy-2"}


@pytest.mark.slow  # the same of owners, and of what combines, is in units
async def test_who_is_ejected_is_in_no_combined_offer_any_more_and_nobody_waits_for_it(regions: Regions) -> None:
    run = await regions(apart(learners=6, tokens=10**9, round__quorum="all", **MERGED))
    await run.begin()
    await some_versions(run)
    run.save()
    ejected = run.toys.pop()

    await asyncio.to_thread(operate.eject, run.directory, ejected.name)
    await run.until(lambda: isinstance(ejected.failure, EjectedError), "it ends")
    left = [toy.name for toy in run.toys]
    await some_versions(run, of=left)  # everybody is waited for, in each region and by the owner
    settled = run.heartbeats[left[0]][-1].versions
    await some_versions(run, of=left)
    await run.use_up()

    for log in await run.read("us"):
        merged = [any(m.learner == ejected.name for m in record.members) for record in log.versions]
        assert (any(merged[: settled[log.index]]), any(merged[settled[log.index] :])) == (True, False)


@pytest.mark.slow  # seven learners; the same of owners is in test_changes.py, and of what combines in units
async def test_a_learner_that_lies_is_left_out_where_its_region_combines_offers(regions: Regions) -> None:
    """Of three learners in ap, which judge each other, one lies; the others' regions own two thirds of the fragments."""
    judged: dict[str, Any] = {"quarantine__factor": 5.0, **MERGED}
    run = await regions(apart(learners=7, tokens=10**9, round__quorum="all", round__steps=12, **judged))
    run.liars = {"toy-6"}
    liar = Liar(run, -1e4)
    for share in range(7):
        run.toy(share, before_step=liar if share == 6 else run.gate)
    await run.begin()
    await run.until(lambda: bool(run.events("learner_quarantined", "toy-0")), "it is quarantined, and others know it")
    seen = run.events("learner_quarantined", "toy-0")[0]
    assert (seen["learner"], seen["author"]) == ("toy-6", "syncer-0")
    await some_versions(run, 2, of=[toy.name for toy in run.toys[:6]])
    await run.use_up()
    read = await run.read("us")
    assert Regression(run.settings).distance(await run.tensors(read)) < 0.5
    assert {name for log in read for record in log.versions for name in {m.learner for m in record.members}} >= {"toy-0"}


async def pulled_until_ended(run: Region) -> tuple[int, int, int]:
    """Wait for the end. Offers that all regions have stored, and those that readers got: regional ones, and learners' own.

    Readers remove their consumers at the end, so each is looked at all the time.
    """
    stream, got = run.subjects.offer_stream, dict[tuple[str, Any], tuple[bool, int]]()
    ending = asyncio.ensure_future(run.ended())
    async with contextlib.AsyncExitStack() as stack:
        apis = []
        for region in REGIONS:
            link = await NatsTransport.open(run.url, run.server(region).url, "reader", get_logger(), DEADLINE_S)
            stack.push_async_callback(link.close)
            apis.append(link.bulk.jetstream())
        while not ending.done():
            for region, api in zip(REGIONS, apis, strict=True):
                for reader in await asked(partial(api.consumers_info, stream)):
                    assert reader.delivered is not None
                    subjects = reader.config.filter_subjects or [reader.config.filter_subject]
                    got[region, reader.created] = ".regional." in str(subjects[0]), reader.delivered.consumer_seq
            await asyncio.wait([ending], timeout=0.2)
        ending.result()
        stored = sum([(await asked(partial(api.stream_info, stream))).state.last_seq for api in apis])
    combined, alone = (sum(count for is_combined, count in got.values() if is_combined == kind) for kind in (True, False))
    return stored, combined, alone
