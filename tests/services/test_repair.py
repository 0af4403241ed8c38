"""``diloco repair``: what stands on a fragment's subject and is no entry is named, and the run goes on behind it."""

from __future__ import annotations

import asyncio
import re
import uuid
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tests.made.fixtures import Launch
from tests.made.run_checks import newest_applied, rollbacks, save_directory, waiting_settings
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import Cluster, small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import REGIONS, two_regions
from tests.services.secured import guest

from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.core.run import changes
from diloco.core.run.changes import Set
from diloco.core.tensors.outer import Nesterov, OuterStep
from diloco.errors import MachineError, RunError
from diloco.member.own_arrays import OwnArrays
from diloco.nats.registry import Registry
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco_ops.audit import verify
from diloco_ops.reading import attach
from diloco_ops.repair import repair_command as command

pytestmark = pytest.mark.usefixtures("patient_commands")

RUN = "guarded"


async def repair(cluster: Cluster, **options: Any) -> int:
    """``diloco repair``, in this process, without questions."""
    save_directory(cluster)
    return await repaired(cluster, **options)


async def repaired(cluster: Cluster, **options: Any) -> int:
    """``diloco repair`` of a run whose directory is there."""
    values: dict[str, Any] = {"fragment": None, "to_version": None, "key": None, "dry_run": False, "yes": True, "reason": ""}
    return await asyncio.to_thread(command.repair, cluster.directory, **values | options)


async def publish(cluster: Cluster, subject: str, data: bytes) -> int:
    """Store a message without any fence, once, and return its sequence."""
    return await stored(await cluster.link(), subject, data)


async def stored(link: NatsTransport, subject: str, data: bytes) -> int:
    storing = partial(link.append, subject, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)
    return await until_available(storing, get_logger())


async def test_a_fragment_with_garbage_on_its_subject_goes_on_and_can_be_repaired(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = launch(waiting_settings(tokens=10**9))
    await cluster.begin()
    await some_versions(cluster, 3)
    cluster.liars = {"log", cluster.subjects.record(1)}
    sequence = await publish(cluster, cluster.subjects.record(1), b"no record")
    await some_versions(cluster, 2)  # its owner takes the fragment over again, behind that message

    with cluster.slowly():
        assert await repair(cluster) == 0
        said = capsys.readouterr().out
        assert f"fragment 1: message {sequence} on {cluster.subjects.record(1)}, 9 bytes: record: " in said
        assert "all readers pass over it, and the log goes on behind it" in said
        assert "nothing is to be repaired" in said

        good = min(newest_applied(cluster)) - 1
        assert await repair(cluster, fragment=[1], to_version=good, dry_run=True) == 1
        said = capsys.readouterr().out
        assert f"fragment 1: goes on from version {good}; " in said
        assert await repair(cluster, fragment=[1], to_version=good, reason="unwanted") == 0
        assert f"is what version {good} was" in capsys.readouterr().out

    await cluster.use_up()
    folded = await cluster.folded()
    assert rollbacks(folded) == {0: [], 1: [(1, good)], 2: [], 3: []}
    [entry] = [entry for entry in folded[1].entries if entry.repaired]
    assert entry.repaired is not None
    assert (entry.entry, entry.repaired.sequence) == ("repair", sequence)
    for log in folded:
        assert log.passed_over == (log.index == 1)
        assert all(toy.thetas[log.index].tobytes() == log.theta.tobytes() for toy in cluster.toys)
    check = next(check for check in (await verify.check(save_directory(cluster))).checks if check.name == "log")
    assert check.state == "holds"
    assert f"repaired: fragment 1, version {entry.version} is what version {good} was, by change 1" in check.found
    with pytest.raises(RunError, match=r"its log is closed at version \d+, and nothing follows that; .* --resume-at"):
        await repair(cluster, fragment=[1])


@pytest.mark.promise("damaged keys of the bucket are named and repaired")
async def test_damaged_keys_end_what_begins_and_are_made_again(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = launch(waiting_settings(steps=60))
    await cluster.begin()
    cluster.gate.close()
    link = await cluster.link()
    registry = await until_available(partial(Registry.open, link, cluster.subjects.bucket, create=False), get_logger())
    run = KnownRun(cluster.name, cluster.settings, registry)
    cluster.settle_pace()
    five = [Set("round.steps", 5)]
    changing = partial(append_changes, link, run, lambda now: five * (now.settings.round.steps != 5), author="ann")
    await until_available(changing, get_logger())
    good = {key: await value_of(registry, key) for key in ("run", "protocol", "map", "changes")}
    listed = good["changes"]
    assert listed is not None
    two = changes.unpack(listed, run.identity).then(Set("round.steps", 6), at_s=0.0, author="bob").pack()
    for key, garbage in {"run": b"7", "protocol": b"{", "map": b"\x93\x01", "changes": two[:-5] + b"xxxxx"}.items():
        await until_available(partial(registry.put, key, garbage), get_logger())

    [(code, said)] = await cluster.refused(cluster.syncer(7))
    assert code == 5
    assert "diloco repair RUN --key protocol" in said

    capsys.readouterr()
    assert await repair(cluster) == 1
    found = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]  # and warnings of a busy machine
    assert [said for said in found if said.startswith("key ")] == ["key run", "key protocol", "key map", "key changes"]
    assert await repair(cluster, key="run", dry_run=True) == 1
    for key in ("run", "protocol", "map", "changes"):
        assert await repair(cluster, key=key) == 0
    for key in ("run", "protocol", "changes"):
        assert await value_of(registry, key) == good[key]
    assert await value_of(registry, "map") is None
    with pytest.raises(RunError, match=r"no key 'warp' that can be repaired"):
        await repair(cluster, key="warp")
    assert await repair(cluster, key="owners") == 0

    late = cluster.toy(2, name="late")  # it sets the map again
    await cluster.until(lambda: "late" in cluster.heartbeats, "a newcomer is there")
    cluster.gate.open()
    cluster.hurry()
    await cluster.ended()
    assert late.finished
    assert await value_of(registry, "map") == good["map"]
    assert (await verify.check(save_directory(cluster))).holds


async def value_of(registry: Registry, key: str) -> bytes | None:
    found = await until_available(partial(registry.get, key), get_logger())
    return None if found is None else found[0]


class Broken(Nesterov):
    """The outer optimizer of a machine that computes other bits."""

    def at(self, version: int, learning_rate: float, momentum: float) -> OuterStep:
        return super().at(version, learning_rate * 1.5, momentum)


@pytest.mark.slow
async def test_the_operator_of_a_run_in_regions_repairs_it(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under identities: a stolen syncer's key wrote into one region's log, and the founder's and the operator's into keys."""
    values = waiting_settings(tokens=10**9, shards=2, learners=2, regions__names=list(REGIONS), regions__away_s=600.0)
    async with two_regions(nursery, tmp_path, RUN, values) as cluster:
        keys, servers = cluster.keys, cluster.servers
        await cluster.begin()
        operator, bulk_url = keys.identity_file("operator"), servers[REGIONS[0]].url
        await asyncio.to_thread(attach.attach, cluster.directory, RUN, cluster.url, [bulk_url], operator)
        await some_versions(cluster, 3)
        cluster.liars = {"log", cluster.subjects.record(1)}
        async with guest(servers[REGIONS[0]], keys, "syncer-0") as thief:
            sequence = await stored(thief.link, cluster.subjects.record(1), b"no record")
        await some_versions(cluster, 2)

        assert await repaired(cluster) == 0
        said = capsys.readouterr().out
        assert f"fragment 1: message {sequence} on {cluster.subjects.record(1)}, 9 bytes: record: " in said
        assert "nothing is to be repaired" in said
        good = min(newest_applied(cluster)) - 1
        assert await repaired(cluster, fragment=[1], to_version=good, reason="unwanted") == 0
        assert f"is what version {good} was" in capsys.readouterr().out

        damage = {"toy-0": {"map": b"\x93\x01"}, "operator": dict.fromkeys(("run", "protocol", "genesis", "changes"), b"7")}
        for name, garbage in damage.items():
            async with guest(servers["nats"], keys, name) as thief:
                opening = partial(Registry.open, thief.link, cluster.subjects.bucket, create=False)
                bucket = await until_available(opening, get_logger())
                for key, value in garbage.items():
                    await until_available(partial(bucket.put, key, value), get_logger())
        assert await repaired(cluster) == 1
        found = {line.split(":")[0] for line in capsys.readouterr().out.splitlines()}
        assert found == {f"key {key}" for key in ("run", "protocol", "map", "genesis", "changes")}
        for key in ("run", "protocol", "map", "genesis", "changes"):
            assert await repaired(cluster, key=key) == 0
        await asyncio.to_thread(cluster.toys.pop(0).stop)
        again = cluster.toy(0)  # the founder sets the map again
        await cluster.until(lambda: again.member is not None, "it is there again")
        assert await repaired(cluster) == 0
        async with guest(servers["nats"], keys, "operator") as opened:
            await cluster.use_up(opened.link)
        assert (await verify.check(cluster.directory)).holds


@pytest.mark.slow
async def test_a_learner_that_folds_to_other_states_than_all_others_ends_and_says_so(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9, liveness__dead_s=scaled_s(2.0)))
    await cluster.begin()
    await some_versions(cluster, 2)
    broken = cluster.toys.pop()
    member = broken.member
    assert member is not None
    member.store.stream.optimizers[2] = Broken()
    follower = cast(OwnArrays, member.arrays)._following._follower
    follower.copies[2].replica.optimizer = Broken()
    await cluster.until(lambda: not broken.running, "it has ended")
    assert isinstance(broken.failure, MachineError)
    assert re.search(r"fragment 2: version \d+ gives another state on this machine than at toy-", str(broken.failure))
    await cluster.use_up()
